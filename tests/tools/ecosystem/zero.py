import torch
from common import dist, new_ddp, say, train
from torch.distributed.optim import ZeroRedundancyOptimizer

model = new_ddp()
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
say(train(model, optimizer))
optimizer.consolidate_state_dict(0)
dist.destroy_process_group()
