"""What is drawn of runs: the figures of the field's tutorials, and those of the chapters."""

from __future__ import annotations

from playground.base.remote import remote
from playground.tools import Tool

SEE = Tool(
    name="see",
    purpose="look at a recorded run, and draw the figures of tutorials from runs of your own",
    command=remote("playground.figures.command:command"),
)
