"""Sizes as a name map writes them: `heads / groups * head_size`. Products and quotients of numbers and of options, from
left to right, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

_MAX_TERMS = 16
MAX_SIZE = 1 << 48


class SizeExpression:
    """A product and quotient of numbers and options, parsed from TOML."""

    def __init__(self, value: object) -> None:
        """Parses a number or text such as `hidden / heads`. Raises ValueError, which says what is wrong, for others."""
        if type(value) is int and not 0 < value <= MAX_SIZE:
            raise ValueError(f"{value} is not a number from 1 to {MAX_SIZE}")
        self.text = str(value)
        words = self.text.split()
        terms, operators = words[::2], ["*", *words[1::2]]
        is_product = len(words) % 2 == 1 and len(terms) <= _MAX_TERMS and set(operators) <= {"*", "/"}
        if type(value) not in {int, str} or not is_product:
            raise ValueError(
                f"{value!r:.200} is not a size: write options and numbers with * or / between them, and spaces"
            )
        self._terms = list(zip(operators, map(self._term, terms), strict=True))
        """Each operator, `*` or `/`, with the operand behind it. The first operand is multiplied by 1."""

    def _term(self, term: str) -> str | int:
        is_number = term.isascii() and term.isdecimal() and len(term) <= len(str(MAX_SIZE))
        if not is_number and not term.isidentifier():
            raise ValueError(f"{self.text!r:.200} has {term!r:.80}, which is neither an option's name nor a number")
        return int(term) if is_number else term

    @property
    def names(self) -> list[str]:
        """The options that the expression names."""
        return [term for _, term in self._terms if isinstance(term, str)]

    def value(self, option: Callable[[str], int]) -> int:
        """Returns the number, given the options by name.

        Raises ValueError, which says what is wrong, if a quotient is not a whole number, or if the result up to any
        term, from left to right, is not from 1 to MAX_SIZE.
        """
        result = 1
        for operator, term in self._terms:
            number = option(term) if isinstance(term, str) else term
            if operator == "/" and (number == 0 or result % number):
                raise ValueError(f"{self._with_values(option)} is not a whole number")
            result = result // number if operator == "/" else result * number
            if not 0 < result <= MAX_SIZE:
                raise ValueError(f"{self._with_values(option)} is not a number from 1 to {MAX_SIZE}")
        return result

    def _with_values(self, option: Callable[[str], int]) -> str:
        return self.text + "".join(f", {name} {option(name)}" for name in self.names)
