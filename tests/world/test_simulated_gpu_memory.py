"""What a program needs of a simulated GPU's memory is what formulas say that it needs of a GPU's:
the caching allocator is torch's own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from known_models import (
    GPT2_SMALL,
    SMALL,
    gpt_bytes,
    make_gpt2,
    make_nanogpt,
    make_resnet,
    resnet_bytes,
)
from processes import ENOUGH
from torch import nn

from playground.world.simulated_gpu.environment import GPUS, environment_with

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS not in os.environ, reason="about the simulated GPU alone"),
]
FLOAT = 4
"""Bytes."""


@pytest.mark.parametrize("layers", [4, 12])
def test_the_peak_of_a_training_step_is_that_of_the_formula(layers: int) -> None:
    """Parameters, their gradients, Adam's two moments, and the activations that backward needs;
    where backward begins, the gradients of one activation and of one weight."""
    width, batch = 128, 512
    gc.collect()  # what earlier tests have left
    before = torch.cuda.memory_allocated()
    net = nn.Sequential(
        *(part for _ in range(layers) for part in (nn.Linear(width, width, bias=False), nn.ReLU()))
    ).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    inputs = torch.randn(batch, width, device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad(set_to_none=False)
        net(inputs).sum().backward()
        optimizer.step()
    weight, activation = width * width * FLOAT, batch * width * FLOAT
    formula = 4 * layers * weight + (layers + 1) * activation + activation + weight
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(formula, rel=0.03)


def measure_step(model: nn.Module, forward: Callable[[nn.Module], Any], optimizer: Any) -> int:
    """The most bytes that two steps have held at once, gradients being kept."""
    gc.collect()  # what earlier tests have left
    before = torch.cuda.memory_allocated()
    model.cuda()
    stepping = optimizer(model.parameters())
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        stepping.zero_grad(set_to_none=False)
        outputs = forward(model)
        outputs[-1].backward()
        stepping.step()
        del outputs
    return torch.cuda.max_memory_allocated() - before


def adam(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, fused=True)


def momentum(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


KNOWN: dict[str, tuple[Any, ...]] = {
    "nanogpt": (make_nanogpt, (SMALL,), gpt_bytes("nanogpt", SMALL), adam),
    "gpt2": (make_gpt2, (SMALL,), gpt_bytes("gpt2", SMALL), adam),
    "resnet50": (make_resnet, (16, 64), resnet_bytes(16, 64), momentum),
}
LARGE: dict[str, tuple[Any, ...]] = {
    "nanogpt": (make_nanogpt, (GPT2_SMALL,), gpt_bytes("nanogpt", GPT2_SMALL), adam),
    "gpt2": (make_gpt2, (GPT2_SMALL,), gpt_bytes("gpt2", GPT2_SMALL), adam),
    "resnet50": (make_resnet, (8, 224), resnet_bytes(8, 224), momentum),
}
"""As they are published: GPT-2 small, and images of ImageNet."""


@pytest.mark.parametrize("name", KNOWN)
def test_the_peak_of_known_models_is_that_of_their_formulas(name: str) -> None:
    make, shape, formula, optimizer = KNOWN[name]
    model, forward = make(*shape)
    measured = measure_step(model, forward, optimizer)
    assert measured == pytest.approx(sum(formula.values()), rel=0.03)


@pytest.mark.stress
@pytest.mark.parametrize("name", LARGE)
def test_the_peak_of_known_models_of_their_published_size(name: str) -> None:
    make, shape, formula, optimizer = LARGE[name]
    model, forward = make(*shape)
    measured = measure_step(model, forward, optimizer)
    assert measured == pytest.approx(sum(formula.values()), rel=0.03)


@pytest.mark.parametrize("masked", [False, True], ids=["flash", "memory-efficient"])
def test_attention_keeps_no_matrix_of_scores(masked: bool) -> None:
    """But its output, and for each row of scores the logarithm of its sum in float32."""
    heads, length, width = 4, 256, 64
    shape = (1, heads, length, width)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = torch.zeros(length, length, device="cuda", dtype=torch.bfloat16) if masked else None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = F.scaled_dot_product_attention(q.requires_grad_(), k, v, mask)
    kept = out.nbytes + heads * length * FLOAT
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(kept, abs=4096)


def resident_bytes() -> int:
    """The memory that this process has of the host."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_taken_from_the_host_when_it_is_allocated() -> None:
    """So that what is left is known before the next allocation, of whichever rank."""
    nbytes = 64 << 20
    before = resident_bytes()
    tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    assert resident_bytes() - before > 0.9 * tensor.nbytes


TOO_LARGE = """
import torch
try:
    torch.empty({}, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print(str(error).split(". ")[1])
"""


@pytest.mark.parametrize(
    ("gib", "said"),
    [(2, ""), (2**20, "simulated GPU: cuda:0 has room for 1073741824 MiB more, and this host, ")],
    ids=["the GPU", "the host"],
)
def test_what_neither_the_gpu_nor_the_host_can_hold_is_refused_before_it_is_tried(
    gib: int, said: str
) -> None:
    """Both are an OutOfMemoryError; that the host was too small, a line says."""
    environ = environment_with(1, 2**30 if gib == 2 else 2**50)
    command = [sys.executable, "-c", TOO_LARGE.format(gib << 30)]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=2 * ENOUGH)
    assert (ran.returncode, ran.stdout) == (0, f"Tried to allocate {gib}.00 GiB\n")
    assert ran.stderr.startswith(said)
    assert ran.stderr.count("simulated GPU:") == bool(said)
