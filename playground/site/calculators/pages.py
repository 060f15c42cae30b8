"""Calculators in the pages of chapters. Does not import torch."""

from __future__ import annotations

import re
from pathlib import Path

from playground.site.calculators.formulas import CALCULATORS

STYLE, SCRIPT = "calculators.css", "calculators.js"
PLACE = re.compile(r"<!-- calculator: (\w+) -->\n")


FILES = {
    name: Path(__file__).parent / name
    for name in (STYLE, SCRIPT, *(f"calculator-{name}.js" for name in CALCULATORS))
}
"""What their pages load, by its name on the site."""


def place_calculators(body: str) -> str:
    """The body of a page with the calculators that it names, their style and their scripts. Raises
    `KeyError` for an unknown one."""
    names = PLACE.findall(body)
    if not names:
        return body
    scripts = (SCRIPT, *(f"calculator-{name}.js" for name in names))
    loaded = "".join(f'<script src="{script}" defer></script>\n' for script in scripts)
    placed = PLACE.sub(lambda found: CALCULATORS[found[1]].render(found[1]), body)
    return f'<link rel="stylesheet" href="{STYLE}">\n{placed}{loaded}'
