"""Collectives: all ranks of a group make the same call, and each gets its part of the result.

Each function below shows a collective, or a way to call one. All have the same arguments, rank and
world size, and return a list of numbers: the result on this rank. An empty list means that this
rank gets no result. The table of a function shows four ranks: what each has before the call, and
what the function returns. In the code, r is the number of any rank, and rank is this rank's number.

    python -m playground collectives
    torchrun --nproc-per-node 4 lesson.py

    Rank 0 has [1.0] after broadcast, expected [1.0]
    Rank 1 has [1.0] after broadcast, expected [1.0]
    Rank 2 has [1.0] after broadcast, expected [1.0]
    Rank 3 has [1.0] after broadcast, expected [1.0]
    …
    Rank 0: largest difference from the expected numbers 0.0

Source: https://docs.pytorch.org/docs/stable/distributed.html#collective-functions
"""

from functools import reduce as fold  # "reduce" is a function below
from math import prod
from operator import and_, or_, xor

import torch
import torch.distributed as dist


def broadcast(rank, size):
    """Every rank gets rank 0's tensor.

    | rank | before | after |
    |------|--------|-------|
    | 0    | [1.0]  | [1.0] |
    | 1    | [2.0]  | [1.0] |
    | 2    | [3.0]  | [1.0] |
    | 3    | [4.0]  | [1.0] |
    """
    tensor = torch.tensor([rank + 1.0])
    dist.broadcast(tensor, src=0)
    return tensor.tolist()


def reduce(rank, size):
    """Rank 0 gets the sum. The other ranks' tensors are undefined afterwards: do not read them.

    | rank | before | after  |
    |------|--------|--------|
    | 0    | [1.0]  | [10.0] |
    | 1    | [2.0]  | []     |
    | 2    | [3.0]  | []     |
    | 3    | [4.0]  | []     |
    """
    tensor = torch.tensor([rank + 1.0])
    dist.reduce(tensor, dst=0, op=dist.ReduceOp.SUM)
    return tensor.tolist() if rank == 0 else []


def all_reduce(rank, size):
    """Every rank gets the sum.

    | rank | before | after  |
    |------|--------|--------|
    | 0    | [1.0]  | [10.0] |
    | 1    | [2.0]  | [10.0] |
    | 2    | [3.0]  | [10.0] |
    | 3    | [4.0]  | [10.0] |
    """
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor.tolist()


def scatter(rank, size):
    """Rank 0 has a list with one tensor for each rank. Rank r gets tensor r.

    | rank | before               | after |
    |------|----------------------|-------|
    | 0    | [1.0, 2.0, 3.0, 4.0] | [1.0] |
    | 1    | []                   | [2.0] |
    | 2    | []                   | [3.0] |
    | 3    | []                   | [4.0] |
    """
    tensors = [torch.tensor([r + 1.0]) for r in range(size)] if rank == 0 else None
    received = torch.zeros(1)
    dist.scatter(received, tensors, src=0)
    return received.tolist()


def gather(rank, size):
    """Rank 0 gets a list with every rank's tensor.

    | rank | before | after                |
    |------|--------|----------------------|
    | 0    | [1.0]  | [1.0, 2.0, 3.0, 4.0] |
    | 1    | [2.0]  | []                   |
    | 2    | [3.0]  | []                   |
    | 3    | [4.0]  | []                   |
    """
    tensor = torch.tensor([rank + 1.0])
    received = [torch.zeros(1) for _ in range(size)] if rank == 0 else None
    dist.gather(tensor, received, dst=0)
    return torch.cat(received).tolist() if rank == 0 else []


def all_gather(rank, size):
    """Every rank gets a list with every rank's tensor.

    | rank | before | after                |
    |------|--------|----------------------|
    | 0    | [1.0]  | [1.0, 2.0, 3.0, 4.0] |
    | 1    | [2.0]  | [1.0, 2.0, 3.0, 4.0] |
    | 2    | [3.0]  | [1.0, 2.0, 3.0, 4.0] |
    | 3    | [4.0]  | [1.0, 2.0, 3.0, 4.0] |
    """
    tensor = torch.tensor([rank + 1.0])
    received = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(received, tensor)
    return torch.cat(received).tolist()


def reduce_scatter(rank, size):
    """Every rank has a list with one tensor for each rank. Rank r gets the sum of all tensors r.

    | rank | before                 | after  |
    |------|------------------------|--------|
    | 0    | [1.0, 2.0, 3.0, 4.0]   | [10.0] |
    | 1    | [2.0, 4.0, 6.0, 8.0]   | [20.0] |
    | 2    | [3.0, 6.0, 9.0, 12.0]  | [30.0] |
    | 3    | [4.0, 8.0, 12.0, 16.0] | [40.0] |
    """
    tensors = [torch.tensor([(rank + 1.0) * (r + 1)]) for r in range(size)]
    received = torch.zeros(1)
    dist.reduce_scatter(received, tensors, op=dist.ReduceOp.SUM)
    return received.tolist()


def all_to_all(rank, size):
    """Every rank has a list with one tensor for each rank. Rank r gets a list with all tensors r.

    | rank | before                   | after                   |
    |------|--------------------------|-------------------------|
    | 0    | [0.0, 1.0, 2.0, 3.0]     | [0.0, 10.0, 20.0, 30.0] |
    | 1    | [10.0, 11.0, 12.0, 13.0] | [1.0, 11.0, 21.0, 31.0] |
    | 2    | [20.0, 21.0, 22.0, 23.0] | [2.0, 12.0, 22.0, 32.0] |
    | 3    | [30.0, 31.0, 32.0, 33.0] | [3.0, 13.0, 23.0, 33.0] |
    """
    tensors = [torch.tensor([10.0 * rank + r]) for r in range(size)]
    received = [torch.zeros(1) for _ in range(size)]
    dist.all_to_all(received, tensors)
    return torch.cat(received).tolist()


def all_gather_into_tensor(rank, size):
    """all_gather with one tensor instead of a list: every rank's shard, in the order of the ranks.

    | rank | before     | after                                    |
    |------|------------|------------------------------------------|
    | 0    | [0.0, 0.5] | [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5] |
    | 1    | [1.0, 1.5] | [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5] |
    | 2    | [2.0, 2.5] | [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5] |
    | 3    | [3.0, 3.5] | [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5] |
    """
    shard = torch.tensor([rank, rank + 0.5])
    received = torch.zeros(size * len(shard))
    dist.all_gather_into_tensor(received, shard)
    return received.tolist()


def reduce_scatter_tensor(rank, size):
    """reduce_scatter with one tensor instead of a list, and with the same numbers."""
    tensor = (rank + 1) * torch.arange(1.0, size + 1)
    shard = torch.zeros(1)
    dist.reduce_scatter_tensor(shard, tensor, op=dist.ReduceOp.SUM)
    return shard.tolist()


def all_to_all_single(rank, size):
    """all_to_all with one tensor, in parts of different lengths: r numbers for rank r.

    A number says who sends and who receives: 31 goes from rank 3 to rank 1.

    | rank | before                   | after                                         |
    |------|--------------------------|-----------------------------------------------|
    | 0    | [1, 2, 2, 3, 3, 3]       | []                                            |
    | 1    | [11, 12, 12, 13, 13, 13] | [1, 11, 21, 31]                               |
    | 2    | [21, 22, 22, 23, 23, 23] | [2, 2, 12, 12, 22, 22, 32, 32]                |
    | 3    | [31, 32, 32, 33, 33, 33] | [3, 3, 3, 13, 13, 13, 23, 23, 23, 33, 33, 33] |
    """
    lengths_sent = list(range(size))  # r numbers to each rank r
    lengths_received = [rank] * size  # this rank gets `rank` numbers from each rank
    tensor = torch.tensor([10 * rank + r for r in range(size) for _ in range(r)])
    received = torch.zeros(sum(lengths_received), dtype=tensor.dtype)
    dist.all_to_all_single(
        received, tensor, output_split_sizes=lengths_received, input_split_sizes=lengths_sent
    )
    return received.tolist()


def groups(rank, size):
    """Ranks 0 and 1 form a group, and add up their tensors. All ranks call new_group.

    | rank | before | after |
    |------|--------|-------|
    | 0    | [1.0]  | [2.0] |
    | 1    | [1.0]  | [2.0] |
    | 2    | [1.0]  | [1.0] |
    | 3    | [1.0]  | [1.0] |
    """
    tensor = torch.ones(1)
    group = dist.new_group([0, 1])
    if rank in (0, 1):
        dist.all_reduce(tensor, group=group)
    return tensor.tolist()


def asynchronous(rank, size):
    """With async_op=True, a call returns a handle at once. The result is there after wait().

    Two all_reduces run at the same time: a sum and a maximum. All ranks must start them in the same
    order, because the backend takes the first calls of all ranks as one collective.

    | rank | before     | after       |
    |------|------------|-------------|
    | 0    | [1.0, 1.0] | [10.0, 4.0] |
    | 1    | [2.0, 2.0] | [10.0, 4.0] |
    | 2    | [3.0, 3.0] | [10.0, 4.0] |
    | 3    | [4.0, 4.0] | [10.0, 4.0] |
    """
    total, largest = torch.tensor([rank + 1.0]), torch.tensor([rank + 1.0])
    total_handle = dist.all_reduce(total, op=dist.ReduceOp.SUM, async_op=True)
    largest_handle = dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True)
    # here the rank may compute with other tensors
    total_handle.wait()
    largest_handle.wait()
    return [total.item(), largest.item()]


def operations(rank, size):
    """all_reduce with four operations: the sum, product, minimum and maximum over the ranks.

    | rank | before | after                |
    |------|--------|----------------------|
    | 0    | [1.0]  | [6.0, 4.0, 1.0, 2.0] |
    | 1    | [2.0]  | [6.0, 4.0, 1.0, 2.0] |
    | 2    | [1.0]  | [6.0, 4.0, 1.0, 2.0] |
    | 3    | [2.0]  | [6.0, 4.0, 1.0, 2.0] |
    """
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        tensor = torch.tensor([1.0 + rank % 2])
        dist.all_reduce(tensor, op=op)
        results.append(tensor.item())
    return results


def bitwise(rank, size):
    """all_reduce of bits: AND, OR and XOR. Rank r has bit 0 set, and bit r + 1.

    | rank | before | after       |
    |------|--------|-------------|
    | 0    | [3]    | [1, 31, 30] |
    | 1    | [5]    | [1, 31, 30] |
    | 2    | [9]    | [1, 31, 30] |
    | 3    | [17]   | [1, 31, 30] |
    """
    results = []
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        tensor = torch.tensor([1 + 2 ** (rank + 1)])
        dist.all_reduce(tensor, op=op)
        results.append(tensor.item())
    return results


def broadcast_object(rank, size):
    """broadcast_object_list fills a list with rank 0's objects, here a dictionary.

    | rank | before        | the list afterwards | after |
    |------|---------------|---------------------|-------|
    | 0    | [{'lr': 0.1}] | [{'lr': 0.1}]       | [0.1] |
    | 1    | [{}]          | [{'lr': 0.1}]       | [0.1] |
    | 2    | [{}]          | [{'lr': 0.1}]       | [0.1] |
    | 3    | [{}]          | [{'lr': 0.1}]       | [0.1] |
    """
    objects = [{"lr": 0.1} if rank == 0 else {}]
    dist.broadcast_object_list(objects, src=0)
    return [objects[0]["lr"]]


def all_gather_object(rank, size):
    """all_gather of objects, here strings of different lengths. The lengths are returned.

    | rank | before | the list afterwards    | after        |
    |------|--------|------------------------|--------------|
    | 0    | ''     | ['', 'x', 'xx', 'xxx'] | [0, 1, 2, 3] |
    | 1    | 'x'    | ['', 'x', 'xx', 'xxx'] | [0, 1, 2, 3] |
    | 2    | 'xx'   | ['', 'x', 'xx', 'xxx'] | [0, 1, 2, 3] |
    | 3    | 'xxx'  | ['', 'x', 'xx', 'xxx'] | [0, 1, 2, 3] |
    """
    received = [""] * size
    dist.all_gather_object(received, "x" * rank)
    return [len(string) for string in received]


def expected_lists(rank, size):
    """The functions, each with the list that it should return on this rank."""
    numbers = [r + 1.0 for r in range(size)]
    total = sum(numbers)
    mixed = [1.0 + r % 2 for r in range(size)]  # the numbers of the ranks in `operations`
    bits = [1 + 2 ** (r + 1) for r in range(size)]  # the numbers of the ranks in `bitwise`
    return [
        (broadcast, [1.0]),
        (reduce, [total] if rank == 0 else []),
        (all_reduce, [total]),
        (scatter, [rank + 1.0]),
        (gather, numbers if rank == 0 else []),
        (all_gather, numbers),
        (reduce_scatter, [(rank + 1) * total]),
        (all_to_all, [10.0 * r + rank for r in range(size)]),
        (all_gather_into_tensor, [r / 2 for r in range(2 * size)]),
        (reduce_scatter_tensor, [(rank + 1) * total]),
        (all_to_all_single, [10 * r + rank for r in range(size) for _ in range(rank)]),
        (groups, [2.0] if rank < 2 else [1.0]),
        (asynchronous, [total, float(size)]),
        (operations, [sum(mixed), prod(mixed), min(mixed), max(mixed)]),
        (bitwise, [fold(op, bits) for op in (and_, or_, xor)]),
        (broadcast_object, [0.1]),
        (all_gather_object, list(range(size))),
    ]


def run(rank, size):
    assert size > 1, "groups makes a group of ranks 0 and 1: start 2 ranks or more"
    difference = 0.0
    for function, expected in expected_lists(rank, size):
        # nccl, the backend for GPUs, has no bitwise operations
        if dist.get_backend() == "nccl" and function is bitwise:
            continue
        data = function(rank, size)
        for number, expected_number in zip(data, expected, strict=True):
            difference = max(difference, abs(number - expected_number))
        print(f"Rank {rank} has {data} after {function.__name__}, expected {expected}")
    print(f"Rank {rank}: largest difference from the expected numbers {difference}")
    assert difference == 0, f"rank {rank} has other numbers than expected"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
