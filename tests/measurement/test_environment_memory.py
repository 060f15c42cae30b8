"""How much memory there is: what the machine has, and what a container may still take of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from playground.measurement import environment


@pytest.mark.parametrize(
    ("folder", "limit", "usage", "cached"),
    [
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_container_may_take_what_its_limit_leaves(
    folder: str, limit: str, usage: str, cached: str, tmp_path: Path
) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / limit).write_text("1000\n")
    (tmp_path / folder / usage).write_text("300\n")
    assert environment.container_headroom(tmp_path) == [700]
    (tmp_path / folder / usage).write_text("1300\n")
    assert environment.container_headroom(tmp_path) == [0]
    (tmp_path / folder / "memory.stat").write_text(f"anon 800\n{cached} 500\n")
    assert environment.container_headroom(tmp_path) == [200]


def test_without_a_limit_there_is_none(tmp_path: Path) -> None:
    assert environment.container_headroom(tmp_path) == []
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("300\n")
    assert environment.container_headroom(tmp_path) == []


def test_available_memory_is_no_more_than_a_container_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < environment.memory("MemAvailable") <= environment.memory("MemTotal")
    monkeypatch.setattr(environment, "container_headroom", lambda: [7])
    assert environment.memory("MemAvailable") == 7
    assert environment.memory("MemTotal") > 7
