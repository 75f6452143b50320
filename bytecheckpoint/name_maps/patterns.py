"""Names of tensors with numbers in them, `layers.{layer}.mlp.weight`, and names around names of parameters,
`optimizer.state.{name}.exp_avg`. Names are compared part by part between the dots, so that no pattern can take long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_MAX_DIGITS = 9


class Pattern(str):
    """A name with fields. A field fills the place between two dots and means a number."""

    __slots__ = ()

    @property
    def parts(self) -> list[str]:
        """The texts between the dots; `{layer}` for a field."""
        return self.split(".")

    @property
    def fields(self) -> list[str]:
        """The names of the fields, in order."""
        return [part[1:-1] for part in self.parts if part.startswith("{")]

    def without(self, field: str) -> Pattern:
        """Returns the pattern without this field."""
        return Pattern(".".join(part for part in self.parts if part != f"{{{field}}}"))

    def fill(self, numbers: Mapping[str, int]) -> str:
        """Returns the name for these numbers."""
        return ".".join(str(numbers[part[1:-1]]) if part.startswith("{") else part for part in self.parts)

    def match(self, name_parts: Sequence[str]) -> dict[str, int] | None:
        """Returns the numbers in a name, by field; None if it does not match. The name must have as many parts as the
        pattern.
        """
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


def parse_pattern(text: str) -> Pattern:
    """Returns the pattern that the text spells. Raises ValueError, which says what is wrong, for any other text."""
    pattern = Pattern(text)
    if not all(pattern.parts):
        raise ValueError(f"{text!r:.200} has nothing between two dots, or at an end")
    for part in pattern.parts:
        is_field = part.startswith("{") and part.endswith("}") and part[1:-1].isidentifier()
        if not is_field and ("{" in part or "}" in part):
            raise ValueError(
                f"{text!r:.200} has {part!r:.80}: a field fills the place between two dots, as in `a.{{layer}}.b`"
            )
    if len(set(pattern.fields)) < len(pattern.fields):
        raise ValueError(f"{text!r:.200} has a field twice")
    return pattern


class NameTemplate(str):
    """A name that contains a parameter's: `optimizer.state.{name}.exp_avg`."""

    __slots__ = ()

    @property
    def before(self) -> str:
        return self.partition("{name}")[0]

    @property
    def is_of_model(self) -> bool:
        """True if it names the parameter itself, and not something about it."""
        return self.endswith("{name}") and self.count(".") <= 1

    def fill(self, name: str) -> str:
        """Returns the FQN for the name of a parameter."""
        return self.replace("{name}", name)

    def find_name(self, fqn: str) -> str | None:
        """Returns the name of the parameter in an FQN; None if the FQN does not match."""
        before, _, after = self.partition("{name}")
        matches = fqn.startswith(before) and fqn.endswith(after)
        return fqn[len(before) : len(fqn) - len(after)] or None if matches else None


def parse_template(text: str) -> NameTemplate:
    """Returns the template that the text spells. Raises ValueError, which says what is wrong, unless the text has
    `{name}` once, and no other brace.
    """
    before, found, after = text.partition("{name}")
    if not found or "{" in before + after or "}" in before + after:
        raise ValueError(f"{text!r:.200} has to have {{name}} in it, once, and no other field")
    return NameTemplate(text)


def shape_of_name(name_parts: Sequence[str]) -> tuple[str, ...]:
    """Returns a key that a pattern shares with all names that match it: numbers and fields count alike."""
    return tuple("#" if part.startswith("{") or is_number(part) else part for part in name_parts)


def is_number(text: str) -> bool:
    """Returns True for a number as names have it: at most 9 digits, without leading zeros."""
    is_short = text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
    return is_short and (text == "0" or not text.startswith("0"))
