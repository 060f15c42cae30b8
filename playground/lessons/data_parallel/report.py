"""The parts of the lesson `data-parallel` as text, and each device's memory as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from playground.console import plots
from playground.console.tables import cell, table
from playground.lessons.data_parallel.results import (
    Averaging,
    Copying,
    DeviceShares,
    DeviceStep,
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


def part_text(name: str, about: str, text: str) -> str:
    """A part of the lesson: its name, what it is about, and its tables."""
    return f"\n{name}: {about}\n{text}"


def split_text(shares: Sequence[DeviceShares]) -> str:
    """How many samples each device got."""
    rows = [[share.device, *map(str, share.samples.values())] for share in shares]
    return "\n".join(table([["device", *shares[0].samples], *rows]))


def step_text(devices: Sequence[DeviceStep]) -> str:
    """What moved in each part of a step, and what each device held after it."""
    moved = [["part", "from", "to", "bytes"]]
    for name in PARTS:
        for part in MOVES.get(name, ()):
            for device in devices:
                for move in device.received:
                    if move.part == part:
                        moved.append([name, move.source, device.device, f"{move.bytes:,}"])
    held = [["after", *(device.device for device in devices)]]
    held += [[name, *(f"{device.held[name]:,}" for device in devices)] for name in ("(before)", *PARTS)]
    return "\n".join(["  moved, in bytes:", *table(moved, 3), "  held, in bytes:", *table(held, 1)])


def ways_text(ways: Sequence[WayResult], alone: WayResult) -> str:
    """Memory and time of each way to the loss; `alone` is the same step on the first device only."""
    peaks = [f"peak {device.device}" for device in ways[0].devices]
    rows = [["gathers", "on", *peaks, "gathered", "ms per step", "loss"]]
    for way in ways:
        peaks = [f"{device.peak:,}" for device in way.devices]
        figures = [f"{way.gathered:,}", f"{1000 * way.seconds:.1f}", f"{way.loss:.6f}"]
        rows.append([way.gather, way.output_device, *peaks, *figures])
    [first] = alone.devices
    about = (
        f"  (peak, and what gather brought from other devices, in bytes; "
        f"without the others {first.device} has a peak of {first.peak:,})"
    )
    return "\n".join([*table(rows, 2), about])


def means_text(batches: Sequence[Means]) -> str:
    """The mean of the means and the weighted one, beside the mean over all samples."""
    rows = [["samples", "chunks", "means", "mean", "mean of means", "weighted mean"]]
    for means in batches:
        figures = [f"{value:g}" for value in (means.mean, means.mean_of_means, means.weighted_mean)]
        rows.append([cell(means.samples), cell(means.chunks), cell(means.means), *figures])
    return "\n".join(table(rows))


def copying_text(copying: Copying, ranks: Sequence[Averaging]) -> str:
    """DataParallel's steps beside the processes'."""
    busiest, sent_by_a_rank = copying.busiest, max(rank.sent for rank in ranks)
    rows = [
        ["", "sent by the busiest", "received by it", "sent in all", "ms per step"],
        [
            "data-parallel", f"{busiest.sent:,}", f"{busiest.received:,}", f"{copying.sent:,}",
            f"{1000 * copying.seconds:.1f}",
        ],
        [
            f"sgd -n {len(ranks)}", f"{sent_by_a_rank:,}", f"{sent_by_a_rank:,}",
            f"{sum(rank.sent for rank in ranks):,}", f"{1000 * median(rank.seconds for rank in ranks):.1f}",
        ],
    ]  # fmt: skip
    about = "  (bytes of model and gradients in a step; sgd's with our ring, its time with the backend's all-reduce)"
    return "\n".join([*table(rows, 1), about])


def gil_text(threads: dict[str, WorkSeconds], processes: Sequence[dict[str, WorkSeconds]]) -> str:
    """How many times as much is done at once, by threads and by processes."""
    rows = [["work", "by", "alone, ms", "together, ms", "speed-up"]]
    for name, of_threads in threads.items():
        together = median(rank[name].together for rank in processes)
        of_processes = WorkSeconds(alone=processes[0][name].alone, together=together)
        for workers, seconds in (("threads", of_threads), ("processes", of_processes)):
            gain = speedup(seconds.alone, seconds.together, len(processes))
            rows.append([name, workers, f"{1000 * seconds.alone:.1f}", f"{1000 * seconds.together:.1f}", f"{gain:.2f}"])
    return "\n".join(table(rows, 2))


def ending(devices: int) -> str:
    """Why the path goes on."""
    return (
        f"Why the path goes on to processes: at every step the first device sends {devices - 1} times the model, and\n"
        f"takes as many times the gradients; with more devices, more. In a ring no rank sends more than two models.\n"
        f"Threads take turns wherever Python itself is at work; processes do not. And one process is one machine."
    )


def training_text(comparison: TrainingComparison, devices: int) -> str:
    """How far training on all devices is from training on one."""
    return (
        f"Shown: {devices} devices trained one model to the loss of one device (difference "
        f"{comparison.loss_difference:.1e}: float32 rounds sums of other parts otherwise, and training enlarges it)."
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
