"""The models that are trained on images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    """The small convolutional network of tutorials on MNIST, 21,840 parameters.

    Images [batch, 1, 28, 28] → log-probabilities [batch, 10].
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = x.flatten(1)
        x = F.relu(self.fc1(x))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


class ResNet18(nn.Module):
    """torchvision's resnet18 for images of one channel: [batch, 1, 28, 28] → log-probabilities [batch, 10].

    11,175,370 parameters. In training each rank needs two samples or more: 28 pixels shrink to one, and BatchNorm
    cannot normalise a single value. Source: https://docs.pytorch.org/vision/stable/models/resnet.html
    """

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import resnet18

        self.layers = resnet18(num_classes=10)
        self.layers.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.layers(x), dim=1)
