import torch
from common import DistributedDataParallel, dist, new_model, rank, say, sgd, train
from torch import nn
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(8, 8), nn.Linear(8, 8), new_model()

    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=False)
        return self.last(self.unused(x) if self.uses_all else x)


for uses_all, options in (
    (False, {"find_unused_parameters": True}),
    (True, {"static_graph": True, "gradient_as_bucket_view": True}),
    (True, {"bucket_cap_mb": 0.001, "broadcast_buffers": False}),
):
    torch.manual_seed(0)
    Checkpointed.uses_all = uses_all
    model = DistributedDataParallel(Checkpointed(), **options)
    say(train(model, sgd(model)))
model = DistributedDataParallel(new_model())
with model.no_sync():
    model(torch.ones(2, 8) * rank).sum().backward()
model(torch.ones(2, 8)).sum().backward()
say(sum(each.grad.norm() for each in model.parameters()))
dist.destroy_process_group()
