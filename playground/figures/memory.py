"""Figures of what devices hold, and how busy they are."""

from __future__ import annotations

from collections.abc import Sequence

from playground.figures.bars import Bar, Piece, add_bars, add_key
from playground.figures.results import Evidence
from playground.figures.scene import Drawing, Scene
from playground.lessons.data_parallel.page import DeviceLoad, WayResult
from playground.measurement.units import format_bytes

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
