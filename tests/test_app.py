"""The command line: what it prints, its JSON, and what bad input gets. In this process, with real
ranks."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from fixtures import Run

from playground.app import cli
from playground.base.remote import ROOT
from playground.exercises.exercise import CATALOGUE, PLACES
from playground.exercises.workbook import Workbook
from playground.lessons import LESSONS, ROWS
from playground.lessons.lesson_row import Lesson


def test_alone_it_says_where_the_learner_is_and_what_comes_next(
    run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the solutions of this folder. If it has none, from those of the folder with most of
    them: elsewhere, it says first that nothing has been begun here."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    other, own = tmp_path / "other", tmp_path / "my own"
    for folder in (other, own):
        folder.mkdir()
        (other / folder.name).touch()
    monkeypatch.chdir(other)
    assert run_cli().out.splitlines() == [
        f"Lesson 1 of {len(ROWS)}, hello: 0 of its 3 exercises have passed, 0 of all "
        f"{len(CATALOGUE)}.",
        "python -m playground read hello             # its chapter",
        "mkdir -p my && cd my && python -m playground exercise whoami  # the next exercise",
        "python -m playground play                   # to try things out",
        "python -m playground --help                 # all there is",
    ]
    monkeypatch.chdir(own)
    work = Workbook(own)
    for exercise in [*CATALOGUE.values()][:4]:
        work.begin(exercise, reset=False)
        work.note(exercise, exercise.digest((own / exercise.file).read_text()))
    shown = run_cli().out
    assert shown.startswith(f"Lesson 2 of {len(ROWS)}, p2p: 1 of its ")
    assert "python -m playground read p2p               # its chapter\n" in shown
    assert "\npython -m playground exercise swap          # the next exercise\n" in shown
    monkeypatch.chdir(other)
    shown = run_cli().out
    assert shown.splitlines()[-5:] == [
        "python -m playground read p2p               # its chapter",
        f"cd '{own}' && python -m playground exercise swap  # go on there",
        "mkdir -p my && cd my && python -m playground exercise whoami  # begin here",
        "python -m playground play                   # to try things out",
        "python -m playground --help                 # all there is",
    ]
    where = f"No exercise has been begun in this folder. In {own}: Lesson 2 of {len(ROWS)}, p2p: 1"
    assert where in " ".join(shown.split("\n")[:-5])
    for near in (tmp_path, own / "inside"):
        near.mkdir(exist_ok=True)
        monkeypatch.chdir(near)
        shown = run_cli().out
        assert shown.startswith(f"Lesson 2 of {len(ROWS)}, p2p: 1 of its ")
        assert f", in {own}." in " ".join(shown.split("\n")[:-5])
        assert f"cd '{own}' && python -m playground exercise swap  # the next exercise" in shown


def test_the_help_shows_the_path(run_cli: Run) -> None:
    shown = run_cli("--help")
    assert shown.code == 0, shown.err
    names = re.findall(r"^ *([\w-]+) ", shown.out, re.MULTILINE)
    positions = [names.index(lesson.name) for lesson in ROWS]
    assert positions == sorted(positions)
    assert "python -m playground exercise whoami" in shown.out


def test_exercises_come_in_the_order_of_their_lessons() -> None:
    places = [PLACES.index(exercise.lesson) for exercise in CATALOGUE.values()]
    assert PLACES[: len(LESSONS)] == [*LESSONS]
    assert places == sorted(places)


@pytest.mark.parametrize("option", ["--json", "--timeout", "--wide"])
def test_the_page_on_running_says_which_commands_take_the_common_options(option: str) -> None:
    text = (ROOT / "playground/lessons/running.md").read_text(encoding="utf-8")
    sentence = re.search(rf"([^.]*) take `{option}`", " ".join(text.split()))
    assert sentence
    named = set(re.findall(r"`(\w+)(?: --\w+)?`", sentence[1]))
    if "Every lesson" in sentence[1]:
        named |= LESSONS.keys()
    with click.Context(cli) as ctx:
        commands = {name: cli.get_command(ctx, name) for name in cli.list_commands(ctx)}
    takes = {
        name
        for name, command in commands.items()
        if command and any(option in param.opts for param in command.params)
    }
    assert takes == named


def test_p2p_prints_the_lines_of_the_tutorial(run_cli: Run) -> None:
    shown = run_cli("p2p")
    said = sorted(shown.out.splitlines())
    assert said[1].startswith("Rank 0 has data 1.0 after blocking")
    assert [line for line in said if "Rank 1 has data 1.0 after " in line][1:] == [
        "Rank 1 has data 1.0 after immediate, expected 1.0"
    ]
    assert (shown.code, shown.err) == (0, "")


@pytest.mark.parametrize("lesson", ROWS, ids=lambda lesson: lesson.name)
def test_help_shows_a_command_a_line(lesson: Lesson, run_cli: Run) -> None:
    commands = re.findall(r"^    (python -m playground .*)$", lesson.help, re.MULTILINE)
    shown = [line.strip() for line in run_cli(lesson.name, "--help").out.splitlines()]
    assert commands == [line for line in shown if line.startswith("python -m playground")]


@pytest.mark.parametrize(
    "words",
    [
        ("p2p", "--letter", "x"),
        ("hello", "--backend", "mpi"),
        ("hello", "--timeout", "0"),
        ("juggle",),
        ("parameter-server", "--compute", "x"),
        ("parameter-server", "--sync", "flat"),
    ],
    ids=" ".join,
)
def test_bad_input_gets_one_line_and_exit_code_2(
    words: tuple[str, ...], run_cli: Run, tmp_path: Path, data_dir: Path
) -> None:
    shown = run_cli(*(word.format(tmp_path=tmp_path, data_dir=data_dir) for word in words))
    said = [line for line in shown.err.splitlines() if line != "looking for MNIST"]
    assert (shown.code, shown.out, len(said)) == (2, "", 1), shown
    assert said[0].startswith("playground: ")


def test_nccl_without_a_gpu_names_the_way_out(run_cli: Run) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    shown = run_cli("hello", "--backend", "nccl")
    assert (shown.code, shown.out) == (2, "")
    assert (
        shown.err == "playground: backend nccl needs a GPU and this machine shows none: "
        "use --backend gloo, or simulate some with --gpus 2\n"
    )


@pytest.mark.parametrize(
    ("environ", "words", "message"),
    [
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            (),
            "RANK=2 is outside",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            ("-n", "3"),
            "leave -n out",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            (),
            "at least 3 ranks",
        ),
    ],
)
def test_a_world_that_contradicts_itself_is_refused(
    environ: dict[str, str],
    words: tuple[str, ...],
    message: str,
    run_cli: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    shown = run_cli("break", "send-send", *words)
    assert (shown.code, shown.out) == (2, "")
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_a_hang_ends_with_exit_code_1_and_the_stacks(
    run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = run_cli("hello", "-n", 4, "--timeout", "0.001")
    assert shown.code == 1, shown.err
    assert "no sign of life for 0.001 s" in shown.err
    assert "fork_server.py" not in shown.err  # where ranks wait that have not begun is a line


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["break", "send-s"], "send-send"),
        (["p2"], "p2p"),
        (["parameter-server", "--slo"], "--slower"),
    ],
)
def test_shell_completion(typed: list[str], offered: str) -> None:
    completions = ShellComplete(cli, {}, "playground", "_PLAYGROUND_COMPLETE").get_completions(
        typed[:-1], typed[-1]
    )
    assert offered in [item.value for item in completions]


def test_a_command_that_is_nearly_one_is_answered_with_that(run_cli: Run) -> None:
    shown = run_cli("heloo")
    assert (shown.code, shown.out) == (2, "")
    assert shown.err == "playground: there is no command 'heloo': did you mean hello?\n"
    assert run_cli("swap").err == (
        "playground: there is no command 'swap', but an exercise: "
        "python -m playground exercise swap\n"
    )
    assert run_cli("juggling").err == "playground: No such command 'juggling'.\n"
