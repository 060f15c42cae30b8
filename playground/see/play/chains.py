"""Who waits for whom, and the chains that lead from a wait to what caused it, as the page has them."""

from __future__ import annotations

from playground.see.analyse.blame import Blamer, Chain
from playground.see.analyse.timeline import Ref, ref_of
from playground.see.analyse.waits import CAUSES, UNTOLD, Wait, Waits
from playground.see.record.recording import Event, Recording

MAX_WAITS, MAX_CHAINS = 5_000, 300
"""Of so many waits, the longest, the page says for whom and why, and of so many what caused them."""


def to_waits(recording: Recording, places: dict[Ref, int]) -> dict[str, object]:
    """The waits, the longest first, and the chains of the first of them."""
    waits = Waits(recording)
    longest, blamer = waits.longest(), Blamer(waits)
    return {
        "causes": CAUSES,
        "waits": [to_wait(wait, places) for wait in longest[:MAX_WAITS]],
        "chains": [to_chain(blamer.blame(wait), places) for wait in longest[:MAX_CHAINS]],
        "waitCount": len(longest),
        "noWaits": f"Waits {UNTOLD}" if recording.runs_ahead else "No rank waited",
    }


def to_wait(wait: Wait, places: dict[Ref, int]) -> list[int | None]:
    """The event that waits, the one waited for on another rank, the cause, and nanoseconds until that one began."""
    return [
        places[ref_of(wait.event)], place_of(wait.peer, places), CAUSES.index(wait.cause), round(wait.late * 1e9)
    ]  # fmt: skip


def to_chain(chain: Chain, places: dict[Ref, int]) -> list[object]:
    """The events of the waits after the first; and what ends the chain: a rank's work, from when to when, and whether
    that is recorded, or only what came after it."""
    busy = chain.busy
    waits = [to_wait(wait, places) for wait in chain.waits[1:]]
    if busy is None:
        return [waits]
    return [waits, places[ref_of(busy.event)], round(busy.start * 1e9), round(busy.end * 1e9), int(busy.is_recorded)]


def place_of(event: Event | None, places: dict[Ref, int]) -> int | None:
    return None if event is None else places[ref_of(event)]
