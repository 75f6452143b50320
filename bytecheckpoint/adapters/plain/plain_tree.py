"""Which attributes an object has, told without asking it: `__getattr__` may run code, or make what it is asked for."""

from __future__ import annotations


def has_attributes(value: object, *names: str) -> bool:
    """True if an object or its class has all of these. Dicts, lists and tuples are data, whatever their class adds."""
    if isinstance(value, dict | list | tuple):
        return False
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:  # slots only
        own = {}
    return all(name in own or any(name in vars(cls) for cls in type(value).__mro__) for name in names)
