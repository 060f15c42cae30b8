"""Tools that measure and examine: a folder each, with a page of its settings and a chapter."""

from __future__ import annotations

from dataclasses import dataclass

from playground.base.remote import Remote, remote


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A command that is no lesson: its row in the lists of commands."""

    name: str
    """Its command."""
    purpose: str
    """One line for the list of commands."""
    command: Remote


FOLDERS = {"break": "failures"}
"""Folders that have not the name of their command: a keyword of Python cannot be imported."""
TOOLS = {
    name: Tool(
        name=name,
        purpose=purpose,
        command=remote(f"playground.tools.{FOLDERS.get(name, name)}.page:command"),
    )
    for name, purpose in (
        ("run", "run your own script on ranks, as torchrun does: a hang or a failure is explained"),
        ("bench", "measure the bandwidth of collectives, the backend's and ours"),
        ("scale", "predict the time of all-reduce on up to 65,536 ranks"),
        (
            "break",
            "run programs that hang, fail or return wrong values, each with its diagnosis and its "
            "fix",
        ),
        ("why", "say who waits for whom in a run that stands still"),
        ("doctor", "is this machine, are these hosts, fit for distributed training?"),
    )
}
