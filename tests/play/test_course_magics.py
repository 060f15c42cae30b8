"""Cells that are recorded and played; lessons and exercises at the prompt; values as a notebook
shows them."""

from __future__ import annotations

import ast
import math
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from playground.base.errors import UsageError
from playground.exercises.exercise import CATALOGUE
from playground.explain.replay.analyse.matching import match_messages
from playground.explain.replay.record.recording import COMPUTE, Recording
from playground.lessons import LESSONS
from playground.play import cells, lesson_program
from playground.play.course_magics import begin_exercise, find_program, judge, with_data
from playground.play.html import with_html
from playground.play.lesson_program import LessonProgram, to_cell
from playground.play.recordings import NOTHING, Player, read_flight_recorders, record_cell
from playground.play.text_report import describe_end, describe_values, values_in_html
from playground.play.world import PlayWorld, Run
from playground.training import prepare

SIZE = 3


@pytest.fixture(scope="module")
def world() -> Iterator[PlayWorld]:
    world = PlayWorld(SIZE)
    yield world
    world.close()


def told(run: Run) -> list[str]:
    return [*describe_values(run, SIZE), *describe_end(run, SIZE)]


def record(world: PlayWorld, source: str, number: int = 7) -> tuple[Run, Recording]:
    return record_cell(world, source, number, range(SIZE), cells.run_cell)


PASS_ON = """\
t = torch.ones(2) * rank
if rank == 0: dist.send(t + 5, 1)
if rank == 1: dist.recv(t, 0)
dist.all_reduce(t)
"""


def test_a_cell_is_played_from_the_flight_recorders(world: PlayWorld) -> None:
    world.run_cell("before = torch.ones(1); dist.all_reduce(before)", 1)
    recording = read_flight_recorders(world, world.run_cell(PASS_ON, 4))
    calls = [[event.name for event in rank.events] for rank in recording.ranks]
    assert calls == [["send", "all_reduce"], ["receive", "all_reduce"], ["all_reduce"]]
    [(send, receive)] = match_messages(recording).matched
    assert (send.nbytes, receive.shape, receive.group) == (8, (2,), (0, 1, 2))
    assert all(0 < event.start <= event.end < math.inf for event in recording.events())
    lines = [recording.sources[each.source or 0] for each in (send, receive)]
    assert [(each.file, each.line) for each in lines] == [("cell 4", 2), ("cell 4", 3)]
    assert recording.texts["cell 4"] == PASS_ON
    words = Player("").play(world, world.run_cell(PASS_ON, 5), None)
    assert words.startswith("playground play: cell 5\n  3 ranks on gloo, cpu\n")


def test_a_message_from_one_cell_to_the_next_meets_no_other(world: PlayWorld) -> None:
    world.run_cell("if rank == 0: w = dist.isend(torch.ones(1), 1)", 1)
    source = "t = torch.ones(1)\nif rank == 0: v = dist.isend(t, 1)\nif rank == 1: dist.recv(t, 0)"
    recording = read_flight_recorders(world, world.run_cell(source, 2))
    assert [[event.name for event in rank.events] for rank in recording.ranks][1] == ["receive"]
    assert match_messages(recording).matched == []
    run = world.run_cell("if rank == 1: dist.recv(t, 0)\nif rank == 0: w.wait(), v.wait()", 3)
    assert not run.hang


def test_a_recorded_cell_has_what_tensors_held_and_what_was_computed(world: PlayWorld) -> None:
    source = f"{PASS_ON}torch.nn.Linear(2, 1)(t).sum().backward()\nt"
    run, recording = record(world, source)
    assert told(run) == ["[0-2] tensor([7., 7.])"]
    received = next(event for event in recording.ranks[1].events if event.name == "recv")
    assert received.values == (5.0, 5.0)
    assert {event.name for event in recording.events(COMPUTE)} >= {"forward", "backward"}
    assert recording.texts["cell 7"] == source
    assert recording.command == ("play:", "cell 7")
    player = Player("")
    player.play(world, run, recording)
    assert player.html.startswith('<iframe srcdoc="')
    assert "default-src &#x27;none&#x27;" in player.html  # it loads nothing


@pytest.mark.parametrize("in_full", [False, True])
def test_a_hang_is_played_and_what_was_let_go_never_ended(world: PlayWorld, in_full: bool) -> None:
    source = "dist.barrier()\nif rank != 2: dist.all_reduce(torch.ones(1))"
    if in_full:
        run, recording = record(world, source)
    else:
        run = world.run_cell(source, 7)
        recording = read_flight_recorders(world, run)
    assert run.hang
    assert recording.standstill
    assert "rank 2 has finished" in recording.standstill.sentence
    assert dict(recording.standstill.waits) == {0: (2,), 1: (2,)}
    for rank in recording.ranks:
        ends = {each.name: math.isfinite(each.end) for each in rank.events}
        ends.pop("before", None)
        assert ends == {"barrier": True} | ({"all_reduce": False} if rank.rank != 2 else {})
    assert told(world.run_cell("dist.barrier(); rank * 0")) == ["[0-2] 0"]


def test_a_killed_rank_is_cut_off(world: PlayWorld) -> None:
    run, recording = record(world, "dist.barrier()\nif rank == 1: import os; os._exit(1)")
    assert run.lost.keys() == {1}
    assert [rank.is_cut_off for rank in recording.ranks] == [False, True, False]
    assert [[event.name for event in rank.events] for rank in recording.ranks] == [["barrier"]] * 3


def test_a_cell_that_is_run_again_is_not_recorded(
    world: PlayWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    record(world, "x = globals().get('x', 0) + 1; x")
    assert told(world.retry()) == ["[0-2] 2"]
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_has_no_part_in_a_cell_has_no_events(world: PlayWorld) -> None:
    run, recording = record_cell(
        world, "torch.nn.Linear(1, 1)(torch.ones(1))", 7, (0, 2), cells.run_cell
    )
    assert [bool(rank.events) for rank in recording.ranks] == [True, False, True]
    assert "cut off" not in (words := Player("").play(world, run, recording))
    assert "3 ranks on gloo, cpu\n" in words


def test_a_recording_is_written_to_a_file(
    world: PlayWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = world.run_cell(PASS_ON, 4)
    for name, beginning in (("run.html", "<!doctype html>"), ("run.txt", "playground play: cell")):
        assert Player(name).play(world, run, None) == f"{name} shows 5 events of 3 ranks"
        assert Path(name).read_text().startswith(beginning)
    with pytest.raises(UsageError, match=r"the ending says what is written: choose one of \.html"):
        Player("run.pdf")
    with pytest.raises(UsageError, match="cannot be written"):
        Player("nowhere/run.html").play(world, run, None)
    assert Player("").play(world, world.run_cell("1"), None) == NOTHING
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.html", "run.txt"]


def run_lesson(world: PlayWorld, *words: str) -> Run:
    program = with_data(find_program(words))
    return world.run_cell(
        program.file.read_text(), 3, how=partial(lesson_program.run_lesson, program)
    )


def test_a_lesson_runs_in_the_world_that_stands(
    world: PlayWorld, capfd: pytest.CaptureFixture[str]
) -> None:
    world.run_cell("group = dist.new_group([0, 1])")
    assert told(run_lesson(world, "hello")) == []
    printed = capfd.readouterr().out
    assert "[2] Rank 2: largest difference between the two lists 0\n" in printed
    assert told(world.run_cell("gather_by_torch(size, rank)")) == ["[0-2] [0, 1, 2]"]
    assert told(run_lesson(world, "p2p")) == []
    printed = capfd.readouterr().out
    assert "[1] Rank 1 has data 2.0 after ring, expected 2.0\n" in printed
    assert told(world.run_cell("left")) == ["[0]   2", "[1]   0", "[2]   1"]
    lines = told(world.run_cell("ring(rank, size)"))
    assert lines == ["[0,2] tensor([3.])", "[1]   tensor([2.])"]
    run = world.run_cell(
        "t = torch.ones(1)\nif rank < 2: dist.all_reduce(t, group=group)\nt.item()"
    )
    assert told(run) == ["[0-1] 2.0", "[2]   1.0"]


def test_constants_of_a_lesson_are_set_at_the_prompt(
    world: PlayWorld, capfd: pytest.CaptureFixture[str]
) -> None:
    run = run_lesson(world, "p2p", "--letter", "7")
    assert "AssertionError" in "\n".join(told(run))
    assert "Rank 1 has data -4.0 after tags, expected 4.0\n" in capfd.readouterr().out
    assert told(world.run_cell("LETTER")) == ["[0-2] 7"]
    for words, said in (
        (("--letter", "x"), "Invalid value for '--letter': 'x' is not a valid integer"),
        (("--lettre", "1"), "No such option '--lettre'"),
    ):
        with pytest.raises(UsageError, match=said):
            find_program(["p2p", *words])


def test_the_data_of_a_lesson_is_there_before_it_runs(
    world: PlayWorld, capfd: pytest.CaptureFixture[str], tmp_path: Path, data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Where MNIST is out of reach, in a world that started before anyone asked for data. The
    variable that tells the ranks where it is ends with the lesson."""
    folder = "import os; os.environ.get('PLAYGROUND_DATA_DIR')"
    before = told(world.run_cell(folder))
    monkeypatch.setenv(prepare.DATA_DIR, str(data_dir))
    monkeypatch.setenv(prepare.MIRROR, str(tmp_path))
    assert told(run_lesson(world, "sgd", "--epochs", "1", "--batch-size", "96")) == []
    printed = capfd.readouterr()
    assert printed.err.startswith("looking for MNIST\ndata: digits (600 + 200 images; ")
    for rank in range(SIZE):
        assert f"[{rank}] Rank {rank}, epoch 1: loss " in printed.out
    assert told(world.run_cell("len(train_set), batch_size")) == ["[0-2] (200, 32)"]
    assert told(world.run_cell(folder)) == before


def test_a_program_that_exits_says_why(world: PlayWorld, capfd: pytest.CaptureFixture[str]) -> None:
    source = "import sys\nif __name__ == '__main__':\n    sys.exit('no data here')"
    how = partial(lesson_program.run_lesson, LessonProgram(Path("/somewhere/program.py")))
    assert told(world.run_cell(source, 3, how=how)) == []
    assert "[1] no data here" in capfd.readouterr().err


def test_an_error_in_a_lesson_has_its_line_and_leaves_what_there_was(world: PlayWorld) -> None:
    source = (
        "def fail(rank):\n    part = 5 + rank\n    1 / 0\n\nif __name__ == '__main__':\n    fail(1)"
    )
    how = partial(lesson_program.run_lesson, LessonProgram(Path("/somewhere/program.py")))
    lines = told(world.run_cell(source, 3, how=how))
    assert 'File "/somewhere/program.py", line 3, in fail' in "\n".join(lines)
    assert told(world.run_cell("part, rank")) == ["[0]   (6, 0)", "[1]   (6, 1)", "[2]   (6, 2)"]


def test_the_default_dtype_of_a_lesson_ends_with_it(world: PlayWorld) -> None:
    source = (
        "import torch\nif __name__ == '__main__':\n"
        "    torch.set_default_dtype(torch.float64)\n    torch.ones(1).dtype"
    )
    how = partial(lesson_program.run_lesson, LessonProgram(Path("/somewhere/program.py")))
    assert told(world.run_cell(source, 3, how=how)) == ["[0-2] torch.float64"]
    assert told(world.run_cell("torch.ones(1).dtype")) == ["[0-2] torch.float32"]


@pytest.mark.parametrize("name", [*LESSONS])
def test_every_lesson_can_be_a_cell(name: str) -> None:
    """No variable that is left takes the name of what the program defines."""
    program = find_program([name])
    tree = to_cell(ast.parse(program.file.read_text()))
    compile(tree, str(program.file), "exec")
    assert program == LessonProgram(program.file, needs_mnist=LESSONS[name].needs_mnist)
    text = ast.unparse(tree)
    assert "init_process_group(" not in text
    kept = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and "globals().update(locals())" in ast.unparse(node)
    ]
    assert kept
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored = {
        node.id
        for function in kept
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    assert defined.isdisjoint(stored)


def test_a_wrong_name_lists_the_right_ones() -> None:
    with pytest.raises(UsageError, match="no lesson 'nothing': choose one of hello, p2p, "):
        find_program(["nothing"])
    with pytest.raises(UsageError, match="%lesson NAME: hello, p2p, "):
        find_program([])
    with pytest.raises(UsageError, match="no exercise 'swp': did you mean swap"):
        begin_exercise("swp", True)


def test_an_exercise_is_handed_out_and_judged() -> None:
    task, cell = begin_exercise("column", is_notebook=True)
    assert task.startswith("# Column")
    assert "Use: " in begin_exercise("column", is_notebook=False)[0]
    first, _, stub = cell.partition("\n")
    assert first == "%%exercise column"
    assert stub == CATALOGUE["column"].stub
    assert judge("column", stub) == "column  not written yet"
    assert judge("column", CATALOGUE["column"].solution) == "column  passed on 2, 3 ranks"
    wrong = stub.replace("raise NotImplementedError", "1 / 0")
    line = next(at for at, each in enumerate(wrong.splitlines(), 2) if "1 / 0" in each)
    lines = judge("column", wrong).splitlines()
    assert lines[0].startswith("column  2 ranks: fail")
    # as the cell counts them, whose first line is the magic
    assert f"line {line}: ZeroDivisionError" in lines[1]


def html_of(world: PlayWorld, source: str) -> tuple[Run, str]:
    run = world.run_cell(source, how=partial(with_html, cells.run_cell))
    return run, values_in_html(run)


def test_small_tensors_are_tables_and_equal_ones_once(world: PlayWorld) -> None:
    run, html = html_of(world, "torch.tensor([[1.0, 0.5], [2.0, float('nan')]]) * (rank // 2 + 1)")
    assert html.count("<figure") == 2
    assert "[0-1]</figcaption><table " in html
    assert "<caption>float32 [2, 2]</caption><tr><td>1</td>" in html
    assert "<tr><td>2</td><td>1</td></tr><tr><td>4</td><td>nan</td></tr>" in html
    assert told(run)[0] == "[0-1] tensor([[1.0000, 0.5000],"
    _, html = html_of(world, "torch.tensor([rank == 0]) if rank < 2 else '<b>'")
    assert "<td>True</td>" in html
    assert "<td>False</td>" in html
    assert "<pre>&#x27;&lt;b&gt;&#x27;</pre>" in html
    for source in (
        "torch.ones(1000)",
        "torch.ones(2, 2, 2)",
        "torch.ones(())",
        "torch.ones(0)",
        "7",
    ):
        assert not any(each.html for each in html_of(world, source)[0].outcomes.values())
    run, _ = html_of(world, "_ = torch.ones(2)\n1 / 0")
    assert not any(each.html for each in run.outcomes.values())


def test_a_value_that_has_html_of_its_own_shows_it(world: PlayWorld) -> None:
    source = "class Own:\n    def _repr_html_(self): return f'<i>{rank // 2}</i>'\n\nOwn()"
    _, html = html_of(world, source)
    assert "[0-1]</figcaption><i>0</i>" in html
    assert "[2]</figcaption><i>1</i>" in html


def test_a_value_that_cannot_be_shown_is_an_error_of_the_cell(world: PlayWorld) -> None:
    source = "class Own:\n    def _repr_html_(self): return 1 / rank\n\nOwn() if rank == 0 else 5"
    run, _ = html_of(world, source)
    assert not run.lost
    assert "ZeroDivisionError" in run.outcomes[0].error
    assert run.outcomes[2].value == "5"


def test_figures_are_side_by_side(world: PlayWorld) -> None:
    source = "import matplotlib.pyplot as plt\nplt.plot([0, rank // 2])\nplt.show()"
    run, html = html_of(world, source)
    assert told(run) == []
    assert html.count('<img src="data:image/png;base64,') == 2
    assert "[0-1]</figcaption><img" in html
    assert not any(each.html for each in html_of(world, "plt.get_fignums()")[0].outcomes.values())


def test_a_recorded_cell_of_a_notebook_has_both(world: PlayWorld) -> None:
    how: Any = partial(with_html, cells.run_cell)
    run, recording = record_cell(world, PASS_ON + "t", 8, range(SIZE), how)
    assert "<td>7</td>" in run.outcomes[0].html
    assert any(recording.events())
