"""Names of tensors with numbers in them, `layers.{layer}.mlp.weight`: which names such a pattern means, and the name
that it gives for numbers. Compared part by part between the dots, so that no pattern can take long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

_MAX_DIGITS = 9


class Pattern(NamedTuple):
    """A name with fields, each of which is all that stands between two dots: a number."""

    parts: tuple[str, ...]
    """Between the dots; of a field `{layer}`."""

    @property
    def text(self) -> str:
        return ".".join(self.parts)

    @property
    def fields(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(part[1:-1] for part in self.parts if part.startswith("{"))

    def without(self, field: str) -> Pattern:
        """The same without the part that this field is."""
        return Pattern(tuple(part for part in self.parts if part != f"{{{field}}}"))

    def fill(self, numbers: Mapping[str, int]) -> str:
        """The name for these numbers."""
        return ".".join(str(numbers[part[1:-1]]) if part.startswith("{") else part for part in self.parts)

    def match(self, name_parts: Sequence[str]) -> dict[str, int] | None:
        """The numbers in a name, given as what stands between its dots, that this pattern means; else None."""
        numbers = {}
        for part, found in zip(self.parts, name_parts, strict=True):
            if not part.startswith("{"):
                if part != found:
                    return None
            elif not is_number(found):
                return None
            else:
                numbers[part[1:-1]] = int(found)
        return numbers


class Around(NamedTuple):
    """What stands before and after the name of a parameter where something of it has a name:
    `optimizer.state.{name}.exp_avg`.
    """

    before: str
    after: str

    @property
    def is_of_model(self) -> bool:
        """Whether it is the parameter itself that has this around it, and not something about it."""
        return not self.after and self.before.count(".") <= 1

    def around(self, name: str) -> str:
        return self.before + name + self.after

    def inner(self, fqn: str) -> str | None:
        """The name in an FQN that has this around it; else None."""
        is_around = fqn.startswith(self.before) and fqn.endswith(self.after)
        name = fqn[len(self.before) : len(fqn) - len(self.after)] if is_around else ""
        return name or None


def parse_pattern(text: str) -> Pattern:
    """Raises ValueError, which says what is wrong, for text that is no pattern."""
    parts = tuple(text.split("."))
    if not all(parts):
        raise ValueError(f"{text!r:.200} has nothing between two dots, or at an end")
    pattern = Pattern(parts)
    for part in parts:
        is_field = part.startswith("{") and part.endswith("}") and part[1:-1].isidentifier()
        if not is_field and ("{" in part or "}" in part):
            raise ValueError(
                f"{text!r:.200} has {part!r:.80}: a field is all that stands between two dots, `{{layer}}`"
            )
    if len(set(pattern.fields)) < len(pattern.fields):
        raise ValueError(f"{text!r:.200} has a field twice")
    return pattern


def parse_around(text: str) -> Around:
    """Raises ValueError, which says what is wrong, for text that does not have `{name}` once."""
    before, found, after = text.partition("{name}")
    if not found or "{" in before + after or "}" in before + after:
        raise ValueError(f"{text!r:.200} has to have {{name}} in it, once, and no other field")
    return Around(before, after)


def shape_of_name(name_parts: Sequence[str]) -> tuple[str, ...]:
    """The same for all names that a pattern means, and for the pattern's own parts: numbers and fields do not count."""
    return tuple("#" if part.startswith("{") or is_number(part) else part for part in name_parts)


def is_number(text: str) -> bool:
    """Whether this is a number as it stands in names: without leading zeros."""
    is_short = text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
    return is_short and (text == "0" or not text.startswith("0"))
