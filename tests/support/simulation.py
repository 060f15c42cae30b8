"""How long messages that were recorded would take."""

from __future__ import annotations

Sizes = list[tuple[int, int]]
"""[(the other rank, bytes)]."""


class Simulation:
    """Ranks whose every message takes 1, on links that carry one at a time each way, and where all
    else is free.

    Each start of a rank waits for all of the one before it.
    """

    def __init__(self, ranks: list[list[tuple[Sizes, Sizes]]]) -> None:
        self.todo = [list(starts) for starts in ranks]
        self.clock, self.out, self.into = ([0] * len(ranks) for _ in range(3))
        self.begun = [False] * len(ranks)
        self.ready: list[tuple[int, int, int]] = []
        self.arrived: dict[tuple[int, int], list[int]] = {}

    def run(self) -> int:
        """The time at which the last rank is done."""
        while any(self.todo):
            while any(self.advance(rank) for rank in range(len(self.todo))):
                pass
            if self.ready:
                self.send()
        return max(self.clock)

    def send(self) -> None:
        message = min(self.ready, key=self.turn)
        time, sender, receiver = message
        begins = max(time, self.out[sender], self.into[receiver])
        self.ready.remove(message)
        self.out[sender] = self.into[receiver] = begins + 1
        self.arrived.setdefault((sender, receiver), []).append(begins + 1)

    def turn(self, message: tuple[int, int, int]) -> tuple[int, bool]:
        """When this message could go; of those that could at once, first the one that its receiver
        waits for."""
        time, sender, receiver = message
        expected = any(other == sender for other, _ in self.todo[receiver][0][1])
        return max(time, self.out[sender], self.into[receiver]), not expected

    def advance(self, rank: int) -> bool:
        """Begin or finish what this rank is at, if that can be."""
        if not self.todo[rank]:
            return False
        send, receive = self.todo[rank][0]
        if not self.begun[rank]:
            self.ready += [(self.clock[rank], rank, other) for other, _ in send]
            self.begun[rank] = True
            return True
        waiting = any(sender == rank for _, sender, _ in self.ready)
        if waiting or not all(self.arrived.get((other, rank)) for other, _ in receive):
            return False
        ends = [self.arrived[other, rank].pop(0) for other, _ in receive] + (
            [self.out[rank]] if send else []
        )
        self.clock[rank] = max([self.clock[rank], *ends])
        self.begun[rank] = False
        del self.todo[rank][0]
        return True
