"""A mixture of experts: many MLPs in each block, of which each token uses K. Ranks divide the MLPs.

A router, which every rank has, chooses K of the experts for each token. Each rank has its own
tokens, as in data parallelism, and 1/N of the experts:

    dispatch   all_to_all_single sends each token to the ranks of its experts
    compute    each expert computes the tokens that have come to it
    combine    all_to_all_single sends the results back, which are added up

    python -m playground experts -n 2
    torchrun --nproc-per-node 2 lesson.py

    expert_parallel balance 0.00, fullest 1.84, dropped 0.0%, difference 2e-16
    with_capacity   balance 0.00, fullest 1.81, dropped 6.5%, difference 2e-16
    expert_parallel balance 0.05, fullest 1.31, dropped 0.0%, difference 2e-16
    with_capacity   balance 0.05, fullest 1.31, dropped 2.0%, difference 2e-16

Fullest: how often the most popular expert is chosen, divided by the mean of all experts. Dropped:
choices that exceed an expert's capacity. Difference: the largest, on any rank, between a trained
parameter and that of one process with all experts.
Sources: Shazeer et al., 2017, arXiv 1701.06538; Lepikhin et al., GShard, 2020, arXiv 2006.16668;
DeepSeek-AI, DeepSeek-V3, 2024, arXiv 2412.19437 (the bias that balances).
"""

import math

import torch
import torch.distributed as dist
from torch import nn

from playground.lessons.gpt import GPT, MLP, C, make_batch, next_token_loss

EXPERTS = 12  # in each block
K = 2  # experts that a token uses
CAPACITY_FACTOR = 1.25  # the capacity of an expert, in multiples of its mean number of rows
BALANCE = 0.05  # by how much a bias changes in a step
STEPS = 5
BATCH_SIZE = 4  # sequences of each rank


class MixtureOfExperts(nn.Module):
    """Replaces the MLP of a block. Maps [B, T, C] to [B, T, C]."""

    def __init__(self, apply_experts):
        super().__init__()
        self.apply_experts = apply_experts
        self.router = nn.Linear(C, EXPERTS, bias=False)
        self.experts = nn.ModuleList(MLP() for _ in range(EXPERTS))
        self.register_buffer("bias", torch.zeros(EXPERTS))  # added to the scores, only to choose
        self.counts = torch.zeros(2, EXPERTS)  # of each expert: rows, and rows that are not dropped

    def forward(self, x):
        tokens = x.flatten(0, 1)
        scores = self.router(tokens)
        chosen = (scores + self.bias).topk(K).indices  # [tokens, K], the experts of each token
        weights = scores.gather(1, chosen).softmax(1).unsqueeze(2)  # [tokens, K, 1]
        rows, expert_ids = tokens.repeat_interleave(K, 0), chosen.flatten()  # a row for each choice
        results = self.apply_experts(self.experts, rows, expert_ids)
        # with_capacity returns 0 for a dropped row; an expert never does, because it has biases
        kept = expert_ids[(results != 0).any(1)]
        self.counts += torch.stack([ids.bincount(minlength=EXPERTS) for ids in (expert_ids, kept)])
        return (weights * results.view(-1, K, C)).sum(1).view_as(x)


def one_process(experts, rows, expert_ids):
    """Apply to each row the expert with its number. In one process, this is all."""
    results = torch.zeros_like(rows)
    for number, expert in enumerate(experts):  # even without rows: backward must reach AllToAll
        mine = expert_ids == number
        results[mine] = expert(rows[mine])
    return results


def make_model(apply_experts):
    """The same on every rank, from a seed."""
    torch.manual_seed(1234)
    model = GPT()
    for block in model.blocks:
        block.mlp = MixtureOfExperts(apply_experts)
    return model


def keep_experts(model):
    """Keep the experts of this rank: 1/N of each layer. Rank 0 has the first ones."""
    share = EXPERTS // dist.get_world_size()
    first = dist.get_rank() * share
    for block in model.blocks:
        block.mlp.experts = block.mlp.experts[first : first + share]


class AllToAll(torch.autograd.Function):
    """Send the first sent[0] rows to rank 0, the next sent[1] rows to rank 1, and so on.

    Of the rows that arrive, the first received[0] are from rank 0. Gradients go the way back.
    """

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.way_back = received, sent
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows, output_split_sizes=received, input_split_sizes=sent)
        return arrived

    @staticmethod
    def backward(ctx, grad):
        # the same exchange, with sent and received swapped; it needs contiguous memory
        return AllToAll.apply(grad.contiguous(), *ctx.way_back), None, None


def expert_parallel(experts, rows, expert_ids):
    """Like one_process, but experts are only those of this rank."""
    size = dist.get_world_size()
    order = expert_ids.argsort(stable=True)  # by expert, and so by rank; ties keep their order
    leaving = expert_ids.bincount(minlength=EXPERTS)  # how many rows go to each expert
    arriving = torch.empty_like(leaving)  # how many come from each rank for each expert here
    dist.all_to_all_single(arriving, leaving)
    sent = leaving.view(size, -1).sum(1).tolist()  # rows to each rank
    received = arriving.view(size, -1).sum(1).tolist()  # rows from each rank
    arrived = AllToAll.apply(rows[order], sent, received)  # dispatch
    local_ids = torch.arange(len(experts)).repeat(size).repeat_interleave(arriving)
    results = one_process(experts, arrived, local_ids)  # compute
    returned = AllToAll.apply(results, received, sent)  # combine
    return returned[order.argsort()]  # the inverse of order: back to the order of rows


def find_slots(expert_ids):
    """Each expert has a capacity: the number of its slots for the rows of this rank.

    Returns the capacity, the slot of each row, and whether it exists: later rows find no slot.
    """
    capacity = math.ceil(CAPACITY_FACTOR * len(expert_ids) / EXPERTS)
    seen = nn.functional.one_hot(expert_ids, EXPERTS).cumsum(0)  # rows of each expert so far
    places = seen[torch.arange(len(expert_ids)), expert_ids] - 1
    return capacity, expert_ids * capacity + places, places < capacity


def one_process_with_capacity(experts, rows, expert_ids):
    """The baseline of with_capacity: the result of a row without a slot is 0."""
    has_slot = find_slots(expert_ids)[2].unsqueeze(1)
    return one_process(experts, rows, expert_ids) * has_slot


def with_capacity(experts, rows, expert_ids):
    """Like expert_parallel, but every rank sends every expert the same number of slots."""
    capacity, slots, has_slot = find_slots(expert_ids)
    filled = rows.new_zeros(EXPERTS * capacity, rows.shape[1])
    filled[slots[has_slot]] = rows[has_slot]
    splits = [len(experts) * capacity] * dist.get_world_size()
    arrived = AllToAll.apply(filled, splits, splits)
    local_ids = torch.arange(len(experts)).repeat_interleave(capacity).repeat(dist.get_world_size())
    returned = AllToAll.apply(one_process(experts, arrived, local_ids), splits, splits)
    return returned[slots * has_slot] * has_slot.unsqueeze(1)  # a dropped row reads slot 0, times 0


def train(model, balance, ranks, sum_over_ranks):
    """Train on the batches of some ranks. Returns the layers of experts."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    layers = [block.mlp for block in model.blocks]
    for step in range(STEPS):
        optimizer.zero_grad()
        for layer in layers:
            layer.counts.zero_()
        for rank in ranks:
            batch = make_batch(BATCH_SIZE, seed=step * dist.get_world_size() + rank)
            # the mean over all ranks: divided here, and gradients are summed
            (next_token_loss(model, batch) / dist.get_world_size()).backward()
        for name, param in model.named_parameters():
            if "experts" not in name:  # an expert had the rows of all ranks: its gradient is a sum
                sum_over_ranks(param.grad)
        optimizer.step()
        for layer in layers:
            sum_over_ranks(layer.counts)
            layer.bias += balance * (layer.counts[0].mean() - layer.counts[0]).sign()
    return layers


def compare(apply_experts, baseline, balance):
    """Train N ranks, and one process with all experts on the batches of all ranks.

    Return the largest difference of a parameter, and how full the fullest expert is.
    """
    expected = make_model(baseline)
    train(expected, balance, range(dist.get_world_size()), lambda tensor: None)
    model = make_model(apply_experts)
    keep_experts(expected)
    keep_experts(model)
    layers = train(model, balance, [dist.get_rank()], dist.all_reduce)
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    difference = torch.stack([(p - q).detach().abs().max() for p, q in pairs]).max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    counts, kept = torch.stack([layer.counts for layer in layers]).unbind(1)  # of both layers
    fullest = (counts.max() / counts.mean()).item()
    if dist.get_rank() == 0:
        print(
            f"{apply_experts.__name__:15} balance {balance:.2f}, "
            f"fullest {fullest:.2f}, "
            f"dropped {100 * (1 - kept.sum() / counts.sum()):.1f}%, difference {difference:.0e}"
        )
    return difference.item(), fullest


def run(rank, size):
    assert EXPERTS % size == 0, f"{EXPERTS} experts cannot be divided among {size} ranks"
    rows = []
    for balance in (0, BALANCE):
        rows.append(compare(expert_parallel, one_process, balance))
        rows.append(compare(with_capacity, one_process_with_capacity, balance))
    is_right = all(difference < 1e-9 for difference, _ in rows)
    assert is_right, "not the training of one process: compare the differences"
    is_balanced = rows[2][1] <= rows[0][1]
    assert is_balanced, "the bias makes the fullest expert fuller"


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)  # so that rounding cannot hide an error
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
