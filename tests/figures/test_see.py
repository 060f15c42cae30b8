"""The tool that looks at recordings: what it renders, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from recordings import ring

from playground.figures import command


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that stands for a ring of four ranks."""
    file = tmp_path / "ring.playground"
    file.write_bytes(b"")
    monkeypatch.setattr(command, "read_recording", lambda path: ring(4, straggler=1))
    return file


def test_a_recording_in_words_and_in_logical_steps(
    recording: Path, run_cli: Callable[..., Any]
) -> None:
    outcome = run_cli("see", recording)
    assert (outcome.code, outcome.err) == (0, "")
    # wherever the line is broken
    assert "".join(outcome.out.split()).startswith(f"see:{recording}")
    assert re.fullmatch(r"\d+ events of 4 ranks\.", outcome.out.splitlines()[-1])
    document = json.loads(run_cli("see", recording, "--json").out)
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1, 2, 3]
    assert document["ranks"][0]["waits"]["late sender"] > 0
    picture = recording.with_suffix(".svg")
    assert run_cli("see", recording, "-o", picture, "--steps").code == 0
    assert "step 10" in picture.read_text()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "nothing to show: give a FILE.playground"),
        (("FILE", "--chapters"), "FILE and --chapters: give one of them"),
        (("--chapters", "-o", "x.svg"), "-o is for a recording, not for --chapters"),
        (
            ("FILE", "-o", "x.gif"),
            "-o x.gif: the ending says what is written: choose one of .html, .svg, .txt, .json",
        ),
        (
            ("FILE", "-o", "x.html", "--steps"),
            "--steps is for a picture, so -o must name one that ends in",
        ),
        (("--figure", "F99", "ring.svg"), "'F99' is not one of"),
    ],
)
def test_what_cannot_be_seen_is_refused_in_one_line(
    words: tuple[str, ...],
    reason: str,
    recording: Path,
    run_cli: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(recording.parent)
    outcome = run_cli("see", *(word.replace("FILE", recording.name) for word in words))
    assert outcome.code == 2, outcome.err
    assert reason in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert outcome.out == ""


@pytest.mark.parametrize(
    ("ending", "said"),
    [(".html", "open it in a browser"), (".svg", "open it in a browser"), (".json", "perfetto")],
)
def test_what_a_recording_was_rendered_into_is_told_from_one(
    ending: str, said: str, recording: Path, tmp_path: Path, run_cli: Callable[..., Any]
) -> None:
    rendered = tmp_path / f"run{ending}"
    assert run_cli("see", recording, "-o", rendered).code == 0
    outcome = run_cli("see", rendered)
    assert outcome.code == 2
    assert f"{rendered} shows a recording and is none: " in outcome.err
    assert said in outcome.err


def test_no_figures_on_a_busy_machine_nor_by_a_rank_and_no_recording_of_several_hosts(
    tmp_path: Path, run_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (1e3, 0.0, 0.0))
    shown = run_cli("see", "--chapters")
    assert shown.code == 2, shown.err
    assert "this machine is busy (load 1000.0 on " in shown.err
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    outcome = run_cli("see", "--figure", "F9", tmp_path / "ring.svg")
    assert outcome.code == 2, outcome.err
    assert "start this as one process" in outcome.err
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    outcome = run_cli("p2p", "--see", tmp_path / "p2p.svg")
    assert outcome.code == 2, outcome.err
    assert (
        "--see on 2 ranks, of which this host has 1: other hosts have clocks of their own"
        in outcome.err
    )


def test_a_figure_from_a_run(tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    file = tmp_path / "p2p.svg"
    outcome = run_cli("see", "--figure", "f20", file, "--json")
    [figure] = json.loads(outcome.out)["figures"]
    assert (figure["name"], figure["run"], figure["file"]) == ("F20", "send", str(file))
    ElementTree.parse(file)
