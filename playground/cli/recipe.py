"""What a training run is asked for: its options, the data, and what can be seen to be impossible before it starts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from playground.cli.options import Finite, all_reduce_option, bucket_cap_option, options
from playground.runtime.errors import Impossible
from playground.training import prepare as preparing

RUNGS = ("per-parameter", "none-safe", "flat", "bucketed", "overlapped")
"""Of the ladder from the tutorial's loop to DistributedDataParallel."""
LOADERS = ("batch", "per-sample")

data_options = options(
    click.option(
        "--dataset", type=click.Choice(preparing.DATASETS), default="auto", show_default=True,
        help="auto: MNIST if it is here or can be downloaded, else generated digits.",
    ),
    click.option(
        "--data-dir", type=click.Path(path_type=Path), default=preparing.default_data_dir, envvar="PLAYGROUND_DATA_DIR",
        show_default="~/.cache/playground", help="Where the data lies or is to be put.",
    ),
    click.option(
        "--mirror", envvar="PLAYGROUND_MNIST_MIRROR", metavar="URL",
        help="Folder or address (file://, http://, https://) with MNIST's four .gz files.",
    ),
    click.option("--limit", type=click.IntRange(1), metavar="N", help="Train on the first N samples only."),
)  # fmt: skip
training_options = options(
    click.option("--epochs", type=click.IntRange(1), default=10, show_default=True),
    click.option("--batch-size", type=click.IntRange(1), default=128, show_default=True, help="Of all ranks together."),
    click.option("--lr", type=Finite(0), default=0.01, show_default=True, help="Learning rate."),
    click.option("--momentum", type=Finite(0), default=0.5, show_default=True),
    click.option(
        "--accumulate",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        metavar="K",
        help="Add up the gradients of K batches before they are averaged, for one step.",
    ),
    click.option(
        "--loader",
        type=click.Choice(LOADERS),
        default="batch",
        show_default=True,
        help="Fetch whole batches, or, as tutorials do, sample by sample.",
    ),
    data_options,
)
sync_options = options(
    click.option(
        "--sync", type=click.Choice((*RUNGS, "parameters")), default="flat", show_default=True,
        help="How gradients are averaged; or parameters, after steps that each rank takes alone.",
    ),
    click.option("--every", type=click.IntRange(1), help="With --sync parameters: average after so many steps.  [1]"),
    all_reduce_option,
    bucket_cap_option,
)  # fmt: skip


def prepared(
    dataset: str, data_dir: Path, mirror: str | None, limit: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The data, ready: as fields of `Settings`, and what to say of it.

    Raises `NoData`, and `Impossible` for a limit beyond it.
    """
    source = preparing.prepare(dataset, data_dir, mirror, say=lambda line: click.echo(line, err=True))
    train, test = preparing.samples(source, "train"), preparing.samples(source, "t10k")
    if limit and limit > train:
        raise Impossible(f"--limit {limit}: {source.name} has {train} samples to train on")
    said = {"name": source.name, "train": limit or train, "test": test, "why": source.why}
    return {"folder": source.folder, "dataset": source.name, "limit": limit}, said


def check_shares(world_size: int, batch_size: int) -> None:
    """Raise `Impossible` for a batch that cannot be shared out."""
    if batch_size < world_size:
        raise Impossible(
            f"--batch-size {batch_size} for {world_size} ranks: it is for all together, so at least one each"
        )


def check_accumulation(accumulate: int, batch_size: int, samples: int) -> None:
    """Raise `Impossible` for batches that would be left over, whose gradients no step takes."""
    batches = math.ceil(samples / batch_size)
    if batches % accumulate:
        divisors = ", ".join(str(number) for number in range(1, batches + 1) if batches % number == 0)
        raise Impossible(
            f"--accumulate {accumulate} does not divide the {batches} batches of an epoch: choose one of {divisors}, "
            f"or another --batch-size or --limit"
        )


def averaging(sync: str, every: int | None, bucket_cap_mb: float, **more: Any) -> dict[str, Any]:
    """Options as settings. Raises `Impossible` for one that goes with another way of averaging."""
    if every is not None and sync != "parameters":
        raise Impossible(f"--every {every} is for parameters: with --sync {sync} gradients are averaged at every step")
    return {"sync": sync, "every": every or 1, "bucket_cap": cap_in_bytes(bucket_cap_mb), **more}


def cap_in_bytes(megabytes: float) -> int:
    """DistributedDataParallel's bucket_cap_mb counts 2^20 bytes as a megabyte, and so does ours."""
    return max(1, int(megabytes * 2**20))
