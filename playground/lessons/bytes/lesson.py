"""Train over a slow link: average less often, or send less of each gradient.

DDP sends every gradient in every step. Local SGD and DiLoCo let each rank train alone for H steps
before they average. Top-k sends the numbers of a gradient that have the largest absolute values,
and PowerSGD sends two vectors whose product is close to the gradient. Both add what they did not
send to the next gradient: error feedback.

    python -m playground bytes
    torchrun --nproc-per-node 2 lesson.py

    alone         loss 2.72 after    0 kB,  256 ms
    data_parallel loss 0.28 after  426 kB,  393 ms, from ddp 0e+00
    local_sgd     loss 0.26 after   98 kB,  175 ms
    diloco        loss 0.13 after   66 kB,  116 ms
    top_k         loss 0.26 after   15 kB,   72 ms
    power_sgd     loss 0.29 after  100 kB,  196 ms, from ddp_power_sgd 4e-14

Sources: Douillard et al., DiLoCo, arXiv 2311.08105; Karimireddy et al., Error feedback fixes
SignSGD, arXiv 1901.09847; Vogels et al., PowerSGD, arXiv 1905.13727
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

LR = 0.3
H = 8  # steps between two averages of local_sgd and diloco
ONE_IN = 50  # top_k sends one number of a gradient in so many
MBITS = 10  # bandwidth of the link, in Mbit/s
TARGET = 0.3  # loss at which the methods are compared
COMPUTE = 4  # ms of a step without messages
STEPS = 64  # of a training
CLASSES, FEATURES, BATCH = 32, 128, 32  # classes, numbers of a sample, samples of a batch


class Link:
    """Collectives, and the bytes that this rank sends in them."""

    def __init__(self):
        self.bytes = 0
        self.size = dist.get_world_size()

    def average(self, tensor):
        """Replace the tensor by its mean over the ranks."""
        self.bytes += 2 * (self.size - 1) / self.size * tensor.nbytes  # what a ring sends
        dist.all_reduce(tensor)
        tensor /= self.size

    def gather(self, vector):
        """Return the vectors of all ranks, one after the other."""
        self.bytes += (self.size - 1) * vector.nbytes
        gathered = vector.new_empty(self.size * len(vector))
        dist.all_gather_into_tensor(gathered, vector)
        return gathered


def alone(model, optimizer, batches, link):
    """The steps of one process. With a plain model, nothing is sent."""
    for inputs, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        yield  # measure looks at the model after each step


def data_parallel(model, optimizer, batches, link):
    """Average the gradient in every step."""
    for inputs, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        link.average(model.weight.grad)
        optimizer.step()
        yield


def local_sgd(model, optimizer, batches, link):
    """Train alone, and average the parameters after every H steps."""
    for step, _ in enumerate(alone(model, optimizer, batches, link), 1):
        if step % H == 0:
            link.average(model.weight.data)
        yield


def diloco(model, optimizer, batches, link):
    """Average the change of H steps. A second, outer optimizer uses it as if it were a gradient."""
    shared = model.weight.detach().clone()  # where the H steps begin: the same on all ranks
    outer = torch.optim.SGD([shared], lr=0.7, momentum=0.9, nesterov=True)
    for step, _ in enumerate(alone(model, optimizer, batches, link), 1):
        if step % H == 0:
            shared.grad = shared - model.weight.detach()  # minus the change: step() subtracts it
            link.average(shared.grad)
            outer.step()
            model.weight.data.copy_(shared)
        yield


def top_k(model, optimizer, batches, link):
    """Send the numbers with the largest absolute values. Add the others to the next gradient."""
    unsent = torch.zeros(model.weight.numel())
    for inputs, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        unsent += model.weight.grad.flatten()
        largest = unsent.abs().topk(len(unsent) // ONE_IN).indices.int()  # 4 bytes for a place
        places, values = link.gather(largest), link.gather(unsent[largest])
        unsent[largest] = 0
        mean = torch.zeros_like(unsent).index_add_(0, places, values / link.size)
        model.weight.grad = mean.view_as(model.weight)
        optimizer.step()
        yield


def power_sgd(model, optimizer, batches, link):
    """Send two vectors whose product is close to the gradient. Add the error to the next one."""
    yield from data_parallel(model, optimizer, batches[:2], link)  # the library needs two, too
    error, right = torch.zeros_like(model.weight), torch.ones(FEATURES, 1)
    for inputs, labels in batches[2:]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        matrix = model.weight.grad + error
        left = matrix @ right
        link.average(left)
        left /= left.norm()
        right = matrix.T @ left  # the next step begins with it
        link.average(right)
        model.weight.grad = left @ right.T
        error = matrix - model.weight.grad  # its mean over the ranks is what the product lacks
        optimizer.step()
        yield


def ddp(model, optimizer, batches, link):
    """The library's data_parallel: backward() of DDP averages the gradients. Counts no bytes."""
    return alone(nn.parallel.DistributedDataParallel(model), optimizer, batches, link)


def ddp_power_sgd(model, optimizer, batches, link):
    """The library's power_sgd: a communication hook, which DDP calls instead of all_reduce."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    state.p_memory_dict[0] = torch.empty(CLASSES)  # left: it is computed before it is read
    state.q_memory_dict[0] = torch.ones(FEATURES)  # right: ones, as in power_sgd
    replica = nn.parallel.DistributedDataParallel(model)
    replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return alone(replica, optimizer, batches, link)


def make_batch(seed, classes, count):
    """Points around the centers of some classes: inputs [count, FEATURES] and labels [count]."""
    torch.manual_seed(0)
    centers = torch.randn(CLASSES, FEATURES)  # the same in every batch
    torch.manual_seed(seed)
    labels = classes[torch.randint(len(classes), (count,))]
    return centers[labels] + 2 * torch.randn(count, FEATURES), labels


def measure(method, rank, size):
    """Train. Return this rank's weight after 64 steps and, after each step, its kB, ms and loss."""
    torch.manual_seed(1234)
    model = nn.Linear(FEATURES, CLASSES, bias=False)  # the same on all ranks
    classes = torch.arange(CLASSES)  # a rank trains on every size-th, and is tested on all
    batches = [make_batch(1 + rank + size * i, classes[rank::size], BATCH) for i in range(STEPS)]
    inputs, labels = make_batch(1_000_000, classes, 1024)
    optimizer, link, curve = torch.optim.SGD(model.parameters(), LR), Link(), []
    for step, _ in enumerate(method(model, optimizer, batches, link), 1):
        loss = nn.functional.cross_entropy(model(inputs), labels).item()
        ms = step * COMPUTE + link.bytes * 8 / (MBITS * 1000)  # 1 Mbit/s is 1000 bits per ms
        curve.append((link.bytes / 1000, ms, loss))
        if step <= 64:  # later, power_sgd has made rounding as large as a mistake
            weight = model.weight.detach().clone()
    return weight, curve


def differ_between_ranks(weight):
    """Whether a rank's weight is not that of rank 0. All ranks call this."""
    of_rank_0 = weight.clone()
    dist.broadcast(of_rank_0, src=0)
    difference = (weight - of_rank_0).abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return difference.item() > 1e-9


def run(rank, size):
    libraries = {data_parallel: ddp, power_sgd: ddp_power_sgd}
    wrong, different, worse = [], [], []
    for method in (alone, data_parallel, local_sgd, diloco, top_k, power_sgd):
        weight, curve = measure(method, rank, size)
        kb, ms, loss = next((each for each in curve if each[-1] < TARGET), curve[-1])
        text = f"{method.__name__:14}loss {loss:.2f} after {kb:4.0f} kB, {ms:4.0f} ms"
        if method in libraries:
            difference = (measure(libraries[method], rank, size)[0] - weight).abs().max()
            dist.all_reduce(difference, op=dist.ReduceOp.MAX)
            text += f", from {libraries[method].__name__} {difference:.0e}"
            if not difference < 1e-9:
                wrong.append(method.__name__)
        if rank == 0:
            print(text)
        if method is alone:
            loss_alone = curve[-1][-1]
        elif size > 1 and not curve[-1][-1] < loss_alone:
            worse.append(method.__name__)
        if method is not alone and STEPS % H == 0 and differ_between_ranks(weight):
            different.append(method.__name__)
    assert not wrong, f"not the training of the library: {', '.join(wrong)}"
    assert not different, f"the ranks end with different weights: {', '.join(different)}"
    assert not worse, f"no better than a rank that trains alone: {', '.join(worse)}"


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)  # so that rounding cannot hide an error
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
