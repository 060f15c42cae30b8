"""A script that trains by the general loop, with snapshots, and resumes from them:
`resumable_script.py DATA SNAPSHOTS STEPS_BETWEEN BATCH_SIZE LIMIT EPOCHS`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from playground.checkpoint.folder import SnapshotSettings
from playground.training.loop import train_with_ddp
from playground.training.prepare import raw_folder
from playground.training.settings import TrainingSettings

if __name__ == "__main__":
    data, snapshots = map(Path, sys.argv[1:3])
    every, batch_size, limit, epochs = map(int, sys.argv[3:])
    dist.init_process_group("gloo")
    settings = TrainingSettings(
        folder=raw_folder(data, "digits"), limit=limit, batch_size=batch_size, epochs=epochs,
        snapshots=SnapshotSettings(folder=snapshots, every=every),
    )  # fmt: skip
    train_with_ddp(dist.get_rank(), dist.get_world_size(), settings)
    dist.destroy_process_group()
