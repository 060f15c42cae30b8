"""Whatever a chapter names is there: commands with their options and values, options, files,
modules and variables of the environment. Nothing is run here; tests/test_readme.py does that."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import click
import pytest
from next_steps import PLACEHOLDER, check_command, commands
from test_readme import OURS, READMES, fenced_blocks
from torch.distributed.run import get_args_parser

from playground.app import cli
from playground.base.remote import ROOT

OF_OTHERS = {
    "--ntasks-per-node",
    "--cap-add", "--fixtures", "--install", "--local-rank", "--signal",
}  # fmt: skip
"""Options of docker, of pytest, of WSL, of the old launcher, of sbatch."""
FILES_OF_OTHERS = {
    "accuracy.py", "around.py", "average.py", "both_send.py", "count.py", "ddp.py", "gather.py",
    "halves.py", "hang.py", "levels.py", "mlp.py", "one_gradient.py", "operations.py",
    "parallel.py", "route.py", "src/ddp.py", "swap.py", "train.py", "unequal.py",
}  # fmt: skip
"""Files of the tutorials', and those that the reader writes."""


def code_in(text: str) -> tuple[list[str], list[str]]:
    """Its lines of shell in blocks, and what it has in backquotes elsewhere."""
    blocks = fenced_blocks(text, "console", "", "bash")
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    prose = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return lines, [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]


def calls(text: str) -> Iterator[list[str]]:
    """The words of every command that it shows or names, without `python -m playground`."""
    lines, inline = code_in(text)
    for code in (*lines, *inline):
        before, ours, call = code.partition(OURS)
        if ours and re.fullmatch(r"([A-Z_]+=\S+ )*", before):
            yield shlex.split(call.partition(" > ")[0], comments=True)
    for code in inline:
        if re.match(rf"({'|'.join(commands())}) -", code):
            yield shlex.split(code)


def id_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", READMES, ids=id_of)
def test_the_commands_that_a_page_names_have_these_options(page: Path) -> None:
    for words in calls(page.read_text(encoding="utf-8")):
        if words and not PLACEHOLDER.fullmatch(words[0]) and not words[0].startswith("-"):
            check_command(words)


def test_what_is_not_there_is_found() -> None:
    for call, wrong in (
        ("hello --ranks 2", "--ranks"),
        ("rpc --only remote_call", "--only"),
        ("scaling --timeout many", "many"),
    ):
        with pytest.raises(click.UsageError, match=wrong):
            check_command(next(calls(f"`{OURS}{call}`")))
    with pytest.raises(KeyError):
        check_command(next(calls(f"`{OURS}helo`")))


@cache
def known_options() -> set[str]:
    """Of all commands, of torchrun, and of others."""
    named = commands().values()
    below = (each for command in named for each in getattr(command, "commands", {}).values())
    ours = {
        opt
        for command in (cli, *named, *below)
        for param in command.params
        for opt in chain(param.opts, param.secondary_opts)
    }
    torchrun = {opt for action in get_args_parser()._actions for opt in action.option_strings}
    return ours | torchrun | OF_OTHERS | {"--help", "--version"}


@pytest.mark.parametrize("page", READMES, ids=id_of)
def test_the_options_that_a_page_names_are_those_of_a_command(page: Path) -> None:
    _, inline = code_in(page.read_text(encoding="utf-8"))
    named = {option for code in inline for option in re.findall(r"(?:^| )(--[a-z][\w-]*)", code)}
    assert named <= known_options()


@cache
def sources() -> dict[str, str]:
    """The text of each module, by its path below the root."""
    files = (ROOT / "playground").rglob("*.py")
    return {id_of(file): file.read_text(encoding="utf-8") for file in files}


@pytest.mark.parametrize("page", READMES, ids=id_of)
def test_the_files_modules_and_variables_that_a_page_names_are_there(page: Path) -> None:
    _, inline = code_in(page.read_text(encoding="utf-8"))
    names = {Path(file).name for file in sources()}
    for code in inline:
        if re.fullmatch(r"[\w/]+\.py", code) and code not in FILES_OF_OTHERS:
            there = Path(code).name in names if "/" not in code else (page.parent / code).exists()
            assert there or (ROOT / code).exists(), code
        for dotted in re.findall(r"(?:from |^)(playground(?:\.\w+)+)", code):
            assert find_name(dotted), dotted
        for variable in re.findall(r"(?<!_)PLAYGROUND_[A-Z_]+", code):
            assert any(variable in text for text in sources().values()), variable


def find_name(dotted: str) -> bool:
    """Whether it is a package, a module, or a name that one has in its text."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        path = "/".join(parts[:end])
        text = sources().get(f"{path}.py", sources().get(f"{path}/__init__.py"))
        if text is not None:
            return all(re.search(rf"\b{name}\b", text) for name in parts[end:])
    return False
