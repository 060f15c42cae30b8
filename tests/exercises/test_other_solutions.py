"""Right solutions that are not the reference pass, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from playground.exercises.exercise import PASS, exercises
from playground.exercises.verdict import Source, check_source, tell_lines
from playground.exercises.work import Work
from playground.runtime.launcher.server import preload

SOLUTIONS = {
    ("accumulate", "one no_sync for all but the last, scaled at the end"): """
import torch.nn.functional as F


def accumulate(rank, size, model, inputs, targets):
    with model.no_sync():
        for some, wanted in zip(inputs[:-1], targets[:-1]):
            F.mse_loss(model(some), wanted).backward()
    F.mse_loss(model(inputs[-1]), targets[-1]).backward()
    for param in model.parameters():
        param.grad /= len(inputs)
""",
    ("accumulate", "the flag instead of no_sync"): """
def accumulate(rank, size, model, inputs, targets):
    for number, (some, wanted) in enumerate(zip(inputs, targets), 1):
        model.require_backward_grad_sync = number == len(inputs)
        ((model(some) - wanted) ** 2 / targets.numel()).sum().backward()
""",
    ("hook", "waits in the hook"): """
import torch
import torch.distributed as dist


def hook(rank, size, model, inputs):
    def average(state, bucket):
        compressed = bucket.buffer().half()
        dist.all_reduce(compressed)
        future = torch.futures.Future()
        future.set_result(compressed.float() / size)
        return future

    model.register_comm_hook(None, average)
    model(inputs).sum().backward()
""",
    ("hook", "divides before"): """
import torch
import torch.distributed as dist


def hook(rank, size, model, inputs):
    def average(state, bucket):
        share = (bucket.buffer() / size).to(torch.float16)
        future = dist.all_reduce(share, async_op=True).get_future()
        return future.then(lambda future: future.value()[0].to(torch.float32))

    model.register_comm_hook(None, average)
    model(inputs).sum().backward()
""",
    ("judge", "once, at the end"): """
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector


def judge(rank, size, model, step, inputs, targets):
    alone = copy.deepcopy(model)
    for batch, wanted in zip(inputs, targets):
        step(model, batch.tensor_split(size)[rank], wanted.tensor_split(size)[rank])
        gradients = torch.autograd.grad(F.mse_loss(alone(batch), wanted), list(alone.parameters()))
        with torch.no_grad():
            for param, gradient in zip(alone.parameters(), gradients):
                param -= 0.1 * gradient
    mine, due = (parameters_to_vector(each.parameters()).detach() for each in (model, alone))
    everyones = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(everyones, mine)
    return all(float((each - due).abs().max()) < 1e-6 for each in everyones)
""",
    ("judge", "after each step"): """
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F


def judge(rank, size, model, step, inputs, targets):
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for batch, wanted in zip(inputs, targets):
        step(model, batch.tensor_split(size)[rank], wanted.tensor_split(size)[rank])
        optimizer.zero_grad()
        F.mse_loss(alone(batch), wanted).backward()
        optimizer.step()
        close = [torch.allclose(*pair, rtol=1e-4) for pair in zip(model.parameters(), alone.parameters())]
        verdicts = [None] * size
        dist.all_gather_object(verdicts, all(close))
        if not all(verdicts):
            return False
    return True
""",
    ("token-loss", "a mask, and sums of gradients"): """
import torch.distributed as dist


def token_loss(rank, size, model, inputs, labels):
    is_token = labels >= 0
    tokens = is_token.sum().double()
    dist.all_reduce(tokens)
    scores = model(inputs).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    (-(scores * is_token).sum() / tokens).backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
""",
    ("token-loss", "mean losses, weighted"): """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from average import average


def token_loss(rank, size, model, inputs, labels):
    mine = int((labels != -100).sum())
    tokens = torch.tensor(mine)
    dist.all_reduce(tokens)
    if mine:
        (F.cross_entropy(model(inputs).transpose(1, 2), labels) * mine * size / tokens.item()).backward()
    average(rank, size, model)
""",
    ("agree", "lower and lower"): """
import torch
import torch.distributed as dist


def agree(rank, size, steps):
    limit = 10**9
    while True:
        mine = max((step for step in steps if step <= limit), default=-1)
        least, most = torch.tensor(mine), torch.tensor(mine)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if least == most:
            return None if mine < 0 else mine
        limit = int(least)
""",
    ("agree", "rank 0 decides"): """
import torch.distributed as dist


def agree(rank, size, steps):
    lists = [None] * size if rank == 0 else None
    dist.gather_object(sorted(steps), lists)
    answer = [None]
    for step in sorted(steps if rank == 0 else [], reverse=True):
        if all(step in each for each in lists):
            answer = [step]
            break
    dist.broadcast_object_list(answer)
    return answer[0]
""",
    ("call", "requests from anyone"): """
import torch
import torch.distributed as dist


def call(rank, size, arguments, calls, service):
    if rank > 0:
        requests = [dist.isend(torch.tensor([rank, number, x]), 0) for number, x in enumerate(arguments)]
        answers = {}
        while len(answers) < len(arguments):
            reply = torch.zeros(2, dtype=torch.long)
            dist.recv(reply)
            answers[int(reply[0])] = int(reply[1])
        [request.wait() for request in requests]
        return [answers[number] for number in sorted(answers)]
    pending = sum(calls)
    while pending:
        message = torch.zeros(3, dtype=torch.long)
        dist.recv(message)
        pending -= 1
        ready = service.submit(message, int(message[2])) + (service.close() if not pending else [])
        for ticket, answer in ready:
            dist.send(torch.tensor([ticket[1], answer]), int(ticket[0]))
    return []
""",
    ("call", "tags in the place of numbers"): """
import torch
import torch.distributed as dist


def call(rank, size, arguments, calls, service):
    if rank > 0:
        answers = [torch.tensor(0) for _ in arguments]
        replies = [dist.irecv(answer, 0, tag=number) for number, answer in enumerate(answers)]
        for argument in arguments:
            dist.isend(torch.tensor(argument), 0).wait()
        for reply in replies:
            reply.wait()
        return [int(answer) for answer in answers]
    ready = []
    for caller in range(size):
        for number in range(calls[caller]):
            argument = torch.tensor(0)
            dist.recv(argument, caller)
            ready += service.submit((caller, number), int(argument))
    for (caller, number), answer in ready + service.close():
        dist.send(torch.tensor(answer), caller, tag=number)
    return []
""",
    ("sync", "isend and irecv"): """
import torch
import torch.distributed as dist


def sync(rank, size, parameters, compute, steps, lr):
    for _ in range(steps):
        if rank:
            dist.send(compute(parameters), 0)
            dist.recv(parameters, 0)
            continue
        pushed = [torch.empty_like(parameters) for _ in range(1, size)]
        for request in [dist.irecv(each, worker) for worker, each in enumerate(pushed, 1)]:
            request.wait()
        parameters -= lr * torch.stack(pushed).mean(dim=0)
        for request in [dist.isend(parameters, worker) for worker in range(1, size)]:
            request.wait()
""",
    ("sync", "pushes in any order"): """
import torch
import torch.distributed as dist


def sync(rank, size, parameters, compute, steps, lr):
    for _ in range(steps):
        if rank == 0:
            pushed = {}
            while len(pushed) < size - 1:
                gradient = torch.empty_like(parameters)
                pushed[dist.recv(gradient)] = gradient
            for gradient in pushed.values():
                parameters -= lr * gradient / len(pushed)
            for worker in pushed:
                dist.send(parameters, worker)
        else:
            dist.send(compute(parameters), 0)
            dist.recv(parameters, 0)
""",
    ("stale", "a limit, and the last first"): """
import torch
import torch.distributed as dist


def stale(rank, size, parameters, steps, staleness, workers):
    for _ in range(steps * (rank > 0)):
        dist.send(torch.tensor(10**rank), 0)
        dist.recv(parameters, 0)
    pushes, blocked = [0] * (size - 1), set()
    while rank == 0 and min(pushes) < steps:
        worker, gradient = workers.next_push()
        parameters.add_(gradient)
        pushes[worker - 1] += 1
        blocked.add(worker)
        limit = min(pushes) + staleness
        for each in sorted(blocked, reverse=True):
            if pushes[each - 1] <= limit:
                blocked.discard(each)
                workers.reply(each, parameters)
""",
    ("stale", "room that is left"): """
import torch
import torch.distributed as dist


def stale(rank, size, parameters, steps, staleness, workers):
    if rank > 0:
        for _ in range(steps):
            dist.send(torch.tensor(10**rank), 0)
            dist.recv(parameters, 0)
        return
    room = {worker: staleness + 1 for worker in range(1, size)}
    owed = []
    for _ in range(steps * (size - 1)):
        worker, gradient = workers.next_push()
        parameters += gradient
        was = max(room.values())
        room[worker] -= 1
        if max(room.values()) < was:
            room = {each: left + 1 for each, left in room.items()}
        owed.append(worker)
        free = {each for each in owed if room[each] > 0}
        for each in free:
            workers.reply(each, parameters)
        owed = [each for each in owed if each not in free]
""",
    ("gpipe", "isend, and the last microbatch back first"): """
import torch
import torch.distributed as dist


def gpipe(rank, size, stage, inputs, targets):
    received, sent, requests = [], [], []
    for m in range(len(inputs)):
        x = inputs[m].clone()
        if rank:
            dist.irecv(x, rank - 1).wait()
        received.append(x.requires_grad_())
        sent.append(stage(x))
        if rank + 1 < size:
            requests.append(dist.isend(sent[-1].detach().clone(), rank + 1))
    for x, y, wanted in list(zip(received, sent, targets))[::-1]:
        if rank + 1 < size:
            g = torch.zeros_like(y)
            dist.recv(g, rank + 1)
        else:
            g = 2 * (y.detach() - wanted) / targets.numel()
        y.backward(g)
        if rank:
            requests.append(dist.isend(x.grad, rank - 1))
    for request in requests:
        request.wait()
""",
    ("gpipe", "by data, summed losses"): """
import torch
import torch.distributed as dist
import torch.nn.functional as F


def gpipe(rank, size, stage, inputs, targets):
    is_first, is_last = rank == 0, rank == size - 1
    features = [torch.empty_like(each).requires_grad_() for each in inputs]
    outputs = []
    for m, each in enumerate(features):
        if is_first:
            each.data.copy_(inputs[m])
        else:
            dist.recv(each.data, rank - 1)
        outputs.append(stage(each))
        if not is_last:
            dist.send(outputs[m].data, rank + 1)
    for m, output in enumerate(outputs):
        if is_last:
            F.mse_loss(output, targets[m], reduction="sum").div(targets.numel()).backward()
        else:
            gradient = torch.empty_like(output)
            dist.recv(gradient, rank + 1)
            torch.autograd.backward([output], [gradient])
        if not is_first:
            dist.send(features[m].grad, rank - 1)
""",
    ("one-forward-one-backward", "by what is in flight"): """
def one_forward_one_backward(rank, size, stage, microbatches):
    forwards = backwards = 0
    while backwards < microbatches:
        if forwards < microbatches and forwards - backwards < size - rank:
            stage.forward(forwards)
            forwards += 1
        else:
            stage.backward(backwards)
            backwards += 1
    stage.finish()
""",
    ("one-forward-one-backward", "by time"): """
def one_forward_one_backward(rank, size, stage, microbatches):
    delay = size - rank - 1
    for time in range(microbatches + delay):
        if time < microbatches:
            stage.forward(time)
        if time >= delay:
            stage.backward(time - delay)
    stage.finish()
""",
}

for name, _ in SOLUTIONS:
    preload(*exercises()[name].preload)


@pytest.mark.stress
@pytest.mark.parametrize(("name", "way"), SOLUTIONS, ids="-".join)
def test_another_way_is_right_too(name: str, way: str) -> None:
    exercise = exercises()[name]
    source = Source(exercise.function, SOLUTIONS[name, way], exercise.file)
    verdict = check_source(exercise, source, Work(Path("nowhere")).sources_before(exercise))
    assert (verdict.status, verdict.passed) == (PASS, exercise.worlds), tell_lines(verdict)
