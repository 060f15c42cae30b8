"""A lesson that is a program: its command runs its file, with options for its constants."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from programs import Outcome

from playground.lessons.lesson_row import Lesson
from playground.tools.run.command import lesson_command
from playground.training import prepare

Ask = Callable[..., Outcome]


@pytest.fixture
def ask(capfd: pytest.CaptureFixture[str]) -> Ask:
    """`ask(name, words…)`: how the command of a lesson of the tests ends."""

    def run(name: str, *words: str) -> Outcome:
        lesson = Lesson(
            name=name,
            package="tests.support.lessons",
            teaches="",
            default_size=2,
            needs_mnist=name == "numbers",
        )
        code = 0
        try:
            lesson_command(lesson).main([*words], standalone_mode=False)
        except click.ClickException as error:
            code = error.exit_code
            click.echo(error.format_message(), err=True)
        return Outcome(code, *capfd.readouterr())

    return run


def test_on_gloo_a_lesson_is_on_the_cpu_even_where_there_are_gpus(ask: Ask) -> None:
    ran = ask("devices")
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert lines.count("backend gloo on cpu") == lines.count("summed 2.0 on cpu") == 2


@pytest.mark.gpu
def test_on_nccl_a_lesson_is_on_its_gpu_and_draws_what_it_draws_on_the_cpu(ask: Ask) -> None:
    here, there = (ask("devices", "--backend", name) for name in ("gloo", "nccl"))
    assert there.code == 0, there.err
    lines = sorted(there.out.splitlines())
    assert [line for line in lines if "cuda" in line] == [
        f"{what} on cuda:{rank}" for what in ("backend nccl", "summed 2.0") for rank in range(2)
    ]
    drawn = [line for line in lines if "cuda" not in line]
    assert drawn == [line for line in sorted(here.out.splitlines()) if "cpu" not in line]


def test_the_data_is_there_before_ranks_start(
    ask: Ask, tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where MNIST is out of reach, digits are in its place, and stderr says why."""
    monkeypatch.setenv(prepare.DATA_DIR, str(data_dir))
    monkeypatch.setenv(prepare.MIRROR, str(tmp_path))
    ran = ask("numbers", "--no-test", "--batch-sizes", "2,3")
    assert (ran.code, ran.out) == (0, "600 images, (2, 3) at a time\n" * 2)
    about, looking, found, differ = ran.err.splitlines()
    assert about.startswith("numbers: ")
    assert looking == "looking for MNIST"
    assert found.startswith("data: digits (600 + 200 images; MNIST could not be fetched: ")
    assert prepare.MIRROR in differ


LOADED = """
import sys
from playground.app import cli
cli.main(sys.argv[1:], standalone_mode=False)
print(*(name for name in sys.modules if name.partition(".")[0] in ("playground", "torch")))
"""


def test_to_tell_its_options_a_lesson_imports_nothing_that_runs_ranks() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", LOADED, "p2p", "--help"], capture_output=True, text=True, check=True
    )
    *text, loaded = shown.stdout.splitlines()
    assert any("--letter" in line for line in text)
    modules = loaded.split()
    assert not {name for name in modules if name.startswith("torch")}
    assert "playground.world.launcher.launch" not in modules
    assert not {name for name in modules if "flight_recorder" in name}
    assert len(modules) <= 46
