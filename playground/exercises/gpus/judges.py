"""Judges of the exercises on GPUs, which run on simulated ones."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from playground.exercises.cases import Case, Cases, predict
from playground.exercises.repair import of_fault
from playground.tap.replacement import calling, replaced
from playground.ui.units import plural
from playground.world.simulated_gpu.races import count_races, races_since

LOCAL = "LOCAL_RANK"
FLOAT = 4
"""Bytes."""
ORDERED = "each operation waits for what it needs"
MORE = "right, but more than necessary: Python has waited for"
IN_WORDS = {
    "the host": "Python",
    "aten::div_": "the division",
    "ncclAllReduce": "the all-reduce",
    " after ": " does not wait for ",
}
"""What the words of a missing wait are in those of the tasks."""
PROBE = "aten::neg"
"""What the judge calls to find out which streams wait for what."""


def own_gpu(rank: int, size: int, seed: int) -> Cases:
    """Hosts with two GPUs, and ranks that fill a host or take turns. The current GPU is the first
    one before."""
    for about, local in (("ranks 0 and 1 on one host", rank % 2), ("hosts in turn", rank // 2)):

        def run(function: Callable[..., torch.Tensor], local: int = local) -> dict[str, object]:
            torch.cuda.set_device(0)
            before = os.environ.get(LOCAL)
            os.environ[LOCAL] = str(local)
            try:
                tensor = function(rank, size)
                return {
                    "current GPU": torch.cuda.current_device(),
                    "device of the tensor": str(tensor.device),
                    "tensor": int(tensor),
                }
            finally:
                os.environ.pop(LOCAL)
                os.environ.update({LOCAL: before} if before else {})
                torch.cuda.set_device(0)

        yield Case(
            about,
            (),
            {"current GPU": local, "device of the tensor": f"cuda:{local}", "tensor": rank},
            run=run,
            is_coded=False,
            gives_rank=False,
        )


def wrong_device(rank: int, size: int, seed: int) -> Cases:
    """One rank is on the second GPU, and a batch of another rank is on the CPU."""
    for each in (seed, seed + 1):
        draw = random.Random(each)
        elsewhere, unlucky = draw.sample(range(size), 2)
        gpus = [int(other == elsewhere) for other in range(size)]
        numbers = [[draw.randrange(1, 9) for _ in range(draw.randrange(2, 5))] for _ in range(size)]
        expected = sum(place * number for own in numbers for place, number in enumerate(own, 1))
        places = [torch.device("cuda", gpus[rank])] * len(numbers[rank])
        if rank == unlucky:
            places[1] = torch.device("cpu")
        batches = [
            torch.full((1,), float(number), device=place)
            for number, place in zip(numbers[rank], places, strict=True)
        ]
        yield Case(
            f"GPUs of the ranks: {', '.join(map(str, gpus))}",
            (gpus, batches),
            float(expected),
            is_coded=False,
            culprit=of_fault(seed, [elsewhere, unlucky]),
        )


def does_it_fit(rank: int, size: int, seed: int) -> Cases:
    """The memory is between what a number of samples needs and what twice as many need."""
    for layers, width, samples in ((4, 256, 1024), (8, 128, 512), (2, 512, 1024)):
        state = 4 * FLOAT * layers * width**2
        memory = state + FLOAT * width * (layers + 1) * samples * 17 // 10
        largest = 1
        while train(layers, width, 2 * largest)[1] <= memory:
            largest *= 2
        counted = {"state": train(layers, width, 1)[0], "samples": largest}
        about = f"{plural(layers, 'layer')} of width {width}, {memory:,} bytes"
        yield predict(about, (layers, width, memory), counted)


def train(layers: int, width: int, samples: int) -> tuple[int, int]:
    """The bytes of the state of a training, and the most that a step has held."""
    before = torch.cuda.memory_allocated()
    pairs = ((nn.Linear(width, width, bias=False), nn.ReLU()) for _ in range(layers))
    model = nn.Sequential(*(layer for pair in pairs for layer in pair)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    inputs = torch.ones(samples, width, device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad(set_to_none=False)
        model(inputs).sum().backward()
        optimizer.step()
    moments = [each for state in optimizer.state.values() for each in state.values() if each.dim()]
    held = [each for param in model.parameters() for each in (param, param.grad)]
    return (
        sum(each.nbytes for each in (*held, *moments)),
        torch.cuda.max_memory_allocated() - before,
    )


def missing_wait(rank: int, size: int, seed: int) -> Cases:
    """The gradient is the first half of what is summed. Reads of the other half tell which streams
    wait for the sum."""
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    for elements, value in ((3, 2.0), (1, 5.0), (1000, -4.0)):
        mean = torch.full((elements,), value * (size + 1) / 2)
        both = torch.full((2 * elements,), value * (rank + 1), device="cuda")
        torch.cuda.synchronize()
        handle = dist.all_reduce(both, group=group, async_op=True)
        assert handle is not None
        notes: list[str] = []
        yield Case(
            plural(elements, "element"),
            (),
            {"waits": ORDERED, "gradient": mean},
            run=partial(use_sum, rank, size, both, handle, mean, notes),
            is_coded=False,
            gives_rank=False,
            notes=notes,
        )
    dist.destroy_process_group(group)
    torch.cuda.set_device(0)


def use_sum(
    rank: int,
    size: int,
    both: torch.Tensor,
    handle: dist.Work,
    mean: torch.Tensor,
    notes: list[str],
    function: Callable[..., object],
) -> dict[str, object]:
    """Give the solution the first half of a sum that goes on. Returns what is not ordered after
    what it needs, and the gradient, which is as due (`mean`) if there is such a thing."""
    gradient, rest = both.chunk(2)
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    missing = races_of(lambda: function(rank, size, gradient, handle, side))
    missing += [race.replace(PROBE, "the caller's read") for race in probe(current, gradient.neg)]
    names = {"the current stream": current, "side": side, "Python": torch.cuda.Stream()}
    waiting = [name for name, stream in names.items() if not probe(stream, rest.neg)]
    handle.wait()
    torch.cuda.synchronize()
    if missing:
        waits = f"{tell(missing)}; the sum is awaited by {', '.join(waiting) or 'nobody'}"
        return {"waits": waits, "gradient": mean}
    if "Python" in waiting:
        notes[:] = [f"{MORE} the GPU; wait() and wait_stream() hold back streams only"]
    return {"waits": ORDERED, "gradient": gradient.cpu()}


def read_too_early(rank: int, size: int, seed: int) -> Cases:
    """Operations in another stream, which waits for nothing, tell what Python has waited for."""
    for elements in (4, 1, 600):
        numbers = [0.5 * (1 + place) for place in range(elements)]
        due = {"waits": ORDERED, "losses": numbers, "steps queued": 1}
        notes: list[str] = []
        yield Case(
            plural(elements, "loss", "es"),
            (),
            due,
            run=partial(read_losses, numbers, due, notes),
            is_coded=False,
            gives_rank=False,
            notes=notes,
        )


def read_losses(
    numbers: Sequence[float],
    due: Mapping[str, object],
    notes: list[str],
    function: Callable[..., object],
) -> dict[str, object]:
    """Give the solution losses that are computed, and a next step to queue. Returns what is not
    ordered after what it needs, and the losses, which are `numbers` if there is such a thing."""
    halves = torch.tensor(numbers, device="cuda") * 2
    step, other = torch.zeros(1, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    losses = halves / 2
    returned, is_ahead = list[object](), list[bool]()

    def queue_step() -> None:
        is_ahead.append(bool(probe(other, losses.neg)))
        step.add_(1)

    def note(wait: Callable[..., None], *event_and_stream: object) -> None:
        streams_wait.append(True)
        wait(*event_and_stream)

    streams_wait = list[bool]()
    with replaced(torch.cuda.Event, "wait", calling(note)):
        missing = races_of(lambda: returned.append(function(losses, queue_step)))
    accesses = {"losses": losses.neg, "step": step.neg, "copy": losses.neg_}
    waited = {name: not probe(other, access) for name, access in accesses.items()}
    torch.cuda.synchronize()
    held = {**due, "losses": returned[0], "steps queued": len(is_ahead)}
    if missing:
        names = ", ".join(name for name, is_done in waited.items() if is_done)
        waits = f"{tell(missing)}; Python waits for: {names or 'nothing'}"
        if streams_wait:
            waits += "; a stream waits for an event"
        return {**held, "waits": waits, "losses": numbers}
    if is_ahead and waited["step"]:
        notes[:] = [f"{MORE} the next step, too"]
    elif is_ahead == [False]:
        notes[:] = [f"{MORE} the losses before it queued the next step"]
    return held


def races_of(act: Callable[[], object]) -> list[str]:
    """The missing waits of what this calls, but for those of probes inside: `aten::add after
    ncclAllReduce`."""
    before = count_races()
    act()
    return [race for race in races_since(before) if not race.startswith(PROBE)]


def probe(stream: torch.cuda.Stream, access: Callable[[], object]) -> list[str]:
    """What this access, in that stream, is not ordered after. Nobody is told."""
    before, kept = count_races(), os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        with torch.cuda.stream(stream):
            access()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    return races_since(before)


def tell(races: Iterable[str]) -> str:
    """The missing waits in words."""
    words = ", ".join(dict.fromkeys(races))
    for call, name in IN_WORDS.items():
        words = words.replace(call, name)
    return words
