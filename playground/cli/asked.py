"""What a benchmark is asked for: its options, and the plan that comes of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from playground.cli.options import ALL_REDUCES, options, plot_option
from playground.measure import environment, sizes
from playground.measure.plan import ELEMENT, OPS, SHAPES, USUAL_ALGORITHMS, Plan, check_algorithms, check_sizes
from playground.runtime.entry import World
from playground.runtime.errors import Impossible

EVERYTHING = "all"
USUAL_COLLECTIVES = ("all_reduce",)


def read_size(ctx: click.Context, param: click.Parameter, text: str) -> int:
    """A number of bytes, written with or without K, M or G."""
    try:
        return sizes.parsed(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def read_names(
    known: tuple[str, ...], ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
) -> tuple[str, ...]:
    """Names that there are, or `all`, with commas between them."""
    words = [word.strip() for text in texts for word in text.split(",")]
    for word in words:
        if word not in (*known, EVERYTHING):
            raise click.BadParameter(f"{word!r} is none of {', '.join(known)}, {EVERYTHING}.")
    return tuple(words)


def named(known: tuple[str, ...], words: tuple[str, ...]) -> tuple[str, ...]:
    """Of the names there are, those asked for, each once."""
    return tuple(name for name in known if name in words or EVERYTHING in words)


def size_option(*names: str, default: str, about: str) -> Callable[[Any], Any]:
    return click.option(*names, callback=read_size, default=default, metavar="SIZE", show_default=True, help=about)


def names_option(*names: str, known: tuple[str, ...], usual: tuple[str, ...], about: str) -> Callable[[Any], Any]:
    return click.option(
        *names, callback=partial(read_names, known), multiple=True, metavar="NAME,…", show_default=",".join(usual),
        help=f"{about}: {', '.join(known)} or {EVERYTHING}.",
    )  # fmt: skip


bench_options = options(
    size_option("-b", "--begin", default="1K", about="Smallest size in bytes."),
    size_option("-e", "--end", default="16M", about="Largest size in bytes."),
    click.option("-f", "--factor", type=click.IntRange(2), default=4, show_default=True, help="From size to size."),
    click.option("--iterations", type=click.IntRange(1), default=20, show_default=True, help="Trials of each size."),
    click.option("--warmup", type=click.IntRange(0), default=5, show_default=True, help="Calls before them."),
    names_option("--collective", "collectives", known=tuple(SHAPES), usual=USUAL_COLLECTIVES, about="What to measure"),
    names_option("--algorithm", "algorithms", known=ALL_REDUCES, usual=USUAL_ALGORITHMS, about="For all_reduce"),
    click.option("--dtype", type=click.Choice(tuple(ELEMENT)), default="float32", show_default=True),
    click.option("--op", type=click.Choice(tuple(OPS)), default="sum", show_default=True, help="Of reductions."),
    click.option("--limit", is_flag=True, help="Also measure the wire itself: loopback TCP, or a copy on the GPU."),
    click.option("--csv", type=click.Path(path_type=Path), metavar="FILE", help="Also write the rows as CSV."),
    plot_option("them"),
    click.option(
        "--diff", type=click.Path(path_type=Path), nargs=2, metavar="BEFORE AFTER",
        help="Measure nothing: compare two results that --json printed.",
    ),
)  # fmt: skip


def planned(
    world: World, begin: int, end: int, factor: int, collectives: tuple[str, ...], algorithms: tuple[str, ...],
    dtype: str, **asked: Any,
) -> Plan:  # fmt: skip
    """What is to be measured. Raises `Impossible` if that cannot be."""
    names = named(tuple(SHAPES), collectives or USUAL_COLLECTIVES)
    check_sizes(begin, end, dtype, names, world.size)
    if EVERYTHING not in algorithms:
        check_algorithms(names, algorithms)
    ours = named(ALL_REDUCES, algorithms or USUAL_ALGORITHMS)
    plan = Plan(collectives=names, algorithms=ours, sizes=sizes.between(begin, end, factor), dtype=dtype, **asked)
    needed, there = plan.memory(world.local_size, world.size), environment.memory("MemAvailable")
    if world.device == "cpu" and needed > there:
        raise Impossible(
            f"--end {sizes.written(end)}: {world.local_size} ranks need about {needed:,} bytes of memory "
            f"and {there:,} are free: use a smaller size or fewer ranks"
        )
    return plan


def check_operation(plan: Plan) -> None:
    """Raise `Impossible` for an operation that is not defined for tensors of this type."""
    if not any(SHAPES[collective].reduces for collective in plan.collectives):
        return
    import torch

    from playground.algorithms.operation import check

    try:
        check(getattr(torch, plan.dtype), getattr(torch.distributed.ReduceOp, OPS[plan.op]))
    except ValueError as error:
        raise Impossible(f"--op {plan.op} --dtype {plan.dtype}: {error}") from None
