import torch
from common import dist, new_model, rank, say, sgd, train
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        new_model(), sharding_strategy=strategy, device_id=torch.device("cpu")
    )
    say(train(model, sgd(model)))
whole = model.state_dict()
if rank == 0:
    say(sum(each.double().sum() for each in whole.values()))
dist.destroy_process_group()
