"""What the parts of the lab found, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from playground.console.tables import RANK_COLUMN, Column, Table
from playground.console.text import Prose, heading, prose
from playground.lessons.ddp.parts import LabPart
from playground.lessons.ddp.results import (
    AccumulationResult,
    BucketsResult,
    CheckpointResult,
    Difference,
    HookResult,
    RefusedHook,
    SamplerResult,
    UnevenResult,
)

Texts = list[str | Prose | Table]
FEW = 4
"""Names that are listed one by one; of more, the first and the last."""


def part_texts(part: LabPart, ranks: Sequence[object]) -> Texts:
    """A part: its name, what it is about, and its tables. `ranks` is what each rank returned."""
    refused = [rank["refused"] for rank in ranks if isinstance(rank, Mapping)]
    texts: Texts = [f"  the backend refuses: {refused[0]}"] if refused else part.text(ranks)
    return ["", prose(heading(part.name), f": {part.code.summary}"), *texts]


def buckets_texts(ranks: Sequence[BucketsResult]) -> Texts:
    """The buckets of the first backward and of the later ones, for each cap; then times and memory."""
    order = ranks[0].order
    cap_column = Column("bucket cap", "MiB", right=True)
    buckets = Table(
        cap_column, Column("backward", right=True), Column("bucket", right=True), Column("size", "bytes", right=True),
        Column("gradients\nready", right=True), Column("parameters", wraps=True),
    )  # fmt: skip
    times = Table(cap_column, Column("buckets", right=True), Column("time\nper step", "ms", right=True))
    for cap in ranks[0].caps:
        size = f"{cap.bucket_cap_mb:g}"
        for when, sent in (("1", cap.first), (f"{cap.rebuilt_before} …", cap.rebuilt)):
            for bucket in sent:
                ready = f"{bucket.ready} of {len(order)}"
                names = list_names(bucket.parameters)
                buckets.add(size, when, str(bucket.bucket), f"{bucket.bytes:,}", ready, names)
        times.add(size, str(len(cap.rebuilt)), f"{1000 * cap.seconds:.2f}")
    memory = Table(
        Column("gradient_as_bucket_view"), Column("gradients", "bytes", right=True),
        Column("outside of\nbuckets", "bytes", right=True),
    )  # fmt: skip
    for row in ranks[0].memory:
        memory.add(str(row.gradient_as_bucket_view), f"{row.gradients:,}", f"{row.outside:,}")
    return [
        f"  Gradients become ready in the order {list_names(order, 10)}.",
        "  The buckets, the same on all ranks; gradients ready: when the bucket is sent.",
        buckets,
        "  What a step takes, and the memory that gradients take:",
        times,
        memory,
    ]


def hooks_texts(ranks: Sequence[Sequence[HookResult | RefusedHook]]) -> Texts:
    """What each hook sends, and the errors it brings: the largest, and of the norm."""
    table = Table(
        Column("hook"), Column("sends"), Column("messages", right=True), Column("sent", "bytes", right=True),
        Column("gradient\nmax. error", right=True, wide=True), Column("gradient\nrel. error", right=True),
        Column("parameters\nmax. error", right=True, wide=True), Column("parameters\nrel. error", right=True),
        Column("loss", right=True),
    )  # fmt: skip
    refused = []
    for result in ranks[0]:
        if isinstance(result, RefusedHook):
            refused.append(f"  {result.hook} is refused here: {result.refused}")
            continue
        figures = [*difference_cells(result.gradient), *difference_cells(result.parameters), f"{result.loss:.6f}"]
        table.add(result.hook, ", ".join(result.types), str(result.messages), f"{result.bytes:,}", *figures)
    about = "  messages, sent: what a rank passes to all_reduce in a step; rel. error: norm of the error / norm"
    return [about, table, *refused]


def accumulation_texts(ranks: Sequence[Sequence[AccumulationResult]]) -> Texts:
    """Messages of each way, and how far its gradients are from those of one batch."""
    table = Table(
        Column("way"), Column("batches", right=True), Column("messages", right=True),
        Column("max. error", right=True), Column("rel. error", right=True),
    )  # fmt: skip
    for result in ranks[0]:
        table.add(result.way, str(result.batches), str(result.messages), *difference_cells(result.difference))
    return ["  errors: of the gradients, compared with those of one large batch", table]


def uneven_inputs_texts(ranks: Sequence[UnevenResult]) -> Texts:
    """Batches, steps and messages of each rank, with Join and with its exception."""
    joined = Table(
        RANK_COLUMN, Column("batches", right=True), Column("steps", right=True), Column("all-reduces", right=True),
        Column("difference\nfrom rank 0", right=True),
    )  # fmt: skip
    raising = Table(RANK_COLUMN, Column("steps", right=True), Column("error", wraps=True))
    for rank, result in enumerate(ranks):
        joined.add(str(rank), *map(str, (result.batches, result.steps, result.messages, result.difference)))
        end = result.without_joining
        raising.add(str(rank), str(end.steps), end.says or "none: no rank had to wait")
    return [
        "  Within Join (difference from rank 0: the largest of any parameter, at the end):",
        joined,
        "  With throw_on_early_termination=True:",
        raising,
    ]


def checkpoint_texts(ranks: Sequence[CheckpointResult]) -> Texts:
    """Who wrote and read how much, then where training ends that went on from there."""
    files = Table(
        RANK_COLUMN, Column("written", "bytes", right=True), Column("read", "bytes", right=True), Column("onto"),
    )  # fmt: skip
    for rank, result in enumerate(ranks):
        files.add(str(rank), f"{result.written:,}", f"{result.read:,}", result.device)
    ends = Table(Column("loaded"), Column("max. error", right=True), Column("rel. error", right=True))
    for row in ranks[0].resumed:
        ends.add(row.loaded, *difference_cells(row.difference))
    steps = ranks[0].steps
    about = (
        f"  errors: of the parameters, after {steps} steps, the checkpoint, and {steps} steps more, compared with "
        f"{2 * steps} steps on end"
    )
    return [files, about, ends]


def sampler_texts(ranks: Sequence[Sequence[SamplerResult]]) -> Texts:
    """One column per rank: the positions of its samples, in order."""
    table = Table(
        Column("sampler"), *(Column(f"rank {rank}", wraps=True) for rank in range(len(ranks))),
        Column("more than\nonce", wraps=True), Column("left out", wraps=True),
    )  # fmt: skip
    for number, result in enumerate(ranks[0]):
        mine = [list_positions(theirs[number].mine) for theirs in ranks]
        table.add(result.way, *mine, list_positions(result.doubled), list_positions(result.left_out))
    return ["  The positions of each rank's samples, in order:", table]


def difference_cells(difference: Difference) -> list[str]:
    return [f"{difference.max:.1e}", f"{difference.relative:.1e}"]


def list_positions(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers)) or "-"


def list_names(names: Sequence[str], most: int = FEW) -> str:
    if len(names) <= most:
        return " ".join(names)
    return f"{names[0]} … {names[-1]} ({len(names)})"
