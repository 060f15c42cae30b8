"""Figures of DataParallel: one process, several devices, what a step moves between them, and what they hold.

Every copy from one device to another is recorded, and so is what each device's thread and the optimizer compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from playground.lessons.data_parallel.page import DeviceLoad, WayResult
from playground.measurement.units import format_bytes
from playground.see.analyse.timeline import ref_of
from playground.see.paint.results import DataParallelStep, Evidence
from playground.see.paint.rows import Bar, Cell, Move, Panel, Piece, Row, add_bars, add_key, add_panels
from playground.see.paint.scene import Drawing, Scene
from playground.see.paint.timeline import title_of
from playground.see.record.recording import BACKGROUND, COMPUTE, MOVE, PHASE, Event, Recording, read_move

HOST = "cpu"
"""Where batches come from."""
LOGITS, LOSS, OUTPUTS = "logits", "loss", "outputs"
"""Ways to the loss, named after what is gathered, or is not."""
RECORDED = "Copies as they were recorded; the bytes at an arrow are those of each in its panel."


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


@dataclass
class Copies:
    """All that a part of a step copied from one device to another."""

    source: str
    target: str
    events: list[Event]

    @property
    def bytes(self) -> int:
        return sum(event.nbytes for event in self.events)

    @property
    def title(self) -> str:
        part, source, target = read_move(self.events[0].name)
        return f"{part}: {'host' if source == HOST else source} → {target}, {format_bytes(self.bytes)}"


class Devices:
    """Panels of a step: devices in a row, and below them again, with what was moved between."""

    def __init__(self, step: DataParallelStep, events: Sequence[Event]) -> None:
        """`events` are those of that step."""
        self.step, self.events, self.count = step, events, len(step.chunks)

    def row(self, texts: Sequence[str], style: str = "plain", moves: Sequence[Move] = ()) -> Row:
        """A box for each device; those with nothing to show are idle."""
        cells = [
            Cell(text=f"dev {number}\n{text or '-'}", style=style if text else "idle")
            for number, text in enumerate(texts)
        ]
        return Row(label="", cells=cells, moves=moves)

    def only_first(self, text: str) -> list[str]:
        return [text, *[""] * (self.count - 1)]

    def on_all(self, text: str) -> list[str]:
        return [text] * self.count

    def chunks(self) -> list[str]:
        return [shape_text(shape) for shape in self.step.chunks]

    def outputs(self) -> list[str]:
        return [shape_text(shape) for shape in self.step.outputs]

    def moves(self, part: str) -> list[Event]:
        """The copies that a part of the step made, in order."""
        return [event for event in self.events if event.kind == MOVE and read_move(event.name).part == part]

    def moved(self, events: Sequence[Event], *, from_host: bool = False) -> list[Move]:
        """An arrow for all copies between the same two devices; the last one tells its bytes."""
        copies = [*gather_copies(events)]
        return [
            Move(
                source=0 if from_host else number_of(each.source),
                target=number_of(each.target),
                text=format_bytes(each.bytes) if each is copies[-1] else "",
                title=each.title,
                start=each.events[0].start,
                end=each.events[-1].end,
                event=ref_of(each.events[0]),
            )
            for each in copies
        ]

    def forwards(self, turn: int = 0) -> list[Event]:
        """What each device's thread computed when it was called for the first time in the step, or later."""
        device_of = {each.number: each.name for each in self.events if each.kind == PHASE and each.lane == BACKGROUND}
        by_device: dict[int, list[Event]] = {}
        for event in self.events:
            if event.kind == COMPUTE and event.parent in device_of:
                by_device.setdefault(number_of(device_of[event.parent]), []).append(event)
        return [by_device[number][turn] for number in range(self.count)]

    def compute(self, name: str) -> Event:
        """What the process did for all devices: backward, or the optimizer's step."""
        return next(event for event in self.events if event.kind == COMPUTE and event.name == name)

    def stay(self, events: Sequence[Event]) -> list[Move]:
        """What each device computed, by a recorded event, where it lies."""
        return [
            Move(
                source=number, target=number, style="muted", title=title_of(event), start=event.start, end=event.end,
                event=ref_of(event),
            )
            for number, event in enumerate(events)
        ]  # fmt: skip

    def traffic(self, *parts: str) -> str:
        """What these parts move in all, in words."""
        totals = {part: sum(event.nbytes for event in self.moves(part)) for part in parts}
        return "; ".join(f"{part} {format_bytes(total)}" for part, total in totals.items())

    def scatter(self, what: str = "scatter", copies: int | None = None) -> Panel:
        """Of the step's first so many copies; None for all."""
        host = Row(label="", cells=[Cell(text=f"host {shape_text(self.step.batch)}")])
        moves = self.moved(self.moves("scatter")[:copies], from_host=True)
        return Panel(title=what, rows=[host, self.row(self.chunks(), "value", moves)])

    def replicate(self) -> Panel:
        moves = self.moved(self.moves("replicate"))
        rows = [self.row(self.only_first("model")), self.row(self.on_all("model"), "forward", moves)]
        return Panel(title="broadcast the model", rows=rows)

    def forward(self, title: str = "forward") -> Panel:
        rows = [self.row(self.chunks()), self.row(self.outputs(), "forward", self.stay(self.forwards()))]
        return Panel(title=title, rows=rows)

    def reduce(self) -> Panel:
        rows = [
            self.row(self.on_all("grads"), "backward"),
            self.row(self.only_first("sum"), "communication", self.moved(self.moves("reduce"))),
        ]
        return Panel(title="reduce the gradients on device 0", rows=rows)

    def optimizer_step(self) -> Panel:
        rows = [
            self.row(self.only_first("grads")),
            self.row(self.only_first("step"), "optimizer", self.stay([self.compute("step")])),
        ]
        return Panel(title="step on device 0 alone", rows=rows)

    def losses_gathered(self, title: str) -> Panel:
        """A number of each device, and their mean."""
        rows = [
            self.row(self.on_all("loss")),
            self.row(self.only_first("mean"), "value", self.moved(self.moves("gather"))),
        ]
        return Panel(title=title, rows=rows)


def number_of(device: str) -> int:
    """cpu:2 is device 2."""
    return int(device.partition(":")[2] or 0)


def gather_copies(events: Sequence[Event]) -> Iterator[Copies]:
    """Those between the same two devices together."""
    found: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        _, source, target = read_move(event.name)
        found.setdefault((source, target), []).append(event)
    return (Copies(source, target, its) for (source, target), its in found.items())


def devices_by(run: Evidence, way: str) -> Devices:
    """The step by that way, on the one rank that there is."""
    steps: Sequence[DataParallelStep] = run.results[0]
    place = next(place for place, step in enumerate(steps) if step.gather == way)
    return Devices(steps[place], split_by_step(run.recorded)[place])


def split_by_step(recording: Recording) -> list[list[Event]]:
    """The rank's events, training step by training step: each ends with the optimizer's."""
    steps: list[list[Event]] = [[]]
    for event in recording.ranks[0].events:
        steps[-1].append(event)
        if event.kind == COMPUTE and event.name == "step":
            steps.append([])
    return steps[:-1]


def panels_scene(title: str, panels: Sequence[Panel], *caption: str) -> Scene:
    numbered = [Panel(title=f"{number} {each.title}", rows=each.rows) for number, each in enumerate(panels, 1)]
    drawing = Drawing(title)
    add_panels(drawing, numbered, columns=2)
    return drawing.scene(*caption)


def forward(run: Evidence) -> Scene:
    """F1: a forward pass of DataParallel in five panels."""
    devices = devices_by(run, LOGITS)
    step = devices.step
    whole = shape_text((sum(shape[0] for shape in step.outputs), *step.outputs[0][1:]))
    gather = [
        devices.row(devices.outputs()),
        devices.row(devices.only_first("logits"), "value", devices.moved(devices.moves("gather"))),
    ]
    loss = [
        Row(label="", cells=[Cell(text="host: targets")]),
        devices.row(devices.only_first("loss"), "value", devices.moved(devices.moves("targets"), from_host=True)),
    ]
    panels = [
        devices.scatter(),
        devices.replicate(),
        devices.forward(),
        Panel(title="gather the logits", rows=gather),
        Panel(title="loss, reduced on device 0", rows=loss),
    ]
    return panels_scene(
        "DataParallel: a forward pass",
        panels,
        f"{RECORDED} Logits on device 0: {whole}.",
        f"In all: {devices.traffic('scatter', 'replicate', 'gather')}.",
    )


def backward(run: Evidence) -> Scene:
    """F2: backward, and the step, in four panels."""
    devices = devices_by(run, LOGITS)
    part = "gradients of outputs"
    scatter = [
        devices.row(devices.only_first("loss")),
        devices.row(devices.on_all("grad"), "value", devices.moved(devices.moves(part))),
    ]
    backwards = devices.stay([devices.compute("backward")] * devices.count)
    compute = [devices.row(devices.on_all("grad")), devices.row(devices.on_all("grads"), "backward", backwards)]
    panels = [
        Panel(title="scatter the loss's gradient", rows=scatter),
        Panel(title="backward", rows=compute),
        devices.reduce(),
        devices.optimizer_step(),
    ]
    return panels_scene(
        "DataParallel: backward and step",
        panels,
        RECORDED,
        f"In all: {devices.traffic(part, 'reduce')}.",
    )


def loss_in_forward(run: Evidence) -> Scene:
    """F5: the loss is computed inside forward, so that only numbers are gathered; it is reduced twice."""
    devices = devices_by(run, LOSS)
    losses = devices.stay(devices.forwards())
    first = [devices.row(devices.outputs()), devices.row(devices.on_all("loss"), "value", losses)]
    panels = [
        devices.scatter("scatter inputs and targets"),
        devices.forward(),
        Panel(title="reduction 1: mean on each device", rows=first),
        devices.losses_gathered("reduction 2: mean over devices"),
    ]
    return panels_scene(
        "DataParallel with the loss inside forward",
        panels,
        f"Gathered: {devices.traffic('gather')}, a number from each other device; with logits gathered: "
        f"{devices_by(run, LOGITS).traffic('gather')}.",
    )


def parallel_criterion(run: Evidence) -> Scene:
    """F17: DataParallelModel and DataParallelCriterion: outputs stay where they are, and the criterion goes to them."""
    devices = devices_by(run, OUTPUTS)
    losses = devices.stay(devices.forwards(turn=1))
    criterion = [devices.row(devices.outputs()), devices.row(devices.on_all("loss"), "value", losses)]
    scattered = devices.moves("scatter")[devices.count :]  # after the inputs
    targets = [
        Row(label="", cells=[Cell(text="host: targets")]),
        devices.row(devices.on_all("targets"), "value", devices.moved(scattered, from_host=True)),
    ]
    part = "gradients of outputs"
    back = [
        devices.row(devices.only_first("loss")),
        devices.row(devices.on_all("grad"), "backward", devices.moved(devices.moves(part))),
    ]
    panels = [
        devices.scatter("scatter the inputs", devices.count),
        devices.replicate(),
        devices.forward("forward: outputs stay"),
        Panel(title="scatter the targets", rows=targets),
        Panel(title="criterion on each device", rows=criterion),
        devices.losses_gathered("gather the losses"),
        Panel(title="backward from each loss", rows=back),
        devices.reduce(),
    ]
    return panels_scene(
        "DataParallelModel and DataParallelCriterion",
        panels,
        RECORDED,
        f"In all: {devices.traffic('scatter', 'replicate', 'gather', 'reduce')}.",
    )


STYLE_OF_LABEL = {
    "parameters": "forward", "gradients": "backward", "optimizer state": "optimizer", "activations": "compute",
    "gathered outputs": "communication", "inputs": "value", "other": "plain",
}  # fmt: skip


def memory_bars(devices: Sequence[DeviceLoad]) -> list[Bar]:
    """What each device holds at its peak, by what it is."""
    return [
        Bar(
            label=f"device {number}",
            pieces=[
                Piece(value=size, style=STYLE_OF_LABEL[label], title=f"device {number}: {label}, {format_bytes(size)}")
                for label, size in load.at_peak.items()
            ],
            note=format_bytes(load.peak),
        )
        for number, load in enumerate(devices)
    ]


def used_labels(devices: Sequence[DeviceLoad]) -> dict[str, str]:
    return {STYLE_OF_LABEL[label]: label for label in STYLE_OF_LABEL if any(label in load.at_peak for load in devices)}


def memory_and_utilisation(run: Evidence) -> Scene:
    """F4: with losses gathered, devices hold about as much each, and are busy for unequal shares of a step."""
    results: Sequence[Sequence[WayResult]] = run.results
    way = next(way for way in results[0] if way.gather == "loss")
    drawing = Drawing("DataParallel: memory and utilisation of each device")
    add_bars(drawing, memory_bars(way.devices))
    busy = [
        Bar(
            label=f"device {number}",
            pieces=[Piece(value=load.share, style="compute", title=f"device {number} busy")],
            note=f"{load.share * 100:.0f} % busy",
        )
        for number, load in enumerate(way.devices)
    ]
    add_bars(drawing, busy, most=1.0)
    add_key(drawing, used_labels(way.devices))
    peaks = [load.peak for load in way.devices]
    return drawing.scene(
        f"Loss inside forward: the fullest device holds {max(peaks) / min(peaks):.2f} times as much as the emptiest.",
        f"Busy: the share of a step of {way.seconds * 1e3:.3g} ms in which a device computes.",
    )


def imbalance(run: Evidence) -> Scene:
    """F18: with logits gathered, one device holds far more than the others."""
    results: Sequence[Sequence[WayResult]] = run.results
    way = next(way for way in results[0] if way.gather == "logits")
    drawing = Drawing("DataParallel: memory per device where logits are gathered")
    add_bars(drawing, memory_bars(way.devices))
    add_key(drawing, used_labels(way.devices))
    peaks = [load.peak for load in way.devices]
    fullest = peaks.index(max(peaks))
    return drawing.scene(
        f"Device {fullest} holds {max(peaks) / min(peaks):.2f} times as much as the emptiest: "
        + " / ".join(format_bytes(peak) for peak in peaks)
        + "."
    )
