"""Programs for GPUs compute on simulated ones what they compute on the CPU with gloo."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from fixtures import Worlds
from gpu_programs import PROGRAMS, run_program
from gpus import COLD

from playground.world.simulated_gpu.environment import GPUS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS not in os.environ, reason="about the simulated GPU alone"),
]
NARROW = {
    "fsdp1": 1e-2, "fsdp2": 1e-2, "fsdp2_all_bfloat16": 1e-2, "autocast_and_scaler": 1e-2,
    "attention": 2e-2, "half_precision": 1e-3, "vision_models": 1e-3,
}  # fmt: skip
"""The difference that rounding explains: of bfloat16 and float16, and of convolutions that add in
another order each time."""


QUICK = "attention", "autocast_and_scaler", "fsdp2", "recurrent_and_normalized", "sync_batch_norm"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.stress] * (name not in QUICK)) for name in PROGRAMS],
)
def test_it_computes_what_the_cpu_computes(name: str, world: Worlds) -> None:
    ours, expected = (  # fresh: torch remembers meshes of groups that are gone
        world(2, backend=backend, timeout=COLD, fresh=True).run(run_program, name)
        for backend in ("nccl", "gloo")
    )
    tolerance = NARROW.get(name, 1e-5)
    for mine, theirs in zip(ours, expected, strict=True):
        assert len(mine) == len(theirs) > 0
        for value, wanted in zip(mine, theirs, strict=True):
            torch.testing.assert_close(value, wanted, rtol=tolerance, atol=tolerance)


def test_histograms_are_of_whole_numbers_too() -> None:
    counted = torch.histc(torch.tensor([1, 2, 2], device="cuda"), 3, 1, 3)
    assert (counted.dtype, counted.tolist()) == (torch.int64, [1, 2, 0])


FIRST = 'import torch; print(torch.arange(4, device="cuda").tolist())'


def test_the_first_operation_of_a_process_computes() -> None:
    """Though no memory was allocated before it."""
    command = [sys.executable, "-c", FIRST]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=COLD)
    assert (ran.returncode, ran.stdout) == (0, "[0, 1, 2, 3]\n"), ran.stderr


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_of_the_cpu_with_dimensions_is_taken_along() -> None:
    parts = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device="cuda")
    assert (parts.is_nested, parts.is_cuda) == (True, True)
    rows = torch.arange(6.0, device="cuda").reshape(3, 2)
    assert rows[torch.tensor([2, 0])].tolist() == [[4, 5], [0, 1]]


REFUSED = """
import torch
x = torch.ones(3, device="cuda")
{}
"""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "with torch.cuda.graph(torch.cuda.CUDAGraph()): x + 1",
            "simulated GPU: CUDA graphs are not simulated: run the script without torch.cuda.graph",
        ),
        (
            "torch.cuda.make_graphed_callables(torch.nn.Linear(3, 3, device='cuda'), (x,))",
            "run the script without torch.cuda.graph and torch.cuda.make_graphed_callables",
        ),
        (
            "torch._cslt_compress(x)",
            "NotImplementedError: simulated GPU: aten::_cslt_compress is not simulated, as the CPU "
            "has no kernel for it",
        ),
        pytest.param(
            "print(torch.compile(lambda x: x.sin() + 1)(x))",
            "the kernels of Triton need a GPU, and this one is simulated: for torch.compile, take "
            'backend="aot_eager"',
            marks=pytest.mark.stress,  # it imports the compiler
        ),
        (
            "torch.eye(2, device='cuda').to_sparse_csr() @ torch.ones(2, 2, device='cuda')",
            "NotImplementedError: simulated GPU: of sparse tensors only those in COO are simulated",
        ),
        (
            "torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)",
            "NotImplementedError: simulated GPU: quantized tensors are not simulated",
        ),
        (
            "b = x.new_ones(3, 4); import torchvision; torch.ops.torchvision.nms(b, x, 0.5)",
            "simulated GPU: this kernel in CUDA needs a GPU, and nothing simulates it: ",
        ),
        (
            "x.untyped_storage()._share_cuda_()",
            "simulated GPU: a tensor on a GPU cannot be shared with another process",
        ),
        (
            "x[torch.tensor([5], device='cuda')].tolist()",
            "device-side assert triggered: aten::index",
        ),
    ],
    ids=[
        "graphs",
        "graphed callables",
        "an operator",
        "torch.compile",
        "a format",
        "quantized",
        "a kernel",
        "shared memory",
        "an index",
    ],
)
def test_what_is_not_simulated_is_refused_by_name(line: str, said: str) -> None:
    command = [sys.executable, "-c", REFUSED.format(line)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=COLD)
    assert ran.returncode != 0
    assert said in ran.stderr
