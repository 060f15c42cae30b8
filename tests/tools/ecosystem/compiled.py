import torch
from common import dist, new_ddp, say, sgd, train

model = torch.compile(new_ddp(), backend="aot_eager")
say(train(model, sgd(model)))
dist.destroy_process_group()
