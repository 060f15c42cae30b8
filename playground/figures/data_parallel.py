"""Figures of DataParallel: one process, several devices, and what each part of a step moves between them."""

from __future__ import annotations

from collections.abc import Sequence

from playground.figures.results import DataParallelStep, Evidence, Moved
from playground.figures.rows import Cell, Move, Panel, Row, add_panels
from playground.figures.scene import Drawing, Scene
from playground.measurement.units import format_bytes

HOST = "cpu"
"""Where batches come from."""
LOGITS, LOSS, OUTPUTS = "logits", "loss", "outputs"
"""Ways to the loss, named after what is gathered, or is not."""


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


class Devices:
    """Panels of a step: devices in a row, and below them again, with what was moved between."""

    def __init__(self, step: DataParallelStep) -> None:
        self.step, self.count = step, len(step.chunks)

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

    def moved(self, part: str, *, from_host: bool = False) -> list[Move]:
        """The arrows of a part of the step, as they were counted; the first and the last tell their bytes."""
        moves = [move for move in self.step.moves if move.part == part]
        return [
            Move(
                source=0 if from_host else number_of(move.source), target=number_of(move.target),
                text=format_bytes(move.bytes) if move is moves[-1] else "", title=title_of(move),
            )
            for move in moves
        ]  # fmt: skip

    def stay(self) -> list[Move]:
        """What is computed where it lies."""
        return [Move(source=number, target=number, style="muted", title="stays") for number in range(self.count)]

    def scatter(self, what: str = "scatter") -> Panel:
        host = Row(label="", cells=[Cell(text=f"host {shape_text(self.step.batch)}")])
        return Panel(title=what, rows=[host, self.row(self.chunks(), "value", self.moved("scatter", from_host=True))])

    def replicate(self) -> Panel:
        rows = [self.row(self.only_first("model")), self.row(self.on_all("model"), "forward", self.moved("replicate"))]
        return Panel(title="broadcast the model", rows=rows)

    def forward(self, title: str = "forward") -> Panel:
        rows = [self.row(self.chunks()), self.row(self.outputs(), "forward", self.stay())]
        return Panel(title=title, rows=rows)

    def reduce(self) -> Panel:
        rows = [
            self.row(self.on_all("grads"), "backward"),
            self.row(self.only_first("sum"), "communication", self.moved("reduce")),
        ]
        return Panel(title="reduce the gradients on device 0", rows=rows)

    def optimizer_step(self) -> Panel:
        rows = [
            self.row(self.only_first("grads")),
            self.row(self.only_first("step"), "optimizer", self.stay()[:1]),
        ]
        return Panel(title="step on device 0 alone", rows=rows)

    def losses_gathered(self, title: str) -> Panel:
        """A number of each device, and their mean."""
        rows = [
            self.row(self.on_all("loss")),
            self.row(self.only_first("mean"), "value", self.moved("gather")),
        ]
        return Panel(title=title, rows=rows)


def number_of(device: str) -> int:
    """cpu:2 is device 2."""
    return int(device.partition(":")[2] or 0)


def title_of(move: Moved) -> str:
    source = "host" if move.source == HOST else move.source
    return f"{move.part}: {source} → {move.target}, {format_bytes(move.bytes)}"


def devices_by(steps: Sequence[Sequence[DataParallelStep]], way: str) -> Devices:
    """The step by that way, on the one rank that there is."""
    return Devices(next(step for step in steps[0] if step.gather == way))


def traffic_text(step: DataParallelStep, *parts: str) -> str:
    """What these parts move in all, in words."""
    totals = {part: sum(move.bytes for move in step.moves if move.part == part) for part in parts}
    return "; ".join(f"{part} {format_bytes(total)}" for part, total in totals.items())


def panels_scene(title: str, panels: Sequence[Panel], *caption: str) -> Scene:
    numbered = [Panel(title=f"{number} {each.title}", rows=each.rows) for number, each in enumerate(panels, 1)]
    drawing = Drawing(title)
    add_panels(drawing, numbered, columns=2)
    return drawing.scene(*caption)


def forward(run: Evidence) -> Scene:
    """F1: a forward pass of DataParallel in five panels."""
    steps: Sequence[Sequence[DataParallelStep]] = run.results
    devices = devices_by(steps, LOGITS)
    step = devices.step
    whole = shape_text((sum(shape[0] for shape in step.outputs), *step.outputs[0][1:]))
    gather = [
        devices.row(devices.outputs()),
        devices.row(devices.only_first("logits"), "value", devices.moved("gather")),
    ]
    loss = [
        Row(label="", cells=[Cell(text="host: targets")]),
        devices.row(devices.only_first("loss"), "value", devices.moved("targets", from_host=True)),
    ]
    panels = [
        devices.scatter(), devices.replicate(), devices.forward(), Panel(title="gather the logits", rows=gather),
        Panel(title="loss, reduced on device 0", rows=loss),
    ]  # fmt: skip
    return panels_scene(
        "DataParallel: a forward pass",
        panels,
        f"Bytes as they were counted in the run; an arrow's is that of each in its panel. Logits on device 0: {whole}.",
        f"In all: {traffic_text(step, 'scatter', 'replicate', 'gather')}.",
    )


def backward(run: Evidence) -> Scene:
    """F2: backward, and the step, in four panels."""
    steps: Sequence[Sequence[DataParallelStep]] = run.results
    devices = devices_by(steps, LOGITS)
    part = "gradients of outputs"
    scatter = [
        devices.row(devices.only_first("loss")),
        devices.row(devices.on_all("grad"), "value", devices.moved(part)),
    ]
    compute = [devices.row(devices.on_all("grad")), devices.row(devices.on_all("grads"), "backward", devices.stay())]
    panels = [
        Panel(title="scatter the loss's gradient", rows=scatter), Panel(title="backward", rows=compute),
        devices.reduce(), devices.optimizer_step(),
    ]  # fmt: skip
    return panels_scene(
        "DataParallel: backward and step",
        panels,
        "Bytes as they were counted in the run; an arrow's is that of each in its panel.",
        f"In all: {traffic_text(devices.step, part, 'reduce')}.",
    )


def loss_in_forward(run: Evidence) -> Scene:
    """F5: the loss is computed inside forward, so that only numbers are gathered; it is reduced twice."""
    steps: Sequence[Sequence[DataParallelStep]] = run.results
    devices = devices_by(steps, LOSS)
    first = [devices.row(devices.outputs()), devices.row(devices.on_all("loss"), "value", devices.stay())]
    panels = [
        devices.scatter("scatter inputs and targets"), devices.forward(),
        Panel(title="reduction 1: mean on each device", rows=first),
        devices.losses_gathered("reduction 2: mean over devices"),
    ]  # fmt: skip
    return panels_scene(
        "DataParallel with the loss inside forward",
        panels,
        f"Gathered: {traffic_text(devices.step, 'gather')}, a number from each other device; with logits gathered: "
        f"{traffic_text(devices_by(steps, LOGITS).step, 'gather')}.",
    )


def parallel_criterion(run: Evidence) -> Scene:
    """F17: DataParallelModel and DataParallelCriterion: outputs stay where they are, and the criterion goes to them."""
    steps: Sequence[Sequence[DataParallelStep]] = run.results
    devices = devices_by(steps, OUTPUTS)
    criterion = [devices.row(devices.outputs()), devices.row(devices.on_all("loss"), "value", devices.stay())]
    targets = [
        Row(label="", cells=[Cell(text="host: targets")]),
        devices.row(devices.on_all("targets"), "value", devices.moved("scatter", from_host=True)),
    ]
    part = "gradients of outputs"
    back = [
        devices.row(devices.only_first("loss")),
        devices.row(devices.on_all("grad"), "backward", devices.moved(part)),
    ]
    panels = [
        devices.scatter("scatter the inputs"), devices.replicate(), devices.forward("forward: outputs stay"),
        Panel(title="scatter the targets", rows=targets), Panel(title="criterion on each device", rows=criterion),
        devices.losses_gathered("gather the losses"), Panel(title="backward from each loss", rows=back),
        devices.reduce(),
    ]  # fmt: skip
    return panels_scene(
        "DataParallelModel and DataParallelCriterion",
        panels,
        "Bytes as they were counted in the run; those of panels 1 and 4 are of inputs and targets together.",
        f"In all: {traffic_text(devices.step, 'scatter', 'replicate', 'gather', 'reduce')}.",
    )
