"""BERT on MultiNLI, as the tutorials train it. Needs a network, and the packages of `.[bert]`.

    pip install '.[bert]'
    python multinli.py                          one process, with nn.DataParallel
    torchrun --nproc-per-node 4 multinli.py     a process for each GPU, with DDP

A pair of sentences is a premise and a hypothesis. The first one entails the second, contradicts it,
or neither. Sources: Williams et al., MultiNLI, 2018, arXiv 1704.05426;
https://github.com/tunib-ai/large-scale-lm-tutorials
"""

import os
from itertools import count, islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

WEIGHTS = "bert-base-cased"  # a name of the hub, or a folder of save_pretrained
DATASET = "nyu-mll/multi_nli"
IN_FORWARD = 1  # 1: each device computes its loss; 0: DataParallel gathers the logits
STEPS = 300
BATCH = 128  # pairs of a step, on all devices together
LR = 3e-5
LENGTH = 512  # most tokens of a pair


def load(split, tokenizer):
    """The labelled pairs of a split, and a function that makes a batch of several."""
    from datasets import load_dataset  # here: whoever wants only the loop need not wait

    data = load_dataset(DATASET, split=split).filter(lambda row: row["label"] >= 0)

    def collate(rows):
        premises, hypotheses = ([row[name] for row in rows] for name in ("premise", "hypothesis"))
        options = {"truncation": True, "max_length": LENGTH, "padding": True}
        batch = tokenizer(premises, hypotheses, return_tensors="pt", **options)
        return {**batch, "labels": torch.tensor([row["label"] for row in rows])}

    return data, collate


def batches(data, collate, rank, size):
    """This rank's part of each batch, without end."""
    sampler = DistributedSampler(data, size, rank, seed=1234, drop_last=True)
    loader = DataLoader(data, BATCH // size, sampler=sampler, collate_fn=collate, drop_last=True)
    for epoch in count():
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        yield from loader


def compute_loss(model, batch):
    """The mean loss of a batch, or of this rank's part of it."""
    if IN_FORWARD:
        return model(**batch).loss.mean()  # DataParallel gathers a loss from each device
    labels = batch.pop("labels")
    return cross_entropy(model(**batch).logits, labels)


def train(model, coming, device):
    """Take STEPS steps. Yields the loss before each."""
    optimizer = torch.optim.Adam(model.parameters(), LR)
    for batch in islice(coming, STEPS):
        optimizer.zero_grad()
        loss = compute_loss(model, {name: tensor.to(device) for name, tensor in batch.items()})
        loss.backward()
        optimizer.step()
        yield loss.item()


@torch.no_grad()
def accuracy(model, data, collate, device):
    """The fraction of pairs that the model classifies correctly."""
    model.eval()
    correct = 0
    for batch in DataLoader(data, BATCH, collate_fn=collate):
        labels = batch.pop("labels")
        inputs = {name: tensor.to(device) for name, tensor in batch.items()}
        correct += (model(**inputs).logits.argmax(1).cpu() == labels).sum().item()
    return correct / len(data)


def main(rank, size, device):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    torch.manual_seed(1234)  # the last layer is not pretrained: it is drawn
    model = AutoModelForSequenceClassification.from_pretrained(WEIGHTS, num_labels=3).to(device)
    model.train()  # from_pretrained gives a model whose dropout is off
    parallel = DistributedDataParallel(model) if dist.is_initialized() else nn.DataParallel(model)
    data, collate = load("train", tokenizer)
    coming = batches(data, collate, rank, size)
    for step, loss in enumerate(train(parallel, coming, device)):
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss:.4f} on rank 0")
    if rank == 0:
        share = accuracy(model, *load("validation_matched", tokenizer), device)
        print(f"accuracy on pairs that were not trained on: {share:.2%}")


if __name__ == "__main__":
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if size > 1:
        dist.init_process_group()
    main(rank, size, device)
    if size > 1:
        dist.destroy_process_group()
