"""Random number generators in a value of a rank: a checkpoint has their states, a load sets those that are there."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from bytecheckpoint.adapters.expectation import Problem, not_stored
from bytecheckpoint.manifest.plain_wire import MAX_DEPTH, join_fqn, too_deep

Generator: TypeAlias = (
    torch.Generator | np.random.Generator | np.random.BitGenerator | np.random.RandomState | random.Random
)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
_DICTS = (dict, OrderedDict)
_CONTAINERS = (*_DICTS, list, tuple)
_ABSENT = object()

_REFUSALS = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError)
"""Errors of torch, numpy and Python for a state that the generator cannot take."""


class FoundGenerator(NamedTuple):
    """A generator in a tree."""

    keys: tuple[Any, ...]
    """Keys and indices that lead to it."""
    generator: Generator


def is_generator(value: Any) -> bool:
    """Returns True for a random number generator of torch, numpy or Python that has a state."""
    return isinstance(value, _GENERATORS) and not isinstance(value, random.SystemRandom)


def generators_in(value: Any, fqn: str) -> list[FoundGenerator]:
    """Returns all generators in a tree of dicts, lists and tuples.

    Raises CheckpointSaveError (unsupported_value) for a tree that contains itself or is nested deeper than MAX_DEPTH.
    """
    return list(_found(value, fqn, ()))


def _found(value: Any, fqn: str, keys: tuple[Any, ...]) -> Iterator[FoundGenerator]:
    if is_generator(value):
        yield FoundGenerator(keys, value)
    if type(value) in _CONTAINERS:
        if len(keys) >= MAX_DEPTH:
            raise too_deep(fqn)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _found(item, join_fqn(fqn, key), (*keys, key))


def with_states(value: Any, fqn: str) -> Any:
    """Returns the tree with states in place of its generators; the tree itself if it has no generators."""
    return _with_states(value) if generators_in(value, fqn) else value


def _with_states(value: Any) -> Any:
    if is_generator(value):
        return _state_of(value)
    if type(value) in _DICTS:
        return type(value)((key, _with_states(item)) for key, item in value.items())
    return type(value)(map(_with_states, value)) if type(value) in (list, tuple) else value


def _state_of(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return _bits_of(generator).state


def set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        _bits_of(generator).state = state


def _bits_of(generator: np.random.Generator | np.random.BitGenerator) -> Any:
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


def problems_of(generators: list[FoundGenerator], saved: Any, fqn: str) -> list[Problem]:
    """Returns why generators of the state below this FQN cannot be set from the tree that was saved."""
    problems: list[Problem] = []
    for keys, generator in generators:
        name = ".".join([fqn, *map(str, keys)])
        state = at(saved, keys)
        if state is _ABSENT:
            problems.append(not_stored(name))
            continue
        try:
            set_state(_twin(generator), state)
        except _REFUSALS as error:
            text = f"{name}: what was saved is not the state of a {_kind(generator)} ({error})"
            problems.append(Problem("conflict", name, text))
    return problems


def _twin(generator: Generator) -> Generator:
    """Returns a new generator to try a state of this one on; of a `np.random.Generator` only a new bit generator."""
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device)
    if isinstance(generator, random.Random):
        return random.Random()  # noqa: S311  nothing secret
    if isinstance(generator, np.random.RandomState):
        return np.random.RandomState(getattr(np.random, generator.get_state(legacy=False)["bit_generator"])())
    return type(_bits_of(generator))()  # type: ignore[no-any-return]


def _kind(generator: Generator) -> str:
    if isinstance(generator, torch.Generator):
        return f"torch.Generator on {generator.device}"
    inner = f" of {type(generator.bit_generator).__name__}" if isinstance(generator, np.random.Generator) else ""
    return f"{type(generator).__name__}{inner}"


def at(tree: Any, keys: tuple[Any, ...]) -> Any:
    """Returns the part of a tree at a path of keys, or a marker for which `is_there` is False if it leads nowhere."""
    for key in keys:
        is_index = type(tree) in (list, tuple) and type(key) is int and 0 <= key < len(tree)
        if not (key in tree if isinstance(tree, dict) else is_index):
            return _ABSENT
        tree = tree[key]
    return tree


def is_there(part: Any) -> bool:
    """Returns True if `at` has found a part of the tree."""
    return part is not _ABSENT


def put_back(tree: Any, generators: list[FoundGenerator]) -> Any:
    """Returns the tree with generators in place of states, also where a dict lacks one. Changes its dicts and lists."""
    for keys, generator in generators:
        if is_there(at(tree, keys)) or (keys and isinstance(at(tree, keys[:-1]), dict)):
            tree = _replaced(tree, keys, generator)
    return tree


def _replaced(tree: Any, keys: tuple[Any, ...], value: Any) -> Any:
    """Returns the tree with the value at the end of a path of keys. Changes dicts and lists; makes tuples anew."""
    if not keys:
        return value
    first, *rest = keys
    item = _replaced(tree[first], tuple(rest), value) if rest else value
    if type(tree) is tuple:
        return (*tree[:first], item, *tree[first + 1 :])
    tree[first] = item
    return tree
