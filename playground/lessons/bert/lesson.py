"""BERT on sentence pairs, the workload of the tutorials: three ways to train it on several devices.

    torchrun --nproc-per-node 2 lesson.py
    python -m playground bert
    python -m playground bert --way ddp -n 4
    python -m playground bert --weights bert-base-cased --dataset multinli

Does a premise entail a hypothesis, contradict it, or neither? DataParallel gathers the replicas'
logits on the first device or, with the loss in forward, one loss per device; with
DistributedDataParallel each rank has a replica of its own. All three take the same batches, so
their losses are the same.
The board makes its own pairs, of a few words. The command has a grammar's, or MultiNLI, and
measures what each way costs in memory, time and messages.
Source: Devlin et al., BERT, 2019, arXiv 1810.04805; Williams et al., MultiNLI, 2018, arXiv
1704.05426; Vaswani et al., Attention Is All You Need, 2017, arXiv 1706.03762
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

CLASSES = 3  # entailment, neutral, contradiction


@dataclass(frozen=True)
class BertConfig:
    """Sizes of an encoder. Parameters are called as those of `transformers` are, so that published
    weights load by name."""

    vocabulary: int
    width: int = 128  # features of a token between two layers
    layers: int = 2
    heads: int = 4
    intermediate: int = 512  # features inside a layer's feed-forward part
    max_length: int = 64
    segments: int = 2
    dropout: float = 0.1
    layer_norm_eps: float = 1e-12


class Embeddings(nn.Module):
    """Token ids and segments, both [batch, length] → [batch, length, width]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocabulary, config.width, padding_idx=0)
        self.position_embeddings = nn.Embedding(config.max_length, config.width)
        self.token_type_embeddings = nn.Embedding(config.segments, config.width)
        self.LayerNorm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        words = self.word_embeddings(input_ids)
        positions = self.position_embeddings.weight[: input_ids.shape[1]]
        segments = self.token_type_embeddings(token_type_ids)
        return self.dropout(self.LayerNorm(words + positions + segments))


class SelfAttention(nn.Module):
    """Every token takes a mean of all values, weighted by how well its query fits their keys."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (  # each [batch, heads, length, width / heads]
            project(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        heads = F.scaled_dot_product_attention(query, key, value, mask, dropout)
        return heads.transpose(1, 2).flatten(2)


class Residual(nn.Module):
    """The end of both halves of a layer: `dense`, dropout, the half's own input added, the norm."""

    def __init__(self, features: int, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(features, config.width)
        self.LayerNorm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        return self.LayerNorm(before + self.dropout(self.dense(hidden)))


class Layer(nn.Module):
    """Attention between tokens, then two matrices on each: [batch, length, width] → the same."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        attention = {"self": SelfAttention(config), "output": Residual(config.width, config)}
        self.attention = nn.ModuleDict(attention)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(config.width, config.intermediate)})
        self.output = Residual(config.intermediate, config)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        attended = self.attention["output"](self.attention["self"](hidden, mask), hidden)
        return self.output(F.gelu(self.intermediate["dense"](attended)), attended)


class Bert(nn.Module):
    """Token ids, segments and mask, which is False at padding, all [batch, length] → the pooled
    first token, [batch, width]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        layers = [Layer(config) for _ in range(config.layers)]
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(layers)})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(config.width, config.width)})
        self.apply(partial(initialize, width=config.width))

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.embeddings(input_ids, token_type_ids)
        mask = attention_mask[:, None, None, :]  # the same for every head and every query
        for layer in self.encoder["layer"]:
            hidden = layer(hidden, mask)
        return torch.tanh(self.pooler["dense"](hidden[:, 0]))


def initialize(module: nn.Module, width: int) -> None:
    """Draw weights with BERT's deviation, 0.02 at a width of 768, and more in a narrower model, so
    that what a layer puts out is not smaller. Biases are zero."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02 * (768 / width) ** 0.5)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        nn.init.zeros_(module.weight[module.padding_idx])


class Model(nn.Module):
    """The encoder, dropout and a linear layer: logits, [batch, 3], or with `labels` their loss."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.bert = Bert(config)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.width, CLASSES)
        initialize(self.classifier, config.width)

    def forward(self, ids: Tensor, segments: Tensor, mask: Tensor, labels: Any = None) -> Tensor:
        logits = self.classifier(self.dropout(self.bert(ids, segments, mask)))
        return logits if labels is None else F.cross_entropy(logits, labels)


def loss_of_logits(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """The logits come together on the first device, which computes the loss; or, with a device for
    each rank, do not leave it."""
    *inputs, labels = batch
    return F.cross_entropy(model(*inputs), labels)


def loss_in_forward(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Each device computes the loss of its part of the batch, and only these come together: one
    number per device. The parts must be of one size."""
    return model(*batch).mean()


METHODS: dict[str, tuple[Any, Any]] = {
    "data-parallel": (nn.DataParallel, loss_of_logits),
    "loss-in-forward": (nn.DataParallel, loss_in_forward),
    "ddp": (DistributedDataParallel, loss_of_logits),
}
"""What wraps the model, and how to get its mean loss over a batch."""


def train(model: nn.Module, loss_of: Any, batches: Any, lr: float = 1e-3) -> list[Tensor]:
    """Take a step on each batch. Returns this rank's loss before each."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, fused=True)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def batches(
    data: Any, batch_size: int, rank: int, size: int, seed: int = 1234, **options: Any
) -> Iterator[Any]:
    """This rank's part of every global batch, without end. In every epoch `DistributedSampler`
    shuffles all samples, on every rank alike, and gives rank r each `size`-th of them from the r-th
    on. So the ranks' batches of a step are, together, what one process gets as its batch."""
    sampler = DistributedSampler(data, size, rank, seed=seed, drop_last=True)
    own = torch.Generator()  # so that the loader draws none of dropout's numbers
    options = {"sampler": sampler, "drop_last": True, "generator": own, **options}
    loader = DataLoader(data, batch_size // size, **options)
    for epoch in count():
        sampler.set_epoch(epoch)  # without it every epoch has the order of the first
        yield from loader


KINDS = {"dog": "animal", "cat": "animal", "car": "vehicle", "ship": "vehicle"}
OPPOSITE = {"waits": "leaves", "leaves": "waits"}
WORDS = ["[PAD]", "[CLS]", "[SEP]", "the", *KINDS, "animal", "vehicle", *OPPOSITE, "at", "night"]


def draw_pair(random: Random) -> tuple[str, str, int]:
    """(premise, hypothesis, label). Exchange the two sentences, and an entailment is neutral."""
    noun, verb = random.choice([*KINDS]), random.choice([*OPPOSITE])
    time = random.choice(("", " at night"))
    more, less = f"the {noun} {verb}{time}", f"the {KINDS[noun]} {verb}"
    other = f"the {KINDS[noun]} {OPPOSITE[verb]}{time}"
    return random.choice([(more, less, 0), (less, more, 1), (more, other, 2)])


def collate(pairs: Sequence[tuple[str, str, int]]) -> tuple[Tensor, ...]:
    """Ids, segments and mask, [batch, length], and labels, [batch]."""
    texts = [f"[CLS] {premise} [SEP] {hypothesis} [SEP]" for premise, hypothesis, _ in pairs]
    ids = [torch.tensor([WORDS.index(word) for word in text.split()]) for text in texts]
    return *pad(ids), torch.tensor([label for *_, label in pairs])


def pad(
    texts: Sequence[Tensor], padding: int = 0, sep: int = WORDS.index("[SEP]")
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids of each pair → ids, segments and mask, all [batch, length of the longest]."""
    ids = pad_sequence(texts, batch_first=True, padding_value=padding).long()
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(text) for text in texts]).unsqueeze(1)
    ends = (ids == sep).long()  # of the sentences; before a token there is one, or none
    segments = (ends.cumsum(1) - ends) * mask
    return ids, segments.clamp(max=1), mask


def run(rank: int, size: int, steps: int = 60, batch_size: int = 48) -> dict[str, list[float]]:
    """Train by each method, on the same batches; print and return the losses."""
    random, found = Random(1234), {}
    data = [draw_pair(random) for _ in range(2000)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, (wrap, loss_of) in METHODS.items():
        torch.manual_seed(1234)
        model = Model(BertConfig(len(WORDS), dropout=0.0)).to(device, torch.float64)
        part = (rank, size) if name == "ddp" else (0, 1)  # one process, or each rank its part
        coming = islice(batches(data, batch_size, *part, collate_fn=collate), steps)
        moved = ([each.to(device) for each in batch] for batch in coming)
        mean = torch.stack(train(wrap(model), loss_of, moved)) / size
        dist.all_reduce(mean)
        found[name] = mean.tolist()
        if rank == 0:
            print(f"{name:16} loss {mean[0]:.4f}, after {steps} steps {mean[-1]:.4f}")
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
