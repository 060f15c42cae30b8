from common import dist, new_ddp, say, sgd, total, train
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

model = new_ddp()
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = sgd(model)
for _ in range(3):
    train(model, optimizer, steps=1)
    averaged.update_parameters(model)
say(total(model), total(averaged))
dist.destroy_process_group()
