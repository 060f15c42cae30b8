"""Operators compute on a simulated GPU what they compute on the CPU: those whose tensors are no
plain ones, those of torchvision, and those that the CPU has not in every type."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import nn

from playground.world.simulated_gpu.environment import GPUS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS not in os.environ, reason="about the simulated GPU alone"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]
Values = list[torch.Tensor]


def sparse_embedding(device: str) -> Values:
    """Its gradient is sparse, and has a row twice."""
    table = nn.Embedding(7, 3, sparse=True)
    nn.init.ones_(table.weight)
    table.to(device)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.tensor([1, 1, 2], device=device)).square().sum().backward()
        optimizer.step()
    assert table.weight.grad is not None
    assert table.weight.grad.layout is torch.sparse_coo
    return [table.weight.detach(), table.weight.grad.coalesce().values()]


def bags(device: str) -> Values:
    found: Values = []
    for mode in ("sum", "mean", "max"):
        bag = nn.EmbeddingBag(7, 3, mode=mode)
        nn.init.ones_(bag.weight)
        bag.to(device)
        rows, starts = (
            torch.tensor([1, 2, 3, 3], device=device),
            torch.tensor([0, 3], device=device),
        )
        out = bag(rows, starts)
        out.sum().backward()
        assert bag.weight.grad is not None
        found += [out.detach(), bag.weight.grad]
    return found


def sparse_matrices(device: str) -> Values:
    indices = torch.tensor([[0, 1, 1], [1, 0, 0]], device=device)
    matrix = torch.sparse_coo_tensor(
        indices, torch.tensor([2.0, 3.0, 4.0], device=device), (2, 2), check_invariants=True
    )
    dense = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)
    found = [matrix.to_dense(), matrix @ dense, (matrix + matrix).to_dense(), dense + matrix]
    matrix.add_(matrix)
    return [*found, matrix.to_dense(), matrix.coalesce().values(), dense.to_sparse().values()]


def nested_sequences(device: str) -> Values:
    """An encoder in evaluation leaves out the padding: its sequences become a nested tensor."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    encoder = copy.deepcopy(nn.TransformerEncoder(layer, 2)).to(device).eval()
    words, padded = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        encoded = encoder(words.to(device), src_key_padding_mask=padded.to(device))
    with torch.inference_mode():  # a kernel whose weights are no result, unless they are asked for
        looks = encoder.layers[0].self_attn
        attended, _ = looks(*[words.to(device)] * 3, need_weights=False)
    parts = [torch.ones(2, 3, device=device), torch.ones(4, 3, device=device)]
    nested = torch.nested.nested_tensor(parts, device=device)
    return [encoded, attended, torch.nested.to_padded_tensor(nested.softmax(-1), 0.0)]


def boxes(device: str) -> Values:
    corners = [[0, 0, 4, 4], [0, 0, 4, 3.5], [3, 3, 7, 7]]
    found = torch.tensor(corners, dtype=torch.float32, device=device)
    scores = torch.tensor([0.9, 0.8, 0.7], device=device)
    torch.manual_seed(0)
    image, kernel = torch.randn(1, 2, 8, 8), torch.randn(2, 2, 3, 3)
    leaf = image.to(device).requires_grad_()
    pooled = torchvision.ops.roi_align(leaf, [found], 2)
    bent = torchvision.ops.deform_conv2d(
        leaf, torch.full((1, 18, 6, 6), 0.5, device=device), kernel.to(device)
    )
    (pooled.sum() + bent.square().sum()).backward()
    assert leaf.grad is not None
    kept = torchvision.ops.nms(found, scores, 0.5)
    return [kept, pooled.detach(), bent.detach(), leaf.grad]


def kernels_that_no_key_has(device: str) -> Values:
    """`ldexp` calls a kernel itself, beneath what torch dispatches; `lstsq` makes results grow."""
    ones, exponents = torch.ones(3, device=device), torch.tensor([3, 4, 5], device=device)
    square = torch.tensor([[2.0, 1.0], [1.0, 3.0]], device=device)
    solved = torch.linalg.lstsq(square, torch.ones(2, 1, device=device))
    return [torch.ldexp(ones, exponents), ones.ldexp_(exponents), solved.solution]


OPERATORS = (
    sparse_embedding, bags, sparse_matrices, nested_sequences, boxes, kernels_that_no_key_has,
)  # fmt: skip


@pytest.mark.parametrize("compute", OPERATORS)
def test_it_computes_what_the_cpu_computes(compute: Callable[[str], Values]) -> None:
    for ours, expected in zip(compute("cuda"), compute("cpu"), strict=True):
        assert ours.is_cuda
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_several_copies_at_once_may_be_between_devices() -> None:
    there, here = [torch.zeros(3, device="cuda") for _ in range(2)], [torch.ones(3)] * 2
    torch._foreach_copy_(there, here)
    torch._foreach_copy_(here, there)
    assert [each.tolist() for each in there + here] == [[1.0] * 3] * 4


def test_types_that_the_cpu_lacks() -> None:
    """float16 in Fourier transforms, sums in a wider type, complex sums without NaN, and what is
    true or false as a number."""
    half = torch.ones(4, dtype=torch.float16, device="cuda")
    spectrum = torch.fft.rfft(half)
    assert (spectrum.dtype, spectrum.abs().tolist()) == (torch.complex32, [4.0, 0.0, 0.0])
    narrow = torch.full((2, 2), 1 / 3, dtype=torch.bfloat16, device="cuda")
    product = torch.mm(narrow, narrow, out_dtype=torch.float32)
    torch.testing.assert_close(product, narrow.float() @ narrow.float())
    numbers = torch.tensor([complex("nan"), 1 + 2j], device="cuda")
    assert numbers.nansum().item() == 1 + 2j
    scores = torch.tensor([[1.0, 2.0]], dtype=torch.float16, device="cuda", requires_grad=True)
    for function in (torch.softmax, torch.log_softmax):
        likely = function(scores, -1, dtype=torch.float32)
        torch.testing.assert_close(likely, function(scores.float(), -1))
        (gradient,) = torch.autograd.grad(likely[0, 0], scores)
        assert gradient.dtype is torch.float16
        assert gradient.sum().abs() < 1e-3 < gradient.abs().sum()
    truths = torch.eye(2, dtype=torch.bool, device="cuda")
    assert torch.equal(truths.abs(), truths)
    assert truths.trace().item() == 2
    with pytest.raises(RuntimeError, match="two bool tensors is not supported"):
        truths - truths
