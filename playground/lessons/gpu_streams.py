"""Streams, events and what `wait()` means on nccl: see gpus.md. On two GPUs, or simulated ones:

python -m playground run -n 2 --gpus 2 gpu_streams.py
"""

import os

import torch
import torch.distributed as dist


def queue_and_go_on():
    """Python queues a kernel and goes on. Returns whether the kernel is done, before and after
    Python waits for it."""
    done = torch.cuda.Event()
    torch.ones(1000, 1000, device="cuda").exp_()
    done.record()
    before = done.query()
    done.synchronize()
    return before, done.query()


def compute_in_another_stream(waits):
    """(1 + 1) * 10, of which the second stream computes the product."""
    x = torch.ones(3, device="cuda")
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    x.add_(1)
    if waits:
        other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        y = x * 10
    other.synchronize()
    return y.tolist()


def reduce_and_compute(waits):
    """The sum of two ones, from each rank one, * 10."""
    x = torch.ones(3, device="cuda")
    torch.cuda.synchronize()
    work = dist.all_reduce(x, async_op=True)
    if waits:
        work.wait()  # the current stream waits, and Python does not
    return (x * 10).tolist()


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    lines = [f"done before and after synchronize(): {queue_and_go_on()}"]
    for waits in (False, True):
        lines.append(f"another stream, waits {waits}: {compute_in_another_stream(waits)}")
        lines.append(f"all-reduce, waits {waits}: {reduce_and_compute(waits)}")
    if dist.get_rank() == 0:
        print(*lines, sep="\n")
    dist.destroy_process_group()
