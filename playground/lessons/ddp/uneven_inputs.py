"""What happens where one rank has fewer batches than others, and how Join lets it be done.

    python -m playground ddp --only uneven_inputs -n 3

Source: https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html
"""

from __future__ import annotations

from torch.distributed.algorithms.join import Join

from playground.lessons.ddp.ddp_run import DDPRun, build_run
from playground.lessons.ddp.recording import BucketRecorder
from playground.lessons.ddp.results import EarlyTermination, UnevenResult, check_replicas
from playground.lessons.ddp.settings import LabSettings
from playground.runtime.agreement import all_gather_object
from playground.training.replicas import largest_difference

BATCHES = 3
"""Of rank 0; every further rank has one more."""


def uneven_inputs(rank: int, size: int, settings: LabSettings) -> UnevenResult:
    """Rank r has 3 + r batches. Without Join the others would wait for ever for the rank that is done first; within it
    that rank answers with zeros until all are done, and then takes over the parameters of the last.

    Raises `PlaygroundError` if replicas differ in the end.
    """
    batches, steps = BATCHES + rank, 0
    run = build_run(settings)
    recorder = BucketRecorder(run.ddp)
    with Join([run.ddp]):
        for number in range(batches):
            run.step(number)
            steps += 1
    difference = largest_difference(run.ddp.module)
    check_replicas(difference, "after Join")
    messages = len(recorder.sent)
    without_joining = terminate_early(build_run(settings), batches)
    return UnevenResult(
        batches=batches, steps=steps, messages=messages, difference=difference, without_joining=without_joining
    )


def terminate_early(run: DDPRun, batches: int) -> EarlyTermination:
    """Take as many steps as there are until the first rank is done. What Join, told to raise, then says on this one."""
    steps, says = 0, None
    try:
        with Join([run.ddp], throw_on_early_termination=True):
            for number in range(batches):
                run.step(number)
                steps += 1
    except RuntimeError as error:
        says = str(error).splitlines()[0]
    all_gather_object(says)  # a failure of another kind would show here, at the ranks that are gone
    return EarlyTermination(steps=steps, says=says)
