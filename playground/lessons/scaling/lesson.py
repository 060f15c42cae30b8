"""When does it pay? A step of one process and of N ranks, in one machine and over two slow links.

    seconds of a step = (forward and backward) / N + optimizer.step + messages

N ranks that share one batch divide forward and backward. With a batch each, nothing is divided: the
step is as long, but trains N batches. Every rank updates all parameters. The messages get no
shorter with more ranks.

    python -m playground scaling --rounds 30
    torchrun --nproc-per-node 2 lesson.py

    largest difference of a gradient from one process 5e-17
    a step has 1.053 GFLOP by 6 · parameters · tokens, 1.040 counted
    one process reaches 42% of the peak, 92 GFLOP/s
    forward and backward 25.4 ms, optimizer.step 2.1 ms
                 messages  strong  Amdahl    weak  Gustafson
    no link        1.5 ms    1.44    1.69    1.68       1.82
    1 Gbit/s       9.1 ms    1.03    1.15    1.30       1.44
    0.1 Gbit/s    77.2 ms    0.29    0.30    0.47       0.51

"strong" and "weak" are speedups. Strong: N ranks share one batch. Weak: they have a batch each, and
are compared with one process that takes one step with all N batches. The laws of Amdahl and
Gustafson predict both speedups from the parts, which are measured, too.

Sources: Amdahl, Validity of the Single Processor Approach, 1967; Gustafson, Reevaluating Amdahl's
Law, 1988; Kaplan et al., Scaling Laws for Neural Language Models, 2020, arXiv 2001.08361 (6
operations); Chowdhery et al., PaLM, 2022, arXiv 2204.02311, appendix B (share of the peak)
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


def gradients_of(model):
    """All gradients as one vector."""
    return torch.cat([param.grad.flatten() for param in model.parameters()])


def wait_for_gpu():
    """If the default device is a GPU, wait until it has done all work."""
    # .item() copies a number from the GPU
    torch.zeros(1).item()


def average_gradients(model, gbit):
    """Average all gradients, and sleep as long as a link of gbit 10^9 bits/s would need."""
    size = dist.get_world_size()
    flat = gradients_of(model)
    dist.all_reduce(flat)
    flat /= size
    wait_for_gpu()
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


def print_difference(rank, size, model):
    """Print the largest difference of a gradient from one process, in float64, on any rank."""
    model, batch = deepcopy(model).double(), make_batch(SEQUENCES, seed=0)
    compute_gradients(model, batch)
    expected = gradients_of(model)
    compute_gradients(model, batch.chunk(size)[rank])
    average_gradients(model, math.inf)
    difference = (gradients_of(model) - expected).abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"largest difference of a gradient from one process {difference.item():.0e}")
    assert difference < 1e-9, "not the gradients of one process"


def measure(alone, together):
    """The seconds of the fastest of ROUNDS calls of each function, by its key.

    Rank 0 calls what is in `alone`, while the others wait. All ranks call what is in `together`.
    The functions take turns, so that another program on this machine slows all of them down.
    """
    seconds = dict.fromkeys(alone | together, math.inf)
    for _ in range(ROUNDS):
        for key, (function, *arguments) in (alone | together).items():
            dist.barrier()
            start = time.perf_counter()
            if key in together or dist.get_rank() == 0:
                function(*arguments)
            wait_for_gpu()
            seconds[key] = min(seconds[key], time.perf_counter() - start)
    return seconds


def measure_steps(rank, size, model):
    """Measure the parts of a step, and steps of one process and of N ranks over each link."""
    optimizer, taken = torch.optim.AdamW(model.parameters()), []
    optimizer.register_step_post_hook(lambda *_: taken.append(1))  # after each step
    big_batch = make_batch(size * SEQUENCES, seed=0)  # a batch for each rank
    batch, matrix = big_batch[:SEQUENCES], torch.randn(SIDE, SIDE)
    alone = {  # in this order: optimizer.step needs gradients
        "forward, backward": [compute_gradients, model, batch],
        "optimizer.step": [optimizer.step],
        "step": [plain_step, model, optimizer, batch],
        "big step": [plain_step, model, optimizer, big_batch],
        "product": [torch.mm, matrix, matrix],
    }
    part, big_part = batch.chunk(size)[rank], big_batch.chunk(size)[rank]
    together = {}
    for link, gbit in LINKS.items():  # in this order: the messages need gradients, on all ranks
        together["strong", link] = [train_step, model, optimizer, part, gbit]
        together["weak", link] = [train_step, model, optimizer, big_part, gbit]
        together["messages", link] = [average_gradients, model, gbit]
    seconds = measure(alone, together)
    steps = ROUNDS * (2 * len(LINKS) + 3 * (rank == 0))  # three are of rank 0 only
    assert len(taken) == steps, f"optimizer.step was called {len(taken)} times, not {steps}"
    return seconds


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
    formula = f"{operations / 1e9:.3f} GFLOP by 6 · parameters · tokens"
    print(f"a step has {formula}, {counted / 1e9:.3f} counted")
    print(f"one process reaches {share:.0%} of the peak, {peak / 1e9:.0f} GFLOP/s")


def amdahl(compute, update, messages, size):
    """Amdahl's speedup of N ranks that share a batch, with messages added to the law."""
    return (compute + update) / (compute / size + update + messages)


def gustafson(compute, update, messages, size):
    """Gustafson's speedup of N ranks that have a batch each, with messages added to the law."""
    return (size * compute + update) / (compute + update + messages)


def print_speedups(size, seconds):
    """Print the measured speedups, and those that the laws predict from the parts."""
    compute, update = seconds["forward, backward"], seconds["optimizer.step"]
    print(f"forward and backward {1e3 * compute:.1f} ms, optimizer.step {1e3 * update:.1f} ms")
    print(f"{'':12} {'messages':>8} {'strong':>7} {'Amdahl':>7} {'weak':>7} {'Gustafson':>10}")
    for link in LINKS:
        messages = seconds["messages", link]
        strong = seconds["step"] / seconds["strong", link]
        weak = seconds["big step"] / seconds["weak", link]
        parts = compute, update, messages, size
        print(
            f"{link:12} {1e3 * messages:5.1f} ms {strong:7.2f} {amdahl(*parts):7.2f} "
            f"{weak:7.2f} {gustafson(*parts):10.2f}"
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
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
