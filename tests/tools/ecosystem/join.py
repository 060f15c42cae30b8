import torch
from common import dist, new_ddp, rank, say, sgd, total, train
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

model = new_ddp()
with Join([model]):
    say(train(model, sgd(model), steps=3 + 2 * rank))
say(total(model))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
with Join([model, optimizer]):
    say(train(model, optimizer, steps=5 - rank))
say(total(model))
dist.destroy_process_group()
