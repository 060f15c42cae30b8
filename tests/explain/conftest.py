"""A fixture of tests on what `run` says of a script."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a file in the working folder, a new one, that has the module's `SCRIPT`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(request.module.SCRIPT)
    return "train.py"
