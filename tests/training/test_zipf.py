"""Token ids drawn by Zipf's law, and the model that reads them."""

from __future__ import annotations

import torch
from torch.utils.data import default_collate

from playground.training.bert_config import BertConfig
from playground.training.zipf import PADDING, TokenBert, ZipfSequences

SMALL = BertConfig(vocabulary=50, width=8, layers=1, heads=2, intermediate=16, max_length=12)


def test_words_are_as_frequent_as_in_a_text() -> None:
    """The k-th word 1/k times as frequent as the first: within 10 % for the first ten."""
    counts = ZipfSequences().ids.flatten().bincount(minlength=30_000)[1:]
    assert counts.argsort(descending=True)[:3].tolist() == [0, 1, 2]
    relative = counts[:10] * torch.arange(1, 11) / counts[0]
    assert (relative - 1).abs().max() < 0.1
    assert len(counts) == 29_999
    assert counts[20_000:].any(), "rare words occur too"


def test_sequences_are_the_same_each_time_and_padded_behind() -> None:
    data, first = ZipfSequences(config=SMALL), ZipfSequences(limit=20, config=SMALL)
    assert (len(data), len(first)) == (4096, 20)
    assert torch.equal(data.ids[:20], first.ids)
    in_use = first.ids != PADDING
    assert torch.equal(in_use, in_use.sort(dim=1, descending=True).values)
    assert set(in_use.sum(1).tolist()) <= set(range(6, 13))
    assert data.labels.bincount().min() > 1000
    ids, labels = first.__getitems__([3, 1])
    one_by_one = default_collate([first[3], first[1]])
    assert torch.equal(ids, one_by_one[0])
    assert torch.equal(labels, one_by_one[1])


def test_padding_makes_no_difference() -> None:
    model, ids = TokenBert(SMALL).eval(), torch.tensor([[3, 4, 5, PADDING, PADDING]])
    output = model(ids)
    assert output.shape == (1, 3)
    assert torch.allclose(output.exp().sum(), torch.tensor(1.0))
    assert torch.allclose(output, model(ids[:, :3]), atol=1e-6)
