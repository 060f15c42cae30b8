"""The notebook runs from top to bottom in a kernel, and its cells show what they say."""

from __future__ import annotations

import os
import re
from html import unescape
from pathlib import Path
from typing import Any

import nbformat
import pytest
from notebooks import fork_kernel, printed

from playground.base import process_checks as surroundings
from playground.base.remote import ROOT
from playground.lessons import ROWS

NOTEBOOK = ROOT / "playground" / "lessons" / "first.ipynb"


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outputs of each cell with code by the beginning of its first line, as they are once they
    have run in an empty folder, in which nothing is left."""
    read: Any = nbformat.read
    notebook = read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    folder = tmp_path_factory.mktemp("notebook")
    ran: dict[str, Any] = {}
    ipython = tmp_path_factory.mktemp("ipython")
    with fork_kernel(ipython, IPYTHONDIR=str(ipython), PYTHONPATH=str(ROOT)) as kernel:
        kernel.client.execute_interactive(f"import os; os.chdir({str(folder)!r})", silent=True)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                outputs = kernel.execute(cell.source)
                assert not [each for each in outputs if each.output_type == "error"], cell.source
                ran[cell.source.splitlines()[0]] = outputs
    assert os.listdir(folder) == []
    return ran


def shown(outputs: list[Any]) -> list[Any]:
    """What is displayed, by its type."""
    return [each.data for each in outputs if each.output_type == "display_data"]


def test_values_are_those_of_all_ranks(cells: dict[str, Any]) -> None:
    assert printed(cells["%load_ext playground"]).startswith("4 ranks on gloo")
    [equal] = shown(cells["x = torch.tensor([10.0**rank])"])
    assert equal["text/plain"] == "[0-3] tensor([1111.])"
    [different] = shown(cells["torch.arange(3.0) + 10 * rank"])
    assert different["text/html"].count("<table ") == 4
    assert "<caption>float32 [3]</caption><tr><td>30</td>" in different["text/html"]
    assert "<td>30</td><td>31</td><td>32</td>" in different["text/html"]
    assert printed(cells["message = torch.zeros(1)"]) == "[0,2-3] 0.0\n[1]   7.0\n"
    assert "cell 4, line 5" in printed(cells["%calls"])


def test_the_mistake_is_explained_and_survived(cells: dict[str, Any]) -> None:
    words = " ".join(printed(cells["if rank != 2:"]).split())
    assert words.startswith("deadlock after")
    assert "rank 2 has finished the cell where ranks 0-1, 3 are in barrier (cell 6, line 2)" in (
        words
    )
    assert shown(cells["x"])[0]["text/plain"] == "[0-3] tensor([1111.])"


def test_the_player_is_in_its_cell(cells: dict[str, Any]) -> None:
    values, player = shown(cells["%%see"])
    assert values["text/plain"] == "[0-3] tensor([1111., 1111., 1111., 1111.])"
    assert "ranks on gloo" in player["text/plain"]
    assert "<iframe srcdoc=" in player["text/html"]
    page = unescape(player["text/html"].split('"')[1])
    assert page.startswith("<!doctype html>")
    assert '"command":"play: cell 8"' in page
    assert "default-src 'none'" in page
    assert "1111" in page


def test_a_lesson_leaves_its_objects(cells: dict[str, Any]) -> None:
    assert "zero3 " in printed(cells["%lesson zero"])
    shapes = printed(cells["flat = FlatParams(GPT().blocks[0])"])
    assert shapes == "[0-3] (torch.Size([111840]), torch.Size([27960]))\n"
    assert "a shard of it: 27,960 of the 111,840\\n" in NOTEBOOK.read_text(encoding="utf-8")


def test_the_exercise_and_the_path_are_shown(cells: dict[str, Any]) -> None:
    [task] = shown(cells["%exercise swap"])
    assert task["text/markdown"].startswith("# Swap")
    path = printed(cells["%%here"]).splitlines()
    assert [line.split()[1] for line in path] == [lesson.name for lesson in ROWS]


def test_it_says_how_to_install_as_the_readme_does() -> None:
    """Word by word, and as a system does on which no rank can be started."""
    read: Any = nbformat.read
    notebook = read(NOTEBOOK, as_version=4).cells[0].source
    pages = Path(ROOT, "README.md"), Path(ROOT, "playground/lessons/running.md")
    readme = "".join(page.read_text(encoding="utf-8") for page in pages)
    ways = re.findall(r"\(((?:wsl|docker) .*?)\)", surroundings.NOT_HERE)
    assert len(ways) == 2
    table = re.findall(r"^\| (?:Windows|Docker|Colab) \|.*\|$", readme, re.MULTILINE)
    assert len(table) == 3
    for words in (
        "pip install torch torchvision --index-url https://download.pytorch.org/whl/cpu",
        "pip install -e .",
        *(f"`{way}`" for way in ways),
        *table,
    ):
        assert words in notebook
        assert words in readme
