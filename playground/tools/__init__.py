"""Tools that measure and examine: a folder each, of the same shape as a lesson's."""

from __future__ import annotations

from dataclasses import dataclass

from playground.runtime.remote import Remote, remote


@dataclass(frozen=True, kw_only=True)
class Tool:
    name: str
    """Its command."""
    purpose: str
    """One line for the list of commands."""
    command: Remote


TOOLS = {
    name: Tool(name=name, purpose=purpose, command=remote(f"playground.tools.{name}.page:command"))
    for name, purpose in (
        ("bench", "measure the bandwidth of collectives, the backend's and ours"),
        ("scale", "predict the time of all-reduce on up to 65,536 ranks"),
        ("snapshots", "list and verify the snapshots of a training run, measure what one costs"),
        ("why", "say who waits for whom in a run that stands still"),
        ("chaos", "kill processes of a training at random, and compare its end with an undisturbed one"),
    )
}
