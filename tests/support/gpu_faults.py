"""Programs with tensors in the wrong place, or with groups of NCCL calls that do not begin or end;
and right programs of the same shapes. A program is a function of (rank, size), on two ranks with a
GPU each. In a wrong one, `# told` marks the line that is to be named."""

from __future__ import annotations

import inspect
import os
import re
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NCCL2 = torch.__version__ >= "2.15" and os.environ.get("TORCH_DIST_USE_NCCL2") != "0"
"""Whether nccl stands for torch's ProcessGroupNCCL2 (torch 2.15). It begins each call of a batch at
once, copies into results on another GPU, and refuses a tensor before other ranks are asked."""
Program = Callable[[int, int], object]
TWO_DEVICES = "tensors on two devices"
ANOTHER_GPU = "another rank's GPU"
CPU_TENSOR = "a CPU tensor given to nccl"
OPEN_GROUP = "a group of NCCL calls without its start or its end"
SAME = "Expected all tensors to be on the same device, but found at least two devices"
NO_BACKEND = "No backend type associated with device type cpu"
NOT_CUDA = "Tensors must be CUDA and dense"
IN_CPU = "is in the memory of the CPU"


@dataclass(frozen=True)
class Fault:
    """A program that fails on every rank, and what it is told."""

    program: Program
    kind: str
    words: str
    """Of the error, or of a line on stderr."""
    words_of_nccl2: str = ""
    """Those of torch's ProcessGroupNCCL2, where it has its own."""
    backend: str = "nccl"
    """That of the world: in one on gloo, groups on nccl are bound to no GPU before their first
    call."""
    is_right_on_nccl2: bool = False

    @property
    def told(self) -> str:
        """The words that are to be told here; none if the program is right here."""
        if NCCL2 and self.is_right_on_nccl2:
            return ""
        return (NCCL2 and self.words_of_nccl2) or self.words

    @property
    def fails_alone(self) -> bool:
        """Whether a rank fails while the other one waits for it."""
        return NCCL2 and self.backend == "gloo"

    @property
    def line(self) -> str:
        """The line that is to be named: `gpu_faults.py:12`."""
        return place_of(self.program)


def place_of(program: Program) -> str:
    lines, first = inspect.getsourcelines(program)
    [at] = [number for number, line in enumerate(lines) if line.rstrip().endswith("# told")]
    return f"{Path(__file__).name}:{first + at}"


def ones(*shape: int, on: int | str = "cuda") -> torch.Tensor:
    return torch.ones(*shape or (4,), device=on)


def add_tensors_of_two_gpus(rank: int, size: int) -> None:
    ones() + ones(on=1 - rank)  # told


def add_a_tensor_of_the_cpu(rank: int, size: int) -> None:
    ones().add_(torch.ones(4))  # told


def leave_the_model_on_the_cpu(rank: int, size: int) -> None:
    nn.Linear(4, 4)(ones())  # told


def leave_tokens_on_the_cpu(rank: int, size: int) -> None:
    embedding = nn.Embedding(4, 2).cuda()
    embedding(torch.tensor([1, 2]))  # told


def leave_labels_on_the_cpu(rank: int, size: int) -> None:
    F.cross_entropy(ones(2, 3), torch.tensor([0, 1]))  # told


def leave_a_mask_on_the_cpu(rank: int, size: int) -> None:
    torch.where(torch.ones(4) > 0, ones(), ones())  # told


def concatenate_with_another_gpu(rank: int, size: int) -> None:
    torch.cat([ones(), ones(on=1 - rank)])  # told


def index_the_cpu_by_a_gpu(rank: int, size: int) -> None:
    torch.ones(4)[torch.tensor([1], device="cuda")]  # told


def forget_buffers(rank: int, size: int) -> None:
    norm = nn.BatchNorm1d(4)
    for param in norm.parameters():
        param.data = param.data.cuda()
    norm(ones(2, 4))  # told


def move_parameters_away_from_their_state(rank: int, size: int) -> None:
    layer = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.Adam(layer.parameters())
    layer(ones()).sum().backward()
    optimizer.step()
    for param in layer.parameters():
        there = f"cuda:{1 - rank}"
        param.data, param.grad = param.data.to(there), torch.ones_like(param, device=there)
    optimizer.step()  # told


def reduce_on_another_rank_s_gpu(rank: int, size: int) -> None:
    dist.all_reduce(ones(on=1 - rank))  # told


def broadcast_on_another_rank_s_gpu(rank: int, size: int) -> None:
    dist.broadcast(ones(on=1 - rank), 0)  # told


def gather_into_another_rank_s_gpu(rank: int, size: int) -> None:
    parts = [ones(on=1 - rank) for _ in range(size)]
    dist.all_gather(parts, ones())  # told


def all_on_the_first_gpu(rank: int, size: int) -> None:
    group = dist.new_group(backend="nccl")
    dist.all_reduce(ones(on=0), group=group)  # told


def message_on_the_first_gpu(rank: int, size: int) -> None:
    group = dist.new_group(backend="nccl")
    dist.broadcast(ones(on="cuda:0"), 0, group=group)  # told


def reduce_on_the_cpu(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(4))  # told


def broadcast_a_flag(rank: int, size: int) -> None:
    dist.broadcast(torch.tensor(1), 0)  # told


def send_from_the_cpu(rank: int, size: int) -> None:
    dist.isend(torch.ones(4), 1 - rank)  # told


def exchange_in_a_batch_on_the_cpu(rank: int, size: int) -> None:
    ops = [
        dist.P2POp(dist.isend, torch.ones(4), 1 - rank),
        dist.P2POp(dist.irecv, torch.ones(4), 1 - rank),
    ]
    dist.batch_isend_irecv(ops)  # told


def gather_into_the_cpu(rank: int, size: int) -> None:
    parts = [torch.zeros(4) for _ in range(size)]
    dist.all_gather(parts, ones())  # told


def gather_from_the_cpu(rank: int, size: int) -> None:
    parts = [ones() for _ in range(size)]
    dist.all_gather(parts, torch.ones(4))  # told


def gather_into_one_tensor_of_the_cpu(rank: int, size: int) -> None:
    dist.all_gather_into_tensor(torch.zeros(4 * size), ones())  # told


def scatter_sums_into_the_cpu(rank: int, size: int) -> None:
    dist.reduce_scatter_tensor(torch.zeros(2), ones())  # told


def exchange_into_the_cpu(rank: int, size: int) -> None:
    dist.all_to_all_single(torch.zeros(4), ones())  # told


def wrap_a_model_of_the_cpu(rank: int, size: int) -> None:
    DistributedDataParallel(nn.Linear(4, 4))  # told


def end_what_has_not_begun(rank: int, size: int) -> None:
    group: Any = dist.group.WORLD
    dist.all_reduce(ones())
    group._end_coalescing(torch.device("cuda", rank))  # told


def begin_and_never_end(rank: int, size: int) -> None:
    group: Any = dist.new_group(range(size))
    dist.all_reduce(ones(), group=group)
    total = ones()
    group._start_coalescing(torch.device("cuda", rank))
    dist.all_reduce(total, group=group)  # told
    assert total.tolist() == [1.0] * 4
    dist.destroy_process_group(group)


def begin_messages_and_never_end(rank: int, size: int) -> None:
    group: Any = dist.new_group(range(size))
    dist.all_reduce(ones(), group=group)
    group._start_coalescing(torch.device("cuda", rank))
    dist.isend(ones(), 1 - rank, group=group)  # told
    dist.destroy_process_group(group)


DUPLICATE = "Duplicate GPU detected"
NOT_BOUND = "tensor not on device passed to init_process_group"
ELSEWHERE = "Expected tensor on cuda:"
NO_END = "a group of NCCL calls has no end"
FAULTS = [
    Fault(add_tensors_of_two_gpus, TWO_DEVICES, SAME),
    Fault(add_a_tensor_of_the_cpu, TWO_DEVICES, SAME),
    Fault(leave_the_model_on_the_cpu, TWO_DEVICES, SAME),
    Fault(leave_tokens_on_the_cpu, TWO_DEVICES, SAME),
    Fault(leave_labels_on_the_cpu, TWO_DEVICES, SAME),
    Fault(leave_a_mask_on_the_cpu, TWO_DEVICES, SAME),
    Fault(concatenate_with_another_gpu, TWO_DEVICES, SAME),
    Fault(index_the_cpu_by_a_gpu, TWO_DEVICES, SAME),
    Fault(forget_buffers, TWO_DEVICES, SAME),
    Fault(
        move_parameters_away_from_their_state,
        TWO_DEVICES,
        "Tensors of the same index must be on the same device",
    ),
    Fault(reduce_on_another_rank_s_gpu, ANOTHER_GPU, NOT_BOUND, ELSEWHERE),
    Fault(broadcast_on_another_rank_s_gpu, ANOTHER_GPU, NOT_BOUND, ELSEWHERE),
    Fault(
        gather_into_another_rank_s_gpu, ANOTHER_GPU, "recvbuff is on device", is_right_on_nccl2=True
    ),
    Fault(all_on_the_first_gpu, ANOTHER_GPU, DUPLICATE, ELSEWHERE, "gloo"),
    Fault(message_on_the_first_gpu, ANOTHER_GPU, DUPLICATE, ELSEWHERE, "gloo"),
    Fault(reduce_on_the_cpu, CPU_TENSOR, NO_BACKEND),
    Fault(broadcast_a_flag, CPU_TENSOR, NO_BACKEND),
    Fault(send_from_the_cpu, CPU_TENSOR, NO_BACKEND),
    Fault(exchange_in_a_batch_on_the_cpu, CPU_TENSOR, NO_BACKEND),
    Fault(
        gather_into_the_cpu,
        CPU_TENSOR,
        f"ncclAllGather : recvbuff {IN_CPU}",
        "output tensor on CUDA",
    ),
    Fault(gather_from_the_cpu, CPU_TENSOR, NO_BACKEND),
    Fault(gather_into_one_tensor_of_the_cpu, CPU_TENSOR, NOT_CUDA, ELSEWHERE),
    Fault(
        scatter_sums_into_the_cpu, CPU_TENSOR, f"ncclReduceScatter : recvbuff {IN_CPU}", ELSEWHERE
    ),
    Fault(exchange_into_the_cpu, CPU_TENSOR, NOT_CUDA, ELSEWHERE),
    Fault(wrap_a_model_of_the_cpu, CPU_TENSOR, NO_BACKEND),
    Fault(
        end_what_has_not_begun,
        OPEN_GROUP,
        "ncclGroupEnd: not in a group call",
        "without a matching startCoalescing",
    ),
    Fault(begin_and_never_end, OPEN_GROUP, NO_END, is_right_on_nccl2=True),
    Fault(begin_messages_and_never_end, OPEN_GROUP, NO_END, is_right_on_nccl2=True),
]


def numbers_of_the_cpu(rank: int, size: int) -> None:
    assert (ones() * torch.tensor(2.0) + 1).tolist() == [3.0] * 4


def indices_of_the_cpu(rank: int, size: int) -> None:
    x = ones()
    x[torch.tensor([1, 2])] = torch.tensor(5.0)
    assert x[torch.tensor([0, 1])].tolist() == [1.0, 5.0]


def gradient_through_indices_of_the_cpu(rank: int, size: int) -> None:
    x = ones().requires_grad_()
    x[torch.tensor([1, 1])].sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 2.0, 0.0, 0.0]


def copy_to_another_gpu_and_back(rank: int, size: int) -> None:
    there = (ones() * 2).to(f"cuda:{1 - rank}") + ones(on=1 - rank)
    assert (ones() + there.to(rank)).tolist() == [4.0] * 4


def compare_on_the_cpu(rank: int, size: int) -> None:
    assert torch.equal(ones().cpu(), torch.ones(4))


def train_where_everything_is(rank: int, size: int) -> None:
    net = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 3)).cuda()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters())
    tokens, labels = torch.tensor([0, 1]).cuda(), torch.tensor([0, 2]).cuda()
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), labels).backward()
        optimizer.step()
    torch.cuda.synchronize()


def move_parameters_before_the_optimizer(rank: int, size: int) -> None:
    layer = nn.Linear(4, 4).cuda()
    layer.load_state_dict(nn.Linear(4, 4).state_dict())  # copied from the CPU
    optimizer = torch.optim.Adam(layer.parameters())
    layer(ones()).sum().backward()
    optimizer.step()
    torch.cuda.synchronize()


def objects_of_the_host(rank: int, size: int) -> None:
    told: list[Any] = [None] * size
    dist.all_gather_object(told, {"rank": rank})
    first = [told[0] if rank == 0 else None]
    dist.broadcast_object_list(first, 0)
    assert first == [{"rank": 0}]


def cpu_tensors_over_gloo(rank: int, size: int) -> None:
    group = dist.new_group(range(size), backend="gloo")
    flag = torch.tensor(rank)
    dist.all_reduce(flag, group=group)
    assert flag.item() == 1
    dist.destroy_process_group(group)


def pinned_memory_of_the_host(rank: int, size: int) -> None:
    x = torch.ones(4).pin_memory().to("cuda", non_blocking=True)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 4


def empty_tensors(rank: int, size: int) -> None:
    dist.all_reduce(torch.empty(0, device="cuda"))
    dist.all_gather_into_tensor(torch.empty(0, device="cuda"), torch.empty(0, device="cuda"))
    torch.cuda.synchronize()


def roots_have_more(rank: int, size: int) -> None:
    parts = [ones() for _ in range(size)]
    dist.gather(ones(), parts if rank == 0 else None, 0)
    dist.scatter(ones(), parts if rank == 0 else None, 0)
    dist.reduce(ones(), 1)
    torch.cuda.synchronize()


def groups_with_their_ends(rank: int, size: int) -> None:
    one, other = ones(), ones() * 2
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cuda", rank)):
        dist.all_reduce(one)
        dist.all_reduce(other)
    assert (one + other).tolist() == [6.0] * 4


def batches_of_messages(rank: int, size: int) -> None:
    received = ones()
    ops = [
        dist.P2POp(dist.isend, ones() * rank, 1 - rank),
        dist.P2POp(dist.irecv, received, 1 - rank),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert received.tolist() == [1.0 - rank] * 4


RIGHT: list[Program] = [
    numbers_of_the_cpu, indices_of_the_cpu, gradient_through_indices_of_the_cpu,
    copy_to_another_gpu_and_back, compare_on_the_cpu, train_where_everything_is,
    move_parameters_before_the_optimizer, objects_of_the_host, cpu_tensors_over_gloo,
    pinned_memory_of_the_host, empty_tensors, roots_have_more, groups_with_their_ends,
    batches_of_messages,
]  # fmt: skip


def find_told(program: Program, rank: int, size: int) -> tuple[str, str]:
    """What a program is told: the error or the line on stderr, and the line that is named; both
    empty if it is told nothing."""
    kept, error = os.dup(2), None
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            program(rank, size)
            torch.cuda.synchronize()
        except Exception as raised:
            error = raised
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        told = "\n".join(line for line in file.read().splitlines() if "simulated" in line)
    if error is None:
        return told, " ".join(re.findall(r"gpu_faults\.py:\d+", told))
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__
    ]
    return str(error), f"{Path(__file__).name}:{frames[-1].lineno}"


def run_faults(rank: int, size: int, backend: str) -> list[tuple[str, str]]:
    """What the faults are told that leave a world on this backend as it was."""
    return [find_told(each.program, rank, size) for each in FAULTS if stays(each, backend)]


def run_fault(rank: int, size: int, number: int) -> tuple[str, str]:
    return find_told(FAULTS[number].program, rank, size)


def stays(fault: Fault, backend: str) -> bool:
    """Whether it is a fault here, and others can run in the same world after it."""
    return fault.backend == backend == "nccl" and fault.told not in ("", NO_END)


def run_right(rank: int, size: int) -> list[tuple[str, str]]:
    return [find_told(program, rank, size) for program in RIGHT]
