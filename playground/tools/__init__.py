"""What measures and examines: a folder each, of the same shape as a lesson's."""

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
    tool.name: tool
    for tool in (
        Tool(
            name="bench",
            purpose="measure the bandwidth of collectives, the backend's and ours",
            command=remote("playground.tools.bench.command:command"),
        ),
        Tool(
            name="scale",
            purpose="predict the time of all-reduce on up to 65,536 ranks",
            command=remote("playground.tools.scale.command:command"),
        ),
        Tool(
            name="snapshots",
            purpose="list and verify the snapshots of a training run, measure what one costs",
            command=remote("playground.tools.snapshots.command:command"),
        ),
        Tool(
            name="chaos",
            purpose="kill processes of a training at random, and compare its end with an undisturbed one",
            command=remote("playground.tools.chaos.command:command"),
        ),
    )
}
