"""The parts of the lab, in order. Importing this does not import torch.

A new part is a function `part(rank, size, settings)` in a file of its own, a text for its result in report.py, and an
entry here: the choices of --only, what each option is for, and the order of the lab derive from this table.
"""

from __future__ import annotations

from dataclasses import dataclass

from playground.runtime.remote import Remote, remote


@dataclass(frozen=True, kw_only=True)
class LabPart:
    """An experiment that every rank runs."""

    name: str
    shown: str
    """What it has shown, in the last line of the lab's output."""
    code: Remote
    """Called as `part(rank, size, settings)`. Its docstring says what the part is about."""
    text: Remote
    """Formats what the ranks returned, as prose and tables."""
    options: tuple[str, ...]
    """Options of the command that change something in it but not in every part, by parameter name."""


MODEL_AND_DATA = ("model", "batch_size", "limit")
"""Options for every part that trains, or begins to."""
PARTS = {
    part.name: part
    for part in (
        LabPart(
            name="buckets",
            shown="the buckets that DDP built",
            code=remote("playground.lessons.ddp.buckets:buckets"),
            text=remote("playground.lessons.ddp.report:buckets_texts"),
            options=(*MODEL_AND_DATA, "bucket_caps", "static_graph", "gradient_as_bucket_view", "steps"),
        ),
        LabPart(
            name="hooks",
            shown="what communication hooks save and what they cost",
            code=remote("playground.lessons.ddp.hooks:hooks"),
            text=remote("playground.lessons.ddp.report:hooks_texts"),
            options=(*MODEL_AND_DATA, "bucket_caps", "comm_hooks", "steps", "lr", "momentum"),
        ),
        LabPart(
            name="accumulation",
            shown="the messages that no_sync saves",
            code=remote("playground.lessons.ddp.accumulation:accumulation"),
            text=remote("playground.lessons.ddp.report:accumulation_texts"),
            options=(*MODEL_AND_DATA, "bucket_caps", "accumulate"),
        ),
        LabPart(
            name="uneven_inputs",
            shown="how Join lets ranks finish at different times",
            code=remote("playground.lessons.ddp.uneven_inputs:uneven_inputs"),
            text=remote("playground.lessons.ddp.report:uneven_inputs_texts"),
            options=(*MODEL_AND_DATA, "bucket_caps"),
        ),
        LabPart(
            name="checkpoint",
            shown="a checkpoint that one rank writes and all read",
            code=remote("playground.lessons.ddp.checkpoint:checkpoint"),
            text=remote("playground.lessons.ddp.report:checkpoint_texts"),
            options=(*MODEL_AND_DATA, "bucket_caps", "steps", "lr", "momentum"),
        ),
        LabPart(
            name="sampler",
            shown="who gets which sample",
            code=remote("playground.lessons.ddp.sampler:sampler"),
            text=remote("playground.lessons.ddp.report:sampler_texts"),
            options=(),
        ),
    )
}
