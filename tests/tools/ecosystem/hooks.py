from common import dist, new_ddp, say, sgd, train
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

model = new_ddp()
model.register_comm_hook(None, default_hooks.bf16_compress_hook)
say(train(model, sgd(model)))
model = new_ddp()
state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
say(train(model, sgd(model), steps=5))
dist.destroy_process_group()
