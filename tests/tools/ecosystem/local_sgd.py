from common import dist, new_ddp, say, sgd, total, train
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

model = new_ddp()
state = PostLocalSGDState(process_group=None, subgroup=dist.group.WORLD, start_localSGD_iter=2)
model.register_comm_hook(state, post_localSGD_hook)
averager = PeriodicModelAverager(period=2, warmup_steps=2)
say(train(model, PostLocalSGDOptimizer(optim=sgd(model), averager=averager), steps=6))
say(total(model))
dist.destroy_process_group()
