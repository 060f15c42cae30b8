"""ZeRO, from data parallelism to FSDP: each of N ranks keeps 1/N of the training state.

An all_reduce is a reduce_scatter followed by an all_gather. If the optimizer steps between the two,
a rank needs only 1/N of the optimizer's state (zero1) and of the gradients (zero2). If a layer's
parameters are gathered when the layer runs, a rank keeps only 1/N of them, too (zero3).

    python -m playground zero -n 4
    torchrun --nproc-per-node 4 lesson.py

    KiB             parameters   gradients   optimizer   largest difference
    data_parallel         1839        1839        3679                0e+00
    zero1                 1839        1839         920                4e-14
    zero2                 1839         460         920                3e-14
    zero3                  460         460         920                3e-14
    fsdp                   460         460         920                0e+00

A row shows what rank 0 holds when backward ends. Each stage of ZeRO divides one more number by N.
The largest difference of a parameter from data_parallel is rounding: sums in a different order.
Sources: Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054, and Zhao et al., PyTorch FSDP,
VLDB 2023, arXiv 2304.11277.
"""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector

from playground.lessons.gpt import GPT, T, make_batch, next_token_loss

STEPS = 10
BATCH_SIZE = 8  # sequences of each rank
LR = 1e-3


def data_parallel(model, batches):
    """The baseline: every rank holds everything."""
    optimizer = torch.optim.Adam(model.parameters(), LR)
    for batch in batches:
        optimizer.zero_grad()
        next_token_loss(model, batch).backward()
        # The last step's bytes are returned: Adam has no state before the end of the first.
        held = bytes_held(model, optimizer)
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        optimizer.step()
    return held


class FlatParams:
    """A module's parameters in one flat tensor, and this rank's shard: 1/N of it.

    The module's parameters and the shard are views: they share the flat tensor's memory.
    """

    def __init__(self, module):
        self.params = list(module.parameters())
        self.full = parameters_to_vector(self.params).detach()
        self.shard = nn.Parameter(self.full.chunk(dist.get_world_size())[dist.get_rank()])
        views = self.full.split([param.numel() for param in self.params])
        for param, view in zip(self.params, views, strict=True):
            param.data = view.view_as(param)  # a step of the shard, or a gather, changes the model

    def reduce_gradients(self):
        """Average the gradients over all ranks, and free them: a rank keeps its shard's average."""
        grads = parameters_to_vector([param.grad for param in self.params])  # a flat copy
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(self.shard.grad, grads)
        self.shard.grad /= dist.get_world_size()
        for param in self.params:
            param.grad = None

    def gather(self):
        """Fill the flat tensor with the shards of all ranks.

        In zero1 and zero2, our own shard is already there.
        """
        dist.all_gather_into_tensor(self.full, self.shard.detach())


def zero1(model, batches):
    """Shard the optimizer's state: reduce_scatter, step, all_gather."""
    flat = FlatParams(model)
    optimizer = torch.optim.Adam([flat.shard], LR)
    for batch in batches:
        optimizer.zero_grad()
        next_token_loss(model, batch).backward()
        held = bytes_held(model, optimizer)
        flat.reduce_gradients()
        optimizer.step()
        flat.gather()
    return held


def layers_of(model):
    """The parts of the model: zero2 reduces, and zero3 gathers, one of them at a time."""
    embeddings = [model.token_embedding, model.position_embedding]
    return [*embeddings, *model.blocks, model.final_norm, model.lm_head]


def when_complete(params, action):
    """Call action in backward as soon as the last of the params has its gradient.

    The action must free the gradients: in the next backward, each is None until it is there.
    """

    def on_gradient(_):
        if all(param.grad is not None for param in params):
            action()

    for param in params:
        param.register_post_accumulate_grad_hook(on_gradient)


def zero2(model, batches):
    """Shard the gradients, too: reduce a layer's gradients, and free them, during backward."""
    flats = [FlatParams(layer) for layer in layers_of(model)]
    for flat in flats:
        when_complete(flat.params, flat.reduce_gradients)
    optimizer = torch.optim.Adam([flat.shard for flat in flats], LR)
    for batch in batches:
        optimizer.zero_grad()
        next_token_loss(model, batch).backward()
        held = bytes_held(model, optimizer)
        optimizer.step()
        for flat in flats:
            flat.gather()
    return held


class ShardedLayer:
    """A layer that has its full parameters only while it runs, in forward and in backward."""

    def __init__(self, layer):
        self.flat = FlatParams(layer)
        self.shard = self.flat.shard
        self.shard.data = self.shard.data.clone()  # a view would be freed with the flat tensor
        self.free()
        layer.register_forward_pre_hook(self.gather)
        layer.register_forward_hook(self.free)
        layer.register_full_backward_pre_hook(self.gather)
        when_complete(self.flat.params, self.reduce)

    def gather(self, *_):  # hooks pass the layer, and its inputs or gradients
        self.flat.full.untyped_storage().resize_(self.flat.full.nbytes)
        self.flat.gather()

    def free(self, *_):
        """Give the memory back. The storage stays: tensors that autograd has saved point to it."""
        self.flat.full.untyped_storage().resize_(0)

    def reduce(self):
        self.flat.reduce_gradients()
        self.free()


def zero3(model, batches):
    """Shard the parameters, too: gather a layer when it runs, and free it afterwards."""
    layers = [ShardedLayer(layer) for layer in layers_of(model)]
    optimizer = torch.optim.Adam([layer.shard for layer in layers], LR)
    for batch in batches:
        optimizer.zero_grad()
        next_token_loss(model, batch).backward()
        held = bytes_held(model, optimizer)
        optimizer.step()
    for layer in layers:
        layer.gather()  # only because run compares the parameters
    return held


def fsdp(model, batches):
    """PyTorch's fully_shard (FSDP2) does what zero3 does, but cuts each parameter separately."""
    for layer in layers_of(model):
        fully_shard(layer)
    fully_shard(model)  # the root has no parameters left, but starts each layer's gather early
    optimizer = torch.optim.Adam(model.parameters(), LR)
    for batch in batches:
        optimizer.zero_grad()
        next_token_loss(model, batch).backward()
        held = bytes_held(model, optimizer)
        optimizer.step()
    for layer in layers_of(model):
        layer.unshard()  # only because run compares the parameters
    return held


def bytes_held(model, optimizer):
    """Bytes of parameters, of gradients and of Adam's state that this rank holds now."""
    params = {*model.parameters(), *optimizer.param_groups[0]["params"]}  # ZeRO's shards, too
    grads = [param.grad for param in params if param.grad is not None]
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    moments = [tensor for tensor in states if tensor.dim() > 0]  # without Adam's step counters
    return [count_bytes(tensors) for tensors in (params, grads, moments)]


def count_bytes(tensors):
    """Tensors that share memory count once, freed ones nothing, and a DTensor as its shard."""
    shards = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = [shard.untyped_storage() for shard in shards]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def run(rank, size):
    # T = 24 divides every parameter's first dimension, which fully_shard cuts
    assert T % size == 0, f"shards must be equal: choose a number of ranks that divides {T}"
    batches = [make_batch(BATCH_SIZE, seed=step * size + rank) for step in range(STEPS)]
    expected, wrong, totals = None, [], []
    if rank == 0:
        print("KiB             parameters   gradients   optimizer   largest difference")
    for train in (data_parallel, zero1, zero2, zero3, fsdp):
        torch.manual_seed(1234)  # the same parameters on every rank, and for every method
        model = GPT()
        held = train(model, batches)
        totals.append(sum(held))
        params = parameters_to_vector(model.parameters()).detach()
        expected = params if expected is None else expected
        difference = (params - expected).abs().max()
        dist.all_reduce(difference, op=dist.ReduceOp.MAX)
        if rank == 0:
            row = "".join(f"{count / 1024:12.0f}" for count in held)
            print(f"{train.__name__:14}{row}{difference:21.0e}")
        if not difference < 1e-9:
            wrong.append(train.__name__)
    assert not wrong, f"not the training of data_parallel: {', '.join(wrong)}"
    is_less = all(after < before for before, after in pairwise(totals[:4]))  # from stage to stage
    assert is_less or size == 1, "a stage of ZeRO holds no less than the one before"


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)  # so that rounding cannot hide an error
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.barrier()  # so that gloo's threads have freed the last tensors before Python ends
    dist.destroy_process_group()
