"""A recording in words: who waited for whom and why, what was hidden, what was sent, and what would be if."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from playground.console.rendering import render
from playground.console.tables import RANK_COLUMN, Column, Table
from playground.console.text import Prose, Styled, bad, good, heading, prose
from playground.measurement.units import format_bytes, format_digits, format_seconds
from playground.see.analyse.messages import match_messages
from playground.see.analyse.overlap import Overlap, overlaps
from playground.see.analyse.timeline import Timeline
from playground.see.analyse.transfers import Link, Volume, volumes
from playground.see.analyse.waits import CAUSES, TRANSFER, UNKNOWN, UNTOLD, Blamer, Chain, Waits, seconds_by_cause
from playground.see.analyse.what_if import Scaling, WhatIfs, more_ranks, what_if
from playground.see.record.recording import MAIN, Event, Recording

Text = str | Prose | Table


def recording_texts(recording: Recording) -> list[Text]:
    """All there is to say of a recording."""
    waits = Waits(recording)
    parts = [
        summary_texts(waits.timeline),
        missing_texts(recording),
        wait_texts(waits),
        chain_texts(waits),
        overlap_texts(overlaps(recording)),
        volume_texts(volumes(recording)),
        what_if_texts(waits),
    ]
    return [text for part in parts if part for text in ("", *part)][1:]


def summary_texts(timeline: Timeline) -> list[Text]:
    """What was run, where, and for how long."""
    recording = timeline.recording
    hosts = dict.fromkeys(rank.host for rank in recording.ranks)
    devices = dict.fromkeys(rank.device.split(":")[0] for rank in recording.ranks)
    count = sum(len(rank.events) for rank in recording.ranks)
    ranks, where = plural(recording.size, "rank"), plural(len(hosts), "host")
    bound = max((rank.clock_bound for rank in recording.ranks), default=0.0)
    clocks = f"clocks agree within {format_seconds(bound)}" if bound else "one clock"
    return [
        prose(heading(f"playground {' '.join(recording.command)}")),
        f"  {ranks} on {where}, {recording.backend}, {', '.join(devices)}",
        f"  {format_seconds(timeline.seconds)}, {plural(count, 'event')}; {clocks}",
    ]


def missing_texts(recording: Recording) -> list[Text]:
    """What the recording lacks."""
    unmatched = match_messages(recording).unmatched
    lines = [
        f"rank {rank.rank}: no room for {plural(rank.dropped, 'event')}" for rank in recording.ranks if rank.dropped
    ]
    lines += [f"rank {rank.rank}: cut off" for rank in recording.ranks if rank.is_cut_off]
    if unmatched:
        lines.append(
            f"{plural(len(unmatched), 'message')} of which only one end is recorded, first {end_text(unmatched[0])}"
        )
    return [prose(bad("Not recorded"), ": " + "; ".join(lines))] if lines else []


def end_text(event: Event) -> str:
    """One end of a message."""
    other = "anyone" if event.peer is None else f"rank {event.peer}"
    return f"rank {event.rank}'s {event.kind} {'to' if event.kind == 'send' else 'from'} {other}"


def wait_texts(waits: Waits) -> list[Text]:
    """A row for each rank, and for each of its threads that waited: its seconds by cause."""
    if waits.timeline.recording.runs_ahead:
        return [prose(heading("Waits"), f", what caused them, and what if: {UNTOLD}")]
    lanes = dict.fromkeys((wait.event.rank, wait.event.lane) for wait in waits.all)
    if not lanes:
        return [prose(heading("Waits"), ": none is recorded")]
    of_lane = {lane: [wait for wait in waits.all if (wait.event.rank, wait.event.lane) == lane] for lane in lanes}
    sums = {lane: seconds_by_cause(its) for lane, its in of_lane.items()}
    causes = [cause for cause in CAUSES if any(seconds[cause] for seconds in sums.values())]
    with_lanes = any(lane != MAIN for _, lane in lanes)
    table = Table(
        RANK_COLUMN,
        *([Column("thread")] if with_lanes else []),
        Column("waits", right=True),
        *(Column(cause.replace(" ", "\n", 1), "ms", right=True) for cause in causes),
        Column("all", "ms", right=True),
        Column("of run", "%", right=True),
    )
    for (rank, lane), seconds in sums.items():
        cells = [milliseconds(seconds[cause]) for cause in causes]
        whole = sum(seconds.values())
        share = f"{100 * whole / waits.timeline.seconds:.0f}"
        name = [lane] if with_lanes else []
        table.add(str(rank), *name, f"{len(of_lane[rank, lane]):,}", *cells, milliseconds(whole), share)
    return [prose(heading("Waits"), ", by what caused them"), table]


def chain_texts(waits: Waits) -> list[Text]:
    """The longest wait that another rank caused, and the way to the rank and the line that did."""
    late = [wait for wait in waits.longest() if wait.cause not in (TRANSFER, UNKNOWN)]
    if not late:
        return []
    chain = Blamer(waits).blame(max(late, key=lambda wait: wait.late))
    first = chain.waits[0]
    return [
        prose(
            heading("Longest wait for another rank"),
            f": rank {first.event.rank} at {line_text(waits, first.event)}, ",
            f"{format_seconds(first.seconds)}, of which {format_seconds(first.late)} until the other came",
        ),
        *link_lines(chain, waits),
    ]


def link_lines(chain: Chain, waits: Waits) -> Iterator[str]:
    """Who waited for whom, and what the last one did."""
    for wait in chain.waits:
        if wait.cause == UNKNOWN:
            yield f"  rank {wait.event.rank} waited for something that is not recorded"
        elif wait.peer is None or wait.cause == TRANSFER:
            yield f"  rank {wait.event.rank} waited for the transfer itself"
        else:
            peer = wait.peer
            yield f"  rank {wait.event.rank} waited for rank {peer.rank}'s {peer.name} at {line_text(waits, peer)}"
    if (busy := chain.busy) is not None:
        what = f"{busy.event.name} at" if busy.is_recorded else f"before {busy.event.name} at"
        yield f"  rank {busy.rank} was busy for {format_seconds(busy.seconds)}: {what} {line_text(waits, busy.event)}"


def line_text(waits: Waits, event: Event) -> str:
    """Where in the program it is: its line, or that of what is around it."""
    timeline = waits.timeline
    around = [event, *(timeline.by_ref[ref] for ref in timeline.around((event.rank, event.number)))]
    source = next((line for each in around if (line := timeline.source(each)) is not None), None)
    return "an unknown line" if source is None else f"{source.file}:{source.line}"


def overlap_texts(found: Sequence[Overlap]) -> list[Text]:
    """A row for each rank and kind of training step, of medians."""
    if not found:
        return []
    kinds: dict[tuple[int, int, int], list[Overlap]] = {}
    for each in found:
        kinds.setdefault((each.sent, each.early, each.rank), []).append(each)
    table = Table(
        Column("sent", right=True), Column("early", right=True), RANK_COLUMN, Column("steps", right=True),
        Column("compute", "ms", right=True), Column("commu-\nnication", "ms", right=True),
        Column("overlap,\ntorchtitan", "ms", right=True), Column("exposed", "ms", right=True),
        Column("hidden,\nladder", "%", right=True),
    )  # fmt: skip
    for (sent, early, rank), its in sorted(kinds.items()):
        table.add(
            str(sent), str(early), str(rank), str(len(its)), milliseconds(median(each.compute for each in its)),
            milliseconds(median(each.communication for each in its)),
            milliseconds(median(each.overlap for each in its)), milliseconds(median(each.exposed for each in its)),
            f"{100 * median(each.hidden() for each in its):.0f}",
        )  # fmt: skip
    return [
        prose(heading("Overlap"), ": medians over the training steps that sent as much, as early"),
        table,
        "  sent: buckets and collectives per step; early: before the last gradient was ready",
        "  overlap, as torchtitan logs it: compute + communication - their union",
        "  hidden, as the ladder has it: 1 - exposed / alone; exposed is from the last gradient on, alone is what the "
        "communication took here (the ladder measures it with no backward beside it)",
    ]


def volume_texts(found: Sequence[Volume]) -> list[Text]:
    """A row for each algorithm, tensor and group, beside its closed form."""
    if not found:
        return []
    groups: dict[tuple[str, int, tuple[int, ...]], list[Volume]] = {}
    for volume in found:
        groups.setdefault((volume.call.name, volume.nbytes, volume.call.group), []).append(volume)
    table = Table(
        Column("algorithm", wraps=True), Column("tensor", right=True), Column("ranks", right=True),
        Column("calls", right=True), Column("messages\nper call", right=True), Column("closed\nform", right=True),
        Column("bytes\nper call", right=True), Column("closed\nform", right=True),
    )  # fmt: skip
    for (name, nbytes, group), its in groups.items():
        shown = next((volume for volume in its if not volume.agrees), its[0])
        table.add(
            name, format_bytes(nbytes), str(len(group)), str(len(its)), f"{sum(shown.messages):,}",
            f"{shown.expected.messages:,.0f}", f"{sum(shown.sent):,}", f"{shown.expected.bytes:,.0f}",
        )  # fmt: skip
    return [prose(heading("Sent"), " by all ranks together: ", volume_verdict(found)), table]


def volume_verdict(found: Sequence[Volume]) -> Styled:
    """Whether the closed forms hold."""
    wrong = sum(not volume.agrees for volume in found)
    if not wrong:
        return good("as the closed forms say")
    return bad(f"{wrong} of {plural(len(found), 'call')} not as the closed forms say")


def what_if_texts(waits: Waits) -> list[Text]:
    """What the run would have taken if one thing had been different, and algorithms on more ranks."""
    if waits.timeline.recording.runs_ahead or not (found := what_if(waits)).recorded:
        return []
    table = Table(Column("change", wraps=True), Column("the run takes", right=True), Column("faster", right=True))
    for change in found.changes:
        least, most = ("at least ", "at most ") if change.is_bound else ("", "")
        times = format_digits(found.recorded / change.seconds)
        table.add(change.change, least + format_seconds(change.seconds), f"{most}{times} x")
    return [
        prose(heading("What if"), ": the same work and the same waits, replayed on another machine"),
        *replay_lines(found),
        table,
        *scaling_texts(more_ranks(waits.timeline.recording, found.link), found.link),
    ]


def replay_lines(found: WhatIfs) -> list[str]:
    """How well the replay reproduces the recording, and what its links are."""
    link, unchanged, by_links = found.link, found.replayed, found.by_links
    lines = [
        f"  unchanged: {format_seconds(unchanged)} ({found.error(unchanged):+.1%} of what was recorded); with every "
        f"transfer as its link says: {format_seconds(by_links)} ({found.error(by_links):+.1%})"
    ]
    if link.nbytes is None:
        rate = f", {1e-9 / link.beta:.3g} GB/s" if link.beta else ""
        lines.append(f"  messages took {format_seconds(link.alpha)} and {link.beta * 1e9:.3g} ns per byte{rate}")
    elif link.alpha:
        size, took = format_bytes(link.nbytes), format_seconds(link.alpha)
        lines.append(f"  messages, all of about {size}, took {took}: latency and bandwidth cannot be told apart")
    return lines


def scaling_texts(found: Sequence[Scaling], link: Link) -> list[Text]:
    """Algorithms by the cost model: a row each, a column per number of ranks."""
    if not found:
        return []
    sizes = sorted({size for scaling in found for size in scaling.predicted})
    table = Table(
        Column("algorithm", wraps=True),
        Column("tensor", right=True),
        Column("recorded", "us", right=True),
        Column("cores", right=True),
        *(Column(f"{size:,} ranks", "us", right=True) for size in sizes),
    )
    for scaling in found:
        what = (scaling.algorithm, format_bytes(scaling.nbytes), format_digits(1e6 * scaling.recorded))
        for cores, predicted in (("own", scaling.predicted), ("shared", scaling.shared)):
            seconds = [predicted.get(size) for size in sizes]
            if predicted:
                table.add(*what, cores, *("" if each is None else format_digits(1e6 * each) for each in seconds))
    note = "" if link.nbytes is None else " As all messages had one size, these are upper bounds."
    about = "  More ranks, by the cost model of `scale`: with a core for each rank, or all on this host's cores."
    return [about + note, table]


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


WIDTH = 80


def to_words(recording: Recording) -> str:
    """All there is to say of a recording, in lines of at most 80 characters."""
    return render(recording_texts(recording), WIDTH)
