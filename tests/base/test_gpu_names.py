"""GPUs that a text names by their number."""

from __future__ import annotations

import pytest

from playground.base.gpu_names import find_named_gpus


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("y = y.to('cuda:0')\nx = x.to('cuda:1')", [(1, "cuda:0"), (2, "cuda:1")]),
        ("device = 'cuda:0' if torch.cuda.is_available() else 'cpu'", [(1, "cuda:0")]),
        ("y = y.to('cuda')", []),
        ("y = y.to(f'cuda:{rank}')", []),
        ("if rank == 0: y = y.to('cuda:0')", []),
        ("y = y.to(['cuda:0', 'cuda:1'][local_rank])", []),
        ("if device == 'cuda:0': pass", []),
        ("torch.load(file, map_location='cuda:0')", []),
        ("torch.load(file, map_location={'cuda:0': device})", []),
        ("moved = {'cuda:0': device}", []),
    ],
)
def test_a_gpu_that_all_ranks_name_is_found(text: str, found: list[tuple[int, str]]) -> None:
    assert [*find_named_gpus(text.encode())] == found
