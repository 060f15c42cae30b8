"""Files that are to be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from playground.ui.paths import check_writable
from playground.world import UsageError


def test_a_file_that_can_be_written_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "rows.svg"
    check_writable("-o", file)
    assert not file.exists()
    file.write_text("old")
    check_writable("-o", file)
    assert file.read_text() == "old"
    for path, why in ((Path("/nowhere/rows.svg"), "no such folder"), (Path("/"), "Is a directory")):
        with pytest.raises(UsageError, match=f"-o {path}.*{why}"):
            check_writable("-o", path)
