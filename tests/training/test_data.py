"""The data sets: what their files hold, and which batches come of them."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixtures import Worlds
from processes import ENOUGH
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets.mnist import MNIST, read_image_file, read_label_file

from playground import launch, report
from playground.lessons.mnist import load_mnist
from playground.training import prepare
from playground.training.data import MEAN, STD, Images, batches, partition_dataset
from playground.training.digits import draw
from playground.world import RankFailed


def test_one_loader_reads_what_torchvision_reads(digits_folder: Path) -> None:
    for split, count in (("train", 600), ("t10k", 200)):
        images = read_image_file(str(digits_folder / f"{split}-images-idx3-ubyte"))
        labels = read_label_file(str(digits_folder / f"{split}-labels-idx1-ubyte"))
        ours = Images(digits_folder, split)
        assert len(ours) == len(labels) == count
        got, classes = ours[list(range(count))]
        torch.testing.assert_close(got, (images.unsqueeze(1).float() / 255 - MEAN) / STD)
        assert torch.equal(classes, labels)
        image, label = ours[7]
        assert torch.equal(image, got[7])
        assert label == classes[7]


def test_no_samples_and_a_limit(digits_folder: Path) -> None:
    images, labels = Images(digits_folder, "train", limit=7)[[]]
    assert (images.shape, labels.shape) == ((0, 1, 28, 28), (0,))
    assert len(Images(digits_folder, "train", limit=7)) == 7


def test_a_path_that_is_not_utf_8_will_do(digits_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "\udcff").symlink_to(digits_folder)
    assert len(Images(tmp_path / "\udcff", "train")) == 600


def test_digits_vary_and_every_class_comes() -> None:
    images, labels = draw(500, torch.Generator().manual_seed(3))
    assert labels.unique().tolist() == list(range(10))
    assert len({bytes(image.flatten().tolist()) for image in images}) == 500
    assert images.amax() > 200
    assert (images.float().mean((1, 2)) > 5).all(), "every image shows something"


def batches_of(rank: int, size: int, folder: Path) -> list[int]:
    """The lengths of this rank's batches."""
    found = list(partition_dataset(Images(folder, "train", limit=17), 8)[0])
    assert {(images.dtype, images.shape[1:]) for images, _ in found} == {
        (torch.float32, (1, 28, 28))
    }
    return [len(labels) for _, labels in found]


def test_a_rank_without_samples_has_an_empty_batch(world: Worlds, digits_folder: Path) -> None:
    """17 samples in batches of 8 leave one, so that of 3 ranks two have an empty batch."""
    assert world(3).run(batches_of, digits_folder) == [[3, 3, 1], [3, 3, 0], [2, 2, 0]]


@pytest.mark.parametrize("train", [True, False])
def test_the_lessons_images_are_the_tutorial_s_and_the_machine_s(
    train: bool, data_dir: Path, digits_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`load_mnist` normalises all images at once, as the tutorial's transforms do one by one."""
    monkeypatch.setenv(prepare.DATA_DIR, str(data_dir / "digits"))
    images, labels = load_mnist(train).tensors
    tutorial = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
    data = MNIST(data_dir / "digits", train=train, transform=tutorial)
    torch.testing.assert_close(images, torch.stack([image for image, _ in data]))
    assert labels.tolist() == [label for _, label in data]
    ours, classes = Images(digits_folder, "train" if train else "t10k")[list(range(len(data)))]
    torch.testing.assert_close(images, ours)
    assert torch.equal(labels, classes)


def die_beside_a_worker(rank: int, size: int, folder: Path) -> None:
    """Fetch batches for ever; rank 1 is killed while it has a worker, whose id it reports."""
    train_set = DataLoader(
        Images(folder, "train", 64), 16, num_workers=1, multiprocessing_context="fork"
    )
    while True:
        for _ in train_set:
            dist.barrier()
            if rank == 1:
                report(workers=[child.pid for child in active_children()])
                os.kill(os.getpid(), signal.SIGKILL)


def test_the_workers_of_a_killed_rank_end_with_it(digits_folder: Path) -> None:
    events: list[Any] = []
    with pytest.raises(RankFailed, match=r"^rank 1 of 2 was killed by SIGKILL$"):
        launch(
            die_beside_a_worker,
            2,
            args=(digits_folder,),
            on_report=lambda rank, event: events.append(event),
        )
    [worker] = next(event["workers"] for event in events if "workers" in event)
    deadline = time.monotonic() + ENOUGH
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(worker)


def is_running(pid: int) -> bool:
    """Whether that process has not ended, whoever is to wait for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def sizes_of_batches(rank: int, size: int, folder: Path) -> list[float]:
    """Those of the global batches of an epoch, by the divisors of this rank's losses."""
    train_set, _ = partition_dataset(Images(folder, "train", 19), 8)
    return [samples * size for *_, samples in batches(train_set, 8)]


def test_the_last_batch_counts_by_its_own_size(world: Worlds, digits_folder: Path) -> None:
    assert world(3).run(sizes_of_batches, digits_folder) == [[8.0, 8.0, 3.0]] * 3
