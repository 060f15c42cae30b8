"""The course's texts: in the terminal, by `read`, whose table of `chapters` says where they are,
and as static pages, which `build` writes."""

from __future__ import annotations

from playground.base.remote import remote
from playground.tools import Tool

SITE = Tool(
    name="site",
    purpose="write the course as static pages, whose figures play recorded runs",
    command=remote("playground.site.build:command"),
)
READ = Tool(
    name="read",
    purpose="show a chapter or a page beside it, the map, running, tutorials, or the glossary",
    command=remote("playground.site.chapters:command"),
)
