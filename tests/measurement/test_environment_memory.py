"""How much memory there is: what the machine has, and what a container may still take of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from playground.measurement import environment

V1 = {"limit": "memory/memory.limit_in_bytes", "usage": "memory/memory.usage_in_bytes"}
V2 = {"limit": "memory.max", "usage": "memory.current"}


@pytest.mark.parametrize(("files", "cached"), [(V2, "inactive_file"), (V1, "total_inactive_file")])
def test_a_container_may_take_what_its_limit_leaves(files: dict[str, str], cached: str, tmp_path: Path) -> None:
    limit, usage = (tmp_path / name for name in files.values())
    assert environment.container_headroom(tmp_path) == []
    limit.parent.mkdir(exist_ok=True)
    for about, left in (("max 300", []), ("1000 300", [700]), ("1000 1300", [0])):
        for file, value in zip((limit, usage), about.split(), strict=True):
            file.write_text(f"{value}\n")
        assert environment.container_headroom(tmp_path) == left
    (limit.parent / "memory.stat").write_text(f"anon 800\n{cached} 500\n")
    assert environment.container_headroom(tmp_path) == [200]


def test_available_memory_is_no_more_than_a_container_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < environment.memory("MemAvailable") <= environment.memory("MemTotal")
    monkeypatch.setattr(environment, "container_headroom", lambda: [7])
    assert environment.memory("MemAvailable") == 7
    assert environment.memory("MemTotal") > 7
