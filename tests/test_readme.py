"""What every README shows is what happens: its commands run, its Python runs, its links lead
somewhere."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import pytest
from processes import ENOUGH, session_ends
from programs import SCRIPT, ForkedProgram
from widths import too_wide

from playground.app import TOOLS
from playground.exercises.exercise import CATALOGUE, CORE
from playground.lessons import LESSONS, PARTS, ROWS
from playground.lessons.lesson_row import Lesson
from playground.site import texts
from playground.site.code import EXCERPT

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]
ROOT_README = ROOT / "README.md"
CHAPTERS = sorted((ROOT / "playground").rglob("*.md"))
READMES = [ROOT_README, *CHAPTERS]
OURS = "python -m playground "
NOT_RUN = {
    "python -m playground sgd --backend nccl -n 2": "two GPUs",
    "python -m playground hello --backend nccl": "a GPU",
    "python -m playground why PID": "a run that hangs: tests/tools/test_why.py",
    "python -m playground run -n 4 train.py --lr 0.1": "a script with this fault",
    "python -m playground run -n 2 train.py": (
        "a script with this mistake: tests/explain/test_check_option.py"
    ),
    "python -m playground run -n 2 --gpus 2 train.py": (
        "a script: tests/explain/hang/test_nccl_mistakes.py"
    ),
    "python -m playground doctor train.py": "a script: tests/tools/test_doctor_data_parallel.py",
    "python -m playground doctor train_on_one.py": "tests/lessons/test_your_script.py",
    "python -m playground run -n 2 train_on_many.py": "tests/lessons/test_your_script.py",
    "python -m playground run -n 2 --gpus 2 gpu_streams.py": "tests/lessons/test_gpu_streams.py",
    "python -m playground run -n 3 train.py": "a program that fails: tests/lessons/test_hello.py",
    "python -m playground run -n 3 --debug 1 train.py": "tests/tools/test_breakpoints.py",
    "python -m playground run -n 4 lesson.py": "a program that is edited",
    "python -m playground run -n 2 both_send.py": "the program above it: "
    "tests/lessons/test_programs.py",
    "PLAYGROUND_HOSTS=2 python -m playground run -n 4 --see levels.html levels.py": "the program "
    "above it: tests/lessons/test_all_reduce.py",
    "python -m playground run -n 4 -m package.train --lr 0.1": "a package",
    "python -m playground run -n 4 --see run.html --restarts 3 --grace 30 train.py": "a script",
    "python -m playground run -n 4 --profile --set EPOCHS=2 train.py": "a script: tests/explain",
    "python -m playground run -n 4 --link 1 train.py": "a script: tests/explain",
    **{
        f"python -m playground run -n 4{option} train.py": "a script of the reader's"
        for option in ("", " --check hints", " --profile", " --see run.html")
    },
    **{
        f"python -m playground failures --program {name}": "it fails: tests/lessons/test_failures"
        for name in ("wait_in_a_circle", "stop_early")
    },
    "python -m playground run -n 2 --profile train.py": "the script above it: tests/explain",
    "python -m playground bench steps": "minutes: tests/tools/test_bench_steps.py",
    **{
        f"python -m playground bench steps {words}": "minutes: tests/tools/test_bench_steps.py"
        for words in (
            "--model net",
            "--model bert",
            "--steps 5 --dataset digits",
            "--link 0.25 --steps 5 --dataset digits",
            "--model resnet18 --all-reduce shared-memory",
            "--model bert --link 1",
        )
    },
    "python -m playground run -n 4 playground/lessons/context/ulysses.py": "the folder of the "
    "clone: tests/lessons/test_context.py",
    "python -m playground why": "a run that stands still",
    "python -m playground why 4711": "a run that stands still: tests/tools/test_why.py",
    "python -m playground play -n 4": "somebody who types",
    "python -m playground run -n 4 --gpus 4 train.py": "a script: tests/tools/test_gpus.py",
    "python -m playground play -n 2 --gpus 2": "somebody who types: tests/tools/test_gpus.py",
    "python -m playground run -n 2 --gpus 2 --gpu-memory 80G train.py": "a script: "
    "tests/tools/test_gpu_memory.py",
    **{
        f"python -m playground run -n 2 --gpus 2 {words}": "tests/lessons/test_gpu_page.py"
        for words in ("gpu_ranks.py", "gpu_barrier.py", "--gpu-memory 1G gpu_memory.py")
    },
    "PLAYGROUND_HOSTS=2 python -m playground scale -n 4": "a quarter of a minute",
    "GLOO_SOCKET_IFNAME=eth1 python -m playground doctor": "a machine with these faults",
    "python -m playground doctor --hosts a,b,c": "three machines",
    "python -m playground doctor --hosts a,b": "two machines",
    "python -m playground doctor train.py --epochs 1": "a script with these faults",
    "torchrun --nnodes 2 --node-rank N --nproc-per-node 4 --master-addr first.host "
    "--master-port 29500 -m playground hello": "two machines",
    **{
        f"RANK={rank} WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 "
        "python -m playground hello": "a second terminal"
        for rank in range(2)
    },
}
"""The commands that are not run here, with what they need. (Ranks started by hand:
tests/world/test_join.py.)"""
HEAVIER = (
    "see --figure F9 ring.svg", "break send-send --see hang.html",
    "mesh", "mesh -n 16", "site DIR",
)  # fmt: skip
"""Commands that wait for `make stress`: a smaller run of the same lesson, or the lesson's own test,
is in the suite (that of the site's pages: tests/site/test_site.py). That they can be run as they
stand: tests/lessons/test_commands_named.py."""
SMALLER = {
    "parameter-server": ("--steps", "8", "--compute", "1"),
    "bench": ("--iterations", "2"),
}
"""Options that make a command quick and leave the form of its output as it is."""
WITHOUT_OUTPUT = {
    "bench": ("-b", "1K", "-e", "4K"),
}
"""The same, where no output is shown: by the whole command, or else by its first word."""


@dataclass(frozen=True)
class Shown:
    """A command that a README shows, and the lines of output below it."""

    command: str
    output: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """Without what is set before them."""
        return shlex.split(self.command, comments=True)[len(self.environ) :]

    @property
    def environ(self) -> dict[str, str]:
        """The variables that the command sets for itself, NAME=VALUE before its first word."""
        words = shlex.split(self.command, comments=True)
        assignments = takewhile(lambda word: re.match(r"[A-Z_]+=", word), words)
        return {name: value for name, _, value in (word.partition("=") for word in assignments)}


def fenced_blocks(text: str, *languages: str) -> list[str]:
    """The contents of the blocks in these languages, without what they are indented by."""
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, language, block in found if language in languages]


def consoles(text: str) -> Iterator[list[Shown]]:
    """The commands of each console block, with their output."""
    for block in fenced_blocks(text, "console"):
        parts = [part.splitlines() for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
        yield [Shown(command, tuple(output)) for command, *output in parts]


def commands_elsewhere(text: str) -> Iterator[list[Shown]]:
    """The commands of each plain block, and, one by one, those that stand in a sentence."""
    for block in fenced_blocks(text, "", "bash"):
        lines = [line.partition("#")[0].strip() for line in block.splitlines()]
        yield [Shown(line) for line in lines if "-m playground" in line]
    sentences = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for command in re.findall(r"`((?:[A-Z_]+=\S+ )*python -m playground [^`]+)`", sentences):
        yield [Shown(" ".join(command.split()))]


def is_board(command: str) -> bool:
    """Whether it runs a lesson's file by itself: tests/lessons/test_boards.py runs those."""
    return bool(re.match(r"(torchrun .*|python )lesson\.py\b", command))


def is_lesson(command: str) -> bool:
    """Whether it runs a lesson: tests/lessons/test_programs.py runs those. Not
    what records it, for the next command of a block."""
    words = command.removeprefix(OURS).split()
    return bool(words) and words[0] in LESSONS and "--see" not in words


def all_commands() -> list[list[Shown]]:
    """The commands of every README that can be run here, those of one block together; none
    twice."""
    found: dict[tuple[Shown, ...], None] = {}
    for readme in READMES:
        text = readme.read_text(encoding="utf-8")
        for group in (*consoles(text), *commands_elsewhere(text)):
            ours = [
                shown
                for shown in group
                if shown.command not in NOT_RUN
                and not is_board(shown.command)
                and not is_lesson(shown.command)
            ]
            found[tuple(ours)] = None
    alone = {
        group[0].command: list(group) for group in found if len(group) == 1 and not group[0].output
    }
    blocks = [
        list(group) for group in found if len(group) > 1 or any(shown.output for shown in group)
    ]
    for shown in (shown for group in blocks for shown in group):
        alone.pop(shown.command, None)
    return [*blocks, *alone.values()]


def groups_to_run() -> list[Any]:
    """`all_commands`, as parameters."""
    names = [(group, group[0].command.removeprefix(OURS)) for group in all_commands()]
    marks = [[pytest.mark.stress] * (name in HEAVIER) for _, name in names]
    return [
        pytest.param(group, id=name, marks=needed)
        for (group, name), needed in zip(names, marks, strict=True)
    ]


def form(lines: list[str]) -> str:
    """Words in a row, with # for every number: what is the same however wide numbers are and
    wherever lines end. (To the names of functions older versions of torch add Backward0.)"""
    lines = [re.sub(r"Backward\d\b", "", line) for line in lines]
    return re.sub(
        r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?|\bnan\b", "#", " ".join(" ".join(lines).split())
    )


def body(lines: list[str]) -> list[str]:
    """The lines after the first empty one: those before say on what, and with which data, the
    command has run."""
    return lines[lines.index("") :]


def pieces(lines: list[str]) -> list[list[str]]:
    """The lines between those that say `…`, where lines are left out."""
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip() == "…":
            found.append([])
        else:
            found[-1].append(line)
    return [piece for piece in found if any(piece)]


def check_output(printed: str, shown: list[str]) -> None:
    """Every piece of what is shown must have been printed, in this order, in the same form."""
    lines = printed.splitlines()
    assert lines[0].split(":")[0] == shown[0].split(":")[0]
    rest = form(body(lines))
    for piece in pieces(body(shown)):
        text = form(piece)
        assert text in rest
        rest = rest.partition(text)[2]


@pytest.mark.parametrize("group", groups_to_run())
def test_commands_print_what_is_shown(
    group: list[Shown],
    run_cli: Callable[..., Any],
    data_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The commands of a block run one after the other in one folder, so that each finds the files
    of those before.

    Where there is no terminal, no line is wider than 80 columns. (What no README runs:
    tests/ui/test_widths.py.)
    """
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLAYGROUND_DATA_DIR", str(data_dir))
    for shown in group:
        assert shown.words[:3] == OURS.split()
        words = [word.replace("/home/me/", f"{tmp_path}/") for word in shown.words[3:]]
        words, redirected = (words[:-2], words[-1]) if ">" in words else (words, None)
        smaller = () if "--diff" in words else SMALLER.get(words[0], ())
        quick = WITHOUT_OUTPUT.get(" ".join(words), WITHOUT_OUTPUT.get(words[0], ()))
        quick = () if shown.output or "--diff" in words else quick
        with monkeypatch.context() as patch:
            for name, value in shown.environ.items():
                patch.setenv(name, value)
            if {"--see", "-o", "exercise"} & {*words}:  # it may be pasted twice: the file is there
                assert run_cli(*words, *smaller, *quick).code == 0
            result = run_cli(*words, *smaller, *quick)
        assert result.code == 0, result.err
        assert redirected or too_wide(result.out) == []
        if redirected:
            Path(redirected).write_text(result.out)
        if shown.output:
            check_output(result.out, list(shown.output))


def test_what_is_not_run_is_there() -> None:
    found = {
        shown.command
        for readme in READMES
        for text in [readme.read_text(encoding="utf-8")]
        for group in (*consoles(text), *commands_elsewhere(text))
        for shown in group
    }
    assert NOT_RUN.keys() <= found
    assert {f"{OURS}{command}" for command in HEAVIER} <= found


def test_the_path_lists_every_lesson_in_order() -> None:
    text = ROOT_README.read_text(encoding="utf-8")
    listed = re.findall(
        r"^\| \[([\w-]+)\]\((.*?)/?\) \| `python -m playground ([\w-]+)`", text, re.MULTILINE
    )
    assert listed == [(lesson.name, lesson.path, lesson.name) for lesson in ROWS]


def test_the_path_says_of_each_chapter_how_many_minutes_that_says() -> None:
    text = ROOT_README.read_text(encoding="utf-8")
    minutes = dict(re.findall(r"^\| \[([\w-]+)\]\(.*\| (\d+) \|$", text, re.MULTILINE))
    assert [*minutes] == [lesson.name for lesson in ROWS]
    for lesson in ROWS:
        chapter = (ROOT / lesson.path / "README.md").read_text(encoding="utf-8")
        assert re.findall(r"(\d+) minutes\s+(?:> +)?to read", chapter) == [minutes[lesson.name]]


def test_the_readme_counts_what_there_is() -> None:
    """Lessons, exercises, and the hours on the path: the sums of the minutes of each."""
    text = " ".join(ROOT_README.read_text(encoding="utf-8").split())
    assert f"**{len(ROWS)} lessons**" in text
    assert f"**{len(CATALOGUE)} exercises**" in text
    path = [each.name for each in next(iter(PARTS.values()))]
    read = "".join(texts.CHAPTERS[name].read_text(encoding="utf-8") for name in path)
    reading = [int(each) for each in re.findall(r"(\d+) minutes\s+(?:> +)?to read", read)]
    exercises = [each.minutes for each in CATALOGUE.values() if each.lesson in path]
    assert f"they add up to {sum(reading) / 60:.1f} hours" in text
    assert f"The exercises of the path take {sum(exercises) / 60:.0f} hours" in text
    assert {CATALOGUE[name].lesson for name in CORE} == {*path}
    first = sum(CATALOGUE[name].minutes for name in CORE)
    assert f"take {first / 60:.0f}: {(sum(reading) + first) / 60:.0f} hours with the texts" in text


def anchors(text: str) -> set[str]:
    """The names that a link may have after #: the headings, as GitHub writes them, and the words of
    the glossary."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    words = re.findall(r'<a id="(.*?)"></a>', text)
    return {
        *words,
        *(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings),
    }


@pytest.mark.parametrize(
    "readme", READMES, ids=lambda readme: f"{readme.parent.name} {readme.stem}"
)
def test_what_a_readme_points_to_is_there(readme: Path) -> None:
    for target, anchor in re.findall(
        r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", readme.read_text(encoding="utf-8")
    ):
        file = readme.parent / target if target else readme
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), anchor


def test_make_has_what_the_readmes_ask_it_for() -> None:
    targets = re.findall(
        r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    for readme in READMES:
        asked = re.findall(
            r"(?:^|`)make ([a-z]+)(?=`|$|  )", readme.read_text(encoding="utf-8"), re.MULTILINE
        )
        assert set(asked) <= set(targets)


@pytest.mark.parametrize("lesson", [*ROWS, *TOOLS.values()], ids=lambda lesson: lesson.name)
def test_every_chapter_shows_a_run_and_has_exercises(lesson: Any) -> None:
    text = texts.CHAPTERS[lesson.name].read_text(encoding="utf-8")
    assert f"$ python -m playground {lesson.name}" in text
    exercises = text.split("## Try this")[1].split("\n## ")[0]
    assert len(re.findall(r"^\d+\. ", exercises, re.MULTILINE)) >= 2
    assert "## Sources" in text
    if isinstance(lesson, Lesson):
        assert "## When it pays" in text
        assert "## You can now" in text
    else:
        assert "## Figures and limits" in text


def test_the_two_line_difference_is_the_real_one() -> None:
    text = texts.CHAPTERS["ddp"].read_text(encoding="utf-8")
    diff, *_ = fenced_blocks(text, "diff")
    source = {
        sign: (ROOT / "playground" / "lessons" / lesson / "lesson.py")
        .read_text(encoding="utf-8")
        .splitlines()
        for sign, lesson in (("-", "sgd"), ("+", "ddp"))
    }
    for line in diff.splitlines():
        if line[0] in source:
            assert line[1:] in source[line[0]]
            assert line[1:] not in source["+" if line[0] == "-" else "-"]
        else:
            assert all(line[1:] in lines for lines in source.values())


LONG = (
    "bytes", "ladder",
)  # fmt: skip
"""Lessons whose cells take as long as their own tests."""


def python_blocks(kind: str) -> list[Any]:
    """The blocks of Python of one kind, as parameters: scripts to be started, test modules, or
    cells of a notebook."""
    found = []
    for readme in READMES:
        text = EXCERPT.sub("", readme.read_text(encoding="utf-8"))
        for number, block in enumerate(fenced_blocks(text, "python")):
            # those of ranks: tests/lessons/test_programs.py
            if 'dist.init_process_group("gloo")' in block:
                continue
            this = "script" if "__main__" in block else "test" if "def test_" in block else "cell"
            if this == kind:
                # each script starts a process, for seconds
                heavier = this == "script" and readme is not ROOT_README
                heavier |= readme.parent.name in LONG
                marks = [pytest.mark.stress] * heavier
                found.append(pytest.param(block, id=f"{readme.parent.name} {number}", marks=marks))
    return found


def check_printed(block: str, printed: str) -> None:
    """Whatever a block says about what it prints, in a comment beside that, it has printed, in this
    order."""
    lines = iter(printed.splitlines())
    for expected in re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE):
        assert expected in lines


@pytest.mark.parametrize("block", python_blocks("cell"))
def test_cells_run(
    block: str,
    data_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "playground").symlink_to(data_dir)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    exec(compile(block, "<cell>", "exec"), {"__name__": "cell"})
    check_printed(block, capsys.readouterr().out)


def test_what_blocks_import_of_ours_is_there() -> None:
    """Those that wait for `make stress`, too."""
    blocks = [
        param.values[0] for kind in ("cell", "script", "test") for param in python_blocks(kind)
    ]
    found = 0
    for node in chain.from_iterable(ast.walk(ast.parse(block)) for block in blocks):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("playground"):
            module = importlib.import_module(node.module or "")
            for each in node.names:
                name = f"{module.__name__}.{each.name}"
                assert hasattr(module, each.name) or importlib.util.find_spec(name), name
                found += 1
    assert found


@pytest.mark.parametrize("block", python_blocks("script"))
def test_scripts_run_and_leave_nothing_behind(
    block: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fork_program: Callable[..., ForkedProgram],
) -> None:
    (tmp_path / f"{SCRIPT}.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    if "set_start_method" in block:  # which a process of a fork server has done before
        done = subprocess.run(
            [sys.executable, f"{SCRIPT}.py"], capture_output=True, text=True, timeout=ENOUGH
        )
        assert (done.returncode, done.stderr) == (0, "")
        return
    program = fork_program(SCRIPT)
    printed, complaints = program.communicate(timeout=ENOUGH)
    assert (program.returncode, complaints) == (0, "")
    check_printed(block, printed)
    assert session_ends(program.pid)


@pytest.mark.parametrize("block", python_blocks("test"))
def test_tests_pass(block: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    pytester.makepyfile(test_readme_example=block)
    pytester.runpytest_inprocess("-q").assert_outcomes(passed=1)


def test_nothing_shown_is_wider_than_80_columns() -> None:
    for readme in READMES:
        for group in consoles(readme.read_text(encoding="utf-8")):
            assert [line for shown in group for line in shown.output if len(line) > 80] == []


def run_make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """As a shell runs it: not as a part of the make that runs these tests."""
    environ = {
        name: value for name, value in os.environ.items() if "MAKE" not in name and name != "MFLAGS"
    }
    return subprocess.run(
        ["make", *words], cwd=folder, env=environ, capture_output=True, text=True, check=True
    )


def test_make_alone_lists_its_targets_and_runs_none(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    made = run_make(tmp_path)
    listed = re.findall(r"^make ([a-z]+) +\S", made.stdout, re.MULTILINE)
    assert listed == re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [each.name for each in tmp_path.iterdir()] == ["Makefile"]


def test_make_demo_says_first_what_it_fetches(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    made = run_make(tmp_path, "--dry-run", "demo")
    first = next(line for line in made.stdout.splitlines() if line.startswith("echo "))
    assert all(word in first for word in (" 5.4 GB ", " 1 GB", " 12 MB", " minute"))
