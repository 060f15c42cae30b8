"""The parts of the lesson `data-parallel` as text, and each device's memory as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from playground.console import plots
from playground.console.bars import bars
from playground.console.tables import Column, Table, cell
from playground.console.text import Prose, heading, prose
from playground.lessons.data_parallel.results import (
    LABELS,
    Averaging,
    Claims,
    Copying,
    DeviceShares,
    DeviceStep,
    LargestBatch,
    Means,
    TrainingComparison,
    WayResult,
    WorkSeconds,
    speedup,
)

PARTS = ("scatter", "replicate", "parallel_apply", "gather", "loss", "backward", "optimizer.step")
"""Of a training step, in order."""
MOVES = {
    "scatter": ("scatter",), "replicate": ("replicate",), "gather": ("gather",), "loss": ("loss",),
    "backward": ("gradients of outputs", "reduce"),
}  # fmt: skip
"""What is moved in which part."""


def part_texts(name: str, about: str, texts: Sequence[str | Prose | Table]) -> list[str | Prose | Table]:
    """A part of the lesson: its name, what it is about, and its tables."""
    return ["", prose(heading(name), f": {about}"), *texts]


def split_texts(shares: Sequence[DeviceShares]) -> list[str | Prose | Table]:
    """How many samples each device got."""
    table = Table(Column("device"), *(Column(name, right=True) for name in shares[0].samples))
    for share in shares:
        table.add(share.device, *map(str, share.samples.values()))
    return ["  inputs per device; 30 on 2: 30 inputs on 2 devices", table]


def step_texts(devices: Sequence[DeviceStep]) -> list[str | Prose | Table]:
    """What moved in each part of a step, and what each device held after it."""
    moved = Table(Column("part"), Column("from"), Column("to"), Column("moved", "bytes", right=True))
    for name in PARTS:
        for part in MOVES.get(name, ()):
            for device in devices:
                for move in device.received:
                    if move.part == part:
                        moved.add(name, move.source, device.device, f"{move.bytes:,}")
    held = Table(Column("after"), *(Column(device.device, "bytes", right=True) for device in devices))
    for name in ("(before)", *PARTS):
        held.add(name, *(f"{device.held[name]:,}" for device in devices))
    return ["  What is copied between devices:", moved, "  What each device holds after each part:", held]


def ways_texts(ways: Sequence[WayResult], alone: WayResult) -> list[str | Prose | Table]:
    """Memory, time and utilisation of each way to the loss; `alone` is the same step on the first device only."""
    gathers, devices = (Column("gathered"), Column("on")), [device.device for device in ways[0].devices]
    peaks = Table(*gathers, *(Column(device, "bytes", right=True) for device in devices))
    shares = Table(*gathers, *(Column(device, "%", right=True) for device in devices))
    costs = Table(
        *gathers, Column("copied by\ngather", "bytes", right=True), Column("time\nper step", "ms", right=True),
        Column("loss", right=True),
    )  # fmt: skip
    for way in ways:
        name = way.gather, way.output_device
        peaks.add(*name, *(f"{device.peak:,}" for device in way.devices))
        shares.add(*name, *(f"{100 * device.share:.0f}" for device in way.devices))
        costs.add(*name, f"{way.gathered:,}", f"{1000 * way.seconds:.1f}", f"{way.loss:.6f}")
    [first] = alone.devices
    return [
        f"  Peak memory of each device ({first.device} alone, with the whole batch: {first.peak:,} bytes):", peaks,
        f"  What that is where {ways[0].gather} are gathered on {ways[0].output_device}:",
        *bars([(device.device, device.at_peak) for device in ways[0].devices], LABELS),
        "  What gather copies from other devices, and how long a step takes:", costs,
        "  Share of a step in which each device computes:", shares,
    ]  # fmt: skip


def fitting_texts(batches: Sequence[LargestBatch], cap: int, most: int) -> list[str | Prose | Table]:
    """The largest batch by each way, and what the fullest device then holds."""
    table = Table(
        Column("devices", right=True), Column("gathered"), Column("on"), Column("largest\nbatch", right=True),
        Column("fullest\ndevice"), Column("holds", "bytes", right=True),
    )  # fmt: skip
    for each in batches:
        size = f"{each.batch}{'+' * (each.batch == most)}"
        held = f"{sum(each.at_peak.values()):,}"
        table.add(str(each.devices), each.gather, each.output_device, size, each.fullest, held)
    more = f"  + as large as this command's batches get: {most}"
    reached = any(each.batch == most for each in batches)
    return [f"  Each device may hold {cap:,} bytes:", table, *([more] if reached else [])]


def claims_texts(claims: Claims) -> list[str | Prose | Table]:
    """What each device has of the model, and how far replicas are from each other and from one device."""
    copies = Table(
        Column("device"), Column("parameters", "bytes", right=True), Column("of its replica, the\nmodel's own memory")
    )
    for copy in claims.copies:
        copies.add(copy.device, f"{copy.parameters:,}", f"{copy.shared} of {copy.of} parameters")
    steps = Table(
        Column("step", right=True), Column("loss", right=True), Column("parameters of\nthe replicas", right=True),
        Column("their\ngradients", right=True), Column("the model, from\none device's", right=True),
    )  # fmt: skip
    for step in claims.steps:
        apart = (step.replicas_differ, step.gradients_differ, step.from_one_device)
        steps.add(str(step.step), f"{step.loss:.6f}", *(f"{difference:.1g}" for difference in apart))
    return [
        "  The model lies on the first device once. What each device has while replicas run:", copies,
        "  Replicas are equal in every forward, as copies of one model, though their gradients are not: these are "
        "added up, and the model goes where one device would take it. Largest differences, in float64:", steps,
    ]  # fmt: skip


def means_texts(batches: Sequence[Means]) -> list[str | Prose | Table]:
    """The mean of the means and the weighted one, beside the mean over all samples."""
    table = Table(
        Column("samples", right=True), Column("chunks", wraps=True), Column("mean loss\nof each chunk", wraps=True),
        Column("mean", right=True), Column("mean of\nmeans", right=True), Column("weighted\nmean", right=True),
    )  # fmt: skip
    for means in batches:
        figures = [f"{value:g}" for value in (means.mean, means.mean_of_means, means.weighted_mean)]
        table.add(cell(means.samples), cell(means.chunks), cell(means.means), *figures)
    return [table]


def copying_texts(copying: Copying, ranks: Sequence[Averaging]) -> list[str | Prose | Table]:
    """DataParallel's steps beside the processes'."""
    busiest, sent_by_a_rank = copying.busiest, max(rank.sent for rank in ranks)
    table = Table(
        Column(""), Column("sent\nat most", "bytes", right=True), Column("received\nat most", "bytes", right=True),
        Column("sent\nin total", "bytes", right=True), Column("time\nper step", "ms", right=True),
    )  # fmt: skip
    table.add(
        "data-parallel", f"{busiest.sent:,}", f"{busiest.received:,}", f"{copying.sent:,}",
        f"{1000 * copying.seconds:.1f}",
    )  # fmt: skip
    table.add(
        f"sgd -n {len(ranks)}", f"{sent_by_a_rank:,}", f"{sent_by_a_rank:,}", f"{sum(rank.sent for rank in ranks):,}",
        f"{1000 * median(rank.seconds for rank in ranks):.1f}",
    )  # fmt: skip
    about = (
        "  Bytes of the model and of gradients in a step; at most: by the device, or the rank, with the most traffic. "
        "The bytes of sgd are those of our ring; its time is that of the backend's all-reduce."
    )
    return [about, table]


def gil_texts(
    threads: dict[str, WorkSeconds], processes: Sequence[dict[str, WorkSeconds]]
) -> list[str | Prose | Table]:
    """How many times as much is done at once, by threads and by processes."""
    table = Table(
        Column("work"), Column("by"), Column("alone", "ms", right=True), Column("together", "ms", right=True),
        Column("speed-up", right=True),
    )  # fmt: skip
    for name, of_threads in threads.items():
        together = median(rank[name].together for rank in processes)
        of_processes = WorkSeconds(alone=processes[0][name].alone, together=together)
        for workers, seconds in (("threads", of_threads), ("processes", of_processes)):
            gain = speedup(seconds.alone, seconds.together, len(processes))
            table.add(name, workers, f"{1000 * seconds.alone:.1f}", f"{1000 * seconds.together:.1f}", f"{gain:.2f}")
    count = len(processes)
    about = (
        f"  alone: one worker does one piece of work; together: {count} workers do one piece each at the same time; "
        f"speed-up: {count} x alone / together"
    )
    return [about, table]


def ending(devices: int) -> str:
    """Why the path goes on."""
    times = "once" if devices == 2 else f"{devices - 1} times"
    return (
        f"Why the path goes on to processes: in every step the first device sends the model {times} and "
        f"receives as many gradients, and more with more devices; in a ring no rank sends more than twice the model. "
        f"Threads take turns wherever Python itself is at work; processes do not. And one process is confined to one "
        f"machine."
    )


def training_text(comparison: TrainingComparison, devices: int) -> str:
    """How far training on all devices is from training on one."""
    return (
        f"Shown: {devices} devices trained one model to the loss of one device (difference "
        f"{comparison.loss_difference:.1e}: in float32 a sum in another order is rounded differently, and training "
        f"amplifies that)."
    )


def plot_memory(ways: Sequence[WayResult], file: Path) -> None:
    """A bar per device, in a group per way to the loss."""
    figure, axes = plots.new_axes("memory of each device, at its peak", "", "MB")
    devices = [device.device for device in ways[0].devices]
    width = 0.8 / len(devices)
    for number, device in enumerate(devices):
        peaks = [way.devices[number].peak / 1e6 for way in ways]
        axes.bar([group + width * number for group in range(len(ways))], peaks, width, label=device)
    middle = width * (len(devices) - 1) / 2
    labels = [f"{way.gather} on {way.output_device}" for way in ways]
    axes.set_xticks([group + middle for group in range(len(ways))], labels)
    axes.legend()
    plots.save(figure, file)
