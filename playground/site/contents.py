"""What surrounds a page: the contents, and links to the page before and the one after."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby, pairwise
from string import Template
from typing import NamedTuple

from playground.lessons import PARTS
from playground.site.addresses import HERE, LESSON_FILES, TEXTS

NONE: Mapping[str, str] = {}
CURRENT = ' aria-current="page"'
HEADING = re.compile(r'<h([23]) id="(.*?)">(.*?)</h\1>')
ANCHORED = (
    r'<h\1 id="\2">\3 <a class="anchor" href="#\2" aria-label="Link to this section">#</a></h\1>'
)


def list_links(links: Mapping[str, str], here: str = "", below: Mapping[str, str] = NONE) -> str:
    """The items of a list of links, by addresses with titles; that of this page is marked. `below`:
    lists under some of them."""
    return "".join(
        f'<li><a href="{address}"{CURRENT if address == here else ""}>{title}</a>'
        f"{below.get(address, '')}</li>"
        for address, title in links.items()
    )


class Page(NamedTuple):
    """A page without what surrounds its text. `within`: the page of the contents under which it is
    listed, if that is another."""

    title: str
    body: str
    program: str
    within: str


PROGRESS = """<p class="progress" data-done="{}" hidden><label><input type="checkbox">
<span></span></label></p>"""


def surround(pages: Mapping[str, Page], titles: Mapping[str, str]) -> dict[str, str]:
    """All pages by their files, with what surrounds their texts. `titles`: those of texts, by
    page."""
    template = Template((HERE / "template.html").read_text(encoding="utf-8"))
    texts = [name for name in TEXTS.values() if not pages[name].within]
    others = [name for name in pages if name not in TEXTS.values()]
    kinds = [[*names] for _, names in groupby(others, lambda name: name.partition("-")[0])]
    kinds += [[above, name] for name in TEXTS.values() if (above := pages[name].within)]
    chapters = {*LESSON_FILES.values()}
    turns = {name: ["", ""] for name in pages}
    for one, next_ in (pair for names in [texts, *kinds] for pair in pairwise(names)):
        after = f'<a rel="next" href="{next_}.html">{pages[next_].title} →</a>'
        turns[one][1] = turns[one][1] or after
        turns[next_][0] = f'<a rel="prev" href="{one}.html">← {pages[one].title}</a>'
    return {
        f"{name}.html": template.substitute(
            title=page.title,
            contents=list_contents(name, pages, titles),
            body=HEADING.sub(ANCHORED, page.body),
            progress=PROGRESS.format(name) if name in chapters else "",
            turns="".join(turns[name]),
            program=page.program,
        )
        for name, page in pages.items()
    }


def list_contents(name: str, pages: Mapping[str, Page], titles: Mapping[str, str]) -> str:
    """The contents beside a page: the chapters, numbered, and the other pages; under this page
    its sections, and beside or under it those that are within the same one."""
    page = pages[name]
    above, here = page.within or name, f"{name}.html"
    sections = {f"#{at}": title for level, at, title in HEADING.findall(page.body) if level == "2"}
    within = {
        f"{each}.html": titles.get(each) or each.partition("-")[2]
        for each, about in pages.items()
        if about.within == above
    }
    below = {here: f"<ul>{list_links(sections)}</ul>"} if sections else {}
    if within:
        its = "" if page.within else list_links(sections)
        below |= {f"{above}.html": f"<ul>{its}{list_links(within, here, below)}</ul>"}
    parts, number = f"<ul>{list_links({'index.html': 'Overview'}, here, below)}</ul>", 1
    for title, part in PARTS.items():
        links = {f"{each.name}.html": each.name for each in part}
        parts += f'<b>{title}</b><ol start="{number}">{list_links(links, here, below)}</ol>'
        number += len(part)
    links = {
        f"{each}.html": titles[each]
        for each in TEXTS.values()
        if each != "index" and each not in LESSON_FILES.values() and not pages[each].within
    }
    is_open = " open" if f"{above}.html" in links else ""
    return (
        f"{parts}<details{is_open}><summary>Tools and pages</summary>"
        f"<ul>{list_links(links, here, below)}</ul></details>"
    )
