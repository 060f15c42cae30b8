"""Figures of training: the parts of a step, where in it gradients are averaged, and how much of
that is hidden; buckets as they leave; steps on the stages of a pipeline, and on ranks that are
killed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import playground.trace.render as render
from playground.checkpoint.folder import SnapshotSettings
from playground.console.units import format_bytes
from playground.figures.collectives import DASHED
from playground.figures.figure import ChangingRun, Evidence, FigureRun, figure
from playground.lessons.experts.page import EXPERTS, WAYS, ExpertsSettings, K
from playground.lessons.ladder.page import LadderResult, LadderSettings, Rung
from playground.lessons.parameter_server.page import ServerSettings
from playground.lessons.pipeline.page import PipelineSettings, Step, bubble, span, typical_step
from playground.lessons.zero.page import ZeroSettings
from playground.lessons.zero.results import CountedStep
from playground.runtime.remote import remote
from playground.trace.record import BUCKET, COLLECTIVE, COMPUTE, GRADIENT, Event, RankRecording
from playground.trace.render import (
    CELL,
    WIDTH,
    Band,
    Scene,
    add_bars,
    add_key,
    add_lane,
    bands_scene,
    box,
    piece,
)
from playground.trace.render.timeline import LABELS, ROW, lay_out
from playground.training import prepare
from playground.training.settings import TrainingSettings

if TYPE_CHECKING:
    from playground.figures.ranks import SgdStep

IMAGES, TEST_IMAGES = 1280, 128
"""Numbers of digits that are drawn for training and for its test set."""


def draw_digits(folder: Path) -> Path:
    """Draw digits into the folder if they are not there. Returns their folder."""
    prepare.find_or_draw_digits(folder, "for the figures", lambda line: None, IMAGES, TEST_IMAGES)
    return prepare.raw_folder(folder, "digits")


def on_digits(
    settings: Callable[..., object], **values: Any
) -> Callable[[Path], tuple[object, ...]]:
    """The arguments of a training with these settings, on digits that are drawn into the folder."""
    return lambda folder: (settings(folder=draw_digits(folder), **values),)


def elastic_arguments(
    folder: Path,
    images: int = IMAGES,
    epochs: int = 2,
    every: int = 4,
    kills: Sequence[tuple[int, int]] = ((1, 7), (0, 14)),
) -> tuple[object, ...]:
    """Twenty steps, with two kills and a snapshot every four steps."""
    snapshots = SnapshotSettings(folder=folder / "snapshots", every=every)
    settings = TrainingSettings(
        folder=draw_digits(folder), limit=images, epochs=epochs, snapshots=snapshots
    )
    return settings, "sgd", kills


SGD_ON_THREE = FigureRun("sgd on three", remote("playground.figures.ranks:sgd_step"), 3)
FLAT, OVERLAPPED = (
    FigureRun(sync, remote("playground.figures.ranks:training_steps"), 2, (sync,), recorded=True)
    for sync in ("flat", "overlapped")
)
LADDER = FigureRun(
    "ladder",
    remote("playground.lessons.ladder.measure:run"),
    2,
    on_digits(LadderSettings, steps=30),
)
BERT = FigureRun("bert", remote("playground.figures.ranks:bert_steps"), 2, recorded=True)
ELASTIC = FigureRun(
    "elastic", remote("playground.lessons.elastic.experiment:run"), 3, elastic_arguments, restarts=2
)
HOSTS = ChangingRun(
    "hosts", remote("playground.lessons.elastic.hosts:run"), 2, ends=((2, 10), (1, 21), (2, 32))
)
SERVER = FigureRun(
    "parameter-server",
    remote("playground.figures.ranks:server_modes"),
    4,
    on_digits(ServerSettings, batch_size=384, steps=6, slow_worker=3, staleness=1),
)
PIPELINE = FigureRun(
    "pipeline",
    remote("playground.lessons.pipeline.experiment:run"),
    2,
    on_digits(PipelineSettings, size=2, microbatches=4, steps=3),
)
ZERO = FigureRun(
    "zero",
    remote("playground.lessons.zero.measure:count_ways"),
    4,
    (ZeroSettings(size=4, ways=("ddp", "zero-1", "zero-2", "zero-3"), layers=6),),
)
ROUTED = FigureRun(
    "experts",
    remote("playground.lessons.experts.experiment:run"),
    2,
    (ExpertsSettings(size=2, steps=40),),
)
DDP_NET, DDP_FOUR = (
    FigureRun(name, remote("playground.figures.ranks:ddp_backward"), 2, (model,), recorded=True)
    for name, model in (("ddp", "net"), ("ddp, four parameters", "four"))
)
PARTS = {
    "forward": "forward",
    "backward": "backward",
    "exposed": "communication",
    "step": "optimizer",
}
"""Parts of a step as the ladder measures them, and their styles."""
PHASES = {"forward": "forward", "synced": "backward", "step": "optimizer"}
"""Styles of a step's phases, by the moment that ends them."""
COLUMNS, CURVE = 78, 6 * CELL[1]
"""Columns of a curve over a step, and its height."""
KEY = {style: style for style in PARTS.values()}
FORMULAS = {"backward": "∂J/∂θ", "optimizer": f"θ = θ - {render.ALPHA} ∂J/∂θ"}
"""Formulas of backward and the optimizer; J is the loss."""


def rung_of(run: Evidence, name: str) -> Rung:
    """Rank 0's measurements on this rung of the ladder."""
    result: LadderResult = run.results[0]
    return next(rung for rung in result.rungs if rung.rung == name)


@figure(
    "F3",
    "ladder/backward_step",
    LADDER,
    "backward computes the gradient, step applies it: what each costs",
)
def backward_and_step(run: Evidence) -> Scene:
    rung = rung_of(run, "flat")
    scene = Scene("Backward computes the gradient, step applies it")
    for number, (name, formula) in enumerate(FORMULAS.items()):
        look = {"style": name, "text": f"{name}\n{formula}", "title": f"{name}: {formula}"}
        scene.add(render.BOX, CELL[0] + 320 * number, 0, 296, 64, **look)
    times = {part: getattr(rung, part) for part in ("forward", "backward", "step")}
    bars = [
        (part, [piece(seconds, PARTS[part])], f"{seconds * 1e3:.3g} ms")
        for part, seconds in times.items()
    ]
    add_bars(scene, bars)
    return scene.with_caption(
        f"backward takes {rung.backward / rung.step:.3g} times as long as step. "
        f"The ladder's rung {rung.rung}: medians of its steps on {len(run.results)} ranks."
    )


@figure("F11", "sgd/ddp", SGD_ON_THREE, "synchronous SGD in five phases")
def five_phases(run: Evidence) -> Scene:
    steps: Sequence[SgdStep] = run.results
    size, ranks = len(steps), range(len(steps))
    fan_out = render.meant_arrows([0], ranks)
    average = box(f"all-reduce: g {steps[0].average:+.5f}", "communication", meant=True)
    bands = [
        Band([box(f"a store of {sum(step.samples for step in steps)} samples")]),
        Band(
            [box(f"rank {rank}\n{steps[rank].samples} samples") for rank in ranks],
            fan_out,
            "1 samples",
        ),
        Band([box(f"w {step.weight:+.5f}", "forward") for step in steps], label="2 model"),
        Band([box(f"g {step.gradient:+.5f}", "backward") for step in steps], label="3 gradient"),
        Band([average], render.meant_arrows(ranks, [0]), "4 average"),
        Band([box(f"w {step.new_weight:+.5f}", "optimizer") for step in steps], fan_out, "5 step"),
    ]
    difference = max(step.difference for step in steps)
    about = (
        f"One weight w and its gradient g on {size} ranks. After the step the replicas differ "
        f"by {difference:g}."
    )
    return bands_scene("Synchronous SGD in five phases", bands, about, DASHED)


@figure("F12", "ladder/after_backward", FLAT, "all-reduce after backward")
def after_backward(run: Evidence) -> Scene:
    return averaging(run, "All-reduce after backward")


@figure("F13", "ladder/inside_backward", OVERLAPPED, "all-reduce inside backward")
def inside_backward(run: Evidence) -> Scene:
    return averaging(run, "All-reduce inside backward")


@figure("bert", "bert/step", BERT, "a step of BERT: buckets leave while backward goes on")
def bert_step(run: Evidence) -> Scene:
    return averaging(run, "A step of BERT by DistributedDataParallel")


def averaging(run: Evidence, title: str) -> Scene:
    """The last step, with a caption on when averaging began and ended in it."""
    step = run.last_step
    lines = []
    for rank in step.ranks:
        backward = [
            event for event in rank.events if event.kind == COMPUTE and event.name == "backward"
        ]
        calls = [event for event in rank.events if event.kind in (COLLECTIVE, BUCKET)]
        if backward and calls:
            spans = (
                (each[0].start * 1e3, max(event.end for event in each) * 1e3)
                for each in (backward, calls)
            )
            first, last = (f"{start:.2f} to {end:.2f} ms" for start, end in spans)
            lines.append(f"Rank {rank.rank}: backward {first}; averaging {last}.")
    lines.append("What the backend sends inside an all-reduce cannot be seen.")
    scene = lay_out(step, title)
    scene.caption = lines
    return scene


def shares_of(rung: Rung, whole: Rung) -> dict[str, float]:
    """The parts of a rung's step, as shares of the step of another."""
    seconds = sum(getattr(whole, part) for part in PARTS)
    return {part: getattr(rung, part) / seconds for part in PARTS}


@figure("F14", "ladder/step_parts", LADDER, "what a training step's time goes into, rung by rung")
def normalised_parts(run: Evidence) -> Scene:
    scene, bars = Scene("What a training step's time goes into"), []
    result: LadderResult = run.results[0]
    for rung in result.rungs:
        name, shares = rung.rung, shares_of(rung, rung).items()
        pieces = [
            piece(share, PARTS[part], f"{name}: {part}", f"{share:.2f}") for part, share in shares
        ]
        bars.append((name, pieces, f"{sum(getattr(rung, part) for part in PARTS) * 1e3:.3g} ms"))
    add_bars(scene, bars, most=1.0)
    add_key(scene, KEY)
    about = "Shares of each step; communication is what is exposed: not hidden behind backward."
    return scene.with_caption(f"{about} {len(run.results)} ranks.")


@figure("F15", "ladder/overlap", LADDER, "a step without and with overlap")
def with_and_without_overlap(run: Evidence) -> Scene:
    scene = Scene("A step without and with overlap")
    for pair in (("bucketed", "overlapped"), ("flat", "ddp")):
        bars = []
        for name in pair:
            rung = rung_of(run, name)
            shares = shares_of(rung, rung_of(run, pair[0]))
            pieces = [
                piece(share, PARTS[part], f"{name}: {part}") for part, share in shares.items()
            ]
            bars.append(
                (
                    f"{name:10}",
                    pieces,
                    f"{sum(shares.values()):.2f} ({rung.hidden * 100:3.0f} % hidden)",
                )
            )
        add_bars(scene, bars, most=1.3)
    add_key(scene, KEY)
    return scene.with_caption(
        "Of each pair the first is 1.00. Hidden: the share of the averaging's time alone that is "
        "not exposed.",
        f"Medians of the ladder's steps on {len(run.results)} ranks.",
    )


NAMES = 14 * CELL[0]
"""Width of the names, in pixels."""
BUCKET_ROW = 2 * CELL[1]


def bucket_style(number: int) -> str:
    return f"bucket {number % render.BUCKETS}"


def buckets_of(rank: RankRecording) -> list[tuple[Event, list[Event]]]:
    """The buckets of a backward pass in the order in which they left, each with its gradients:
    those that were ready first, as many as have its bytes."""
    ready = iter([event for event in rank.events if event.kind == GRADIENT])
    found = []
    for bucket in (event for event in rank.events if event.kind == BUCKET):
        its: list[Event] = []
        while sum(each.nbytes for each in its) < bucket.nbytes:
            its.append(next(ready))
        found.append((bucket, its))
    return found


@figure("F16", "ddp/buckets", DDP_NET, "DistributedDataParallel's buckets fill and leave")
def filling(run: Evidence) -> Scene:
    rank = run.last_step.ranks[0]
    scene, lines = Scene("Buckets fill in backward, the last layers' first"), []
    [backward] = [event for event in rank.events if event.name == "backward"]
    axis = render.TimeAxis(x=NAMES, start=backward.start, end=backward.end)

    def after(time: float) -> str:
        return f"{(time - backward.start) * 1e3:.2f} ms"

    for number, (_, gradients) in enumerate(buckets_of(rank)):
        for event in gradients:
            y, width = scene.bottom, max(axis.at(event.start) - NAMES, 1)
            add_lane(scene, event.name, NAMES, y, CELL[1])
            look = {
                "style": bucket_style(number),
                "title": f"{event.name} ready after {after(event.start)}",
            }
            scene.add(render.BAR, NAMES, y, width, CELL[1], **look)
    for number, (bucket, _) in enumerate(buckets_of(rank)):
        lines.append(
            f"{bucket.name} ({format_bytes(bucket.nbytes)}) left after {after(bucket.start)}, "
            f"its sum was there after {after(bucket.end)}"
        )
        y, left = scene.bottom + CELL[1], axis.at(bucket.start)
        add_lane(scene, bucket.name, NAMES, y, BUCKET_ROW)
        look = {"style": bucket_style(number), "title": lines[-1]}
        scene.add(render.BAR, left, y, max(axis.at(bucket.end) - left, 2), BUCKET_ROW, **look)
    over = f"backward over: {after(backward.end)}"
    scene.add(render.TEXT, NAMES, scene.bottom + CELL[1], text="0 ms", align="start", style="muted")
    scene.add(render.TEXT, axis.x + axis.w, scene.bottom, text=over, align="end", style="muted")
    return scene.with_caption(
        f"Rank 0 of {len(run.results)}. Above: how long backward takes to each gradient, in the "
        "colour of its bucket. "
        "Below: each bucket from when it leaves until its sum is there.",
        *(f"{line}." for line in lines),
    )


@figure("F19", "ddp/bucket", DDP_FOUR, "the same buckets on every rank")
def same_on_both(run: Evidence) -> Scene:
    scene, ranks = Scene("The same buckets on every rank"), run.last_step.ranks
    width = (render.WIDTH - CELL[0]) / len(ranks)
    for rank in ranks:
        add_process(scene, rank, CELL[0] + rank.rank * width, width - 2 * CELL[0])
    sent = [
        [[each.name for each in gradients] for _, gradients in buckets_of(rank)] for rank in ranks
    ]
    left = ", then ".join(bucket.name for bucket, _ in buckets_of(ranks[0]))
    return scene.with_caption(
        f"Gradients of {sum(map(len, sent[0]))} parameters on {len(ranks)} ranks; in this run the "
        "buckets are "
        f"{'the same' if all(each == sent[0] for each in sent) else 'NOT the same'} on all.",
        f"{left} left: a bucket leaves when all its gradients are ready, and the last parameters' "
        "are ready first.",
    )


def add_process(scene: Scene, rank: RankRecording, x: float, width: float) -> None:
    """Add a rank's parameters, each in its bucket, in the order in which the buckets left."""
    scene.add(render.TEXT, x, CELL[1] / 2, text=f"rank {rank.rank}", align="start")
    y, inner = 2.0 * CELL[1], width - 4 * CELL[0]
    for number, (bucket, gradients) in enumerate(buckets_of(rank)):
        height = (3 + 2.5 * len(gradients)) * CELL[1]
        label = f"{bucket.name}, {format_bytes(bucket.nbytes)}"
        look = {"style": bucket_style(number), "title": f"rank {rank.rank}: {label}"}
        scene.add(render.BOX, x, y, width, height, **look)
        scene.add(render.TEXT, x + CELL[0], y + CELL[1], text=label, align="start")
        for place, event in enumerate(gradients):
            text = render.shorten(f"{event.name}.grad", inner)
            scene.add(
                render.BOX,
                x + 2 * CELL[0],
                y + (2 + 2.5 * place) * CELL[1],
                inner,
                2 * CELL[1],
                text=text,
            )
        y += height + CELL[1]


@figure(
    "elastic",
    "elastic/attempts",
    ELASTIC,
    "ranks are killed, and the training goes on from a snapshot",
)
def attempts(run: Evidence) -> Scene:
    steps, starts, ends = steps_of_attempts(run)
    scene = Scene("A rank is killed; all restart, and resume from a snapshot")
    bars = []
    for number, pieces in enumerate(pieces_of_starts(starts, ends)):
        note = f"killed after {ends[number]}" if ends[number] < steps else f"step {steps}: the end"
        bars.append((f"attempt {number + 1}", pieces, note))
    add_bars(scene, bars, most=steps)
    add_key(scene, STEPS_KEY)
    return scene.with_caption(
        f"Training of {steps} steps on {len(run.results)} ranks, of which one is killed after step "
        f"{' and one after step '.join(map(str, ends[:-1]))}."
    )


STEPS_KEY = {"plain": "from a snapshot", "forward": "steps taken", "wait": "lost, and redone"}


def pieces_of_starts(starts: Sequence[int], ends: Sequence[int]) -> list[list[render.Mark]]:
    """The steps of a training that was started several times: for each start, the steps that it had
    from a snapshot, those that it took, and those of them that the next start took again."""
    bars = []
    for number, (start, end) in enumerate(zip(starts, ends, strict=True), 1):
        kept = min([end, *starts[number : number + 1]])
        pieces = [
            piece(start, "plain", f"{start} steps from a snapshot"),
            piece(kept - start, "forward", f"steps {start + 1} to {kept}"),
            piece(end - kept, "wait", f"{end - kept} steps that are redone"),
        ]
        bars.append(pieces)
    return bars


@figure(
    "hosts",
    "elastic/hosts",
    HOSTS,
    "the number of ranks changes, and the training goes on from a snapshot",
)
def hosts(run: Evidence) -> Scene:
    scene = Scene("A host leaves and another joins: all ranks restart, from the newest snapshot")
    bars = []
    starts, ends = [losses[0][0] - 1 for losses in run.results], [end for _, end in run.arguments]
    for number, (pieces, (size, _)) in enumerate(
        zip(pieces_of_starts(starts, ends), run.arguments, strict=True), 1
    ):
        bars += [
            (
                f"start {number}, rank {rank}",
                pieces,
                f"{'all' if size == 1 else f'1/{size}'} of each batch",
            )
            for rank in range(size)
        ]
    add_bars(scene, bars, most=ends[-1])
    add_key(scene, STEPS_KEY)
    seen = [dict(losses) for losses in run.results]
    twice = [
        abs(one[step] - next_[step])
        for one, next_ in pairwise(seen)
        for step in one.keys() & next_.keys()
    ]
    return scene.with_caption(
        f"Steps 1 to {ends[-1]}, each with the same batch, whatever the number of ranks. "
        f"{len(twice)} steps are taken twice, on different numbers of ranks: their losses differ "
        f"by {max(twice):.0e}."
    )


@figure("zero", "zero/step", ZERO, "the bytes that one rank holds over a step, by four ways")
def bytes_over_a_step(run: Evidence) -> Scene:
    ways: Sequence[CountedStep] = run.results[0]
    most = max(way.peak for way in ways)
    scene = Scene("The bytes that one rank holds over a training step, by four ways")
    for way in ways:
        y = scene.bottom + CELL[1]
        held = [(what, nbytes) for what, part in way.series.items() for nbytes in part]
        scene.add(
            render.TEXT,
            CELL[0],
            y,
            text=f"{way.way}: at most {format_bytes(round(way.peak))}",
            align="start",
        )
        bottom, x = y + CURVE + CELL[1], float(CELL[0])
        for column in range(COLUMNS):
            taken = (
                held[len(held) * column // COLUMNS : max(1, len(held) * (column + 1) // COLUMNS)]
                or held[-1:]
            )
            what, nbytes = max(taken, key=lambda each: each[1])
            height = CURVE * nbytes / most
            look = {
                "style": PHASES[what],
                "title": f"{way.way}: {format_bytes(nbytes)} in {PHASES[what]}",
            }
            scene.add(
                render.LANE, x, bottom - height, (WIDTH - 2 * CELL[0]) / COLUMNS, height, **look
            )
            x += (WIDTH - 2 * CELL[0]) / COLUMNS
    add_key(scene, {style: style for style in PHASES.values()})
    return scene.with_caption(
        f"After each operation, counted on one of {len(run.results)} ranks; parameters of "
        f"{format_bytes(round(ways[0].model_bytes))}, one sequence for each rank."
    )


@figure(
    "experts",
    "experts/rows",
    ROUTED,
    "tokens from each rank to each expert, without and with the balance loss",
)
def routed_tokens(run: Evidence) -> Scene:
    settings: ExpertsSettings = run.arguments[0]
    ways = dict(zip(settings.ways, run.results[0], strict=True))
    tables = {way: counted.after_capacity[0] for way, counted in ways.items()}
    most = max(sum(column) for table in tables.values() for column in zip(*table, strict=True))
    pitch = (WIDTH - 2 * CELL[0]) / EXPERTS
    scene = Scene("Tokens from each rank to each expert, without and with the balance loss")
    for way, table in tables.items():
        y = scene.bottom + 2 * CELL[1]
        scene.add(
            render.TEXT, CELL[0], y, text=f"{way} (balance loss times {WAYS[way]:g})", align="start"
        )
        for expert, column in enumerate(zip(*table, strict=True)):
            x, bottom = CELL[0] + expert * pitch, y + CURVE + CELL[1]
            label = f"{expert}: rank {expert * settings.size // EXPERTS}"
            scene.add(render.TEXT, x + pitch / 2, bottom + CELL[1], text=label, style="muted")
            for rank, tokens in enumerate(column):
                height = CURVE * tokens / most
                bottom -= height
                look = {
                    "style": bucket_style(rank),
                    "title": f"rank {rank} to expert {expert}: {tokens} tokens",
                }
                text = str(tokens) if height >= CELL[1] else ""
                scene.add(
                    render.BAR, x + CELL[0] / 2, bottom, pitch - CELL[0], height, text=text, **look
                )
    add_key(scene, {bucket_style(rank): f"from rank {rank}" for rank in range(settings.size)})
    return scene.with_caption(
        "Below each column, the expert and its rank. The tokens of the first block in step "
        f"{settings.steps}, "
        f"on {settings.size} ranks; each is sent to {K} experts."
    )


def steps_of_attempts(run: Evidence) -> tuple[int, list[int], list[int]]:
    """The number of steps of the training, and for each attempt the numbers of steps at its start
    and at its end."""
    settings: TrainingSettings = run.arguments[0]
    steps = settings.epochs * ceil((settings.limit or 0) / settings.batch_size)
    ends = [event["killed"] for _, event in run.reports if "killed" in event]
    resumed = [
        event["resumed"]["total"] for rank, event in run.reports if rank == 0 and "resumed" in event
    ]
    starts = [0] * (1 + len(ends) - len(resumed)) + resumed
    return steps, starts, [*ends, steps]


@figure(
    "pipeline", "pipeline/schedules", PIPELINE, "a pipeline's stages at work, by three schedules"
)
def schedules(run: Evidence) -> Scene:
    settings: PipelineSettings = run.arguments[0]
    stages, microbatches = settings.size, settings.microbatches
    by_schedule = zip(settings.schedules, zip(*run.results, strict=True), strict=True)
    steps = {name: typical_step(ranks) for name, ranks in by_schedule}
    scene = Scene("A pipeline's stages at work, by three schedules")
    longest = max(map(span, steps.values()))
    axis = render.TimeAxis(x=LABELS, start=0.0, end=longest)
    for name, step in steps.items():
        add_schedule(scene, name, step, axis)
    add_key(scene, {"forward": "forward", "backward": "backward of a microbatch"})
    bubbles = ", ".join(f"{bubble(step):.0%} with {name}" for name, step in steps.items())
    return scene.with_caption(
        f"A batch of {microbatches} microbatches on {stages} stages; each lane is a stage, its "
        "gaps are the bubble: "
        f"{bubbles}."
    )


def add_schedule(scene: Scene, name: str, step: Step, axis: render.TimeAxis) -> None:
    """Add a lane for each stage, with the step whose bubble is the median."""
    began = min(slot.start for rank in step for slot in rank)
    y = scene.bottom + (CELL[1] if scene.marks else 0)
    title = f"{name}: {span(step) * 1e3:,.0f} ms"
    scene.add(render.TEXT, CELL[0], y + CELL[1] / 2, text=title, align="start")
    for stage, slots in enumerate(step):
        y += 1.5 * ROW
        add_lane(scene, f"stage {stage}", axis.x, y, ROW, style="muted")
        for slot in slots:
            start, end = slot.start - began, slot.end - began
            left, width = axis.at(start), axis.at(end) - axis.at(start)
            style = "forward" if slot.kind == "F" else "backward"
            text = str(slot.microbatch) if width > CELL[0] else ""
            title = f"{style} of microbatch {slot.microbatch}, {(end - start) * 1e3:.3g} ms"
            scene.add(render.BAR, left, y, width, ROW, style=style, text=text, title=title)


@figure("parameter-server", "parameter_server/modes", SERVER, "when workers wait, in three modes")
def server_modes(run: Evidence) -> Scene:
    settings: ServerSettings = run.arguments[0]
    scene = Scene("Three workers, one of them slow: who computes, and who waits")
    waits = {
        mode: [worker[number] for worker in run.results[1:]]
        for number, mode in enumerate(settings.modes)
    }
    axis = render.TimeAxis(
        x=LABELS,
        start=0.0,
        end=max(spans[-1][1] for of_mode in waits.values() for spans in of_mode),
    )
    for mode, of_mode in waits.items():
        y = scene.bottom + (CELL[1] if scene.marks else 0)
        end = max(spans[-1][1] for spans in of_mode)
        scene.add(
            render.TEXT,
            CELL[0],
            y + CELL[1] / 2,
            text=f"{mode}: {end * 1e3:,.0f} ms",
            align="start",
        )
        for worker, spans in enumerate(of_mode):
            y += 1.5 * ROW
            add_lane(scene, f"worker {worker}", axis.x, y, ROW, style="muted")
            computing = [(one[1], other[0]) for one, other in pairwise(spans)]
            for style, pieces in (("compute", computing), ("wait", spans)):
                for left, right in ((axis.at(start), axis.at(end)) for start, end in pieces):
                    scene.add(
                        render.BAR,
                        left,
                        y,
                        right - left,
                        ROW,
                        style=style,
                        title=f"worker {worker}: {style}",
                    )
    add_key(scene, {"compute": "computes a gradient", "wait": "waits for the server"})
    about = (
        f"{settings.steps * (len(run.results) - 1)} gradients in each mode; the last worker takes"
    )
    return scene.with_caption(
        f"{about} {settings.slow_worker:g} times as long. Stale: at most {settings.staleness} "
        "ahead."
    )
