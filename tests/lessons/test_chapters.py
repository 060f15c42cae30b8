"""Every chapter has the same form, and the code it shows is the code that runs."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from test_readme import fenced_blocks

from playground.base.remote import ROOT
from playground.lessons import PARTS, ROWS
from playground.site.code import EXCERPT, line_of
from playground.site.texts import CHAPTERS

FOLDER = CHAPTERS["glossary"].parent
LESSONS = {lesson.name: CHAPTERS[lesson.name] for lesson in ROWS}
"""Their chapters begin with a problem and a run, and show the whole program."""
FORMED = [name for name, file in CHAPTERS.items() if file.name == "README.md"]
"""Chapters of lessons and tools; the other pages have no boxes, runs and exercises."""
PAGES = {
    page.relative_to(ROOT / "playground").as_posix() if page.name != "README.md" else name: page
    for name in [*LESSONS, *(name for name in FORMED if name not in LESSONS)]
    for page in sorted(CHAPTERS[name].parent.glob("*.md"))
}
"""All that is read of lessons and tools, in the order of the path: chapters by name, further pages
by file."""
BOX = re.compile(
    r"# .+\n\n> - \*\*Why it matters\*\*: (?:.*\n>)+ "
    r"- \*\*You run\*\* `python -m playground .+, and \d+ minutes to read\.\n> "
    r"- \*\*You see\*\* (?:.*\n>)+ - \*\*You need\*\* .*\n(?:> .*\n)*\n"
)
LINK_ROW = re.compile(
    r"^\| (NVLink|InfiniBand NDR|10 Gbit/s Ethernet)\b.*? \| ([\d.]+ GB/s) \|", re.MULTILINE
)
"""A row of a table of links: the link, and its bandwidth in one direction."""
LONGEST_RUN = 25
"""Lines of a run that is shown."""
MOST_WORDS = 2500
"""Words of prose in a chapter, which explains every function and says when it pays."""
NO_PROSE = re.compile(
    r"^( *)```.*?^\1```$|^ *(?:\||#|!\[).*?$|(?<=\])\([^)]*\)|<[^>]*>", re.DOTALL | re.MULTILINE
)
"""Code, outputs, tables, headings, figures, and where links lead."""


def test_an_excerpt_is_verbatim() -> None:
    source = "def f():\n    a = 1\n    b = 2\n\n    c = 3\n    return a\n"
    assert line_of("a = 1\nb = 2\n", source)
    assert line_of("def f():\n    a = 1\n    # …\n    return a\n", source)
    assert line_of("b = 2\n\nc = 3\n", source)
    assert not line_of("a = 1\nc = 3\n", source)
    assert not line_of("return a\n# …\na = 1\n", source)
    assert not line_of("a = 1  # one\n", source)
    assert not line_of("a = 1\n    b = 2\n", source)


@pytest.mark.parametrize("name", FORMED)
def test_a_box_says_what_to_expect(name: str) -> None:
    assert BOX.match(CHAPTERS[name].read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PAGES)
def test_code_in_a_chapter_is_the_source_s(name: str) -> None:
    """Whole functions and classes, of which `# …` leaves out lines."""
    page = PAGES[name]
    for file, indent, block in EXCERPT.findall(page.read_text(encoding="utf-8")):
        source = (page.parent / file).read_text(encoding="utf-8")
        assert line_of(textwrap.dedent(block), source), f"{indent}{block}"
        assert re.match(r"(def|class|@)", block[len(indent) :]), f"{indent}{block}"


@pytest.mark.parametrize("name", FORMED)
def test_a_run_is_short(name: str) -> None:
    runs = fenced_blocks(CHAPTERS[name].read_text(encoding="utf-8"), "console")
    assert runs
    assert [len(run.splitlines()) for run in runs if len(run.splitlines()) > LONGEST_RUN] == []


def test_words_of_prose_are_counted() -> None:
    text = "# One\n\nTwo [three](four) `five`.\n\n```\nsix\n```\n| seven |\n![eight](nine)\n"
    assert count_words(text) == 3


def count_words(text: str) -> int:
    """Words of a chapter's prose, up to its sources."""
    prose = NO_PROSE.sub("", text.partition("\n## Sources\n")[0])
    return sum(any(map(str.isalnum, word)) for word in prose.split())


@pytest.mark.parametrize("name", LESSONS)
def test_a_chapter_is_not_too_long(name: str) -> None:
    assert count_words(CHAPTERS[name].read_text(encoding="utf-8")) <= MOST_WORDS


@pytest.mark.parametrize("name", PAGES)
def test_every_source_has_a_year(name: str) -> None:
    text = PAGES[name].read_text(encoding="utf-8")
    for source in re.split(r"^- ", text.partition("## Sources\n\n")[2], flags=re.MULTILINE)[1:]:
        assert re.search(r"\b(19|20)\d\d\b", source.partition("\n\n")[0]), source


@pytest.mark.parametrize("name", FORMED)
def test_every_exercise_has_its_outcome_folded_away(name: str) -> None:
    exercises = CHAPTERS[name].read_text(encoding="utf-8").split("## Try this")[1].split("\n## ")[0]
    for exercise in re.split(r"^\d+\. ", exercises, flags=re.MULTILINE)[1:]:
        assert exercise.count("<details><summary>Outcome</summary>\n\n") == 1, exercise
        assert exercise.rstrip().endswith("</details>"), exercise


@pytest.mark.parametrize("name", FORMED)
def test_the_last_line_leads_on(name: str) -> None:
    last = CHAPTERS[name].read_text(encoding="utf-8").splitlines()[-1]
    if name not in LESSONS:
        assert re.match(r"(Back to|Previous:|Next:) \[", last)
        return
    path, *beside = PARTS.values()
    part = next(part for part in (path, *beside) if name in (each.name for each in part))
    place = [each.name for each in part].index(name)
    leads = {"Previous": part[:place][-1:], "Next": part[place + 1 :][:1]}
    if part[place] is path[-1]:
        leads["Beside the path"] = [first for first, *_ in beside]
    links = [
        f"{where}: "
        + ", ".join(f"[{each.name}](../{Path(each.path).name}/README.md)" for each in lessons)
        for where, lessons in leads.items()
        if lessons
    ]
    assert last == " · ".join(links)


@pytest.mark.parametrize("name", LESSONS)
def test_a_chapter_needs_those_before_it(name: str) -> None:
    """On the path, and may name the next; a chapter beside it may need all of the path, and those
    before it in its part."""
    needed = re.search(
        r"\*\*You need\*\*(.*?)\n\n", CHAPTERS[name].read_text(encoding="utf-8"), re.S
    )
    path, *beside = ([each.name for each in part] for part in PARTS.values())
    read = path if name in path else path + next(part for part in beside if name in part)
    folders = [LESSONS[each].parent.name for each in read[: read.index(name) + 2]]
    assert needed
    assert {*re.findall(r"\]\(\.\./(\w+)/README", needed[1])} <= {*folders}


UNSAID = re.compile(
    r"^( *)```.*?^\1```$|^(?:#|!\[|>|    \S).*?$|`[^`]*`|\[[^\]]*\]\((?!\S*glossary)[^)]*\)",
    re.DOTALL | re.MULTILINE,
)
"""Parts of a chapter that are not prose: code, headings, figures, the box, and links elsewhere than
to the glossary."""
GLOSSARY_ROW = re.compile(r'^\| <a id="(.*?)"></a>(.*?) \| ', re.MULTILINE)


def find_first_use(words: list[str], prose: str) -> re.Match[str] | None:
    """The first place where a word, or several of them, stand alone, with the link that they may
    have."""
    names = "|".join(
        r"\s+".join(map(re.escape, word.split())) for word in sorted(words, key=len, reverse=True)
    )
    return re.search(
        rf"(?<![\w\-#])\[?(?:{names})(?:e?s)?(?![\w-])(?:\]\(\S*#(\S+?)\))?", prose, re.IGNORECASE
    )


@pytest.mark.parametrize(
    ("anchor", "words"), GLOSSARY_ROW.findall(CHAPTERS["glossary"].read_text(encoding="utf-8"))
)
def test_a_word_is_linked_to_the_glossary_where_it_is_first_used(anchor: str, words: str) -> None:
    """In the first chapter that uses one of a row's words: there the first use, and no other, is a
    link."""
    for name, page in PAGES.items():
        prose = UNSAID.sub("", page.read_text(encoding="utf-8"))
        if first := find_first_use([word.strip("`") for word in words.split(", ")], prose):
            assert first[1] == anchor, f"{name}: {first[0]}"
            assert prose.count(f"glossary.md#{anchor})") == 1
            return
    pytest.fail("no chapter uses it")


def test_the_glossary_is_in_order_and_each_word_is_in_its_chapter_or_on_the_page() -> None:
    text = re.sub(r"<a id=.*?></a>", "", CHAPTERS["glossary"].read_text(encoding="utf-8"))
    _, table = text.split("| word | meaning, and the chapter that explains it |")
    words = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    assert [word.strip().casefold() for word, *_ in words] == sorted(
        word.strip().casefold() for word, *_ in words
    )
    for word, meaning in words:
        [folder] = re.findall(r"\]\((.*?)\)", meaning)
        files = [
            CHAPTERS["tutorials"],
            *(file for file in (FOLDER / folder).rglob("*") if file.suffix in (".md", ".py")),
        ]
        text = " ".join(
            " ".join(file.read_text(encoding="utf-8").casefold().split()) for file in files
        )
        assert any(each.strip(" `").casefold() in text for each in word.split(", ")), word


def test_every_lesson_is_in_the_table_of_methods_or_the_glossary() -> None:
    text = "".join(CHAPTERS[page].read_text(encoding="utf-8") for page in ("map", "glossary"))
    linked = {(FOLDER / link).resolve() for link in re.findall(r"\]\((.*?)\)", text)}
    assert {ROOT / lesson.path for lesson in ROWS} <= linked


def test_the_numbers_of_the_table_of_methods_are_in_the_chapters_of_their_rows() -> None:
    """Or are printed by the program below the table."""
    text = CHAPTERS["map"].read_text(encoding="utf-8")
    [printed] = re.findall(r"^```text\nDDP.*?^```$", text, re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\|[^|]*\|[^|]*\|([^|]*)\|[^|]*\|(.*)\|$", text, re.MULTILINE)
    numbers = re.compile(r"(?<![\d.,])\d[\d,.]*(?<![,.])")

    def plain(number: str) -> str:
        return number.replace(",", "").removesuffix(".0")

    found = 0
    for column, links in rows:
        there = printed + "".join(
            (FOLDER / link / "README.md").read_text(encoding="utf-8")
            for link in re.findall(r"\]\((.*?)\)", links)
        )
        known = {plain(each) for each in numbers.findall(there)}
        for number in numbers.findall(re.sub(r"zero\d", "", column)):
            assert plain(number) in known, f"{number}: {links}"
            found += 1
    assert found > 20


def test_chapters_calculate_with_the_bandwidths_of_the_page_on_gpus() -> None:
    """Those of the table whose last column names the chapters."""
    _, table = CHAPTERS["gpus"].read_text(encoding="utf-8").split("| used in |")
    rows = dict(LINK_ROW.findall(table))
    assert len(rows) == 3
    found = [
        (name, link, bandwidth)
        for name, page in LESSONS.items()
        for link, bandwidth in LINK_ROW.findall(page.read_text(encoding="utf-8"))
    ]
    assert len({name for name, *_ in found}) >= 6
    assert [row for row in found if rows[row[1]] != row[2]] == []
    for name, link, _ in found:
        [line] = re.findall(rf"^\| {link}\b.*$", table, re.MULTILINE)
        assert re.search(rf"\b{name}\b|the same", line), f"{name}: {link}"
