"""Scripts that train with DistributedDataParallel and go wrong, as users write them: one rank calls
what the others do not. And right ones of the same shapes.

In a wrong script, `# mine` marks a line whose call, on some ranks, meets that of the line marked
`# theirs` on the others."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

HEAD = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
"""
PLAIN = "nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 1))"
NORMS = "nn.Sequential(nn.Linear(16, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 1))"
TAIL = """
dist.barrier()
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Script:
    """A script, and what is to be said of it."""

    size: int
    """Number of ranks."""
    module: str
    body: str
    mine: str = ""
    """The call of the line that is marked so, as the flight recorder names it."""
    theirs: str = ""
    """The same of the others' line; "finished", or words of an exception, if it is no call."""
    options: str = ""
    """Further arguments of DistributedDataParallel."""

    @property
    def text(self) -> str:
        make = f"model = DistributedDataParallel({self.module}{self.options})"
        rest = "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        return f"{HEAD.lstrip()}{make}\n{rest}{textwrap.dedent(self.body).lstrip()}{TAIL}"

    def find_line(self, mark: str) -> int:
        """The number of the line that has this mark; 0 if none has."""
        lines = self.text.splitlines()
        return next((n for n, line in enumerate(lines, 1) if line.endswith(f"# {mark}")), 0)

    def is_named_by(self, words: str) -> bool:
        """Whether both calls and their lines are in this output."""
        told = " ".join(words.split())
        lines = filter(None, [self.find_line("mine"), self.find_line("theirs")])
        return all(re.search(f"(:|line ){line}\\b", told) for line in lines) and all(
            call in told for call in (self.mine, self.theirs)
        )


FORWARD, BACKWARD = "DDP's forward", "DDP's backward"
MISTAKES = {
    "early-stop": Script(3, PLAIN, """
        total = torch.zeros(1)
        for step in range(8):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            if rank == 1 and step == 3:
                break
            loss.backward()  # theirs
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)  # mine
        """, "all_reduce", BACKWARD),
    "early-stop-before-forward": Script(3, NORMS, """
        total = torch.zeros(1)
        for step in range(8):
            if rank == 2 and step == 4:
                break
            loss = model(torch.randn(4, 16)).pow(2).mean()  # theirs
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)  # mine
        """, "all_reduce", FORWARD),
    "uneven-batches-then-a-metric": Script(2, PLAIN, """
        total = torch.zeros(3)
        for step in range(6 - rank):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            loss.backward()  # theirs
            optimizer.step()
        dist.all_reduce(total)  # mine
        """, "all_reduce", BACKWARD),
    "uneven-batches-with-buffers": Script(4, NORMS, """
        total = torch.zeros(3)
        for step in range(6 - (rank == 3)):
            loss = model(torch.randn(4, 16)).pow(2).mean()  # theirs
            loss.backward()
            optimizer.step()
        dist.all_reduce(total)  # mine
        """, "all_reduce", FORWARD),
    "uneven-batches-then-the-end": Script(2, PLAIN, """
        for step in range(6 - rank):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            loss.backward()  # theirs
            optimizer.step()
        sys.exit()
        """, "finished", BACKWARD),
    "uneven-batches-with-buffers-then-the-end": Script(3, NORMS, """
        for step in range(6 - (rank == 0)):
            loss = model(torch.randn(4, 16)).pow(2).mean()  # theirs
            loss.backward()
            optimizer.step()
        sys.exit()
        """, "finished", FORWARD),
    "first-rank-validates": Script(3, PLAIN, """
        for step in range(6):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            if rank == 0 and step == 3:
                correct = torch.zeros(1)
                dist.all_reduce(correct)  # mine
            loss.backward()  # theirs
            optimizer.step()
        """, "all_reduce", BACKWARD),
    "first-rank-evaluates-the-model": Script(3, NORMS, """
        for step in range(6):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            loss.backward()  # theirs
            optimizer.step()
            if rank == 0 and step == 2:
                model(torch.randn(4, 16))  # mine
        """, FORWARD, BACKWARD),
    "first-rank-evaluates-twice": Script(2, NORMS, """
        def evaluate():
            with torch.no_grad():
                for batch in range(2):
                    model(torch.randn(4, 16))  # mine

        for step in range(6):
            loss = model(torch.randn(4, 16)).pow(2).mean()  # theirs
            loss.backward()
            optimizer.step()
            if rank == 0:
                evaluate()
        """, FORWARD, "DDP's forward (agrees on buckets)"),
    "last-rank-evaluates-the-model": Script(2, NORMS, """
        for step in range(6):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            loss.backward()  # theirs
            optimizer.step()
            if rank == size - 1 and step == 2:
                model.eval()
                model(torch.randn(4, 16))  # mine
                model.train()
        """, FORWARD, BACKWARD),
    "barrier-too-many": Script(2, PLAIN, """
        for step in range(6):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            loss.backward()  # theirs
            optimizer.step()
            if rank == 0 and step == 3:
                dist.barrier()  # mine
        """, "barrier", BACKWARD),
    "barrier-after-saving": Script(3, NORMS, """
        import io
        for step in range(6):
            loss = model(torch.randn(4, 16)).pow(2).mean()  # theirs
            loss.backward()
            optimizer.step()
            if rank == 0 and step % 3 == 2:
                torch.save(model.module.state_dict(), io.BytesIO())
                dist.barrier()  # mine
        """, "barrier", FORWARD),
    "gather-before-saving": Script(2, PLAIN, """
        for step in range(6):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            loss.backward()  # theirs
            optimizer.step()
            if rank == 0 and step == 3:
                states = [None] * size
                dist.gather_object({"loss": float(loss)}, states)  # mine
        """, "all_gather", BACKWARD),
    "objects-of-some-ranks": Script(3, PLAIN, """
        for step in range(6):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            if rank == 1 and step == 2:
                results = [None] * size
                dist.all_gather_object(results, {"rank": rank})  # mine
            loss.backward()  # theirs
        """, "all_gather", BACKWARD),
    "options-from-the-first-rank": Script(2, PLAIN, """
        for step in range(6):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            if rank == 0 and step == 4:
                dist.broadcast_object_list([{"lr": 0.1}], src=0)  # mine
            loss.backward()  # theirs
        """, "broadcast", BACKWARD),
    "wrong-root": Script(2, PLAIN, """
        for step in range(3):
            model(torch.randn(4, 16)).pow(2).mean().backward()
            optimizer.step()
        best = torch.zeros(2)
        dist.broadcast(best, src=rank)  # mine
        """, "broadcast from rank 0", "broadcast from rank 1"),
    "metrics-of-other-lengths": Script(3, PLAIN, """
        for step in range(3):
            model(torch.randn(4, 16)).pow(2).mean().backward()
        losses = torch.zeros(200 * (rank + 1))
        every = [torch.zeros(200 * (rank + 1)) for _ in range(size)]
        dist.all_gather(every, losses)  # mine
        """, "all_gather"),
    "metrics-of-one-rank": Script(4, PLAIN, """
        for step in range(6):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            if rank == 3 and step == 2:
                every = torch.zeros(size)
                dist.all_gather_into_tensor(every, loss.detach().view(1))  # mine
            loss.backward()  # theirs
        """, "all_gather_into_tensor", BACKWARD),
    "group-of-one-rank": Script(3, PLAIN, """
        for step in range(6):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            if rank == 0 and step == 2:
                evaluators = dist.new_group([0, 1])  # mine
            loss.backward()  # theirs
        """, "new_group", BACKWARD),
    "models-in-another-order": Script(2, PLAIN, """
        other = DistributedDataParallel(nn.Linear(16, 300))
        for step in range(4):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            second = other(torch.randn(4, 16)).pow(2).mean()
            if rank == 0 or step < 2:
                loss.backward()  # mine
                second.backward()
            else:
                second.backward()  # theirs
                loss.backward()
        """, "DDP's backward of model 1", "DDP's backward of model 2"),
    "one-rank-skips-a-model": Script(2, PLAIN, """
        critic = DistributedDataParallel(nn.Linear(16, 300))
        for step in range(4):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            loss.backward()  # theirs
            if rank == 0 or step != 2:
                critic(torch.randn(4, 16)).pow(2).mean().backward()  # mine
        """, BACKWARD, BACKWARD),
    "no-sync-on-one-rank": Script(2, PLAIN, """
        import contextlib
        for step in range(6):
            with model.no_sync() if rank == 1 and step == 3 else contextlib.nullcontext():
                loss = model(torch.randn(4, 16)).pow(2).mean()
                loss.backward()  # theirs
        dist.all_reduce(torch.zeros(2))  # mine
        """, "all_reduce", BACKWARD),
    "accumulates-other-numbers": Script(3, NORMS, """
        import contextlib
        for step in range(9):
            is_last = step % (2 + (rank == 2)) == 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = model(torch.randn(4, 16)).pow(2).mean()
                loss.backward()  # theirs
        dist.all_reduce(torch.zeros(2))  # mine
        """, "all_reduce", BACKWARD),
    "unused-parameters": Script(2, "nn.ModuleDict({'a': nn.Linear(16, 1), 'b': nn.Linear(16, 1)})",
        """
        model.module.forward = lambda x: sum(model.module[name](x) for name in model.module.used)
        for step in range(4):
            model.module.used = "ab" if rank == 0 or step < 2 else "a"
            loss = model(torch.randn(4, 16)).pow(2).mean()  # mine
            loss.backward()
        """, "not used in producing loss"),
    "find-unused-and-a-skipped-step": Script(2, PLAIN, """
        for step in range(6):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            if rank == 1 and step == 2:
                dist.all_reduce(torch.zeros(2))  # mine
            loss.backward()  # theirs
        """, "all_reduce", BACKWARD, ", find_unused_parameters=True"),
    "static-graph-and-a-skipped-step": Script(3, PLAIN, """
        for step in range(6):
            if rank == 1 and step == 3:
                continue
            loss = model(torch.randn(4, 16)).pow(2).mean()
            loss.backward()  # theirs
        dist.all_reduce(torch.zeros(2))  # mine
        """, "all_reduce", BACKWARD, ", static_graph=True"),
    "schedules-on-one-rank": Script(2, PLAIN, """
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        for epoch in range(3):
            for step in range(3):
                loss = model(torch.randn(4, 16)).pow(2).mean()
                loss.backward()  # theirs
                optimizer.step()
            if rank == 0:
                valid = loss.detach().clone()
                dist.all_reduce(valid, op=dist.ReduceOp.AVG)  # mine
                scheduler.step(valid)
        """, "all_reduce", BACKWARD),
    "damaged-batch": Script(3, NORMS, """
        def read(step):
            if rank == 1 and step == 2:
                raise OSError("a damaged file")
            return torch.randn(4, 16)

        for step in range(6):
            try:
                batch = read(step)
            except OSError:
                continue
            loss = model(batch).pow(2).mean()  # theirs
            loss.backward()
        dist.all_reduce(torch.zeros(2))  # mine
        """, "all_reduce", FORWARD),
    "exception-before-backward": Script(2, NORMS, """
        for step in range(6):
            try:
                loss = model(torch.randn(4, 16)).pow(2).mean()  # theirs
                if rank == 1 and step == 2:
                    raise FloatingPointError("no finite loss")
                loss.backward()  # mine
            except FloatingPointError:
                optimizer.zero_grad()
        """, BACKWARD, FORWARD),
    "skips-nan": Script(4, NORMS, """
        for step in range(6):
            batch = torch.randn(4, 16) * (float("nan") if (rank, step) == (2, 3) else 1)
            loss = model(batch).pow(2).mean()  # theirs
            if torch.isnan(loss):
                continue
            loss.backward()  # mine
        """, BACKWARD, FORWARD),
    "reduces-on-the-root-alone": Script(2, PLAIN, """
        for step in range(6):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            if rank == 0 and step == 3:
                dist.reduce(loss.detach(), dst=0)  # mine
            loss.backward()  # theirs
        """, "reduce", BACKWARD),
    "scatter-against-broadcast": Script(2, PLAIN, """
        for step in range(2):
            model(torch.randn(4, 16)).pow(2).mean().backward()
        seed = torch.zeros(4)
        if rank == 0:
            dist.scatter(seed, [torch.zeros(4)] * size, src=0)  # mine
        else:
            dist.broadcast(seed, src=0)  # theirs
        dist.all_reduce(torch.zeros(7))
        """, "scatter", "broadcast"),
    "reduce-against-all-reduce": Script(3, PLAIN, """
        for step in range(2):
            model(torch.randn(4, 16)).pow(2).mean().backward()
        correct = torch.zeros(400)
        if rank == 0:
            dist.reduce(correct, dst=0)  # mine
        else:
            dist.all_reduce(correct)  # theirs
        """, "reduce", "all_reduce"),
    "counts-of-other-shapes": Script(2, PLAIN, """
        for step in range(2):
            model(torch.randn(4, 16)).pow(2).mean().backward()
        per_class = torch.zeros(300 + 10 * rank)
        dist.all_reduce(per_class)  # mine
        """, "all_reduce of shape [300]", "all_reduce of shape [310]"),
    "counts-of-other-dtypes": Script(2, PLAIN, """
        for step in range(2):
            model(torch.randn(4, 16)).pow(2).mean().backward()
        correct = torch.zeros(300, dtype=torch.float64 if rank else torch.float32)
        dist.all_reduce(correct)  # mine
        """, "all_reduce of float32", "all_reduce of float64"),
    "loader-with-workers": Script(2, PLAIN, """
        from torch.utils.data import DataLoader, TensorDataset
        data = TensorDataset(torch.randn(24 - 8 * rank, 16))
        for (batch,) in DataLoader(data, batch_size=4, num_workers=1):
            loss = model(batch).pow(2).mean()
            loss.backward()  # theirs
        dist.all_reduce(torch.zeros(2))  # mine
        """, "all_reduce", BACKWARD),
    "loader-with-workers-and-evaluation": Script(2, NORMS, """
        from torch.utils.data import DataLoader, TensorDataset
        loader = DataLoader(TensorDataset(torch.randn(24, 16)), batch_size=4, num_workers=1)
        for step, (batch,) in enumerate(loader):
            loss = model(batch).pow(2).mean()
            loss.backward()  # theirs
            if rank == 0 and step == 2:
                model(batch)  # mine
        """, FORWARD, BACKWARD),
    "loader-of-another-length": Script(2, NORMS, """
        from torch.utils.data import DataLoader, TensorDataset
        for (batch,) in DataLoader(TensorDataset(torch.randn(24 - 4 * rank, 16)), batch_size=4):
            loss = model(batch).pow(2).mean()  # theirs
            loss.backward()
        sys.exit()
        """, "finished", FORWARD),
    "loader-of-another-length-then-a-metric": Script(2, PLAIN, """
        from torch.utils.data import DataLoader, TensorDataset
        total = torch.zeros(3)
        for (batch,) in DataLoader(TensorDataset(torch.randn(24 - 4 * rank, 16)), batch_size=4):
            loss = model(batch).pow(2).mean()
            loss.backward()  # theirs
        dist.all_reduce(total)  # mine
        """, "all_reduce", BACKWARD),
    "leaves-out-a-backward-then-a-metric": Script(2, PLAIN, """
        total = torch.zeros(3)
        for step in range(6):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            if (rank, step) != (1, 2):
                loss.backward()  # theirs
        dist.all_reduce(total)  # mine
        """, "all_reduce", BACKWARD),
    "barrier-in-finally": Script(2, PLAIN, """
        try:
            for step in range(4):
                if rank == 1 and step == 2:
                    raise ValueError("a damaged sample")
                loss = model(torch.randn(4, 16)).pow(2).mean()
                loss.backward()  # theirs
        finally:
            dist.barrier()  # mine
        """, "barrier", BACKWARD),
    "wraps-on-one-rank": Script(2, PLAIN, """
        for step in range(4):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            if rank == 0 and step == 2:
                teacher = DistributedDataParallel(nn.Linear(4, 4))  # mine
            loss.backward()  # theirs
        """, "DDP's __init__", BACKWARD),
    "receives-what-nobody-sends": Script(3, PLAIN, """
        for step in range(4):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            if rank == 0 and step == 2:
                dist.recv(torch.zeros(1), src=1)  # mine
            loss.backward()  # theirs
        """, "receive from rank 1", BACKWARD),
    "compresses-gradients": Script(2, PLAIN, """
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        for step in range(5 - rank):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            loss.backward()  # theirs
        dist.all_reduce(torch.zeros(2))  # mine
        """, "all_reduce", BACKWARD),
    "metric-of-the-gradients-size": Script(2, "nn.Linear(4, 1, bias=False)", """
        for step in range(6):
            loss = model(torch.randn(4, 4)).pow(2).mean()
            if rank == 1 and step == 3:
                break
            loss.backward()  # theirs
        dist.all_reduce(torch.zeros(4))  # mine
        """, "all_reduce", BACKWARD),
    "metric-that-is-not-awaited": Script(2, PLAIN, """
        for step in range(6):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            if rank == 1 and step == 3:
                work = dist.all_reduce(torch.zeros(2), async_op=True)  # mine
            loss.backward()  # theirs
            optimizer.step()
        """, "all_reduce", BACKWARD),
    "average-of-weights-on-one-rank": Script(4, NORMS, """
        for step in range(6):
            loss = model(torch.randn(4, 16)).pow(2).mean()  # theirs
            loss.backward()
            if rank == 0 and step == 3:
                for weight in model.module.parameters():
                    dist.broadcast(weight.data, src=0)  # mine
        """, "broadcast", FORWARD),
    "barrier-of-all-but-the-first": Script(4, PLAIN, """
        for step in range(3):
            model(torch.randn(4, 16)).pow(2).mean().backward()
        if rank != 0:
            dist.barrier()  # mine
        loss = model(torch.randn(4, 16)).pow(2).mean()
        loss.backward()  # theirs
        """, "barrier", BACKWARD),
    "sharded-optimizer-is-saved-by-one": Script(2, PLAIN, """
        from torch.distributed.optim import ZeroRedundancyOptimizer
        sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        for step in range(4):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            loss.backward()  # theirs
            sharded.step()
            if rank == 0 and step == 2:
                sharded.consolidate_state_dict(to=0)  # mine
        """, "broadcast", BACKWARD),
}  # fmt: skip
STEPS = """
        for step in range(4):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """
RIGHT = {
    "same-batches": Script(2, PLAIN, STEPS),
    "same-batches-with-buffers": Script(3, NORMS, STEPS),
    "static-graph": Script(2, PLAIN, STEPS, options=", static_graph=True"),
    "metric-of-all": Script(3, NORMS, """
        for step in range(6):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            if step == 3:
                dist.all_reduce(loss.detach())
            loss.backward()
        """),
    "stops-together": Script(3, PLAIN, """
        for step in range(6):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            stop = torch.tensor(float(rank == 1 and step == 3))
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
            if stop:
                break
            loss.backward()
        """),
    "uneven-batches-in-join": Script(2, PLAIN, """
        with model.join():
            for step in range(6 - rank):
                model(torch.randn(4, 16)).pow(2).mean().backward()
        """),
    "uneven-batches-in-join-with-buffers": Script(3, NORMS, """
        with model.join():
            for step in range(3 + rank):
                model(torch.randn(4, 16)).pow(2).mean().backward()
        """),
    "evaluates-the-module": Script(3, NORMS, """
        for step in range(6):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            loss.backward()
            if rank == 0:
                model.module(torch.randn(4, 16))
        """),
    "evaluates-without-gradients": Script(2, NORMS, """
        for step in range(6):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            loss.backward()
            if rank == 0 and step == 2:
                with torch.no_grad():
                    model(torch.randn(4, 16))
        """),
    "saves-on-the-first": Script(3, NORMS, """
        import io
        for step in range(6):
            model(torch.randn(4, 16)).pow(2).mean().backward()
            if rank == 0:
                torch.save(model.module.state_dict(), io.BytesIO())
            dist.barrier()
        """),
    "barriers-in-two-lines": Script(2, PLAIN, """
        if rank != 0:
            dist.barrier()
        if rank == 0:
            dist.barrier()
        model(torch.randn(4, 16)).pow(2).mean().backward()
        """),
    "two-models": Script(2, PLAIN, """
        critic = DistributedDataParallel(nn.Linear(16, 300))
        for step in range(5):
            model(torch.randn(4, 16)).pow(2).mean().backward()
            if step % 2:
                critic(torch.randn(4, 16)).pow(2).mean().backward()
        """),
    "two-models-in-one-backward": Script(2, PLAIN, """
        critic = DistributedDataParallel(nn.Linear(16, 300))
        for step in range(5):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            (loss + critic(torch.randn(4, 16)).pow(2).mean()).backward()
        """),
    "accumulates": Script(3, NORMS, """
        import contextlib
        for step in range(9):
            with contextlib.nullcontext() if step % 3 == 2 else model.no_sync():
                model(torch.randn(4, 16)).pow(2).mean().backward()
        """),
    "unused-parameters-that-are-found": Script(2, "nn.ModuleList([nn.Linear(16, 1)] * 2)", """
        model.module.forward = lambda x: model.module[model.module.used](x)
        for step in range(4):
            model.module.used = (step + rank) % 2
            model(torch.randn(4, 16)).pow(2).mean().backward()
        """, options=", find_unused_parameters=True"),
    "other-losses": Script(2, PLAIN, """
        for step in range(4):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            if rank == step % 2:
                torch.ones(3, requires_grad=True).sum().backward()
            loss.backward()
        """),
    "groups": Script(4, PLAIN, """
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        for step in range(4):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            for number in range(step if rank > 1 else 1):
                dist.all_reduce(loss.detach(), group=halves[rank // 2])
            loss.backward()
        """),
    "messages-between-steps": Script(3, NORMS, """
        for step in range(4):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            if rank == 1:
                dist.send(loss.detach().view(1), 0)
            if rank == 0:
                dist.recv(torch.zeros(1), 1)
            loss.backward()
        """),
    "loader-with-workers": Script(2, NORMS, """
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
        data = TensorDataset(torch.randn(24, 16))
        for (batch,) in DataLoader(data, 4, sampler=DistributedSampler(data), num_workers=1):
            model(batch).pow(2).mean().backward()
        """),
    "objects": Script(3, PLAIN, """
        for step in range(3):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            results = [None] * size
            dist.all_gather_object(results, loss.item())
            loss.backward()
        """),
    "exception-of-all": Script(2, NORMS, """
        for step in range(6):
            try:
                loss = model(torch.randn(4, 16)).pow(2).mean()
                if step == 2:
                    raise FloatingPointError("no finite loss")
                loss.backward()
            except FloatingPointError:
                optimizer.zero_grad()
        """),
    "does-not-wait-for-the-last": Script(2, PLAIN, STEPS + """
        work = dist.all_reduce(torch.zeros(2), async_op=True)
        """),
}  # fmt: skip
