"""torchvision's resnet18 for the images of this package."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class ResNet18(nn.Module):
    """torchvision's resnet18 for images of one channel: [batch, 1, 28, 28] → log-probabilities
    [batch, 10].

    11,175,370 parameters. In training each rank needs two samples or more: 28 pixels shrink to one,
    and BatchNorm cannot normalise a single value. Source:
    https://docs.pytorch.org/vision/stable/models/resnet.html
    """

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import resnet18

        self.layers = resnet18(num_classes=10)
        self.layers.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.layers(x), dim=1)
