"""The course as static pages: `build` writes them, `page` is the command."""

from __future__ import annotations

from playground import tools
from playground.lessons import PATH
from playground.runtime.remote import ROOT, remote
from playground.see import SEE
from playground.tools import Tool

SITE = Tool(
    name="site",
    purpose="write the course as static pages, whose figures play recorded runs",
    command=remote("playground.site.page:command"),
)
_TOOLS = [*tools.TOOLS.values(), SEE]
CHAPTERS = {
    **{lesson.name: ROOT / lesson.path / "README.md" for lesson in PATH},
    **{tool.name: ROOT.joinpath(*tool.command.module.split(".")[:-1], "README.md") for tool in _TOOLS},
    **{page.stem: page for lesson in PATH for page in sorted((ROOT / lesson.path).glob("[!R]*.md"))},
    **{name: ROOT / "playground" / "lessons" / f"{name}.md" for name in ("map", "running", "tutorials", "glossary")},
}
"""The files of chapters, by the names that `read` takes."""
