"""In a rank that stays: a value as a notebook shows it, a small tensor as a table, and figures of
matplotlib as pictures. Does not import torch before it is in a rank."""

from __future__ import annotations

import base64
import io
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from html import escape
from typing import Any

from playground.play.cells import Outcome, guarded, namespace

MOST_ROWS, MOST_COLUMNS = 12, 16
"""Size of the largest tensor that is shown as a table."""


def with_html(
    run: Callable[..., Outcome], rank: int, size: int, number: int, source: str
) -> Outcome:
    """Run a cell, as `run` does. The outcome has its value and its figures as HTML."""
    os.environ["MPLBACKEND"] = "agg"  # the notebook's own draws in the notebook's process
    warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive", UserWarning)
    outcome = run(rank, size, number, source)
    shown = guarded(lambda: show(outcome.value is not None))
    return replace(outcome, html=str(shown.value or ""), error=outcome.error or shown.error)


def show(has_value: bool) -> str:
    """The value of the cell that has ended, if there is one, and the figures."""
    value = to_html(vars(namespace).get("_")) if has_value else ""
    return "".join([value, *draw_figures()])


def to_html(value: Any) -> str:
    """Empty for a value that is best shown as text."""
    import torch

    if not isinstance(value, torch.Tensor):
        has_form = hasattr(value, "_repr_html_") and not isinstance(value, type)
        return (value._repr_html_() or "") if has_form else ""
    if value.layout is not torch.strided or value.dim() not in (1, 2) or not value.numel():
        return ""
    rows = value.detach().reshape(-1, value.shape[-1]).tolist()
    if len(rows) > MOST_ROWS or len(rows[0]) > MOST_COLUMNS:
        return ""
    kind = str(value.dtype).removeprefix("torch.")
    caption = f"{kind} {[*value.shape]}"
    lines = ("".join(f"<td>{to_text(each)}</td>" for each in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table style="white-space:nowrap"><caption>{caption}</caption>{body}</table>'


def to_text(number: Any) -> str:
    return f"{number:.4g}" if isinstance(number, float) else escape(str(number))


def draw_figures() -> list[str]:
    """The figures that are open, as pictures; none is open after that."""
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    pictures = []
    for number in pyplot.get_fignums() if pyplot else ():
        drawn = io.BytesIO()
        pyplot.figure(number).savefig(drawn, format="png", bbox_inches="tight")
        pyplot.close(number)
        data = base64.b64encode(drawn.getvalue()).decode()
        pictures.append(f'<img src="data:image/png;base64,{data}">')
    return pictures
