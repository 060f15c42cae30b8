"""Ranks that stay: a prompt, or a notebook, whose every cell runs on all ranks of one world.

`extension` gives a cell to `world`, which runs it on the ranks, where `cells` executes it: read
these three first.

In the process of the prompt:

    page           the command `play`
    extension      the prompt, by IPython, and the magics
    world          the ranks: cells are handed to them, hangs ended, lost ranks replaced
    checking       cells that train are checked for silent mistakes
    course_magics  lessons and exercises
    recordings     a cell as a recording, which %see plays
    text_report    how a cell ended, in words

In a rank:

    cells           runs cells in one namespace
    lesson_program  runs a lesson's program as a cell
    html            a value as a notebook shows it
"""

from __future__ import annotations

from playground.base.remote import remote
from playground.tools import Tool

PLAY = Tool(
    name="play",
    purpose="type programs at a prompt, and run each cell on all ranks",
    command=remote("playground.play.page:command"),
)
