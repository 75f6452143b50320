"""The error of an integration whose framework is not installed."""

from __future__ import annotations


def missing_framework(module: str, requirement: str) -> ImportError:
    """Returns the error for `bytecheckpoint.integrations.<module>`; `requirement` is what pip is to install."""
    return ImportError(
        f"bytecheckpoint.integrations.{module} needs a package that is not installed. Run: pip install '{requirement}'"
    )
