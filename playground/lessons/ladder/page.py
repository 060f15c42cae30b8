"""The command `ladder`: settings, results, whether the replicas agree, and the text. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playground.console import plots
from playground.console.options import flags, only_with, plot_option
from playground.console.session import Session
from playground.console.tables import Column, Table, Texts, figures, tabulate
from playground.console.text import good, prose
from playground.console.training import DataOptions, announce_data, check_link, data_options
from playground.lessons import LESSONS
from playground.measurement import Fields, environment
from playground.runtime.errors import UsageError
from playground.runtime.flags import flag, like
from playground.runtime.launcher.entry import CommandWorld
from playground.training import models
from playground.training.grad_syncs import GRAD_SYNCS
from playground.training.models import ModelSpec
from playground.training.prepare import PreparedData
from playground.training.results import replicas_verdict
from playground.training.settings import TrainingSettings

LESSON = LESSONS["ladder"]
RUN = LESSON.remote("run")
BERT, SPARSE = "bert", "sparse-embeddings"
TOKEN_SEQUENCES = 4096
"""How many sequences of token ids there are to train on."""
MODELS = models.MODELS | {
    BERT: ModelSpec(
        name=BERT,
        code=LESSON.remote("TokenBert", "sparse_embeddings"),
        parameters=13_457_283,
        batch_size=16,
        steps=10,
        bucket_cap_mb=2.0,
    )
}
"""Those that are trained on images, and BERT with one layer of width 384, for token ids drawn by Zipf's law."""
COPIES = 6
"""Copies of a model per rank and candidate: parameters, gradients, momentum, messages (measured: 34 for 6 of them)."""
DDP = "ddp"
PARTS = ("forward", "backward", "exposed", "step")
"""Parts of a training step, in order."""
TIMES = ("p50", "p95", *PARTS, "alone")
"""Figures of a rung that are shown in milliseconds, in order."""
LEGEND = (
    "  p50: median time of a step, on its slowest rank. Its parts are medians on the rank that is the last to start "
    "averaging: forward; backward, until the last gradient is ready; exposed, from then until all gradients are "
    "averaged (in the row parameters, what averaging them takes after the optimizer's step; shared-step sums in that "
    "step). alone: what the same averaging takes without a backward to hide behind; hidden: the share of it that is "
    "not exposed. vs. ddp, vs. first: how many times as fast as ddp, and as the first rung.",
    "  With --wide: p95, which 95 of 100 steps stay below; step, the optimizer's; early, the share of the bytes that "
    "are sent before the last gradient is ready (nothing else can be hidden); messages and bytes that a rank sends "
    "in a step; the loss of the last batch; distance, the largest difference of any parameter from ddp's (rounding, "
    "which grows where it decides which of two numbers a ReLU or max_pool lets through).",
)
ON_NO_LINK = ("shared-step", "zero-1", "zero-2", "zero-3")
"""Rungs without an all-reduce, whose messages a simulated link does not delay."""


def candidates(model: str, link: float = 0.0) -> dict[str, str]:
    """The candidates for this model, by name, with a summary: every gradient synchronisation, in order, with one for
    embeddings where there are any, then DistributedDataParallel. Over a simulated link without those that it would not
    delay."""
    rungs: dict[str, str] = {}
    for name, spec in GRAD_SYNCS.items():
        if not (link and name in ON_NO_LINK):
            rungs[name] = spec.summary
        if name == "overlapped" and model == BERT:
            rungs[SPARSE] = "overlapped, and of an embedding's gradient only the rows that some rank used"
    return rungs | {DDP: "DistributedDataParallel, which does what overlapped does in C++"}


@dataclass(frozen=True, kw_only=True)
class LadderSettings(TrainingSettings):
    """Training settings, with a number of steps in place of epochs. `sync` does not matter: every rung is measured.
    Raises `UsageError` for what cannot be measured."""

    model: str = flag("net", "Model to train.", choices=MODELS)
    steps: int = flag(100, "Number of steps to time on each rung.", least=1)
    bucket_cap: int = like(TrainingSettings, "bucket_cap", 52_428, needs={})
    """Bytes after which a bucket of gradients is full, in the rungs and in DistributedDataParallel."""


Rung = Fields
"""One rung, or DistributedDataParallel, on all ranks together. Times are in seconds.

- `forward`, `backward`, `exposed`, `step`: the parts of a step, medians over its rounds; of each round, those of the
  rank that came last to the averaging: it waits for messages, and not for slower ranks.
- `alone`: the median time of the same averaging with no backward to hide behind, on the rank that came last to it;
  `hidden`: the share of it that is not exposed, 0 to 1.
- `messages`, `bytes`: per step, on the rank that sends most (where only the rows in use of an embedding travel, in the
  first step); `early_bytes`: of those that leave before the last gradient is ready, for no more can be hidden.
- `rung`: its name; `p50`, `p95`: the times of a step on its slowest rank that 50 and 95 of 100 steps stay below.
- `loss`: the mean over the last global batch; `difference_to_ddp`: the largest difference of any parameter to
  DistributedDataParallel's, on any rank; `replicas_max_difference`: between a rank and rank 0, where BatchNorm's
  statistics are each rank's own.
- `speed_to_first`, `speed_to_ddp`: how many times as fast, by `p50`.
- `caveat`: why `hidden` is less than it could be, where the backend keeps DistributedDataParallel from hiding messages.
"""


def agreement(rungs: Sequence[Rung], all_reduce: str) -> str:
    """The verdict on the replicas, after the same number of steps on every rung. Raises `PlaygroundError` if those of a
    rung that adds with `all_reduce`, or those of DistributedDataParallel, the last, differ though they must not."""
    methods = [*[all_reduce] * (len(rungs) - 1), None]
    differences = [rung["replicas_max_difference"] for rung in rungs]
    verdicts = dict(zip(differences, map(replicas_verdict, differences, methods), strict=True))
    return verdicts[max(verdicts)]


def result_texts(rungs: Sequence[Rung]) -> Texts:
    """The meaning of the columns, a row per rung, and caveats."""
    times = {part: Column(part, "ms", right=True, wide=part in ("p95", "step")) for part in TIMES}
    sent = figures(("early", "early", "%", ".0f"), ("messages",), ("bytes", "sent", "bytes", ","), wide=True)
    ratios = figures(("speed_to_ddp", "vs.\nddp", "", ".2f"), ("speed_to_first", "vs.\nfirst", "", ".2f"))
    outcome = figures(("loss", "loss", "", ".4f"), ("distance", "distance\nto ddp"), wide=True)
    columns = (
        {"rung": Column("rung")} | times | figures(("hidden", "hidden", "%", ".0f", 100)) | sent | ratios | outcome
    )
    shown = [
        rung
        | {name: milliseconds_text(rung[name]) for name in TIMES}
        | {"early": 100 * rung["early_bytes"] / max(1, rung["bytes"])}
        | {"distance": f"{rung['difference_to_ddp']:.1e}" if rung["difference_to_ddp"] else "0"}
        for rung in rungs
    ]
    caveats = (f"  {rung['rung']}: {rung['caveat']}." for rung in rungs if rung["caveat"])
    return [*LEGEND, tabulate(shown, columns), *caveats]


def milliseconds_text(seconds: float) -> str:
    """With as many digits as mean something."""
    return f"{1000 * seconds:.{1 if seconds >= 0.1 else 2}f}"


def fastest_text(rungs: Sequence[Rung]) -> str:
    """How the fastest rung compares with the first, and with DistributedDataParallel."""
    fastest = min(rungs[:-1], key=lambda rung: float(rung["p50"]))
    return (
        f"the fastest rung, {fastest['rung']}, is {fastest['speed_to_first']:.2f} times as fast as "
        f"{rungs[0]['rung']} and {fastest['speed_to_ddp']:.2f} times as fast as {rungs[-1]['rung']}"
    )


def plot_parts(rungs: Sequence[Rung], title: str, file: Path) -> None:
    """A bar per rung: the parts of a step, on top of each other."""
    figure, axes = plots.new_axes(title, "", "ms per step")
    names, heights = [rung["rung"] for rung in rungs], [0.0] * len(rungs)
    for part in PARTS:
        times = [1000 * float(rung[part]) for rung in rungs]
        axes.bar(names, times, 0.7, heights, label="exposed communication" if part == "exposed" else part)
        heights = [height + time for height, time in zip(heights, times, strict=True)]
    figure.legend(loc="outside upper right", ncols=len(PARTS))
    plots.save(figure, file)


TOKENS = PreparedData(
    name="zipf", folder=Path(), why="as frequent as words are in a text", train=TOKEN_SEQUENCES, test=0,
    kind="sequences of token ids",
)  # fmt: skip
"""Token ids, which each rank draws for itself."""
BY_MODEL = {
    field: {
        "default": None,
        "show_default": ", ".join(f"{getattr(spec, shown):g} for {name}" for name, spec in MODELS.items()),
    }
    for field, shown in (("steps", "steps"), ("batch_size", "batch_size"), ("bucket_cap", "bucket_cap_mb"))
}
"""Options whose default is that of the model."""


@LESSON.run_by(
    flags(LadderSettings, "model", *BY_MODEL, "all_reduce", "link", changes=BY_MODEL),
    data_options,
    plot_option("a bar for each rung"),
    only_with("dataset", "data_dir", "limit", model=tuple(models.MODELS)),
)
def command(session: Session, data: DataOptions, model: str, plot: Path | None, **chosen: Any) -> None:
    world, spec = session.world, MODELS[model]
    of_model = {"steps": spec.steps, "batch_size": spec.batch_size, "bucket_cap": int(spec.bucket_cap_mb * 2**20)}
    chosen = {name: value or of_model.get(name, value) for name, value in chosen.items()}
    folder, tokens = (Path(), TOKENS) if model == BERT else (data.folder, None)
    asked = LadderSettings(folder=folder, model=model, limit=data.limit, seed=session.run.seed, **chosen)
    spec.check_batch(asked.batch_size, world.size)
    check_memory(world, model)
    if plot:
        plots.check(plot)
    world.warm_up(RUN, *spec.preload)
    work = f"training: {model}, {asked.steps} steps of {asked.batch_size} samples{asked.over_links}"
    check_link(session, asked)
    about = Table("rung", Column("what it does", wraps=True), rows=candidates(model, asked.link).items())
    prepared, settings = announce_data(session, data, asked, work, "", about, ready=tokens)
    result: Fields = session.launch(RUN, settings)[0]
    rungs = result["rungs"]
    verdict = agreement(rungs, settings.all_reduce)
    session.say("", *result_texts(rungs), "")
    session.say(prose(f"Shown: {LESSON.shown}; {fastest_text(rungs)}{asked.over_links}; ", good(verdict), "."))
    if plot and world.is_main:
        plot_parts(rungs, f"{model}, {world}", plot)
    recipe = {name: getattr(settings, name) for name in ("batch_size", "bucket_cap", "all_reduce", "seed", "model")}
    measured = {"timed_steps": settings.steps, "rungs": rungs, "environment": result["environment"]}
    session.print_document({"run": result["parts"]}, dataset=prepared.summary, **recipe, **measured)


def check_memory(world: CommandWorld, model: str) -> None:
    """Raise `UsageError` for more replicas of a model than this host's memory has room for."""
    replicas = len(candidates(model))
    needed = world.local_size * replicas * COPIES * 4 * MODELS[model].parameters
    available = environment.memory("MemAvailable")
    if world.device == "cpu" and needed > available:
        raise UsageError(
            f"--model {model}: {world.local_size} ranks need about {needed:,} bytes of memory for {replicas} "
            f"replicas each and {available:,} are free: use fewer ranks or --model net"
        )
