"""The data sets: what their files hold, and which batches come of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torchvision.datasets.mnist import read_image_file, read_label_file

from playground.lessons import LESSONS
from playground.testing import World
from playground.training.data import MEAN, STD, Images, batches, partition_dataset, training_images
from playground.training.loop import run_training
from playground.training.settings import LOADERS, TrainingSettings

Worlds = Callable[..., World]


def test_one_loader_reads_what_torchvision_reads(digits_folder: Path) -> None:
    for split, count in (("train", 600), ("t10k", 200)):
        images = read_image_file(str(digits_folder / f"{split}-images-idx3-ubyte"))
        labels = read_label_file(str(digits_folder / f"{split}-labels-idx1-ubyte"))
        ours = Images(digits_folder, split)
        assert len(ours) == len(labels) == count
        got, classes = ours.__getitems__(list(range(count)))
        torch.testing.assert_close(got, (images.unsqueeze(1).float() / 255 - MEAN) / STD)
        assert torch.equal(classes, labels)
        image, label = ours[7]
        assert torch.equal(image, got[7])
        assert label == classes[7]


def batches_by(rank: int, size: int, folder: Path, loader: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of this rank, fetched by that loader."""
    settings = TrainingSettings(folder=folder, limit=17, loader=loader)
    found = list(partition_dataset(training_images(settings), 8)[0])
    assert {(images.dtype, images.shape[1:]) for images, _ in found} == {(torch.float32, (1, 28, 28))}
    return found


def test_both_loaders_give_the_same_batches(world: Worlds, digits_folder: Path) -> None:
    """17 samples in batches of 8 leave one, so that of 3 ranks two have an empty batch."""
    whole, single = (world(3).run(batches_by, digits_folder, loader) for loader in LOADERS)
    assert [[len(labels) for _, labels in mine] for mine in whole] == [[3, 3, 1], [3, 3, 0], [2, 2, 0]]
    torch.testing.assert_close(single, whole)


def sizes_of_batches(rank: int, size: int, folder: Path) -> list[float]:
    """Those of the global batches, by the divisors of this rank's losses: in an epoch, and in one resumed after two."""
    train_set, _ = partition_dataset(Images(folder, "train", 19), 8)
    whole = [samples * size for *_, samples in batches(train_set, 8)]
    train_set.batch_sampler.go_on_from(1, 2)
    return whole + [samples * size for *_, samples in batches(train_set, 8, done=2)]


def test_the_last_batch_counts_by_its_own_size(world: Worlds, digits_folder: Path) -> None:
    assert world(3).run(sizes_of_batches, digits_folder) == [[8.0, 8.0, 3.0, 3.0]] * 3


def test_loader_workers_change_nothing(world: Worlds, digits_folder: Path) -> None:
    """Dropout masks of the second epoch included: a loader draws a random number for each epoch."""
    alone, helped = (
        world(2).run(run_training, LESSONS["sgd"].remote("run"), TrainingSettings(
            folder=digits_folder, limit=130, epochs=2, batch_size=16, loader="per-sample", loader_workers=workers
        ))[0].epochs
        for workers in (0, 1)
    )  # fmt: skip
    assert [(each.loss, each.test_accuracy) for each in helped] == [(each.loss, each.test_accuracy) for each in alone]
