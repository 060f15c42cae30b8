"""What a notebook shows of a cell: the values of all ranks side by side. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from playground.play.cells import Outcome
from playground.play.words import alike, cut, label


def side_by_side(outcomes: Mapping[int, Outcome]) -> str:
    """The values of all ranks. Equal ones are shown once, with their ranks."""
    shown = {
        rank: one.html or f"<pre>{escape(cut(str(one.value), rank))}</pre>"
        for rank, one in outcomes.items()
        if one.html or one.value is not None
    }
    parts = (
        f'<figure style="margin:0"><figcaption>{label(ranks)}</figcaption>{html}</figure>'
        for html, ranks in alike(shown).items()
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:1.5em">{"".join(parts)}</div>'
