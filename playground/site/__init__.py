"""The course as static pages: `build` writes them."""

from __future__ import annotations

from playground import tools
from playground.lessons import PATH
from playground.runtime.remote import ROOT, remote
from playground.see import SEE
from playground.tools import Tool

PURPOSE = "write the course as static pages, whose figures play recorded runs"
SITE = Tool(name="site", purpose=PURPOSE, command=remote("playground.site.build:command"))
_TOOLS = [*tools.TOOLS.values(), SEE]
CHAPTERS = {lesson.name: ROOT / lesson.path / "README.md" for lesson in PATH}
CHAPTERS |= {tool.name: ROOT.joinpath(*tool.command.module.split(".")[:-1], "README.md") for tool in _TOOLS}
CHAPTERS |= {page.stem: page for lesson in PATH for page in sorted((ROOT / lesson.path).glob("[!R]*.md"))}
CHAPTERS |= {each: ROOT / "playground/lessons" / f"{each}.md" for each in ("map", "running", "tutorials", "glossary")}
"""The files of chapters, by the names that `read` takes."""
