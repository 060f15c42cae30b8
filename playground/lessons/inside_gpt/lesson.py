"""What is inside a GPT: the shapes, parameters, activations and operations of a block.

    a block has            12·C² parameters
    it keeps for backward  16·C numbers for each token
    a step computes        6 operations for each token and each parameter

C is the number of channels: a token is C numbers between two blocks.

    python -m playground gpt
    torchrun --nproc-per-node 2 lesson.py

    first block            output         parameters   kept  operations
    blocks.0               [18, 24, 96]            0      0           0
    blocks.0.norm1         [18, 24, 96]          192     98           0
    blocks.0.attention     [18, 24, 96]            0    396      27,648
    blocks.0.attention.qkv [18, 24, 288]      27,936     96     165,888
    blocks.0.attention.out [18, 24, 96]        9,312      0      55,296
    blocks.0.norm2         [18, 24, 96]          192     98           0
    blocks.0.mlp           [18, 24, 96]            0    384           0
    blocks.0.mlp.up        [18, 24, 384]      37,248     96     221,184
    blocks.0.mlp.down      [18, 24, 96]       36,960    384     221,184
    sum                                      111,840  1,552     691,200
    by formula                               111,840  1,552     691,200
    by rule                                  110,592  1,536     663,552

    a step             rank 0      all ranks     by formula        by rule
    parameters        235,440        470,880        470,880        442,368
    kept            1,340,928      2,681,856      2,681,856      2,654,208
    operations    609,140,736  1,218,281,472  1,218,281,472  1,146,617,856
    largest difference from the formulas, with our blocks 0
    largest difference from the formulas, with torch's blocks 0

The first table has a row for each module of the first block, without the modules inside it. "kept"
is how many numbers forward keeps for backward, for each token. "operations" are the multiplications
and additions in products of matrices, in forward and backward, for each token. The second table has
a whole step, whose batch the ranks divide. There "kept" is of the blocks only. A formula is exact,
for "kept" on CPUs only. A rule is the term of the formula with the highest power of C.
Sources: Radford et al., GPT-2, 2019 (the block); Kaplan et al., Scaling Laws for Neural Language
Models, 2020, arXiv 2001.08361 (6 operations); Korthikanti et al., Reducing Activation Recomputation
in Large Transformer Models, 2022, arXiv 2205.05198 (what a block keeps)
"""

from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from playground.lessons.gpt import GPT, LAYERS, C, H, T, V, make_batch, next_token_loss

SEQUENCES = 36  # of a batch of all ranks; the number of ranks must divide it


def find_shapes(model, batch):
    """The shape of each module's output, when the model runs."""
    shapes = {}

    def note_shape(module, inputs, output):
        shapes[module] = list(output.shape)

    hooks = [module.register_forward_hook(note_shape) for module in model.modules()]
    model(batch[:, :-1])
    for hook in hooks:
        hook.remove()
    return shapes


def count_kept(model, batch):
    """How many numbers forward keeps for backward, by the name of the module that keeps them.

    Tensors that share memory count once. Parameters do not count: they are there in any case.
    """
    kept = Counter()
    # a layer's weight is saved for backward, too, but it is a parameter
    seen = {param.untyped_storage().data_ptr() for param in model.parameters()}
    tracker = ModuleTracker()  # tracker.parents has the names of the modules that are running

    def pack(tensor):
        """Called with each tensor that forward keeps."""
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in seen:
            seen.add(memory.data_ptr())
            # an inner module continues the name of the outer one; "Global" is no module
            innermost = max(tracker.parents - {"Global"}, key=len, default="")
            kept[innermost] += memory.nbytes() // tensor.itemsize  # tensor may be a view of a part
        return tensor

    def unpack(tensor):
        """Called when backward needs what pack has returned. Here no backward runs."""
        return tensor

    with tracker, saved_tensors_hooks(pack, unpack):
        next_token_loss(model, batch)
    return kept


def count_operations(model, batch):
    """The operations of forward and backward, by the name of the module that computes them.

    torch's counter knows products of matrices. Only to be counted, attention computes by such
    products (MATH).
    """
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss = next_token_loss(model, batch)
        loss.backward()
    counts = counter.get_flop_counts()  # of a module together with the modules inside it
    # a Counter has 0 for modules without products, such as norms
    return Counter({name: sum(by_product.values()) for name, by_product in counts.items()})


def print_block(model, batch):
    """Print what each module of the first block has, then the sum, the formula and the rule."""
    token_count = len(batch) * T
    shapes = find_shapes(model, batch)
    kept = count_kept(model, batch)
    operations = count_operations(model, batch)
    rows = []
    print(f"{'first block':22} {'output':14} {'parameters':>10} {'kept':>6} {'operations':>11}")
    for name, module in model.blocks[0].named_modules(prefix="GPT.blocks.0"):  # as counters do
        params = sum(param.numel() for param in module.parameters(recurse=False))
        inside = sum(operations[f"{name}.{child}"] for child, _ in module.named_children())
        own = operations[name] - inside  # without the modules inside, as kept is
        row = [params, kept[name] / token_count, own / token_count]
        print_row(name.removeprefix("GPT."), shapes[module], row)
        rows.append(row)
    print_row("sum", "", [sum(column) for column in zip(*rows, strict=True)])
    print_row("by formula", "", [12 * C**2 + 13 * C, 16 * C + H + 4, 72 * C**2 + 12 * T * C])
    print_row("by rule", "", [12 * C**2, 16 * C, 6 * 12 * C**2])


def print_row(name, shape, counts):
    """Print a line of the first table."""
    params, kept, operations = counts
    print(f"{name:22} {shape!s:14} {params:10,} {kept:6,.0f} {operations:11,.0f}")


def count_step(model, batch):
    """What this rank has in a step: parameters, numbers kept by the blocks, and operations."""
    params = sum(param.numel() for param in model.parameters())
    kept = count_kept(model, batch)
    kept_by_blocks = sum(count for name, count in kept.items() if "blocks" in name)
    operations = count_operations(model, batch)[type(model).__name__]  # the whole model
    return torch.tensor([params, kept_by_blocks, operations])


def step_by_formula(ranks):
    """What all ranks count together. Each has all parameters and its share of the tokens."""
    token_count = SEQUENCES * T
    blocks = LAYERS * (12 * C**2 + 13 * C)
    others = V * C + T * C + 2 * C + C * V + V  # two embeddings, last norm, lm_head
    kept = LAYERS * (16 * C + H + 4)
    operations = LAYERS * (72 * C**2 + 12 * T * C) + 6 * C * V
    return torch.tensor([ranks * (blocks + others), kept * token_count, operations * token_count])


def step_by_rule(ranks):
    """An estimate of step_by_formula, from the matrices of the blocks only."""
    token_count = SEQUENCES * T
    params = LAYERS * 12 * C**2
    kept = LAYERS * 16 * C
    return torch.tensor([ranks * params, kept * token_count, 6 * params * token_count])


def print_step(*columns):
    """Print the second table: counts of rank 0, of all ranks, by formula, and by rule."""
    print(f"\n{'a step':10}{'rank 0':>15}{'all ranks':>15}{'by formula':>15}{'by rule':>15}")
    names = "parameters", "kept", "operations"
    for name, *row in zip(names, *columns, strict=True):
        print(f"{name:10}" + "".join(f"{count:15,}" for count in row))


class LibraryBlock(nn.TransformerEncoderLayer):
    """torch's block, with the sizes of ours. Its parent is not causal, so forward says so."""

    def __init__(self):
        super().__init__(
            C, H, 4 * C, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        # the hint is_causal lets torch use its fused kernel; torch requires the mask with it
        return super().forward(x, src_mask=mask, is_causal=True)


def run(rank, size):
    """Count a step with our blocks, and with torch's, and compare with the formulas."""
    assert SEQUENCES % size == 0, f"{size} ranks cannot divide a batch of {SEQUENCES} equally"
    part = make_batch(SEQUENCES, seed=0).chunk(size)[rank]
    model, library = GPT(), GPT()
    library.blocks = nn.ModuleList(LibraryBlock() for _ in range(LAYERS))
    if rank == 0:
        print_block(model, part)
    counted = count_step(model, part)
    total = counted.clone()
    dist.all_reduce(total)
    by_library = count_step(library, part)
    dist.all_reduce(by_library)
    formula, rule = step_by_formula(size), step_by_rule(size)
    if rank == 0:
        print_step(counted, total, formula, rule)
        for name, counts in (("our", total), ("torch's", by_library)):
            difference = (counts - formula).abs().max()
            print(f"largest difference from the formulas, with {name} blocks {difference}")
            # on GPUs, attention keeps more, which the formula of kept does not have
            assert difference == 0 or part.is_cuda, f"{name} blocks do not follow the formulas"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
