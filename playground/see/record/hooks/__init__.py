"""What stands between a rank's calls and what they call while a recording is made, and at no other time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from playground.see.record.hooks import algorithms, devices, distributed, remote_calls, steps
from playground.see.record.hooks.buckets import BucketHooks
from playground.see.record.hooks.groups import Groups
from playground.see.record.hooks.training import TrainingHooks
from playground.see.record.recorder import Recorder


@contextlib.contextmanager
def installed(recorder: Recorder) -> Iterator[None]:
    """Have everything recorded that this rank does in this block."""
    groups = Groups()
    with (
        distributed.recorded(recorder, groups),
        algorithms.recorded(recorder, groups),
        remote_calls.recorded(recorder, groups),
        steps.recorded(recorder),
        devices.recorded(recorder),
        TrainingHooks(recorder, BucketHooks(recorder, groups)).installed(),
    ):
        yield
