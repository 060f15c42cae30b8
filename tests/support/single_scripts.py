"""Training scripts of one process, of different shapes: what a user may have. Each saves the
weights that it has trained as `model.pt`."""

from __future__ import annotations

DATA = """
torch.manual_seed(0)
inputs = torch.randn(48, 4)
labels = (inputs.sum(1) > 0).long()
train_set = TensorDataset(inputs, labels)
test_set = TensorDataset(inputs[:10], labels[:10])
"""
PLAIN = f"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{DATA}
loader = DataLoader(train_set, batch_size=8, shuffle=SHUFFLE)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(3):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {{epoch}}: {{total / len(loader):.6f}}")
torch.save(model.state_dict(), "model.pt")
"""
FUNCTIONS = """
import argparse
import sys

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(x)


def get_data():
    torch.manual_seed(0)
    inputs = torch.randn(48, 4)
    labels = (inputs.sum(1) > 0).long()
    return TensorDataset(inputs, labels), TensorDataset(inputs[:10], labels[:10])


def train_epoch(args, model, device, loader, optimizer, epoch):
    model.train()
    running, seen = 0.0, 0
    for step, (x, y) in enumerate(loader):
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        running += loss.item() * x.size(0)
        seen += x.size(0)
        if step % args.log_interval == 0:
            print("step", step, loss.item())
    return running / seen


def evaluate(model, device, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--log-interval", type=int, default=2)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, test_set = get_data()
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=SHUFFLE)
    test_loader = DataLoader(test_set, batch_size=5)
    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(args.epochs):
        loss = train_epoch(args, model, device, train_loader, optimizer, epoch)
        accuracy = evaluate(model, device, test_loader)
        scheduler.step()
        print(f"epoch {epoch}: loss {loss:.6f}, accuracy {accuracy:.2%}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
"""
TRAINER = f"""
import torch
from torch import nn, optim
from torch.utils import data
from torch.utils.data import TensorDataset


class Trainer:
    def __init__(self, model, loader, lr):
        self.model = model
        self.loader = loader
        self.optimizer = optim.SGD(self.model.parameters(), lr=lr)
        self.history = []

    def step(self, batch):
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def fit(self, epochs):
        for epoch in range(epochs):
            total = 0
            for batch in self.loader:
                total += self.step(batch)
            self.history.append(total)
            print(epoch, total / len(self.loader))

    def save(self, path):
        torch.save(self.model.state_dict(), path)

{DATA}
if __name__ == "__main__":
    net = nn.Linear(4, 2)
    trainer = Trainer(net, data.DataLoader(train_set, 8, SHUFFLE), lr=0.1)
    trainer.fit(2)
    trainer.save("model.pt")
"""
AMP = f"""
import os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{DATA}
device = "cuda:0" if torch.cuda.is_available() else "cpu"

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

def train(model, loader, val_loader, epochs):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.02, total_steps=epochs * len(loader)
    )
    scaler = torch.amp.GradScaler(device, enabled=device != "cpu")
    best = 0.0
    for epoch in range(epochs):
        model.train()
        for x, y in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
                loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
        accuracy = validate(model, val_loader)
        if accuracy >= best:
            best = accuracy
            torch.save({{"model": model.state_dict(), "epoch": epoch}}, "best.pt")
            print("saved", accuracy)
    return best

@torch.no_grad()
def validate(model, loader):
    model.eval()
    return sum((model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in loader)

model = build().to(device)
if os.path.exists("start.pt"):
    model.load_state_dict(torch.load("start.pt"))
loader = DataLoader(train_set, batch_size=8, shuffle=SHUFFLE)
best = train(model, loader, DataLoader(test_set, batch_size=10), epochs=2)
model.load_state_dict(torch.load("best.pt")["model"])
torch.save(model.state_dict(), "model.pt")
print("best", best)
"""
ACCUMULATION = """
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

class Points(Dataset):
    def __init__(self):
        self.x = torch.randn(32, 4)

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return self.x[index], self.x[index].sum(0, keepdim=True)

torch.manual_seed(1)
BATCH, PARTS = 4, 2

def main():
    model = nn.Linear(4, 1)
    criterion = nn.MSELoss()
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.05)
    loader = DataLoader(Points(), batch_size=BATCH, shuffle=SHUFFLE, drop_last=True)
    for _ in range(2):
        for step, (x, y) in enumerate(loader, 1):
            loss = criterion(model(x), y) / PARTS
            loss.backward()
            if step % PARTS == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        print("loss", loss.item())
    print("done")
    torch.save(model.state_dict(), "model.pt")

main()
"""
HALF = f"""
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group()
{DATA}
loader = DataLoader(train_set, batch_size=8, shuffle=SHUFFLE)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
torch.save(model.state_dict(), "model.pt")
"""
STREAM = f"""
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
{DATA}

class Stream(IterableDataset):
    def __iter__(self):
        return iter(train_set)


def main():
    loader = DataLoader(Stream(), batch_size=8)
    body, head = nn.Linear(4, 8), nn.Linear(8, 2)
    model = nn.Sequential(body, nn.ReLU(), head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    torch.save(model.state_dict(), "model.pt")


main()
"""
UNPACKED = PLAIN.replace(
    "loader = DataLoader(train_set, batch_size=8, shuffle=SHUFFLE)",
    "options = {'batch_size': 8, 'shuffle': SHUFFLE}\nloader = DataLoader(train_set, **options)",
)
DRAWN = f"""
import torch
from torch import nn
from torch.utils.data import TensorDataset
{DATA}

def get_batch(n):
    rows = torch.randint(48, (n,))
    return inputs[rows], labels[rows]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x).relu())


@torch.no_grad()
def validate():
    x, y = get_batch(16)
    return nn.functional.cross_entropy(model(x), y).item()


model = Model()
parts = [{{"params": model.body.parameters()}}, {{"params": model.head.parameters(), "lr": 0.2}}]
optimizer = torch.optim.SGD(parts, lr=0.1)
for it in range(12):
    if it % 4 == 0:
        print(f"{{it}}: {{validate():.6f}}")
    x, y = get_batch(8)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save(model.state_dict(), "model.pt")
"""
SLICES = f"""
import os
import torch
from torch import nn
from torch.utils.data import TensorDataset
{DATA}
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    order = torch.randperm(48)
    for i in range(0, 48, 8):
        rows = order[i : i + 8]
        x, y = inputs[rows], labels[rows]
        optimizer.zero_grad()
        loss = ((model(x) - nn.functional.one_hot(y, 2)) ** 2).mean()
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), "new.pt")
    os.replace("new.pt", "model.pt")
"""
SAMPLED = PLAIN.replace(
    "loader = DataLoader(train_set, batch_size=8, shuffle=SHUFFLE)",
    """weights, draws = [1.0, 3.0] * 24, torch.Generator().manual_seed(0)
sampler = torch.utils.data.WeightedRandomSampler(weights, 48, generator=draws)
loader = DataLoader(train_set, batch_size=8, sampler=sampler)""",
)
AHEAD = (
    DRAWN.replace("    x, y = get_batch(8)\n", "")
    .replace("for it in range(12):", "x, y = get_batch(8)\nfor it in range(12):")
    .replace(
        "    optimizer.zero_grad()\n    loss.backward()",
        "    x, y = get_batch(8)\n    optimizer.zero_grad()\n    loss.backward()",
    )
)
TWO_MODELS = f"""
import csv
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{DATA}
loader = DataLoader(train_set, batch_size=8, shuffle=SHUFFLE)
encoder, decoder = nn.Linear(4, 2), nn.Linear(2, 4)
parameters = [*encoder.parameters(), *decoder.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.1)
with open("log.csv", "w") as file:
    log = csv.writer(file)
    for epoch in range(3):
        losses = []
        for x, _ in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(decoder(encoder(x)), x)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        log.writerow([epoch, sum(losses) / len(losses)])
        print(f"epoch {{epoch}}: {{sum(losses) / len(losses):.6f}}")
with open("log.csv") as file:
    print(len(file.readlines()))
torch.save(encoder.state_dict(), "model.pt")
"""
SUMMED = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
inputs = torch.rand(48, 4)
options = {"num_workers": 0, "pin_memory": True} if torch.cuda.is_available() else {}
train_loader = DataLoader(
    TensorDataset(inputs, inputs.flip(1)), batch_size=8, shuffle=SHUFFLE, **options
)
model = nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 4)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)


def reconstruct(made, x):
    return F.mse_loss(made, x, reduction="sum")


def train(epoch):
    model.train()
    train_loss = 0
    for x, _ in train_loader:
        x = x.to(device)
        optimizer.zero_grad()
        loss = reconstruct(model(x), x)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
    print(f"epoch {epoch}: {train_loss / len(train_loader.dataset):.6f}")


if __name__ == "__main__":
    for epoch in range(1, 4):
        train(epoch)
        torch.save(model.state_dict(), "model.pt")
    model = nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 4))
    model.load_state_dict(torch.load("model.pt"))
    print(f"loaded: {reconstruct(model(inputs), inputs).item() / len(inputs):.6f}")
"""
METERS = f"""
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class AverageMeter:
    def __init__(self):
        self.sum, self.count, self.avg = 0.0, 0, 0.0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n
        self.avg = self.sum / self.count

{DATA}

def train_epoch(model, loader, optimizer):
    losses = AverageMeter()
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.update(loss.item(), x.size(0))
    return losses.avg


@torch.no_grad()
def validate(model):
    return nn.functional.cross_entropy(model(inputs[:10]), labels[:10]).item()


def main():
    for fold in range(2):
        part = TensorDataset(inputs[fold * 16 : fold * 16 + 32], labels[fold * 16 : fold * 16 + 32])
        loader = DataLoader(part, batch_size=8, shuffle=SHUFFLE)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        model.apply(lambda part: part.requires_grad_())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1)
        for epoch in range(3):
            loss = train_epoch(model, loader, optimizer)
            value = validate(model)
            scheduler.step(value)
            sys.stdout.write(f"fold {{fold}} epoch {{epoch}} {{loss:.6f}} {{value:.6f}}\\n")
    torch.save(model.state_dict(), "model.pt")


main()
"""
ENDLESS = f"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{DATA}

def cycle(loader):
    while True:
        for batch in loader:
            yield batch


batches = cycle(DataLoader(train_set, batch_size=8, shuffle=SHUFFLE))
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(50):
    x, y = next(batches)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    if loss.item() < 0.65:
        print("enough")
        break
print(f"after {{step}} steps")
torch.save(model.state_dict(), "model.pt")
"""
BOTH = f"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{DATA}

def run_epoch(model, loader, device, optimizer=None):
    training = optimizer is not None
    model.train(training)
    total, right, seen, rows = 0.0, 0, 0, []
    with torch.set_grad_enabled(training):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            if training:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            total += loss.item() * len(y)
            right += (out.argmax(1) == y).sum().item()
            seen += len(y)
            rows.extend(y.tolist())
    return total / seen, right, len(rows)


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader = DataLoader(train_set, batch_size=8, shuffle=SHUFFLE)
    test_loader = DataLoader(test_set, batch_size=4)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        of_training = run_epoch(model, train_loader, device, optimizer)
        of_test = run_epoch(model, test_loader, device)
        print(epoch, *of_training, *of_test)
    torch.save(model.state_dict(), "model.pt")


main()
"""
PHASES = f"""
import copy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{DATA}
datasets = {{"train": train_set, "val": test_set}}
loaders = {{
    x: DataLoader(datasets[x], batch_size=8, shuffle=SHUFFLE) for x in ["train", "val"]
}}
sizes = {{x: len(datasets[x]) for x in ["train", "val"]}}


def train_model(model, optimizer, scheduler, epochs):
    best, best_state = -1.0, copy.deepcopy(model.state_dict())
    for epoch in range(epochs):
        for phase in ["train", "val"]:
            if phase == "train":
                model.train()
            else:
                model.eval()
            running_loss, running_right = 0.0, 0
            for x, y in loaders[phase]:
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    out = model(x)
                    loss = nn.functional.cross_entropy(out, y)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                running_loss += loss.item() * x.size(0)
                running_right += torch.sum(out.argmax(1) == y)
            if phase == "train":
                scheduler.step()
            accuracy = running_right.double() / sizes[phase]
            print(f"{{phase}} {{running_loss / sizes[phase]:.6f}} {{accuracy:.6f}}")
            if phase == "val" and accuracy > best:
                best, best_state = accuracy, copy.deepcopy(model.state_dict())
    model.load_state_dict(best_state)
    return model


model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
model = train_model(model, optimizer, scheduler, epochs=3)
torch.save(model.state_dict(), "model.pt")
"""
STAGES = f"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{DATA}

def get_loader(train):
    return DataLoader(train_set if train else test_set, batch_size=8, shuffle=train and SHUFFLE)


def fit(model, loader, optimizer, epochs):
    for epoch in range(epochs):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(epoch, total / len(loader))


loader = get_loader(train=True)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
model[0].requires_grad_(False)
fit(model, loader, torch.optim.SGD(model[2].parameters(), lr=0.1), 2)
model[0].requires_grad_(True)
fit(model, loader, torch.optim.SGD(model.parameters(), lr=0.1), 2)
with torch.no_grad():
    print(sum((model(x).argmax(1) == y).sum().item() for x, y in get_loader(False)))
torch.save(model.state_dict(), "model.pt")
"""
TOGETHER = f"""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{DATA}
labelled = DataLoader(train_set, batch_size=4, shuffle=SHUFFLE, drop_last=True)
others = DataLoader(TensorDataset(inputs.flip(0)), 4, SHUFFLE)
more = DataLoader(TensorDataset(torch.ones(48, 4)), batch_size=4)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    rest = iter(more)
    for (x, y), (z,) in zip(labelled, others):
        (one,) = next(rest)
        optimizer.zero_grad()
        out = model(torch.cat([x, z, one]))
        loss = nn.functional.cross_entropy(out[: len(x)], y) + 0.1 * out[len(x) :].square().mean()
        loss.backward()
        optimizer.step()
torch.save(model.state_dict(), "model.pt")
"""
BATCHES = PLAIN.replace(
    "loader = DataLoader(train_set, batch_size=8, shuffle=SHUFFLE)",
    """class Buckets:
    def __init__(self, count, size):
        self.draws = random.Random(0)
        self.batches = [range(first, first + size) for first in range(0, count, size)]

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.draws.sample(self.batches, len(self.batches)))


loader = DataLoader(train_set, batch_sampler=Buckets(48, 8))""",
).replace("import torch\n", "import random\n\nimport torch\n", 1)
PROGRESS = f"""
import csv
import logging
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{DATA}
logging.basicConfig(filename="train.log", level=logging.INFO)
log = logging.getLogger("train")
out = Path("losses.csv").open("w", newline="")
table = csv.writer(out)
loader = DataLoader(train_set, batch_size=8, shuffle=SHUFFLE)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def read_best(model):
    model.load_state_dict(torch.load(Path("best.pt")))
    return model


best = float("inf")
for epoch in range(3):
    total = 0.0
    for index, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
        if index % 2 == 0:
            print(f"epoch {{epoch}} [{{index * len(x)}}/{{len(loader.dataset)}}]")
            current = (index + 1) * len(x)
            print("up to {{}}".format(current))
    table.writerow([epoch, f"{{total:.4f}}"])
    log.info("epoch %d", epoch)
    if total < best:
        best = total
        torch.save(model.state_dict(), Path("best.pt"))
out.close()
model = read_best(model)
print(Path("losses.csv").read_text().split())
torch.save(model.state_dict(), "model.pt")
"""
SHAPES = {
    "a plain loop": PLAIN,
    "functions and main": FUNCTIONS,
    "a class Trainer": TRAINER,
    "mixed precision, a schedule, the best model": AMP,
    "accumulation and clipping": ACCUMULATION,
    "half of it": HALF,
    "a stream": STREAM,
    "arguments of a loader unpacked": UNPACKED,
    "batches that it draws": DRAWN,
    "slices": SLICES,
    "a sampler of its own": SAMPLED,
    "a batch that is drawn ahead": AHEAD,
    "two models, losses in a list, a log in a file": TWO_MODELS,
    "folds, a meter, a rate that is lowered by a value": METERS,
    "a loader without an end, a stop by the loss": ENDLESS,
    "losses that are summed, a global loader, a model loaded anew": SUMMED,
    "one function for training and tests": BOTH,
    "a loop over phases": PHASES,
    "two trainings of one model, of other parameters": STAGES,
    "three loaders at once": TOGETHER,
    "a sampler of batches": BATCHES,
    "lines of progress, files of results, the best model read anew": PROGRESS,
}
