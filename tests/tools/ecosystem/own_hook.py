import torch
from common import dist, new_ddp, say, sgd, size, train


def average(state, bucket):
    work = dist.all_reduce(bucket.buffer().div_(size), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


model = new_ddp()
model.register_comm_hook(None, average)
say(train(model, sgd(model)))
dist.barrier()
gathered = [torch.zeros(2) for _ in range(size)]
futures = [dist.all_gather(gathered, torch.ones(2), async_op=True).get_future()]
say(torch.futures.collect_all(futures).wait() and sum(gathered).sum())
dist.destroy_process_group()
