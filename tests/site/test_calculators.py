"""The calculators of chapters: what a page shows is what Python computes, over a grid of settings,
and what the lessons say."""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from browser import MISSING, Browser
from zero_formulas import stage_bytes_sent, times_held

from playground.explain.replay.play.player import read_style
from playground.site.addresses import HERE
from playground.site.calculators.formulas import CALCULATORS
from playground.site.calculators.pages import FILES, place_calculators
from playground.site.texts import CHAPTERS
from playground.training.formulas import (
    COLLECTIVES_OF_STAGE,
    MIXED,
    STAGES,
    state_bytes,
)

GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "zero": {
        "parameters": (1e8, 1e12),
        "ranks": (1, 64, 4096),
        "stage": ("data parallel", "zero1", "zero2", "zero3"),
        "optimizer": ("Adam", "SGD with momentum", "SGD"),
        "precision": ("float32", "mixed precision", "bfloat16"),
    },
    "pipeline": {
        "stages": (1, 2, 3, 7, 12),
        "microbatches": (1, 2, 5, 8, 32),
        "schedule": ("naive", "gpipe", "1f1b"),
    },
    "allreduce": {
        "ranks": (2, 3, 5, 7, 8, 13, 16, 64, 4096),
        "bytes": (4, 256, 2**20, 2**30),
        "alpha": (1, 20),
        "bandwidth": (5, 400),
        "algorithm": ("recursive doubling", "reduce + broadcast"),
    },
}
SHOW = """
const [name, settings] = arguments, section = document.querySelector(`[data-name=${name}]`);
return settings.map((chosen) => {
  for (const control of section.querySelectorAll("input,select")) {
    const { values } = control.dataset, value = chosen[control.name];
    control.value = values ? values.split(" ").map(Number).indexOf(value) : value;
  }
  section.querySelector("select").dispatchEvent(new Event("input", { bubbles: true }));
  return {
    rows: Object.fromEntries([...section.querySelectorAll("tbody tr")].map((row) => [
      row.firstChild.textContent,
      [...row.querySelectorAll("data")].map((each) => [Number(each.value), each.textContent]),
    ])),
    marked: section.querySelector("[aria-current]").firstChild.textContent,
    result: section.querySelector(".result").textContent,
    slots: [...section.querySelectorAll("[data-slots]")].map((row) => row.dataset.slots),
  };
}).map((each) => JSON.stringify(each, (_, value) => value === Infinity ? "inf" : value));
"""
SERIOUS = """axe.run({preload: false, resultTypes: ["violations"]}).then(found => done(
    found.violations.filter(each => ["serious", "critical"].includes(each.impact))
        .map(each => `${each.id}: ${each.nodes[0].html}`)));"""


def all_settings(name: str) -> list[dict[str, Any]]:
    grid = GRIDS[name]
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def fill_slots(schedule: str, stages: int, microbatches: int) -> list[str]:
    """What each stage does in each slot: a forward takes one, a backward two. In each schedule, a
    stage goes backward when it has this many microbatches."""
    left: list[list[str]] = []
    for stage in range(stages):
        room = {"naive": 1, "gpipe": microbatches, "1f1b": stages - stage}[schedule]
        forwards, backwards = ([f"{kind}{m}" for m in range(microbatches)] for kind in "FB")
        order, held = forwards[:room], forwards[room:]
        for backward in backwards:
            order += [backward, *held[:1]]
            del held[:1]
        left.append(order)
    rows: list[list[str]] = [[] for _ in left]
    ends: dict[tuple[int, str], int] = {}
    while any(left):
        for stage, (order, row) in enumerate(zip(left, rows, strict=True)):
            if not order:
                continue
            source = stage + (-1 if order[0][0] == "F" else 1)
            ready = ends.get((source, order[0])) if 0 <= source < stages else 0
            if ready is not None:
                row += ["."] * (ready - len(row)) + [order[0]] * (1 if order[0][0] == "F" else 2)
                ends[stage, order.pop(0)] = len(row)
    length = max(map(len, rows))
    return [" ".join(row + ["."] * (length - len(row))) for row in rows]


def test_slots_are_those_of_the_program() -> None:
    """As pipeline's chapter shows what it prints, with a letter for each microbatch."""
    chapter = CHAPTERS["pipeline"].read_text(encoding="utf-8")
    letters = {f"F{m}": "abcdef"[m] for m in range(6)} | {f"B{m}": "ABCDEF"[m] for m in range(6)}
    for schedule, name in (
        ("naive", "naive"),
        ("gpipe", "gpipe"),
        ("1f1b", "one_forward_one_backward"),
    ):
        rows = fill_slots(schedule, 3, 6)
        drawn = ["".join(letters.get(slot, ".") for slot in row.split()) for row in rows]
        shown = re.search(rf"^{name}: .*\n((?:  .*\n)+)", chapter, re.MULTILINE)
        assert shown
        assert [line.split()[0] for line in shown[1].splitlines()] == drawn


def test_the_bubble_of_a_pipeline_is_what_is_drawn() -> None:
    for chosen in all_settings("pipeline"):
        stages, microbatches = chosen["stages"], chosen["microbatches"]
        for name, cells in CALCULATORS["pipeline"].compute(chosen).items():
            row = fill_slots(name, stages, microbatches)[0].split()
            assert [cells[0][0], cells[1][0]] == [
                len(row),
                pytest.approx(row.count(".") / len(row)),
            ]


def test_zero_s_memory_is_what_the_lessons_say() -> None:
    compute = CALCULATORS["zero"].compute
    for ranks in (1, 4, 64):
        chosen = {"parameters": 1e9, "ranks": ranks, "optimizer": "Adam"}
        found = compute({**chosen, "precision": "float32"})
        for stage, (*_, held, sent) in zip(COLLECTIVES_OF_STAGE, found.values(), strict=True):
            assert held[0] == pytest.approx(4e9 * times_held(stage, ranks))
            assert sent[0] == pytest.approx(stage_bytes_sent(stage, 4e9, ranks))
        found = compute({**chosen, "precision": "mixed precision"})
        for row, number in zip(found.values(), STAGES, strict=True):
            assert row[3][0] == pytest.approx(1e9 * state_bytes(MIXED, number, ranks))


@pytest.mark.parametrize("name", CALCULATORS)
def test_a_calculator_is_small_and_in_its_chapter(name: str) -> None:
    assert f"\n\n<!-- calculator: {name} -->\n\n" in CHAPTERS[name].read_text(encoding="utf-8")
    others = {f"calculator-{each}.js" for each in CALCULATORS if each != name}
    loaded = [file.read_bytes() for each, file in FILES.items() if each not in others]
    assert sum(map(len, loaded)) + len(CALCULATORS[name].render(name).encode()) <= 14 * 1024


def test_an_unknown_calculator_is_refused() -> None:
    with pytest.raises(KeyError, match="abacus"):
        place_calculators("<!-- calculator: abacus -->\n")


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_a_page_computes_what_python_does(tmp_path: Path, window: Browser) -> None:
    """The table of every setting, before and after a script has filled it; the slots; by keyboard,
    too; light on a desk, and dark on a phone."""
    places = place_calculators("".join(f"<!-- calculator: {name} -->\n" for name in CALCULATORS))
    template = (HERE / "template.html").read_text(encoding="utf-8").replace("$body", places)
    (tmp_path / "page.html").write_text(template.replace("$", ""), encoding="utf-8")
    for name, file in FILES.items():
        (tmp_path / name).write_bytes(file.read_bytes())
    (tmp_path / "site.css").write_text(read_style() + (HERE / "site.css").read_text("utf-8"))
    for each in ("settings.js", "site.js", "icon.svg"):
        (tmp_path / each).write_bytes((HERE / each).read_bytes())
    (tmp_path / "player.js").write_text("")
    axe = (files("axe_core_python") / "axe.min.js").read_text()
    window.open(tmp_path / "page.html", width=1400, color_scheme="light")
    window.until("return [...document.querySelectorAll('.result')].every(e => e.textContent)")
    assert [each for each in window.requests() if not each.startswith("file:")] == []
    texts = window.ask(
        "return [...document.querySelectorAll('.calculator table')].map(e => e.textContent)"
    )
    tables = re.findall("<table>(.*?)</table>", places, re.DOTALL)
    assert texts == [html.unescape(re.sub("<.*?>", "", table)) for table in tables]
    for name, calculator in CALCULATORS.items():
        settings = all_settings(name)
        for chosen, text in zip(settings, window.ask(SHOW, name, settings), strict=True):
            shown = json.loads(text)
            assert shown["marked"] == chosen[calculator.marked]
            assert chosen[calculator.marked] in shown["result"]
            rows = calculator.compute(chosen)
            assert [*shown["rows"]] == [*rows], chosen
            for row, cells in rows.items():
                for cell, (value, words) in zip(cells, shown["rows"][row], strict=True):
                    assert float(value) == pytest.approx(cell[0], rel=1e-12), (chosen, row)
                    assert words == cell[1], (chosen, row)
            if name == "pipeline":
                pipeline = chosen["schedule"], chosen["stages"], chosen["microbatches"]
                assert shown["slots"] == fill_slots(*pipeline), chosen
    window.ask("document.querySelector('[name=ranks]').focus()")
    window.press("\ue011", *["\ue014"] * 3)  # home, and three times to the right
    assert window.text("[data-name=zero] caption").startswith("parameters 1000 billion, ranks 8")
    # again: the last settings draw hundreds of slots, which axe would look at one by one
    window.open(tmp_path / "page.html", width=1400, color_scheme="light")
    window.ask(axe)
    for scheme, width in (("light", 1400), ("dark", 400)):
        window.resize(width=width, color_scheme=scheme)
        window.until("return [...document.querySelectorAll('svg')].length === 3")
        assert window.ask("return document.documentElement.scrollWidth <= innerWidth")
        heads = "[...document.querySelectorAll('.calculator thead')].map(each => each.offsetHeight)"
        assert max(window.ask(f"return {heads}")) < 50  # a line
        parts = "[...document.querySelectorAll('.calculator .scroll, .drawing')]"
        cut_off = f"return {parts}.filter(each => each.scrollWidth > each.clientWidth + 1).length"
        assert window.ask(cut_off) == 0
        decades = window.ask(
            "return [...document.querySelectorAll('.end')].map(e => e.textContent)"
        )
        assert decades[:3] == ["100 µs", "1 ms", "10 ms"]
        assert window.ask_later(SERIOUS) == []
    assert window.complaints() == []
