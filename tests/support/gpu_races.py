"""Programs for GPUs in which a wait is missing, and programs in which none is. In the former the
lines are marked: `# 1` what comes first, `# 2` what does not wait for it."""

from __future__ import annotations

import inspect
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

Shown = tuple[Any, Any] | None
"""What a program has computed, and what it would have with the wait; None if that is no value."""


def ready(value: float = 1.0, size: int = 4) -> torch.Tensor:
    """A tensor that the GPU has computed already."""
    tensor = torch.full((size,), value, device="cuda")
    torch.cuda.synchronize()
    return tensor


def current() -> torch.cuda.Stream:
    return torch.cuda.current_stream()


def read_in_another_stream() -> Shown:
    x, other = ready(), torch.cuda.Stream()
    x.mul_(2)  # 1
    with torch.cuda.stream(other):
        y = x + 1  # 2
    other.synchronize()
    return y.tolist(), [3.0] * 4


def read_twice_in_a_line() -> Shown:
    x, other = ready(), torch.cuda.Stream()
    x.mul_(2)  # 1
    with torch.cuda.stream(other):
        y, z = x + 1, x * 2  # 2
    other.synchronize()
    return (y + z).tolist(), [7.0] * 4


def read_from_another_stream() -> Shown:
    x, other = ready(), torch.cuda.Stream()
    with torch.cuda.stream(other):
        x.mul_(2)  # 1
    return (x + 1).tolist(), [3.0] * 4  # 2


def record_the_event_too_early() -> Shown:
    x, other, event = ready(), torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    x.mul_(2)  # 1
    other.wait_event(event)
    with torch.cuda.stream(other):
        y = x + 1  # 2
    other.synchronize()
    return y.tolist(), [3.0] * 4


def wait_for_the_wrong_stream() -> Shown:
    x, other, idle = ready(), torch.cuda.Stream(), torch.cuda.Stream()
    x.mul_(2)  # 1
    other.wait_stream(idle)
    with torch.cuda.stream(other):
        y = x + 1  # 2
    other.synchronize()
    return y.tolist(), [3.0] * 4


def wait_in_the_wrong_stream() -> Shown:
    x, other, third = ready(), torch.cuda.Stream(), torch.cuda.Stream()
    x.mul_(2)  # 1
    other.wait_stream(current())
    with torch.cuda.stream(third):
        y = x + 1  # 2
    third.synchronize()
    return y.tolist(), [3.0] * 4


def wait_for_the_wrong_device() -> Shown:
    x, other = ready(), torch.cuda.Stream()
    x.mul_(2)  # 1
    torch.cuda.synchronize(1)
    with torch.cuda.stream(other):
        y = x + 1  # 2
    other.synchronize()
    return y.tolist(), [3.0] * 4


def overwrite_what_is_still_read() -> Shown:
    x, other = ready(), torch.cuda.Stream()
    other.wait_stream(current())
    with torch.cuda.stream(other):
        y = x + 1  # 1
    x.mul_(2)  # 2
    torch.cuda.current_stream().synchronize()
    other.synchronize()
    return y.tolist(), [2.0] * 4


def write_in_two_streams() -> Shown:
    x, other = ready(), torch.cuda.Stream()
    x.fill_(2)  # 1
    with torch.cuda.stream(other):
        x.fill_(3)  # 2
    other.synchronize()
    torch.cuda.synchronize()
    return x.tolist(), [3.0] * 4


def write_a_part_that_is_read() -> Shown:
    x, other = ready(size=8), torch.cuda.Stream()
    x[2:4].mul_(2)  # 1
    with torch.cuda.stream(other):
        y = x[3:6] + 1  # 2
    other.synchronize()
    return y.tolist(), [3.0, 2.0, 2.0]


def write_one_of_a_list() -> Shown:
    x, other = ready(), torch.cuda.Stream()
    torch._foreach_add_([x, x.clone()], 1.0)  # 1
    with torch.cuda.stream(other):
        y = x + 1  # 2
    other.synchronize()
    return y.tolist(), [3.0] * 4


def delete_what_another_stream_reads() -> Shown:
    torch.cuda.synchronize()
    x, other = torch.ones(1 << 18, device="cuda"), torch.cuda.Stream()
    other.wait_stream(current())
    with torch.cuda.stream(other):
        y = x.sum()  # 1
    del x
    z = torch.zeros(1 << 18, device="cuda").add_(5)  # 2
    z[0].item()
    other.synchronize()
    return y.item(), float(1 << 18)


def fetch_into_what_is_still_read() -> Shown:
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    batch, following = (torch.full((1 << 18,), value).pin_memory() for value in (1.0, 5.0))
    with torch.cuda.stream(other):
        x = batch.to("cuda", non_blocking=True)
    current().wait_stream(other)
    y = x.sum() + x.amax()  # 1
    del x
    with torch.cuda.stream(other):
        z = following.to("cuda", non_blocking=True)  # 2
    other.synchronize()
    del z
    return y.item(), float((1 << 18) + 1)


def write_before_what_was_there_is_read() -> Shown:
    x, other = torch.ones(1 << 18, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    y = x.sum()  # 1
    del x
    z, batch = torch.empty(1 << 18, device="cuda"), torch.zeros(1 << 18).pin_memory()
    with torch.cuda.stream(other):
        z.copy_(batch, non_blocking=True)  # 2
    other.synchronize()
    return y.item(), float(1 << 18)


def fetch_the_next_batch() -> Shown:
    batch, other = torch.ones(4).pin_memory(), torch.cuda.Stream()
    with torch.cuda.stream(other):
        there = batch.to("cuda", non_blocking=True)  # 1
    there.mul_(2)  # 2
    current().synchronize()
    other.synchronize()
    return there.tolist(), [2.0] * 4


def read_before_the_copy_is_done() -> Shown:
    x = ready()
    here = x.mul(2).to("cpu", non_blocking=True)  # 1
    return here.sum().item(), 8.0  # 2


def read_through_numpy() -> Shown:
    x, here = ready(), torch.zeros(4).pin_memory()
    here.copy_(x, non_blocking=True)  # 1
    return here.numpy().sum(), 4.0  # 2


def overwrite_before_the_copy_is_done() -> Shown:
    here, x = torch.ones(4).pin_memory(), ready()
    x.copy_(here, non_blocking=True)  # 1
    here.fill_(7)  # 2
    return x.tolist(), [1.0] * 4


def overwrite_through_numpy() -> Shown:
    here, x = torch.ones(4).pin_memory(), ready()
    x.copy_(here, non_blocking=True)  # 1
    here.numpy()[0] = 7  # 2
    return x.tolist(), [1.0] * 4


def wait_for_the_wrong_event() -> Shown:
    x, here, event = ready(), torch.zeros(4).pin_memory(), torch.cuda.Event()
    event.record()
    here.copy_(x, non_blocking=True)  # 1
    event.synchronize()
    return here.tolist(), [1.0] * 4  # 2


def copy_between_devices() -> Shown:
    x, other = ready(), torch.cuda.Stream("cuda:1")
    there = x.to("cuda:1")  # 1
    with torch.cuda.stream(other):
        there.mul_(2)  # 2
    other.synchronize()
    return None


FREED = {delete_what_another_stream_reads, fetch_into_what_is_still_read}
"""Those in which memory is freed while a stream that has not allocated it reads it."""
OF_THE_HOST = {
    read_before_the_copy_is_done,
    read_through_numpy,
    overwrite_before_the_copy_is_done,
    overwrite_through_numpy,
    wait_for_the_wrong_event,
}
"""Those in which Python does not wait for its GPU."""
RACES: list[Callable[[], Shown]] = [
    read_in_another_stream,
    read_twice_in_a_line,
    read_from_another_stream,
    record_the_event_too_early,
    wait_for_the_wrong_stream,
    wait_in_the_wrong_stream,
    wait_for_the_wrong_device,
    overwrite_what_is_still_read,
    write_in_two_streams,
    write_a_part_that_is_read,
    write_one_of_a_list,
    delete_what_another_stream_reads,
    fetch_into_what_is_still_read,
    write_before_what_was_there_is_read,
    fetch_the_next_batch,
    read_before_the_copy_is_done,
    read_through_numpy,
    overwrite_before_the_copy_is_done,
    overwrite_through_numpy,
    wait_for_the_wrong_event,
    copy_between_devices,
]


def mine() -> torch.Tensor:
    return ready(dist.get_rank() + 1.0)


def read_without_wait() -> Shown:
    x = mine()
    dist.all_reduce(x, async_op=True)  # 1
    return (x * 2).tolist(), [6.0] * 4  # 2


def change_without_wait() -> Shown:
    x = mine()
    work = dist.all_reduce(x, async_op=True)  # 1
    x.mul_(2)  # 2
    current().synchronize()
    assert work is not None
    work.wait()
    return x.tolist(), [6.0] * 4


def wait_in_one_stream_and_read_in_another() -> Shown:
    x, other = mine(), torch.cuda.Stream()
    work = dist.all_reduce(x, async_op=True)  # 1
    assert work is not None
    work.wait()
    with torch.cuda.stream(other):
        y = x * 2  # 2
    other.synchronize()
    return y.tolist(), [6.0] * 4


def reduce_what_another_stream_computes() -> Shown:
    x, other = mine(), torch.cuda.Stream()
    with torch.cuda.stream(other):
        x.mul_(2)  # 1
    dist.all_reduce(x)  # 2
    return x.tolist(), [6.0] * 4


def gather_without_wait() -> Shown:
    x, parts = mine(), ready(0.0, 8)
    dist.all_gather_into_tensor(parts, x, async_op=True)  # 1
    return (parts + 1).tolist(), [2.0] * 4 + [3.0] * 4  # 2


def receive_without_wait() -> Shown:
    x = mine()
    if dist.get_rank() == 0:
        dist.send(x, 1)
        dist.recv(x, 1)
        return None
    dist.irecv(x, 0)  # 1
    y = x * 2  # 2
    dist.send(y, 0)
    return y.tolist(), [2.0] * 4


RACES_OF_RANKS: list[Callable[[], Shown]] = [
    read_without_wait,
    change_without_wait,
    wait_in_one_stream_and_read_in_another,
    reduce_what_another_stream_computes,
    gather_without_wait,
    receive_without_wait,
]


def wait_for_a_stream() -> Any:
    x, other = ready(), torch.cuda.Stream()
    x.mul_(2)
    other.wait_stream(current())
    with torch.cuda.stream(other):
        y = x + 1
    current().wait_stream(other)
    return y.tolist(), [3.0] * 4


def wait_for_an_event() -> Any:
    x, other, event = ready(), torch.cuda.Stream(), torch.cuda.Event()
    x.mul_(2)
    event.record()
    with torch.cuda.stream(other):
        event.wait()
        y = x + 1
    other.synchronize()
    return y.tolist(), [3.0] * 4


def wait_through_a_third_stream() -> Any:
    x, one, other = ready(), torch.cuda.Stream(), torch.cuda.Stream()
    x.mul_(2)
    one.wait_stream(current())
    other.wait_stream(one)
    with torch.cuda.stream(other):
        y = x + 1
    other.synchronize()
    return y.tolist(), [3.0] * 4


def let_the_host_wait() -> Any:
    x, other = ready(), torch.cuda.Stream()
    x.mul_(2)
    current().synchronize()
    with torch.cuda.stream(other):
        y = x + 1
        return y.tolist(), [3.0] * 4


def let_the_host_take_a_value() -> Any:
    x, other = ready(), torch.cuda.Stream()
    x.mul_(2).sum().item()
    with torch.cuda.stream(other):
        return (x + 1).tolist(), [3.0] * 4


def ask_until_it_is_done() -> Any:
    x, other, event = ready(), torch.cuda.Stream(), torch.cuda.Event()
    x.mul_(2)
    event.record()
    while not event.query():
        pass
    with torch.cuda.stream(other):
        return (x + 1).tolist(), [3.0] * 4


def copy_from_pageable_memory() -> Any:
    other = torch.cuda.Stream()
    x = torch.full((4,), 2.0).to("cuda")
    with torch.cuda.stream(other):
        return (x + 1).tolist(), [3.0] * 4


def halves_in_two_streams() -> Any:
    x, other = ready(size=8), torch.cuda.Stream()
    x[:4].mul_(2)
    with torch.cuda.stream(other):
        x[4:].mul_(3)
    torch.cuda.synchronize()
    return x.tolist(), [2.0] * 4 + [3.0] * 4


def columns_in_two_streams() -> Any:
    x, other = ready(size=8).view(4, 2), torch.cuda.Stream()
    x[:, 0].mul_(2)
    with torch.cuda.stream(other):
        x[:, 1].mul_(3)
    torch.cuda.synchronize()
    return x.tolist(), [[2.0, 3.0]] * 4


def read_in_two_streams() -> Any:
    x, other = ready(), torch.cuda.Stream()
    y = x + 1
    with torch.cuda.stream(other):
        z = x + 2
        z.sum().item()
    return y.tolist() + z.tolist(), [2.0] * 4 + [3.0] * 4


def tell_the_allocator() -> Any:
    x, other = ready(size=1 << 18), torch.cuda.Stream()
    with torch.cuda.stream(other):
        y = x.sum()
    x.record_stream(other)
    del x
    torch.zeros(1 << 18, device="cuda").add_(5)
    other.synchronize()
    return y.item(), float(1 << 18)


def use_memory_again() -> Any:
    y = ready(0.0)
    for _ in range(20):
        y.add_(torch.ones(4, device="cuda"))
    return y.tolist(), [20.0] * 4


def prefetch() -> Any:
    batches = [torch.full((4,), float(i)).pin_memory() for i in range(5)]
    other, total = torch.cuda.Stream(), ready(0.0)
    for batch in batches:
        with torch.cuda.stream(other):
            there = batch.to("cuda", non_blocking=True)
        current().wait_stream(other)
        there.record_stream(current())
        total.add_(there)
    return total.tolist(), [10.0] * 4


def load_pinned_batches() -> Any:
    loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=8, pin_memory=True)
    total = ready(0.0, 1)
    for (batch,) in loader:
        total.add_(batch.to("cuda", non_blocking=True).sum())
    return total.item(), 2016.0


def fetch_and_synchronize() -> Any:
    here = ready().mul(2).to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    return here.tolist(), [2.0] * 4


def fetch_and_wait_for_an_event() -> Any:
    x, here, event = ready(), torch.zeros(4).pin_memory(), torch.cuda.Event()
    here.copy_(x, non_blocking=True)
    event.record()
    event.synchronize()
    return here.numpy().tolist(), [1.0] * 4


def fill_pinned_memory_again() -> Any:
    here, x = torch.ones(4).pin_memory(), ready(0.0)
    for value in range(3):
        here.fill_(value)
        x.add_(here.to("cuda", non_blocking=True))
        current().synchronize()
    return x.tolist(), [3.0] * 4


def two_parts_of_pinned_memory() -> Any:
    here, x = torch.zeros(8).pin_memory(), ready()
    here[:4].copy_(x, non_blocking=True)
    here[4:].fill_(5)
    torch.cuda.synchronize()
    return here.tolist(), [1.0] * 4 + [5.0] * 4


def forward_in_another_stream() -> Any:
    layer, other = nn.Linear(4, 4, device="cuda"), torch.cuda.Stream()
    other.wait_stream(current())
    with torch.cuda.stream(other):
        loss = layer(ready()).square().sum()
    current().wait_stream(other)
    loss.backward()
    assert layer.weight.grad is not None
    return bool(layer.weight.grad.isfinite().all()), True


def scale_gradients() -> Any:
    layer = nn.Linear(4, 4, device="cuda")
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    scaler = torch.amp.GradScaler()
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = layer(ready().view(1, 4)).square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.isfinite().item(), True


def compute_on_two_devices() -> Any:
    x = ready()
    there = (x * 2).to("cuda:1")
    back = (there + 1).to("cuda:0")
    return (back + x).tolist(), [4.0] * 4


def replicate() -> Any:
    layer = nn.Linear(4, 4, device="cuda")
    x = torch.randn(6, 4, device="cuda")
    both = nn.DataParallel(layer, [0, 1])(x)
    return bool(torch.allclose(both, layer(x), atol=1e-6)), True


RIGHT: list[Callable[[], Any]] = [
    wait_for_a_stream,
    wait_for_an_event,
    wait_through_a_third_stream,
    let_the_host_wait,
    let_the_host_take_a_value,
    ask_until_it_is_done,
    copy_from_pageable_memory,
    halves_in_two_streams,
    columns_in_two_streams,
    read_in_two_streams,
    tell_the_allocator,
    use_memory_again,
    prefetch,
    load_pinned_batches,
    fetch_and_synchronize,
    fetch_and_wait_for_an_event,
    fill_pinned_memory_again,
    two_parts_of_pinned_memory,
    forward_in_another_stream,
    scale_gradients,
    compute_on_two_devices,
    replicate,
]


def wait_for_a_collective() -> Any:
    x = mine()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    return (x * 2).tolist(), [6.0] * 4


def compute_beside_a_collective() -> Any:
    x, y = mine(), ready()
    work = dist.all_reduce(x, async_op=True)
    y.mul_(3)
    assert work is not None
    work.wait()
    return (x + y).tolist(), [6.0] * 4


def wait_in_both_streams() -> Any:
    x, other = mine(), torch.cuda.Stream()
    dist.all_reduce(x)
    other.wait_stream(current())
    with torch.cuda.stream(other):
        y = x * 2
    other.synchronize()
    return y.tolist(), [6.0] * 4


def swap() -> Any:
    x, y = mine(), ready(0.0)
    peer = 1 - dist.get_rank()
    ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    x.zero_()
    return y.tolist(), [2.0 - dist.get_rank()] * 4


def sleep_while_another_rank_waits() -> Any:
    return send_and_wait_for(lambda key: store().wait([key]), "slept")


def compute_while_another_rank_waits() -> Any:
    """Without a wait for the GPU."""

    def look_again_and_again(key: str) -> None:
        while not store().check([key]):
            sum(range(10_000))

    return send_and_wait_for(look_again_and_again, "computed")


def send_and_wait_for(wait: Callable[[str], None], key: str) -> Any:
    """Rank 1 sends, and then waits for rank 0 to tell that it has received."""
    x = mine()
    if dist.get_rank() == 0:
        dist.recv(x, 1)
        received = x.tolist()
        store().set(key, "yes")
        return received, [2.0] * 4
    work = dist.isend(x, 0)
    wait(key)
    assert work is not None
    work.wait()
    return x.tolist(), [2.0] * 4


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


def train_with_ddp() -> Any:
    return train(DistributedDataParallel(two_layers()))


def train_with_fsdp() -> Any:
    net = two_layers()
    for part in (*net, net):
        fully_shard(part)
    return train(net)


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)).to("cuda")


def train(net: nn.Module) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = net(ready().view(1, 4)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return (losses[-1] < losses[0]).item(), True


RIGHT_OF_RANKS: list[Callable[[], Any]] = [
    wait_for_a_collective,
    compute_beside_a_collective,
    wait_in_both_streams,
    swap,
    sleep_while_another_rank_waits,
    compute_while_another_rank_waits,
    train_with_ddp,
    train_with_fsdp,
]


def lines_of(program: Callable[[], Any]) -> list[str]:
    """The places of its marks: `gpu_races.py:12`."""
    lines, first = inspect.getsourcelines(program)
    found = {
        mark[1]: first + number
        for number, line in enumerate(lines)
        if (mark := re.search(r"# ([12])$", line.rstrip()))
    }
    return [f"{Path(__file__).name}:{found[mark]}" for mark in "12"]


@contextmanager
def errors_into(lines: list[str]) -> Iterator[None]:
    """Append what this process writes to stderr in this block, also what no Python writes."""
    kept = os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            told = re.findall(r"simulated GPU: (.*?\.)\n", file.read(), re.DOTALL)
            lines.extend(" ".join(each.split()) for each in told if "a wait is missing" in each)


def run_all(programs: list[Callable[[], Any]]) -> list[tuple[Any, list[str]]]:
    """What each returns, and what is told of it."""
    outcomes = []
    for program in programs:
        told: list[str] = []
        with errors_into(told):
            returned = program()
            torch.cuda.synchronize()
        outcomes.append((returned, told))
    return outcomes


def run_all_of_ranks(rank: int, size: int) -> list[list[tuple[Any, list[str]]]]:
    return [run_all(RACES_OF_RANKS), run_all(RIGHT_OF_RANKS)]
