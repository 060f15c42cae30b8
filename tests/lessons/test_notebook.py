"""The notebook runs from top to bottom, and its cells show what they say."""

from __future__ import annotations

import ast
import contextlib
import io
import sys
import warnings
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from playground.lessons import PATH
from playground.runtime.remote import ROOT

nbformat = pytest.importorskip(
    "nbformat", reason="nbclient is not installed: pip install -e '.[dev]'"
)
pytest.importorskip("IPython")
LIMIT = 300
"""Seconds for a cell: the first one that starts ranks imports torch."""
NOTEBOOK = ROOT / "playground" / "lessons" / "first.ipynb"
WRITE_FILE = "%%writefile "


def run_in_a_kernel(notebook: Any) -> None:
    """Run its cells as Jupyter does, in the working folder."""
    from nbclient import NotebookClient

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the kernel's client is told of is not ours
        NotebookClient(
            notebook, timeout=LIMIT, kernel_name="python3", resources={"metadata": {"path": "."}}
        ).execute()


def run_here(notebook: Any) -> None:
    """Run its cells in this process, whose ranks come from the session's fork server."""
    names: dict[str, Any] = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = run_cell(cell.source, names)


def run_cell(source: str, names: dict[str, Any]) -> list[Any]:
    """What it prints, and the value of its last line."""
    if source.startswith(WRITE_FILE):
        file, _, text = source.removeprefix(WRITE_FILE).partition("\n")
        Path(file).write_text(text)
        return []
    lines = ast.parse(source).body
    end = lines[-1]
    last = end.value if isinstance(end, ast.Expr) else ast.Constant(None)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(
            compile(
                ast.Module(lines[:-1] if isinstance(end, ast.Expr) else lines, []), "<cell>", "exec"
            ),
            names,
        )
        value = eval(
            compile(ast.Expression(ast.fix_missing_locations(last)), "<cell>", "eval"), names
        )
    outputs = [nbformat.v4.new_output("stream", text=output.getvalue())]
    if value is not None:
        pictures = {"image/svg+xml": "_repr_svg_", "text/html": "_repr_html_"}
        data = {
            kind: getattr(value, method)()
            for kind, method in pictures.items()
            if hasattr(value, method)
        }
        outputs.append(
            nbformat.v4.new_output("execute_result", data={"text/plain": repr(value), **data})
        )
    return outputs


@pytest.fixture(
    scope="module",
    params=[run_here, pytest.param(run_in_a_kernel, marks=pytest.mark.stress)],
    ids=["here", "kernel"],
)
def cells(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Any]]:
    """The cells with code, as they are once they have run in an empty folder."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("notebook")
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        request.param(notebook)
    yield [cell for cell in notebook.cells if cell.cell_type == "code"]
    sys.modules.pop("my_ranks", None)


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def shown(cell: Any) -> Any:
    """What the cell's last line evaluates to, by its type."""
    [result] = [output.data for output in cell.outputs if output.output_type == "execute_result"]
    return result


def test_the_path_and_its_values(cells: list[Any]) -> None:
    path, values, *_ = cells
    assert [line.split()[1] for line in printed(path).splitlines()] == [
        lesson.name for lesson in PATH
    ]
    assert printed(values).splitlines() == [
        "Rank 0 has data 1.0",
        "Rank 1 has data 1.0",
        "Rank 2 has data 0.0",
    ]


def test_a_function_of_one_s_own_runs_and_prints(cells: list[Any]) -> None:
    own = cells[3]
    assert shown(own)["text/plain"] == "[2.5, 2.5, 2.5, 2.5]"
    assert sorted(printed(own).splitlines()) == [
        f"Rank {rank} has the sum 10.0" for rank in range(4)
    ]


def test_a_figure_and_the_player_are_in_their_cells(cells: list[Any]) -> None:
    *_, figure, player = cells
    assert "@keyframes" in shown(figure)["image/svg+xml"]
    frame = shown(player)["text/html"]
    assert "<iframe srcdoc=" in frame
    page = unescape(frame.split('"')[1])
    assert page.startswith("<!doctype html>")
    assert '"command":"ring -n 4"' in page
