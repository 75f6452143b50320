"""Options of the saves of a candidate, by its name."""

from __future__ import annotations

import bytecheckpoint as bcp


def save_options(candidate: str) -> bcp.SaveOptions:
    """Returns a lazy snapshot for `bcp-lazy-async`, and the defaults for all others."""
    return bcp.SaveOptions(snapshot="lazy" if "lazy" in candidate.split("-") else "auto")
