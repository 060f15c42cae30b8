"""What the parts of the lab found, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from playground.console.tables import table
from playground.lessons.ddp.parts import LabPart
from playground.lessons.ddp.results import (
    AccumulationResult,
    BucketsResult,
    Difference,
    HookResult,
    RefusedHook,
    SamplerResult,
    UnevenResult,
)

FEW = 4
"""Names that are listed one by one; of more, the first and the last."""


def part_text(part: LabPart, ranks: Sequence[object]) -> str:
    """A part: its name, what it is about, and its tables. `ranks` is what each rank returned."""
    refused = [rank["refused"] for rank in ranks if isinstance(rank, Mapping)]
    lines = [f"  the backend refuses: {refused[0]}"] if refused else part.text(ranks)
    return "\n".join([f"\n{part.name}: {part.code.summary}", *lines])


def buckets_text(ranks: Sequence[BucketsResult]) -> list[str]:
    """The buckets of the first backward and of the later ones, for each cap; then times and memory."""
    order = ranks[0].order
    rows, names = [["bucket_cap_mb", "backward", "bucket", "bytes", "leaves at"]], ["parameters"]
    times = [["bucket_cap_mb", "buckets", "ms per step"]]
    for cap in ranks[0].caps:
        size = f"{cap.bucket_cap_mb:g}"
        for when, sent in (("1", cap.first), (f"{cap.rebuilt_before} …", cap.rebuilt)):
            for bucket in sent:
                leaves = f"{bucket.ready} of {len(order)}"
                rows.append([size, when, str(bucket.bucket), f"{bucket.bytes:,}", leaves])
                names.append(list_names(bucket.parameters))
        times.append([size, str(len(cap.rebuilt)), f"{1000 * cap.seconds:.2f}"])
    memory = [["gradient_as_bucket_view", "bytes of gradients", "outside of buckets"]]
    memory += [[str(row.gradient_as_bucket_view), f"{row.gradients:,}", f"{row.outside:,}"] for row in ranks[0].memory]
    return [
        f"  gradients get ready in the order {list_names(order, 10)}",
        *(f"{line}  {listing}" for line, listing in zip(table(rows, 0), names, strict=True)),
        f"  (the same on all ranks; leaves at: how many of the {len(order)} gradients are ready by then)",
        *table(times, 0),
        *table(memory, 0),
    ]


def hooks_text(ranks: Sequence[Sequence[HookResult | RefusedHook]]) -> list[str]:
    """What each hook sends, and the errors it brings: the largest, and of the norm."""
    rows = [["hook", "sends", "messages", "bytes", "gradient: max", "relative", "parameters: max", "relative", "loss"]]
    refused = []
    for result in ranks[0]:
        if isinstance(result, RefusedHook):
            refused.append(f"  {result.hook} is refused here: {result.refused}")
            continue
        figures = [*difference_cells(result.gradient), *difference_cells(result.parameters), f"{result.loss:.6f}"]
        rows.append([result.hook, ", ".join(result.types), str(result.messages), f"{result.bytes:,}", *figures])
    return [*table(rows, 2), "  (messages and bytes: what a rank hands to all_reduce per step)", *refused]


def accumulation_text(ranks: Sequence[Sequence[AccumulationResult]]) -> list[str]:
    """Messages of each way, and how far its gradients are from those of one batch."""
    rows = [["way", "batches", "messages", "difference: max", "relative"]]
    for result in ranks[0]:
        rows.append([result.way, str(result.batches), str(result.messages), *difference_cells(result.difference)])
    return table(rows, 1)


def uneven_inputs_text(ranks: Sequence[UnevenResult]) -> list[str]:
    """Batches, steps and messages of each rank, with Join and with its exception."""
    rows = [
        ["rank", "batches", "steps", "all-reduces", "replicas differ by", "steps, if Join is to raise", "which says"]
    ]
    for rank, result in enumerate(ranks):
        end = result.without_joining
        figures = [result.batches, result.steps, result.messages, result.difference, end.steps]
        rows.append([str(rank), *map(str, figures), end.says or "nobody had to wait"])
    return table(rows)


def sampler_text(ranks: Sequence[Sequence[SamplerResult]]) -> list[str]:
    """One column per rank: the positions of its samples, in order."""
    rows = [["", *(f"rank {rank}" for rank in range(len(ranks))), "twice or more", "left out"]]
    for number, result in enumerate(ranks[0]):
        mine = [list_positions(theirs[number].mine) for theirs in ranks]
        rows.append([result.way, *mine, list_positions(result.doubled), list_positions(result.left_out)])
    return table(rows)


def difference_cells(difference: Difference) -> list[str]:
    return [f"{difference.max:.1e}", f"{difference.relative:.1e}"]


def list_positions(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers)) or "-"


def list_names(names: Sequence[str], most: int = FEW) -> str:
    if len(names) <= most:
        return " ".join(names)
    return f"{names[0]} … {names[-1]} ({len(names)})"
