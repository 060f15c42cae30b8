"""What the parts of the lesson found, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from playground.console.bars import bars
from playground.console.tables import Column, Table, cell
from playground.console.text import Prose, heading, prose
from playground.lessons.bert.results import (
    Averaging,
    Equality,
    Held,
    LargestBatch,
    PartReady,
    Progress,
    Speed,
    Training,
    Use,
)
from playground.lessons.bert.settings import DDP, LOSSES_TO_COMPARE, BertSettings
from playground.measurement.units import format_bytes
from playground.runtime.remote import Remote

Texts = list[str | Prose | Table]
TRAINING_LEGEND = (
    f"  loss: the mean over the last {LOSSES_TO_COMPARE} steps' global batches, before each step; speed: since the row "
    f"before."
)
PROGRESS = (
    Column("way", width=15),
    Column("step", right=True, width=6),
    Column("loss", right=True, width=8),
    Column("speed", "samples/s", right=True, width=11),
)
"""The columns of training while it goes on."""


def part_texts(code: Remote, texts: Texts) -> Texts:
    """A part: its name, what it is about, and its tables."""
    return ["", prose(heading(code.name.replace("_", " ")), f": {code.summary}"), *texts]


def progress_cells(progress: Progress) -> list[str]:
    """A cell for each of `PROGRESS`."""
    return [progress.way, str(progress.step), f"{progress.loss:.4f}", f"{progress.samples_per_second:,.0f}"]


def training_table(trainings: Sequence[Training]) -> Table:
    """A row per way: from which loss to which, and what the model then gets right."""
    table = Table(
        Column("way"), Column("workers", right=True), Column("first\nloss", right=True),
        Column("last\nloss", right=True), Column("test\naccuracy", "%", right=True),
        Column("speed", "samples/s", right=True), Column("time", "s", right=True),
        Column("test\npairs", right=True, wide=True),
    )  # fmt: skip
    for each in trainings:
        table.add(
            each.way, str(each.workers), f"{each.losses[0]:.4f}", f"{each.last_loss:.4f}",
            f"{100 * each.test_accuracy:.2f}", f"{each.samples_per_second:,.0f}", f"{each.seconds:.1f}",
            f"{each.tested:,}",
        )  # fmt: skip
    return table


def same_texts(compared: Sequence[Equality]) -> Texts:
    """How far the losses of each way are from those of one device."""
    table = Table(
        Column("way"), Column("workers", right=True), Column("steps", right=True), Column("first\nloss", right=True),
        Column("last\nloss", right=True), Column("largest difference\nto one device", right=True),
    )  # fmt: skip
    for each in compared:
        table.add(
            each.way, str(each.workers), str(each.steps), f"{each.first:.9f}", f"{each.last:.9f}",
            f"{each.difference:.1e}",
        )  # fmt: skip
    return [table]


def speed_texts(speeds: Sequence[Speed]) -> Texts:
    """A row per way, a column per number of workers."""
    counts = sorted({speed.workers for speed in speeds})
    plural = {count: f"{count} worker{'s' * (count > 1)}" for count in counts}
    table = Table(
        Column("way"),
        *(Column(plural[count], "samples/s", right=True) for count in counts),
        *(Column(f"{count} to 1", right=True) for count in counts[1:]),
    )
    for way in dict.fromkeys(speed.way for speed in speeds):
        of_way = {speed.workers: speed.samples_per_second for speed in speeds if speed.way == way}
        rates = [f"{of_way[count]:,.0f}" if count in of_way else None for count in counts]
        gains = [f"{of_way[count] / of_way[counts[0]]:.2f}" if count in of_way else None for count in counts[1:]]
        table.add(way, *map(cell, [*rates, *gains]))
    return [table]


def utilisation_texts(ways: Mapping[str, Sequence[Use]]) -> Texts:
    """The share of a step in which each device computes: a row per way, a column per device or rank."""
    count = max(map(len, ways.values()))
    table = Table(Column("way"), *(Column(f"device {number}", "%", right=True) for number in range(count)))
    for way, devices in ways.items():
        shares = [f"{100 * device.computing:.0f}" for device in devices]
        table.add(way, *map(cell, [*shares, *(count - len(shares)) * [None]]))
    return [table]


def memory_texts(ways: Mapping[str, Sequence[Held]], settings: BertSettings) -> Texts:
    """A bar per device and way, and what stands for what."""
    rows = [
        (f"{way}, {name_device(way, number, each.device)}", each.held)
        for way, devices in ways.items()
        for number, each in enumerate(devices)
    ]
    labels = list(dict.fromkeys(label for _, held in rows for label in held))
    table = Table(Column("device"), *(Column(label.replace(" ", "\n"), "bytes", right=True) for label in labels))
    for name, held in rows:
        table.add(name, *(f"{held.get(label, 0):,}" for label in labels))
    about = (
        f"  A batch of {settings.batch_size} pairs, padded to {settings.max_length} tokens. Gradients are those of "
        f"parameters and, on the way back through the layers, of activations; optimizer state: Adam's two moments."
    )
    return [about, *bars(rows, labels, width=30), "", table]


def name_device(way: str, number: int, device: str) -> str:
    """A device of the one process, or the rank that has it."""
    return f"rank {number}" if way == DDP else device


def largest_texts(found: Sequence[LargestBatch], settings: BertSettings) -> Texts:
    """The largest batch by each way."""
    table = Table(
        Column("way"), Column("workers", right=True), Column("largest\nbatch", right=True), Column("fullest\ndevice"),
        Column("holds", "bytes", right=True),
    )  # fmt: skip
    for each in found:
        fullest = "every rank's" if each.way == DDP else each.fullest
        table.add(each.way, str(each.workers), str(each.batch_size), fullest, f"{each.peak:,}")
    about = (
        f"  Memory cap: {format_bytes(settings.memory_cap)} for each device; every pair is padded to "
        f"{settings.max_length} tokens."
    )
    return [about, table]


def ready_texts(parts: Sequence[PartReady], settings: BertSettings) -> Texts:
    """A row per part of the model, in the order in which backward has its gradients."""
    total = sum(part.bytes for part in parts)
    table = Table(
        Column("part of the model"), Column("gradients", "bytes", right=True), Column("of all", "%", right=True),
        Column("ready after", "% of backward", right=True),
    )  # fmt: skip
    for part in parts:
        table.add(part.part, f"{part.bytes:,}", f"{100 * part.bytes / total:.1f}", f"{100 * part.ready:.1f}")
    [words] = [part for part in parts if part.rows_used is not None]
    about = (
        f"  Of the {settings.config.vocabulary:,} rows of the word embeddings a step uses {words.rows_used:,}: the "
        f"gradient of the others is zero, and DDP sends it all the same."
    )
    return [table, about]


def averaging_texts(found: Sequence[Averaging], settings: BertSettings) -> Texts:
    """A row per way to average."""
    table = Table(
        Column("gradients by"), Column("messages", right=True), Column("sent", "bytes", right=True),
        Column("early", "%", right=True), Column("step", "ms", right=True), Column("exposed", "ms", right=True),
        Column("alone", "ms", right=True), Column("hidden", "%", right=True), Column("distance\nto ddp", right=True),
    )  # fmt: skip
    for each in found:
        table.add(
            each.way, str(each.messages), f"{each.bytes:,}", f"{100 * each.early_bytes / each.bytes:.0f}",
            f"{1000 * each.seconds:.1f}", f"{1000 * each.exposed:.2f}", f"{1000 * each.alone:.2f}",
            f"{100 * each.hidden:.0f}", f"{each.difference_to_ddp:.1e}" if each.difference_to_ddp else "0",
        )  # fmt: skip
    about = (
        f"  Per step and rank, in buckets of {format_bytes(settings.bucket_cap)}. early: the share that leaves before "
        f"the last gradient is ready, as nothing else can be hidden; exposed: from the last gradient to the last "
        f"average; alone: the same averaging without a backward."
    )
    return [about, table, *(f"  {each.way}: {each.caveat}." for each in found if each.caveat)]
