"""All-reduce from messages: every rank ends with the sum of the tensors of all N ranks.

The ring cuts a tensor of S bytes into N chunks. A rank sends 2(N - 1) chunks of S/N bytes: this is
less than two tensors, however many ranks there are.

Each function below changes its tensor in place. The tables show four ranks, each with a tensor of
four numbers (32 bytes). Their last column is the number of bytes that the rank sends.

    python -m playground allreduce
    torchrun --nproc-per-node 4 lesson.py

    Rank 0 has [1111.0, 1101.0, 1001.0, 1.0] after ring_reduce_scatter
    Rank 1 has [10.0, 1111.0, 1011.0, 11.0] after ring_reduce_scatter
    Rank 2 has [110.0, 100.0, 1111.0, 111.0] after ring_reduce_scatter
    Rank 3 has [1110.0, 1100.0, 1000.0, 1111.0] after ring_reduce_scatter
    …
                     steps formula a rank sends formula all send formula error
    reduce_broadcast     6       6        24000   24000    48000   48000 9e-16
    everyone_adds        3       3        24000   24000    96000   96000 9e-16
    tutorial_ring        3       3        24000   24000    96000   96000 9e-16
    ring                 6       6        12000   12000    48000   48000 9e-16
    all_reduce           -       -            -       -        -       - 0e+00

Each counted number stands before the number by its formula. `a rank sends` counts the bytes of the
rank that sends most. The backend sends the messages of all_reduce, the library's call: the program
cannot count them. The error is the largest difference from the result of all_reduce. It is
rounding, because each function adds in another order.

Sources: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations,
2009; Gibiansky, Bringing HPC Techniques to Deep Learning, Baidu, 2017.
"""

import torch
import torch.distributed as dist

ELEMENTS = 1000  # of the tensor that is summed, 8 bytes each

bytes_per_step: list[int] = []  # one number for each step: the bytes that this rank sends in it


def send(tensor, dst):
    """One step: a message goes out."""
    dist.send(tensor, dst)
    bytes_per_step.append(tensor.nbytes)


def recv(tensor, src):
    """One step: a message comes in."""
    dist.recv(tensor, src)
    bytes_per_step.append(0)  # a step in which nothing is sent


def exchange(outgoing, dst, incoming, src):
    """One step: a message goes out, and another one comes in at the same time."""
    operations = [dist.P2POp(dist.isend, outgoing, dst), dist.P2POp(dist.irecv, incoming, src)]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    bytes_per_step.append(outgoing.nbytes)


def reduce_broadcast(tensor):
    """Rank 0 receives every other rank's tensor, adds it to its own, and sends the sum to all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        send(tensor, dst=0)
        recv(tensor, src=0)
        return
    received = torch.zeros_like(tensor)
    for other in range(1, size):
        recv(received, src=other)
        tensor += received
    for other in range(1, size):
        send(tensor, dst=other)


def everyone_adds(tensor):
    """No root: every rank sends its tensor to every other rank, and adds all tensors itself.

    All ranks add the tensors in the same order, so that all sums are rounded in the same way.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [tensor.clone() for _ in range(size)]  # clone r is replaced by rank r's tensor
    for distance in range(1, size):
        source, target = (rank - distance) % size, (rank + distance) % size
        exchange(tensor, target, tensors[source], source)
    tensor.copy_(sum(tensors))


def tutorial_ring(tensor):
    """Only neighbours talk. A rank sends its own tensor first, then what it has just received."""
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    outgoing, incoming = tensor.clone(), torch.zeros_like(tensor)
    for _ in range(size - 1):
        exchange(outgoing, right, incoming, left)
        tensor += incoming
        outgoing, incoming = incoming, outgoing  # what was received is sent next


def ring_reduce_scatter(tensor):
    """The ring's first phase: a chunk makes N - 1 hops, and grows to the sum of all ranks' chunks.

    The rank where a chunk starts only sends it. Every later rank adds its own numbers. Rank r ends
    with the sum of chunk r. Its chunk r - 1 is unchanged, and its other chunks are partial sums.

    | rank | before                           | after                            | sent |
    |------|----------------------------------|----------------------------------|------|
    | 0    | [1.0, 1.0, 1.0, 1.0]             | [1111.0, 1101.0, 1001.0, 1.0]    | 24   |
    | 1    | [10.0, 10.0, 10.0, 10.0]         | [10.0, 1111.0, 1011.0, 11.0]     | 24   |
    | 2    | [100.0, 100.0, 100.0, 100.0]     | [110.0, 100.0, 1111.0, 111.0]    | 24   |
    | 3    | [1000.0, 1000.0, 1000.0, 1000.0] | [1110.0, 1100.0, 1000.0, 1111.0] | 24   |
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    chunks = tensor.tensor_split(size)  # views: to change a chunk is to change the tensor
    for step in range(1, size):  # rank r begins with chunk r - 1
        outgoing = chunks[(rank - step) % size]
        chunk = chunks[(rank - step - 1) % size]  # the left neighbour sends this one
        incoming = torch.zeros_like(chunk)
        exchange(outgoing, right, incoming, left)
        chunk += incoming


def ring_all_gather(tensor):
    """The ring's second phase: a sum makes N - 1 hops, and each rank on its way keeps a copy.

    Before it, rank r must have the sum of chunk r.

    | rank | before                           | after                            | sent |
    |------|----------------------------------|----------------------------------|------|
    | 0    | [1111.0, 1101.0, 1001.0, 1.0]    | [1111.0, 1111.0, 1111.0, 1111.0] | 24   |
    | 1    | [10.0, 1111.0, 1011.0, 11.0]     | [1111.0, 1111.0, 1111.0, 1111.0] | 24   |
    | 2    | [110.0, 100.0, 1111.0, 111.0]    | [1111.0, 1111.0, 1111.0, 1111.0] | 24   |
    | 3    | [1110.0, 1100.0, 1000.0, 1111.0] | [1111.0, 1111.0, 1111.0, 1111.0] | 24   |
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    chunks = tensor.tensor_split(size)
    for step in range(size - 1):  # rank r begins with chunk r, its sum
        outgoing = chunks[(rank - step) % size]
        chunk = chunks[(rank - step - 1) % size]
        exchange(outgoing, right, chunk, left)  # the sum overwrites this rank's partial sum


def ring(tensor):
    """The two phases: in each step, every rank sends 1/N of the tensor to its right neighbour.

    | rank | before                           | after                            | sent |
    |------|----------------------------------|----------------------------------|------|
    | 0    | [1.0, 1.0, 1.0, 1.0]             | [1111.0, 1111.0, 1111.0, 1111.0] | 48   |
    | 1    | [10.0, 10.0, 10.0, 10.0]         | [1111.0, 1111.0, 1111.0, 1111.0] | 48   |
    | 2    | [100.0, 100.0, 100.0, 100.0]     | [1111.0, 1111.0, 1111.0, 1111.0] | 48   |
    | 3    | [1000.0, 1000.0, 1000.0, 1000.0] | [1111.0, 1111.0, 1111.0, 1111.0] | 48   |
    """
    ring_reduce_scatter(tensor)
    ring_all_gather(tensor)


def measure(algorithm, tensor):
    """Sum the tensor in place. Return this rank's number of steps, and the bytes that it sends."""
    bytes_per_step.clear()
    algorithm(tensor)
    return len(bytes_per_step), sum(bytes_per_step)


def reduce_number(number, op):
    """Return the largest of all ranks' numbers (MAX), or their sum (SUM)."""
    tensor = torch.tensor(float(number))
    dist.all_reduce(tensor, op=op)
    return tensor.item()


def compare(algorithm, start, expected, formulas):
    """Print a row of the table: counted numbers, each with its formula, and the error.

    Return whether the error is more than rounding.
    """
    tensor = start.clone()
    steps, nbytes = measure(algorithm, tensor)
    counted = (
        reduce_number(steps, dist.ReduceOp.MAX),
        reduce_number(nbytes, dist.ReduceOp.MAX),
        reduce_number(nbytes, dist.ReduceOp.SUM),
    )
    error = reduce_number((tensor - expected).abs().max(), dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        cells = 6 * ["-"]
        if formulas:  # all_reduce has none
            pairs = zip(counted, formulas, strict=True)
            cells = [round(number) for pair in pairs for number in pair]
        row = "{:>5} {:>7} {:>12} {:>7} {:>8} {:>7}".format(*cells)
        print(f"{algorithm.__name__:16} {row} {error:.0e}")
    return not error < 1e-9


def run(rank, size):
    tensor = torch.full((size,), 10.0**rank)  # the digits of a sum tell whose numbers are in it
    for phase in (ring_reduce_scatter, ring_all_gather):
        phase(tensor)
        print(f"Rank {rank} has {tensor.tolist()} after {phase.__name__}")

    torch.manual_seed(rank)
    start = torch.rand(ELEMENTS)
    expected = start.clone()
    dist.all_reduce(expected)
    n, s = size, start.nbytes  # N and S of the formulas
    wrong = []
    if rank == 0:
        print("                 steps formula a rank sends formula all send formula error")
    for algorithm, *formulas in (
        (reduce_broadcast, 2 * (n - 1), (n - 1) * s, 2 * (n - 1) * s),
        (everyone_adds, n - 1, (n - 1) * s, n * (n - 1) * s),
        (tutorial_ring, n - 1, (n - 1) * s, n * (n - 1) * s),
        (ring, 2 * (n - 1), 2 * (n - 1) / n * s, 2 * (n - 1) * s),
        (dist.all_reduce,),  # the backend sends its messages: they cannot be counted here
    ):
        if compare(algorithm, start, expected, formulas):
            wrong.append(algorithm.__name__)
    assert not wrong, f"not the sum of all ranks' tensors: {', '.join(wrong)}"


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)  # so that rounding cannot hide an error
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
