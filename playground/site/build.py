"""The command `site`, and all pages: the same tree gives the same bytes. Does not import torch."""

from __future__ import annotations

import difflib
import html
import json
import re
import textwrap
from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from string import Template
from typing import NamedTuple

import click
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from playground.base.errors import PlaygroundError, UsageError
from playground.base.files import make_folder, write_file
from playground.base.remote import ROOT, file_of
from playground.exercises.exercise import CATALOGUE, FOLDER, Exercise
from playground.explain.replay.play import read_script, read_style, render_player
from playground.explain.replay.record import Recording
from playground.figures.runs import FIGURE_OF, find_run
from playground.lessons import PARTS, PATH
from playground.site import SITE
from playground.site.calculators import FILES, place_calculators
from playground.site.chapters import CHAPTERS
from playground.site.symptoms import place_symptoms
from playground.tools.failures.page import PROGRAMS, find, read_body
from playground.ui.options import FILE
from playground.ui.session import Session, session_command

HERE = Path(__file__).parent
CODE = ROOT / "playground"
_OTHERS = {
    "exercises": FOLDER / "README.md",
    "first": CODE / "lessons" / "first.ipynb",
    "house": CODE / "README.md",
}
TEXTS = {
    file: name
    for name, file in ({"index": ROOT / "README.md"} | CHAPTERS | _OTHERS).items()
    if name != "why"
}
"""The page of each text."""
LESSON_FILES = {ROOT / lesson.path / "lesson.py": lesson.name for lesson in PATH}
"""The chapter beside which the file of a lesson's program is shown."""
ADDRESSES = {file: f"{page}.html" for file, page in TEXTS.items()}
ADDRESSES |= {file: f"{page}.html#{file.name}-1" for file, page in LESSON_FILES.items()}
ADDRESSES |= {
    FOLDER / each.folder: f"{each.lesson}.html#exercise-{name}" for name, each in CATALOGUE.items()
}
"""The addresses of texts, programs, and the folders of exercises."""
PLAYED = re.compile(
    r"<!-- play (?P<run>[\w -]+ board)(?: from (?P<event>\w+)(?: (?P<nth>\d+))?)?: "
    r"(?P<says>.+?) -->",
    re.DOTALL,
)
"""A run that a chapter plays: its name, the event on which the player opens (of rank 0, the first
of this name or the nth), and its caption."""
AFTER_TRIALS = re.compile(r'(?<=<h2 id="try-this">).*?(?=<h2|\Z)', re.DOTALL)
"""What stands before a chapter's exercises."""
DIAGRAM = re.compile(r"<code>[^<]* ─▶ .*?</code>", re.DOTALL)
"""The layers of PyTorch, which the map draws in letters."""
LESSON_NAMED = re.compile(
    rf"(?<=[(, ])({'|'.join(sorted(CHAPTERS, key=len, reverse=True))})(?=[,)])"
)
LESSON_LINK = r'<a href="\1.html">\1</a>'
COLOURED = {*re.findall(r"\.(\w+)", (HERE / "site.css").read_text(encoding="utf-8"))}
"""The classes in the style sheet; those of code among them."""
EXCERPT = re.compile(r"\]\(([^)]+)\):\n\n( *)```python\n(.*?)^\2```$", re.DOTALL | re.MULTILINE)
"""Code that a chapter shows of a file, which is named before it."""


def line_of(block: str, source: str) -> int:
    """The line at which `block` begins in `source`; 0 unless its lines are lines of `source`, in
    order: dedented, with a line `# …` for what is left out. Empty lines do not count: the formatter
    has rules of its own for those of a block."""
    lines = (re.escape(line) for line in block.splitlines() if line)
    parts = (
        r"(?:.*\n)*?" if line.endswith("\\#\\ …") else rf"\n*(?P=indent){line}\n" for line in lines
    )
    found = re.search(rf"^(?=(?P<indent> *)){''.join(parts)}", source, re.MULTILINE)
    if not found:
        return 0
    return source.count("\n", 0, found.end() - len(found[0].lstrip("\n"))) + 1


def read_text(file: Path) -> str:
    """A text as Markdown; of a notebook, its cells. Raises `PlaygroundError` if it shows code that
    its source lacks."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        cells = (("".join(cell["source"]), cell["cell_type"]) for cell in json.loads(text)["cells"])
        return "\n\n".join(
            f"```python\n{cell}\n```" if kind == "code" else cell for cell, kind in cells
        )
    for name, _, block in EXCERPT.findall(text):
        if not line_of(textwrap.dedent(block), (file.parent / name).read_text(encoding="utf-8")):
            raise PlaygroundError(
                f"{file.relative_to(ROOT)} shows code that {name} lacks: "
                f"{block.splitlines()[0].strip()}"
            )
    return text


def colour(text: str, language: str) -> str:
    """Code as HTML, with spans for the classes that the style sheet has: pygments makes one of
    every token, and most have no colour of their own."""
    code = highlight(text, get_lexer_by_name(language, stripnl=False), HtmlFormatter(nowrap=True))
    return re.sub(
        r'<span class="(\w+)">(.*?)</span>',
        lambda span: span[0] if span[1] in COLOURED else span[2],
        code,
    )


def show_code(
    text: str, language: str, file: Path | None = None, first: int = 1, name: str = ""
) -> str:
    """Code as HTML, named after its language or `name`: without either, commands. Its lines
    have numbers, from `first` on, and anchors, if its file is given."""
    if language in ("python", "diff"):
        code = colour(text, language)
        if file:
            lines = enumerate(code.splitlines(keepends=True), first)
            code = "".join(
                f'<span id="{file.name}-{at}" data-n="{at}">{line}</span>' for at, line in lines
            )
    else:
        code = re.sub(
            r"^\$ .*", r"<b>\g<0></b>", html.escape(text, quote=False), flags=re.MULTILINE
        )
    about = (
        f'class="lines" aria-label="{file.name}"'
        if file
        else f'aria-label="{name or language or "commands"}"'
    )
    pre = f'<pre tabindex="0" role="group" {about}><code>{code}</code></pre>'
    return f'<div class="code">{pre}</div>\n'


NONE: Mapping[str, str] = {}
CURRENT = ' aria-current="page"'
TURNS = re.compile(r"^(?:(?:Previous|Next): \[[^]]*\]\([^)]*\)(?: · )?)+\n", re.MULTILINE)
"""The line of a chapter on those before and after it, of which pages have links of their own."""
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


MOST_LETTERS = 36
"""In the widest cells of all columns together, as many as a telephone has room for."""


def label_cells(tokens: list[Token]) -> None:
    """Mark the tables that are too wide for a telephone, which shows their cells one below another,
    each after the name of its column."""
    table = Token("", "", 0)
    names, widths, cells = list[str](), list[int](), list[Token]()
    for place, token in enumerate(tokens):
        if token.type == "table_open":
            table, names, widths, cells = token, [], [], []
        elif token.type in ("th_open", "td_open"):
            said = re.sub(r"\]\(.*?\)|<.*?>|[`*\[]", "", tokens[place + 1].content)
            if token.type == "th_open":
                names.append(said)
                widths.append(len(said))
            else:
                column = len(cells) % len(names)
                widths[column] = max(widths[column], len(said))
                cells.append(token)
        elif token.type == "table_close" and sum(widths) > MOST_LETTERS:
            table.meta["kind"] = "stack"
            for number, cell in enumerate(cells):
                if number % len(names) and names[number % len(names)]:
                    cell.attrSet("data-column", names[number % len(names)])


class Page(NamedTuple):
    """A page without what surrounds its text. `within`: the page of the contents under which it is
    listed, if that is another."""

    title: str
    body: str
    program: str
    within: str


class Site:
    """The pages, in the order in which they are added; `show` is given the name, the number and the
    count of each."""

    def __init__(self, show: Callable[[str, int, int], object]) -> None:
        self.markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
        self.markdown.add_render_rule(
            "table_open",
            lambda _, tokens, at, *more: (
                f'<div class="scroll {tokens[at].meta.get("kind", "")}" tabindex="0"><table>\n'
            ),
        )
        self.markdown.add_render_rule(
            "code_block", lambda _, tokens, at, *more: show_code(tokens[at].content, "text")
        )
        self.markdown.add_render_rule(
            "fence", lambda _, tokens, at, *more: show_code(tokens[at].content, tokens[at].info)
        )
        self.markdown.add_render_rule("table_close", lambda *_: "</table></div>\n")
        self.template = Template((HERE / "template.html").read_text(encoding="utf-8"))
        self.texts = {page: TURNS.sub("", read_text(file)) for file, page in TEXTS.items()}
        titles = {
            page: text.partition("\n")[0][2:].replace("`", "") for page, text in self.texts.items()
        }
        self.show = show
        self.pages: dict[str, Page] = {}
        self.copies: dict[str, Path] = {}
        """Files that are copied, by their place in the site."""
        self.played: set[str] = set()
        """Each run that a page plays, with that page: it is played there once."""
        self.titles = titles
        """Titles of texts, by page."""
        self.sections: list[list[str]] = []
        """The address, the title and the words of each section."""
        self.uses: dict[str, str] = {}
        """The page that first links to a word of the glossary."""
        self.codes: dict[Path, str] = {}
        """Files that are linked to, with the addresses of their code."""

    def add(self, page: str, title: str, body: str, program: str = "", within: str = "") -> None:
        self.show(
            title,
            len(self.pages),
            max(len(self.pages), len(TEXTS) + len(PROGRAMS)),
        )
        self.pages[page] = Page(html.escape(title), body, program, within)

    def finish(self) -> dict[str, str]:
        """All pages by their files, with what surrounds their texts: the contents, and links to the
        page before and to the one after."""
        texts = [name for name in TEXTS.values() if not self.pages[name].within]
        others = [name for name in self.pages if name not in TEXTS.values()]
        kinds = [[*names] for _, names in groupby(others, lambda name: name.partition("-")[0])]
        kinds += [[above, name] for name in TEXTS.values() if (above := self.pages[name].within)]
        marked = {*LESSON_FILES.values()}
        turns = {name: ["", ""] for name in self.pages}
        for one, next_ in (pair for names in [texts, *kinds] for pair in pairwise(names)):
            after = f'<a rel="next" href="{next_}.html">{self.pages[next_].title} →</a>'
            turns[one][1] = turns[one][1] or after
            turns[next_][0] = f'<a rel="prev" href="{one}.html">← {self.pages[one].title}</a>'
        return {
            f"{name}.html": self.template.substitute(
                title=page.title,
                contents=self.list_contents(name, page),
                body=HEADING.sub(ANCHORED, page.body),
                progress=PROGRESS.format(name) if name in marked else "",
                turns="".join(turns[name]),
                program=page.program,
            )
            for name, page in self.pages.items()
        }

    def list_contents(self, name: str, page: Page) -> str:
        """The contents beside a page: the chapters, numbered, and the other pages; under this page
        its sections, and beside or under it those that are within the same one."""
        above, here = page.within or name, f"{name}.html"
        sections = {
            f"#{at}": title for level, at, title in HEADING.findall(page.body) if level == "2"
        }
        within = {
            f"{each}.html": self.titles.get(each) or each.partition("-")[2]
            for each, about in self.pages.items()
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
            f"{each}.html": self.titles[each]
            for each in TEXTS.values()
            if each != "index" and each not in LESSON_FILES.values() and not self.pages[each].within
        }
        is_open = " open" if f"{above}.html" in links else ""
        return (
            f"{parts}<details{is_open}><summary>Tools and pages</summary>"
            f"<ul>{list_links(links, here, below)}</ul></details>"
        )

    def add_text(self, file: Path, page: str) -> None:
        """A chapter, with its program, or another text."""
        body = self.render(page, file, self.texts[page])
        program = ""
        if page == "glossary":
            body = re.sub(
                r'<a id="(.*?)"></a>(.*?)(?=</td>\s*<td.*?>(.*?)</td>)', self.lead_back, body
            )
        elif page == "map":
            body = DIAGRAM.sub(lambda diagram: LESSON_NAMED.sub(LESSON_LINK, diagram[0]), body)
        elif page == "exercises":
            for lesson, its in groupby(CATALOGUE.values(), lambda each: each.lesson):
                links = "".join(
                    f'<li><a href="{self.link(FOLDER / each.folder)}">{each.title}</a></li>'
                    for each in its
                )
                body += f'<h2 id="{lesson}">{lesson}</h2><ul>{links}</ul>'
        elif own := [each for each in CATALOGUE.values() if each.lesson == page]:
            shown = "".join(map(self.show_exercise, own))
            shown = f'<h2 id="exercises">Exercises</h2>\n{shown}'
            body = AFTER_TRIALS.sub(lambda trials: trials[0] + shown, body)
        elif file.suffix == ".ipynb":
            self.copies[file.name] = file
            body = body.replace("</h1>", f"</h1>\n{DOWNLOAD.format(file.name)}", 1)
        for code in (code for code, chapter in LESSON_FILES.items() if chapter == page):
            program = PROGRAM.format(
                name=code.name, code=show_code(code.read_text("utf-8"), "python", code)
            )
        chapters = {code.parent: chapter for code, chapter in LESSON_FILES.items()}
        within = chapters.get(file.parent, page)
        within = "" if within == page else within
        self.add(page, self.titles[page], place_calculators(body), program, within)

    def lead_back(self, row: re.Match[str]) -> str:
        """The word of a row of the glossary, with a link to where it is first used."""
        page = self.uses[row[1]]
        words = [html.unescape(re.sub("<.*?>", "", each)) for each in row.groups()]
        self.sections.append([f"glossary.html#{row[1]}", f"{words[1]} (glossary)", words[2]])
        return (
            f'{row[0]} <a href="{page}.html#use-{row[1]}" aria-label="{words[1]}, used in '
            f'{page}">↩&nbsp;{page}</a>'
        )

    def show_exercise(self, exercise: Exercise) -> str:
        """The task, the stub, the commands, the hints, each inside the one before, and the names of
        known mistakes."""
        page, file, hints = exercise.lesson, FOLDER / exercise.folder / "text.md", ""
        name = f"exercise-{exercise.name}"
        self.sections.append([f"{page}.html#{name}", f"{page}: {exercise.title}", ""])
        task = self.render(page, file, exercise.task.partition("\n")[2])
        for number, hint in reversed([*enumerate(exercise.hints, 1)]):
            hints = (
                f"<details><summary>Hint {exercise.describe_hint(number)}</summary>"
                f"{self.render(page, file, hint)}{hints}</details>\n"
            )
        run = "".join(
            f"$ python -m playground {command} {exercise.name}\n"
            for command in ("exercise", "check")
        )
        mistakes = "".join(
            f"<li>{self.markdown.renderInline(mistake.name)}</li>" for mistake in exercise.mistakes
        )
        return f"""<section class="exercise" aria-labelledby="{name}">
<h3 id="{name}">{self.markdown.renderInline(exercise.title)}</h3>
{task}<p>{exercise.effort}</p>
<div class="copied">{show_code(exercise.stub, "python", name=exercise.file)}</div>
{show_code(run, "console")}{hints}<details><summary>Mistakes that others made</summary>
<ul>{mistakes}</ul></details>
{PROGRESS.format(name)}</section>
"""

    def add_program(self, name: str) -> None:
        """A program of `break`, where its ranks stand, what is said about it, and its cure."""
        page, function, recording = f"break-{name}", find(name), find_run(f"break {name}")
        file, lines = file_of(function.module), read_body(function)
        wrong, cured = ([*read_body(each).values()] for each in (function, find(name, "_cured")))
        changes = [*difflib.unified_diff(wrong, cured, lineterm="", n=len(wrong))][3:]
        why = re.search(rf"^\| `{name}` \| .* \| (.*) \|$", self.texts["break"], re.MULTILINE)
        symptom = f"{PROGRAMS[name].symptom} ({PROGRAMS[name].words})".removesuffix(" ()")
        command = f"python -m playground break {name}"
        self.sections.append([f"{page}.html", f"break-{name}", function.summary])
        body = f"""<h1>{name}</h1>
<p>{html.escape(function.summary)} Symptom: {symptom}.</p>
{show_code(textwrap.dedent(chr(10).join(wrong)), "python", file, min(lines))}
<p>Why, and what to do: {self.markdown.renderInline(why[1] if why else "")}. The program is in <a
href="{self.link(file)}#{file.name}-{min(lines)}">{file.name}</a>, and <code>{command}</code>
runs it, and then the fixed program. All programs: <a href="break.html">break</a></p>
<figure>{self.play(recording, page, {file: lines}) if recording else ""}</figure>
<h2 id="fix">The fix</h2>
{show_code("".join(f"{line[0]}{line[5:]}{chr(10)}" for line in changes), "diff")}"""
        self.add(page, f"break: {name}", body, within="break")

    def show_figure(self, page: str, file: Path, caption: str) -> str:
        """A figure, with a player of the run that it was drawn from, once on a page. Raises
        `PlaygroundError` if no run draws it."""
        folder = file.parent.parent.name
        name = f"{folder}-{file.name}"
        path = file.relative_to(CODE).with_suffix("").as_posix()
        if not (figure := FIGURE_OF.get(path)):
            raise PlaygroundError(f"{page} shows {file.relative_to(ROOT)}, which no run draws")
        self.copies[f"figures/{name}"] = file
        picture = f'<img src="figures/{name}" alt="{caption}">'
        about = f"<figcaption>{caption}</figcaption>"
        recording, once = find_run(figure.run.name), f"{figure.run.name} on {page}"
        is_played = figure.is_played and once not in self.played
        if not is_played or not (recording and any(recording.events())):
            return picture + about
        self.played.add(once)
        drawn = f'<details class="drawn" open><summary>As a picture</summary>{picture}</details>'
        return f"{about}{self.play(recording, page, {})}{drawn}"

    def show_run(self, page: str, named: re.Match[str]) -> str:
        """The player of a run that a chapter names. Raises `PlaygroundError` if it is not recorded,
        or has no such event."""
        recording, opens = find_run(named["run"]), None
        if recording is None:
            raise PlaygroundError(
                f"{page} plays a run that is not recorded: "
                f'python -m playground.figures.runs "{named["run"]}"'
            )
        if named["event"]:
            places = [
                place
                for place, event in enumerate(recording.ranks[0].events)
                if event.name == named["event"]
            ]
            if len(places) < (nth := int(named["nth"] or 1)):
                raise PlaygroundError(f"{page}: {named['run']} has no {named['event']} {nth}")
            opens = places[nth - 1]
        caption = f"<figcaption>{self.markdown.renderInline(named['says'])}</figcaption>"
        return f'<figure class="played">{caption}{self.play(recording, page, {}, opens)}</figure>'

    def play(
        self,
        recording: Recording,
        page: str,
        shown: Mapping[Path, Container[int]],
        opens: int | None = None,
    ) -> str:
        """A player whose lines lead to this page, if its program or what else is `shown` has all of
        a file that the run was in, and else to the page of the file. It opens on the event with the
        number `opens` of rank 0, or where it finds best."""
        addresses = {}
        for name in recording.texts:
            file = ROOT / name
            lines = [source.line for source in recording.sources if source.file == name]
            is_here = LESSON_FILES.get(file) == page or all(
                line in shown.get(file, ()) for line in lines
            )
            place = "" if is_here else self.link(file).partition("#")[0]
            addresses[name] = f"{place}#{file.name}-"
        return render_player(recording, addresses, opens)

    def link(self, file: Path) -> str:
        """The address of a file or folder. Raises `PlaygroundError` if there is none."""
        if address := ADDRESSES.get(file) or ADDRESSES.get(file / "README.md"):
            return address
        if not file.exists():
            raise PlaygroundError(f"a page links to {file.relative_to(ROOT)}, which is not there")
        name = "-".join(file.relative_to(ROOT).parts).removeprefix("playground-")
        return self.codes.setdefault(file, f"code-{name}.html")

    def render(self, page: str, file: Path, text: str) -> str:
        """The text of a page, written in `file`, as HTML."""
        tokens = self.markdown.parse(text)
        label_cells(tokens)
        for place, token in enumerate(tokens):
            if token.type == "heading_open":
                title = tokens[place + 1].content.replace("`", "")
                # as GitHub does
                token.attrSet(
                    "id", re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
                )
                named = title if token.tag == "h1" else f"{page}: {title}"
                self.sections.append([f"{page}.html#{token.attrGet('id')}", named, ""])
            elif token.type == "html_block":
                token.content = PLAYED.sub(partial(self.show_run, page), token.content)
            elif token.type == "inline":
                children = token.children or []
                if [child.type for child in children] == ["image"]:
                    tokens[place - 1].tag = tokens[place + 1].tag = "figure"
                if tokens[place - 1].type != "heading_open":
                    said = (
                        child.content for child in children if child.type in ("text", "code_inline")
                    )
                    self.sections[-1][2] += f"{' '.join(said)} "
                self.lead_to_line(file, children, tokens[place + 2 : place + 3])
                token.children = [*self.change(page, file, token.content, children)]
        return str(self.markdown.renderer.render(tokens, self.markdown.options, {}))

    def lead_to_line(self, file: Path, children: list[Token], following: list[Token]) -> None:
        """Let the last link of a paragraph lead to the line at which the code begins that follows
        it."""
        links = [child for child in children if child.type == "link_open"]
        path = str(links[-1].attrGet("href")) if links else ""
        if path.endswith(".py") and [token.type for token in following] == ["fence"]:
            source = file.parent / path
            line = line_of(following[0].content, source.read_text(encoding="utf-8"))
            links[-1].attrSet("href", f"{path}#{source.name}-{line}" if line else path)

    def change(self, page: str, file: Path, content: str, children: list[Token]) -> Iterator[Token]:
        """The parts of a paragraph, with links to pages, to exercises where they are named, and to
        programs in a table."""
        named = is_linked = False
        for child in children:
            is_linked = child.type == "link_open" or (is_linked and child.type != "link_close")
            name, changed, named = child.content, "", named or "xercise" in child.content
            if child.type == "link_open" and not re.match("https?:", str(child.attrGet("href"))):
                path, _, part = str(child.attrGet("href")).partition("#")
                target = (file.parent / path).resolve() if path else file
                address = self.link(target)
                child.attrSet("href", f"{address.partition('#')[0]}#{part}" if part else address)
                if (
                    TEXTS.get(target) == "glossary"
                    and part
                    and self.uses.setdefault(part, page) == page
                ):
                    child.attrSet("id", f"use-{part}")
            elif child.type == "image":
                changed = self.show_figure(
                    page, (file.parent / str(child.attrGet("src"))).resolve(), html.escape(name)
                )
            elif child.type != "code_inline" or is_linked:
                pass  # a link holds no other
            elif named and name in CATALOGUE:
                changed = (
                    f'<a href="{self.link(FOLDER / CATALOGUE[name].folder)}">'
                    f"<code>{name}</code></a>"
                )
            elif content == f"`{name}`" and name in PROGRAMS:
                changed = f'<a href="break-{name}.html"><code>{name}</code></a>'
            yield Token("html_inline", "", 0, content=changed) if changed else child


def write_site(folder: Path, show: Callable[[str, int, int], object]) -> list[str]:
    """Write all pages into a folder, and `show` how far it is. Returns their names. Raises
    `PlaygroundError` for a link that leads nowhere and for a figure or code that is stale, and
    `OSError` if the folder cannot be written to."""
    site = Site(show)
    # last: it leads back to all others
    for file, page in sorted(TEXTS.items(), key=lambda each: each[1] == "glossary"):
        site.add_text(file, page)
    for program in PROGRAMS:
        site.add_program(program)
    for file, address in sorted(site.codes.items()):
        title = file.relative_to(ROOT).as_posix()
        language = "diff" if file.suffix == ".diff" else "python"
        code = (file / "__init__.py" if file.is_dir() else file).read_text(encoding="utf-8")
        site.add(
            address.removesuffix(".html"),
            title,
            f"<h1>{title}</h1>\n{show_code(code, language, file)}",
        )
    pages = site.finish()
    texts = pages | {
        "player.js": read_script(),
        "site.css": read_style() + (HERE / "site.css").read_text("utf-8"),
    }
    texts[SEARCH] = "".join(
        f"const {name} = {json.dumps(value, separators=(',', ':'), ensure_ascii=False)};\n"
        for name, value in (
            ("SECTIONS", site.sections),
            ("SYMPTOMS", place_symptoms(site.sections)),
        )
    )
    make_folder(folder / "figures")
    for name, text in texts.items():
        write_file(folder / name, text.encode())
    for name, file in (
        site.copies | FILES | {each: HERE / each for each in ("settings.js", "site.js", "icon.svg")}
    ).items():
        write_file(folder / name, file.read_bytes())
    return [*pages]


PROGRAM = """<aside aria-label="The code">
<button class="board" aria-expanded="true" aria-controls="board">{name}</button>
<div id="board">{code}</div>
</aside>"""
PROGRESS = """<p class="progress" data-done="{}" hidden><label><input type="checkbox">
<span></span></label></p>"""
DOWNLOAD = """<p><a class="button" href="{0}" download>Download {0}</a> It opens in Jupyter,
in VS Code, and in Colab (File, Upload notebook).</p>
"""
SEARCH = "search.js"
"""A file of every site."""
DIR = click.argument("folder", metavar="DIR", type=FILE)


@session_command(SITE.name, DIR, only=("as_json",), short_help=SITE.purpose)
def command(session: Session, folder: Path) -> None:
    """Write the course as static pages into DIR: open its index.html, or put the folder on any
    static host."""
    if not (ROOT / "README.md").is_file():
        raise UsageError(
            f"{SITE.name} needs the whole project, and not its installed package: run it in a clone"
        )
    if any(folder.glob("[!.]*")) and not (folder / SEARCH).exists():
        raise UsageError(
            f"{folder} holds other files, which pages could replace: name a new folder"
        )
    pages = write_site(folder, session.bar.show)
    session.bar.clear()
    session.say(f"{folder} has {len(pages)} pages. Open {folder / 'index.html'}")
    session.print_document({}, folder=folder, pages=pages)
