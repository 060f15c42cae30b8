"""Every chapter has the same form, and the code it shows is the code that runs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

import pytest
from test_readme import EXCERPT, fenced_blocks

from playground.app import CHAPTERS
from playground.lessons import PATH

LESSONS = {lesson.name: CHAPTERS[lesson.name] for lesson in PATH}
FORMED = [name for name, file in CHAPTERS.items() if file.name == "README.md"]
"""Chapters of lessons and tools; the other pages have no boxes, runs and exercises."""
BOX = re.compile(
    r"# .+\n\n> - \*\*You will see\*\* (?:.*\n>)+ - \*\*You need\*\* (?:.*\n>)+ "
    r"- \*\*Time\*\*: .+ to run, \d+ minutes? to read\.\n\n"
)
LONGEST_RUN = 25
"""Lines of a run that is shown."""


def stands_in(block: str, source: str) -> bool:
    """Whether the lines of `block` are lines of `source`, in order: dedented, with a line `# …` for what is left out.
    Empty lines do not count: the formatter has rules of its own for those of a block."""
    pieces = re.split(r"^ *# …\n", re.sub(r"\n\s*\n", "\n", block), flags=re.MULTILINE)
    for indent in range(0, 17, 4):
        rest, found = re.sub(r"\n\s*\n", "\n", f"\n{source}"), True
        for piece in filter(None, pieces):
            _, found_here, rest = rest.partition(f"\n{textwrap.indent(piece, ' ' * indent)}")
            rest, found = f"\n{rest}", found and bool(found_here)
        if found:
            return True
    return False


def test_an_excerpt_is_verbatim() -> None:
    source = "def f():\n    a = 1\n    b = 2\n\n    c = 3\n    return a\n"
    assert stands_in("a = 1\nb = 2\n", source)
    assert stands_in("def f():\n    a = 1\n    # …\n    return a\n", source)
    assert stands_in("b = 2\n\nc = 3\n", source)
    assert not stands_in("a = 1\nc = 3\n", source)
    assert not stands_in("return a\n# …\na = 1\n", source)
    assert not stands_in("a = 1  # one\n", source)
    assert not stands_in("a = 1\n    b = 2\n", source)


@pytest.mark.parametrize("name", FORMED)
def test_a_box_says_what_to_expect(name: str) -> None:
    assert BOX.match(CHAPTERS[name].read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FORMED)
def test_code_in_a_chapter_is_the_source_s(name: str) -> None:
    chapter = CHAPTERS[name]
    excerpts = EXCERPT.findall(chapter.read_text(encoding="utf-8"))
    assert excerpts or name not in LESSONS
    for file, indent, block in excerpts:
        source = (chapter.parent / file).read_text(encoding="utf-8")
        assert stands_in(textwrap.dedent(block), source), f"{indent}{block}"


@pytest.mark.parametrize("name", FORMED)
def test_a_run_is_short(name: str) -> None:
    runs = fenced_blocks(CHAPTERS[name].read_text(encoding="utf-8"), "console")
    assert runs
    assert [len(run.splitlines()) for run in runs if len(run.splitlines()) > LONGEST_RUN] == []


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
    names = list(LESSONS)
    before, after = names[: names.index(name)][-1:], names[names.index(name) + 1 :][:1]
    links = [
        f"{where}: [{other}](../{LESSONS[other].parent.name}/README.md)"
        for where, others in (("Previous", before), ("Next", after))
        for other in others
    ]
    assert last == " · ".join(links)


UNSAID = re.compile(
    r"^( *)```.*?^\1```$|^(?:#|!\[|>|    \S).*?$|`[^`]*`|\[[^\]]*\]\((?!\S*glossary)[^)]*\)", re.DOTALL | re.MULTILINE
)
"""Parts of a chapter that are not its prose: code, headings, figures, the box, and links elsewhere than the glossary."""
GLOSSARY_ROW = re.compile(r'^\| <a id="(.*?)"></a>(.*?) \| ', re.MULTILINE)


def find_first_use(words: list[str], prose: str) -> re.Match[str] | None:
    """The first place where a word, or several of them, stand alone, with the link that they may have."""
    names = "|".join(r"\s+".join(map(re.escape, word.split())) for word in sorted(words, key=len, reverse=True))
    return re.search(rf"(?<![\w\-#])\[?(?:{names})(?:e?s)?(?![\w-])(?:\]\(\S*#(\S+?)\))?", prose, re.IGNORECASE)


@pytest.mark.parametrize(("anchor", "words"), GLOSSARY_ROW.findall(CHAPTERS["glossary"].read_text(encoding="utf-8")))
def test_a_word_is_linked_to_the_glossary_where_it_is_first_used(anchor: str, words: str) -> None:
    """In the first chapter that uses one of a row's words: there the first use, and no other, is a link."""
    for name in sorted(FORMED, key=lambda name: name not in LESSONS):
        prose = UNSAID.sub("", CHAPTERS[name].read_text(encoding="utf-8"))
        if first := find_first_use([word.strip("`") for word in words.split(", ")], prose):
            assert first[1] == anchor, f"{name}: {first[0]}"
            assert prose.count(f"glossary.md#{anchor})") == 1
            return
    pytest.fail("no chapter uses it")


Rows = dict[str, list[float]]
CLAIMS: dict[tuple[str, str], Callable[[list[Rows]], bool]] = {
    ("ladder", "eight messages take longer than one of the same bytes"): lambda runs: (
        runs[0]["per-parameter"][3] > runs[0]["flat"][3]
    ),
    ("ladder", "one message at the end does as well as two that overlap"): lambda runs: (
        runs[0]["flat"][0] <= 1.02 * runs[0]["overlapped"][0]
    ),
    ("ladder", "`overlapped` takes 98 ms and `bucketed` 124"): lambda runs: (
        (round(runs[1]["overlapped"][0]), round(runs[1]["bucketed"][0])) == (98, 124)
    ),
    ("ladder", "`per-parameter` does as well as `overlapped`"): lambda runs: (
        runs[1]["per-parameter"][0] <= 1.05 * runs[1]["overlapped"][0]
    ),
    ("ladder", "`sparse-embeddings` is 1.79 times as fast as DDP"): lambda runs: (
        round(runs[1]["ddp"][0] / runs[1]["sparse-embeddings"][0], 2) == 1.79
    ),
    ("bert", "DDP gains half as much again; DataParallel gains nothing"): lambda runs: (
        (round(runs[0]["ddp"][1] / runs[0]["ddp"][0], 1), runs[0]["data-parallel"][3] < 1) == (1.5, True)
    ),
    ("parameter-server", "async processes three times as many samples per second"): lambda runs: (
        round(runs[0]["async"][0] / runs[0]["sync"][0]) == 3
    ),
    ("parameter-server", "sync is as slow as all-reduce"): lambda runs: (
        abs(runs[0]["sync"][0] / runs[0]["all-reduce"][0] - 1) < 0.02
    ),
    ("parameter-server", "2.98 steps old on average"): lambda runs: runs[0]["async"][4] == 2.98,
    ("pipeline", "With naive, ranks idle half of the time"): lambda runs: 45 < runs[0]["naive"][0] < 55,
    ("pipeline", "alike in both (14.3 % and 15.3 % here"): lambda runs: (
        [runs[0][name][0] for name in ("gpipe", "1f1b")] == [14.3, 15.3]
    ),
    ("pipeline", "In the table it took 599 ms"): lambda runs: round(runs[0]["1f1b"][2]) == 599,
}
"""Sentences of chapters that compare, by chapter, and whether the rows of its runs say the same."""


def read_rows(run: str) -> Rows:
    """The rows of numbers in a run that is shown, by their first word; of two rows with one name, the last."""
    rows = re.findall(r"^  (\S+)((?: +[\d.,e-]+)+)$", run, re.MULTILINE)
    return {name: [float(number.replace(",", "")) for number in numbers.split()] for name, numbers in rows}


@pytest.mark.parametrize(("name", "sentence"), CLAIMS)
def test_what_a_chapter_compares_is_what_its_runs_show(name: str, sentence: str) -> None:
    text = CHAPTERS[name].read_text(encoding="utf-8")
    assert sentence in " ".join(text.split())
    assert CLAIMS[name, sentence]([rows for run in fenced_blocks(text, "console") if (rows := read_rows(run))])
