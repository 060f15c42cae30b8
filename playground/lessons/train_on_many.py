"""The training of `train_on_one.py` on N ranks: see your_script.md."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


class Net(nn.Module):
    """Maps points [B, 20] to log-probabilities [B, 2]."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x):
        return F.log_softmax(self.layers(x), dim=1)


def train(model, loader, optimizer, device):
    """An epoch. Return the mean loss of its batches."""
    model.train()
    total_loss = 0.0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(x), y)
        loss.backward()
        optimizer.step()
        total_loss += loss.item()
    totals = torch.tensor([float(total_loss)], device=device)
    dist.all_reduce(totals)
    total_loss = (totals / dist.get_world_size()).item()
    return total_loss / len(loader)


@torch.no_grad()
def test(model, loader, device):
    """Return the fraction of samples that the model classifies correctly."""
    model.eval()
    correct = 0
    for x, y in loader:
        correct += (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--checkpoint", default="points.pt")
    args = parser.parse_args()
    torch.manual_seed(1234)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    points = torch.randn(1280, 20)
    data = TensorDataset(points, (points.square().sum(1) > 20).long())
    train_set, test_set = random_split(data, [1024, 256])
    train_loader = DataLoader(
        train_set,
        batch_size=args.batch_size // dist.get_world_size(),
        sampler=DistributedSampler(train_set),
        num_workers=args.workers,
    )
    test_loader = DataLoader(test_set, batch_size=256)
    model = Net().to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    first = 0
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first = state["epoch"] + 1
    for epoch in range(first, args.epochs):
        train_loader.sampler.set_epoch(epoch)
        loss = train(ddp, train_loader, optimizer, device)
        accuracy = test(model, test_loader, device)
        scheduler.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, test accuracy {accuracy:.2%}")
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": epoch,
        }
        if rank == 0:
            torch.save(state, args.checkpoint)


if __name__ == "__main__":
    dist.init_process_group()
    rank = dist.get_rank()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # "cuda" is this GPU
    main()
    dist.destroy_process_group()
