"""A fork server of a test's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from fork_servers import Begin

from playground.base.upstream import find_modules_as_here
from playground.world.launcher import fork_client
from playground.world.launcher.fork_client import ForkServerClient


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """`begin(name=source, …)`: this process's fork server from now on, which imports modules of
    these sources, and not torch."""
    clients = []

    def begin(**sources: str) -> ForkServerClient:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
        client = ForkServerClient([str(tmp_path), *find_modules_as_here()], list(sources), {})
        client.meet()
        monkeypatch.setattr(fork_client, "_servers", [client])
        clients.append(client)
        return client

    yield begin
    for client in clients:
        with contextlib.suppress(OSError, ValueError):  # a test has ended it
            client.end()
