"""Self-contained pages: their style, and one script that searches and sorts tables. The browser runs
no other script, by the hash in the policy of the page, and asks no network. Without scripts all tables are there.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

from bytecheckpoint.errors import rest_text

from ..terminal import TableShape
from .elements import color, table, tag, text

_MAX_LEGEND = 20

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --line: #8886; --mark: #fff3bf; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16191d; --ink: #c9ced6; --mark: #3d3517; }
  svg, .chip { filter: invert(.9) hue-rotate(180deg); }
  svg { color: #3c4043; }
}
body { font: 14px/1.45 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 1.3em; overflow-wrap: anywhere; margin-bottom: 0; }
h2 { font-size: 1.1em; margin-top: 2em; border-bottom: 1px solid var(--line); }
h3 { font-size: 1em; overflow-wrap: anywhere; }
a { color: inherit; text-decoration-color: var(--line); }
table { border-collapse: collapse; margin: .6em 0; }
th { text-align: left; font-weight: 600; white-space: nowrap; }
th, .rest { color: color-mix(in srgb, var(--ink) 72%, var(--paper)); }
td, th { padding: .15em 1em .15em 0; vertical-align: top; }
td:first-child { font-family: ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; min-width: 9em; }
tr:target { background: var(--mark); }
th button { all: unset; cursor: pointer; }
th button:focus-visible { outline: 2px solid; }
th button::after { content: " \\2195"; opacity: .45; }
th[aria-sort=ascending] button::after { content: " \\2191"; opacity: 1; }
th[aria-sort=descending] button::after { content: " \\2193"; opacity: 1; }
input { font: inherit; width: min(24em, 90%); padding: .3em .6em; color: inherit; background: transparent;
  border: 1px solid var(--line); border-radius: 4px; }
output { margin-left: .8em; }
summary h2 { display: inline-block; border: none; margin-top: 1em; cursor: pointer; }
.scroll { overflow-x: auto; }
.whole { white-space: nowrap; }
.right { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; display: block; margin: .6em 0; }
svg text { font: 11px system-ui, sans-serif; fill: #111; pointer-events: none; }
svg text.small { font-size: 10px; fill: currentColor; }
svg text.end { text-anchor: end; }
svg text.middle { text-anchor: middle; }
.edge { stroke: #fff; stroke-width: 1; }
.tick { opacity: .25; }
.chip { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }
.legend span { margin-right: 1.2em; overflow-wrap: anywhere; }
@media (max-width: 640px) {
  body { margin: 1em auto; }
  svg.wide { min-width: 640px; }
}
"""

# No < and no ampersand: the page is well-formed XML too.
_SCRIPT = """
"use strict";
const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const times = { "\\u00b5s": 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600 };
function numberOf(shown) {
  const found = /^([-+]?[0-9.,]+(?:e[-+]?[0-9]+)?) ?([^ /]*)/i.exec(shown);
  if (!found) return NaN;
  const power = units.indexOf(found[2]);
  return parseFloat(found[1].replaceAll(",", "")) * (power > 0 ? 1024 ** power : times[found[2]] || 1);
}
function compare(a, b, isNumber) {
  if (!isNumber) return a.localeCompare(b, undefined, { numeric: true });
  const x = numberOf(a), y = numberOf(b);
  return isNaN(x) ? (isNaN(y) ? 0 : -1) : isNaN(y) ? 1 : x - y;
}
function sort(table, column) {
  const head = table.tHead.rows[0].cells[column];
  const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const cell of table.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  const isNumber = head.classList.contains("right");
  const shown = row => row.cells[column].textContent;
  const rows = [...table.tBodies[0].rows].sort((a, b) => sign * compare(shown(a), shown(b), isNumber));
  table.tBodies[0].append(...rows);
}
function search(table) {
  const rows = [...table.tBodies[0].rows];
  const input = document.createElement("input"), count = document.createElement("output");
  input.type = "search";
  input.placeholder = "search " + rows.length.toLocaleString("en") + " rows";
  input.setAttribute("aria-label", input.placeholder);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(" ");
    let found = 0;
    for (const row of rows) {
      const shown = row.textContent.toLowerCase();
      row.hidden = !words.every(word => shown.includes(word));
      found += row.hidden ? 0 : 1;
    }
    count.textContent = input.value ? found.toLocaleString("en") + " found" : "";
  });
  table.parentNode.before(input, count);
}
for (const table of document.querySelectorAll("table.list")) {
  if (2 > table.tBodies[0].rows.length) continue;
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    const button = document.createElement("button");
    button.append(...cell.childNodes);
    button.addEventListener("click", () => sort(table, column));
    cell.append(button);
  });
  if (table.tBodies[0].rows.length > 8) search(table);
}
function openTarget() {
  const target = document.getElementById(location.hash.slice(1));
  const folded = target ? target.closest("details") : null;
  if (!folded) return;
  folded.open = true;
  target.scrollIntoView({ block: "center" });
}
addEventListener("hashchange", openTarget);
openTarget();
"""


def whole_page(title: str, *content: str) -> str:
    """Returns the page, which is well-formed XML too."""
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = tag(
        "head",
        {},
        tag("meta", {"charset": "utf-8"}),
        tag("meta", {"http-equiv": "Content-Security-Policy", "content": policy}),
        tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        tag("title", {}, text(title)),
        tag("style", {}, _STYLE),
    )
    body = tag("body", {}, *content, tag("script", {}, _SCRIPT))
    return f"<!DOCTYPE html>\n{tag('html', {'lang': 'en'}, head, body)}\n"


def section(title: str, *content: str) -> str:
    return tag("section", {}, tag("h2", {}, text(title)), *content)


def folded(title: str, *content: str) -> str:
    """Returns a section that a click opens."""
    return tag("details", {}, tag("summary", {}, tag("h2", {}, text(title))), *content)


def note(what: str) -> str:
    return tag("p", {"class": "rest"}, text(what))


def note_of_rest(num_items: int, num_shown: int, after: str = "") -> str:
    """Returns a note of how many items are left out, or nothing where all are shown. `after` is plain text that follows
    "... and 5 more" at once, so it begins with a space.
    """
    rest = rest_text(num_items, num_shown, "... ")
    return note(rest + after) if rest else ""


def listing(shape: TableShape, items: Sequence[Any], *, limit: int, anchors: Sequence[str] | None = None) -> str:
    """Returns a table that can be searched and sorted: at most `limit` rows, and how many are left out."""
    shown = table(shape.columns, map(shape.cells, items[:limit]), kind="list", anchors=anchors)
    return shown + note_of_rest(len(items), limit)


def legend(names: Sequence[str]) -> str:
    """Returns the names of things that have colours, in the order of these colours."""
    chips = [
        tag("span", {}, tag("i", {"class": "chip", "style": f"background:{color(number)}"}, ""), text(name))
        for number, name in enumerate(names[:_MAX_LEGEND])
    ]
    return tag("p", {"class": "legend"}, *chips, text(rest_text(len(names), _MAX_LEGEND, "... ")))
