"""The real BERT on MultiNLI, with a tiny model and three pairs in place of what the hub has."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Run
from torch import nn

from playground.lessons.bert import multinli as program

multinli: Any = program
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "it", "rain", "##s", "is", "dry", ".")
PAIRS = [("It rains.", "It is dry.", 2), ("It rains.", "n/a", -1), ("It is dry.", "It is.", 0)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny BERT, as transformers saves it. Beside it a dataset: `datasets` takes a folder of its
    name where there is one."""
    transformers = pytest.importorskip("transformers", reason="the model comes from it")
    pytest.importorskip("datasets", reason="the pairs come from it")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=12, num_labels=3,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    data = tmp_path / multinli.DATASET
    data.mkdir(parents=True)
    lines = [json.dumps({"premise": a, "hypothesis": b, "label": label}) for a, b, label in PAIRS]
    splits = ("train", "validation_matched")
    for split in splits:
        (data / f"{split}.jsonl").write_text("\n".join(lines * 4))
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
    header = f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n"
    (data / "README.md").write_text(header)
    return tmp_path / "bert"


def test_pairs_without_a_label_are_left_out_and_padded(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    data, collate = multinli.load("train", tokenizer)
    assert len(data) == 8
    batch = collate([data[0], data[1]])
    said = [" ".join(WORDS[i] for i in ids) for ids in batch["input_ids"]]
    assert said == [
        "[CLS] it rain ##s . [SEP] it is dry . [SEP]",
        "[CLS] it is dry . [SEP] it is . [SEP] [PAD]",
    ]
    assert batch["labels"].tolist() == [2, 0]
    assert batch["attention_mask"].tolist() == [[1] * 11, [1] * 10 + [0]]


def test_ranks_get_different_pairs_and_each_epoch_another_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(multinli, "BATCH", 8)
    parts = [list(islice(multinli.batches(range(16), list, rank, 2), 4)) for rank in range(2)]
    for epoch in range(2):
        seen = [number for part in parts for step in part[2 * epoch :][:2] for number in step]
        assert sorted(seen) == [*range(16)]
    assert parts[0][:2] != parts[0][2:]


class Classifier(nn.Module):
    """Returns logits and, if it is given labels, their loss, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.layer(inputs)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return type("Output", (), {"logits": logits, "loss": loss})


def test_the_loss_in_forward_is_the_loss_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Classifier()
    batch = {"inputs": torch.randn(6, 4), "labels": torch.tensor([0, 1, 2] * 2)}
    inside = multinli.compute_loss(model, dict(batch))
    monkeypatch.setattr(multinli, "IN_FORWARD", 0)
    assert torch.equal(inside, multinli.compute_loss(model, dict(batch)))


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.stress)])
def test_it_trains_by_one_process_and_by_ranks(size: int, folder: Path, run_cli: Run) -> None:
    sets = ("--set", f"WEIGHTS={folder}", "--set", "STEPS=2", "--set", "BATCH=4")
    ran = run_cli("run", "-n", size, *sets, "--set", "LENGTH=12", multinli.__file__)
    assert ran.code == 0, ran.err
    first, second = ran.out.splitlines()
    assert first.startswith("step 0: loss ")
    assert second.startswith("accuracy on pairs that were not trained on: ")
