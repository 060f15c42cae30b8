"""An option of ours that stands behind the name of the script that a command runs, and so goes to
the script."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

PARSES_ALL = re.compile(r"\b(HfArgumentParser|fire|hydra|simple_parsing|tyro)\b")
"""In the text of a script whose options need not stand there."""


def find_misplaced(command: click.Command, words: Sequence[str], text: str) -> str:
    """The first option of this command among the arguments `words` of a script whose text does not
    have its name; empty if there is none."""
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    for name in (word.partition("=")[0] for word in words):
        is_ours = name.startswith("--") and name in known and not PARSES_ALL.search(text)
        if is_ours and not re.search(name.strip("-").replace("-", "[-_]"), text):
            return name
    return ""


def tell_misplaced(script: str, words: Sequence[str], text: str) -> None:
    """Say which option of the command that runs stands after the name of the script."""
    command = click.get_current_context().command
    if name := find_misplaced(command, words, text):
        said = f"{name} stands after {script}, so the script gets it: options of {command.name}"
        click.echo(f"playground: {said} stand before the script", err=True)
