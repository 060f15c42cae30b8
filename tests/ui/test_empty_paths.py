"""An option that takes a path."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures import Run


@pytest.mark.parametrize(
    "words",
    [
        ("prove", "--see", ""),
        ("hello", "--see", ""),
        ("bench", "--plot", ""),
        ("bench", "--diff", "", "a.json"),
        ("see", ""),
    ],
)
def test_an_empty_path_is_refused(
    words: tuple[str, ...], run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be the working folder."""
    monkeypatch.chdir(tmp_path)
    shown = run_cli(*words)
    assert (shown.code, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert "the path is empty" in shown.err
    assert list(tmp_path.iterdir()) == []
