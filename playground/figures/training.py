"""Figures of training: the parts of a step, where in it gradients are averaged, and how much of
that is hidden; buckets as they leave; steps on ranks that are killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playground.base.remote import remote
from playground.explain.replay.record.recording import (
    BUCKET,
    COLLECTIVE,
    GRADIENT,
    Event,
    RankRecording,
)
from playground.explain.replay.render.bands import (
    Band,
    bands_scene,
    box,
    meant_arrows,
    panels_scene,
)
from playground.explain.replay.render.bars import add_bars, add_key, add_lanes, bar, piece
from playground.explain.replay.render.scene import (
    ALPHA,
    BOX,
    BUCKETS,
    CELL,
    LANE,
    WIDTH,
    Mark,
    Scene,
    TimeAxis,
)
from playground.explain.replay.render.timeline import LABELS, lay_out
from playground.figures.collectives import DASHED
from playground.figures.counted_step import CountedStep, CountSettings
from playground.figures.figure import ChangingRun, Evidence, FigureRun, figure, work_of
from playground.training import prepare
from playground.training.step_results import StepResult, Variant
from playground.training.step_settings import StepSettings
from playground.ui.units import format_bytes

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


def elastic_run(
    name: str, size: int, images: int, epochs: int, every: int, kill: int, restarts: int
) -> FigureRun:
    """Trainings with a snapshot every so many steps, whose starts but the last are killed."""

    def arguments(folder: Path) -> tuple[object, ...]:
        draw_digits(folder)
        return folder, images, epochs, every, kill, restarts

    work = work_of("elastic_start")
    return FigureRun(name, work, size, arguments, restarts=restarts)


SGD_ON_THREE = FigureRun("sgd on three", work_of("sgd_step"), 3)
FLAT, OVERLAPPED = (
    FigureRun(variant, work_of("rung_steps"), 2, (variant,), recorded=True)
    for variant in ("flat", "overlapped")
)
LINK = 0.25
"""Gbit/s of a link on which averaging takes about as long as backward."""
VARIANTS = ("per-parameter", "flat", "bucketed", "overlapped", "ddp")
"""What the lesson ladder has: of those that are measured, the ones that are drawn."""
LADDER = FigureRun(
    "ladder",
    remote("playground.training.step_times:run"),
    2,
    on_digits(StepSettings, steps=30, link=LINK),
)
BERT = FigureRun("bert", work_of("bert_steps"), 2, recorded=True)
ELASTIC = elastic_run("elastic", 4, 480, epochs=2, every=4, kill=7, restarts=2)
HOSTS = ChangingRun(
    "hosts", remote("playground.lessons.elastic.hosts:run"), 2, ends=((2, 10), (1, 21), (2, 32))
)
SERVER = FigureRun(
    "parameter-server",
    work_of("server_modes"),
    4,
    (6, 3, 1),
)
SERVER_LOSSES = FigureRun("server losses", work_of("server_losses"), 5)
METHODS = {"ddp": "data_parallel", "zero-1": "zero1", "zero-2": "zero2", "zero-3": "zero3"}
"""By name of the gradient synchronisation, the function in the program of zero."""
ZERO = FigureRun(
    "zero",
    remote("playground.figures.counting:count_methods"),
    4,
    (CountSettings(methods=tuple(METHODS), layers=6),),
)
ROUTED = FigureRun(
    "experts",
    work_of("routed_rows"),
    2,
)
DDP_NET, DDP_FOUR = (
    FigureRun(name, work_of("ddp_backward"), 2, (model,), recorded=True)
    for name, model in (("ddp", "net"), ("ddp, four parameters", "four"))
)
PARTS = {
    "forward": "forward",
    "backward": "backward",
    "exposed": "communication",
    "step": "optimizer",
}
"""Parts of a step as `bench steps` measures them, and their styles."""
PHASES = {"forward": "forward", "synced": "backward", "step": "optimizer"}
"""Styles of a step's phases, by the moment that ends them."""
COLUMNS, CURVE = 78, 6 * CELL.height
"""Columns of a curve over a step, and its height."""
KEY = {style: style for style in PARTS.values()}
FORMULAS = {"backward": "∂J/∂θ", "optimizer": f"θ = θ - {ALPHA} ∂J/∂θ"}
"""Formulas of backward and the optimizer; J is the loss."""


def variant_of(run: Evidence, name: str) -> Variant:
    """Rank 0's measurements on this variant."""
    result: StepResult = run.results[0]
    return next(variant for variant in result.variants if variant.name == name)


@figure("F3", "tools/bench/figures/backward_step", LADDER)
def backward_and_step(run: Evidence) -> Scene:
    variant = variant_of(run, "flat")
    scene = Scene("Backward computes the gradient, step applies it")
    for number, (name, formula) in enumerate(FORMULAS.items()):
        look = {"style": name, "text": f"{name}\n{formula}", "title": f"{name}: {formula}"}
        scene.add(BOX, CELL.width + 320 * number, 0, 296, 64, **look)
    bars = []
    for part in ("forward", "backward", "step"):
        time = f"{getattr(variant, part) * 1e3:.3g} ms"
        bars.append((part, [piece(getattr(variant, part), PARTS[part], f"{part}: {time}")], time))
    add_bars(scene, bars)
    return scene.with_caption(
        f"backward takes {variant.backward / variant.step:.3g} times as long as step. "
        f"Medians of steps with one message ({variant.name}) on {len(run.results)} ranks."
    )


@figure("F11", "lessons/sgd/figures/ddp", SGD_ON_THREE)
def five_phases(run: Evidence) -> Scene:
    steps: Sequence[SgdStep] = run.results
    size, ranks = len(steps), range(len(steps))
    fan_out = meant_arrows([0], ranks)
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
        Band([average], meant_arrows(ranks, [0]), "4 average"),
        Band([box(f"w {step.new_weight:+.5f}", "optimizer") for step in steps], fan_out, "5 step"),
    ]
    difference = max(step.difference for step in steps)
    about = (
        f"One weight w and its gradient g on {size} ranks. After the step the replicas differ "
        f"by {difference:g}."
    )
    return bands_scene("Synchronous SGD in five phases", bands, about, DASHED)


@figure("F12", "lessons/ladder/figures/after_backward", FLAT)
def after_backward(run: Evidence) -> Scene:
    return averaging(run, "All-reduce after backward")


@figure("F13", "lessons/ladder/figures/inside_backward", OVERLAPPED)
def inside_backward(run: Evidence) -> Scene:
    return averaging(run, "All-reduce inside backward")


@figure("bert", "lessons/bert/figures/step", BERT)
def bert_step(run: Evidence) -> Scene:
    return averaging(run, "A step of BERT by DistributedDataParallel")


def averaging(run: Evidence, title: str) -> Scene:
    """The last step, with a caption on when averaging began and ended in it."""
    step, lines = run.last_step, []

    def format_span(events: Sequence[Event]) -> str:
        start = events[0].start - step.start
        end = max(event.end for event in events) - step.start
        return f"{start * 1e3:.2f} to {end * 1e3:.2f} ms"

    for rank in step.ranks:
        backward = [event for event in rank.events if event.name == "backward"]
        calls = [event for event in rank.events if event.kind in (COLLECTIVE, BUCKET)]
        if backward and calls:
            first, last = format_span(backward), format_span(calls)
            lines.append(f"Rank {rank.rank}: backward {first}; averaging {last}.")
    lines.append("What the backend sends inside an all-reduce cannot be seen.")
    scene = lay_out(step, title)
    scene.caption = lines
    return scene


def parts_of(variant: Variant) -> dict[str, float]:
    """The seconds of the parts of a variant's step."""
    return {part: getattr(variant, part) for part in PARTS}


def pieces_of(variant: Variant, whole: float, *, with_text: bool) -> list[Mark]:
    """The parts of a variant's step, as shares of `whole` seconds."""
    shares = {part: seconds / whole for part, seconds in parts_of(variant).items()}
    return [
        piece(share, PARTS[part], f"{variant.name}: {part}", f"{share:.2f}" if with_text else "")
        for part, share in shares.items()
    ]


@figure("F14", "tools/bench/figures/step_parts", LADDER)
def normalised_parts(run: Evidence) -> Scene:
    scene, bars = Scene("What a training step's time goes into"), []
    for variant in (variant_of(run, name) for name in VARIANTS):
        seconds = sum(parts_of(variant).values())
        pieces = pieces_of(variant, seconds, with_text=True)
        bars.append((variant.name, pieces, f"{seconds * 1e3:.3g} ms"))
    add_bars(scene, bars, most=1.0)
    add_key(scene, KEY)
    about = "Shares of each step; communication is what is exposed: not hidden behind backward."
    return scene.with_caption(about, f"{len(run.results)} ranks, over links of {LINK} Gbit/s.")


@figure("F15", "tools/bench/figures/overlap", LADDER)
def with_and_without_overlap(run: Evidence) -> Scene:
    scene = Scene("A step without and with overlap")
    for pair in (("bucketed", "overlapped"), ("flat", "ddp")):
        variants, bars = [variant_of(run, name) for name in pair], []
        whole = sum(parts_of(variants[0]).values())
        for variant in variants:
            share = sum(parts_of(variant).values()) / whole
            note = f"{share:.2f} ({variant.hidden * 100:3.0f} % hidden)"
            bars.append((f"{variant.name:10}", pieces_of(variant, whole, with_text=False), note))
        add_bars(scene, bars, most=1.3)
    add_key(scene, KEY)
    return scene.with_caption(
        "Of each pair the first is 1.00. Hidden: the share of the averaging's time alone that is "
        "not exposed.",
        f"Medians of steps on {len(run.results)} ranks, over links of {LINK} Gbit/s.",
    )


NAMES = 14 * CELL.width
"""Width of the names, in pixels."""


def bucket_style(number: int) -> str:
    return f"bucket {number % BUCKETS}"


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


@figure("F16", "lessons/ddp/figures/buckets", DDP_NET)
def filling(run: Evidence) -> Scene:
    rank = run.last_step.ranks[0]
    scene, lines = Scene("Buckets fill in backward, the last layers' first"), []
    [backward] = [event for event in rank.events if event.name == "backward"]
    axis = TimeAxis(x=NAMES, start=backward.start, end=backward.end)

    def after(time: float) -> str:
        return f"{(time - backward.start) * 1e3:.2f} ms"

    ready, left = {}, {}
    for number, (bucket, gradients) in enumerate(buckets_of(rank)):
        style = bucket_style(number)
        for event in gradients:
            title = f"{event.name} ready after {after(event.start)}"
            ready[event.name] = [bar(backward.start, event.start, style, title)]
        lines.append(
            f"{bucket.name} ({format_bytes(bucket.nbytes)}) left after {after(bucket.start)}, "
            f"its sum was there after {after(bucket.end)}"
        )
        left[bucket.name] = [bar(bucket.start, bucket.end, style, lines[-1])]
    add_lanes(scene, "backward until each gradient, in the colour of its bucket", axis, ready)
    add_lanes(scene, "each bucket from when it leaves until its sum is there", axis, left)
    y, over = scene.bottom + CELL.height, f"backward over: {after(backward.end)}"
    scene.write("0 ms", NAMES, y, style="muted")
    scene.write(over, axis.x + axis.w, y, "end", style="muted")
    return scene.with_caption(f"Rank 0 of {len(run.results)}.", *(f"{line}." for line in lines))


@figure("F19", "lessons/ddp/figures/bucket", DDP_FOUR)
def same_on_both(run: Evidence) -> Scene:
    ranks = run.last_step.ranks
    sent = [
        [[each.name for each in gradients] for _, gradients in buckets_of(rank)] for rank in ranks
    ]
    left = ", then ".join(bucket.name for bucket, _ in buckets_of(ranks[0]))
    return panels_scene(
        "The same buckets on every rank",
        [(f"rank {rank.rank}", [*bucket_bands(rank)]) for rank in ranks],
        f"Gradients of {sum(map(len, sent[0]))} parameters on {len(ranks)} ranks; in this run the "
        f"buckets are {'the same' if all(each == sent[0] for each in sent) else 'NOT the same'} on "
        "all of them.",
        f"{left} left: a bucket leaves when all its gradients are ready, and the last parameters' "
        "are ready first.",
    )


def bucket_bands(rank: RankRecording) -> Iterator[Band]:
    """A box for each bucket with its gradients, in the order in which the buckets left."""
    for number, (bucket, gradients) in enumerate(buckets_of(rank)):
        names = [f"{event.name}.grad" for event in gradients]
        text = "\n".join([f"{bucket.name}, {format_bytes(bucket.nbytes)}", *names])
        yield Band([box(text, bucket_style(number))])


@figure("elastic", "lessons/elastic/figures/attempts", ELASTIC)
def attempts(run: Evidence) -> Scene:
    steps, starts, ends = steps_of_attempts(run)
    scene = Scene("A rank is killed; all restart, and resume from a snapshot")
    bars = []
    for number, pieces in enumerate(pieces_of_starts(starts, ends)):
        note = f"killed after {ends[number]}" if ends[number] < steps else f"step {steps}: the end"
        bars.append((f"start {number}", pieces, note))
    add_bars(scene, bars, most=steps)
    add_key(scene, STEPS_KEY)
    return scene.with_caption(
        f"Training of {steps} steps on {len(run.results)} ranks, of which one is killed after step "
        f"{' and one after step '.join(map(str, ends[:-1]))}."
    )


STEPS_KEY = {"plain": "from a snapshot", "forward": "steps taken", "wait": "lost, and redone"}


def pieces_of_starts(starts: Sequence[int], ends: Sequence[int]) -> list[list[Mark]]:
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


@figure("hosts", "lessons/elastic/figures/hosts", HOSTS)
def hosts(run: Evidence) -> Scene:
    scene = Scene("A host leaves and another joins: all ranks restart, from the newest snapshot")
    sizes, ends = zip(*run.arguments, strict=True)
    starts = [losses[0][0] - 1 for losses in run.results]
    bars = [
        (
            f"start {start}, rank {rank}",
            pieces,
            f"{'all' if size == 1 else f'1/{size}'} of each batch",
        )
        for start, (pieces, size) in enumerate(
            zip(pieces_of_starts(starts, ends), sizes, strict=True), 1
        )
        for rank in range(size)
    ]
    add_bars(scene, bars, most=ends[-1])
    add_key(scene, STEPS_KEY)
    seen = [dict(losses) for losses in run.results]
    twice = [
        abs(one[step] - other[step])
        for one, other in pairwise(seen)
        for step in one.keys() & other.keys()
    ]
    return scene.with_caption(
        f"Steps 1 to {ends[-1]}, each with the same batch, whatever the number of ranks. "
        f"{len(twice)} steps are taken twice, on different numbers of ranks: their losses differ "
        f"by {max(twice):.0e}."
    )


@figure("zero", "lessons/zero/figures/step", ZERO)
def bytes_over_a_step(run: Evidence) -> Scene:
    steps: Sequence[CountedStep] = run.results[0]
    most = max(step.peak for step in steps)
    scene = Scene("The bytes that one rank holds over a training step, by four methods")
    width = (WIDTH - 2 * CELL.width) / COLUMNS
    for step in steps:
        y = scene.bottom + CELL.height
        method = METHODS[step.method]
        scene.write(f"{method}: at most {format_bytes(round(step.peak))}", CELL.width, y)
        held = [(nbytes, what) for what, part in step.series.items() for nbytes in part]
        for column in range(COLUMNS):
            first, end = (len(held) * each // COLUMNS for each in (column, column + 1))
            nbytes, what = max(held[first : max(1, end)] or held[-1:], key=lambda each: each[0])
            x, height = CELL.width + column * width, CURVE * nbytes / most
            title = f"{method}: {format_bytes(nbytes)} in {PHASES[what]}"
            look = {"style": PHASES[what], "title": title}
            scene.add(LANE, x, y + CELL.height + CURVE - height, width, height, **look)
    add_key(scene, {style: style for style in PHASES.values()})
    return scene.with_caption(
        f"After each operation, counted on one of {len(run.results)} ranks; parameters of "
        f"{format_bytes(round(steps[0].model_bytes))}, one sequence for each rank."
    )


@figure("experts", "lessons/experts/figures/rows", ROUTED)
def routed_rows(run: Evidence) -> Scene:
    by_balance: Sequence[Mapping[float, list[int]]] = run.results
    size, experts = len(by_balance), len(next(iter(by_balance[0].values())))
    tables = {balance: [rows[balance] for rows in by_balance] for balance in by_balance[0]}
    most = max(sum(rows) for table in tables.values() for rows in zip(*table, strict=True))
    scene = Scene("Rows from each rank to each expert, without and with a bias that balances")
    for balance, table in tables.items():
        scene.write(f"balance {balance:.2f}", CELL.width, scene.bottom + CELL.height)
        bars = []
        for expert, column in enumerate(zip(*table, strict=True)):
            label = f"expert {expert} on rank {expert * size // experts}"
            pieces = [
                piece(rows, bucket_style(rank), f"{label}: from rank {rank}", str(rows))
                for rank, rows in enumerate(column)
            ]
            bars.append((label, pieces, f"{sum(column)}"))
        add_bars(scene, bars, most=most)
    add_key(scene, {bucket_style(rank): f"from rank {rank}" for rank in range(size)})
    return scene.with_caption(
        f"The rows of the first block in the last step of lesson.py's training, on {size} ranks."
    )


def steps_of_attempts(run: Evidence) -> tuple[int, list[int], list[int]]:
    """The number of steps of the training, and for each attempt the numbers of steps at its start
    and at its end."""
    steps = run.results[0]
    ends = [event["killed"] for _, event in run.reports if "killed" in event]
    starts = [event["resumed"] for rank, event in run.reports if rank == 0 and "resumed" in event]
    return steps, starts, [*ends, steps]


@figure("parameter-server", "lessons/parameter_server/figures/modes", SERVER)
def server_modes(run: Evidence) -> Scene:
    steps, slower, ahead = run.arguments
    scene = Scene("Three workers, one of them slow: who computes, and who waits")
    by_rank: Sequence[Mapping[str, tuple[Sequence[tuple[float, float]], float]]] = run.results
    ends = {mode: end for mode, (_, end) in by_rank[0].items()}
    axis = TimeAxis(x=LABELS, start=0.0, end=max(ends.values()))
    for mode, end in ends.items():
        lanes = {}
        for worker, found in enumerate(by_rank[1:], 1):
            computing = found[mode][0]
            waits = pairwise([0.0, *(time for span in computing for time in span), end])
            lanes[f"worker {worker}"] = [
                bar(start, stop, style, f"worker {worker}: {style}")
                for style, spans in (("compute", computing), ("wait", [*waits][::2]))
                for start, stop in spans
            ]
        add_lanes(scene, f"{mode}: {end * 1e3:,.0f} ms", axis, lanes)
    add_key(scene, {"compute": "computes a gradient", "wait": "waits for the server"})
    return scene.with_caption(
        f"{steps * (len(by_rank) - 1)} gradients in each mode; the last worker takes {slower} "
        f"times as long. bounded: at most {ahead} ahead."
    )


@figure("server-loss", "lessons/parameter_server/figures/loss", SERVER_LOSSES, is_played=False)
def server_losses(run: Evidence) -> Scene:
    curves: Mapping[str, Sequence[tuple[float, float]]] = run.results[0]
    scene = Scene("The loss over time, without a server and in three modes of one")
    longest = max(curve[-1][0] for curve in curves.values())
    most = max(loss for curve in curves.values() for _, loss in curve)
    width = (WIDTH - 2 * CELL.width) / COLUMNS
    for name, curve in curves.items():
        y, end = scene.bottom + CELL.height, curve[-1][0]
        scene.write(f"{name}: loss {curve[-1][1]:.2f} after {end:.1f} s", CELL.width, y)
        for column in range(COLUMNS):
            time = longest * column / COLUMNS
            loss = next((loss for seconds, loss in curve if seconds >= time), None)
            if loss is not None:
                height = CURVE / 2 * loss / most
                look = {"style": "compute", "title": f"{name}: {loss:.2f} after {time:.1f} s"}
                x = CELL.width + column * width
                scene.add(LANE, x, y + CELL.height + CURVE / 2 - height, width, height, **look)
    return scene.with_caption(
        f"{len(run.results) - 1} workers, the last of them slow. Each curve ends when the same "
        f"number of gradients is used; the time axis, {longest:.1f} s, is the same for all."
    )
