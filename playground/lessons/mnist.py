"""MNIST in memory, and a small network for it. Given: read it once.

Source: the network of https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html
"""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

MEAN, STD = 0.1307, 0.3081  # of the pixels of the training set


def load_mnist(train=True):
    """Normalised images [N, 1, 28, 28] and labels [N], in the memory of the default device.

    The files must be in the folder PLAYGROUND_DATA_DIR, or else in data. Download them once, by
    MNIST("data", download=True), before ranks start. If every rank did, they would write the same
    files at the same time.
    """
    from torchvision.datasets import MNIST  # here: whoever wants only the network need not wait

    mnist = MNIST(os.environ.get("PLAYGROUND_DATA_DIR", "data"), train=train)
    device = torch.get_default_device()
    images = mnist.data.to(device).unsqueeze(1) / 255
    return TensorDataset((images - MEAN) / STD, mnist.targets.to(device))


class Net(nn.Module):
    """Maps images [B, 1, 28, 28] to log-probabilities [B, 10]."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)  # 20 channels of 4 x 4 pixels
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


@torch.no_grad()
def accuracy(model, data):
    """The fraction of samples that the model classifies correctly, with dropout turned off."""
    images, labels = data.tensors
    model.eval()
    correct = model(images).argmax(1) == labels
    model.train()
    return correct.float().mean().item()
