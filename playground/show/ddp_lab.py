"""What the lab of the lesson `ddp` has to tell, part by part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from playground.show.data_parallel import right
from playground.show.results import table

FEW = 4
"""Names that are listed one by one; of more, the first and the last."""


def part(name: str, about: str, ranks: list[Any]) -> str:
    """A part: its name, what it is about, and its tables. `ranks` is what each rank has to say."""
    refused = [rank["refused"] for rank in ranks if "refused" in rank]
    lines = [f"  the backend refuses: {refused[0]}"] if refused else TEXTS[name](ranks)
    return "\n".join([f"\n{name}: {about}", *lines])


def buckets_text(ranks: list[dict[str, Any]]) -> list[str]:
    """The buckets of the first backward and of the later ones, for each cap; then times and memory."""
    order = ranks[0]["order"]
    rows, names = [["bucket_cap_mb", "backward", "bucket", "bytes", "leaves at"]], ["parameters"]
    times = [["bucket_cap_mb", "buckets", "ms a step"]]
    for cap in ranks[0]["caps"]:
        size = f"{cap['bucket_cap_mb']:g}"
        for when, sent in (("1", cap["first"]), (f"{cap['rebuilt_before']} …", cap["rebuilt"])):
            for bucket in sent:
                leaves = f"{bucket['ready']} of {len(order)}"
                rows.append([size, when, str(bucket["bucket"]), f"{bucket['bytes']:,}", leaves])
                names.append(listed(bucket["parameters"]))
        times.append([size, str(len(cap["rebuilt"])), f"{1000 * cap['seconds']:.2f}"])
    memory = [["gradient_as_bucket_view", "bytes of gradients", "outside of buckets"]]
    memory += [
        [str(row["gradient_as_bucket_view"]), f"{row['gradients']:,}", f"{row['outside']:,}"]
        for row in ranks[0]["memory"]
    ]
    return [
        f"  gradients get ready in the order {listed(order, 10)}",
        *(f"{line}  {listing}" for line, listing in zip(right(rows, 0), names, strict=True)),
        f"  (the same on all ranks; leaves at: how many of the {len(order)} gradients are ready by then)",
        *right(times, 0),
        *right(memory, 0),
    ]


def hooks_text(ranks: list[list[dict[str, Any]]]) -> list[str]:
    """What each hook sends, and the errors it brings: the largest, and of the norm."""
    rows = [["hook", "sends", "messages", "bytes", "gradient: max", "relative", "parameters: max", "relative", "loss"]]
    for row in ranks[0]:
        if "refused" in row:
            continue
        figures = [f"{row[of][kind]:.1e}" for of in ("gradient", "parameters") for kind in ("max", "relative")]
        sends = ", ".join(row["types"])
        rows.append([row["hook"], sends, str(row["messages"]), f"{row['bytes']:,}", *figures, f"{row['loss']:.6f}"])
    refused = [f"  {row['hook']} is refused here: {row['refused']}" for row in ranks[0] if "refused" in row]
    return [*right(rows, 2), "  (messages and bytes: what a rank hands to all_reduce in a step)", *refused]


def accumulation_text(ranks: list[list[dict[str, Any]]]) -> list[str]:
    """Messages of each way, and how far its gradients are from those of one batch."""
    rows = [["way", "batches", "messages", "difference: max", "relative"]]
    for row in ranks[0]:
        figures = [f"{row['difference'][kind]:.1e}" for kind in ("max", "relative")]
        rows.append([row["way"], str(row["batches"]), str(row["messages"]), *figures])
    return right(rows, 1)


def uneven_inputs_text(ranks: list[dict[str, Any]]) -> list[str]:
    """Batches, steps and messages of each rank, with Join and with its exception."""
    rows = [
        ["rank", "batches", "steps", "all-reduces", "replicas differ by", "steps, if Join is to raise", "which says"]
    ]
    for rank, row in enumerate(ranks):
        end = row["without_joining"]
        figures = [row["batches"], row["steps"], row["messages"], row["difference"], end["steps"]]
        rows.append([str(rank), *map(str, figures), end["says"] or "nobody had to wait"])
    return table(rows)


def sampler_text(ranks: list[list[dict[str, Any]]]) -> list[str]:
    """A column a rank: the positions of its samples, in order."""
    rows = [["", *(f"rank {rank}" for rank in range(len(ranks))), "twice or more", "left out"]]
    for number, row in enumerate(ranks[0]):
        mine = [spaced(theirs[number]["mine"]) for theirs in ranks]
        rows.append([row["way"], *mine, spaced(row["doubled"]), spaced(row["left_out"])])
    return table(rows)


def spaced(numbers: list[int]) -> str:
    return " ".join(map(str, numbers)) or "-"


def listed(names: list[str], most: int = FEW) -> str:
    if len(names) <= most:
        return " ".join(names)
    return f"{names[0]} … {names[-1]} ({len(names)})"


TEXTS: dict[str, Callable[[list[Any]], list[str]]] = {
    "buckets": buckets_text,
    "hooks": hooks_text,
    "accumulation": accumulation_text,
    "uneven_inputs": uneven_inputs_text,
    "sampler": sampler_text,
}
