"""Files in folders that others write to: what is the user's is left alone, and what is another's is
not followed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from processes import ENOUGH

from playground.base.files import (
    MARK,
    PREFIX,
    common_folder,
    create,
    make_folder,
    replace_files,
    temporary_folder,
    write_file,
)
from playground.explain.replay.record.layout import LOG
from playground.explain.replay.record.recorder import Recorder
from playground.explain.replay.see import Recordings
from playground.tools.bench.plot import plot_bandwidth
from playground.tools.bench.results import Row
from playground.world import UsageError

VICTIM, OTHER = 65533, 65534
"""Two users."""
HOLD = """
import sys
from playground.base.files import temporary_folder

with temporary_folder("test") as folder:
    (folder / "file").write_text("")
    print(folder, flush=True)
    sys.stdin.read(1)
"""
FETCH = """
import sys, time
from pathlib import Path
from playground.base.files import replace_files

with replace_files(Path(sys.argv[1]), "FOLDER") as folder:
    (folder / "data").write_text("")
    print("fetched", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty TMPDIR."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


def test_what_a_killed_process_leaves_is_removed_and_nothing_else(place: Path) -> None:
    (place / "playground-notes").mkdir()
    (place / "playground-notes" / "file").write_text("mine")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout
        theirs = Path(os.fsdecode(other.stdout.readline().strip()))
        with temporary_folder("test") as ours, temporary_folder("test") as another:
            # one whose process is alive is left alone
            assert {theirs, ours, another} < {*place.iterdir()}
        other.kill()
        other.wait(ENOUGH)
        assert theirs.exists()
        with temporary_folder("other") as ours:
            assert names(place) == {"playground-notes", ours.name}
    assert names(place) == {"playground-notes"}
    assert (place / "playground-notes" / "file").read_text() == "mine"


def test_what_a_killed_download_leaves_is_removed_and_never_moved_to_the_data(place: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FETCH, str(place)], stdout=subprocess.PIPE
    ) as other:
        assert other.stdout
        assert other.stdout.readline() == b"fetched\n"
        other.kill()
    assert len(names(place)) == 1
    with replace_files(place, "FOLDER") as folder:
        assert names(place) == {folder.name}
        (folder / "data").write_text("")
    assert names(place) == {"data"}


def test_a_mark_that_is_a_link_removes_nothing(place: Path) -> None:
    for folder in ("playground-linked", "mine"):
        (place / folder).mkdir()
        (place / folder / "diary").write_text("dear diary")
    (place / "playground-linked" / MARK).symlink_to(place / "mine" / "diary")
    (place / "mine" / MARK).write_text("")
    (place / f"{PREFIX}link").symlink_to(place / "mine")
    with temporary_folder("test"):
        pass
    assert names(place) == {"playground-linked", "mine", "playground-link"}
    assert all((place / folder / "diary").exists() for folder in ("playground-linked", "mine"))


needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can take the place of other users"
)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that everybody may write to, with a file of the victim's, and links to it of another
    user's."""
    with temporary_folder("shared") as folder:
        folder.chmod(0o1777)
        (folder / "diary").write_text("dear diary")
        os.chown(folder / "diary", VICTIM, VICTIM)
        for name in ("run.svg", "run.html.ranks/0/rank-0.log"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(folder / "diary")
        (folder / "figures").symlink_to(Path.home())
        os.lchown(folder / "figures", OTHER, OTHER)
        for each in folder.rglob("run*"):
            os.lchown(each, OTHER, OTHER)
        for each in (folder / "run.html.ranks", folder / "run.html.ranks" / "0"):
            os.lchown(each, OTHER, OTHER)
            each.chmod(0o777)
        yield folder


def run_as(user: int, function: Callable[[], object]) -> None:
    """Call a function in a process of this user. It must return True."""
    if not (child := os.fork()):
        os.setuid(user)
        os._exit(0 if function() is True else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def is_refused(function: Callable[[], object]) -> bool:
    try:
        function()
    except (OSError, UsageError) as error:
        return "\n" not in str(error)
    return False


@needs_root
def test_no_figure_is_drawn_through_another_users_link(shared: Path) -> None:
    """Also if the link has come while the benchmark ran."""
    pytest.importorskip("matplotlib")
    row = Row(
        size=4, algbw=1, busbw=1, p50_us=1, p95_us=1, p99_us=1, trials=1, calls=1,
        times_us=(1,), collective="all_reduce", count=1, type="float", redop="sum", root=-1,
        algorithm="auto", wrong=0, slowest_rank=0, slowest_percent=100, rank_us=(1,),
        limit_percent=None,
    )  # fmt: skip
    assert is_refused(lambda: plot_bandwidth("bandwidth", [row], shared / "run.svg"))
    assert (shared / "diary").read_text() == "dear diary"


@needs_root
@pytest.mark.parametrize("user", [0, VICTIM])
def test_another_users_links_are_not_written_through(user: int, shared: Path) -> None:
    folder = shared / "run.html.ranks"

    def attacked() -> bool:
        refused = [
            lambda: write_file(shared / "run.svg", b"picture"),
            lambda: make_folder(shared / "figures"),
            lambda: Recordings(shared / "run.svg"),
            lambda: Recordings(shared / "run.html").make_folder(
                is_shared=True
            ),  # a rank that joins a world
        ]
        if user:  # root removes what is in the way
            refused.append(lambda: Recordings(shared / "run.html").make_folder(is_shared=False))
        Recorder(folder / "0", 0, log=replace(LOG, capacity=10, words=10)).stop()
        return all(map(is_refused, refused))

    run_as(user, attacked)
    assert (shared / "diary").read_text() == "dear diary"
    if not user:
        Recordings(shared / "run.html").make_folder(is_shared=False)
        assert (folder.stat().st_uid, folder.stat().st_mode & 0o777, names(folder)) == (
            0,
            0o700,
            set(),
        )


@needs_root
def test_another_users_temporary_folder_is_left_alone(place: Path) -> None:
    (place / f"{PREFIX}theirs").mkdir()
    (place / f"{PREFIX}theirs" / MARK).write_text("")
    os.chown(place / f"{PREFIX}theirs", OTHER, OTHER)
    with temporary_folder("test"):
        assert f"{PREFIX}theirs" in names(place)


def test_the_users_own_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "link.svg").symlink_to("picture.svg")
    Recordings(tmp_path / "link.svg")  # checks whether it can be written: it stays as it is
    assert names(tmp_path) == {"link.svg"}
    assert (tmp_path / "link.svg").is_symlink()
    write_file(tmp_path / "link.svg", b"picture")
    assert (tmp_path / "picture.svg").read_bytes() == b"picture"
    os.close(create(tmp_path / "link.svg"))  # in the place of the link
    assert (tmp_path / "picture.svg").read_bytes() == b"picture"
    assert (tmp_path / "link.svg").read_bytes() == b""


def test_the_last_to_leave_a_common_folder_removes_it(place: Path) -> None:
    with common_folder("test") as folder:
        with common_folder("test") as other:
            assert other == folder == place / f"{PREFIX}test"
            (folder / "file").touch()
        assert (folder / "file").is_file()
    assert not folder.exists()


def test_a_common_folder_is_in_use_as_long_as_one_is_in_it(place: Path) -> None:
    with common_folder("test") as folder, temporary_folder("other"):
        assert (folder / MARK).is_file()  # those of killed processes were removed just now
    folder.mkdir()
    (folder / MARK).touch()
    with temporary_folder("other"):
        assert not folder.exists()


@pytest.mark.parametrize("is_link", [True, False])
def test_a_common_folder_is_neither_a_link_nor_another_users(
    is_link: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_link:
        (place / "elsewhere").mkdir()
        (place / f"{PREFIX}test").symlink_to(place / "elsewhere")
    else:
        monkeypatch.setattr(os, "getuid", lambda: OTHER)
    with pytest.raises(PermissionError), common_folder("test"):
        pass
