import torch
from common import dist, rank, say
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

torch.manual_seed(rank)
metrics = MetricCollection(
    [MulticlassAccuracy(3), MulticlassAccuracy(3, average="none", top_k=2)][:1]
)
auroc, mean = BinaryAUROC(), MeanMetric()
for _ in range(3 + rank):
    metrics.update(torch.randn(8, 3), torch.randint(0, 3, (8,)))
    auroc.update(torch.rand(8), torch.randint(0, 2, (8,)))
    mean.update(torch.randn(8))
say(*metrics.compute().values(), auroc.compute(), mean.compute())
dist.destroy_process_group()
