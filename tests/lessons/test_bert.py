"""BERT by three ways: one training, whatever the way and the number of workers, and every figure
follows from it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields, replace
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fixtures import Run
from processes import by_hand

from playground.lessons.bert import grammar, lesson as board, measure
from playground.lessons.bert.experiment import build_model, train
from playground.lessons.bert.lesson import BertConfig, Model
from playground.lessons.bert.page import (
    EXACT,
    WAYS,
    BertSettings,
    BertTraining,
    Losses,
    averaging_texts,
    compare_losses,
)
from playground.lessons.bert.prepare import PairsSource, prepare_pairs
from playground.lessons.bert.sizes import CLASSES, BertSizes
from playground.runtime import PlaygroundError, UsageError
from playground.training.grad_syncs import DDP
from playground.training.one_process import CLOSE

SMALL: dict[str, Any] = {
    "width": 16,
    "layers": 2,
    "heads": 2,
    "intermediate": 32,
    "max_length": 32,
    "dropout": 0.0,
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> PairsSource:
    """A few hundred generated pairs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "COUNTS", {"train": 240, "test": 50})
        return prepare_pairs("generated", tmp_path_factory.mktemp("pairs"))


@pytest.fixture
def settings(pairs: PairsSource) -> BertSettings:
    return BertSettings(
        folder=pairs.folder, config=BertSizes(vocabulary=pairs.vocabulary, **SMALL),
        workers=2, batch_size=24, steps=4, max_length=32,
    )  # fmt: skip


def train_exactly(world: Run, settings: BertSettings) -> BertTraining:
    """What rank 0 returned; all have returned the same losses."""
    results = world(settings.ranks).run(train, replace(settings, double=True))
    rank_0: BertTraining = results[0]
    assert all(result.losses == rank_0.losses for result in results)
    return rank_0


@pytest.mark.parametrize(
    "workers", [3, *(pytest.param(more, marks=pytest.mark.stress) for more in (1, 2, 4))]
)
def test_all_ways_are_one_training(workers: int, settings: BertSettings, world: Run) -> None:
    """That of one process, with one model and torch's own order."""
    alone = train_exactly(world, settings.on("data-parallel", 1))
    [plain] = world(1).run(train_plainly, replace(settings, double=True))
    assert alone.losses == pytest.approx(plain, abs=EXACT)
    trainings = [train_exactly(world, settings.on(way, workers)) for way in WAYS]
    for compared, training in zip(compare_losses(alone, trainings), trainings, strict=True):
        assert compared.difference <= EXACT
        assert (training.test_accuracy, training.tested) == (alone.test_accuracy, 50)
        assert training.replicas_max_difference == 0
    assert len(set(alone.losses)) == settings.steps


def train_plainly(rank: int, size: int, settings: BertSettings) -> list[float]:
    from playground.lessons.bert.pairs import Pairs

    torch.manual_seed(settings.seed)
    model = Model(BertConfig(**asdict(settings.config))).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
    data = Pairs(settings.folder, "train")
    order = torch.randperm(
        len(data), generator=torch.Generator().manual_seed(settings.seed)
    ).tolist()
    losses = []
    for step in range(settings.steps):
        batch = data.__getitems__(
            order[step * settings.batch_size : (step + 1) * settings.batch_size]
        )
        loss = F.cross_entropy(model(*batch.inputs), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "size", [1, 3, *(pytest.param(size, marks=pytest.mark.stress) for size in (2, 4))]
)
def test_the_board_s_methods_are_one_training(size: int, world: Run) -> None:
    """With DataParallel each rank computes what one process does, with DDP its part of it."""
    results = world(size).run(board.run, 3, 24)
    assert all(result == results[0] for result in results)
    assert [*results[0]] == [*WAYS]
    alone, *others = results[0].values()
    assert len(set(alone)) == 3
    for losses in others:
        assert losses == pytest.approx(alone, abs=EXACT)


def test_the_board_s_pairs_are_what_their_labels_say() -> None:
    random = Random(0)
    drawn = {board.draw_pair(random) for _ in range(2000)}
    by_label = [
        {(one, other) for one, other, label in drawn if label == each}
        for each in range(board.CLASSES)
    ]
    assert {(other, one) for one, other in by_label[0]} == by_label[1]
    assert {len(pairs) for pairs in by_label} == {16}
    opposite = {verb for one, other in by_label[2] for verb in (one.split()[2], other.split()[2])}
    assert opposite == set(board.OPPOSITE)
    assert all(one.split()[2] != other.split()[2] for one, other in by_label[2])


def test_a_batch_of_the_board_is_padded_to_its_longest_pair() -> None:
    pairs = [("the dog waits at night", "the animal waits", 0), ("the car", "the ship", 2)]
    ids, segments, mask, labels = board.collate(pairs)
    words = [[board.WORDS[i] for i in row] for row in ids]
    assert words[0] == [
        "[CLS]",
        "the",
        "dog",
        "waits",
        "at",
        "night",
        "[SEP]",
        "the",
        "animal",
        "waits",
        "[SEP]",
    ]
    assert words[1] == ["[CLS]", "the", "car", "[SEP]", "the", "ship", "[SEP]", *["[PAD]"] * 4]
    assert segments.tolist() == [[0] * 7 + [1] * 4, [0] * 4 + [1] * 3 + [0] * 4]
    assert (mask.sum(1).tolist(), labels.tolist()) == ([11, 7], [0, 2])


def training_of(*losses: float) -> Losses:
    return Losses(way="ddp", workers=2, losses=[*losses])


def test_losses_that_differ_are_no_rounding() -> None:
    [same] = compare_losses(training_of(1.0, 0.5), [training_of(1.0, 0.5 + EXACT / 2)])
    assert 0 < same.difference <= EXACT
    with pytest.raises(
        PlaygroundError,
        match=r"ddp on 2 workers: its losses are up to 0\.25 from .* less than 1e-12",
    ):
        compare_losses(training_of(1.0, 0.5), [training_of(1.0, 0.75)])


@pytest.mark.parametrize("losses", [(1.0, math.nan), (math.nan, 0.5), (1.0, math.inf)])
def test_losses_that_are_no_numbers_agree_with_nothing(losses: tuple[float, ...]) -> None:
    for one, other in (((1.0, 0.5), losses), (losses, (1.0, 0.5)), (losses, losses)):
        with pytest.raises(
            PlaygroundError, match=r"ddp on 2 workers: training diverged: .* try a smaller --lr"
        ):
            compare_losses(training_of(*one), [training_of(*other)])


def test_epochs_have_other_orders(settings: BertSettings, world: Run) -> None:
    """240 pairs in batches of 120 are two steps an epoch: with learning rate 0 only the batches
    differ."""
    training = train_exactly(world, replace(settings, batch_size=120, lr=0, steps=4))
    first, second = training.losses[:2], training.losses[2:]
    assert sum(first) == pytest.approx(sum(second))
    assert sorted(first) != pytest.approx(sorted(second))


def test_sizes_are_those_of_the_board_and_count_its_parameters() -> None:
    sizes = BertSizes(vocabulary=59, **SMALL)
    assert [(each.name, each.default) for each in fields(BertSizes)] == [
        (each.name, each.default) for each in fields(BertConfig)
    ]
    assert (CLASSES, asdict(sizes)) == (board.CLASSES, asdict(BertConfig(**asdict(sizes))))
    model = Model(BertConfig(**asdict(sizes)))
    assert sum(param.numel() for param in model.parameters()) == sizes.parameters
    assert BertSizes(
        vocabulary=28_996, width=768, layers=12, heads=12, intermediate=3072, max_length=512
    ).parameters == 108_312_579  # fmt: skip


def test_padding_does_not_change_a_logit() -> None:
    model = Model(BertConfig(vocabulary=59, **SMALL)).eval()
    ids = torch.randint(1, 59, (3, 7))
    segments, mask = (torch.arange(7) > 3).long().expand(3, 7), torch.ones(3, 7, dtype=torch.bool)
    padded = [
        F.pad(each, (0, 5), value=value) for each, value in ((ids, 8), (segments, 1), (mask, 0))
    ]
    assert torch.allclose(model(ids, segments, mask), model(*padded), atol=1e-6)


@pytest.mark.parametrize("way", WAYS[::2])
def test_what_devices_hold(way: str, settings: BertSettings, world: Run) -> None:
    asked = settings.on(way)
    held = [each for rank in world(asked.ranks).run(measure.memory, asked) for each in rank]
    assert len(held) == asked.workers
    of_the_model = 4 * settings.config.parameters
    for number, each in enumerate(held):
        assert sum(each.held.values()) == each.peak
        has_state = way == DDP or number == 0
        assert each.held.get("optimizer state", 0) == (2 * of_the_model if has_state else 0)
        assert each.held["activations"] > 0
    assert held[0].held["parameters"] == of_the_model


def test_rows_that_are_not_used_do_not_travel(settings: BertSettings, world: Run) -> None:
    large = replace(settings, config=replace(settings.config, vocabulary=5_000))
    sparse, ddp = world(2).run(measure.averaging, large)[0]
    assert (sparse.way, ddp.way) == ("sparse-embeddings", "ddp")
    assert ddp.bytes == 4 * large.config.parameters
    rows = 4 * large.config.width * 5_000
    assert sparse.bytes < ddp.bytes - rows + rows // 10
    assert sparse.difference_to_ddp < 1e-3
    assert "  ddp: hides nothing here." in averaging_texts(
        [sparse, replace(ddp, caveat="hides nothing here")], large
    )


def test_a_rung_that_takes_the_step_takes_that_of_adam(settings: BertSettings, world: Run) -> None:
    rung, ddp = world(2).run(measure.averaging, replace(settings, sync="shared-step"))[0]
    assert (rung.way, rung.messages, ddp.way) == ("shared-step", 0, "ddp")
    assert rung.difference_to_ddp < 1e-3
    assert averaging_texts([rung, ddp], settings)


@pytest.fixture
def bert(run_cli: Run, pairs: PairsSource, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command on these pairs, with a smaller model."""
    monkeypatch.setattr(grammar, "COUNTS", {"train": 240, "test": 50})
    data_dir = pairs.folder.parents[1]

    def run(*words: Any) -> Any:
        return run_cli("bert", "--data-dir", data_dir, "--steps", 2, "--batch-size", 8, *words)

    return run


def test_the_document_has_what_was_asked_for(bert: Run) -> None:
    shown = bert("--only", "train", "--only", "memory", "--way", "ddp", "--json")
    assert (shown.code, shown.err) == (0, "")
    document = json.loads(shown.out)
    assert (document["weights"], document["dataset"], document["train"]) == (
        "scratch",
        "generated",
        240,
    )
    assert set(document["parts"]) == {"train", "memory"}
    [training] = document["parts"]["train"]
    assert (training["way"], len(training["losses"]), training["tested"]) == ("ddp", 2, 50)
    assert len(document["parts"]["memory"]["ddp"]) == 2


def test_training_that_diverges_says_so_and_claims_no_accuracy(bert: Run) -> None:
    shown = bert("--only", "train", "--way", "ddp", "--lr", 1e30, "--steps", 3, "--json")
    assert shown.code == 0
    assert (
        shown.err
        == "ddp: training diverged: the loss is no longer a finite number; try a smaller --lr\n"
    )
    [training] = json.loads(shown.out)["parts"]["train"]
    assert (training["test_accuracy"], training["losses"][-1]) == (None, None)


def test_speed_and_losses_of_every_number_of_workers(bert: Run) -> None:
    shown = bert("--only", "speed", "--only", "same-losses", "--way", "ddp", "--json")
    assert (shown.code, shown.err) == (0, "")
    parts = json.loads(shown.out)["parts"]
    assert [(each["way"], each["workers"]) for each in parts["speed"]] == [
        ("ddp", 1),
        ("ddp", 2),
        ("ddp", 4),
    ]
    assert all(
        each["samples_per_second"] == pytest.approx(8 / each["seconds"]) for each in parts["speed"]
    )
    [compared] = parts["same-losses"]
    assert (compared["steps"], compared["workers"]) == (20, 2)
    assert compared["difference"] <= EXACT


SMALLER = ("--dtype", "bfloat16", "--checkpoint-activations")


def test_what_autograd_keeps_is_shown_beside_what_it_would_keep(bert: Run) -> None:
    kept = []
    for words in ((), SMALLER[2:], SMALLER[:2]):
        shown = bert("--only", "activations", *words, "--json")
        assert (shown.code, shown.err) == (0, "")
        kept.append(json.loads(shown.out)["parts"]["activations"][0])
    for each in kept[:2]:
        assert each["kept"] == pytest.approx(each["closed_form"], rel=CLOSE)
    assert kept[1]["kept"] < kept[0]["kept"] / 5
    assert kept[2]["closed_form"] is None
    assert kept[2]["kept"] < 0.9 * kept[0]["kept"]  # the casts of weights count, too


def losses_and_gradients(settings: BertSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a batch, with dropout."""
    model = build_model(settings)
    torch.manual_seed(1)
    ids, labels = torch.randint(1, 50, (4, 9)), torch.randint(3, (4,))
    loss = F.cross_entropy(model(ids, torch.zeros_like(ids), ids > 5), labels)
    loss.backward()
    return loss.detach(), torch.cat([param.grad.flatten() for param in model.parameters()])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_are_computed_again_have_the_same_gradients(
    dtype: str, settings: BertSettings
) -> None:
    """Bit for bit, dropout and autocast included; and autocast rounds to eight bits."""
    config = replace(settings.config, dropout=0.1)
    whole = losses_and_gradients(replace(settings, config=config))
    asked = replace(settings, config=config, dtype=dtype)
    kept = losses_and_gradients(asked)
    recomputed = losses_and_gradients(replace(asked, checkpoint_activations=True))
    assert all(map(torch.equal, kept, recomputed))
    off = (kept[1] - whole[1]).norm() / whole[1].norm()
    assert off == 0 if dtype == "float32" else 0 < off < 2**-5


def test_a_world_that_is_joined_is_refused(bert: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in by_hand(0, 1, "29500").items():
        monkeypatch.setenv(name, value)
    shown = bert()
    assert (shown.code, shown.out) == (2, "")
    assert "bert starts worlds of its own: run it without torchrun" in shown.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-n", 3), "choose a multiple of 3"),
        (("--batch-size", 4000), "there are 240 pairs to train on"),
        (
            ("--way", "data-parallel", "--only", "averaging"),
            "--only averaging is about ranks that average gradients",
        ),
        (("--dataset", "multinli"), "--dataset multinli needs a tokenizer: add --weights"),
        ((*SMALLER, "--dropout", 0.1), "--checkpoint-activations with a dropout of 0.1: replicas"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(
    words: tuple[Any, ...], message: str, bert: Run
) -> None:
    shown = bert(*words)
    assert (shown.code, shown.out) == (2, "")
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1


def test_ways_of_one_process_take_the_devices_there_are(settings: BertSettings) -> None:
    """Two ranks may share a device; one process cannot drive two where there is one, and does what
    it can."""
    one_gpu = replace(settings, device_count=1)
    assert [one_gpu.on(way).workers for way in WAYS] == [1, 1, 2]
    assert [one_gpu.most_workers(way) for way in WAYS] == [1, 1, 2]
    assert settings.on("data-parallel", 3).workers == 3
    five_gpus = replace(settings, workers=8, device_count=5)
    assert [five_gpus.on(way).workers for way in ("data-parallel", DDP)] == [4, 8], (
        "which share a batch of 24 equally"
    )


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(
        UsageError, match="a BERT of width 10 with 4 heads: the heads must divide the width"
    ):
        BertSizes(vocabulary=59, width=10, heads=4)
