"""The commands of the playground that a text names: whether there are such commands, and whether
they can be run."""

from __future__ import annotations

import re
import shlex
from functools import cache

import click
from fixtures import Run
from programs import Outcome

from playground.app import cli

START = r"(?<!of )python\s+-m\s+playground\b"
OURS = re.compile(rf"{START}((?: [^\s`;,()|]+)+)")
"""A command goes on to the end of its line, or to a sign after which a sentence goes on. (An error
speaks of ranks of python -m playground.)"""
PLACEHOLDER = re.compile(r"[A-Z][A-Z|,_]*|.*…")
"""A word for which the reader puts a value."""


@cache
def commands() -> dict[str, click.Command]:
    with click.Context(cli) as ctx:
        found = {name: cli.get_command(ctx, name) for name in cli.list_commands(ctx)}
    return {name: command for name, command in found.items() if command}


def check_command(words: list[str]) -> None:
    """Raises click's `UsageError` where an option, or a value of a choice, is not there."""
    name, *args = words
    command = commands()[name]
    last = {opt: param for param in command.params for opt in param.opts}.get(
        args[-1] if args else ""
    )
    if isinstance(last, click.Option) and not last.is_flag:  # named without a value
        args.pop()
    with click.Context(command, info_name=name, **command.context_settings) as ctx:
        values, _, order = command.make_parser(ctx).parse_args(args)
        for param in order:
            value = values[param.name] if isinstance(param, click.Option) else None
            texts = value if isinstance(value, (list, tuple)) else [value]
            if getattr(param, "_flag_needs_value", False) and not isinstance(value, str):
                continue  # it is named without its value, and may be
            if value is not None and not any(PLACEHOLDER.fullmatch(str(text)) for text in texts):
                param.type_cast_value(ctx, value)


def printed_commands(text: str) -> list[list[str]]:
    """The words of each command that an output names, without `python -m playground`. It fails
    where there is no such command, or where a line ends in the middle of one: it is to be
    pasted."""
    found = [match for line in text.splitlines() for match in OURS.finditer(line)]
    assert len(found) == len(re.findall(rf"{START} [^\s`;,()|]", text)), (
        f"a line ends in a command: {text}"
    )
    steps = [words for match in found if (words := shlex.split(match[1].rstrip(".:")))]
    for words in steps:
        if not words[0].startswith("-") and not PLACEHOLDER.fullmatch(words[0]):
            check_command(words)
    return steps


INTERACTIVE = {"play"}
"""Commands that wait for somebody who types."""


def follow(run: Run, *words: str, done: set[tuple[str, ...]] | None = None) -> Outcome:
    """Run a command, then every command that its output names, and those that theirs name. None may
    fail, but a solution that is wrong. (What a chapter names, tests/test_readme.py runs.)"""
    done = set() if done is None else done
    shown = run(*words)
    assert "Traceback" not in shown.err, shown.err
    for step in printed_commands(f"{shown.out}\n{shown.err}") if words[:1] != ("read",) else ():
        if tuple(step) in done or any(map(PLACEHOLDER.fullmatch, step)) or step[0] in INTERACTIVE:
            continue
        done.add(tuple(step))
        result = follow(run, *step, done=done)
        assert result.code == 0 or (step[0] == "check" and result.code == 1), (step, result.err)
    return shown
