"""Pretrained weights and MultiNLI through transformers and datasets: what they give is what is
trained, or one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Run

from playground.lessons.bert.lesson import BertConfig, Model
from playground.lessons.bert.pairs import Pairs
from playground.lessons.bert.prepare import prepare_pairs
from playground.lessons.bert.pretrained import MULTINLI, load_encoder, load_pretrained, read_pairs
from playground.runtime.errors import UsageError

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "it", "rain", "##s", "is", "dry", ".")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny BERT with ten positions, as transformers saves it."""
    transformers = pytest.importorskip(
        "transformers", reason="pretrained weights are loaded through it"
    )
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=10,
    )  # fmt: skip
    encoder, generator = transformers.BertModel(config), torch.Generator().manual_seed(5)
    for param in encoder.parameters():  # norms and biases are otherwise as they were initialised
        param.data += 0.3 * torch.randn(param.shape, generator=generator)
    transformers.utils.logging.disable_progress_bar()
    encoder.save_pretrained(tmp_path / "bert")
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@torch.no_grad()
def test_our_encoder_computes_what_theirs_does(folder: Path) -> None:
    theirs, (sizes, _) = load_encoder(str(folder)).eval(), load_pretrained(str(folder))
    ours = Model(BertConfig(**asdict(sizes))).eval()
    ours.bert.load_state_dict(theirs.state_dict())
    ids = torch.tensor([[2, 5, 6, 3, 7, 3], [2, 5, 3, 8, 3, 0]])
    segments = torch.tensor([[0, 0, 0, 0, 1, 1]] * 2)
    expected = theirs(ids, token_type_ids=segments, attention_mask=(ids != 0).long()).pooler_output
    assert (ours.bert(ids, segments, ids != 0) - expected).abs().max() <= 1e-5


@pytest.mark.stress
def test_the_command_trains_them(folder: Path, tmp_path: Path, run_cli: Run) -> None:
    words = (
        "--data-dir",
        tmp_path,
        "--steps",
        2,
        "--batch-size",
        8,
        "--only",
        "train",
        "--way",
        "ddp",
        "--max-length",
        10,
        "--json",
    )
    shown = run_cli("bert", "--weights", folder, *words)
    assert shown.code == 0, shown.err
    document = json.loads(shown.out)
    assert (document["weights"], document["model"]["max_length"]) == (str(folder), 10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, r"of a BERT encoder\.layer\.2\..* is missing there"),
        ({"hidden_size": 16}, "could not be loaded by transformers"),
        ({"hidden_act": "gelu_new"}, "its hidden_act is gelu_new, where our encoder has gelu$"),
        ({"is_decoder": True}, "its is_decoder is True, where our encoder has False$"),
    ],
)
def test_what_is_no_such_encoder_is_refused(
    changes: dict[str, Any], message: str, folder: Path
) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(UsageError, match=message) as caught:
        load_pretrained(str(folder))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    """Its ids would lie beyond the embeddings, in every rank."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["playground"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(
        UsageError,
        match=f"its tokenizer has {len(WORDS) + 1} tokens for {len(WORDS)} word embeddings",
    ):
        load_pretrained(str(folder))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda: load_pretrained("bert-base-cased"),
            "--weights bert-base-cased needs the package transformers",
        ),
        (
            lambda: next(read_pairs("train")),
            r"nyu-mll/multi_nli \(--dataset multinli\) needs the package datasets",
        ),
    ],
)
def test_without_its_library_it_says_what_to_install(
    ask: Callable[[], object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("transformers", "datasets"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=message) as caught:
        ask()
    assert str(caught.value).endswith("pip install 'playground[bert]'")


@pytest.mark.stress
def test_multinli_is_tokenised_as_the_model_wants_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` takes a folder of the dataset's name where there is one."""
    pytest.importorskip("datasets", reason="MultiNLI is loaded through it")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    data = tmp_path / MULTINLI
    data.mkdir(parents=True)
    rows = [("It rains.", "It is dry.", 2), ("It rains.", "n/a", -1), ("It is dry.", "It is.", 0)]
    lines = [
        json.dumps({"premise": one, "hypothesis": other, "label": label})
        for one, other, label in rows
    ]
    for split in ("train", "validation_matched"):
        (data / f"{split}.jsonl").write_text("\n".join(lines))
    files = "".join(
        f"  - split: {split}\n    path: {split}.jsonl\n"
        for split in ("train", "validation_matched")
    )
    (data / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n"
    )
    source = prepare_pairs("multinli", tmp_path, load_pretrained(str(folder))[1])
    assert (source.train, source.test, source.vocabulary) == (2, 2, len(WORDS))
    batch = Pairs(source.folder, "test").__getitems__([0])
    said = " ".join(WORDS[i] for i in batch.input_ids[0])
    assert (said, batch.labels.tolist()) == ("[CLS] it rain ##s . [SEP] it is dry . [SEP]", [2])
