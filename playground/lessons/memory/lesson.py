"""Where the bytes of a training step are, and how to need fewer: by computing again.

    torchrun --nproc-per-node 2 lesson.py
    python -m playground memory

Parameters, gradients and the optimizer's state grow with the model; activations, which backward
needs, grow with the batch. Activation checkpointing keeps a block's input alone and computes the
rest a second time.
Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, arXiv 1604.06174
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from playground.lessons.sgd.lesson import average_gradients

WIDTH, HEADS, BLOCKS, VOCABULARY, LENGTH = 32, 4, 4, 64, 32
KEPT_WIDTHS = 16
"""What a block keeps of a token, in widths: its input, normed, 3 queries, keys and values, what is
attended to; the input of its second half, normed, 4 before GELU, 4 behind it. Dropout adds two.
Compare Korthikanti et al., 2022, arXiv 2205.05198"""


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


class Block(nn.Module):
    """A block of a transformer: attention, then two layers, each added to its input."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout))
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), up, nn.GELU(), down, nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [batch, length, width]."""
        x = self.attend(x)
        return x + self.mlp(x)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


def new_model(dropout: float = 0.0) -> nn.Sequential:
    """A GPT: an embedding, blocks, and a layer that predicts the next token."""
    torch.manual_seed(1234)
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    blocks = [Block(dropout) for _ in range(BLOCKS)]
    return nn.Sequential(embedding, *blocks, nn.Linear(WIDTH, VOCABULARY))


def run_block(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x)


def loss_of(model: Any, tokens: torch.Tensor, run: Callable[..., Any] = run_block) -> torch.Tensor:
    """The mean loss of `tokens`, [batch, length + 1]. `run` calls each of the blocks."""
    embedding, *blocks, head = model
    x = embedding(tokens[:, :-1])
    for block in blocks:
        x = run(block, x)
    return F.cross_entropy(head(x).float().flatten(0, 1), tokens[:, 1:].flatten())


def tokens_of(rank: int, batch: int = 8) -> torch.Tensor:
    """[batch, length + 1], the same in every call."""
    torch.manual_seed(rank)
    return torch.randint(VOCABULARY, (batch, LENGTH + 1))


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
    model, tokens = new_model(), tokens_of(rank)
    optimizer = torch.optim.Adam(model.parameters())
    with Activations(model) as activations:
        loss = loss_of(model, tokens)
        held = activations.held
        loss.backward()
    average_gradients(model)
    optimizer.step()
    params = list(model.parameters())
    values = {
        "parameters": nbytes(params),
        "gradients": nbytes(param.grad for param in params),
        "optimizer": nbytes(adam_state(optimizer)),
    }
    per_parameter = sum(values.values()) / sum(param.numel() for param in params)
    per_token = BLOCKS * KEPT_WIDTHS * WIDTH + WIDTH + VOCABULARY  # the last two of the head
    formula = 4 * per_token * tokens[:, 1:].numel()
    return {**values, "per_parameter": per_parameter, "activations": held, "by_formula": formula}


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


def checkpointing(rank: int, size: int) -> dict[str, dict[str, dict[str, object]]]:
    """Keep all activations, or each block's input alone: the KiB kept after forward, and at most.

    Gradients are equal bit for bit, although dropout draws random numbers. `work` is that of the
    matrix products: backward has twice that of forward, and now a forward more. At its peak it
    holds the activations of one block besides the inputs.
    """
    return {"ways": compare(rank, {"all": run_block, "by_hand": Checkpoint.apply})}


def compare(rank: int, ways: Mapping[str, Callable[..., Any]]) -> dict[str, dict[str, object]]:
    """Take a step with each function that runs a block; work and gradients beside the first's."""
    rows, flops, gradients = {}, [], []
    for way, run in ways.items():
        model = new_model(dropout=0.1)
        with Activations(model) as activations, FlopCounterMode(display=False) as counter:
            torch.manual_seed(rank)
            loss = loss_of(model, tokens_of(rank), run)
            kept = activations.held
            loss.backward()
        average_gradients(model)
        flops.append(counter.get_total_flops())
        gradients.append([param.grad for param in model.parameters()])
        rows[way] = {
            "kept": kept // 1024,
            "at_most": activations.peak // 1024,
            "work": round(flops[-1] / flops[0], 2),
            "equal_bits": all(map(torch.equal, gradients[-1], gradients[0])),
        }
    return rows


def print_steps(rank: int, world_size: int) -> None:
    """Run every step, and print what it returns on rank 0."""
    values, ways = account(rank, world_size), checkpointing(rank, world_size)["ways"]
    if rank == 0:
        print("\n".join(f"account, {name}: {value}" for name, value in values.items()))
        for way, row in ways.items():
            found = ", ".join(f"{name} {value}" for name, value in row.items())
            print(f"checkpointing, {way}: {found}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print_steps(dist.get_rank(), dist.get_world_size())
    dist.barrier()  # gives gloo's threads time to free the last tensors: they need the GIL
    dist.destroy_process_group()
