"""When does it pay? A training step in one process, and on N ranks, with no link and over two.

    seconds of a step = forward and backward / N + optimizer.step + messages

N ranks divide forward and backward. Every rank updates all parameters. The messages get no shorter
with more ranks.

    python -m playground scaling
    torchrun --nproc-per-node 2 lesson.py

    largest difference of a gradient from one process 5e-17
    a step has 1.053 GFLOP by 6 N tokens, 1.040 counted
    one process reaches 43% of the peak, 91 GFLOP/s
    forward and backward 25.6 ms, optimizer.step 2.1 ms
                messages  strong  Amdahl    weak  Gustafson
    no link       1.5 ms    1.44    1.69    1.65       1.83
    1 Gbit/s      9.1 ms    1.02    1.15    1.34       1.45
    0.1 Gbit/s   77.2 ms    0.29    0.30    0.48       0.51

"strong" and "weak" are speedups: N ranks share one batch, or they have a batch each. The laws of
Amdahl and Gustafson predict them from the parts, which are measured, too.

Sources: Amdahl, Validity of the Single Processor Approach, 1967; Gustafson, Reevaluating Amdahl's
Law, 1988; Chowdhery et al., PaLM, 2022, arXiv 2204.02311, appendix B
"""

import math
import time
from copy import deepcopy

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from playground.lessons.gpt import GPT, T, make_batch, next_token_loss

SEQUENCES = 32  # of a batch; the number of ranks must divide it
ROUNDS = 10  # calls of each function that is measured
SIDE = 1024  # of the matrices whose product shows the peak
LINKS = {"no link": math.inf, "1 Gbit/s": 1.0, "0.1 Gbit/s": 0.1}  # 10^9 bits per second


def compute_gradients(model, batch):
    """Forward and backward: the work that N ranks divide."""
    model.zero_grad()
    loss = next_token_loss(model, batch)
    loss.backward()


def average_gradients(model, gbit):
    """Average all gradients by one all_reduce, as slowly as over a link of gbit 10^9 bits/s."""
    size = dist.get_world_size()
    flat = torch.cat([param.grad.flatten() for param in model.parameters()])
    dist.all_reduce(flat)
    flat /= size
    time.sleep(2 * (size - 1) / size * flat.nbytes * 8 / (gbit * 1e9))  # what a ring sends
    for param in model.parameters():
        param.grad.copy_(flat[: param.numel()].view_as(param))
        flat = flat[param.numel() :]


def plain_step(model, optimizer, batch):
    """A step of one process."""
    compute_gradients(model, batch)
    optimizer.step()


def train_step(model, optimizer, part, gbit):
    """A step of N ranks. Each has its part of the batch."""
    compute_gradients(model, part)
    average_gradients(model, gbit)
    optimizer.step()


def gradients_of(model):
    """All gradients as one vector."""
    return torch.cat([param.grad.flatten() for param in model.parameters()])


def print_difference(rank, size, model):
    """Print how far the averaged gradients are from one process, in float64, on any rank."""
    model, batch = deepcopy(model).double(), make_batch(SEQUENCES, seed=0)
    compute_gradients(model, batch)
    expected = gradients_of(model)
    compute_gradients(model, batch.chunk(size)[rank])
    average_gradients(model, math.inf)
    difference = (gradients_of(model) - expected).abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"largest difference of a gradient from one process {difference.item():.0e}")


def measure(alone, together):
    """The seconds of the fastest of ROUNDS calls of each function, by its name.

    Rank 0 calls what is in `alone`, while the others wait. All ranks call what is in `together`.
    The functions take turns, so that another program on this machine slows all of them down.
    """
    seconds = dict.fromkeys(alone | together, math.inf)
    for _ in range(ROUNDS):
        for name, (function, *arguments) in (alone | together).items():
            dist.barrier()
            start = time.perf_counter()
            if name in together or dist.get_rank() == 0:
                function(*arguments)
            torch.zeros(1).item()  # waits for a GPU, which is still busy when the function returns
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def measure_steps(rank, size, model):
    """Measure the parts of a step, and steps of one process and of N ranks over each link."""
    optimizer = torch.optim.AdamW(model.parameters())
    batches = make_batch(size * SEQUENCES, seed=0)
    batch, matrix = batches[:SEQUENCES], torch.randn(SIDE, SIDE)
    alone = {
        "forward, backward": (compute_gradients, model, batch),
        "optimizer.step": (optimizer.step,),
        "step": (plain_step, model, optimizer, batch),
        "long step": (plain_step, model, optimizer, batches),
        "product": (torch.mm, matrix, matrix),
    }
    links, part, long_part = LINKS.items(), batch.chunk(size)[rank], batches.chunk(size)[rank]
    strong = {("strong", link): (train_step, model, optimizer, part, gbit) for link, gbit in links}
    weak = {("weak", link): (train_step, model, optimizer, long_part, gbit) for link, gbit in links}
    messages = {("messages", link): (average_gradients, model, gbit) for link, gbit in links}
    return measure(alone, strong | weak | messages)


def count_operations(model):
    """Operations of a step: 6 for each parameter and token, and those that torch counts."""
    params = [param for name, param in model.named_parameters() if "embedding" not in name]
    with FlopCounterMode(display=False) as counter:
        compute_gradients(model, make_batch(SEQUENCES, seed=0))
    return 6 * sum(param.numel() for param in params) * SEQUENCES * T, counter.get_total_flops()


def print_share_of_peak(model, seconds):
    """Print the operations of a step, and the share of the peak that one process reaches."""
    operations, counted = count_operations(model)
    peak = 2 * SIDE**3 / seconds["product"]
    share = operations / seconds["step"] / peak
    print(f"a step has {operations / 1e9:.3f} GFLOP by 6 N tokens, {counted / 1e9:.3f} counted")
    print(f"one process reaches {share:.0%} of the peak, {peak / 1e9:.0f} GFLOP/s")


def amdahl(serial, size, messages):
    """The speedup of N ranks that share a batch. Shares are of the step of one process."""
    return 1 / (serial + (1 - serial) / size + messages)


def gustafson(serial, size, messages):
    """The speedup of N ranks that have a batch each. Shares are of the step of one process."""
    return (serial + (1 - serial) * size) / (1 + messages)


def print_speedups(size, seconds):
    """Print the measured speedups, and those that the laws predict from the parts."""
    compute, update = seconds["forward, backward"], seconds["optimizer.step"]
    print(f"forward and backward {1e3 * compute:.1f} ms, optimizer.step {1e3 * update:.1f} ms")
    print("            messages  strong  Amdahl    weak  Gustafson")
    for link in LINKS:
        messages = seconds["messages", link]
        strong = seconds["step"] / seconds["strong", link]
        weak = seconds["long step"] / seconds["weak", link]
        shares = update / (compute + update), size, messages / (compute + update)
        print(
            f"{link:12} {1e3 * messages:4.1f} ms {strong:7.2f} {amdahl(*shares):7.2f} "
            f"{weak:7.2f} {gustafson(*shares):10.2f}"
        )


def run(rank, size):
    assert size > 1, "one rank has no other to divide its work with: choose 2 or more"
    assert SEQUENCES % size == 0, f"{size} ranks cannot divide a batch of {SEQUENCES} equally"
    torch.manual_seed(0)  # the same parameters on every rank
    model = GPT()
    print_difference(rank, size, model)
    seconds = measure_steps(rank, size, model)
    if rank == 0:
        print_share_of_peak(model, seconds)
        print_speedups(size, seconds)


if __name__ == "__main__":
    dist.init_process_group()
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
