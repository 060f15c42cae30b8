"""Where the bytes of a training step are, and how to need fewer of them.

    parameters, gradients, Adam    16 bytes for each parameter, in float32
    activations                    64·C bytes for each token and block

Activations are what forward keeps for backward. RecomputedBlock keeps only its input, and computes
the rest again.

    python -m playground memory
    torchrun --nproc-per-node 2 lesson.py

    a rank has 288 tokens, and 3 · C is 288
    Block: largest difference of a gradient from one process 6e-17
    RecomputedBlock: largest difference of a gradient from one process 6e-17
    CheckpointedBlock: largest difference of a gradient from one process 6e-17
    a step with Block:
    forward   4510 KiB PPPPPPPOOOOOOOOOOOOOOAAAAAAAAAAAAAA
    forward   6256 KiB PPPPPPPOOOOOOOOOOOOOOAAAAAAAAAAAAAAAAAAAAAAAAAAA
    backward  4966 KiB PPPPPPPGGGGOOOOOOOOOOOOOOAAAAAAAAAAAAAA
    backward  3657 KiB PPPPPPPGGGGGGGOOOOOOOOOOOOOO
    step      3679 KiB PPPPPPPGGGGGGGOOOOOOOOOOOOOO
    a step with RecomputedBlock:
    forward   2764 KiB PPPPPPPOOOOOOOOOOOOOO
    forward   2872 KiB PPPPPPPOOOOOOOOOOOOOOA
    forward   4637 KiB PPPPPPPOOOOOOOOOOOOOOAAAAAAAAAAAAAAA
    backward  3436 KiB PPPPPPPGGGGOOOOOOOOOOOOOOAA
    forward   4966 KiB PPPPPPPGGGGOOOOOOOOOOOOOOAAAAAAAAAAAAAA
    backward  3765 KiB PPPPPPPGGGGGGGOOOOOOOOOOOOOOA
    step      3679 KiB PPPPPPPGGGGGGGOOOOOOOOOOOOOO
                       loss  changed parameters  bytes/parameter  kept, KiB
    float32            3.08                 99%               16       3771
    bfloat16           3.45                 40%                8       1903
    bfloat16, masters  3.08                 99%               16       2373
    autocast           3.08                 99%               16       2646

A line of the picture shows what rank 0 holds when a block has been computed, in KiB and in letters
of 128 KiB: P parameters, G gradients, O optimizer's state, A activations. The table compares four
trainings. Updates that are too small for bfloat16 are lost, unless the parameters are float32.
"kept" is what forward keeps for backward: activations, and bfloat16 copies of parameters.
Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, arXiv 1604.06174;
Micikevicius et al., Mixed Precision Training, 2018, arXiv 1710.03740
"""

from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector
from torch.utils.checkpoint import checkpoint

from playground.lessons.gpt import GPT, LAYERS, Block, C, T, make_batch, next_token_loss

SEQUENCES = 24  # of a batch of all ranks; the number of ranks must divide it
STEPS = 30  # of each training in the table, on one sequence for each rank
LR = 1e-4  # of these trainings
LETTER = 128 * 1024  # bytes for which a letter of the picture stands

# the tensors that autograd keeps now: it forgets what nobody uses
kept = WeakValueDictionary()  # by id, because a WeakSet would compare tensors with ==


def say(text):
    if dist.get_rank() == 0:
        print(text)


def make_model(block_class):
    """A GPT with blocks of this class, and the same parameters on every rank."""
    torch.manual_seed(1234)
    model = GPT()
    model.blocks = torch.nn.ModuleList(block_class() for _ in range(LAYERS))
    return model


def pack(tensor):
    """Called with each tensor that autograd keeps. Returns a second tensor with the same memory."""
    alias = tensor.detach()  # not tensor: an output refers to its operation, which would keep it
    kept[id(alias)] = alias
    return alias


def unpack(alias):
    """Called when backward needs what pack has returned. Autograd drops it afterwards."""
    return alias


def count_bytes(tensors):
    """Bytes of these tensors' memory. Tensors that share memory count once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def bytes_held(model, optimizer):
    """Bytes of parameters, of gradients, of Adam's two averages, and of what else is kept."""
    params = [*model.parameters()]
    grads = [param.grad for param in params if param.grad is not None]
    averages = [  # the state of a parameter also has a count of steps, which is left out
        tensor for state in optimizer.state.values() for tensor in state.values() if tensor.dim()
    ]
    counts = [count_bytes(tensors) for tensors in (params, grads, averages)]
    activations = count_bytes([*params, *kept.values()]) - count_bytes(params)
    return [*counts, activations]


def draw_step(block_class, batch):
    """Print a line after each forward and each backward of a block, and one after the step.

    Returns the most bytes held after any of them.
    """
    say(f"a step with {block_class.__name__}:")
    model = make_model(block_class)
    optimizer = torch.optim.Adam(model.parameters())

    totals = []

    def draw(event):
        counts = bytes_held(model, optimizer)
        totals.append(sum(counts))
        bar = "".join(
            kind * round(count / LETTER) for kind, count in zip("PGOA", counts, strict=True)
        )
        say(f"{event:9} {sum(counts) / 1024:4.0f} KiB {bar}")

    next_token_loss(model, batch).backward()
    optimizer.step()  # creates Adam's averages, so that the next step is like all others
    optimizer.zero_grad()
    for block in model.blocks:
        block.mlp.register_forward_hook(lambda *_: draw("forward"))  # mlp runs last in forward
        block.norm1.register_full_backward_hook(lambda *_: draw("backward"))  # norm1 in backward
    with saved_tensors_hooks(pack, unpack):  # around backward, too: it may run a forward again
        next_token_loss(model, batch).backward()
    optimizer.step()
    draw("step")
    return max(totals)


class Recompute(torch.autograd.Function):
    """Keep only the input of a block. Backward computes everything else again."""

    @staticmethod
    def forward(ctx, forward_block, x):
        ctx.forward_block = forward_block
        ctx.save_for_backward(x)
        return forward_block(x)  # autograd is off in a Function's forward: nothing else is kept

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.forward_block(x)
        output.backward(grad)  # adds to the gradients of the block's parameters
        return None, x.grad  # the gradients of forward_block and x


class RecomputedBlock(Block):
    """A block that keeps only its input, by hand."""

    def forward(self, x):
        return Recompute.apply(super().forward, x)


class CheckpointedBlock(Block):
    """A block that keeps only its input, by torch."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def compute_gradients(block_class, batch):
    """The gradients of all parameters, in float64, so that rounding cannot hide a mistake."""
    model = make_model(block_class).double()
    next_token_loss(model, batch).backward()
    return [param.grad for param in model.parameters()]


def average(grads):
    """Replace each gradient by its mean over the ranks."""
    for grad in grads:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()


def master_loss(model, batch):
    """Compute in bfloat16, with rounded copies of the float32 parameters, the masters.

    Backward converts the gradients of the copies to float32 gradients of the masters.
    """
    copies = {name: param.bfloat16() for name, param in model.named_parameters()}
    # only the loss is computed in float32: it needs more digits
    return next_token_loss(lambda tokens: functional_call(model, copies, tokens).float(), batch)


def autocast_loss(model, batch):
    """torch chooses the dtype of each operation, and bfloat16 for products of matrices."""
    with torch.autocast(batch.device.type, torch.bfloat16):
        return next_token_loss(model, batch)


def train(model, compute_loss, batch):
    """Return last loss, share of changed parameters, bytes per parameter, and kept bytes."""
    start = parameters_to_vector(model.parameters()).detach()  # a copy
    optimizer = torch.optim.Adam(model.parameters(), LR)
    with saved_tensors_hooks(pack, unpack):
        loss = compute_loss(model, batch)  # loss keeps the graph alive, and so the kept tensors
    *_, kept_bytes = bytes_held(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = compute_loss(model, batch[:1])  # one sequence for each rank, always the same
        loss.backward()
        average([param.grad for param in model.parameters()])
        optimizer.step()
    params = parameters_to_vector(model.parameters()).detach()
    of_rank_0 = params.clone()
    dist.broadcast(of_rank_0, src=0)
    assert torch.equal(params, of_rank_0), "the ranks have trained different models"
    changed = (params != start).double().mean()
    held = sum(bytes_held(model, optimizer))  # kept is empty: no hooks; the first graph is gone
    return loss, changed, held / start.numel(), kept_bytes


def compare_dtypes(batch):
    say("                   loss  changed parameters  bytes/parameter  kept, KiB")
    for name, dtype, compute_loss in (
        ("float32", torch.float32, next_token_loss),
        ("bfloat16", torch.bfloat16, next_token_loss),
        ("bfloat16, masters", torch.float32, master_loss),
        ("autocast", torch.float32, autocast_loss),
    ):
        loss, changed, held, kept_bytes = train(make_model(Block).to(dtype), compute_loss, batch)
        say(f"{name:17} {loss:5.2f} {changed:19.0%} {held:16.0f} {kept_bytes / 1024:10.0f}")


def run(rank, size):
    assert SEQUENCES % size == 0, f"{size} ranks cannot divide a batch of {SEQUENCES} equally"
    batch = make_batch(SEQUENCES, seed=0)
    part = batch.chunk(size)[rank]
    say(f"a rank has {len(part) * T} tokens, and 3 · C is {3 * C}")
    expected = parameters_to_vector(compute_gradients(Block, batch))
    wrong = []
    for block_class in (Block, RecomputedBlock, CheckpointedBlock):
        grads = compute_gradients(block_class, part)
        average(grads)
        difference = (parameters_to_vector(grads) - expected).abs().max()
        dist.all_reduce(difference, op=dist.ReduceOp.MAX)
        say(
            f"{block_class.__name__}: "
            f"largest difference of a gradient from one process {difference:.0e}"
        )
        if not difference < 1e-9:
            wrong.append(block_class.__name__)
    most, most_recomputed = draw_step(Block, part), draw_step(RecomputedBlock, part)
    compare_dtypes(part)
    assert not wrong, f"not the gradients of one process: {', '.join(wrong)}"
    assert most_recomputed < most, "RecomputedBlock holds no less than Block"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.barrier()  # all ranks finish before one takes its connections down
    dist.destroy_process_group()
