"""The fixtures of conversions."""

from program_calls import call

__all__ = ["call"]
