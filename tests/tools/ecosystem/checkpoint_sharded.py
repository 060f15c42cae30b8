import torch
import torch.distributed.checkpoint as dcp
from common import dist, new_model, rank, say, size, total, train
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def new_sharded():
    model = fully_shard(new_model(), mesh=init_device_mesh("cpu", (size,)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


model, optimizer = new_sharded()
train(model, optimizer)
states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
dcp.save(states, checkpoint_id="sharded")
again, its_optimizer = new_sharded()
states = dict(zip(("model", "optimizer"), get_state_dict(again, its_optimizer), strict=True))
dcp.load(states, checkpoint_id="sharded")
set_state_dict(
    again, its_optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
)
say(train(model, optimizer), train(again, its_optimizer), total(again).full_tensor())
dist.barrier()
if rank == 0:
    dcp_to_torch_save("sharded", "whole.pt")
    say(sum(each.sum() for each in torch.load("whole.pt")["model"].values()))
dist.destroy_process_group()
