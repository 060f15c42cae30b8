"""Right solutions that are not the reference pass, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from playground.exercises.exercise import CATALOGUE, PASS
from playground.exercises.verdict import Solution, check_solution, tell_lines
from playground.exercises.work import Work
from playground.runtime.launcher.server import preload

SOLUTIONS = {
    ("swap", "a sender thread"): """
import threading

import torch.distributed as dist


def swap(rank, size, tensor):
    partner, theirs = rank ^ 1, tensor.clone()
    if partner < size:
        thread = threading.Thread(target=dist.send, args=(tensor, partner))
        thread.start()
        dist.recv(theirs)
        thread.join()
    return theirs
""",
    ("handover", "and a barrier"): """
import torch.distributed as dist


def handover(rank, size, tensor):
    if rank < 2:
        (dist.recv if rank else dist.send)(tensor, 1 - rank)
    dist.barrier()
""",
    ("whoami", "keys in another order"): """
import os

import torch.distributed as dist


def whoami():
    rank = dist.get_rank()
    return {"size": dist.get_world_size(), "node": rank // int(os.environ["LOCAL_WORLD_SIZE"]), "rank": rank}
""",
    ("groups", "members only, their own rank first, from a generator"): """
import torch.distributed as dist


def groups(rank, size, tensor):
    others = [each for each in range(rank % 2, size, 2) if each != rank]
    mine = dist.new_group((each for each in [rank, *others]), use_local_synchronization=True)
    dist.broadcast(tensor, rank % 2, group=mine)
    dist.destroy_process_group(mine)
""",
    ("average", "gathered"): """
import torch
import torch.distributed as dist


def average(rank, size, model):
    for param in model.parameters():
        mine = torch.zeros_like(param) if param.grad is None else param.grad
        everyones = [None] * size
        dist.all_gather_object(everyones, mine)
        param.grad = torch.stack(everyones).mean(dim=0)
""",
    ("same-start", "by DistributedDataParallel"): """
from torch.nn.parallel import DistributedDataParallel


def same_start(rank, size, model):
    DistributedDataParallel(model)
""",
    ("overlap", "futures"): """
import torch
import torch.distributed as dist


def overlap(rank, size, model, loss, step):
    params, futures, ready = [*model.parameters()][::-1], [], set()

    def collect(param):
        ready.add(param)
        while len(futures) < len(params) and params[len(futures)] in ready:
            work = dist.all_reduce(params[len(futures)].grad, async_op=True)
            futures.append(work.get_future().then(lambda future: future.value()[0] / size))

    hooks = [param.register_post_accumulate_grad_hook(collect) for param in params]
    loss.backward()
    for hook, param in zip(hooks, params):
        hook.remove()
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        collect(param)
    for param, future in zip(params, futures):
        param.grad = future.wait()
    step()
""",
    ("accumulate", "past DistributedDataParallel, but for the last"): """
import torch.nn.functional as F


def accumulate(rank, size, model, inputs, targets):
    for m, (some, wanted) in enumerate(zip(inputs, targets), 1):
        output = model(some) if m == len(inputs) else model.module(some)
        (F.mse_loss(output, wanted) / len(inputs)).backward()
""",
    ("hook", "a thread"): """
import threading

import torch
import torch.distributed as dist


def hook(rank, size, model, inputs):
    before = [threading.Thread()]
    before[0].start()

    def average(state, bucket):
        future, last = torch.futures.Future(), before[-1]

        def reduce():
            last.join()
            compressed = bucket.buffer().half()
            dist.all_reduce(compressed)
            future.set_result(compressed.float() / size)

        before.append(threading.Thread(target=reduce))
        before[-1].start()
        return future

    model.register_comm_hook(None, average)
    model(inputs).sum().backward()
""",
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
    ("snapshot", "two files in turn, the newest that can be read"): """
import torch


def snapshot(rank, size, folder, model, optimizer, steps, train):
    found = []
    for file in folder.glob(f"{rank}-*.pt"):
        try:
            found.append(torch.load(file))
        except Exception:
            file.unlink()
    done = max((held["done"] for held in found), default=0)
    for held in found:
        if held["done"] == done:
            model.load_state_dict(held["model"])
            optimizer.load_state_dict(held["optimizer"])
            torch.random.set_rng_state(held["random"])
    for step in range(done, steps):
        train(step)
        held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": step + 1}
        torch.save(held | {"random": torch.random.get_rng_state()}, folder / f"{rank}-{step % 2}.pt")
""",
    ("snapshot", "one folder a rank, one file a step"): """
import torch


def snapshot(rank, size, folder, model, optimizer, steps, train):
    mine = folder / str(rank)
    mine.mkdir(exist_ok=True)
    done = max((int(file.stem) for file in mine.glob("*.pt")), default=0)
    if done:
        weights, state, random = torch.load(mine / f"{done}.pt")
        with torch.no_grad():
            for param, weight in zip(model.parameters(), weights):
                param.copy_(weight)
        optimizer.load_state_dict(state)
        torch.default_generator.set_state(random)
    for step in range(done, steps):
        train(step)
        unfinished = mine / "unfinished"
        with open(unfinished, "wb") as file:
            torch.save(([*model.parameters()], optimizer.state_dict(), torch.default_generator.get_state()), file)
        unfinished.rename(mine / f"{step + 1}.pt")
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
    preload(*CATALOGUE[name].preload)


@pytest.mark.stress
@pytest.mark.parametrize(("name", "way"), SOLUTIONS)
def test_another_way_is_right_too(name: str, way: str) -> None:
    exercise = CATALOGUE[name]
    solution = Solution(exercise, SOLUTIONS[name, way], exercise.file)
    verdict = check_solution(solution, Work(Path("nowhere")).solutions_before(exercise))
    assert (verdict.status, verdict.passed) == (PASS, exercise.worlds), tell_lines(verdict)
