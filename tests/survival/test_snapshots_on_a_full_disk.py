"""Training whose folder of snapshots gets full goes on, says so, and leaves the last snapshot as it is."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.stress
def test_training_ends_well_and_the_last_snapshot_is_whole(
    tmp_path: Path, data_dir: Path, run_cli: Callable[..., Any], start_cli: Callable[..., subprocess.Popen[str]]
) -> None:
    """The disk is full as far as processes can tell that may not write files of more than 100 kB."""
    folder = tmp_path / "run"
    words = [
        "sgd", "--dataset", "digits", "--data-dir", data_dir, "--limit", 256, "--snapshots", folder,
        "--snapshot-every", 2, "--epochs",
    ]  # fmt: skip
    assert run_cli(*words, 1).code == 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        process = start_cli(*words, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "step 4 has no snapshot: there is no room in" in err
    assert "training went on" in err
    assert [line.split()[0] for line in out.splitlines() if line[:8].strip().isdigit()] == ["1", "2", "3"]
    shown = run_cli("snapshots", "verify", folder)
    assert (shown.code, shown.err) == (0, "")
    assert "A run would go on from step 2." in " ".join(shown.out.split())
