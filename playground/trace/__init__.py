"""Look at a recorded run: as text, as a picture, as a page that plays it; and the figures of the
field's tutorials."""

from __future__ import annotations

from playground.runtime.remote import remote
from playground.tools import Tool

SEE = Tool(
    name="see",
    purpose="look at a recorded run, and draw the figures of tutorials from runs of your own",
    command=remote("playground.trace.command:command"),
)
