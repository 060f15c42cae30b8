import torch
import torch.distributed.checkpoint as dcp
from common import dist, new_ddp, say

model = new_ddp()
state = {"model": model.state_dict(), "step": 3}
dcp.save(state, checkpoint_id="checkpoint")
beside = dist.new_group()  # for the thread that saves
dcp.async_save(state, checkpoint_id="asynchronous", process_group=beside).result()
dist.barrier()
for name in ("checkpoint", "asynchronous"):
    loaded = {"model": {key: torch.zeros_like(each) for key, each in model.state_dict().items()}}
    dcp.load(loaded, checkpoint_id=name)
    say(sum(each.sum() for each in loaded["model"].values()))
dist.destroy_process_group()
