"""A lesson that is broken, and a working folder that is gone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import playground

PACKAGE = Path(playground.__file__).parent


def test_a_deleted_working_folder_is_told_in_one_line(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    command = f"rmdir {place} && exec {sys.executable} -m playground p2p"
    done = subprocess.run(["sh", "-c", command], cwd=place, capture_output=True, text=True)
    told = "playground: the working folder has been deleted: change to another one\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


def test_a_syntax_error_breaks_its_lesson_only_and_names_the_line(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "playground", ignore=shutil.ignore_patterns("__pycache__"))
    broken = tmp_path / "playground" / "lessons" / "p2p" / "lesson.py"
    line = broken.read_text(encoding="utf-8").count("\n") + 2
    broken.write_text(broken.read_text(encoding="utf-8") + "\ndef f(:\n", encoding="utf-8")

    def run(*words: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "playground", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}
        )
        return done.returncode, done.stdout, done.stderr

    assert run("p2p")[::2] == (
        2, f"playground: {broken}, line {line}: invalid syntax; correct it and retry\n"
    )  # fmt: skip
    code, out, err = run("collectives", "--help")
    assert (code, err) == (0, "")
    assert out
