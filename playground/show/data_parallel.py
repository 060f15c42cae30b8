"""What the lesson `data-parallel` has to tell, part by part."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from playground.show import plots
from playground.show.results import cell, table

PARTS = ("scatter", "replicate", "parallel_apply", "gather", "loss", "backward", "optimizer.step")
"""Of a training step, in order."""
MOVES = {
    "scatter": ("scatter",), "replicate": ("replicate",), "gather": ("gather",), "loss": ("loss",),
    "backward": ("gradients of outputs", "reduce"),
}  # fmt: skip
"""What is moved in which part."""


def part(name: str, texts: dict[str, str], text: str) -> str:
    """A part of the story: its name, what it is about, and its tables."""
    return f"\n{name}: {texts[name].split(' {')[0]}\n{text}"


def split_text(rows: list[dict[str, Any]]) -> str:
    """How many samples each device got."""
    return "\n".join(table([list(rows[0]), *([str(value) for value in row.values()] for row in rows)]))


def step_text(rows: list[dict[str, Any]]) -> str:
    """What moved in each part of a step, and what each device held after it."""
    lines = ["  moved, in bytes:"]
    moved = [["part", "from", "to", "bytes"]]
    for name in PARTS:
        for what in MOVES.get(name, ()):
            for row in rows:
                for move in row["received"]:
                    if move["part"] == what:
                        moved.append([name, move["from"], row["device"], f"{move['bytes']:,}"])
    held = [["after", *(row["device"] for row in rows)]]
    held += [[name, *(f"{row['held'][name]:,}" for row in rows)] for name in ("(before)", *PARTS)]
    return "\n".join([*lines, *right(moved, 3), "  held, in bytes:", *right(held, 1)])


def ways_text(ways: list[dict[str, Any]], alone: dict[str, Any]) -> str:
    """Memory and time of each way to the loss; `alone` is the same step on the first device only."""
    peaks = [f"peak {row['device']}" for row in ways[0]["devices"]]
    rows = [["gathers", "on", *peaks, "gathered", "ms a step", "loss"]]
    for way in ways:
        peaks = [f"{row['peak']:,}" for row in way["devices"]]
        figures = [f"{way['gathered']:,}", f"{1000 * way['seconds']:.1f}", f"{way['loss']:.6f}"]
        rows.append([way["gather"], way["output_device"], *peaks, *figures])
    first = alone["devices"][0]
    about = (
        f"  (peak, and what gather brought from other devices, in bytes; "
        f"without the others {first['device']} has a peak of {first['peak']:,})"
    )
    return "\n".join([*right(rows, 2), about])


def means_text(batches: list[dict[str, Any]]) -> str:
    """The two means beside the right one."""
    names = ("samples", "chunks", "means", "mean", "mean of means", "weighted mean")
    shown = [[row[name] for name in names] for row in batches]
    rows = [[f"{value:g}" if isinstance(value, float) else cell(value) for value in row] for row in shown]
    return "\n".join(table([list(names), *rows]))


def copying_text(copying: dict[str, Any], averaging: list[dict[str, Any]]) -> str:
    """DataParallel's steps beside the processes'."""
    busiest = max(copying["devices"], key=lambda row: row["sent"] + row["received"])
    ranks = max(row["sent"] for row in averaging)
    rows = [
        ["", "sent by the busiest", "received by it", "sent in all", "ms a step"],
        [
            "data-parallel", f"{busiest['sent']:,}", f"{busiest['received']:,}",
            f"{sum(row['sent'] for row in copying['devices']):,}", f"{1000 * copying['seconds']:.1f}",
        ],
        [
            f"sgd -n {len(averaging)}", f"{ranks:,}", f"{ranks:,}", f"{sum(row['sent'] for row in averaging):,}",
            f"{1000 * median(row['seconds'] for row in averaging):.1f}",
        ],
    ]  # fmt: skip
    about = "  (bytes of model and gradients in a step; sgd's with our ring, its time with the backend's all-reduce)"
    return "\n".join([*right(rows, 1), about])


def lock_text(threads: dict[str, dict[str, float]], processes: list[dict[str, Any]]) -> str:
    """How many times as much is done at once, by threads and by processes."""
    rows = [["work", "by", "alone, ms", "together, ms", "speed-up"]]
    for name, times in threads.items():
        together = median(rank[name]["together"] for rank in processes)
        for workers, alone, all_at_once in (
            ("threads", times["alone"], times["together"]),
            ("processes", processes[0][name]["alone"], together),
        ):
            speedup = f"{len(processes) * alone / all_at_once:.2f}"
            rows.append([name, workers, f"{1000 * alone:.1f}", f"{1000 * all_at_once:.1f}", speedup])
    return "\n".join(right(rows, 2))


def ending(devices: int) -> str:
    """Why the path goes on."""
    return (
        f"Why the path goes on to processes: at every step the first device sends {devices - 1} times the model, and\n"
        f"takes as many times the gradients; with more devices, more. In a ring no rank sends more than two models.\n"
        f"Threads take turns wherever Python itself is at work; processes do not. And one process is one machine."
    )


def memory_plot(ways: list[dict[str, Any]], file: Path) -> None:
    """A bar for each device, in a group for each way to the loss."""
    figure, axes = plots.new_axes("memory of each device, at its peak", "", "MB")
    devices = [row["device"] for row in ways[0]["devices"]]
    width = 0.8 / len(devices)
    for number, device in enumerate(devices):
        peaks = [way["devices"][number]["peak"] / 1e6 for way in ways]
        axes.bar([group + width * number for group in range(len(ways))], peaks, width, label=device)
    middle = width * (len(devices) - 1) / 2
    labels = [f"{way['gather']} on {way['output_device']}" for way in ways]
    axes.set_xticks([group + middle for group in range(len(ways))], labels)
    axes.legend()
    plots.save(figure, file)


def right(rows: list[list[str]], first: int) -> list[str]:
    """A table whose columns from `first` on are numbers, and stand to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return table([row[:first] + list(map(str.rjust, row[first:], widths[first:])) for row in rows])
