"""Figures of DataParallel: one process, several devices, what a step moves between them, and what
they hold.

Every copy from one device to another is recorded, and so is what each device's thread and the
optimizer compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from playground.explain.replay.analyse.timeline import ref_of
from playground.explain.replay.record.recording import (
    BACKGROUND,
    COMPUTE,
    MOVE,
    PHASE,
    Event,
    read_move,
)
from playground.explain.replay.render.bands import Band, Panel, arrow, box, panels_scene
from playground.explain.replay.render.bars import add_bars, add_key, piece
from playground.explain.replay.render.scene import Mark, Scene
from playground.explain.replay.render.timeline import shape_text, title_of
from playground.figures.figure import Evidence, FigureRun, figure, work_of
from playground.ui.units import format_bytes

if TYPE_CHECKING:
    from playground.figures.ranks import DataParallelStep, DeviceLoad

STEPS = FigureRun("data-parallel", work_of("data_parallel_steps"), 1, recorded=True)
MEMORY = FigureRun("data-parallel, memory", work_of("data_parallel_memory"), 1)
HOST = "cpu"
"""The device of the batches."""
LOGITS, LOSS, OUTPUTS = "logits", "loss", "outputs"
"""Ways to the loss, named after what is gathered, or is not."""
GRADIENTS, REDUCE = "backward of gather", "backward of replicate"
"""The parts of a step that move gradients of outputs, and gradients of parameters."""
RECORDED = "Copies as they were recorded; the bytes at an arrow are those of each in its panel."


def device_number(device: str) -> int:
    """The number of a device: 2 for cpu:2; 0 for the host, which is alone in its row."""
    return int(device.partition(":")[2] or 0)


class Devices:
    """Panels of a step: devices in a row, the same devices below, and what was moved between."""

    def __init__(self, run: Evidence, way: str) -> None:
        """The step by this way, on the only rank."""
        steps: Sequence[DataParallelStep] = run.results[0]
        number = next(number for number, step in enumerate(steps) if step.gather == way)
        self.step = steps[number]
        self.count = len(steps[number].chunks)
        recorded: list[list[Event]] = [[]]  # each step ends with the optimizer's
        for event in run.recorded.ranks[0].events:
            recorded[-1].append(event)
            if event.kind == COMPUTE and event.name == "step":
                recorded.append([])
        self.events = recorded[number]
        self.chunks, self.outputs = (
            [*map(shape_text, shapes)] for shapes in (self.step.chunks, self.step.outputs)
        )

    def row(
        self, texts: str | Sequence[str], style: str = "plain", arrows: Sequence[Mark] = ()
    ) -> Band:
        """A box for each device, with the same text or with its own; those without a text are
        idle."""
        each_text = [texts] * self.count if isinstance(texts, str) else texts
        boxes = [
            box(f"dev {number}\n{text or '-'}", style if text else "idle")
            for number, text in zip_longest(range(self.count), each_text, fillvalue="")
        ]
        return Band(boxes, arrows)

    def copies(self, part: str) -> list[Event]:
        """The copies that a part of the step made, in order."""
        moves = (event for event in self.events if event.kind == MOVE)
        return [event for event in moves if read_move(event.name).part == part]

    def moved(self, part: str, chosen: slice = slice(None)) -> list[Mark]:
        """An arrow for all of a part's copies between the same two devices; the last one says how
        many bytes."""
        found: dict[tuple[str, str], list[Event]] = {}
        for event in self.copies(part)[chosen]:
            move = read_move(event.name)
            found.setdefault((move.source, move.target), []).append(event)
        arrows = []
        for place, ((source, target), events) in enumerate(found.items(), 1):
            nbytes = format_bytes(sum(event.nbytes for event in events))
            text = nbytes if place == len(found) else ""
            title = f"{part}: {'host' if source == HOST else source} → {target}, {nbytes}"
            ends = device_number(source), device_number(target)
            arrows.append(arrow(*ends, text, title=title, event=ref_of(events[0])))
        return arrows

    def computed(self, events: Sequence[Event]) -> list[Mark]:
        """An arrow from each device to itself, for a recorded event."""
        return [
            arrow(at, at, "", "muted", title=title_of(event), event=ref_of(event))
            for at, event in enumerate(events)
        ]

    def work(self, turn: int = 0) -> list[Mark]:
        """What each device's thread does: first in the step, or later."""
        by_device: list[list[Event]] = [[] for _ in range(self.count)]
        for event in self.events:
            if event.kind == PHASE and event.lane == BACKGROUND:
                by_device[device_number(event.name)].append(event)
        return self.computed([events[turn] for events in by_device])

    def compute(self, name: str) -> Event:
        """The event of what the process did for all devices: backward, or the optimizer's step."""
        return next(event for event in self.events if event.kind == COMPUTE and event.name == name)

    def traffic(self, *parts: str) -> str:
        """The bytes that these parts move in all, in words."""
        totals = {part: sum(event.nbytes for event in self.copies(part)) for part in parts}
        return "; ".join(f"{part} {format_bytes(total)}" for part, total in totals.items())

    def scatter(self, title: str, chosen: slice = slice(None)) -> Panel:
        host = Band([box(f"host {shape_text(self.step.batch)}")])
        return title, [host, self.row(self.chunks, "value", self.moved("scatter", chosen))]

    def replicate(self) -> Panel:
        copies = self.row("model", "forward", self.moved("replicate"))
        return "broadcast the model", [self.row(["model"]), copies]

    def forward(self, title: str) -> Panel:
        return title, [self.row(self.chunks), self.row(self.outputs, "forward", self.work())]

    def reduce(self) -> Panel:
        summed = self.row(["sum"], "communication", self.moved(REDUCE))
        return "reduce the gradients on device 0", [self.row("grads", "backward"), summed]

    def gather_losses(self, title: str) -> Panel:
        """A number on each device, and their mean."""
        return title, [self.row("loss"), self.row(["mean"], "value", self.moved("gather"))]


def numbered_scene(title: str, panels: Sequence[Panel], *caption: str) -> Scene:
    """The scene of panels that are numbered from 1 on."""
    numbered = [(f"{number} {name}", bands) for number, (name, bands) in enumerate(panels, 1)]
    return panels_scene(title, numbered, *caption)


@figure("F1", "lessons/data_parallel/figures/dp_forward", STEPS)
def forward(run: Evidence) -> Scene:
    devices = Devices(run, LOGITS)
    outputs = devices.step.outputs
    whole = shape_text((sum(shape[0] for shape in outputs), *outputs[0][1:]))
    gathered = devices.row(["logits"], "value", devices.moved("gather"))
    loss = devices.row(["loss"], "value", devices.moved("targets"))
    panels = [
        devices.scatter("scatter"),
        devices.replicate(),
        devices.forward("forward"),
        ("gather the logits", [devices.row(devices.outputs), gathered]),
        ("loss, reduced on device 0", [Band([box("host: targets")]), loss]),
    ]
    total = f"In all: {devices.traffic('scatter', 'replicate', 'gather')}."
    return numbered_scene(
        "DataParallel: a forward pass", panels, f"{RECORDED} Logits on device 0: {whole}.", total
    )


@figure("F2", "lessons/data_parallel/figures/dp_backward", STEPS)
def backward(run: Evidence) -> Scene:
    devices = Devices(run, LOGITS)
    gradients = devices.row("grad", "value", devices.moved(GRADIENTS))
    backwards = devices.row(
        "grads", "backward", devices.computed([devices.compute("backward")] * devices.count)
    )
    step = devices.row(["step"], "optimizer", devices.computed([devices.compute("step")]))
    panels = [
        ("scatter the loss's gradient", [devices.row(["loss"]), gradients]),
        ("backward", [devices.row("grad"), backwards]),
        devices.reduce(),
        ("step on device 0 alone", [devices.row(["grads"]), step]),
    ]
    total = f"In all: {devices.traffic(GRADIENTS, REDUCE)}."
    return numbered_scene("DataParallel: backward and step", panels, RECORDED, total)


@figure("F5", "lessons/data_parallel/figures/dp_forward_2", STEPS)
def loss_in_forward(run: Evidence) -> Scene:
    devices = Devices(run, LOSS)
    mean = [devices.row(devices.outputs), devices.row("loss", "value", devices.work())]
    panels = [
        devices.scatter("scatter inputs and targets"),
        devices.forward("forward"),
        ("reduction 1: mean on each device", mean),
        devices.gather_losses("reduction 2: mean over devices"),
    ]
    total = (
        f"Gathered: {devices.traffic('gather')}, a number from each other device; with logits "
        f"gathered: {Devices(run, LOGITS).traffic('gather')}."
    )
    return numbered_scene("DataParallel with the loss inside forward", panels, total)


@figure("F17", "lessons/data_parallel/figures/dp_criterion", STEPS, in_chapter=False)
def parallel_criterion(run: Evidence) -> Scene:
    devices = Devices(run, OUTPUTS)
    inputs, after = slice(devices.count), slice(devices.count, None)
    targets = devices.row("targets", "value", devices.moved("scatter", after))
    criterion = [
        devices.row(devices.outputs),
        devices.row("loss", "value", devices.work(turn=1)),
    ]
    back = [devices.row(["loss"]), devices.row("grad", "backward", devices.moved(GRADIENTS))]
    panels = [
        devices.scatter("scatter the inputs", inputs),
        devices.replicate(),
        devices.forward("forward: outputs stay"),
        ("scatter the targets", [Band([box("host: targets")]), targets]),
        ("criterion on each device", criterion),
        devices.gather_losses("gather the losses"),
        ("backward from each loss", back),
        devices.reduce(),
    ]
    total = f"In all: {devices.traffic('scatter', 'replicate', 'gather', REDUCE)}."
    return numbered_scene("DataParallelModel and DataParallelCriterion", panels, RECORDED, total)


STYLES = {
    "parameters": "forward",
    "gradients": "backward",
    "optimizer state": "optimizer",
    "activations": "compute",
    "gathered outputs": "communication",
    "inputs": "value",
}


def memory_scene(
    run: Evidence, gather: str, title: str, *, with_shares: bool = False
) -> tuple[Scene, Sequence[DeviceLoad]]:
    """Bars of what each device holds at its peak and, with `with_shares`, of the share of a step in
    which it computes; and the devices' loads, by this way to the loss."""
    loads: Sequence[DeviceLoad] = run.results[0][gather]
    scene, memory, shares = Scene(title), [], []
    for number, load in enumerate(loads):
        label, held = f"device {number}", load.at_peak.items()
        pieces = [
            piece(size, STYLES[what], f"{label}: {what}, {format_bytes(size)}")
            for what, size in held
        ]
        memory.append((label, pieces, format_bytes(load.peak)))
        busy = piece(load.share, "compute", f"{label} busy")
        shares.append((label, [busy], f"{load.share * 100:.0f} % busy"))
    add_bars(scene, memory)
    if with_shares:
        add_bars(scene, shares, most=1.0)
    used = {label for load in loads for label in load.at_peak}
    add_key(scene, {style: label for label, style in STYLES.items() if label in used})
    return scene, loads


@figure("F4", "lessons/data_parallel/figures/dp_training", MEMORY, in_chapter=False)
def memory_and_utilisation(run: Evidence) -> Scene:
    scene, loads = memory_scene(
        run, LOSS, "DataParallel: memory and utilisation of each device", with_shares=True
    )
    peaks = [load.peak for load in loads]
    return scene.with_caption(
        f"Loss inside forward: the fullest device holds {max(peaks) / min(peaks):.2f} times as "
        "much as the emptiest.",
        "Busy: the share of a step in which a device computes.",
    )


@figure("F18", "lessons/data_parallel/figures/dp_memory", MEMORY, is_played=False)
def imbalance(run: Evidence) -> Scene:
    scene, loads = memory_scene(
        run, LOGITS, "DataParallel: memory per device where logits are gathered"
    )
    peaks = [load.peak for load in loads]
    return scene.with_caption(
        f"Device {peaks.index(max(peaks))} holds {max(peaks) / min(peaks):.2f} times as much as "
        f"the emptiest: {' / '.join(map(format_bytes, peaks))}."
    )
