"""The pages: chapters with their programs and exercises, programs of `break`, code."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
from pathlib import Path

from markdown_it.token import Token

from playground.base.errors import PlaygroundError
from playground.base.remote import ROOT
from playground.exercises.exercise import CATALOGUE, FOLDER
from playground.explain.replay.play.player import render_player
from playground.explain.replay.record.recording import Recording
from playground.figures.runs import FIGURE_OF, find_run
from playground.site.addresses import ADDRESSES, CODE, LESSON_FILES, TEXTS
from playground.site.calculators.pages import place_calculators
from playground.site.code import line_of, read_text, show_code
from playground.site.contents import Page
from playground.site.exercises import add_exercises, list_exercises
from playground.site.markdown import label_cells, new_markdown
from playground.site.search import Section
from playground.site.texts import CHAPTERS
from playground.tools.failures.programs import PROGRAMS

PLAYED = re.compile(
    r"<!-- play (?P<run>[\w -]+ board)(?: from (?P<event>\w+)(?: (?P<nth>\d+))?)?: "
    r"(?P<says>.+?) -->",
    re.DOTALL,
)
"""A run that a chapter plays: its name, the event on which the player opens (of rank 0, the first
of this name or the nth), and its caption."""
GLOSSARY_ROW = re.compile(r'<a id="(.*?)"></a>(.*?)(?=</td>\s*<td.*?>(.*?)</td>)')
"""A word of the glossary: its address, itself, and what it means."""
DIAGRAM = re.compile(r"<code>[^<]* ─▶ .*?</code>", re.DOTALL)
"""The layers of PyTorch, which the map draws in letters."""
LESSON_NAMED = re.compile(
    rf"(?<=[(, ])({'|'.join(sorted(CHAPTERS, key=len, reverse=True))})(?=[,)])"
)
LESSON_LINK = r'<a href="\1.html">\1</a>'
TURNS = re.compile(r"^(?:(?:Previous|Next): \[[^]]*\]\([^)]*\)(?: · )?)+\n", re.MULTILINE)
"""The line of a chapter on those before and after it, of which pages have links of their own."""


def link_lessons(body: str) -> str:
    """The map, in whose diagram the names of lessons lead to them."""
    return DIAGRAM.sub(lambda diagram: LESSON_NAMED.sub(LESSON_LINK, diagram[0]), body)


class Site:
    """The pages, in the order in which they are added; `show` is given the name, the number and the
    count of each."""

    def __init__(self, show: Callable[[str, int, int], object]) -> None:
        self.markdown = new_markdown()
        self.texts = {page: TURNS.sub("", read_text(file)) for file, page in TEXTS.items()}
        self.titles = {
            page: text.partition("\n")[0][2:].replace("`", "") for page, text in self.texts.items()
        }
        """Titles of texts, by page."""
        self.show = show
        self.pages: dict[str, Page] = {}
        self.copies: dict[str, Path] = {}
        """Files that are copied, by their place in the site."""
        self.played: set[str] = set()
        """Each run that a page plays, with that page: it is played there once."""
        self.sections: list[Section] = []
        """What a search finds."""
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

    def add_text(self, file: Path, page: str) -> None:
        """A chapter, with its program, or another text."""
        body = self.complete(self.render(page, file, self.texts[page]), page, file)
        program = ""
        for code in (code for code, chapter in LESSON_FILES.items() if chapter == page):
            program = PROGRAM.format(
                name=code.name, code=show_code(code.read_text("utf-8"), "python", code)
            )
        chapters = {code.parent: chapter for code, chapter in LESSON_FILES.items()}
        within = chapters.get(file.parent, page)
        within = "" if within == page else within
        self.add(page, self.titles[page], place_calculators(body), program, within)

    def complete(self, body: str, page: str, file: Path) -> str:
        """The body of a text with what its page has besides: links, exercises, or a file to
        download."""
        completions: dict[str, Callable[[str], str]] = {
            "glossary": self.add_links_back,
            "map": link_lessons,
            "exercises": partial(list_exercises, self),
        }
        if page in completions:
            return completions[page](body)
        if file.suffix == ".ipynb":
            self.copies[file.name] = file
            return body.replace("</h1>", f"</h1>\n{DOWNLOAD.format(file.name)}", 1)
        return add_exercises(self, page, body)

    def add_links_back(self, body: str) -> str:
        """The glossary, whose words lead back to where they are used first."""
        return GLOSSARY_ROW.sub(self.lead_back, body)

    def lead_back(self, row: re.Match[str]) -> str:
        """The word of a row of the glossary, with a link to where it is first used."""
        page = self.uses[row[1]]
        words = [html.unescape(re.sub("<.*?>", "", each)) for each in row.groups()]
        title = f"{words[1]} (glossary)"
        self.sections.append(Section(f"glossary.html#{row[1]}", title, words[2]))
        return (
            f'{row[0]} <a href="{page}.html#use-{row[1]}" aria-label="{words[1]}, used in '
            f'{page}">↩&nbsp;{page}</a>'
        )

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
                self.sections.append(Section(f"{page}.html#{token.attrGet('id')}", named))
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
                    self.sections[-1].words += f"{' '.join(said)} "
                self.lead_to_line(file, children, tokens[place + 2 : place + 3])
                token.children = [*self.add_links(page, file, token.content, children)]
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

    def add_links(
        self, page: str, file: Path, content: str, children: list[Token]
    ) -> Iterator[Token]:
        """The parts of a paragraph, with links to pages, to exercises where they are named, and to
        programs in a table."""
        is_on_exercises = is_linked = False
        for child in children:
            is_linked = child.type == "link_open" or (is_linked and child.type != "link_close")
            is_on_exercises = is_on_exercises or "xercise" in child.content
            changed = ""
            if child.type == "link_open":
                self.lead_to_page(page, file, child)
            elif child.type == "image":
                picture = (file.parent / str(child.attrGet("src"))).resolve()
                changed = self.show_figure(page, picture, html.escape(child.content))
            elif child.type == "code_inline" and not is_linked:  # a link holds no other
                is_alone = content == f"`{child.content}`"
                changed = self.link_name(child.content, is_on_exercises, is_alone)
            yield Token("html_inline", "", 0, content=changed) if changed else child

    def lead_to_page(self, page: str, file: Path, link: Token) -> None:
        """Let a link to a file lead to its page, and the first one to a word of the glossary be
        found from there."""
        href = str(link.attrGet("href"))
        if re.match("https?:", href):
            return
        path, _, part = href.partition("#")
        target = (file.parent / path).resolve() if path else file
        address = self.link(target)
        link.attrSet("href", f"{address.partition('#')[0]}#{part}" if part else address)
        is_word = TEXTS.get(target) == "glossary" and part
        if is_word and self.uses.setdefault(part, page) == page:
            link.attrSet("id", f"use-{part}")

    def link_name(self, name: str, is_on_exercises: bool, is_alone: bool) -> str:
        """The link of a name in the font of code: of an exercise in a paragraph that speaks of
        exercises, and of a program of `break` that is alone in its cell. Empty for another one."""
        if is_on_exercises and name in CATALOGUE:
            address = self.link(FOLDER / CATALOGUE[name].folder)
        elif is_alone and name in PROGRAMS:
            address = f"break-{name}.html"
        else:
            return ""
        return f'<a href="{address}"><code>{name}</code></a>'


PROGRAM = """<aside aria-label="The code">
<button class="board" aria-expanded="true" aria-controls="board">{name}</button>
<div id="board">{code}</div>
</aside>"""
DOWNLOAD = """<p><a class="button" href="{0}" download>Download {0}</a> It opens in Jupyter,
in VS Code, and in Colab (File, Upload notebook).</p>
"""
