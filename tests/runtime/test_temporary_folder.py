"""Temporary folders are gone at the end, those of processes that were killed when the next is made."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import ENOUGH
from programs import Outcome

from playground.runtime.temporary_folder import MARK, remove_empty_cache, temporary_folder

HOLD = """
import sys
from playground.runtime.temporary_folder import temporary_folder

with temporary_folder("test") as folder:
    (folder / "file").write_text("")
    print(folder, flush=True)
    sys.stdin.read(1)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty TMPDIR."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_what_a_killed_process_leaves_is_removed_and_nothing_else(place: Path) -> None:
    (place / "playground-notes").mkdir()
    (place / "playground-notes" / "file").write_text("mine")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout
        theirs = Path(other.stdout.readline().strip())
        with temporary_folder("test") as ours, temporary_folder("test") as another:
            assert {theirs, ours, another} < {*place.iterdir()}  # one whose process is alive is left alone
        other.kill()
        other.wait(ENOUGH)
        assert theirs.exists()
        with temporary_folder("other") as ours:
            assert {each.name for each in place.iterdir()} == {"playground-notes", ours.name}
    assert [each.name for each in place.iterdir()] == ["playground-notes"]


def test_a_mark_that_is_a_link_removes_nothing(place: Path) -> None:
    (place / "playground-evil").mkdir()
    (place / "notes").write_text("mine")
    (place / "playground-evil" / MARK).symlink_to(place / "notes")
    with temporary_folder("test"):
        pass
    assert {each.name for each in place.iterdir()} == {"playground-evil", "notes"}


@pytest.mark.parametrize("compiled", [False, True])
def test_torch_s_folder_for_compiled_code_is_kept_if_there_is_any(
    compiled: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place / "torchinductor_me"
    folder.mkdir()
    monkeypatch.setenv("LOGNAME", "me")
    if compiled:
        (folder / "code").write_text("")
    remove_empty_cache()
    assert folder.exists() == compiled


def test_a_folder_for_compiled_code_that_the_user_has_chosen_is_left(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "mine" / "cache").mkdir(parents=True)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(place / "mine" / "cache"))
    remove_empty_cache()
    assert (place / "mine" / "cache").exists()


def test_a_killed_rank_leaves_no_folder_for_compiled_code(
    run_script: Callable[..., Outcome], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path_factory.mktemp("place")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    done = run_script(
        """
        import os, signal
        from playground import RankFailed, launch

        def compile_and_die(rank, size):
            from torch._inductor.runtime.cache_dir_utils import cache_dir
            assert os.path.basename(cache_dir()) in os.listdir(os.environ["TMPDIR"])
            os.kill(os.getpid(), signal.SIGKILL)

        if __name__ == "__main__":
            try:
                launch(compile_and_die, 1)
            except RankFailed as error:
                print(error)
        """,
        TMPDIR=str(place),
    )
    assert "SIGKILL" in done.out
    assert list(place.iterdir()) == []
