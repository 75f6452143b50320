"""Numbers of elements as a name map writes them: `heads / groups * head_size`. Products and quotients of numbers and of
options, from left to right, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

_MAX_TERMS = 16
MAX_SIZE = 1 << 48


class SizeExpression(NamedTuple):
    """A product and quotient of numbers and options."""

    text: str
    terms: tuple[tuple[str, str | int], ...]
    """`*` or `/`, and what by. The first is multiplied with 1."""

    @property
    def names(self) -> tuple[str, ...]:
        """The options in it."""
        return tuple(term for _, term in self.terms if isinstance(term, str))

    def value(self, option: Callable[[str], int]) -> int:
        """The number, given the options by name.

        Raises ValueError, which says what is wrong, where a quotient is no whole number, or the result is not from 1
        to MAX_SIZE.
        """
        result = 1
        for operator, term in self.terms:
            number = option(term) if isinstance(term, str) else term
            if operator == "/" and (number == 0 or result % number):
                raise ValueError(f"{self._with_values(option)} is no whole number")
            result = result // number if operator == "/" else result * number
            if not 0 < result <= MAX_SIZE:
                raise ValueError(f"{self._with_values(option)} is not a number from 1 to {MAX_SIZE}")
        return result

    def _with_values(self, option: Callable[[str], int]) -> str:
        values = {name: option(name) for name in self.names}
        return self.text + "".join(f", {name} {value}" for name, value in values.items())


def parse_size(value: str | int) -> SizeExpression:
    """Raises ValueError, which says what is wrong, for what is no size."""
    if isinstance(value, int):
        if not 0 < value <= MAX_SIZE:
            raise ValueError(f"{value} is not a number from 1 to {MAX_SIZE}")
        return SizeExpression(str(value), (("*", value),))
    words = value.split()
    terms, operators = words[::2], ["*", *words[1::2]]
    if len(words) % 2 == 0 or len(terms) > _MAX_TERMS or not set(operators) <= {"*", "/"}:
        raise ValueError(f"{value!r:.200} is no size: write options and numbers with * or / between them, and spaces")
    parsed: list[str | int] = []
    for term in terms:
        is_number = term.isascii() and term.isdecimal() and len(term) <= len(str(MAX_SIZE))
        if not is_number and not term.isidentifier():
            raise ValueError(f"{value!r:.200} has {term!r:.80}, which is no option's name and no number")
        parsed.append(int(term) if is_number else term)
    return SizeExpression(value, tuple(zip(operators, parsed, strict=True)))
