"""The site in a real browser, and its files: whole, equal from build to build, and refused where it
would be stale."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from browser import MISSING, Browser
from player_sizes import check_sizes
from selenium.webdriver.common.action_chains import ActionChains

from playground.base.errors import PlaygroundError
from playground.exercises.exercise import CATALOGUE
from playground.figures import runs
from playground.lessons import LESSONS, PARTS
from playground.site import code
from playground.site.addresses import TEXTS
from playground.site.build import write_site
from playground.site.pages import PLAYED, Site
from playground.site.search import Section, place_symptoms

in_browser = pytest.mark.skipif(bool(MISSING), reason=MISSING)
KINDS = ("index", "glossary", "p2p", "break-send-send", "code-tools-failures-calls.py")
"""A page of each kind."""
FINDINGS = """axe.run({preload: false, resultTypes: ["violations"]}).then(found => {
    const grave = found.violations.filter(each => ["serious", "critical"].includes(each.impact));
    done(grave.map(each => `${each.id}: ${each.nodes[0].html}`));
})"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("host") / "course"
    write_site(folder, lambda *_: None)
    return folder


@pytest.fixture
def show(window: Browser, site: Path) -> Iterator[Callable[..., Browser]]:
    """Opens pages, which may ask for nothing elsewhere, nor complain."""

    def check() -> None:
        assert [
            address for address in window.requests() if not address.startswith(site.as_uri())
        ] == []
        assert window.complaints() == []

    def open_page(name: str, **media: Any) -> Browser:
        check()
        window.open(site / f"{name}.html", **media)
        window.until(
            "return [...document.querySelectorAll('.status')].every(each => each.textContent)"
        )
        return window

    yield open_page
    check()


def test_links_and_anchors_lead_somewhere(site: Path) -> None:
    pages = {file.name: file.read_text() for file in site.glob("*.html")}
    places = {name: re.findall(r'<[^<>]* id="([^"]*)"', text) for name, text in pages.items()}
    for name, text in pages.items():
        assert len(places[name]) == len(set(places[name])), name
        for address in re.findall(r'<[^<>]* (?:href|src)="((?!https?:)[^"]*)"', text):
            target, _, part = address.partition("#")
            assert not target or (site / target).is_file(), f"{name}: {address}"
            assert not part or part in places[target or name], f"{name}: {address}"
    assert {f"{name}.html" for name in TEXTS.values()} < {*pages}


def test_the_contents_number_the_path_in_order_and_then_its_parts(site: Path) -> None:
    contents = (
        (site / "index.html").read_text().partition('id="contents"')[2].partition("</nav>")[0]
    )
    assert re.findall("<b>(.*?)</b>", contents) == [*PARTS]
    lists = re.findall('<ol start="(.*?)">(.*?)</ol>', contents)
    pages = [re.findall('<a href="(.*?).html">', each) for _, each in lists]
    assert pages == [[lesson.name for lesson in part] for part in PARTS.values()]
    before = [sum(map(len, pages[:number])) for number in range(len(pages))]
    assert [int(start) - 1 for start, _ in lists] == before


def test_previous_and_next_lead_through_all_pages_of_a_kind(site: Path) -> None:
    """From the overview through the chapters to the last text, from program to program, and from a
    page beside a chapter back to it."""
    pages = {file.stem: file.read_text() for file in site.glob("*.html")}
    links = {
        turn: {
            name: found[1]
            for name, text in pages.items()
            if (found := re.search(rf'rel="{turn}" href="(.*?)\.html"', text))
        }
        for turn in ("prev", "next")
    }
    assert all(links["prev"][after] == name for name, after in links["next"].items())
    course = ["index"]
    while course[-1] in links["next"]:
        course.append(links["next"][course[-1]])
    assert course[1 : 1 + len(LESSONS)] == [*LESSONS]
    beside = {*TEXTS.values()} - {*course}
    assert {links["prev"][name] for name in beside} <= {*LESSONS}
    assert "hosts_and_memory" in beside
    for kind in ("break", "code"):
        names = {name for name in pages if name.startswith(f"{kind}-")}
        assert len(names & {*links["prev"]}) == len(names) - 1


EXCERPTS = re.compile(
    r'<a href="[\w.-]*#lesson\.py-(\d+)">(?:(?!</a>).)*</a>:</p>\n'
    r'<div class="code"><pre .*?<code>(.*?)\n'
)


def test_an_excerpt_leads_to_the_line_where_it_begins(site: Path) -> None:
    found = 0
    for name in LESSONS:
        text = (site / f"{name}.html").read_text()
        for at, excerpt in EXCERPTS.findall(text):
            line = re.search(rf'id="lesson\.py-{at}" data-n="{at}">(.*?)\n', text)
            assert line, f"{name}:{at}"
            assert re.sub("<.*?>", "", line[1]).strip() == re.sub("<.*?>", "", excerpt), (
                f"{name}:{at}"
            )
            found += 1
    assert found > 2 * len(LESSONS)


def test_chapters_are_links_where_the_map_names_them(site: Path) -> None:
    diagram = re.search(
        r"<code>[^<]*torchrun.*?</code>", (site / "map.html").read_text(), re.DOTALL
    )
    assert diagram
    named = {
        *re.findall(r"[\w-]+", " ".join(re.findall(r"\((.*?)\)", re.sub("<.*?>", "", diagram[0]))))
    }
    linked = re.findall(r'<a href="([\w-]+)\.html">\1</a>', diagram[0])
    assert {*linked} == named - {"CPU", "GPU"}
    assert {"hello", "ddp", "parameter-server"} < named


def test_it_is_small(site: Path) -> None:
    sizes = {file: file.stat().st_size for file in site.rglob("*") if file.is_file()}
    assert sum(sizes.values()) <= 6_500_000
    assert [file.name for file, size in sizes.items() if size > 640 * 2**10] == []


PLAYERS = re.compile(r'<script type="application/json">(.*?)</script>', re.DOTALL)


@pytest.mark.parametrize("name", [name for name in LESSONS if name != "scaling"])  # only times
def test_a_chapter_plays_a_run_with_its_values(name: str, site: Path) -> None:
    """What each event of the recording sends or holds is on the page, as far as there is room."""
    players = PLAYERS.findall((site / f"{name}.html").read_text())
    assert players
    for data in map(json.loads, players):
        recording = runs.find_run(data["command"])
        assert recording
        events = [*recording.events()]
        assert len(events) > 1
        shown = {place: data["vectors"][vector] for place, vector in data["valuesOf"]}
        held = {
            place: [*event.values] for place, event in enumerate(events) if event.values is not None
        }
        assert {place: [*map(float, values)] for place, values in shown.items()} == {
            place: values
            for place, values in held.items()
            if data["leftOut"] == 0 or place in shown
        }
        sizes = [what[7] for what in data["whats"]]
        assert {event.nbytes for event in events} == {*sizes}


def test_a_run_that_a_chapter_plays_opens_where_it_says(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [data] = PLAYERS.findall((site / "bytes.html").read_text())
    recording, opens = runs.find_run("bytes board"), json.loads(data)["opens"]
    assert recording
    before = [event.name for event in recording.ranks[0].events[:opens]]
    assert recording.ranks[0].events[opens].name == "all_gather_into_tensor"
    assert before.count("all_reduce") == 3  # the steps of the method before it
    [data, *_] = PLAYERS.findall((site / "pipeline.html").read_text())
    recording, opens = runs.find_run("pipeline board"), json.loads(data)["opens"]
    assert recording
    events = recording.ranks[0].events
    steps = [each.number for each in events if each.kind == "phase"]  # naive, gpipe, 1F1B
    assert steps[1] < opens < steps[2]
    assert [each.name for each in events[steps[1] : opens + 1]].count("isend") == 1
    shown = Site(lambda *_: None)
    shown.sections.append(Section("", ""))
    for words, reason in (
        ("zero board from scatter", "zero board has no scatter 1"),
        ("some board", "plays a run that is not recorded"),
    ):
        with pytest.raises(PlaygroundError, match=reason):
            shown.render("zero", tmp_path / "README.md", f"<!-- play {words}: a caption -->\n")


@pytest.mark.parametrize("name", CATALOGUE)
def test_an_exercise_is_on_the_page_of_its_chapter(name: str, site: Path) -> None:
    """With the file that `exercise` writes, its commands, all hints and the names of mistakes."""
    exercise = CATALOGUE[name]
    page = (site / f"{exercise.lesson}.html").read_text()
    section = page.partition(f'aria-labelledby="exercise-{name}"')[2].partition("</section>")[0]
    codes = [
        html.unescape(re.sub("<.*?>", "", code))
        for code in re.findall("<pre[^>]*><code>(.*?)</code></pre>", section, re.DOTALL)
    ]
    stub = codes.index(exercise.stub)
    assert f"$ python -m playground check {name}\n" in codes[stub + 1]
    assert section.count("<summary>Hint ") == len(exercise.hints) >= 2
    mistakes = section.partition("Mistakes that others made")[2]
    assert "<pre" not in mistakes
    named = [
        html.unescape(re.sub("<.*?>", "", each)) for each in re.findall("<li>(.*?)</li>", mistakes)
    ]
    assert named == [each.name.replace("`", "") for each in exercise.mistakes]


def test_another_build_is_equal_byte_for_byte(site: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "playground", "site", "again"]
    subprocess.run(
        command,
        check=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"},
    )
    for file in [file for file in site.rglob("*") if file.is_file()]:
        assert file.read_bytes() == (tmp_path / "again" / file.relative_to(site)).read_bytes(), (
            file.name
        )


def test_a_run_moves_with_its_lines_and_is_refused_when_they_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = runs.find_run("ring")
    assert recording
    name = next(name for name in recording.texts if name.endswith("all_reduce/lesson.py"))
    for each in recording.texts:
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).write_text(recording.texts[each])
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    (tmp_path / name).write_text(f"# one line more\n{recording.texts[name]}")
    moved = runs.find_run("ring")
    assert moved
    shifts = [
        now.line - then.line for now, then in zip(moved.sources, recording.sources, strict=True)
    ]
    assert shifts == [int(source.file == name) for source in recording.sources]
    line = recording.texts[name].splitlines()[
        next(s for s in recording.sources if s.file == name).line - 1
    ]
    (tmp_path / name).write_text(recording.texts[name].replace(line, f"{line}  # changed"))
    with pytest.raises(
        PlaygroundError,
        match=rf"'ring' was recorded with another {name}, line \d+ .* record it again",
    ):
        runs.find_run("ring")


def test_code_that_is_not_the_source_s_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "ROOT", tmp_path)
    (tmp_path / "lesson.py").write_text("def f():\n    return 1\n")
    (tmp_path / "README.md").write_text(
        "From [lesson.py](lesson.py):\n\n```python\ndef f():\n    return 2\n```\n"
    )
    with pytest.raises(PlaygroundError, match=r"README.md shows code that lesson.py lacks: def f"):
        code.read_text(tmp_path / "README.md")


@in_browser
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.stress)])
def test_pages_are_accessible(every: bool, site: Path, show: Callable[..., Browser]) -> None:
    """On a desk in the light, and on a telephone in the dark; one of each kind, in `make stress`
    all."""
    axe = (files("axe_core_python") / "axe.min.js").read_text()
    for name in sorted(file.stem for file in site.glob("*.html")) if every else KINDS:
        window = show(name, width=1400, color_scheme="light")
        window.ask(axe)
        for width, scheme in ((1400, "light"), (400, "dark")):
            window.resize(width=width, color_scheme=scheme)
            assert window.ask("return document.documentElement.scrollWidth <= innerWidth"), name
            assert window.ask_later(FINDINGS) == [], (name, scheme)


LAYOUT = Path(__file__).with_name("layout.js").read_text()


@in_browser
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.stress)])
def test_nothing_overlaps_or_is_cut_off(
    every: bool, site: Path, show: Callable[..., Browser]
) -> None:
    """On a telephone, a tablet and a desk; in `make stress` all pages."""
    some = ("allreduce", "glossary")
    for name in sorted(file.stem for file in site.glob("*.html")) if every else some:
        for width in (400, 800, 1400):
            window = show(name, width=width)
            assert window.ask(f"{LAYOUT} return findFaults()") == [], (name, width)


@in_browser
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.stress)])
@pytest.mark.parametrize("width", [400, pytest.param(800, marks=pytest.mark.stress), 1400])
def test_steps_leave_the_page_where_it_is_and_labels_apart(
    width: int, every: bool, site: Path, show: Callable[..., Browser]
) -> None:
    """From the step on which it opens: the first, unless the chapter names an event. In `make
    stress` in all players."""
    later = {
        page
        for file, page in TEXTS.items()
        if any(each["event"] for each in PLAYED.finditer(file.read_text(encoding="utf-8")))
    }
    played = [file.stem for file in site.glob("*.html") if 'class="player"' in file.read_text()]
    labels = 0
    for name in played if every else ("allreduce",):
        window = show(name, width=width, reduced_motion="reduce")
        buttons = "[...document.querySelectorAll('.begin-play')]"
        window.ask(
            f"{buttons}.filter(each => each.checkVisibility()).forEach(each => each.click())"
        )
        window.ask_later("requestAnimationFrame(() => requestAnimationFrame(done))")
        at = window.ask("return scrollY")
        for player in window.ask(f"{LAYOUT} return stepAll()"):
            is_first = player["first"].startswith("Step 1 of")
            assert is_first or name in later or name.startswith("break-"), name
            assert (len(player["heights"]), player["collisions"]) == (1, []), (name, player)
            labels += player["labels"]
        assert window.ask("return scrollY") == at, name
    assert labels > 20


@in_browser
def test_the_first_screens_can_be_read_on_a_telephone(show: Callable[..., Browser]) -> None:
    """The letters of the moving picture are not shrunk, and no command is cut off."""
    window = show("index", width=400)
    window.until("return document.querySelector('main img').complete")
    picture = "document.querySelector('main img')"
    assert window.ask(f"return {picture}.offsetWidth / {picture}.naturalWidth") > 0.8
    sizes = window.ask(
        "const code = document.querySelector('main .code pre'); "
        "return [code.scrollWidth, code.clientWidth]"
    )
    assert sizes[0] <= sizes[1] + 1


@in_browser
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.stress)])
def test_a_player_is_in_sight(every: bool, site: Path, show: Callable[..., Browser]) -> None:
    """Its controls, its timeline, its picture and all its ranks at 1400 x 900; nothing is wider
    than a telephone. Those with the most ranks, lanes and numbers; in `make stress` all."""
    played = [file.stem for file in site.glob("*.html") if 'class="player"' in file.read_text()]
    assert {*LESSONS} <= {*played}
    for name in sorted(played) if every else ("mesh", "prove", "zero", "break-stopped"):
        for width in (1400, 400):
            assert check_sizes(show(name, width=width, height=900), name, width)


@in_browser
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.stress)])
def test_a_chapter_s_first_exercise_is_near_on_a_telephone(
    every: bool, show: Callable[..., Browser]
) -> None:
    """Within six screens, where it is far; in `make stress` in all."""
    with_exercises = {exercise.lesson for exercise in CATALOGUE.values()}
    for name in sorted(with_exercises) if every else ("ddp",):
        window = show(name, width=400, height=844)
        first = "document.querySelector('main a[href*=\"exercise-\"]')"
        assert 0 < window.ask(f"return {first}.getBoundingClientRect().top") < 6 * 844, name


@in_browser
def test_what_a_reader_does_stays_in_view(show: Callable[..., Browser]) -> None:
    """Results of a search, the line that an excerpt is from, and the lines at which ranks are."""
    window = show("allreduce", width=1400, reduced_motion="reduce")
    top = "getBoundingClientRect().top"
    link = "document.querySelectorAll('main a[href*=\"#lesson.py-\"]')[0]"
    window.ask(f"{link}.scrollIntoView({{block: 'center'}})")
    window.press("/", *"ring")
    window.until("return document.querySelectorAll('#found a').length > 3")
    assert 0 < window.ask(f"return document.querySelector('#found a').{top}") < 300
    window.press("\ue00c")
    before = window.ask(f"return {link}.{top}")
    window.ask(f"{link}.click()")
    assert window.ask(f"return {link}.{top}") == pytest.approx(before, abs=2)
    line = "document.querySelector('#board .here')"
    assert window.ask(f"return {line}.textContent").startswith("def ")
    assert 0 < window.ask(f"return {line}.{top}") < 800
    window.ask("document.querySelector('.player').scrollIntoView()")
    window.ask("document.querySelector('.player [name=forward]').focus()")
    window.press("\ue007", "\ue007")
    window.until("return document.querySelector('[data-ranks]')")
    heights = "[...document.querySelectorAll('[data-ranks]')].map(each => each.offsetHeight)"
    assert max(window.ask(f"return {heights}")) < 60


@in_browser
def test_keys_are_those_of_the_player_that_is_used(show: Callable[..., Browser]) -> None:
    """And the page's again, once the reader has clicked elsewhere."""
    window = show("collectives", width=1400, reduced_motion="reduce")

    def click(selector: str) -> None:
        place = window.driver.find_element("css selector", selector)
        ActionChains(window.driver).click(place).perform()

    window.ask("document.querySelector('figure:has(.player)').scrollIntoView()")
    click(".player figcaption")
    at, play = window.ask("return scrollY"), ".player [name=play]"
    said = []
    for _ in range(2):
        window.press(" ")
        said.append(window.text(play))
    assert (said, window.ask("return scrollY")) == (["Pause", "Play"], at)
    click("figure:has(.player) > figcaption")
    window.press(" ")
    window.until(f"return scrollY > {at}")
    assert window.text(play) == "Play"


@in_browser
def test_the_browser_keeps_what_the_reader_has_chosen_and_done(
    show: Callable[..., Browser],
) -> None:
    window = show("hello", width=1400, color_scheme="light")
    paper = "return getComputedStyle(document.body).backgroundColor"
    light = window.ask(paper)
    window.ask("for (let i = 0; i < 2; i++) document.querySelector('.theme').click()")
    dark = window.ask(paper)
    assert light != dark
    window.ask("document.querySelector('[data-done=hello] input').click()")
    window = show("p2p", width=1400, color_scheme="light")
    assert window.ask(paper) == dark
    done = "return [...document.querySelectorAll('ol .done')].map(each => each.textContent)"
    assert window.ask(done) == ["hello"]
    assert window.text("[data-done=p2p]").endswith(f"(1 of {len(LESSONS)})")
    assert window.text("[data-done=exercise-swap]").strip() == "Passed"
    assert window.text(".begin") == "Go on: hello"
    window.ask("localStorage.clear()")
    window = show("p2p", width=1400, color_scheme="light")
    assert (window.ask(paper), window.ask(done)) == (light, [])


@in_browser
def test_a_block_is_copied_and_of_a_session_its_commands(show: Callable[..., Browser]) -> None:
    window = show("p2p", width=1400)
    allowed = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    window.driver.execute_cdp_cmd("Browser.grantPermissions", allowed)
    copied, buttons = [], "document.querySelectorAll('[aria-labelledby=exercise-swap] .copy')"
    for number in range(2):
        window.ask(f"{buttons}[{number}].click()")
        window.until(f"return {buttons}[{number}].textContent === '✓'")
        copied.append(window.ask_later("navigator.clipboard.readText().then(done)"))
    assert copied[0].rstrip() == CATALOGUE["swap"].stub.rstrip()
    assert copied[1] == "python -m playground exercise swap\npython -m playground check swap"


@in_browser
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.stress)])
def test_pages_load_from_the_disk(every: bool, site: Path, show: Callable[..., Browser]) -> None:
    """A tenth of the chapters; in `make stress` all pages. (`test_pages_are_accessible` loads
    one of each kind.)"""
    chosen = [*LESSONS][int(os.environ["PLAYGROUND_TEST_TENTH"]) % 10 :: 10]
    for name in sorted(file.stem for file in site.glob("*.html")) if every else chosen:
        show(name)


@in_browser
def test_a_host_may_serve_it_below_its_root(site: Path, window: Browser) -> None:
    handler = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=site.parent)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        root = f"http://127.0.0.1:{server.server_port}/course/"
        window.driver.get(f"{root}index.html")
        window.requests(), window.complaints()
        window.ask(
            "[...document.querySelectorAll('main a')].find(each => each.textContent === "
            "'p2p').click()"
        )
        window.wait_for(".status", "Step")
        assert {address.removeprefix(root) for address in window.requests()} >= {
            "p2p.html",
            "site.css",
            "player.js",
        }
        assert all(address.startswith(root) for address in window.requests())
        assert window.complaints() == []
        server.shutdown()


@in_browser
def test_a_player_leads_to_the_lines_of_the_board(show: Callable[..., Browser]) -> None:
    window = show("collectives", width=1400)
    window.ask("document.querySelector('[name=forward]').focus()")
    window.press("\ue007")
    line = window.ask("return document.querySelector('.line a').getAttribute('href')")
    assert (
        window.ask("return document.getElementById(arguments[0].slice(1)).dataset.ranks", line)
        == "rank 0, 1, 2, 3"
    )
    said = window.text(".line a").split(maxsplit=1)[1]
    assert (
        window.ask("return document.getElementById(arguments[0].slice(1)).innerText.trim()", line)
        == said
    )


def test_a_folder_with_files_of_the_users_is_refused(
    tmp_path: Path, run_cli: Callable[..., Any]
) -> None:
    (tmp_path / "index.html").write_text("mine")
    shown = run_cli("site", tmp_path)
    assert (shown.code, shown.out) == (2, "")
    assert (
        shown.err
        == f"playground: {tmp_path} holds other files, which pages could replace: name a new "
        "folder\n"
    )
    assert [each.read_text() for each in tmp_path.iterdir()] == ["mine"]


BARS = """
const canvas = document.querySelector('.timeline canvas'), context = canvas.getContext('2d');
const {data} = context.getImageData(canvas.width - 20 * devicePixelRatio, 0, 1, canvas.height);
canvas.style.color = 'var(--communication)';
const {color} = getComputedStyle(canvas);
const {lanes} = JSON.parse(document.querySelector('.player script').textContent);
return [lanes.map(([, , top, height]) => {
  const at = 4 * Math.round((top + height - 4) * devicePixelRatio);
  const [red, green, blue] = data.slice(at, at + 3);
  return `rgb(${red}, ${green}, ${blue})`;
}), color];
"""
"""The colour of each lane near the end of the timeline, and that of a call that communicates."""


@in_browser
def test_a_deadlock_stands_still_with_its_diagnosis(show: Callable[..., Browser]) -> None:
    window = show("break-send-send")
    awaits = "return [...document.querySelectorAll('.awaits')].map(each => each.dataset.awaits)"
    assert window.ask(awaits) == ["0 1", "1 2", "2 0"]
    assert window.text(".warning").startswith("deadlock: rank 0 is in send to rank 1 (calls.py:")
    assert window.text(".warning .cure").startswith("let one of two ranks receive first")
    bars, communication = window.ask(BARS)
    assert bars == [communication] * 3


@in_browser
def test_search_finds_titles_before_texts(show: Callable[..., Browser]) -> None:
    window = show("hello")
    window.press("/", *"all-reduce")
    window.until("return document.querySelectorAll('#found a').length > 3")
    titles = window.ask(
        "return [...document.querySelectorAll('#found a')].map(each => each.textContent)"
    )
    assert "all-reduce (glossary)" in titles[:3]
    window.press("\ue007")
    window.until("return !location.pathname.endsWith('hello.html')")


@in_browser
@pytest.mark.parametrize(
    ("typed", "first", "among"),
    [
        ("my training hangs", "failures.html#where-to-look-first", "break.html"),
        ("hang", "failures.html#where-to-look-first", "break.html"),
        ("stuck", "failures.html#where-to-look-first", "why.html#why-ask-a-run-that-hangs"),
        ("why is it so slow", "failures.html#it-may-only-be-slow", "see.html"),
        ("loss is nan", "failures.html#exercise-not-a-number", "break-nan.html"),
        ("nan", "failures.html#exercise-not-a-number", "break-nan.html"),
        ("CUDA out of memory", "memory.html", "zero.html"),
        ("xyzzy DistributedSampler", "", "ddp.html"),
    ],
)
def test_search_finds_what_is_told_of_a_symptom(
    typed: str, first: str, among: str, show: Callable[..., Browser]
) -> None:
    """Words that no page has are left out. The excerpt begins with the answer, and nanoGPT is not
    found for nan."""
    window = show("hello")
    window.press("/", *typed)
    window.until("return document.querySelectorAll('#found a').length > 3")
    found = window.ask(
        "return [...document.querySelectorAll('#found a')].map(each => each.getAttribute('href'))"
    )
    assert found[0].startswith(first)
    excerpt = window.ask("return document.querySelector('#found p').textContent").lower()
    assert any(word.lower() in excerpt for word in typed.split())
    assert [each for each in found if each.startswith(among)]
    if typed == "hang":
        assert excerpt.startswith("…no progress: it hangs who waits for whom")
    if typed == "nan":
        assert found[1] == "break-nan.html"
        assert not [each for each in found if each.startswith(("index", "doctor", "inside_gpt"))]


def test_a_search_that_would_lead_nowhere_is_refused() -> None:
    with pytest.raises(PlaygroundError, match=r"would lead to failures\.html#.*: no such section"):
        place_symptoms([])
    section = Section("failures.html#where-to-look-first", "", "other words")
    with pytest.raises(PlaygroundError, match="no such words 'no progress' in it"):
        place_symptoms([section])


@in_browser
def test_hints_open_one_by_one_and_paper_has_pictures(show: Callable[..., Browser]) -> None:
    window = show("p2p")
    hints = (
        "[...document.querySelectorAll('[aria-labelledby=exercise-swap] summary')]"
        ".filter(each => each.textContent.startsWith('Hint'))"
    )
    counts = []
    for number in range(3):
        counts.append(window.ask(f"return {hints}.filter(each => each.checkVisibility()).length"))
        window.ask(f"{hints}[arguments[0]].click()", number)
    assert counts == [1, 2, 3]
    window = show("collectives")
    window.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    window.ask("dispatchEvent(new Event('beforeprint'))")
    assert window.ask(
        "return [...document.querySelectorAll('figure img')].every(each => each.checkVisibility())"
    )
    assert (
        window.ask(
            "return [...document.querySelectorAll('.player')].some(each => each.checkVisibility())"
        )
        is False
    )
    window.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
