"""The command `data-parallel`: its settings, results and text. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypedDict

from playground.console.options import flags
from playground.console.session import Session
from playground.console.tables import Column, Table, Text, Texts, bars, figures, numbers, tabulate
from playground.console.text import heading, prose
from playground.console.units import plural
from playground.lessons import LESSONS
from playground.runtime.backends import backend_for
from playground.runtime.errors import UsageError
from playground.runtime.flags import check_flags, flag
from playground.runtime.launcher import server
from playground.runtime.remote import Remote

MAX_DEVICES, MAX_BATCH_SIZE = 64, 256
WAYS = ("logits", "loss", "outputs")
"""Ways to the loss, named after what the devices compute and, all but the last, send to one of
them."""


@dataclass(frozen=True, kw_only=True)
class DataParallelSettings:
    """Raises `UsageError` for what cannot be run. (Whether the devices exist is for
    `resolve_devices` to say.)"""

    devices: tuple[str, ...]
    """As torch calls them: cpu:0, cpu:1, … or cuda:0, cuda:1, … The model lies on the first."""
    ways: tuple[tuple[str, str], ...] = ()
    """To be compared: one of `WAYS`, and the device where the loss ends up."""
    batch_size: int = flag(32, "Number of samples per step.", least=1, most=MAX_BATCH_SIZE)
    steps: int = flag(3, "Number of steps to time.", least=1)
    seed: int = 1234

    def __post_init__(self) -> None:
        check_device_count(len(self.devices))
        names = ",".join(self.devices)
        if len(set(self.devices)) < len(self.devices):
            raise UsageError(
                f"--devices {names}: a device named twice would count twice, name each once"
            )
        check_flags(self)


def check_device_count(count: float) -> None:
    """Raise `UsageError` for more devices than a host has threads and processes for."""
    if count > MAX_DEVICES:
        raise UsageError(
            f"--devices {count:g}: at most {MAX_DEVICES}, each has a thread and a process here"
        )


def ways_to_compare(devices: tuple[str, ...], gather: str | None) -> tuple[tuple[str, str], ...]:
    """The one way that is asked for or, if `gather` is None, the usual one and its three cures."""
    if gather:
        return ((gather, devices[0]),)
    elsewhere = devices[min(1, len(devices) - 1)]
    return tuple(dict.fromkeys([*((way, devices[0]) for way in WAYS), ("logits", elsewhere)]))


LABELS = ("parameters", "gradients", "optimizer state", "activations", "gathered outputs", "inputs")
"""Kinds of what a device holds."""
PARTS = ("scatter", "replicate", "parallel_apply", "gather", "loss", "backward", "optimizer.step")
"""The parts of a training step, in order."""
MOVES = {"backward": ("gradients of outputs", "reduce")}
"""The copies that belong to a part, unless they are called like it."""

COSTS = figures(
    ("gathered", "copied by\ngather", "bytes", ","),
    ("seconds", "time\nper step", "ms", ".1f", 1000),
    ("loss", "loss", "", ".6f"),
)


Move = TypedDict("Move", {"part": str, "from": str, "bytes": int})
"""Copies to a device, by the part of the step that makes them and the device they come from."""


@dataclass(frozen=True, kw_only=True)
class DeviceStep:
    """A training step as one device sees it."""

    device: str
    held: dict[str, int]
    """Bytes that it holds after each part of the step, and "(before)"."""
    received: list[Move]


@dataclass(frozen=True, kw_only=True)
class DeviceLoad:
    """The memory of a device and its work."""

    device: str
    peak: int
    """The most bytes that it holds at any moment."""
    at_peak: dict[str, int]
    """These by label, one of `LABELS`."""
    share: float
    """Share of the time in which it computes, 0 to 1; on GPUs, in which it is given work."""


@dataclass(frozen=True, kw_only=True)
class WayResult:
    """A way to the loss."""

    gather: str
    """What is gathered: one of `WAYS`."""
    output_device: str
    loss: float
    """Before the first step."""
    gathered: int
    """Bytes that gather copies from other devices."""
    devices: list[DeviceLoad]
    seconds: float
    """Median of a step."""


@dataclass(frozen=True, kw_only=True)
class ThreadTimes:
    """Median seconds of a piece of work, on one device alone and on all together."""

    alone: float
    together: float


def step_texts(devices: Sequence[DeviceStep]) -> Texts:
    """The copies in each part of a step, and the bytes on each device after it."""
    moved = Table("part", "from", "to", *numbers(("moved", "bytes", ",")))
    for name in PARTS:
        for part, device in product(MOVES.get(name, (name,)), devices):
            for move in device.received:
                if move["part"] == part:
                    moved.add(name, move["from"], device.device, move["bytes"])
    columns = numbers(*((device.device, "bytes", ",") for device in devices))
    rows = [(name, *(device.held[name] for device in devices)) for name in ("(before)", *PARTS)]
    held = Table("after", *columns, rows=rows)
    return [
        "  What is copied between devices:",
        moved,
        "  What each device holds after each part:",
        held,
    ]


def ways_texts(ways: Sequence[WayResult], alone: WayResult) -> Texts:
    """Memory, time and utilisation of each way to the loss; `alone` is the same step on the first
    device only."""
    gathered = {"gather": Column("gathered"), "output_device": Column("on")}
    first = alone.devices[0]
    usual = ways[0]
    names = [device.device for device in usual.devices]

    def by_device(figure: str, *about: Any) -> Table:
        rows = [
            {**vars(way), **{each.device: getattr(each, figure) for each in way.devices}}
            for way in ways
        ]
        return tabulate(rows, gathered | figures(*((name, name, *about) for name in names)))

    return [
        f"  Peak memory of each device ({first.device} alone, with the whole batch: "
        f"{first.peak:,} bytes):",
        by_device("peak", "bytes", ","),
        f"  What that is where {usual.gather} are gathered on {usual.output_device}:",
        *bars([(device.device, device.at_peak) for device in usual.devices], LABELS),
        "  What gather copies from other devices, and how long a step takes:",
        tabulate(ways, gathered | COSTS),
        "  Share of a step in which each device computes:",
        by_device("share", "%", ".0f", 100),
    ]


def speed_up_text(times: ThreadTimes, devices: int) -> str:
    """How many times as much is done at once."""
    speed_up = devices * times.alone / times.together
    return f"{plural(devices, 'thread')} get {speed_up:.2f} times as much done as one"


def threads_text(times: ThreadTimes, devices: int) -> str:
    return (
        f"  {speed_up_text(times, devices)}: one piece of work takes {1000 * times.alone:.1f} ms, "
        f"{devices} at the same time {1000 * times.together:.1f} ms"
    )


ENDING = (
    "Why the path goes on to processes: in every step the first device sends the model to each "
    "other one and receives "
    "as many gradients; in a ring no rank sends more than twice the model. Threads take turns "
    "wherever Python itself "
    "is at work; processes do not. And one process is confined to one machine."
)
LESSON = LESSONS["data-parallel"]
SPLIT, ONE_STEP, COMPARE, THREADS = (
    LESSON.remote(name, "experiment") for name in ("split", "one_step", "ways", "threads")
)


@dataclass(frozen=True, kw_only=True)
class DataParallelOptions:
    """The options of `data-parallel` beside its settings."""

    devices: str = flag(
        "4",
        "Number of virtual devices, or a list: cpu:0,cpu:1 or cuda:0,cuda:1.",
        metavar="N|LIST",
    )
    gather: str | None = flag(None, "What to gather. By default all are compared.", choices=WAYS)


@LESSON.run_by(flags(DataParallelOptions), flags(DataParallelSettings))
def command(session: Session, devices: str, gather: str | None, **chosen: Any) -> None:
    server.preload(SPLIT.module)
    server.warm_up()
    # imports torch, at the same time as the ranks' server does
    from playground.lessons.data_parallel.machine import resolve_devices

    names = tuple(map(str, resolve_devices(list_devices(devices))))
    settings = DataParallelSettings(devices=names, ways=ways_to_compare(names, gather), **chosen)
    session.run = replace(session.run, backend=backend_for(names[0].partition(":")[0]).name)
    if session.world.rank_env:
        raise UsageError(
            f"{LESSON.name} starts its processes itself: run it without torchrun, RANK and "
            "WORLD_SIZE"
        )
    session.say(f"{LESSON.name}: one process, {plural(len(names), 'device')}: {', '.join(names)}")
    run_parts(session, settings)


def list_devices(devices: str) -> list[str]:
    """The names that --devices stands for: a number of virtual devices, or a comma-separated
    list."""
    if devices.isdecimal():
        check_device_count(float(devices))  # before that many names are made
        return [f"cpu:{number}" for number in range(int(devices))]
    names = [name.strip() for name in devices.split(",")]
    if "" in names:
        raise UsageError(f"--devices {devices!r}: a name is missing, write cpu:0,cpu:1 or a number")
    return names


def run_parts(session: Session, settings: DataParallelSettings) -> None:
    """Run the parts of the lesson, and show each as soon as it has been run."""

    def run(part: Remote, settings: DataParallelSettings = settings) -> Any:
        return session.launch(part, settings, phase=part.name)[0]

    def show(part: Remote, *texts: Text) -> None:
        session.say("", prose(heading(part.name), f": {part.summary}"), *texts)

    first = settings.devices[0]
    shares = run(SPLIT)
    show(
        SPLIT,
        "  inputs per device; 30 on 2: 30 inputs on 2 devices",
        tabulate(shares, {"device": Column("device")}, Column("", right=True)),
    )
    devices: list[DeviceStep] = run(ONE_STEP)
    show(ONE_STEP, *step_texts(devices))
    on_first = replace(settings, devices=(first,), ways=(("logits", first),), steps=1)
    ways: list[WayResult] = run(COMPARE)
    [alone] = run(COMPARE, on_first)
    show(COMPARE, *ways_texts(ways, alone))
    threads: ThreadTimes = run(THREADS)
    show(THREADS, threads_text(threads, len(settings.devices)))
    peaks = {
        f"{way.gather} on {way.output_device}": max(each.peak for each in way.devices)
        for way in ways
    }
    usual, least = next(iter(peaks)), min(peaks, key=peaks.__getitem__)
    held = f"{peaks[usual]:,} bytes to gather {usual}"
    held += f", and {peaks[least]:,} to gather {least}" * (peaks[least] < peaks[usual])
    speed_up = speed_up_text(threads, len(settings.devices))
    shown = LESSON.conclude(1, held=held, speed_up=speed_up)
    session.say("", ENDING, f"Shown: {shown}.")
    session.print_document(
        {
            "split": shares, "one_step": devices,
            **{f"gather {way.gather} on {way.output_device}": way.devices for way in ways},
        },
        devices=settings.devices, output_device=first,
        batch_size=settings.batch_size,
        ways=ways, one_device=alone, threads=threads,
    )  # fmt: skip
