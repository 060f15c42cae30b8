"""Data, pipeline, context and tensor parallelism at once: each rank has a place on a mesh.

    rank = ((dp · PP + pp) · CP + cp) · TP + tp

dp, pp, cp and tp are the coordinates of a rank, and PP, CP and TP the numbers of ranks along three
of the four axes. Ranks that differ only in tp are a group, and so on. In each group runs a part of
an earlier program:

    tp        tensor     the ranks divide the matrices of their layers
    cp        context    the ranks divide the tokens of their sequences
    pp        pipeline   the ranks divide the layers of the model
    dp        zero       the ranks divide the sequences of a batch

Ranks that differ in dp or cp have the same parameters and different tokens. They average their
gradients together, and divide the optimizer's state, as zero1 does.

    python -m playground mesh
    torchrun --nproc-per-node 8 lesson.py

    …
                        KiB sent along an axis
    dp x pp x cp x tp       tp      cp      pp  dp x cp  largest difference
    8 x 1 x 1 x 1            0       0       0     3219               3e-17
    …
    1 x 2 x 2 x 2          576     576     144      493               1e-16

Each rank prints its coordinates, (dp, pp, cp, tp), and its groups. In the table, a row is a mesh.
KiB is what a rank sends along these axes in a step, and the difference is between a trained
parameter and the same parameter of one process. Each number is the largest of all ranks.
Source: Narayanan et al., Megatron-LM on GPU clusters, SC 2021, arXiv 2104.04473.
"""

from copy import deepcopy
from functools import cache
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parameters_to_vector

import playground.lessons.context.lesson as context
import playground.lessons.pipeline.lesson as pipeline
import playground.lessons.tensor.lesson as tensor
import playground.lessons.zero.lesson as zero
from playground.lessons.gpt import GPT, V, causal_attention, make_batch, next_token_loss

STEPS = 2
SEQUENCES = 2  # in a batch, for each rank of the world
MICROBATCHES = 2  # that each replica's sequences are cut into, also without a pipeline
AXES = ("dp", "pp", "cp", "tp")
GROUPS = ("tp",), ("cp",), ("pp",), ("dp", "cp")  # the axes along which ranks share a group


def coordinates_of(rank, shape):
    """The last coordinate changes fastest, like the last digit of a number."""
    places = {}
    for axis in reversed(AXES):
        rank, places[axis] = divmod(rank, shape[axis])
    return {axis: places[axis] for axis in AXES}


def groups_along(axes, shape):
    """All groups of ranks that differ from each other only on these axes."""
    groups = {}  # by the coordinates on all other axes
    for rank in range(dist.get_world_size()):
        others = [at for axis, at in coordinates_of(rank, shape).items() if axis not in axes]
        groups.setdefault(tuple(others), []).append(rank)
    return tuple(map(tuple, groups.values()))


@cache
def make_group(groups, purpose):
    """Create all groups. Returns the group that this rank is in.

    It is created once, and returned again for the same groups and the same purpose: a pipeline has
    one "forward" and one "backward".
    """
    for ranks in groups:  # every rank creates all groups, in the same order
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            group_of_this_rank = group
    return group_of_this_rank


class World:
    """What an earlier program gets in place of torch.distributed: its world is one group.

    sent counts the bytes that this rank sends, if collectives are rings.
    """

    def __init__(self, axes, shape):
        self.group = make_group(groups_along(axes, shape), "forward")
        self.sent = 0

    def __getattr__(self, name):
        """What World does not define is torch's, for example batch_isend_irecv.

        A collective that it does not define would run in the whole world.
        """
        return getattr(dist, name)

    def get_rank(self):
        return dist.get_rank(self.group)

    def get_world_size(self):
        return dist.get_world_size(self.group)

    def count_ring(self, times, message):
        """A reduce_scatter or an all_gather sends N - 1 parts of 1 / N of the message. An
        all_reduce does so two times."""
        self.sent += times * message.nbytes * (self.get_world_size() - 1) // self.get_world_size()

    def all_reduce(self, message):
        self.count_ring(2, message)
        dist.all_reduce(message, group=self.group)

    def reduce_scatter_tensor(self, shard, message):
        self.count_ring(1, message)
        dist.reduce_scatter_tensor(shard, message, group=self.group)

    def all_gather_into_tensor(self, message, shard):
        self.count_ring(1, message)
        dist.all_gather_into_tensor(message, shard, group=self.group)

    def isend(self, message, dst, group):
        self.sent += message.nbytes
        return dist.isend(message, group=group, group_dst=dst)  # dst counts within the group

    def recv(self, message, src, group):
        dist.recv(message, group=group, group_src=src)

    def P2POp(self, operation, message, peer):  # noqa: N802, torch's name
        if operation == self.isend:  # context passes our isend, or torch's irecv
            self.sent += message.nbytes
            operation = dist.isend
        return dist.P2POp(operation, message, group=self.group, group_peer=peer)


def give_worlds(shape):
    """Give each earlier program its groups as its world."""
    tensor.dist = World(("tp",), shape)
    context.dist = World(("cp",), shape)
    pipeline.dist = World(("pp",), shape)
    zero.dist = World(("dp", "cp"), shape)
    return tensor.dist, context.dist, pipeline.dist, zero.dist


def positions_here():
    """The positions of this rank's tokens in a sequence: one early and one late chunk."""
    return context.zigzag_positions(context.dist.get_rank(), context.dist.get_world_size())


def ring_attention(q, k, v):
    return context.RingAttention.apply(q, k, v, context.zigzag_visible)


class Embedding(pipeline.Embedding):
    """pipeline's, for this rank's tokens: maps [B, T / CP] to [B, T / CP, C]."""

    def forward(self, tokens):
        return self.token(tokens) + self.position(positions_here())


def divide(gpt):
    """The layers of this rank's stage, each with this rank's part of its matrices."""
    layers = nn.Sequential(
        Embedding(gpt.token_embedding, gpt.position_embedding),
        *(tensor.ParallelBlock(block, tensor.f, tensor.g) for block in gpt.blocks),
        nn.Sequential(gpt.final_norm, gpt.lm_head),
    )
    stage, stages = pipeline.dist.get_rank(), pipeline.dist.get_world_size()
    return layers[len(layers) * stage // stages : len(layers) * (stage + 1) // stages]


def make_stage(layers, sequences, groups):
    """The pipeline's stage, with this rank's tokens of this replica's sequences."""
    positions = positions_here()
    vars(pipeline).update(  # its constants
        MICROBATCHES=MICROBATCHES, SEQUENCES=len(sequences) // MICROBATCHES, T=len(positions)
    )
    stage = pipeline.Stage(layers, sequences, groups)
    stage.inputs = sequences[:, positions]  # replaces what Stage cut
    stage.targets = sequences[:, positions + 1]
    return stage


def train(shape, batches):
    """Train this rank's part of the GPT on this rank's tokens. Returns this part, flat."""
    torch.manual_seed(1234)  # the same parameters on every rank, and for every mesh
    layers = divide(GPT(ring_attention))
    flat = zero.FlatParams(layers)
    optimizer = torch.optim.SGD([flat.shard], lr=0.1, momentum=0.9)
    back = make_group(groups_along(("pp",), shape), "backward")
    groups = {"forward": pipeline.dist.group, "backward": back}
    replica = coordinates_of(dist.get_rank(), shape)["dp"]
    for batch in batches:
        stage = make_stage(layers, batch.chunk(shape["dp"])[replica], groups)
        pipeline.one_forward_one_backward(stage)
        for handle in stage.sending:
            handle.wait()
        flat.reduce_gradients()  # and frees them: no zero_grad
        optimizer.step()
        flat.gather()
    return flat.full


def train_one_process(batches):
    """The baseline: rank 0 trains the whole GPT, and sends it to all ranks."""
    torch.manual_seed(1234)
    gpt = GPT(causal_attention)
    optimizer = torch.optim.SGD(gpt.parameters(), lr=0.1, momentum=0.9)
    if dist.get_rank() == 0:
        for batch in batches:
            optimizer.zero_grad()
            next_token_loss(gpt, batch).backward()
            optimizer.step()
    for param in gpt.parameters():
        dist.broadcast(param.detach(), src=0)
    return gpt


def compare(shape, batches, expected):
    """Train over a mesh, print a row, the largest numbers of any rank, and return the last."""
    worlds = give_worlds(shape)
    params = train(shape, batches)
    # divide changes the GPT that it gets, hence the copy
    expected_params = parameters_to_vector(divide(deepcopy(expected)).parameters())
    sent = [world.sent / STEPS / 1024 for world in worlds]
    row = torch.tensor([*sent, (params - expected_params).detach().abs().max()])
    dist.all_reduce(row, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        columns = "{:9.0f}{:8.0f}{:8.0f}{:9.0f}{:20.0e}".format(*row.tolist())
        print(f"{' x '.join(map(str, shape.values())):17}{columns}")
    return row[-1].item()


def print_place(rank, shape):
    """Print this rank's coordinates and groups, and whether PyTorch's mesh has the same groups."""
    groups = [ranks for axes in GROUPS for ranks in groups_along(axes, shape) if rank in ranks]
    mesh = init_device_mesh(
        torch.get_default_device().type, tuple(shape.values()), mesh_dim_names=AXES
    )
    by_library = [
        tuple(dist.get_process_group_ranks(each.get_group()))
        for each in (mesh["tp"], mesh["cp"], mesh["pp"], mesh["dp", "cp"]._flatten())
    ]
    named = zip(map(" x ".join, GROUPS), groups, strict=True)
    print(
        f"Rank {rank}: {tuple(coordinates_of(rank, shape).values())}",
        *(f"{name} {{{','.join(map(str, ranks))}}}" for name, ranks in named),
        f"library {'same' if by_library == groups else by_library}",
        sep=", ",
    )
    assert by_library == groups, "not the groups of PyTorch's mesh"


def run(rank, size):
    assert V % size == 0, f"ranks must divide {V}, so that all shards of parameters are equal"
    assert SEQUENCES % MICROBATCHES == 0, "MICROBATCHES must divide SEQUENCES"
    shapes = [
        dict(zip(AXES, (size // (pp * cp * tp), pp, cp, tp), strict=True))
        for pp, cp, tp in product((1, 2), repeat=3)
        if size % (pp * cp * tp) == 0
    ]
    print_place(rank, shapes[-1])
    batches = [make_batch(SEQUENCES * size, seed=step) for step in range(STEPS)]
    expected = train_one_process(batches)
    if rank == 0:
        print(f"{'KiB sent along an axis':>42}")
        print("dp x pp x cp x tp       tp      cp      pp  dp x cp  largest difference")
    differences = [compare(shape, batches, expected) for shape in shapes]
    assert all(each < 1e-9 for each in differences), "not the training of one process"


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)  # so that rounding cannot hide an error
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.barrier()  # so that gloo's threads have freed the last tensors before Python ends
    dist.destroy_process_group()
