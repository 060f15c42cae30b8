"""A calculator: controls, and a table of results. Does not import torch."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Context

Value = float | str
Chosen = Mapping[str, Value]
"""Values of a calculator's controls, by name."""
Cell = tuple[float, str]
"""A result, and the same with its unit."""


def digits(value: float) -> str:
    """Three significant digits, rounded as JavaScript does."""
    return f"{float(Context(prec=3, rounding=ROUND_HALF_UP).create_decimal_from_float(value)):g}"


def scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """With the largest unit of which there is at least one, or the smallest."""
    scale, unit = next((each for each in units if value >= each[0]), units[-1])
    return f"{digits(value / scale)} {unit}"


@dataclass(frozen=True)
class Control:
    """A slider, or a choice among names."""

    name: str
    label: str
    values: tuple[Value, ...]
    first: Value
    """The value it begins with."""
    show: Callable[[float], str] = "{:g}".format

    def text(self, value: Value) -> str:
        return value if isinstance(value, str) else self.show(value)

    def render(self) -> str:
        if isinstance(self.first, str):
            options = (
                f"<option{' selected' if value == self.first else ''}>{value}</option>"
                for value in self.values
            )
            return (
                f'<label>{self.label}<select name="{self.name}">{"".join(options)}</select></label>'
            )
        values = " ".join(map(repr, self.values))
        texts = "|".join(map(self.text, self.values))
        at, text = self.values.index(self.first), self.text(self.first)
        return (
            f'<label>{self.label} <output>{text}</output><input type="range" name="{self.name}" '
            f'min="0" max="{len(self.values) - 1}" value="{at}" aria-valuetext="{text}" '
            f'data-values="{values}" data-texts="{texts}"></label>'
        )


@dataclass(frozen=True)
class Calculator:
    """A calculator of a chapter: its controls, and the rows that it computes from them."""

    title: str
    controls: tuple[Control, ...]
    columns: tuple[str, ...]
    """Headings: of the rows' names, and of the results."""
    compute: Callable[[Chosen], dict[str, list[Cell]]]
    """The results of each row."""
    marked: str
    """The control whose value is the name of a row."""
    note: str

    @property
    def first(self) -> Chosen:
        return {control.name: control.first for control in self.controls}

    def render(self, name: str) -> str:
        chosen = self.first
        rows = ""
        for row, cells in self.compute(chosen).items():
            mark = ' aria-current="true"' if row == chosen[self.marked] else ""
            named = zip(self.columns[1:], cells, strict=True)
            results = (
                f'<td data-column="{column}"><data value="{value!r}">{text}</data></td>'
                for column, (value, text) in named
            )
            rows += f'<tr{mark}><th scope="row">{row}</th>{"".join(results)}</tr>\n'
        head = "".join(f'<th scope="col">{column}</th>' for column in self.columns)
        controls = "".join(f"{control.render()}\n" for control in self.controls)
        settings = ", ".join(
            f"{control.label.lower()} {control.text(control.first)}" for control in self.controls
        )
        return f"""<section class="calculator" data-name="{name}" aria-labelledby="about-{name}">
<p id="about-{name}"><b>{html.escape(self.title)}</b></p>
<fieldset hidden><legend>Calculator</legend>
{controls}</fieldset>
<p class="result" role="status"></p>
<div class="drawing" tabindex="0" role="group" aria-label="Drawing" hidden></div>
<div class="scroll stack" tabindex="0"><table><caption>{settings}</caption>
<thead><tr>{head}</tr></thead>
<tbody>
{rows}</tbody></table></div>
<p class="note">{self.note}</p>
</section>
"""
