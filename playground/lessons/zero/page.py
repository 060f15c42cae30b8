"""The command `zero`: its settings, the closed forms beside what is counted, and its text. Does not
import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from playground.console.options import flags
from playground.console.session import Session
from playground.console.tables import Column, Table
from playground.console.text import good, prose
from playground.console.training import RUN_TRAINING
from playground.console.units import format_bytes, plural
from playground.lessons import LESSONS
from playground.lessons.zero.results import (
    CAST_RULE,
    CASTING,
    HELD,
    SENT_RULE,
    TORCH,
    WayResult,
    check_way,
    closed_forms,
    expect_kept,
    result_texts,
)
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.flags import ANY, check_flags, flag, like
from playground.training.one_process import check_counts
from playground.training.settings import BFLOAT16, DTYPES, FLOAT32, MemorySettings

LESSON = LESSONS["zero"]
MEASURE, UNDER_CAP = (LESSON.remote(name, "measure") for name in ("run", "train_under_cap"))
NAMES = (*HELD, *TORCH)
WARM_UP, CAPPED_STEPS, OUT_OF_MEMORY = 3, 2, "out of memory"


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """Raises `UsageError` for what cannot be cut or trained."""

    size: int
    ways: tuple[str, ...] = flag(NAMES, "Train by these ways alone", name="--way", choices=NAMES)
    layers: int = flag(2, "Number of the GPT's blocks.", least=1)
    width: int = flag(96, "Width of the GPT, a multiple of its 12 heads.", least=12)
    batch_size: int = flag(24, "Global batch size: sequences per step, over all ranks.", least=1)
    steps: int = flag(30, "Number of training steps, by each way.", least=1)
    cap: int | None = flag(
        None, "Train two steps under a cap on what each rank may hold: whoever holds more dies.",
        least=1, name="--cap-mb", in_megabytes=True, metavar="MB",
    )  # fmt: skip
    kernel: bool = flag(
        False,
        "With --cap-mb: the kernel enforces it (RLIMIT_DATA, on Linux), not the count.",
        needs={"cap": ANY},
    )
    dtype: str = like(
        MemorySettings, "dtype",
        help=f"Gather parameters and compute in this type, beside float32 shards: "
        f"{' and '.join(CASTING)} alone.",
    )  # fmt: skip
    reduce_dtype: str = flag(
        FLOAT32, "Reduce gradients in this type.", choices=DTYPES, needs={"dtype": (BFLOAT16,)}
    )
    checkpoint_activations: bool = like(MemorySettings, "checkpoint_activations")
    seed: int = 1234

    def __post_init__(self) -> None:
        check_flags(self)
        if self.dtype == BFLOAT16:
            if not {*CASTING} & {*self.ways}:
                raise UsageError(
                    f"--dtype {BFLOAT16} --way {','.join(self.ways)}: no float32 shards "
                    f"beside what is computed with, choose {' or '.join(CASTING)}"
                )
            ways = tuple(way for way in CASTING if way in self.ways)
            object.__setattr__(self, "ways", ways)
        if self.width % 12:
            raise UsageError(
                f"--width {self.width}: the GPT has 12 heads, so choose a multiple of 12"
            )
        if self.batch_size % self.size:
            asked = f"--batch-size {self.batch_size} for {self.size} ranks"
            raise UsageError(
                f"{asked}: each gets as many sequences, so choose a multiple of {self.size}"
            )

    def on_all_ranks(self) -> dict[str, object]:
        return asdict(self)


@LESSON.run_by(flags(ZeroSettings))
def command(session: Session, **chosen: Any) -> None:
    world = session.world
    settings = ZeroSettings(size=world.size, **chosen)
    world.warm_up(RUN_TRAINING, MEASURE)
    about = f"batches of {settings.batch_size} sequences to copy"
    if settings.cap:
        about = f"a cap of {format_bytes(settings.cap)} on each rank, kept by the "
        about += "kernel" if settings.kernel else "count"
    model = f"model: a GPT of {plural(settings.layers, 'block')} of width {settings.width}; {about}"
    session.say(f"{LESSON.name}: {world}", model, "")
    if settings.cap:
        return show_capped(session, settings)
    results: list[WayResult] = session.launch(RUN_TRAINING, MEASURE, settings)[0]
    dtypes = settings.dtype, settings.reduce_dtype
    session.say(*result_texts(results, *describe(settings)), "")
    session.print_document({}, ways=results)
    for result in results:
        check_way(result.way, result, result.difference, world.size, *dtypes)
        check_counts("activations", vars(result), {"kept": result.expected_kept}, world.device)
    session.say(prose("Shown: ", good(conclude(results, world.size)), "."))


def conclude(results: Sequence[WayResult], size: int) -> str:
    """What the way of ours that shards most holds and sends, beside ddp's closed forms."""
    found = {result.way: result for result in results}
    way = next((name for name in reversed(HELD) if name in found), results[-1].way)
    ddp = closed_forms("ddp", found[way].model_bytes, size)
    return LESSON.conclude(
        size, way=way, held=found[way].held / ddp["held"],
        sent=found[way].sent / ddp["sent"] if size > 1 else 1,
        largest=max(result.difference for result in results),
    )  # fmt: skip


def describe(settings: ZeroSettings) -> tuple[str, str]:
    """What is sent, by its rule, and what would be kept if all were in float32."""
    sent, saving = SENT_RULE, ""
    if settings.dtype == BFLOAT16:
        reduced = "P" if settings.reduce_dtype == FLOAT32 else "P/2"
        sent = CAST_RULE.format(reduced, settings.reduce_dtype)
    if settings.dtype == BFLOAT16 or settings.checkpoint_activations:
        whole = expect_kept(settings.layers, settings.width, FLOAT32, recompute=False)
        saving = f"; all activations in float32: {format_bytes(round(whole))}"
    return sent, saving


def show_capped(session: Session, settings: ZeroSettings) -> None:
    """Each way in a world of its own, which ends when memory is refused to a rank. Raises
    `PlaygroundError` if no way has trained."""
    died = dict.fromkeys(settings.ways, "")
    for way in died:
        try:
            session.launch(RUN_TRAINING, UNDER_CAP, settings, (way,))
        except PlaygroundError as error:
            if not error.headline.startswith(OUT_OF_MEMORY):
                raise
            died[way] = error.headline
    session.say(Table("way", Column("what ended it", wraps=True), rows=died.items()), "")
    session.print_document({}, ways=[{"way": way, "died": why} for way, why in died.items()])
    if all(died.values()):
        raise PlaygroundError(f"{settings.ways[0]}: {died[settings.ways[0]]}")
    trained = ", ".join(way for way, why in died.items() if not why)
    session.say(prose("Shown: ", good(f"{trained} trained under the cap"), "."))
