"""Ranks that stay: a prompt, or a notebook, whose every cell runs on all ranks of one world."""

from __future__ import annotations

from playground.base.remote import remote
from playground.tools import Tool

PLAY = Tool(
    name="play",
    purpose="type programs at a prompt, and run each cell on all ranks",
    command=remote("playground.play.page:command"),
)
