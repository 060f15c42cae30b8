"""The waits of a recording, and their causes, as the page takes them."""

from __future__ import annotations

from playground.explain.replay.analyse.timeline import Ref, ref_of
from playground.explain.replay.analyse.waits import CAUSES, UNTOLD, Blamer, Chain, Waits, WaitState
from playground.explain.replay.record.recording import Recording

MAX_WAITS, MAX_CHAINS = 5_000, 300
"""Numbers of waits, the longest, whose peers and whose chains of causes are on the page."""
NEVER_ENDED = "No wait has ended"
NOBODY_WAITED = "No rank waited in a call. What DDP waits for: run --profile"

Places = dict[Ref, int]
"""The place of every event among the events of all ranks."""


def to_waits(recording: Recording, places: Places) -> dict[str, object]:
    """The waits, the longest first, and the chains of the first of them; why there are none."""
    waits = Waits(recording)
    longest, blamer = waits.longest(), Blamer(waits)
    why_none = NEVER_ENDED if recording.standstill else NOBODY_WAITED
    return {
        "causes": CAUSES,
        "waits": [to_wait(wait, places) for wait in longest[:MAX_WAITS]],
        "chains": [to_chain(blamer.blame(wait), places) for wait in longest[:MAX_CHAINS]],
        "waitCount": len(longest),
        "noWaits": f"Waits {UNTOLD}" if recording.runs_ahead else why_none,
    }


def to_wait(wait: WaitState, places: Places) -> list[int | None]:
    """The event that waits, the one waited for on another rank, the cause, and nanoseconds until
    that one began."""
    peer = None if wait.peer is None else places[ref_of(wait.peer)]
    return [places[ref_of(wait.event)], peer, CAUSES.index(wait.cause), nanoseconds(wait.late)]


def to_chain(chain: Chain, places: Places) -> list[object]:
    """The waits after the first; and the work that ends the chain: its event, from when to when,
    and whether that event is the work itself, or came after it."""
    waits = [to_wait(wait, places) for wait in chain.waits[1:]]
    if (busy := chain.busy) is None:
        return [waits]
    times = map(nanoseconds, (busy.start, busy.end))
    return [waits, places[ref_of(busy.event)], *times, int(busy.is_recorded)]


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
