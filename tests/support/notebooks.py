"""Kernels for what is under test, and what a person does at the front end of one."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.connect import write_connection_file
from processes import ENOUGH, session_ends
from programs import ForkedProgram


class Notebook:
    """The front end of a kernel, which `interrupt` interrupts."""

    def __init__(self, client: BlockingKernelClient, interrupt: Callable[[], None]) -> None:
        self.client = client
        self.interrupt = interrupt
        self.answers: list[str] = []
        self.prompts: list[str] = []

    def answer(self, message: dict[str, Any]) -> None:
        """Type an answer; without one that is left, press the button that interrupts."""
        self.prompts.append(message["content"]["prompt"])
        if self.answers:
            self.client.input(self.answers.pop(0))
        else:
            self.interrupt()

    def execute(self, cell: str, *answers: str) -> list[Any]:
        """The outputs of a cell, when it has run, as a notebook keeps them."""
        self.answers = [*answers]
        outputs: list[Any] = []
        make: Any = nbformat.v4

        def keep(message: dict[str, Any]) -> None:
            if message["msg_type"] in ("stream", "display_data", "execute_result", "error"):
                outputs.append(make.output_from_msg(message))

        self.client.execute_interactive(
            cell, timeout=ENOUGH, allow_stdin=True, stdin_hook=self.answer, output_hook=keep
        )
        return outputs

    def run(self, cell: str, *answers: str) -> str:
        """The text below a cell, when it has run."""
        return printed(self.execute(cell, *answers))


def printed(outputs: list[Any]) -> str:
    return "".join(each.text for each in outputs if each.output_type == "stream")


@contextlib.contextmanager
def place_to_meet() -> Iterator[dict[str, Any]]:
    """Where a kernel and its front end connect: sockets that are files, as another test may take a
    port between its choice and its use. The folder's name is short: a socket's has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kernel-") as folder:
        yield {"transport": "ipc", "ip": f"{folder}/socket"}


@contextlib.contextmanager
def fork_kernel(folder: Path, **environ: str) -> Iterator[Notebook]:
    """A kernel in a process that has torch imported, which is killed in the end. What connects it
    is in `folder`."""
    with place_to_meet() as place:
        file, _ = write_connection_file(str(folder / "kernel.json"), **place)
        kernel = ForkedProgram("ipykernel_launcher", ["-f", file], {**os.environ, **environ})
        client = BlockingKernelClient(connection_file=file)
        client.load_connection_file()
        client.start_channels()
        try:
            client.wait_for_ready(ENOUGH)
            yield Notebook(client, lambda: kernel.send_signal(signal.SIGINT))
        finally:
            client.stop_channels()
            kernel.close()
            assert session_ends(kernel.pid)
