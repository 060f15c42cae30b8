"""A parameter server: rank 0 has the parameters. The other ranks, its workers, compute gradients.

A worker receives a copy of the parameters, computes a gradient at this copy, and sends it to the
server: it pushes the gradient. When the server takes a step, and to whom it replies with the new
parameters, is the mode. A gradient is stale if the server has taken steps since it sent the copy.

    python -m playground parameter-server
    torchrun --nproc-per-node 5 lesson.py

                 seconds staleness most   loss  s to loss 0.6  from all_reduce
    all_reduce       2.66      0.00    0  0.297         0.83   0e+00
    synchronous      3.05      0.00    0  0.297         0.87   1e-16
    asynchronous     1.22      2.96    9  0.294         0.32   7e-02
    bounded          2.86      1.61    9  0.300         0.58   4e-02

Sources: Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014; Ho et
al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NeurIPS 2013
"""

import itertools
import time

import torch
import torch.distributed as dist

STEPS = 40  # of synchronous; the other modes use the same number of gradients
COMPUTE = 10  # ms in which a worker computes a gradient
SLOWER = 5  # how many times as long the last worker takes
AHEAD = 3  # bounded: who is further ahead of the slowest worker, in gradients, waits
TARGET = 0.6  # loss until which the time is measured
LR = 0.5
MOMENTUM = 0.0
CLASSES, FEATURES, BATCH = 32, 64, 32  # sizes of the task; a batch is of one worker


class Parameters:
    """The weight of a linear classifier, and SGD with momentum."""

    def __init__(self):
        self.weight = self.velocity = torch.zeros(CLASSES, FEATURES)
        self.start = time.perf_counter()
        self.steps = 0
        self.curve = []  # after each step: the time in seconds, and the weight

    def step(self, gradient):
        self.velocity = MOMENTUM * self.velocity + gradient
        self.weight = self.weight - LR * self.velocity
        self.steps += 1
        self.curve.append((time.perf_counter() - self.start, self.weight))


class Server:
    """The parameters, which are on rank 0, and its messages from and to the workers."""

    def __init__(self, size, group):
        self.parameters = Parameters()
        self.group = group
        self.pushes = dict.fromkeys(range(1, size), 0)  # gradients received, by worker
        self.sent_at = {}  # by worker that computes: the number of steps when its copy was sent
        self.staleness = []  # of each gradient
        self.total = 0  # the sum of all gradients
        self.lead = 0  # the most gradients that a worker was ahead of the slowest at its reply
        for worker in self.pushes:
            self.reply(worker)

    def receive(self):
        """Wait for the next gradient of any worker. Return both."""
        gradient = torch.empty(CLASSES, FEATURES)
        worker = dist.recv(gradient, group=self.group)  # without src: from any rank
        self.pushes[worker] += 1
        self.total += gradient
        self.staleness.append(self.parameters.steps - self.sent_at.pop(worker))
        return worker, gradient

    def reply(self, worker):
        """Send a worker a copy of the parameters. It computes its next gradient."""
        dist.send_object_list([self.parameters.weight], dst=worker, group=self.group)
        self.sent_at[worker] = self.parameters.steps
        self.lead = max(self.lead, self.pushes[worker] - min(self.pushes.values()))

    def stop(self):
        """End the workers. The gradients that some of them still compute are not used."""
        for worker in self.sent_at:
            dist.recv(torch.empty(CLASSES, FEATURES), src=worker, group=self.group)
        for worker in self.pushes:
            dist.send_object_list([None], dst=worker, group=self.group)


def synchronous(server):
    """Wait for a gradient of each worker. Take a step with their mean. Reply to all."""
    for _ in range(STEPS):
        gradients = dict(server.receive() for _ in range(len(server.pushes)))
        server.parameters.step(sum(gradients.values()) / len(gradients))
        for worker in gradients:
            server.reply(worker)


def asynchronous(server):
    """Take a step with each gradient as soon as it comes. Reply to its worker.

    A gradient is divided by the number of workers, as in a mean, so that all modes go equally far.
    """
    for _ in range(STEPS * len(server.pushes)):
        worker, gradient = server.receive()
        server.parameters.step(gradient / len(server.pushes))
        server.reply(worker)


def bounded(server):
    """As asynchronous, but a worker that is over AHEAD gradients ahead of the slowest one waits."""
    waiting = []
    for _ in range(STEPS * len(server.pushes)):
        worker, gradient = server.receive()
        server.parameters.step(gradient / len(server.pushes))
        waiting.append(worker)
        slowest = min(server.pushes.values())
        for ready in [each for each in waiting if server.pushes[each] <= slowest + AHEAD]:
            waiting.remove(ready)
            server.reply(ready)


def work(rank, size, group):
    """Compute a gradient at each copy of the parameters from the server, until it sends None."""
    for step in itertools.count():
        reply = [None]  # an object instead of a tensor, so that it can be None
        dist.recv_object_list(reply, src=0, group=group)
        if reply[0] is None:
            return
        dist.send(compute_gradient(reply[0], rank, size, step), dst=0, group=group)


def compute_gradient(weight, rank, size, step):
    """The gradient of the loss on this worker's batch of a step."""
    time.sleep(COMPUTE / 1000 * (SLOWER if rank == size - 1 else 1))  # as if the model were large
    weight = weight.detach().requires_grad_()  # leaves the weight of all_reduce as it is
    inputs, labels = make_batch(rank + size * step, BATCH)
    return torch.autograd.grad(compute_loss(weight, inputs, labels), weight)[0]


def compute_loss(weight, inputs, labels):
    return torch.nn.functional.cross_entropy(inputs @ weight.T, labels)


def make_batch(seed, count):
    """Points around the centers of the classes: inputs [count, FEATURES] and labels [count]."""
    torch.manual_seed(0)
    centers = torch.randn(CLASSES, FEATURES)  # the same in every batch
    torch.manual_seed(1 + seed)
    labels = torch.randint(CLASSES, (count,))
    return centers[labels] + 2 * torch.randn(count, FEATURES), labels


def all_reduce(rank, size, group):
    """Without a server, all workers have the parameters and average their gradients.

    Rank 0 is no worker. It adds a gradient of zeros, so that it can print the result.
    """
    parameters = Parameters()
    for step in range(STEPS):
        gradient = torch.zeros(CLASSES, FEATURES)
        if rank > 0:
            gradient = compute_gradient(parameters.weight, rank, size, step)
        dist.all_reduce(gradient, group=group)
        parameters.step(gradient / (size - 1))
    return parameters


def print_row(name, parameters, staleness, expected):
    batch = make_batch(0, 1024)  # by rank 0's seed: points of no worker
    reached = (
        seconds for seconds, weight in parameters.curve if compute_loss(weight, *batch) < TARGET
    )
    print(
        f"{name:12} {parameters.curve[-1][0]:8.2f} {sum(staleness) / len(staleness):9.2f} "
        f"{max(staleness):4} "
        f"{compute_loss(parameters.weight, *batch):6.3f} {next(reached, float('nan')):12.2f}"
        f"   {(parameters.weight - expected).abs().max():.0e}"
    )


def run(rank, size):
    assert size > 1, "a server and a worker need 2 ranks"
    group = dist.new_group(backend="gloo")  # even on GPUs: nccl has no recv from any rank
    expected = all_reduce(rank, size, group)
    if rank == 0:
        print(f"             seconds staleness most   loss  s to loss {TARGET}  from all_reduce")
        print_row("all_reduce", expected, [0], expected.weight)
    wrong = []
    for mode in (synchronous, asynchronous, bounded):
        if rank > 0:
            work(rank, size, group)
        else:
            server = Server(size, group)
            mode(server)
            server.stop()
            print_row(mode.__name__, server.parameters, server.staleness, expected.weight)
            if mode is synchronous:
                difference = (server.parameters.weight - expected.weight).abs().max()
            excess = (server.parameters.weight + LR * server.total / (size - 1)).abs().max()
            if MOMENTUM == 0 and not excess < 1e-9:  # with momentum, a gradient lasts
                wrong.append(mode.__name__)
    assert rank > 0 or difference < 1e-9, "synchronous: not the training of all_reduce"
    assert not wrong, f"not a step of LR / workers with each gradient: {', '.join(wrong)}"
    # the last server is that of bounded
    assert rank > 0 or server.lead <= AHEAD, "bounded: a worker was too far ahead at its reply"


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)  # so that rounding cannot hide an error
    torch.set_default_device("cpu")  # gloo sends from there
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
