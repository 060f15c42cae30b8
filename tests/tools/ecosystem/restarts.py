import os
from pathlib import Path

import torch
from common import dist, new_ddp, rank, say, sgd, total, train

model, snapshot = new_ddp(), Path("snapshot.pt")
optimizer, first = sgd(model), 0
if snapshot.exists():
    saved = torch.load(snapshot)
    model.load_state_dict(saved["model"])
    first = saved["step"]
for step in range(first, 6):
    train(model, optimizer, steps=1)
    dist.barrier()
    if rank == 0:
        torch.save({"model": model.state_dict(), "step": step + 1}, snapshot)
    dist.barrier()
    if step == 3 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("once")
say(total(model), first)
dist.destroy_process_group()
