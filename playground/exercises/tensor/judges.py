"""Judges of the exercises on tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from playground.exercises.cases import Case, Cases, counting, predict
from playground.training.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_region,
    gather_from_sequence_region,
    reduce_from_region,
    reduce_scatter_to_sequence_region,
)
from playground.ui.units import plural

HEAD_WIDTH = 2


def mirrored(rank: int, size: int, seed: int) -> Cases:
    """The output and all gradients of an MLP. One process is the oracle."""
    for length, features in ((1, 1), (3, 2), (2, 5)):
        torch.manual_seed(seed)
        tokens, gradient = torch.randn(2, length, 3).double()
        up = torch.randn(3, features * size).double()
        down = torch.randn(features * size, 3).double()
        whole = [each.clone().requires_grad_() for each in (tokens, up, down)]
        output = torch.relu(whole[0] @ whole[1]) @ whole[2]
        output.backward(gradient)
        given = [tokens, up.chunk(size, 1)[rank].clone(), down.chunk(size, 0)[rank].clone()]
        for each in given:
            each.requires_grad_()
        of_tokens, of_up, of_down = (each.grad for each in whole)
        names = ("tokens.grad", "columns.grad", "rows.grad")
        parts = (of_tokens, of_up.chunk(size, 1)[rank], of_down.chunk(size, 0)[rank])
        run = partial(forward_and_backward, rank, size, given, gradient)
        about = f"{plural(length, 'token')}, {plural(features, 'feature')} on each rank"
        held = partial(gradients_of, names, given)
        expected = dict(zip(names, parts, strict=True))
        most = 2 * max(2, size - 1) * tokens.numel()
        yield Case(
            about,
            tuple(given),
            output.detach(),
            held=held,
            expected=expected,
            is_coded=False,
            run=run,
            most_moved=most,
        )


def forward_and_backward(
    rank: int, size: int, given: Sequence[torch.Tensor], gradient: torch.Tensor,
    function: Callable[..., torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """The output of the function, from which this gradient goes backward."""
    output = function(rank, size, *given)
    output.backward(gradient)
    return output.detach()


def gradients_of(
    names: Sequence[str], tensors: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    return {name: each.grad for name, each in zip(names, tensors, strict=True)}


def heads(rank: int, size: int, seed: int) -> Cases:
    """Attention of whole heads. One process is the oracle."""
    for length, of_rank in ((1, 1), (3, 1), (5, 3)):
        torch.manual_seed(seed)
        width = HEAD_WIDTH * of_rank * size
        tokens = torch.randn(length, width)
        weights = torch.randn(4, width, width)
        bias = torch.randn(width)
        tokens, weights, bias = (each.double() for each in (tokens, weights, bias))
        query, key, value = (
            F.linear(tokens, weight).unflatten(-1, (-1, HEAD_WIDTH)).transpose(0, 1)
            for weight in weights[:3]
        )
        mixed = (
            F.scaled_dot_product_attention(query, key, value, is_causal=True)
            .transpose(0, 1)
            .flatten(1)
        )
        parts = [*weights[:3].chunk(size, 1)[rank].clone(), weights[3].chunk(size, 1)[rank].clone()]
        about = f"{plural(length, 'token')}, {plural(of_rank, 'head')} on each rank"
        due = F.linear(mixed, weights[3], bias)
        given = (tokens, *parts, bias, HEAD_WIDTH)
        yield Case(about, given, due, is_coded=False, most_moved=2 * length * width)


def vocabulary_loss(rank: int, size: int, seed: int) -> Cases:
    """The mean cross entropy of whole logits is the oracle. Few numbers of a token may be sent."""
    for about, tokens, scale in (
        ("1 token", 1, 1.0),
        ("7 tokens", 7, 3.0),
        ("logits up to 1,000", 5, 400.0),
    ):
        torch.manual_seed(seed)
        logits = scale * torch.randn(tokens, 6 * size).double()
        targets = torch.randint(6 * size, (tokens,))
        part = logits.chunk(size, 1)[rank].clone()
        due = F.cross_entropy(logits, targets)
        yield Case(about, (part, targets), due, is_coded=False, most_moved=2 * 4 * tokens)


def mlp_traffic(rank: int, size: int, seed: int) -> Cases:
    """A stack of sharded MLPs, forward and backward, with a counter."""
    for layers, length, width in ((1, 12, 12), (3, 24, 12)):
        counters = []
        for enter, leave in (
            (copy_to_region, reduce_from_region),
            (
                gather_from_sequence_region,
                reduce_scatter_to_sequence_region,
            ),
        ):
            mlps = [
                (
                    ColumnParallelLinear(nn.Linear(width, 4 * width)),
                    RowParallelLinear(nn.Linear(4 * width, width), leave),
                )
                for _ in range(layers)
            ]
            is_sequence = enter is gather_from_sequence_region
            own = length // size if is_sequence else length
            hidden = torch.ones(1, own, width, requires_grad=True)
            with counting() as counter:
                for up, down in mlps:
                    hidden = hidden + down(F.gelu(up(enter(hidden))))
                hidden.sum().backward()
            counters.append(counter)
        parameters = sum(p.numel() for mlp in mlps for part in mlp for p in part.parameters())
        counted = {
            "parameters": parameters,
            "all_reduces": counters[0].calls["all_reduce"],
            "bytes": round(counters[0].sent),
            "sequence_bytes": round(counters[1].sent),
        }
        about = f"{plural(layers, 'layer')}, {length} tokens, width {width}"
        yield predict(about, (size, layers, length, width), counted)
