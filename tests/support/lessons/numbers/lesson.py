"""Count the images of MNIST.

python -m playground numbers
"""

import os

import torch.distributed as dist
from torchvision.datasets import MNIST

BATCH_SIZES = (4, 8)  # of the loaders
TEST = True  # whether it is the test set that is counted


if __name__ == "__main__":
    dist.init_process_group("gloo")
    dist.barrier()  # no rank ends while another still connects
    images = MNIST(os.environ["PLAYGROUND_DATA_DIR"], train=not TEST)
    print(f"{len(images)} images, {BATCH_SIZES} at a time")
    dist.destroy_process_group()
