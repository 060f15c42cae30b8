"""The notebook runs from top to bottom, in a kernel of its own, and its cells show what they say."""

from __future__ import annotations

import warnings
from html import unescape
from typing import Any

import pytest

from playground.lessons import PATH
from playground.runtime.remote import ROOT

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install -e '.[dev]'")
LIMIT = 300
"""Seconds for a cell: the first one that starts ranks imports torch."""
nbformat = pytest.importorskip("nbformat")
NOTEBOOK = ROOT / "playground" / "lessons" / "first.ipynb"


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The cells with code, as they are once they have run in an empty folder."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    resources = {"metadata": {"path": tmp_path_factory.mktemp("notebook")}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the kernel's client is told of is not ours
        nbclient.NotebookClient(notebook, timeout=LIMIT, kernel_name="python3", resources=resources).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def shown(cell: Any) -> Any:
    """What the cell's last line evaluates to, by its type."""
    [result] = [output.data for output in cell.outputs if output.output_type == "execute_result"]
    return result


def test_the_path_and_its_values(cells: list[Any]) -> None:
    path, values, *_ = cells
    assert [line.split()[1] for line in printed(path).splitlines()] == [lesson.name for lesson in PATH]
    assert printed(values).splitlines() == ["Rank 0 has data 1.0", "Rank 1 has data 1.0", "Rank 2 has data 0.0"]


def test_a_function_of_one_s_own_runs_and_prints(cells: list[Any]) -> None:
    own = cells[3]
    assert shown(own)["text/plain"] == "[2.5, 2.5, 2.5, 2.5]"
    assert sorted(printed(own).splitlines()) == [f"Rank {rank} has the sum 10.0" for rank in range(4)]


def test_a_figure_and_the_player_are_in_their_cells(cells: list[Any]) -> None:
    *_, figure, player = cells
    assert "@keyframes" in shown(figure)["image/svg+xml"]
    frame = shown(player)["text/html"]
    assert "<iframe srcdoc=" in frame
    page = unescape(frame.split('"')[1])
    assert page.startswith("<!doctype html>")
    assert '"command":"ring -n 4"' in page
