"""Every chapter has the same form, and the code it shows is the code that runs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

import pytest
from test_readme import fenced_blocks

from playground.lessons import PATH
from playground.runtime.remote import ROOT
from playground.site.build import EXCERPT, stands_in
from playground.site.chapters import CHAPTERS

LESSONS = {lesson.name: CHAPTERS[lesson.name] for lesson in PATH}
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
LONGEST_RUN = 25
"""Lines of a run that is shown."""


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


@pytest.mark.parametrize("name", PAGES)
def test_code_in_a_chapter_is_the_source_s(name: str) -> None:
    """Whole functions and classes, of which `# …` leaves out lines."""
    page = PAGES[name]
    for file, indent, block in EXCERPT.findall(page.read_text(encoding="utf-8")):
        source = (page.parent / file).read_text(encoding="utf-8")
        assert stands_in(textwrap.dedent(block), source), f"{indent}{block}"
        assert re.match(r"(def|class|@)", block[len(indent) :]), f"{indent}{block}"


@pytest.mark.parametrize("name", LESSONS)
def test_a_chapter_begins_with_a_program_that_runs(name: str) -> None:
    """tests/test_readme.py runs it."""
    text = CHAPTERS[name].read_text(encoding="utf-8")
    first = fenced_blocks(text, "python")[0]
    assert first not in (textwrap.dedent(block) for *_, block in EXCERPT.findall(text))
    assert "import " in first


@pytest.mark.parametrize("name", FORMED)
def test_a_run_is_short(name: str) -> None:
    runs = fenced_blocks(CHAPTERS[name].read_text(encoding="utf-8"), "console")
    assert runs
    assert [len(run.splitlines()) for run in runs if len(run.splitlines()) > LONGEST_RUN] == []


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
    names = list(LESSONS)
    before, after = names[: names.index(name)][-1:], names[names.index(name) + 1 :][:1]
    links = [
        f"{where}: [{other}](../{LESSONS[other].parent.name}/README.md)"
        for where, others in (("Previous", before), ("Next", after))
        for other in others
    ]
    assert last == " · ".join(links)


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


Rows = dict[str, list[float]]
SHOWN = re.compile(r"^ +(\S.*)$", re.MULTILINE)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?")


def read_rows(table: str) -> Rows:
    """The numbers of each row, by the cells before the first number; of rows with one name, one
    after the other."""
    rows: Rows = {}
    for line in SHOWN.findall(table):
        first, *cells = re.split(r"  +", re.sub(r"[█▓▒░]+#?", "", line))
        numbers = [NUMBER.fullmatch(cell.partition(" = ")[0]) for cell in cells]
        if any(numbers):
            words = cells[: next(place for place, number in enumerate(numbers) if number)]
            found = [float(number[0].replace(",", "")) for number in numbers if number]
            rows.setdefault(" ".join([first, *words]), []).extend(found)
    return rows


def read_tables(name: str) -> list[Rows]:
    """The tables of numbers in the runs that a chapter shows, whose other lines are left out."""
    runs = fenced_blocks(PAGES[name].read_text(encoding="utf-8"), "console")
    return [
        rows
        for run in runs
        for table in re.split(r"^…$", run, flags=re.M)
        if (rows := read_rows(table))
    ]


def read_figures(name: str) -> list[list[float]]:
    """The numbers in the rows of a chapter's table of figures, without those of the first cells."""
    text = PAGES[name].read_text(encoding="utf-8").split("## Figures and limits")[1]
    rows = re.findall(r"^\|[^|]*\| (.*\d.*) \|$", text, re.MULTILINE)
    return [[float(number) for number in re.findall(r"\d+(?:\.\d+)?", row)] for row in rows]


def near(one: float, other: float, share: float) -> bool:
    return abs(one - other) <= share * other


CLAIMS: dict[tuple[str, str], Callable[[list[Rows]], bool]] = {
    ("allreduce", "carries 0.90 to 1.16 times the bytes per second"): lambda _: (
        [
            limit(share for row in read_figures("bench")[1:5] for share in row)
            for limit in (min, max)
        ]
        == [0.90, 1.16]
    ),
    (
        "data-parallel",
        "Thirty become 15 + 15 on two devices and 10 + 10 + 10 on three; of two samples",
    ): lambda tables: (
        [tables[0][f"cpu:{number}"] for number in range(3)]
        == [[30, 15, 10, 1], [0, 15, 10, 1], [0, 0, 10, 0]]
    ),
    ("data-parallel", "holds the outputs of all, and the loss doubles them"): lambda tables: near(
        tables[2]["loss"][0] - tables[2]["gather"][0], 2 * tables[1]["gather cpu:1 cpu:0"][0], 0.001
    ),
    (
        "data-parallel",
        "20 on one device and no more on any number of them, against 20 per device",
    ): lambda _: read_figures("data-parallel")[0] == [20, 20, 4 * 20],
    ("sgd", "the tutorial's script: samples one by one"): lambda _: all(
        near(seconds / read_figures("sgd")[0][0], ratio, 0.03)
        for seconds, ratio in read_figures("sgd")[2:5]
    ),
    ("ladder", "`forward` is the same on all rungs"): lambda tables: (
        max(row[1] for row in tables[0].values()) < 1.1 * min(row[1] for row in tables[0].values())
    ),
    ("ladder", "eight messages take longer than one of the same bytes"): lambda tables: (
        tables[0]["per-parameter"][3] > tables[0]["flat"][3]
    ),
    ("ladder", "one message at the end does as well as two that overlap"): lambda tables: (
        tables[0]["flat"][0] <= 1.02 * tables[0]["overlapped"][0]
    ),
    ("ladder", "`parameters` costs what `flat` does after each step"): lambda tables: near(
        tables[0]["parameters"][3], tables[0]["flat"][3], 0.1
    ),
    ("ladder", "the step is 1.25 times as fast"): lambda tables: (
        round(tables[1]["flat"][0] / tables[1]["overlapped"][0], 2) == 1.25
    ),
    (
        "lessons/ladder/beyond.md",
        "`sparse-embeddings` is 1.90 times as fast as DDP",
    ): lambda tables: round(tables[0]["ddp"][0] / tables[0]["sparse-embeddings"][0], 2) == 1.9,
    ("ddp", "loss and accuracy are the same to the last digit"): lambda tables: all(
        tables[0][epoch][:3] == read_tables("sgd")[0][epoch][:3] for epoch in ("1", "2")
    ),
    ("ddp", "the difference is rounding), with one message in place of four"): lambda tables: (
        (tables[1]["no_sync but for the last"][1], tables[1]["all send"][1]) == (1, 4)
        and max(row[2] for row in tables[1].values()) < 1e-14
    ),
    ("lessons/ddp/lab.md", "Without the optimizer the training ends elsewhere"): lambda tables: (
        tables[0]["model"][1] > tables[0]["model, optimizer"][1] == 0
    ),
    (
        "prove",
        "after five steps no rank has one that is further than 1.1e-16 from one process",
    ): lambda tables: (
        max(tables[0][name][2] for name in ("per-parameter", "parameters", "ddp")) == 1.1e-16
    ),
    ("bert", "DDP gains half as much again; DataParallel gains nothing"): lambda tables: (
        (round(tables[1]["ddp"][1] / tables[1]["ddp"][0], 1), tables[1]["data-parallel"][3] < 1)
        == (1.5, True)
    ),
    ("bert", "Four workers on two cores can only be slower than two."): lambda tables: all(
        four < two for _, two, four, *_ in tables[1].values()
    ),
    ("bert", "All three end with nearly the same loss."): lambda tables: all(
        near(row[2], tables[0]["ddp"][2], 0.002) for row in tables[0].values()
    ),
    ("bert", "computing the loss in forward, the cure for wide outputs"): lambda tables: all(
        tables[2][f"loss-in-forward, {device}"] >= tables[2][f"data-parallel, {device}"]
        for device in ("cpu:0", "cpu:1")
    ),
    ("bert", "DDP needs no less"): lambda tables: (
        tables[2]["ddp, rank 0"] > tables[2]["data-parallel, cpu:0"]
    ),
    (
        "elastic",
        "the first kill, after step 8, costs eight steps, and the second nine",
    ): lambda tables: tables[0]["rank 0 of 4 was killed by SIGKILL"][2::4] == [8, 9],
    ("rpc", "Large tensors are not faster than torch's"): lambda _: (
        read_figures("rpc")[0][-1] < 1 <= min(read_figures("rpc")[1][-2:])
    ),
    ("parameter-server", "async processes three times as many samples per second"): lambda tables: (
        round(tables[0]["async"][0] / tables[0]["sync"][0]) == 3
    ),
    ("parameter-server", "sync is as slow as all-reduce"): lambda tables: (
        abs(tables[0]["sync"][0] / tables[0]["all-reduce"][0] - 1) < 0.02
    ),
    ("parameter-server", "2.98 steps old on average"): lambda tables: tables[0]["async"][3] == 2.98,
    (
        "parameter-server",
        "a slightly higher loss with the same number of samples, 1.124 against 1.073",
    ): lambda tables: (tables[0]["async"][2], tables[0]["all-reduce"][2]) == (1.124, 1.073),
    ("parameter-server", "So a server needs more bandwidth"): lambda tables: all(
        tables[0][mode][4] > tables[0]["all-reduce"][4]
        for mode in ("sync", "async", "stale-synchronous")
    ),
    ("pipeline", "With naive, ranks idle half of the time"): lambda tables: (
        45 < tables[1]["naive"][0] < 55
    ),
    ("pipeline", "alike in both (15.2 % and 16.2 % here"): lambda tables: (
        [tables[1][name][0] for name in ("gpipe", "1f1b")] == [15.2, 16.2]
    ),
    ("pipeline", "its step takes as long: 382 and 375 ms"): lambda tables: (
        [round(tables[1][name][2]) for name in ("1f1b", "gpipe")] == [382, 375]
    ),
    (
        "pipeline",
        "GPipe holds eight microbatches on each stage, 1F1B two and one.",
    ): lambda tables: (tables[0]["0"], tables[0]["1"]) == ([1, 8, 2], [1, 8, 1]),
    ("pipeline", "so they train to the same bits"): lambda tables: (
        tables[1]["naive"][3:] == tables[1]["gpipe"][3:] == tables[1]["1f1b"][3:]
    ),
}
"""Sentences of chapters that compare, by chapter, and whether the tables of its runs, or its
figures, say the same."""


@pytest.mark.parametrize(("name", "sentence"), CLAIMS)
def test_what_a_chapter_compares_is_what_its_runs_show(name: str, sentence: str) -> None:
    assert sentence in " ".join(PAGES[name].read_text(encoding="utf-8").split())
    assert CLAIMS[name, sentence](read_tables(name))


def test_the_picture_of_the_rungs_has_the_times_of_the_table_beside_it() -> None:
    svg = (CHAPTERS["ladder"].parent / "figures" / "step_parts.svg").read_text(encoding="utf-8")
    drawn = dict(re.findall(r">([a-z-]+)</text>(?:(?! ms<).)*>([\d.]+) ms<", svg, re.DOTALL))
    shown = {name: row[0] for name, row in read_tables("ladder")[0].items()}
    assert drawn.keys() == shown.keys()
    faster = {name: float(drawn[name]) / float(drawn["per-parameter"]) for name in shown}
    assert [
        name for name in shown if not near(faster[name], shown[name] / shown["per-parameter"], 0.15)
    ] == []
