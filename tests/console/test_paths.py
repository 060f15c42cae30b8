"""Files that are to be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from playground.console import paths
from playground.runtime import UsageError


def test_a_file_that_can_be_written_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.svg"
    paths.check_writable("-o", file)
    assert not file.exists()
    file.write_text("old")
    paths.check_writable("-o", file)
    assert file.read_text() == "old"
    for path, why in ((Path("/nowhere/rows.svg"), "no such folder"), (Path("/"), "Is a directory")):
        with pytest.raises(UsageError, match=f"-o {path}.*{why}"):
            paths.check_writable("-o", path)
    monkeypatch.setattr(paths, "MIN_FREE", 2**80)
    with pytest.raises(UsageError, match=r"only [\d,]+ bytes are free"):
        paths.check_writable("-o", file)
