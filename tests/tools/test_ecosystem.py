"""Programs as others write them, with what the ecosystem has for them: each ends under `run` as
under torchrun, with the same numbers and the same files."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ENOUGH

HEAD = """
import os
import torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

def say(*values):
    told = " ".join(f"{float(value):.6f}" for value in values)
    print(f"{rank} {told}\\n", end="", flush=True)

def new_model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def train(model, optimizer, steps=3):
    torch.manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 8)).square().mean()
        loss.backward()
        optimizer.step()
    return loss.detach()
"""
DDP = """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(new_model())
"""
PROGRAMS = {
    "ddp": HEAD + DDP + """
say(train(model, torch.optim.SGD(model.parameters(), lr=0.1)))
dist.destroy_process_group()
""",
    "fsdp2": HEAD + """
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
model, mesh = new_model(), init_device_mesh("cpu", (size,))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
say(train(model, torch.optim.AdamW(model.parameters(), lr=0.1)))
dist.destroy_process_group()
""",
    "tensor-parallel": HEAD + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module
)
mesh = init_device_mesh("cpu", (size,))
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
model = parallelize_module(new_model(), mesh, plan)
torch.manual_seed(0)
loss = model(torch.randn(6, 8)).square().mean()
loss.backward()
sharded = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)])
say(loss.detach(), model[0].weight.grad.full_tensor().norm())
say((sharded @ sharded.T).full_tensor().sum())
dist.destroy_process_group()
""",
    "checkpoint": HEAD + DDP + """
import torch.distributed.checkpoint as dcp
state = {"model": model.state_dict(), "step": 3}
dcp.save(state, checkpoint_id="checkpoint")
beside = dist.new_group()  # for the thread that saves
dcp.async_save(state, checkpoint_id="asynchronous", process_group=beside).result()
dist.barrier()
for name in ("checkpoint", "asynchronous"):
    loaded = {"model": {key: torch.zeros_like(each) for key, each in model.state_dict().items()}}
    dcp.load(loaded, checkpoint_id=name)
    say(sum(each.sum() for each in loaded["model"].values()))
dist.destroy_process_group()
""",
    "pipelining": HEAD + """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
parts = [nn.Linear(8, 16), nn.Linear(16, 4)]
stage = PipelineStage(parts[rank], rank, size, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 3, loss_fn=lambda out, target: (out - target).square().mean())
if rank == 0:
    schedule.step(torch.randn(6, 8))
    say(parts[0].weight.grad.norm())
else:
    losses = []
    schedule.step(target=torch.ones(6, 4), losses=losses)
    say(sum(losses).detach())
dist.destroy_process_group()
""",
    "zero": HEAD + DDP + """
from torch.distributed.optim import ZeroRedundancyOptimizer
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
say(train(model, optimizer))
optimizer.consolidate_state_dict(0)
dist.destroy_process_group()
""",
    "join": HEAD + DDP + """
from torch.distributed.algorithms.join import Join
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Join([model]):
    say(train(model, optimizer, steps=3 + 2 * rank))
say(sum(each.sum() for each in model.parameters()).detach())
dist.destroy_process_group()
""",
    "hooks": HEAD + DDP + """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
model.register_comm_hook(None, default_hooks.bf16_compress_hook)
say(train(model, torch.optim.SGD(model.parameters(), lr=0.1)))
model = DistributedDataParallel(new_model())
state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
say(train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=5))
dist.destroy_process_group()
""",
    "compile": HEAD + DDP + """
model = torch.compile(model, backend="aot_eager")
say(train(model, torch.optim.SGD(model.parameters(), lr=0.1)))
dist.destroy_process_group()
""",
    "objects": HEAD + """
dist.monitored_barrier()
gathered = [None] * size
dist.all_gather_object(gathered, {"rank": rank})
half = dist.new_group([0])
model = nn.SyncBatchNorm(4) if torch.cuda.is_available() else nn.BatchNorm1d(4)
one = torch.ones(1)
dist.all_reduce(one)
say(one, len(gathered))
dist.destroy_process_group()
""",
    "rpc": """
import os
import torch
import torch.distributed.rpc as rpc
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
if rank == 0:
    there = rpc.remote("worker1", torch.add, args=(torch.ones(2), 3))
    print(f"{there.to_here().tolist()} {rpc.rpc_sync('worker1', max, args=(3, 4))}\\n", end="")
rpc.shutdown()
""",
    "own-store": """
import os
from datetime import timedelta
import torch
import torch.distributed as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store, _, _ = next(dist.rendezvous("env://", rank, size))
store.set(f"key {rank}", "value")
print(f"{store.get(f'key {1 - rank}')}\\n", end="")
dist.init_process_group("gloo", store=dist.PrefixStore("mine", store), rank=rank, world_size=size)
other = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, False)
other.add("count", 1)
dist.barrier()
print(f"{other.add('count', 0)}\\n", end="")
dist.barrier()
dist.destroy_process_group()
""",
    "lightning": """
import logging, warnings
warnings.filterwarnings("ignore")
import torch
import lightning
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.full((8,), index / 64)

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)
    def training_step(self, batch, index):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(Numbers(), batch_size=8, num_workers=2))
    total = sum(each.double().sum() for each in model.parameters())
    print(f"{trainer.global_rank} {float(total):.6f}\\n", end="", flush=True)
""",
    "transformers": """
import os, warnings
warnings.filterwarnings("ignore")
import torch
from transformers.trainer_callback import PrinterCallback
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        drawn = torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": drawn, "labels": drawn}

if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = dict(vocab_size=100, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(GPT2Config(**sizes))
    arguments = TrainingArguments(
        output_dir="out", per_device_train_batch_size=8, num_train_epochs=2, report_to=[],
        dataloader_num_workers=2, save_strategy="no", use_cpu=True, disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = Trainer(model, arguments, train_dataset=Text())
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    total = sum(each.double().sum() for each in model.parameters())
    print(f"{os.environ['RANK']} {float(total):.6f}\\n", end="", flush=True)
""",
    "accelerate": """
import torch
from accelerate import Accelerator
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.arange(128.0).reshape(16, 8) / 128)
loader = torch.utils.data.DataLoader(data, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (batch,) in loader:
    optimizer.zero_grad()
    accelerator.backward(loss := model(batch).square().mean())
    optimizer.step()
losses = accelerator.gather(loss.detach())
print(f"{accelerator.process_index} {losses.sum():.6f}\\n", end="", flush=True)
accelerator.end_training()
""",
}  # fmt: skip
"""Scripts for two ranks."""
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
RUN = ("-m", "playground", "run", "-n", "2")


ABORTED = "terminate called without an active exception"
"""What gloo's threads say where torchrun's process is taken down before they have ended. It happens
to a right program now and then, on a busy machine: it is started again."""


def outcome(name: str, folder: Path, words: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The lines on stdout of a program that these words start, and the files it has written."""
    for attempt in range(5):
        here = folder / str(attempt)
        here.mkdir(parents=True)
        (here / "train.py").write_text(PROGRAMS[name])
        ran = subprocess.run(
            [sys.executable, *words, "train.py"], cwd=here, capture_output=True, text=True,
            timeout=5 * ENOUGH, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
        )  # fmt: skip
        if words == RUN or ABORTED not in ran.stderr:
            break
    assert ran.returncode == 0, ran.stderr
    files = sorted(str(file.relative_to(here)) for file in here.rglob("*"))
    return sorted(ran.stdout.splitlines()), files


@pytest.mark.stress
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_as_under_torchrun(name: str, tmp_path: Path) -> None:
    if name in ("lightning", "transformers", "accelerate") and not importlib.util.find_spec(name):
        pytest.skip(f"{name} is not installed: pip install -e .[ecosystem]")
    ours = outcome(name, tmp_path / "ours", RUN)
    assert ours == outcome(name, tmp_path / "torchruns", TORCHRUN)
    assert ours[0]
