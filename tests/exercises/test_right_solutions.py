"""From chain to overlap, right solutions that are not the reference pass, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from playground.exercises.exercise import PASS, exercises
from playground.exercises.verdict import Source, check_source, tell_lines
from playground.exercises.work import Work

pytestmark = pytest.mark.stress

SOLUTIONS = {
    ("chain", "from the last rank to the first"): """
import torch
import torch.distributed as dist


def chain(rank, size, tensor):
    if rank < size - 1:
        theirs = torch.zeros_like(tensor)
        dist.recv(theirs, rank + 1)
        tensor.add_(theirs)
    if rank:
        dist.send(tensor, rank - 1)
        dist.recv(tensor, rank - 1)
    if rank < size - 1:
        dist.send(tensor, rank + 1)
""",
    ("chain", "by requests"): """
import torch
import torch.distributed as dist


def chain(rank, size, tensor):
    if rank > 0:
        share = torch.empty_like(tensor)
        dist.irecv(share, rank - 1).wait()
        tensor += share
    if rank + 1 < size:
        given = dist.isend(tensor.clone(), rank + 1)
        dist.irecv(tensor, rank + 1).wait()
        given.wait()
    if rank > 0:
        dist.isend(tensor, rank - 1).wait()
""",
    ("all-gather", "even ranks send first"): """
import torch
import torch.distributed as dist


def all_gather(rank, size, tensor):
    found, current = {rank: tensor.clone()}, rank
    for _ in range(size - 1):
        incoming = (current - 1) % size
        found[incoming] = torch.empty_like(tensor)
        if rank % 2 == 0:
            dist.send(found[current], (rank + 1) % size)
        dist.recv(found[incoming], (rank - 1) % size)
        if rank % 2:
            dist.send(found[current], (rank + 1) % size)
        current = incoming
    return [found[place] for place in range(size)]
""",
    ("all-gather", "in batches, and turned round at the end"): """
import torch
import torch.distributed as dist


def all_gather(rank, size, tensor):
    arrived = [tensor]
    while len(arrived) < size:
        arrived.append(torch.empty_like(tensor))
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.irecv, arrived[-1], (rank - 1) % size),
            dist.P2POp(dist.isend, arrived[-2], (rank + 1) % size),
        ])
        for work in works:
            work.wait()
    return [arrived[(rank - place) % size] for place in range(size)]
""",
    ("doubling", "the largest distance first, in batches"): """
import math

import torch
import torch.distributed as dist


def doubling(rank, size, tensor):
    steps = int(math.log2(size))
    power = 2**steps
    guest = rank + power
    if rank >= power:
        dist.send(tensor, rank - power)
        dist.recv(tensor, rank - power)
        return
    if guest < size:
        theirs = torch.empty_like(tensor)
        dist.recv(theirs, guest)
        tensor += theirs
    for step in reversed(range(steps)):
        partner, theirs = rank ^ (1 << step), torch.empty_like(tensor)
        swap = [dist.P2POp(dist.isend, tensor, partner), dist.P2POp(dist.irecv, theirs, partner)]
        for work in dist.batch_isend_irecv(swap):
            work.wait()
        tensor += theirs
    if guest < size:
        dist.send(tensor, guest)
""",
    ("doubling", "partners computed, blocking calls in order"): """
import torch
import torch.distributed as dist


def doubling(rank, size, tensor):
    power = 1
    while 2 * power <= size:
        power *= 2
    theirs = torch.empty_like(tensor)
    if rank >= power:
        dist.send(tensor, rank - power)
    elif rank + power < size:
        dist.recv(theirs, rank + power)
        tensor += theirs
    distance = 1 if rank < power else power
    while distance < power:
        is_lower = rank // distance % 2 == 0
        partner = rank + distance if is_lower else rank - distance
        for sends in (is_lower, not is_lower):
            if sends:
                dist.send(tensor, partner)
            else:
                dist.recv(theirs, partner)
        tensor += theirs
        distance *= 2
    if rank >= power:
        dist.recv(tensor, rank - power)
    elif rank + power < size:
        dist.send(tensor, rank + power)
""",
    ("scatter-gather", "by requests, empty chunks not sent"): """
import torch
import torch.distributed as dist


def scatter_gather(rank, size, module, batch, samples):
    lengths = [samples // size + (other < samples % size) for other in range(size)]
    if rank:
        if lengths[rank]:
            chunk = torch.empty(lengths[rank], module.in_features)
            dist.recv(chunk, 0)
            with torch.no_grad():
                dist.isend(module(chunk), 0).wait()
        return None
    chunks = batch.split(lengths)
    outputs = torch.empty(samples, module.out_features)
    pieces = outputs.split(lengths)
    works = [dist.isend(chunk, other) for other, chunk in enumerate(chunks) if other and len(chunk)]
    works += [dist.irecv(piece, other) for other, piece in enumerate(pieces) if other and len(piece)]
    with torch.no_grad():
        pieces[0].copy_(module(chunks[0]))
    for work in works:
        work.wait()
    return outputs
""",
    ("scatter-gather", "one rank after the other"): """
import torch
import torch.distributed as dist


def scatter_gather(rank, size, module, batch, samples):
    starts = [len(torch.arange(samples).tensor_split(size)[other]) for other in range(size)]
    if rank == 0:
        outputs = [module(batch[: starts[0]])]
        for other in range(1, size):
            begin = sum(starts[:other])
            dist.send(batch[begin : begin + starts[other]], other)
            outputs.append(torch.zeros(starts[other], 2))
            dist.recv(outputs[-1], other)
        return torch.vstack(outputs)
    mine = torch.zeros(starts[rank], 3)
    dist.recv(mine, 0)
    dist.send(module(mine), 0)
""",
    ("mean", "weighted means"): """
import torch
import torch.distributed as dist


def mean(rank, size, losses):
    samples = torch.tensor(len(losses))
    work = dist.all_reduce(samples, async_op=True)
    mine = losses.double().mean() * len(losses) if len(losses) else torch.zeros((), dtype=torch.float64)
    work.wait()
    mine /= samples
    dist.all_reduce(mine)
    return float(mine)
""",
    ("mean", "by objects"): """
import torch.distributed as dist


def mean(rank, size, losses):
    everyones = [None] * size
    dist.all_gather_object(everyones, losses.tolist())
    losses = [loss for each in everyones for loss in each]
    return sum(losses) / len(losses)
""",
    ("epochs", "without a sampler"): """
import torch


def epochs(rank, size, samples, seed, first, count):
    visited = []
    for number in range(count):
        generator = torch.Generator()
        generator.manual_seed(seed + first + number)
        order = torch.randperm(samples, generator=generator).tolist()
        while len(order) % size:
            order += order[: size - len(order) % size]
        visited.append(order[rank::size])
    return visited
""",
    ("epochs", "a sampler for each"): """
from torch.utils.data import DistributedSampler


def epochs(rank, size, samples, seed, first, count):
    samplers = [DistributedSampler(range(samples), size, rank, seed=seed) for _ in range(count)]
    for place, sampler in enumerate(samplers):
        sampler.set_epoch(first + place)
    return [[*sampler] for sampler in samplers]
""",
    ("same-start", "by state_dict"): """
import torch.distributed as dist


def same_start(rank, size, model):
    for name in sorted(model.state_dict()):
        dist.broadcast(model.state_dict()[name], 0)
""",
    ("same-start", "asynchronously, into copies"): """
import torch
import torch.distributed as dist


@torch.no_grad()
def same_start(rank, size, model):
    tensors = [*model.buffers(), *model.parameters()]
    copies = [tensor.clone() for tensor in tensors]
    for work in [dist.broadcast(copy, src=0, async_op=True) for copy in copies]:
        work.wait()
    for tensor, copy in zip(tensors, copies):
        tensor.copy_(copy)
""",
    ("weighted", "without average"): """
import torch
import torch.distributed as dist


def weighted(rank, size, model, inputs, targets):
    ((model(inputs) - targets) ** 2).sum().backward()
    number = torch.tensor([float(targets.numel())])
    dist.all_reduce(number)
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= number
""",
    ("weighted", "no backward without samples"): """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from average import average


def weighted(rank, size, model, inputs, targets):
    total = torch.tensor(inputs.shape[0], dtype=torch.float32)
    dist.all_reduce(total)
    if inputs.shape[0]:
        loss = F.mse_loss(model(inputs), targets) * inputs.shape[0] / total * size
        loss.backward()
    average(rank, size, model)
""",
    ("flat", "into a row that is there before"): """
import torch
import torch.distributed as dist


def flat(rank, size, gradients):
    row = torch.empty(sum(each.numel() for each in gradients))
    begin = 0
    for each in gradients:
        row[begin : begin + each.numel()] = each.reshape(-1) / size
        begin += each.numel()
    dist.all_reduce(row, async_op=True).wait()
    for each in reversed(gradients):
        begin -= each.numel()
        each[...] = row[begin : begin + each.numel()].reshape(each.shape)
""",
    ("flat", "by torch's own functions"): """
import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def flat(rank, size, gradients):
    row = parameters_to_vector(each.reshape(each.shape) for each in map(torch.Tensor.contiguous, gradients))
    dist.all_reduce(row)
    vector_to_parameters(row / size, gradients)
""",
    ("buckets", "planned before, and without flat"): """
import torch
import torch.distributed as dist


def buckets(rank, size, model, cap):
    plan, room = [], 0
    for param in list(model.parameters())[::-1]:
        if param.numel() > room:
            plan.append([])
            room = cap
        plan[-1].append(param)
        room -= param.numel()
    flying = []
    for params in plan:
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in params]
        row = torch.cat([grad.view(-1) for grad in grads])
        flying.append((params, row, dist.all_reduce(row, async_op=True)))
    for params, row, work in flying:
        work.wait()
        for param, part in zip(params, (row / size).split([each.numel() for each in params])):
            param.grad = part.view(param.shape)
""",
    ("buckets", "from a stack"): """
import torch
from flat import flat


def buckets(rank, size, model, cap):
    left = list(model.parameters())
    for param in left:
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
    while left:
        bucket = [left.pop().grad]
        while left and sum(map(torch.numel, bucket)) + left[-1].numel() <= cap:
            bucket.append(left.pop().grad)
        flat(rank, size, bucket)
""",
    ("overlap", "copies, by place"): """
import torch
import torch.distributed as dist


def overlap(rank, size, model, loss, step):
    params = list(reversed(list(model.parameters())))
    copies, works, handles = [None] * len(params), [], []

    def start():
        while len(works) < len(params) and copies[len(works)] is not None:
            works.append(dist.all_reduce(copies[len(works)], async_op=True))

    def hook_for(place):
        def hook(param):
            copies[place] = param.grad / size
            start()
        return hook

    for place, param in enumerate(params):
        handles.append(param.register_post_accumulate_grad_hook(hook_for(place)))
    loss.backward()
    copies = [torch.zeros_like(param) if copy is None else copy for param, copy in zip(params, copies)]
    start()
    for handle, work, param, copy in zip(handles, works, params, copies):
        handle.remove()
        work.wait()
        param.grad = copy
    step()
""",
    ("overlap", "buckets of two"): """
import torch
import torch.distributed as dist


def overlap(rank, size, model, loss, step):
    params = [*model.parameters()][::-1]
    pairs, done, flying = [params[:2], params[2:]], set(), []

    def leave(param):
        done.add(param)
        while len(flying) < len(pairs) and done.issuperset(pairs[len(flying)]):
            row = torch.cat([each.grad.view(-1) for each in pairs[len(flying)]])
            flying.append((row, dist.all_reduce(row, async_op=True)))

    hooks = [param.register_post_accumulate_grad_hook(leave) for param in params]
    loss.backward()
    for hook in hooks:
        hook.remove()
    for param in params:
        if param not in done:
            param.grad = torch.zeros_like(param)
            leave(param)
    for pair, (row, work) in zip(pairs, flying):
        work.wait()
        for param, part in zip(pair, row.div(size).chunk(len(pair))):
            param.grad.copy_(part.view_as(param))
    step()
""",
}


@pytest.mark.parametrize(("name", "way"), SOLUTIONS)
def test_another_way_is_right_too(name: str, way: str) -> None:
    exercise = exercises()[name]
    source = Source(exercise.function, SOLUTIONS[name, way], exercise.file)
    verdict = check_source(exercise, source, Work(Path("nowhere")).sources_before(exercise))
    assert (verdict.status, verdict.passed) == (PASS, exercise.worlds), tell_lines(verdict)
