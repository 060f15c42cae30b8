import torch
from common import dist, rank, say, size

one = torch.full((2 * size,), rank + 1.0)
for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
    reduced = one.clone()
    dist.all_reduce(reduced, op)
    say(reduced.sum())
gathered, scattered = torch.empty(2 * size * size), torch.empty(2)
exchanged = torch.empty(2 * size)
dist.all_gather_into_tensor(gathered, one)
dist.reduce_scatter_tensor(scattered, one)
dist.all_to_all_single(exchanged, one)
say(gathered.sum(), scattered.sum(), exchanged.sum())
parts = [torch.empty(2 * size) for _ in range(size)] if rank == 0 else None
dist.gather(one, parts)
dist.reduce(reduced := one.clone(), 0)
dist.scatter(received := torch.empty(2), list(one.chunk(size)) if rank == 0 else None)
dist.broadcast(sent := one.clone(), size - 1)
say(reduced.sum() if rank == 0 else sum(sent), received.sum())
left, right, received = (rank - 1) % size, (rank + 1) % size, torch.empty(2 * size)
operations = [dist.P2POp(dist.isend, one, right), dist.P2POp(dist.irecv, received, left)]
for work in dist.batch_isend_irecv(operations):
    work.wait()
work = dist.all_reduce(one, async_op=True)
say(received.sum(), work.is_completed() >= 0, work.wait() and one.sum())
dist.destroy_process_group()
