"""The command `allreduce`: the algorithms' messages, step by step."""

from __future__ import annotations

import click

from playground.console.options import RunOptions, run_options
from playground.console.session import Session
from playground.lessons import LESSONS
from playground.lessons.all_reduce.report import comparison, story
from playground.lessons.all_reduce.results import ELEMENT, Trace, load_of
from playground.lessons.all_reduce.settings import (
    ALL_ALGORITHMS,
    MAX_ELEMENTS,
    STORY,
    TRACEABLE,
    AllReduceSettings,
    spec_of,
)
from playground.runtime.remote import remote

LESSON = LESSONS["allreduce"]
TRACE = remote("playground.lessons.all_reduce.trace:run")


@click.command(LESSON.name, help=LESSON.help, short_help=LESSON.teaches)
@run_options(LESSON.default_size)
@click.option(
    "--algorithm", "algorithms", type=click.Choice(list(TRACEABLE)), metavar="NAME", multiple=True,
    help=f"Show only this algorithm, step by step; may be repeated: {', '.join(TRACEABLE)}.",
)  # fmt: skip
@click.option(
    "--elements", type=click.IntRange(1, MAX_ELEMENTS), show_default="the world size", help="Number of elements."
)
def command(run: RunOptions, algorithms: tuple[str, ...], elements: int | None) -> None:
    session = Session(LESSON.name, run, default_size=LESSON.default_size, min_size=LESSON.min_size)
    names = tuple(name for name in TRACEABLE if name in (algorithms or ALL_ALGORITHMS))
    settings = AllReduceSettings(size=session.world.size, names=names, elements=elements)
    session.world.warm_up(TRACE)
    with session.bar() as bar:
        bar.show(f"starting {session.world.size} ranks")
        session.say(f"{LESSON.name}: {session.world}, {settings.numel} elements of {ELEMENT} bytes")
        by_rank: list[list[Trace]] = session.world.run(TRACE, settings, on_report=bar)
    by_name = dict(zip(names, zip(*by_rank, strict=True), strict=True))
    for name, traces in by_name.items():
        if name in (algorithms or STORY):
            session.say("", *story(name, summary_of(name), traces))
    session.say("", *comparison(by_name), "", f"Shown: {LESSON.shown}.")
    session.print_document(
        {name: [trace.document for trace in traces] for name, traces in by_name.items()},
        cost={name: load_of(traces) for name, traces in by_name.items()},
    )


def summary_of(name: str) -> str:
    """What the lesson says about an algorithm or, where it has no step of its own for it, the algorithm itself."""
    return LESSON.texts.get(name.replace("-", "_")) or spec_of(name).code.summary
