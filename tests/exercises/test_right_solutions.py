"""Right solutions that are not the reference pass, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from playground.exercises.exercise import CATALOGUE, PASS
from playground.exercises.verdict import Solution, check_solution, tell_lines
from playground.exercises.work import Work
from playground.runtime.launcher.server import preload

IMPORTS = """\
import copy, math, threading
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
"""
SOLUTIONS = {
    ("handover", "and a barrier"): """
def handover(rank, size, tensor):
    if rank < 2:
        (dist.recv if rank else dist.send)(tensor, 1 - rank)
    dist.barrier()
""",
    ("swap", "in a batch"): """
def swap(rank, size, tensor):
    partner, theirs = rank ^ 1, tensor.clone()
    if partner < size:
        messages = [dist.P2POp(dist.irecv, theirs, partner), dist.P2POp(dist.isend, tensor, partner)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
    return theirs
""",
    ("swap", "a sender thread"): """
def swap(rank, size, tensor):
    partner, theirs = rank ^ 1, tensor.clone()
    if partner < size:
        thread = threading.Thread(target=dist.send, args=(tensor, partner))
        thread.start()
        dist.recv(theirs)
        thread.join()
    return theirs
""",
    ("broadcast", "along a chain"): """
def broadcast(rank, size, tensor, root):
    place = (rank - root) % size
    if place > 0:
        dist.recv(tensor, (rank - 1) % size)
    if place < size - 1:
        dist.send(tensor, (rank + 1) % size)
""",
    ("groups", "members only, their own rank first, from a generator"): """
def groups(rank, size, tensor):
    others = [each for each in range(rank % 2, size, 2) if each != rank]
    mine = dist.new_group((each for each in [rank, *others]), use_local_synchronization=True)
    dist.broadcast(tensor, rank % 2, group=mine)
    dist.destroy_process_group(mine)
""",
    ("chain", "from the last rank to the first"): """
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
    ("all-gather", "in batches, and turned round at the end"): """
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
    ("ring", "padded, in one loop"): """
def ring(rank, size, tensor):
    flat = torch.cat([tensor, tensor.new_zeros(-len(tensor) % size)])
    chunks, arrived = flat.view(size, -1), tensor.new_empty(len(flat) // size)
    for step in range(2 * size - 2):
        request = dist.isend(chunks[(rank - step) % size], (rank + 1) % size)
        dist.recv(arrived, (rank - 1) % size)
        request.wait()
        mine = chunks[(rank - step - 1) % size]
        mine.copy_(arrived if step >= size - 1 else mine + arrived)
    tensor.copy_(flat[: len(tensor)])
""",
    ("doubling", "the largest distance first, in batches"): """
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
def mean(rank, size, losses):
    samples = torch.tensor(len(losses))
    work = dist.all_reduce(samples, async_op=True)
    mine = losses.double().mean() * len(losses) if len(losses) else torch.zeros((), dtype=torch.float64)
    work.wait()
    mine /= samples
    dist.all_reduce(mine)
    return float(mine)
""",
    ("epochs", "without a sampler"): """
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
    ("same-start", "by DistributedDataParallel"): """
def same_start(rank, size, model):
    DistributedDataParallel(model)
""",
    ("same-start", "asynchronously, into copies"): """
@torch.no_grad()
def same_start(rank, size, model):
    tensors = [*model.buffers(), *model.parameters()]
    copies = [tensor.clone() for tensor in tensors]
    for work in [dist.broadcast(copy, src=0, async_op=True) for copy in copies]:
        work.wait()
    for tensor, copy in zip(tensors, copies):
        tensor.copy_(copy)
""",
    ("average", "asynchronously"): """
def average(rank, size, model):
    params = list(model.parameters())
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
    works = [dist.all_reduce(grad, async_op=True) for grad in grads]
    for param, grad, work in zip(params, grads, works):
        work.wait()
        param.grad = grad / size
""",
    ("average", "gathered"): """
def average(rank, size, model):
    for param in model.parameters():
        mine = torch.zeros_like(param) if param.grad is None else param.grad
        everyones = [None] * size
        dist.all_gather_object(everyones, mine)
        param.grad = torch.stack(everyones).mean(dim=0)
""",
    ("weighted", "no backward without samples"): """
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
    ("buckets", "from a stack"): """
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
    ("overlap", "futures"): """
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
    ("overlap", "buckets of two"): """
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
    ("accumulate", "past DistributedDataParallel, but for the last"): """
def accumulate(rank, size, model, inputs, targets):
    for m, (some, wanted) in enumerate(zip(inputs, targets), 1):
        output = model(some) if m == len(inputs) else model.module(some)
        (F.mse_loss(output, wanted) / len(inputs)).backward()
""",
    ("accumulate", "one no_sync for all but the last, scaled at the end"): """
def accumulate(rank, size, model, inputs, targets):
    with model.no_sync():
        for some, wanted in zip(inputs[:-1], targets[:-1]):
            F.mse_loss(model(some), wanted).backward()
    F.mse_loss(model(inputs[-1]), targets[-1]).backward()
    for param in model.parameters():
        param.grad /= len(inputs)
""",
    ("hook", "a thread"): """
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
    ("judge", "after each step"): """
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
def token_loss(rank, size, model, inputs, labels):
    is_token = labels >= 0
    tokens = is_token.sum().double()
    dist.all_reduce(tokens)
    scores = model(inputs).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    (-(scores * is_token).sum() / tokens).backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
""",
    ("snapshot", "two files in turn, the newest that can be read"): """
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
    ("agree", "rank 0 decides"): """
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
    ("call", "tags in the place of numbers"): """
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
    ("sync", "pushes in any order"): """
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
}
QUICK = ("in a batch", "asynchronously")
"""Those that are looked at in every run of the suite; `make stress` looks at all."""

for name, _ in SOLUTIONS:
    preload(*CATALOGUE[name].preload)


@pytest.mark.parametrize(
    ("name", "way"),
    [pytest.param(*each, marks=() if each[1] in QUICK else pytest.mark.stress) for each in SOLUTIONS],
)
def test_another_way_is_right_too(name: str, way: str) -> None:
    exercise = CATALOGUE[name]
    solution = Solution(exercise, IMPORTS + SOLUTIONS[name, way], exercise.file)
    verdict = check_solution(solution, Work(Path("nowhere")).solutions_before(exercise))
    assert (verdict.status, verdict.passed) == (PASS, exercise.worlds), tell_lines(verdict)
