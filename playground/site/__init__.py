"""The course's texts: in the terminal, by `read`, and as static pages, by `site`. Begin with
`texts`, the table of all texts, and `pages`.

    texts           the files of texts, by their names
    chapters        the command `read`
    build           the command `site`: it writes all pages
    pages           the body of each page
    exercises       the exercises of a chapter, and the list of all
    failing_programs  the pages of the programs of `break`
    contents        what surrounds it: the contents, the links to other pages
    addresses       the address of each text, program and exercise
    markdown, code  Markdown and programs as HTML
    calculators/    the calculators of chapters
    search          what a search finds, and lists first
    settings.js, site.js  in the browser: what the reader has chosen; search, progress, copying
"""

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
