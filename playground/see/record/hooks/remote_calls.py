"""Remote calls over send and recv: the messages of our agent, which calls its process group itself."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from playground.remote.agent import Agent
from playground.see.record.hooks.groups import Groups
from playground.see.record.hooks.replace import replaced
from playground.see.record.hooks.works import RecordedWork
from playground.see.record.layout import LANE_CODES
from playground.see.record.recorder import Recorder
from playground.see.record.recording import MAIN, RECEIVE, SEND


@contextlib.contextmanager
def recorded(recorder: Recorder, groups: Groups) -> Iterator[None]:
    """In this block, the messages of agents that are made in it are recorded."""

    def wrap_init(real: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(real)
        def init(agent: Agent) -> None:
            real(agent)
            agent.group = RecordedGroup(agent.group, recorder, groups)

        return init

    with replaced(Agent, "__init__", wrap_init):
        yield


class RecordedGroup:
    """Stands for the agent's process group."""

    def __init__(self, real: Any, recorder: Recorder, groups: Groups) -> None:
        self.real, self.recorder, self.groups = real, recorder, groups
        self.ranks = groups.ranks_of(real)
        self.in_turn = threading.Lock()
        """Threads send at the same time: messages get their numbers in the order in which they leave."""

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> RecordedWork:
        with self.in_turn:
            number = self.begin(SEND, "isend", tensors[0], peer, tag)
            return WorkOfACall(self.recorder, self.real.send(tensors, peer, tag), [(number, ())])

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> RecordedWork:
        with self.in_turn:
            number = self.begin(RECEIVE, "irecv", tensors[0], peer, tag)
            return WorkOfACall(self.recorder, self.real.recv(tensors, peer, tag), [(number, ())])

    def begin(self, kind: str, name: str, tensor: torch.Tensor, peer: int, tag: int) -> int:
        """A message begins, to or from this rank of the group."""
        peer = self.ranks[peer]
        return self.recorder.begin(
            kind, name, tensor.nbytes, tensor.shape, self.ranks, peer,
            self.groups.next_message(kind, peer, self.ranks, tag), tag, source=self.recorder.sources.find(),
        )  # fmt: skip


class WorkOfACall(RecordedWork):
    """Of one message. Threads that listen for requests wait all the time: that is no wait of the rank's."""

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        if self.recorder.thread.lane == LANE_CODES[MAIN]:
            return super().wait(*args, **kwargs)
        result = self.work.wait(*args, **kwargs)
        self.finish()
        return result

    def __del__(self) -> None:
        """Nobody waits for a request to be sent: the agent lets go of it when the reply has come."""
        if self.pending:
            self.finish()
