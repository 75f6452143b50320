"""Each page about an integration answers the same three questions, in one order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs" / "integrations").glob("*.md"))
HEADINGS = ["What to change", "What you get", "What differs and is refused"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_what_to_change_what_one_gets_and_what_is_refused(page: Path) -> None:
    headings = re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
    assert headings[: len(HEADINGS)] == HEADINGS
