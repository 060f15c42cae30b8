"""All pages, written into a folder: the same tree gives the same bytes."""

from __future__ import annotations

import difflib
import html
import json
import re
import textwrap
from collections.abc import Callable, Container, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from string import Template

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from playground.exercises.exercise import CATALOGUE, FOLDER, Exercise
from playground.lessons import PATH
from playground.runtime.errors import PlaygroundError
from playground.runtime.remote import ROOT, file_of
from playground.see.play import read_script, read_style, render_player
from playground.see.record import Recording
from playground.see.runs import PICTURES, RUN_OF, find_run
from playground.site import CHAPTERS
from playground.tools.gallery.page import PROGRAMS, find, read_body

HERE = Path(__file__).parent
CODE = ROOT / "playground"
GLOSSARY, EXERCISE, PROGRAM = "glossary", "exercise-", "break-"
"""The page of the glossary, and the beginnings of the names of exercises' and programs' pages."""
TEXTS = {file: name for name, file in ({"index": ROOT / "README.md"} | CHAPTERS).items() if name != "why"} | {
    FOLDER / "README.md": "exercises",
    CODE / "lessons" / "first.ipynb": "first",
    CODE / "README.md": "house",
}
"""The page of each text."""
BOARDS = {ROOT / lesson.path / "lesson.py": lesson.name for lesson in PATH}
"""The chapter beside which a board is shown."""
TASKS = {FOLDER / each.folder: f"{EXERCISE}{name}.html" for name, each in CATALOGUE.items()}
"""The page of each exercise, by its folder."""
EXCERPT = re.compile(r"\]\(([^)]+)\):\n\n( *)```python\n(.*?)^\2```$", re.DOTALL | re.MULTILINE)
"""Code that a chapter shows of a file, which is named before it."""


def stands_in(block: str, source: str) -> bool:
    """Whether the lines of `block` are lines of `source`, in order: dedented, with a line `# …` for what is left out.
    Empty lines do not count: the formatter has rules of its own for those of a block."""
    lines = (re.escape(line) for line in block.splitlines() if line)
    parts = (r"(?:.*\n)*?" if line.endswith("\\#\\ …") else rf"\n*(?P=indent){line}\n" for line in lines)
    return bool(re.search(rf"^(?=(?P<indent> *)){''.join(parts)}", source, re.MULTILINE))


def read_text(file: Path) -> str:
    """A text as Markdown; of a notebook, its cells. Raises `PlaygroundError` if it shows code that its source lacks."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        cells = (("".join(cell["source"]), cell["cell_type"]) for cell in json.loads(text)["cells"])
        return "\n\n".join(f"```python\n{cell}\n```" if kind == "code" else cell for cell, kind in cells)
    for name, indent, block in EXCERPT.findall(text):
        if not stands_in(textwrap.dedent(block), (file.parent / name).read_text(encoding="utf-8")):
            first = block[len(indent) :].partition("\n")[0]
            raise PlaygroundError(f"{file.relative_to(ROOT)} shows code that {name} does not have: {first}")
    return text


def show_code(text: str, language: str, file: Path | None = None, first: int = 1) -> str:
    """Code as HTML. Its lines have numbers, from `first` on, and anchors, if its file is given."""
    if language in ("python", "diff"):
        code = highlight(text, get_lexer_by_name(language, stripnl=False), HtmlFormatter(nowrap=True))
        if file:
            lines = enumerate(code.splitlines(keepends=True), first)
            code = "".join(f'<span id="{file.name}-{at}" data-n="{at}">{line}</span>' for at, line in lines)
    else:
        code = re.sub(r"^\$ .*", r"<b>\g<0></b>", html.escape(text, quote=False), flags=re.MULTILINE)
    about = f'class="lines" aria-label="{file.name}"' if file else f'aria-label="{language or "text"}"'
    return f'<pre tabindex="0" role="group" {about}><code>{code}</code></pre>\n'


def list_pages(titles: Mapping[str, str]) -> str:
    """A list of links to pages, by their names."""
    links = (f'<li><a href="{name}.html">{title.replace("`", "")}</a></li>' for name, title in titles.items())
    return f"<ul>{''.join(links)}</ul>"


class Site:
    """The pages, in the order in which they are added; `show` is given the name, the number and the count of each."""

    def __init__(self, show: Callable[[str, int, int], object]) -> None:
        options = {"html": True, "highlight": lambda text, language, _: show_code(text, language)}
        self.markdown = MarkdownIt("commonmark", options).enable("table")
        self.markdown.add_render_rule("table_open", lambda *_: '<div class="scroll" tabindex="0"><table>\n')
        self.markdown.add_render_rule("code_block", lambda _, tokens, at, *more: show_code(tokens[at].content, ""))
        self.markdown.add_render_rule("table_close", lambda *_: "</table></div>\n")
        self.template = Template((HERE / "template.html").read_text(encoding="utf-8"))
        self.texts = {page: read_text(file) for file, page in TEXTS.items()}
        titles = {page: text.partition("\n")[0].removeprefix("# ") for page, text in self.texts.items()}
        path = {page: titles.pop(page) for page in BOARDS.values()}
        groups = {"The path": path, "Beside the path": titles}
        self.contents = "".join(f"<div><b>{group}</b>{list_pages(each)}</div>" for group, each in groups.items())
        self.show, self.pages, self.pictures, self.played = show, dict[str, str](), dict[str, Path](), set[str]()
        self.sections: list[list[str]] = []
        """The address of each section, its title, and its words."""
        self.uses: dict[str, str] = {}
        """For each word of the glossary the page that links to it."""
        self.codes: dict[Path, str] = {}
        """Files that are linked to, with the addresses of their code."""

    def add(self, page: str, title: str, body: str, board: str = "") -> None:
        self.show(title, len(self.pages), max(len(self.pages), len(TEXTS) + len(CATALOGUE) + len(PROGRAMS)))
        self.pages[f"{page}.html"] = self.template.substitute(
            title=html.escape(title),
            contents=self.contents,
            script='<script src="player.js" defer></script>' if '<div class="player">' in body else "",
            kind="with-board" if board else "plain",
            body=body,
            board=board and f'<aside aria-label="The code">{board}</aside>',
        )

    def add_text(self, file: Path, page: str) -> None:
        """A chapter, with its board, or another text."""
        text, code, board = self.texts[page], file.parent / "lesson.py", ""
        body = self.render(page, file, text)
        if page == GLOSSARY:
            body = re.sub(r'<a id="(.*?)"></a>(.*?)(?=</td>\s*<td>(.*?)</td>)', self.lead_back, body)
        elif page == "exercises":
            for lesson, its in groupby(CATALOGUE.values(), lambda each: each.lesson):
                body += f"<h2>{lesson}</h2>{list_pages({EXERCISE + each.name: each.title for each in its})}"
        elif BOARDS.get(code) == page:
            board = f"<h2>{code.name}</h2>{show_code(code.read_text(encoding='utf-8'), 'python', code)}"
        self.add(page, text.partition("\n")[0].removeprefix("# ").replace("`", ""), body, board)

    def lead_back(self, row: re.Match[str]) -> str:
        """The word of a row of the glossary, with a link to where it is first used."""
        page, words = self.uses[row[1]], [html.unescape(re.sub("<.*?>", "", each)) for each in row.groups()]
        self.sections.append([f"{GLOSSARY}.html#{row[1]}", f"{words[1]} ({GLOSSARY})", words[2]])
        return f'{row[0]} <a href="{page}.html#use-{row[1]}" aria-label="{words[1]}, used in {page}">↩&nbsp;{page}</a>'

    def add_exercise(self, exercise: Exercise) -> None:
        """The task, the stub, and the hints, each inside the one before."""
        page, file, hints = f"{EXERCISE}{exercise.name}", FOLDER / exercise.folder / "text.md", ""
        task = self.render(page, file, exercise.task)
        for number, hint in reversed([*enumerate(exercise.hints, 1)]):
            shown = self.render(page, file, hint)
            hints = f"<details><summary>Hint {number} of {len(exercise.hints)}</summary>{shown}{hints}</details>\n"
        stub = f'<h2>{exercise.file}</h2>\n<div class="copied">{show_code(exercise.stub, "python")}</div>\n'
        run = "".join(f"$ python -m playground {command} {exercise.name}\n" for command in ("exercise", "check"))
        back = f'<p>Its chapter: <a href="{exercise.lesson}.html">{exercise.lesson}</a></p>'
        self.add(page, exercise.title, f"{task}{stub}{show_code(run, 'console')}<h2>Hints</h2>\n{hints}{back}")

    def add_program(self, name: str) -> None:
        """A program of the gallery, where its ranks stand, what is said about it, and its cure."""
        page, function, recording = f"{PROGRAM}{name}", find(name), find_run(f"break {name}")
        file, lines = file_of(function.module), read_body(function)
        wrong, cured = ([*read_body(each).values()] for each in (function, find(name, "_cured")))
        changes = [*difflib.unified_diff(wrong, cured, lineterm="", n=len(wrong))][3:]
        why = re.search(rf"^\| `{name}` \| .* \| (.*) \|$", self.texts["break"], re.MULTILINE)
        symptom = f"{PROGRAMS[name].symptom} ({PROGRAMS[name].words})".removesuffix(" ()")
        self.sections.append([f"{page}.html", f"{PROGRAM}{name}", function.summary])
        body = f"""<h1>{name}</h1>
<p>{html.escape(function.summary)} Symptom: {symptom}.</p>
{show_code(textwrap.dedent(chr(10).join(wrong)), "python", file, min(lines))}
<p>Why, and what to do: {self.markdown.renderInline(why[1] if why else "")}. The program is in <a
href="{self.link(file)}#{file.name}-{min(lines)}">{file.name}</a>, and <code>python -m playground break {name}</code>
runs it, and its cure. All programs: <a href="break.html">break</a></p>
<figure>{self.play(recording, page, {file: lines}) if recording else ""}</figure>
<h2>The cure</h2>
{show_code("".join(f"{line[0]}{line[5:]}{chr(10)}" for line in changes), "diff")}"""
        self.add(page, f"break: {name}", body)

    def show_figure(self, page: str, file: Path, caption: str) -> str:
        """A figure, with a player of the run that it was drawn from, once on a page. Raises `PlaygroundError` if no run
        draws it."""
        folder = file.parent.parent.name
        name, path = f"{folder}-{file.name}", f"{folder}/{file.stem}"
        if not (run := RUN_OF.get(path)):
            raise PlaygroundError(f"{page} shows {file.relative_to(ROOT)}, which no run draws")
        self.pictures[f"figures/{name}"] = file
        picture, about = f'<img src="figures/{name}" alt="{caption}">', f"<figcaption>{caption}</figcaption>"
        recording, once = find_run(run), f"{run} on {page}"
        if path in PICTURES or once in self.played or not (recording and any(recording.events())):
            return picture + about
        self.played.add(once)
        drawn = f'<details class="drawn" open><summary>As a picture</summary>{picture}</details>'
        return f"{about}{self.play(recording, page, {})}{drawn}"

    def play(self, recording: Recording, page: str, shown: Mapping[Path, Container[int]]) -> str:
        """A player whose lines lead to this page, if its board or what else is `shown` has all of a file that the run
        was in, and else to the page of the file."""
        addresses = {}
        for name in recording.texts:
            file, lines = ROOT / name, [source.line for source in recording.sources if source.file == name]
            is_here = BOARDS.get(file) == page or all(line in shown.get(file, ()) for line in lines)
            addresses[name] = f"{'' if is_here else self.link(file).partition('#')[0]}#{file.name}-"
        return render_player(recording, addresses)

    def link(self, file: Path) -> str:
        """The address of a file or folder. Raises `PlaygroundError` if there is none."""
        if page := TEXTS.get(file) or TEXTS.get(file / "README.md"):
            return f"{page}.html"
        if file in BOARDS:
            return f"{BOARDS[file]}.html#{file.name}-1"
        if not file.exists():
            raise PlaygroundError(f"a page links to {file.relative_to(ROOT)}, which is not there")
        name = "-".join(file.relative_to(ROOT).parts).removeprefix("playground-")
        return TASKS.get(file) or self.codes.setdefault(file, f"code-{name}.html")

    def render(self, page: str, file: Path, text: str) -> str:
        """The text of a page, written in `file`, as HTML."""
        tokens = self.markdown.parse(text)
        for place, token in enumerate(tokens):
            if token.type == "heading_open":
                title = tokens[place + 1].content.replace("`", "")
                token.attrSet("id", re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-"))  # as GitHub does
                named = title if token.tag == "h1" else f"{page}: {title}"
                self.sections.append([f"{page}.html#{token.attrGet('id')}", named, ""])
            elif token.type == "inline":
                children = token.children or []
                if [child.type for child in children] == ["image"]:
                    tokens[place - 1].tag = tokens[place + 1].tag = "figure"
                if tokens[place - 1].type != "heading_open":
                    said = (child.content for child in children if child.type in ("text", "code_inline"))
                    self.sections[-1][2] += f"{' '.join(said)} "
                token.children = [*self.change(page, file, token.content, children)]
        rendered: str = self.markdown.renderer.render(tokens, self.markdown.options, {})
        return rendered

    def change(self, page: str, file: Path, content: str, children: list[Token]) -> Iterator[Token]:
        """The parts of a paragraph, with links to pages, to exercises where they are named, and to programs in a
        table."""
        named = False
        for child in children:
            name, changed, named = child.content, "", named or "xercise" in child.content
            if child.type == "link_open" and not re.match("https?:", str(child.attrGet("href"))):
                self.turn(page, file, child)
            elif child.type == "image":
                changed = self.show_figure(page, (file.parent / str(child.attrGet("src"))).resolve(), html.escape(name))
            elif child.type == "code_inline" and named and name in CATALOGUE:
                changed = f'<a href="{EXERCISE}{name}.html"><code>{name}</code></a>'
            elif child.type == "code_inline" and content == f"`{name}`" and name in PROGRAMS:
                changed = f'<a href="{PROGRAM}{name}.html"><code>{name}</code></a>'
            yield Token("html_inline", "", 0, content=changed) if changed else child

    def turn(self, page: str, file: Path, link: Token) -> None:
        """Let a link lead to the page of the file that it names; the glossary leads back to it."""
        path, _, part = str(link.attrGet("href")).partition("#")
        target = (file.parent / path).resolve() if path else file
        address = self.link(target)
        link.attrSet("href", f"{address.partition('#')[0]}#{part}" if part else address)
        if TEXTS.get(target) == GLOSSARY and part and self.uses.setdefault(part, page) == page:
            link.attrSet("id", f"use-{part}")


def write_site(folder: Path, show: Callable[[str, int, int], object]) -> list[str]:
    """Write all pages into a folder, and `show` how far it is. Returns their names. Raises `PlaygroundError` for a link
    that leads nowhere and for a figure or code that is stale, and `OSError` if the folder cannot be written to."""
    site = Site(show)
    for file, page in sorted(TEXTS.items(), key=lambda each: each[1] == GLOSSARY):  # last: it leads back to all others
        site.add_text(file, page)
    for exercise in CATALOGUE.values():
        site.add_exercise(exercise)
    for program in PROGRAMS:
        site.add_program(program)
    for file, address in sorted(site.codes.items()):
        title, language = file.relative_to(ROOT).as_posix(), "diff" if file.suffix == ".diff" else "python"
        code = (file / "__init__.py" if file.is_dir() else file).read_text(encoding="utf-8")
        site.add(address.removesuffix(".html"), title, f"<h1>{title}</h1>\n{show_code(code, language, file)}")
    words = json.dumps(site.sections, separators=(",", ":"), ensure_ascii=False)
    style = read_style() + (HERE / "site.css").read_text(encoding="utf-8")
    texts = site.pages | {"search.js": f"const SECTIONS = {words};\n", "player.js": read_script(), "site.css": style}
    files = {name: text.encode() for name, text in texts.items()}
    for name, file in (site.pictures | {each: HERE / each for each in ("site.js", "icon.svg")}).items():
        files[name] = file.read_bytes()
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return [*site.pages]
