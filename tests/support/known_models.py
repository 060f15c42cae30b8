"""Models whose memory in a training step is known in closed form, in float32: nanoGPT's, GPT-2 of
transformers, and resnet50 of torchvision.

A step needs the parameters, their gradients, what the optimizer keeps of them, and what backward
needs of the forward. Most is alive when backward begins. Sources: Korthikanti et al., 2022, arXiv
2205.05198; He et al., 2015, arXiv 1512.03385.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from playground.training.formulas import KEPT_WIDTHS

FLOAT, INTEGER = 4, 8
"""Bytes."""


@dataclass(frozen=True)
class Shape:
    """A GPT's: B sequences of T tokens, C channels, H heads, V tokens in the vocabulary."""

    blocks: int = 4
    B: int = 8
    T: int = 128
    C: int = 256
    H: int = 4
    V: int = 2048

    @property
    def parameters(self) -> int:
        """12 C² + 13 C for each block; the embeddings, of which the tokens' is the head, too; and
        the last norm."""
        of_block = 12 * self.C**2 + 13 * self.C
        return self.blocks * of_block + (self.V + self.T) * self.C + 2 * self.C


SMALL = Shape()
GPT2_SMALL = Shape(blocks=12, B=1, T=1024, C=768, H=12, V=50257)


class Block(nn.Module):
    """nanoGPT's: maps [B, T, C] to [B, T, C]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.C
        self.heads = shape.H
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class NanoGPT(nn.Module):
    """Maps tokens [B, T + 1] to logits [B, T, V] and the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.V, shape.C)
        self.positions = nn.Embedding(shape.T, shape.C)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.blocks)))
        self.norm = nn.LayerNorm(shape.C)
        self.head = nn.Linear(shape.C, shape.V, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = batch[:, :-1], batch[:, 1:]
        places = torch.arange(inputs.shape[1], device=batch.device)
        x = self.blocks(self.tokens(inputs) + self.positions(places))
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_nanogpt(shape: Shape) -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    """The model, and what makes a forward of it, whose loss comes last."""
    batch = torch.randint(shape.V, (shape.B, shape.T + 1))

    def forward(model: nn.Module) -> Any:
        return model(batch.to("cuda"))

    return NanoGPT(shape), forward


def make_gpt2(shape: Shape) -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    """The same of transformers, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.V, n_positions=shape.T, n_embd=shape.C, n_layer=shape.blocks,
        n_head=shape.H, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(shape.V, (shape.B, shape.T))

    def forward(model: nn.Module) -> Any:
        inputs = tokens.to("cuda")
        found = model(input_ids=inputs, labels=inputs)
        return found.logits, found.loss

    return GPT2LMHeadModel(config), forward


KEPT_BY_GELU = {"nanogpt": 8, "gpt2": 20}
"""Widths of GELU's inputs and outputs, of 4 each. transformers computes GELU in steps, of which the
product keeps both factors, the power its base and the tanh its result."""


def gpt_bytes(kind: str, shape: Shape) -> dict[str, int]:
    """The bytes of a step, by what they are for, with Adam."""
    tokens, state = shape.B * shape.T, FLOAT * shape.parameters
    widths = KEPT_WIDTHS - KEPT_BY_GELU["nanogpt"] + KEPT_BY_GELU[kind]
    norms = 2  # the mean and the deviation of each token
    of_block = widths * shape.C + shape.H + 2 * norms
    last = 2 * shape.C + norms
    logits = 2 * shape.V  # they, and their logarithms
    in_backward = 2 * shape.V  # the gradients of both
    of_token = shape.blocks * of_block + last + logits + in_backward
    return {
        "parameters": state,
        "gradients": state,
        "optimizer": 2 * state,
        "activations": FLOAT * tokens * of_token,
    }


def make_resnet(samples: int, side: int) -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    """resnet50, and what makes its forward of so many images of `side` times `side` pixels."""
    from torchvision.models import resnet50

    images, labels = torch.randn(samples, 3, side, side), torch.randint(1000, (samples,))

    def forward(model: nn.Module) -> Any:
        return (F.cross_entropy(model(images.to("cuda")), labels.to("cuda")),)

    return resnet50(), forward


def convolutions(side: int) -> Iterator[tuple[int, int, int]]:
    """Of each convolution of resnet50: the numbers of its output, how often these are kept, and its
    parameters with those of the norm behind it.

    The norm keeps its input, and what follows keeps the norm's output, if it is not added to
    another one first.
    """
    side //= 2
    yield 64 * side**2, 2, 3 * 64 * 49 + 2 * 64
    side //= 2
    channels = 64
    for planes, blocks, first_stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            before, side = side, side // (first_stride if block == 0 else 1)
            yield planes * before**2, 2, channels * planes + 2 * planes
            yield planes * side**2, 2, 9 * planes**2 + 2 * planes
            yield 4 * planes * side**2, 2, 4 * planes**2 + 8 * planes
            if block == 0:
                yield 4 * planes * side**2, 1, 4 * channels * planes + 8 * planes
            channels = 4 * planes


def resnet_bytes(samples: int, side: int) -> dict[str, int]:
    """The bytes of a step, by what they are for, with momentum."""
    layers = [*convolutions(side)]
    state = FLOAT * (sum(layer[2] for layer in layers) + 2048 * 1000 + 1000)
    kept = sum(numel * times for numel, times, _ in layers)
    images = 3 * side**2
    pooled = 64 * (side // 4) ** 2  # kept, and the place of each maximum
    largest = 9 * 512**2  # in the last blocks, with which backward begins
    return {
        "parameters": state,
        "gradients": state + FLOAT * largest,  # a new gradient is added to that which is kept
        "optimizer": state,
        "activations": samples * (FLOAT * (images + kept + pooled) + INTEGER * pooled),
    }
