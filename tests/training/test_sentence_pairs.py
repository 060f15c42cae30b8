"""Sentence pairs: tokenised once and whole, and the batches that transformers would make of them."""

from __future__ import annotations

import functools
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from playground.runtime.errors import UsageError
from playground.runtime.files import NoData
from playground.testing import World
from playground.training.data import collate
from playground.training.loader import RankLoader
from playground.training.sentence_pairs import arrays, grammar, prepare
from playground.training.sentence_pairs.grammar import generate_pairs
from playground.training.sentence_pairs.pairs import PairBatch, Pairs
from playground.training.sentence_pairs.prepare import PairsSource, prepare_pairs
from playground.training.sentence_pairs.wordpiece import SPECIAL, WordPiece

LETTERS = "abcdefghij"
TOKENIZER = WordPiece.of_words(LETTERS)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "COUNTS", {"train": 60, "test": 20})


@pytest.fixture
def source(tmp_path: Path, few: None) -> PairsSource:
    return prepare_pairs("generated", tmp_path / "data")


def texts_of(batch: PairBatch, tokenizer: WordPiece) -> list[str]:
    return [" ".join(tokenizer.vocabulary[i] for i in ids) for ids in batch.input_ids.tolist()]


def test_generated_pairs_come_out_as_the_grammar_says_them(source: PairsSource) -> None:
    tokenizer = WordPiece.of_words(grammar.WORDS)
    assert (source.name, source.why, source.train, source.test) == ("generated", "as asked", 60, 20)
    assert source.vocabulary == len(SPECIAL) + len(grammar.WORDS)
    for split, count in (("train", 60), ("test", 20)):
        pairs = Pairs(source.folder, split, max_length=64)
        assert len(pairs) == count
        batch = pairs.__getitems__(range(count))
        expected = [*generate_pairs(split)]
        assert batch.labels.tolist() == [label for _, _, label in expected]
        said = [f"[CLS] {premise} [SEP] {hypothesis} [SEP]" for premise, hypothesis, _ in expected]
        assert [text.split(" [PAD]")[0] for text in texts_of(batch, tokenizer)] == said


def test_the_test_split_is_new_and_balanced() -> None:
    """What to test on is not trained on, and its hypotheses alone say nothing about the labels."""
    train, test = ([*generate_pairs(split)] for split in ("train", "test"))
    assert (len(train), len(test)) == tuple(grammar.COUNTS.values())
    assert not {pair[1] for pair in train} & {pair[1] for pair in test}
    for pairs in (train, test):
        counts = Counter(label for *_, label in pairs)
        assert all(abs(counts[label] / len(pairs) - 1 / 3) < 0.03 for label in range(3)), counts


PAIR = st.tuples(st.text(LETTERS, max_size=12), st.text(LETTERS, max_size=12), st.integers(0, 2))


@functools.cache
def their_tokenizer(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")
    (folder / "vocab.txt").write_text("\n".join(TOKENIZER.vocabulary) + "\n")
    return transformers.BertTokenizer.from_pretrained(str(folder), do_lower_case=False)


@settings(max_examples=60)
@given(st.lists(PAIR, min_size=1, max_size=6), st.integers(5, 30))
def test_batches_are_those_of_transformers(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str, int]], max_length: int
) -> None:
    """Letters are words here: `" ".join` makes them a sentence. Every length meets every other, and every limit."""
    folder = tmp_path_factory.getbasetemp() / "pairs"
    folder.mkdir(exist_ok=True)
    spaced = [(" ".join(premise), " ".join(hypothesis), label) for premise, hypothesis, label in pairs]
    arrays.write_sizes(folder, {"train": len(pairs), "test": 0}, TOKENIZER)
    assert arrays.write_split(folder, "train", spaced, TOKENIZER) == len(pairs)
    batch = Pairs(folder, "train", max_length).__getitems__(range(len(pairs)))
    premises, hypotheses, labels = map(list, zip(*spaced, strict=True))
    theirs = their_tokenizer(folder)(
        premises, hypotheses, truncation=True, max_length=max_length, padding=True, return_tensors="pt"
    )
    assert torch.equal(batch.input_ids, theirs["input_ids"])
    assert torch.equal(batch.token_type_ids, theirs["token_type_ids"])
    assert torch.equal(batch.attention_mask, theirs["attention_mask"].bool())
    assert batch.labels.tolist() == labels


def test_one_pair_no_pair_and_a_limit(source: PairsSource) -> None:
    pairs = Pairs(source.folder, "train", max_length=64, limit=7)
    assert len(pairs) == 7
    one = pairs[-1]
    assert one.input_ids.shape == one.token_type_ids.shape == one.attention_mask.shape
    assert one.labels.shape == ()
    assert torch.equal(one.input_ids, pairs.__getitems__([6]).input_ids[0])
    with pytest.raises(IndexError):
        pairs[7]
    none = pairs.__getitems__([])
    assert [tuple(tensor.shape) for tensor in none] == [(0, 3), (0, 3), (0, 3), (0,)]
    assert [tensor.dtype for tensor in none] == [torch.int64, torch.int64, torch.bool, torch.int64]
    assert none.inputs == none[:3]
    with pytest.raises(UsageError, match=r"max length 4: .* needs 5"):
        Pairs(source.folder, "train", max_length=4)


def test_a_worker_maps_the_files_itself(source: PairsSource) -> None:
    pairs = Pairs(source.folder, "train", max_length=16, limit=22)
    sent = pickle.dumps(pairs)
    assert len(sent) < 1000
    assert pickle.loads(sent)[21].input_ids.tolist() == pairs[21].input_ids.tolist()


def fetched(rank: int, size: int, folder: Path, num_workers: int) -> list[Any]:
    """The batches of an epoch, fetched by so many workers."""
    pairs = Pairs(folder, "train", max_length=16, limit=22)
    batches: Any = RankLoader(pairs, num_workers=num_workers, batch_size=8, collate_fn=collate)
    return [(type(batch) is PairBatch, [tensor.tolist() for tensor in batch]) for batch in batches]


def test_loader_workers_hand_out_the_same_batches(source: PairsSource, world: Callable[..., World]) -> None:
    [here] = world(1).run(fetched, source.folder, 0)
    [of_workers] = world(1).run(fetched, source.folder, 2)
    assert of_workers == here
    assert all(is_batch for is_batch, _ in here)
    assert [len(labels) for _, (*_, labels) in here] == [8, 8, 6]


def damage(file: Path, hurt: str) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content if hurt == "changed" else content[:-1])
    if hurt == "missing":
        file.unlink()


@pytest.mark.parametrize("hurt", ["cut off", "changed", "missing"])
@pytest.mark.parametrize("name", ["train-tokens.i32", "test-labels.u8", "sizes.json"])
def test_damaged_files_are_named_and_made_again(hurt: str, name: str, source: PairsSource, tmp_path: Path) -> None:
    whole = {file: (source.folder / file).read_bytes() for file in arrays.FILES}
    damage(source.folder / name, hurt)
    said: list[str] = []
    assert prepare_pairs("generated", tmp_path / "data", say=said.append) == source
    assert said[0] == f"{name} in {source.folder}: damaged, so they are made again"
    assert {file: (source.folder / file).read_bytes() for file in arrays.FILES} == whole
    assert not list(source.folder.glob(".unfinished-*"))


def test_another_tokenizer_has_pairs_of_its_own(source: PairsSource, tmp_path: Path) -> None:
    tokenizer = WordPiece.of_words((*grammar.WORDS, "more"))
    other = prepare_pairs("generated", tmp_path / "data", tokenizer)
    assert other.folder != source.folder
    assert other.vocabulary == source.vocabulary + 1


def test_many_at_once_tokenise_once(tmp_path: Path, few: None) -> None:
    said: list[str] = []
    ask = functools.partial(prepare_pairs, "generated", tmp_path / "data", say=said.append)
    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == ["reading and tokenising sentence pairs (generated), once"]


def test_an_interrupted_preparation_leaves_nothing_behind(
    tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "write_checksums", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare_pairs("generated", tmp_path / "data")
    assert [file.name for file in tmp_path.glob("data/pairs/*/*")] == [".lock"]


def test_a_data_directory_that_is_none_is_refused(tmp_path: Path, few: None) -> None:
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", Path("/proc/no/such")):
        with pytest.raises(NoData, match="--data-dir"):
            prepare_pairs("generated", bad)


def test_auto_without_data_and_without_the_extra_generates(
    tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("playground.training.hub.is_installed", lambda library: False)
    source = prepare_pairs("auto", tmp_path, TOKENIZER)
    assert (source.name, source.why) == ("generated", f"no MultiNLI in {tmp_path}, and the extra hub is not installed")


def test_auto_for_a_model_from_scratch_does_not_ask_the_hub(
    tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("playground.training.hub.is_installed", lambda library: True)
    source = prepare_pairs("auto", tmp_path)
    assert source.name == "generated"
    assert source.why == f"no MultiNLI in {tmp_path}, and a model from scratch does not ask the hub"


HUB_ROWS = [
    {"premise": "a b", "hypothesis": "c", "label": 2},
    {"premise": "d", "hypothesis": "e", "label": -1},
    {"premise": "f", "hypothesis": "g g", "label": 0},
]


def test_pairs_of_the_hub_are_asked_for_once(tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def load_split(name: str, split: str) -> list[dict[str, object]]:
        asked.append((name, split))
        return HUB_ROWS

    monkeypatch.setattr("playground.training.hub.load_split", load_split)
    monkeypatch.setattr("playground.training.hub.is_installed", lambda library: True)
    source = prepare_pairs("multinli", tmp_path, TOKENIZER)
    assert asked == [("nyu-mll/multi_nli", "train"), ("nyu-mll/multi_nli", "validation_matched")]
    assert prepare_pairs("multinli", tmp_path, TOKENIZER) == source
    assert len(asked) == 2
    batch = Pairs(source.folder, "test", max_length=8).__getitems__([0, 1])
    assert texts_of(batch, TOKENIZER) == ["[CLS] a b [SEP] c [SEP]", "[CLS] f [SEP] g g [SEP]"]
    assert batch.labels.tolist() == [2, 0], "a pair without a label is left out"


@pytest.fixture
def broken_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A download that breaks off after a few rows."""

    def rows(name: str, split: str) -> Iterator[dict[str, object]]:
        yield HUB_ROWS[0]
        raise NoData("the download broke off: retry", why="the download broke off")

    monkeypatch.setattr("playground.training.hub.load_split", rows)
    monkeypatch.setattr("playground.training.hub.is_installed", lambda library: True)


def test_of_a_download_that_breaks_off_nothing_is_used(
    tmp_path: Path, few: None, broken_hub: Callable[..., None]
) -> None:
    with pytest.raises(NoData, match=r"multinli_1.0_train.jsonl .*, and the download broke off: retry"):
        prepare_pairs("multinli", tmp_path, TOKENIZER)
    assert [file.name for file in tmp_path.glob("pairs/*/*")] == [".lock"]
    source = prepare_pairs("auto", tmp_path, TOKENIZER)
    assert (source.name, source.why) == ("generated", f"no MultiNLI in {tmp_path}, and the download broke off")
