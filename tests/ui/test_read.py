"""Chapters in the terminal: every one, in 80 columns, with its code as it is; and they travel with
the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest
from fixtures import Run
from terminal import open_terminal
from widths import too_wide

from playground.base.remote import ROOT
from playground.lessons import PARTS
from playground.site.chapters import chapter_text
from playground.site.texts import CHAPTERS, PAGES

FENCE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)


def test_a_chapter_is_shown_whole(run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    for name in ("p2p", "ladder", "glossary"):
        shown = run_cli("read", name)
        assert (shown.code, shown.err, too_wide(shown.out)) == (0, "", [])
        text = CHAPTERS[name].read_text(encoding="utf-8")
        assert text.splitlines()[0].removeprefix("# ").replace("`", "") in " ".join(
            shown.out.split()
        )
        assert "\x1b" not in shown.out
        letters = "".join(shown.out.split())
        code = [line for block in FENCE.findall(text) for line in block.splitlines()[1:-1]]
        assert [line for line in code if "".join(line.split()) not in letters] == []
        assert shown.out.count("…") == text.count("…")  # of a cell nothing is cut off


def test_outcomes_are_shown_if_they_are_asked_for(run_cli: Run) -> None:
    shown, answered = (
        " ".join(run_cli("read", "collectives", *more).out.split()) for more in ([], ["--answers"])
    )
    outcome = "Nothing hangs, and all results are wrong"
    assert outcome not in shown
    outcomes = CHAPTERS["collectives"].read_text(encoding="utf-8").count("<summary>")
    command = "python -m playground read collectives --answers"
    assert len(re.findall(rf"\((?:Outcome|Answer): {command}\)", shown)) == outcomes > 1
    assert outcome in answered
    assert len(re.findall("(?:Outcome|Answer):", answered)) == outcomes
    assert "You need" in shown
    assert "You need" not in answered, "the outcomes, and nothing else"
    assert run_cli("read", "glossary", "--answers").err == (
        "playground: --answers: glossary has no outcomes: leave it out\n"
    )


def test_code_and_tables_are_as_wide_as_the_terminal(
    run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "130")
    shown = run_cli("read", "ddp").out.splitlines()
    text = CHAPTERS["ddp"].read_text(encoding="utf-8")
    code = [line for block in FENCE.findall(text) for line in block.splitlines()[1:-1]]
    wide = [line for line in code if 80 < len(line) <= 126]
    assert wide
    there = {line.strip() for line in shown}
    assert [line for line in wide if line.strip() not in there] == []
    begin = next(line for line in shown if line.startswith("Rank 0 prints for all ranks."))
    assert 60 < len(begin) <= 80


@pytest.mark.parametrize("name", ["play", "exercises"])
def test_pages_of_commands_are_read(run_cli: Run, name: str) -> None:
    assert run_cli("read", name).code == 0


def test_a_link_says_what_to_type(run_cli: Run) -> None:
    shown = " ".join(run_cli("read", "allreduce").out.split())
    assert "You need p2p: messages, batches, and the time" in shown
    assert "every rank has a gradient" in shown.split("In data parallelism ")[1][:30]
    assert "first phase is ring_reduce_scatter (playground/lessons/all_reduce/lesson.py):" in shown
    assert "all_reduce.py (playground/algorithms/all_reduce.py)" in shown
    assert "hosts and memory (read hosts_and_memory)" in shown
    every = "".join(chapter_text(name) for name in CHAPTERS)
    assert re.findall(r"(?<!!)\[[^]]*\]\((?!https?:).*?\)", re.sub(FENCE, "", every)) == []


def test_the_path_is_read_from_one_chapter_to_the_next() -> None:
    path = [lesson.name for lesson in next(iter(PARTS.values()))]
    for name, after in pairwise(path):
        assert chapter_text(name).endswith(f"\nNext: `python -m playground read {after}`\n")
    assert chapter_text("scale").endswith("\nNext: `python -m playground read break`\n")


def test_there_is_a_pager_on_a_terminal_and_torch_is_not_imported(tmp_path: Path) -> None:
    paged = tmp_path / "paged"
    pager = tmp_path / "pager"
    pager.write_text(f"#!/bin/sh\nexec cat > {paged}\n")
    pager.chmod(0o700)
    read = "import sys; sys.modules['torch'] = None; from playground.app import main; main()"
    with open_terminal() as terminal:
        subprocess.run(
            [sys.executable, "-c", read, "read", "p2p"],
            env={**os.environ, "PAGER": str(pager), "TERM": "xterm"},
            stdin=terminal.stream,
            stdout=terminal.stream,
            check=True,
        )
    assert "point-to-point" in paged.read_text()


def test_a_chapter_says_where_its_program_is(
    run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, folder in (("allreduce", "all_reduce"), ("p2p", "p2p")):
        first = run_cli("read", name).out.partition("\n")[0].removeprefix("lesson.py: ")
        assert Path(first).resolve() == ROOT / "playground" / "lessons" / folder / "lesson.py"
    assert "lesson.py: " not in run_cli("read", "map").out.partition("\n")[0]


def test_an_unknown_name_is_one_line(run_cli: Run) -> None:
    shown = run_cli("read", "juggling")
    assert (shown.code, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert "'juggling' is not one of 'hello', " in shown.err
    near = run_cli("read", "helo")
    assert (near.code, near.out) == (2, "")
    assert near.err.endswith("there is no 'helo': did you mean hello?\n")


def test_chapters_and_figures_travel_with_the_package(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(
        ROOT / "playground", tmp_path / "playground", ignore=shutil.ignore_patterns("__pycache__")
    )
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    built = subprocess.run(
        [sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    with zipfile.ZipFile(tmp_path / built.stdout.splitlines()[-1]) as wheel:
        names = {*wheel.namelist()}
    wanted = [
        file
        for file in (ROOT / "playground").rglob("*")
        if file.suffix in (".md", ".svg", ".ipynb", ".js")
    ]
    assert {str(file.relative_to(ROOT)) for file in wanted} <= names
    assert {str(file.relative_to(ROOT)) for file in CHAPTERS.values()} <= names


def test_a_folder_is_a_name_and_help_has_all_names_in_groups(run_cli: Run) -> None:
    for folder, name in (("inside_gpt", "gpt"), ("all_reduce", "allreduce"), ("replay", "see")):
        assert run_cli("read", folder).out == run_cli("read", name).out != ""
    shown = run_cli("read", "--help").out
    groups = dict(re.findall(r"^ +(Lessons|Tools|Pages): ([^.]*)\.$", shown, re.MULTILINE))
    assert [*groups] == ["Lessons", "Tools", "Pages"]
    assert {name for names in groups.values() for name in re.split(r",\s+", names)} == {*PAGES}
    assert too_wide(shown) == []
