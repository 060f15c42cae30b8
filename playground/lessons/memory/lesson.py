"""Where the bytes of a training step are, and two ways to need fewer: half the bits, and computing
again.

    torchrun --nproc-per-node 2 lesson.py
    python -m playground memory

Parameters, gradients and the optimizer's state grow with the model; activations, which backward
needs, grow with the batch. Lower precision shrinks what is computed with, but small updates need
float32. Activation checkpointing keeps a block's input alone and computes the rest a second time.
Source: Micikevicius et al., Mixed Precision Training, 2018, arXiv 1710.03740; Chen et al., Training
Deep Nets with Sublinear Memory Cost, 2016, arXiv 1604.06174
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from playground.lessons.ladder.lesson import flat

WIDTH, HEADS, BLOCKS, VOCABULARY, LENGTH = 32, 4, 4, 64, 32
KEPT_WIDTHS = 16
"""What a block keeps of a token, in widths: its input, normed, 3 queries, keys and values, what is
attended to; the input of its second half, normed, 4 before GELU, 4 behind it. Dropout adds two.
Compare Korthikanti et al., 2022, arXiv 2205.05198"""


class Block(nn.Module):
    """A block of a transformer: attention, then two layers, each added to its input."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [batch, length, width]."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


def run_block(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x)


class GPT(nn.Module):
    """Predicts the next token. `run` calls a block; another one may keep less."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.run: Callable[[nn.Module, torch.Tensor], Any] = run_block

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of `tokens`, [batch, length + 1]."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = self.run(block, x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens[:, 1:].flatten())


class Activations(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd keeps for backward in this block: `held` now, `peak` at most.

    Memory that several operations keep counts once, and the parameters' not at all.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self.pack, lambda saved: saved.tensor)
        self.own = {param.untyped_storage().data_ptr() for param in model.parameters()}
        self.uses: Counter[int] = Counter()
        self.held = 0
        self.peak = 0

    def __enter__(self) -> Activations:
        super().__enter__()
        return self

    def pack(self, tensor: torch.Tensor) -> Saved:
        self.count(tensor.untyped_storage(), 1)
        return Saved(tensor, self)

    def count(self, storage: torch.UntypedStorage, change: int) -> None:
        before = self.uses[storage.data_ptr()]
        self.uses[storage.data_ptr()] += change
        if storage.data_ptr() not in self.own and 0 in (before, before + change):
            self.held += change * storage.nbytes()
            self.peak = max(self.peak, self.held)


class Saved:
    """A tensor that autograd keeps, until backward has used it."""

    def __init__(self, tensor: torch.Tensor, activations: Activations) -> None:
        self.tensor = tensor
        self.activations = activations

    def __del__(self) -> None:
        self.activations.count(self.tensor.untyped_storage(), -1)


class Checkpoint(torch.autograd.Function):
    """Run a block without a graph, and keep its input; backward runs it once more, with a graph.

    Dropout must drop the same elements again, so the state of the random numbers is kept, too.
    (torch's function also keeps autocast, and runs blocks of several inputs.)
    """

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ctx.block = block
        ctx.random = torch.cuda if x.is_cuda else torch
        ctx.state = ctx.random.get_rng_state()
        ctx.save_for_backward(x)
        return block(x)  # without a graph: so autograd calls every forward

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(), torch.enable_grad():
            ctx.random.set_rng_state(ctx.state)
            output = ctx.block(x)
        output.backward(grad)  # adds to the gradients of the block's parameters
        return None, x.grad


def tokens_of(rank: int, batch: int = 8) -> torch.Tensor:
    """[batch, length + 1], the same in every call."""
    torch.manual_seed(rank)
    return torch.randint(VOCABULARY, (batch, LENGTH + 1))


def new_model(dropout: float = 0.0) -> GPT:
    torch.manual_seed(1234)
    return GPT(dropout)


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def adam_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = ("exp_avg", "exp_avg_sq")
    return [each[moment] for each in optimizer.state.values() for moment in moments]


def account(rank: int, size: int) -> dict[str, object]:
    """The bytes of a training step in float32 with Adam, counted, and what a formula says.

    A parameter has 16 bytes: 4 of its own, 4 of its gradient, 8 of Adam's two moments. Activations
    grow with the tokens of a batch. DDP divides neither by the number of ranks.
    """
    model = new_model()
    optimizer = torch.optim.Adam(model.parameters())
    with Activations(model) as activations:
        loss = model(tokens_of(rank))
        held = activations.held
        loss.backward()
    flat(model)
    optimizer.step()
    params = list(model.parameters())
    per_token = BLOCKS * KEPT_WIDTHS * WIDTH + WIDTH + VOCABULARY  # the last two of the head
    values = {
        "parameters": nbytes(params),
        "gradients": nbytes(param.grad for param in params),
        "optimizer": nbytes(adam_state(optimizer)),
    }
    per_parameter = sum(values.values()) / sum(param.numel() for param in params)
    formula = 4 * per_token * tokens_of(rank)[:, 1:].numel()
    return {**values, "per_parameter": per_parameter, "activations": held, "by_formula": formula}


def mixed_precision(rank: int, size: int) -> dict[str, object]:
    """Train a model in float32, in bfloat16, in bfloat16 with float32 masters, and with autocast.

    bfloat16 has 8 significant bits: an update below about 1/512 of a weight is rounded away. So
    bfloat16 alone stalls. A master is a float32 copy that the optimizer steps for.
    """
    results: dict[str, dict[str, float]] = {}
    for method in ("float32", "bfloat16", "masters", "autocast"):
        loss, per_parameter, moved = train(method, tokens_of(rank, batch=2))
        results.setdefault("loss", {})[method] = round(loss, 3)
        results.setdefault("per_parameter", {})[method] = per_parameter
        results.setdefault("parts_moved", {})[method] = round(moved, 2)
    return dict(results)


def train(method: str, tokens: torch.Tensor, steps: int = 150) -> tuple[float, float, float]:
    """Returns the last loss, the bytes held per parameter, and the part of the weights that differ
    from those before the last step."""
    model = new_model()
    if method in ("bfloat16", "masters"):
        model.bfloat16()
    params = list(model.parameters())
    stepped = params
    if method == "masters":
        stepped = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = torch.optim.Adam(stepped, lr=3e-4)
    for _ in range(steps):
        model.zero_grad()
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=method == "autocast"):
            loss = model(tokens)
        loss.backward()
        flat(model)
        before = torch.cat([param.detach().flatten() for param in stepped])
        if method == "masters":
            step_masters(optimizer, stepped, params)
        else:
            optimizer.step()
    moved = (torch.cat([param.detach().flatten() for param in stepped]) != before).float().mean()
    masters = stepped if method == "masters" else []
    grads = [param.grad for param in params if param.grad is not None]
    held = nbytes([*params, *grads, *masters, *adam_state(optimizer)])
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item(), held / len(before), moved.item()


def step_masters(optimizer: Any, masters: Sequence[Any], params: Sequence[Any]) -> None:
    """Step in float32, then round the parameters off the masters."""
    for master, param in zip(masters, params, strict=True):
        master.grad = param.grad.float()
    optimizer.step()
    for master, param in zip(masters, params, strict=True):
        param.data.copy_(master)
        master.grad = None  # a float32 copy of the gradient is not kept


def summed(rank: int, size: int) -> dict[str, object]:
    """Add up gradients over the ranks in bfloat16 and in float32: the relative errors of the sums.

    Each addition in bfloat16 rounds to 8 bits, so large worlds add up in float32.
    """
    torch.manual_seed(rank)
    gradient = torch.randn(10_000).bfloat16()
    exact = gradient.double()
    dist.all_reduce(exact)
    errors: dict[str, object] = {}
    for dtype in (torch.bfloat16, torch.float32):
        total = gradient.to(dtype, copy=True)
        dist.all_reduce(total)
        errors[str(dtype)[6:]] = two_digits((total - exact).norm() / exact.norm())
    return errors


def two_digits(number: torch.Tensor) -> float:
    return float(f"{number.item():.1e}")


def checkpointing(rank: int, size: int) -> dict[str, object]:
    """Keep all activations, or each block's input alone, by hand and by torch: the KiB kept.

    Gradients are equal bit for bit, although dropout draws random numbers. `work` is that of the
    matrix products: backward has twice that of forward, and now a forward more. At its peak it
    holds the activations of one block besides the inputs.
    """
    by_torch = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    ways = {"all": run_block, "by_hand": Checkpoint.apply, "by_torch": by_torch}
    kept, peak, work, gradients = {}, {}, {}, []
    for way, run in ways.items():
        model = new_model(dropout=0.1)
        model.run = run
        with Activations(model) as activations, FlopCounterMode(display=False) as counter:
            torch.manual_seed(rank)
            loss = model(tokens_of(rank))
            kept[way] = activations.held // 1024
            loss.backward()
            if way != "by_torch":  # whose second forward cannot be counted so
                peak[way] = activations.peak // 1024
        flat(model)
        work[way] = counter.get_total_flops()
        gradients.append([param.grad for param in model.parameters()])
    work = {way: round(flops / work["all"], 2) for way, flops in work.items()}
    equal = all(map(torch.equal, gradients[0] * 2, gradients[1] + gradients[2]))
    return {"kept_after_forward": kept, "at_most": peak, "work": work, "equal_bits": equal}


def accumulation(rank: int, size: int) -> dict[str, object]:
    """A batch whole, and in four microbatches whose gradients are added up: the KiB kept at most.

    The ranks average after the last microbatch, so there are no more messages than before.
    `difference` is that to the gradients of the whole batch.
    """
    kept, gradients = {}, []
    for count in (1, 4):
        model = new_model()
        with Activations(model) as activations:
            for microbatch in tokens_of(rank).chunk(count):
                (model(microbatch) / count).backward()
        flat(model)
        kept[f"{count} x {8 // count} sequences"] = activations.peak // 1024
        gradients.append(torch.cat([param.grad.flatten() for param in model.parameters()]))
    difference = (gradients[0] - gradients[1]).abs().max()
    return {"kept": kept, "difference": two_digits(difference)}


STEPS = (account, mixed_precision, summed, checkpointing, accumulation)


def print_steps(rank: int, world_size: int) -> None:
    """Run every step, and print what it returns on rank 0."""
    for step in STEPS:
        lines = [step.__name__]
        for name, value in step(rank, world_size).items():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            lines.append(
                f"  {name}: " + ", ".join(f"{part} {each}".strip() for part, each in parts)
            )
        if rank == 0:
            print("\n".join(lines))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print_steps(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
