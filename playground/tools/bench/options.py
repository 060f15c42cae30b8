"""What a benchmark is asked for on the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from playground.console.names import names_option, select_names
from playground.console.options import pack_options, plot_option
from playground.console.paths import FilePath
from playground.runtime.errors import UsageError
from playground.tools.bench.collectives import COLLECTIVES
from playground.tools.bench.settings import (
    ALGORITHMS,
    DEFAULT_ALGORITHMS,
    DEFAULT_COLLECTIVES,
    DTYPES,
    MAX_TRIALS,
    OPS,
    BenchSettings,
)
from playground.tools.bench.sizes import geometric_range, parse, to_text


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure. `collectives` and `algorithms` are words as `names_option` reads them."""

    begin: int
    end: int
    factor: int
    iterations: int
    warmup: int
    collectives: tuple[str, ...]
    algorithms: tuple[str, ...]
    dtype: str
    op: str
    limit: bool

    def settings(self, seed: int) -> BenchSettings:
        """Raises `UsageError` for what cannot be measured."""
        if self.begin > self.end:
            raise UsageError(
                f"--begin {to_text(self.begin)} is beyond --end {to_text(self.end)}: sizes go from small to large"
            )
        return BenchSettings(
            collectives=select_names(tuple(COLLECTIVES), self.collectives or DEFAULT_COLLECTIVES),
            algorithms=select_names(ALGORITHMS, self.algorithms),
            sizes=geometric_range(self.begin, self.end, self.factor), dtype=self.dtype, op=self.op,
            iterations=self.iterations, warmup=self.warmup, limit=self.limit, seed=seed,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Files to write the result to, and files to compare instead of measuring."""

    csv: Path | None
    plot: Path | None
    diff: tuple[Path, Path] | None


def read_size(ctx: click.Context, param: click.Parameter, text: str) -> int:
    """A number of bytes, written with or without K, M or G."""
    try:
        return parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def size_option(*flags: str, default: str, help: str) -> Callable[[Any], Any]:
    return click.option(*flags, callback=read_size, default=default, metavar="SIZE", show_default=True, help=help)


def file_option(flag: str, **more: Any) -> Callable[[Any], Any]:
    return click.option(flag, type=FilePath(), **more)


bench_options = pack_options(
    "asked", BenchOptions,
    size_option("-b", "--begin", default="1K", help="Smallest size in bytes."),
    size_option("-e", "--end", default="16M", help="Largest size in bytes."),
    click.option(
        "-f", "--factor", type=click.IntRange(2), default=4, show_default=True,
        help="Ratio of each size to the one before.",
    ),
    click.option(
        "--iterations", type=click.IntRange(1, MAX_TRIALS), default=BenchSettings.iterations, show_default=True,
        help="Number of trials per size.",
    ),
    click.option(
        "--warmup", type=click.IntRange(0, MAX_TRIALS), default=BenchSettings.warmup, show_default=True,
        help="Number of warm-up calls before timing starts.",
    ),
    names_option(
        "--collective", "collectives", known=tuple(COLLECTIVES), default=DEFAULT_COLLECTIVES,
        help="Collectives to measure",
    ),
    names_option(
        "--algorithm", "algorithms", known=ALGORITHMS, default=DEFAULT_ALGORITHMS["all_reduce"],
        help="All-reduce algorithms to measure (ring: also reduce_scatter and all_gather)",
    ),
    click.option(
        "--dtype", type=click.Choice(tuple(DTYPES)), default=BenchSettings.dtype, show_default=True,
        help="Data type of the elements.",
    ),
    click.option(
        "--op", type=click.Choice(tuple(OPS)), default=BenchSettings.op, show_default=True,
        help="Reduction operation.",
    ),
    click.option(
        "--limit", is_flag=True,
        help=(
            "Also measure what the hardware allows: plain TCP, between hosts if there are several and on loopback if "
            "not, or a copy within the GPU's memory."
        ),
    ),
)  # fmt: skip
"""Gives a command the argument `asked`: its `BenchOptions`."""

output_options = pack_options(
    "output", OutputOptions,
    file_option("--csv", metavar="FILE", help="Also write the rows to FILE as CSV."),
    plot_option("bus bandwidth against size"),
    file_option(
        "--diff", nargs=2, metavar="BEFORE AFTER",
        help="Compare two files that --json printed, instead of measuring.",
    ),
)  # fmt: skip
"""Gives a command the argument `output`: its `OutputOptions`."""
