"""The files of the chapters and pages, by their names. Does not import torch."""

from __future__ import annotations

from playground.base.remote import ROOT
from playground.figures import SEE
from playground.lessons import ROWS
from playground.tools import TOOLS

LESSON_PAGES = {lesson.name: ROOT / lesson.path / "README.md" for lesson in ROWS}
TOOL_PAGES = {
    tool.name: ROOT.joinpath(*tool.command.module.split(".")[:-1], "README.md")
    for tool in TOOLS.values()
}
NEXT_TO_THEM = {
    page.stem: page
    for chapter in [*LESSON_PAGES.values(), *TOOL_PAGES.values()]
    for page in sorted(chapter.parent.glob("[!R]*.md"))
}
OTHERS = ("map", "your-script", "running", "testing", "gpus", "tutorials", "glossary")
CHAPTERS = {
    **LESSON_PAGES,
    **TOOL_PAGES,
    **NEXT_TO_THEM,
    SEE.name: ROOT / "playground/explain/replay/README.md",
    **{each: ROOT / "playground/lessons" / f"{each.replace('-', '_')}.md" for each in OTHERS},
}
"""By their names."""
READ_TOO = {each: ROOT / f"playground/{each}/README.md" for each in ("play", "exercises")}
"""Pages that are no chapters, by their names."""
PAGES = CHAPTERS | READ_TOO
"""By the names that `read` takes."""

FOLDERS = {
    name: page
    for page, file in reversed(PAGES.items())
    if (name := file.parent.name) not in PAGES and file.name == "README.md"
}
"""The pages of folders whose names are not those of their pages, by folder."""
GROUPS = {
    "Lessons": LESSON_PAGES,
    "Tools": [*TOOL_PAGES, SEE.name],
    "Pages": [*NEXT_TO_THEM, *OTHERS, *READ_TOO],
}
"""The names of pages, as help lists them."""
NAMES = {file.resolve(): name for name, file in reversed(PAGES.items())}
"""The names of files; of two for one, the first."""
