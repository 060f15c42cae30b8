"""tensor: a GPT whose matrices are sharded is one process's, and PyTorch's own parallel modules."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fixtures import Worlds
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from playground import RankFailed, launch
from playground.lessons.tensor import experiment
from playground.lessons.tensor.lesson import (
    GPTConfig,
    Group,
    RowParallelLinear,
    VocabParallelEmbedding,
    all_gather,
    all_reduce,
    copy_to_region,
    copying,
    gather_from_sequence_region,
    new_gpt,
    reduce_from_region,
    reduce_scatter,
    reduce_scatter_to_sequence_region,
    shard,
    shard_gpt,
    sum_replicated_gradients,
    vocab_parallel_cross_entropy,
)
from playground.lessons.tensor.page import WAYS, TensorSettings, closed_forms
from playground.runtime.errors import UsageError
from playground.training.gpt_run import LR
from playground.training.one_process import EXACT, check


@pytest.mark.parametrize(
    "size", [3, *(pytest.param(size, marks=pytest.mark.stress) for size in (1, 2, 4))]
)
def test_each_way_is_one_process_and_holds_and_sends_what_its_closed_form_says(
    world: Worlds, size: int
) -> None:
    settings = TensorSettings(size=size, steps=1, batch_size=6)
    for found in world(size).run(experiment.run, settings):
        for way, figures in zip(WAYS, found, strict=True):
            check(way, figures, closed_forms(way, settings))


def parallelize(model: nn.Sequential, mesh: DeviceMesh, sequence: bool) -> None:
    """The same cuts in the library's words."""
    between = Shard(1) if sequence else Replicate()
    embed, *blocks, head = model
    parallelize_module(
        embed, mesh, {"tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between)}
    )
    if sequence:
        embed.place = lambda ids: torch.arange(ids.shape[1]).chunk(mesh.size())[
            mesh.get_local_rank()
        ]
    columns = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    plan: dict[str, Any] = columns | {
        "attention": PrepareModuleInput(
            input_layouts=(between,), desired_input_layouts=(Replicate(),)
        ),
        "attention.output": RowwiseParallel(output_layouts=between),
        "up": ColwiseParallel(input_layouts=between),
        "down": RowwiseParallel(output_layouts=between),
    }
    for block in blocks:
        norms = {name: SequenceParallel() for name in ("attention_norm", "mlp_norm") if sequence}
        parallelize_module(block, mesh, plan | norms)
    norm = {"0": SequenceParallel()} if sequence else {}
    parallelize_module(
        head, mesh, norm | {"1": ColwiseParallel(input_layouts=between, use_local_output=False)}
    )


def backward(
    model: nn.Sequential,
    replicated: list[nn.Parameter],
    tokens: torch.Tensor,
    targets: torch.Tensor,
    sequence: bool,
    group: Group = None,
) -> torch.Tensor:
    loss = vocab_parallel_cross_entropy(model(tokens), targets, group)
    loss.backward()
    if sequence:
        sum_replicated_gradients(replicated, group)
    return loss.detach()


def train_both(
    rank: int, size: int, sequence: bool, steps: int
) -> tuple[float, float, dict[str, int], dict[str, int]]:
    """The largest difference of a loss and of a parameter, and the collectives of a step, of the
    library and ours."""
    mesh = init_device_mesh("cpu", (size,))
    theirs = new_gpt(GPTConfig(layers=1), 1).double()
    ours = copy.deepcopy(theirs)
    replicated = shard_gpt(ours, sequence=sequence)
    parallelize(theirs, mesh, sequence)
    of_theirs, of_ours = (torch.optim.AdamW(model.parameters(), lr=LR) for model in (theirs, ours))
    generator, losses = torch.Generator().manual_seed(3), []
    for _ in range(steps):
        tokens, targets = copying(4, generator)
        of_theirs.zero_grad()
        of_ours.zero_grad()
        with CommDebugMode() as their_calls, loss_parallel():
            expected = F.cross_entropy(theirs(tokens).flatten(0, 1), targets.flatten())
            expected.backward()
        with CommDebugMode() as our_calls:
            loss = backward(ours, replicated, tokens, targets, sequence)
        if sequence:
            # that of one rank's tokens: the plan does not know it
            dist.all_reduce(theirs[0].positions.weight.grad)
        of_theirs.step()
        of_ours.step()
        losses.append(abs(loss.item() - expected.item()))
    differences = []
    for their, our in zip(theirs.parameters(), ours.parameters(), strict=True):
        local = their.full_tensor() if hasattr(their, "full_tensor") else their
        for dim in range(our.dim()):
            local = local.chunk(local.shape[dim] // our.shape[dim], dim)[
                rank if local.shape[dim] > our.shape[dim] else 0
            ]
        differences.append((local - our).abs().max().item())
    return max(losses), max(differences), count(their_calls), count(our_calls)


def count(calls: CommDebugMode) -> dict[str, int]:
    """Collectives by a name that those of c10d and functional ones share."""
    names = {
        "allreduce_": "all_reduce",
        "_allgather_base_": "gather",
        "_reduce_scatter_base_": "scatter",
    }
    names |= {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter"}
    return {
        names.get(str(call).split(".")[-1], str(call).split(".")[-1]): n
        for call, n in calls.get_comm_counts().items()
    }


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.stress)])
@pytest.mark.parametrize("sequence", [False, True])
def test_parallelize_module_trains_the_same_by_as_many_collectives(
    world: Worlds, size: int, sequence: bool
) -> None:
    for loss, parameters, theirs, ours in world(size).run(train_both, sequence, 2):
        assert max(loss, parameters) <= EXACT
        # of whole parameters' gradients, which the library leaves to the optimizer
        ours["all_reduce"] -= sequence
        assert ours == theirs


def exchange_tokens(rank: int, size: int) -> list[bool]:
    """For each function of the board's table, whether output and gradient are as all ranks' inputs
    tell."""
    inputs = [
        torch.randn(2, 2 * size, 3, generator=torch.Generator().manual_seed(r)).double()
        for r in range(size)
    ]
    total, own, found = torch.stack(inputs).sum(0), slice(2 * rank, 2 * rank + 2), []
    gathered = torch.cat([each[:, 2 * r : 2 * r + 2] for r, each in enumerate(inputs)], 1)
    for function, given, gradient, output, of_given in (
        (copy_to_region, inputs[rank], inputs[rank], inputs[rank], total),
        (reduce_from_region, inputs[rank], inputs[rank], total, inputs[rank]),
        (gather_from_sequence_region, inputs[rank][:, own], inputs[rank], gathered, total[:, own]),
        (
            reduce_scatter_to_sequence_region,
            inputs[rank],
            inputs[rank][:, own],
            total[:, own],
            gathered,
        ),
    ):
        tensor = given.clone().requires_grad_()
        exchanged = function(tensor)
        exchanged.backward(gradient)
        found += [torch.allclose(exchanged, output), torch.allclose(tensor.grad, of_given)]
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_exchanged_forward_is_mirrored_in_backward(world: Worlds, size: int) -> None:
    for found in world(size).run(exchange_tokens):
        assert found == [True] * 8


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(UsageError, match="5 ranks for 12 heads"):
        TensorSettings(size=5)


def difference_of_a_loss(
    rank: int, size: int, logits: torch.Tensor, targets: torch.Tensor
) -> float:
    """From `F.cross_entropy`, of the loss and of the gradients; NaN only if both are."""
    whole = logits.clone().requires_grad_()
    part = logits.chunk(size, -1)[rank].clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten())
    found = vocab_parallel_cross_entropy(part, targets)
    expected.backward()
    found.backward()
    pairs = [(found, expected), (part.grad, whole.grad.chunk(size, -1)[rank])]
    return max(
        (one - other).abs().nan_to_num(1.0 - one.equal(other)).max().item() for one, other in pairs
    )


def reach_the_edges(rank: int, size: int) -> None:
    vocabulary = 3 * size
    torch.manual_seed(1)
    embedding = nn.Embedding(vocabulary, 2).double()
    embedding.weight.data[::3] = torch.inf  # of others' tokens, nothing may come through
    ids = torch.tensor([[1, vocabulary - 1]])
    assert VocabParallelEmbedding(embedding, None)(ids).equal(embedding(ids))
    logits = torch.randn(2, 3, vocabulary).double()
    targets = torch.tensor([[0, -100, vocabulary - 1], [3, 1, 2]])
    assert difference_of_a_loss(rank, size, logits, targets) <= EXACT
    logits[1, :, 0] = -torch.inf  # a word that is masked
    assert difference_of_a_loss(rank, size, logits, targets) <= EXACT
    assert difference_of_a_loss(rank, size, 1e4 * logits.clamp(min=-9), targets) <= EXACT
    ignored = torch.full_like(targets, -100)
    # as cross_entropy's
    assert vocab_parallel_cross_entropy(logits.chunk(size, -1)[rank], ignored).isnan()
    for outside in (-1, vocabulary, -101):
        with pytest.raises(
            IndexError, match=f"{outside} is out of range: ids are 0 to {vocabulary - 1}"
        ):
            VocabParallelEmbedding(embedding, None)(torch.tensor([[0, outside]]))
        with pytest.raises(IndexError, match=f"{outside} is out of range"):
            vocab_parallel_cross_entropy(
                logits.chunk(size, -1)[rank], targets.where(targets != 1, outside)
            )
    for exchange in (all_reduce, all_gather, reduce_scatter):
        given = torch.ones(1, size, 2)
        exchange(given, None)
        # what is handed on may be autograd's, and another layer's gradient, too
        assert given.eq(1).all()
    local = shard(torch.zeros(size, 2), 0)
    # the unsharded parameter is not kept for its sake
    assert local.untyped_storage().nbytes() == local.nbytes
    linear, given = nn.Linear(2 * size, 3, bias=False).double(), torch.randn(1, 2 * size).double()
    found = RowParallelLinear(linear, None)(given.chunk(size, -1)[rank])
    assert (found - linear(given)).abs().max() <= EXACT
    with pytest.raises(
        ValueError, match=f"{size + 1} tokens for {size} ranks: pad to a multiple of {size}"
    ):
        reduce_scatter_to_sequence_region(torch.zeros(1, size + 1, 2))
    with pytest.raises(
        ValueError, match=f"{size + 1} cannot be sharded over {size} ranks: choose a divisor"
    ):
        shard(torch.zeros(size + 1, 2), 0)


def test_words_beyond_the_vocabulary_and_what_is_ignored_are_as_in_torch(world: Worlds) -> None:
    world(2).run(reach_the_edges)


def train_in_groups(rank: int, size: int) -> list[float]:
    """Pairs of ranks, each with a batch of its own: the differences of the loss and of the
    gradients from one process, with tokens shared and not."""
    pairs, found = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])], list[float]()
    tokens, targets = copying(2, torch.Generator().manual_seed(rank % 2))
    for sequence in (False, True):
        alone, model = (new_gpt(GPTConfig(layers=1), 1).double() for _ in range(2))
        replicated = shard_gpt(model, pairs[rank % 2], sequence)
        expected = F.cross_entropy(alone(tokens).flatten(0, 1), targets.flatten())
        expected.backward()
        loss = backward(model, replicated, tokens, targets, sequence, pairs[rank % 2])
        found.append((loss - expected).abs().item())
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            found.append(
                (experiment.shard_like(theirs.grad, ours, pairs[rank % 2]) - ours.grad)
                .abs()
                .max()
                .item()
            )
    return found


def test_groups_of_ranks_train_models_of_their_own(world: Worlds) -> None:
    for found in world(4).run(train_in_groups):
        assert max(found) <= EXACT


def die_in_backward(rank: int, size: int) -> None:
    model = new_gpt(GPTConfig(), 1)
    replicated = shard_gpt(model)
    tokens, targets = copying(4, torch.Generator().manual_seed(3))
    if rank == 1:
        model[1].up.weight.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
    backward(model, replicated, tokens, targets, sequence=False)


def test_a_rank_that_is_killed_in_backward_is_named() -> None:
    with pytest.raises(RankFailed, match="rank 1 of 2 was killed by SIGKILL"):
        launch(die_in_backward, 2)
