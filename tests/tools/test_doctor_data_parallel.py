"""What the doctor says of a training in one process: the lines that it says to add make a script
data parallel, what is there is said to be there, and what the text does not show is unknown."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from pathlib import Path

import pytest
import torch
from fixtures import Ran, Run, Save
from programs import Outcome
from single_scripts import (
    ACCUMULATION,
    AMP,
    BATCHES,
    BOTH,
    DRAWN,
    ENDLESS,
    FUNCTIONS,
    HALF,
    METERS,
    PHASES,
    PLAIN,
    SAMPLED,
    SHAPES,
    STAGES,
    SUMMED,
    TOGETHER,
    TRAINER,
)
from widths import too_wide

from playground.base.remote import ROOT
from playground.tools.doctor.data_parallel.edits import apply_edits, show_edits
from playground.tools.doctor.data_parallel.names import find_unbound
from playground.tools.doctor.data_parallel.parts import Part, Plan, Status
from playground.tools.doctor.data_parallel.plan import plan, plan_of_half, plan_of_text

CLOSE = 1e-6
"""Largest difference of a weight: sums in another order."""
ECOSYSTEM = Path(__file__).parent / "ecosystem"


def shape(source: str, shuffle: bool = False) -> str:
    return source.replace("SHUFFLE", str(shuffle))


def status(found: Plan) -> dict[str, str]:
    return {part.name: part.status for part in found.parts}


def weights() -> dict[str, torch.Tensor]:
    found = torch.load("model.pt")
    Path("model.pt").unlink()
    return dict(found)


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def run_both(source: str, save: Save, run_it: Ran) -> tuple[Outcome, Outcome]:
    """A script on one rank, and its changed text on several."""
    save(source, "before.py")
    save(plan(source, "before.py").after, "after.py")
    before, after = run_it("-n", 1, "before.py"), run_it("after.py")
    assert after.code == 0, after.err
    return before, after


@pytest.mark.parametrize("name", SHAPES)
def test_the_lines_make_it_the_training_of_one_process(save: Save, run_it: Ran, name: str) -> None:
    source = shape(SHAPES[name])
    save(source, "before.py")
    save(plan(source, "before.py").after, "after.py")
    before = run_it("-n", 1, "before.py")
    expected = weights()
    after = run_it("after.py")
    assert (before.code, after.code) == (0, 0), after.err
    assert difference(weights(), expected) < CLOSE
    assert "playground: wrong" not in after.err
    assert "probably wrong" not in after.err
    assert after.err == ""
    ours, theirs = after.out.splitlines(), before.out.splitlines()
    assert len(ours) == len(theirs)  # once, and not by each rank
    for one, other in zip(ours, theirs, strict=True):
        if "step" not in one:  # which is of rank 0's samples, as the doctor notes
            assert words_and_numbers(one) == words_and_numbers(other)


def words_and_numbers(line: str) -> list[object]:
    """The words of a line, and its numbers to four digits."""
    found: list[object] = []
    for word in line.replace("%", "").replace(":", "").replace(",", "").split():
        try:
            found.append(f"{float(word):.3f}")
        except ValueError:
            found.append(word)
    return found


@pytest.mark.parametrize("source", [PLAIN, TRAINER], ids=["plain", "class"])
def test_with_a_shuffle_it_is_the_same_on_any_number_of_ranks(
    save: Save, run_it: Ran, source: str
) -> None:
    save(plan(shape(source, shuffle=True), "train.py").after)
    found = []
    for size in (1, 2, 4):
        ran = run_it("-n", size, "train.py")
        assert ran.code == 0, ran.err
        found.append(weights())
    assert difference(found[1], found[0]) < CLOSE
    assert difference(found[2], found[0]) < CLOSE


def test_the_command_says_it_line_by_line(save: Save, run_cli: Run) -> None:
    save(shape(PLAIN, shuffle=True))
    done = run_cli("doctor", "train.py")
    assert done.code == 1
    assert done.err == (
        "playground: train.py is not data parallel: start, sampler, set_epoch, model,\n"
        "logging and saving by rank 0, metrics over ranks.\n"
        "With these lines try\n"
        "  python -m playground run -n 2 train.py\n"
        "  python -m playground doctor train.py\n"
        "To write these lines: python -m playground doctor --write FILE train.py\n"
    )
    order = [
        "1. start, missing", "dist.init_process_group()", "2. device, not needed",
        "3. sampler, missing", "12 - loader = DataLoader(train_set, batch_size=8, shuffle=True)",
        "+ loader = DataLoader(train_set, batch_size=8 // dist.get_world_size(), "
        "sampler=DistributedSampler(train_set))",
        "4. set_epoch, missing", "15   for epoch in range(3):",
        "+     loader.sampler.set_epoch(epoch)", "5. model, missing",
        "+ ddp = DistributedDataParallel(model)",
        "+         loss = nn.functional.cross_entropy(ddp(x), y)",
        "6. logging and saving by rank 0, missing", "+     if rank == 0:",
        "7. metrics over ranks, missing", "+     dist.all_reduce(totals)", "8. stop, not needed",
        "9. resume, not needed",
    ]  # fmt: skip
    places = [done.out.index(each) for each in order]
    assert places == sorted(places)
    lines = [line for line in done.out.splitlines() if " + " not in line and " - " not in line]
    assert too_wide("\n".join(lines), 80) == []


def test_the_document_has_the_script_with_all_lines(save: Save, run_cli: Run) -> None:
    save(shape(PLAIN))
    document = json.loads(run_cli("doctor", "--json", "train.py").out)
    assert document["after"] == plan(shape(PLAIN), "train.py").after
    assert [part["status"] for part in document["plan"]["parts"]].count("missing") == 6


def test_a_script_that_has_all_of_it_lacks_nothing(save: Save, run_cli: Run) -> None:
    for source in (PLAIN, FUNCTIONS, AMP, ACCUMULATION):
        after = plan(shape(source), "train.py").after
        save(after)
        assert plan_of_text(Path("train.py")) is None
        assert plan_of_half(Path("train.py")) is None
        again = plan(after, "train.py")
        assert {part.name for part in again.parts if part.status is Status.MISSING} <= {
            "set_epoch"
        }, status(again)
        assert status(again)["model"] == Status.THERE


def test_a_script_that_has_a_half_of_it_is_told_the_other(save: Save, run_cli: Run) -> None:
    save(shape(HALF))
    done = run_cli("doctor", "train.py")
    assert done.code == 1
    assert "1. start, there: train.py:7 forms the process group" in done.out
    assert "is not data parallel: sampler, set_epoch, model" in done.err
    wrapped = shape(HALF).replace(
        "model = nn.Linear(4, 2)",
        "model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))",
    )
    save(wrapped)
    done = run_cli("doctor", "--seconds", "20", "train.py")  # it is run, as any that communicates
    assert "5. model, there: train.py:16 wraps the model" in done.out
    assert "3. sampler, missing: train.py:15 would give every rank all samples" in done.out


STOPS = """
import torch
from torch import nn
from torch.utils.data import DataLoader
torch.manual_seed(42)
data = torch.randn(64, 4)
train_loader, val_loader = DataLoader(data, batch_size=8), DataLoader(data, batch_size=8)
model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
@torch.no_grad()
def evaluate(loader):
    total = 0.0
    for x in loader:
        total += model(x).sum().item()
    return total
best, patience = 0.0, 0
for epoch in range(9):
    running = 0.0
    for x in train_loader:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.item()
    print(running)
    val_loss = evaluate(val_loader)
    if val_loss < best:
        best, patience = val_loss, 0
    else:
        patience += 1
        if patience >= 3:
            break
"""


def notes_of(source: str, name: str) -> list[str]:
    [part] = [each for each in plan(source, "train.py").parts if each.name == name]
    return [*part.notes]


INLINE = """
    val_loss = 0.0
    with torch.no_grad():
        for x in val_loader:
            val_loss += model(x).square().mean().item()
    val_loss /= len(val_loader)
"""
OF_LOSSES = """
    losses = []
    with torch.no_grad():
        for x in val_loader:
            losses.append(model(x).square().mean().item())
    val_loss = sum(losses) / len(losses)
"""
BY_WITH = """
def evaluate(loader):
    total = 0.0
    with torch.no_grad():
        for x in loader:
            total += model(x).sum().item()
    return total
"""
WEIGHTS = """
    with torch.no_grad():
        val_loss = model[0].weight.norm()
"""
EVALUATE = STOPS[STOPS.index("@torch") : STOPS.index("best, patience")]
CALL = "\n    val_loss = evaluate(val_loader)\n"
COUNTS = STOPS[STOPS.index("    if val_loss < best") :]
STOPPER = """
class Stopper:
    def __init__(self):
        self.best, self.bad, self.stops = 1e9, 0, False
    def step(self, value):
        self.bad = 0 if value < self.best else self.bad + 1
        self.best, self.stops = min(value, self.best), self.bad >= 3
stopper = Stopper()
"""
BY_STOPPER = """    print(f"{val_loss:.4f}")
    stopper.step(val_loss)
    if stopper.stops:
        break
"""
STOPPING = {
    "a function with a decorator": STOPS,
    "a function with a block": STOPS.replace(EVALUATE, BY_WITH),
    "inline": STOPS.replace(CALL, INLINE),
    "a list of losses": STOPS.replace(CALL, OF_LOSSES),
    "at once": STOPS.replace(COUNTS, "    if val_loss > best:\n        break\n"),
    "a class": STOPS.replace(COUNTS, BY_STOPPER).replace("best, pat", f"{STOPPER}best, pat"),
}


def stop_of(source: str) -> Part:
    [part] = [each for each in plan(source, "train.py").parts if each.name == "stop"]
    return part


@pytest.mark.parametrize("name", STOPPING)
def test_a_stop_by_what_each_rank_computes_is_by_the_value_of_rank_0(name: str) -> None:
    part = stop_of(STOPPING[name])
    [line] = [
        at for at, text in enumerate(STOPPING[name].splitlines(), 1) if text.strip() == "break"
    ]
    assert part.saw == (
        f"train.py:{line} leaves the loop by val_loss, which may differ between ranks: one would "
        "stop alone, and the others wait forever. Broadcast it from rank 0 first"
    )
    [edit] = part.edits
    assert edit.text == (
        "    decided = torch.tensor([val_loss])\n"
        "    dist.broadcast(decided, 0)\n"
        "    val_loss = decided.item()\n"
    )
    after = plan(STOPPING[name], "train.py").after
    stop = next(each for each in ("    if val_loss", "    stopper.step") if each in after)
    assert after.index("model(x).s") < after.index(edit.text) < after.index(stop)
    assert stop_of(after).status is Status.THERE


def test_an_evaluation_within_the_training_s_function_stops_it() -> None:
    """Only its forwards are without gradients: not what it makes of their results."""
    within = """
    losses = []
    for x in val_loader:
        with torch.no_grad():
            loss = model(x).square().mean()
        losses.append(loss.item())
    val_loss = sum(losses) / len(losses)
"""
    part = stop_of(STOPS.replace("    val_loss = evaluate(val_loader)\n", within))
    assert part.status is Status.MISSING
    assert "leaves the loop by val_loss" in part.saw


def test_the_value_is_broadcast_before_it_is_compared_wherever_the_stop_is() -> None:
    late = STOPS.replace("        if patience", "    if patience").replace(
        "            break", "        break"
    )
    [edit] = stop_of(late).edits
    after = plan(late, "train.py").after
    assert after.index(edit.text) < after.index("    if val_loss < best")
    seldom = f"    if epoch % 2:\n{textwrap.indent(CALL + COUNTS, '    ')}    if patience >= 3:\n"
    rare = STOPS.replace(CALL + COUNTS, f"\n{seldom}        break\n")
    [edit] = stop_of(
        rare.replace("            if patience >= 3:\n                break\n", "")
    ).edits
    assert edit.text.startswith("        decided =")


def test_what_is_no_number_is_broadcast_as_it_is() -> None:
    held = STOPS.replace("val_loss < best", "val_loss['loss'] < best")
    [edit] = stop_of(held.replace("return total", "return {'loss': total}")).edits
    assert "    decided = [val_loss]\n    dist.broadcast_object_list(decided, 0)\n" in edit.text
    tensors = STOPS.replace("val_loss < best", "val_loss.item() < best").replace(".item()\n", "\n")
    [edit] = stop_of(tensors).edits
    assert edit.text == "    val_loss = val_loss.clone()\n    dist.broadcast(val_loss, 0)\n"


def test_lines_that_have_no_place_are_noted() -> None:
    part = stop_of(STOPS.replace("= evaluate(val_loader)", "= evaluate(val_loader); print()"))
    assert part.status is Status.MISSING
    assert not part.edits
    assert [*part.notes] == [
        "before it is compared, on all ranks: `decided = torch.tensor([val_loss]); "
        "dist.broadcast(decided, 0); val_loss = decided.item()`"
    ]


def test_a_stop_that_all_ranks_make_is_left_as_it_is() -> None:
    for right in (
        STOPS.replace("patience >= 3", "epoch >= 3").replace("else:", "if epoch:"),
        STOPS.replace("val_loss = evaluate(val_loader)", "val_loss = running"),  # which is averaged
        STOPS.replace("            break", "            print()"),
        STOPS.replace(COUNTS, "    if len(data) < 3:\n        break\n"),
        STOPS.replace(CALL, WEIGHTS),
    ):
        assert stop_of(right).status is Status.NOT_NEEDED, right
    told = STOPS.replace("patience += 1", "patience += 1\n        dist.broadcast(stop, 0)")
    assert stop_of(told).status is Status.THERE


EARLY = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
x = torch.randn(400, 8)
y = (x @ torch.randn(8, 4) + torch.randn(400, 4)).argmax(1)
train_loader = DataLoader(TensorDataset(x[:320], y[:320]), batch_size=32, shuffle=True)
val_set = TensorDataset(x[320:], y[320:])
val_loader = DataLoader(val_set, batch_size=40)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
best, bad = float("inf"), 0
for epoch in range(40):
    model.train()
    for xb, yb in train_loader:
        xb, yb = xb.to(device), yb.to(device)
        optimizer.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        optimizer.step()
    model.eval()
    val_loss = 0.0
    with torch.no_grad():
        for xb, yb in val_loader:
            xb, yb = xb.to(device), yb.to(device)
            val_loss += F.cross_entropy(model(xb), yb, reduction="sum").item()
    val_loss /= len(val_set)
    if val_loss < best:
        best, bad = val_loss, 0
    else:
        bad += 1
        if bad > 1:
            print("early stop")
            break
"""


def test_ranks_with_statistics_of_their_own_stop_together(save: Save, run_it: Ran) -> None:
    part = stop_of(EARLY)
    assert "train.py:37 leaves the loop by val_loss, which differs between ranks" in part.saw
    after = plan(EARLY, "train.py").after
    counted = after.replace('print("early stop")', 'print("early stop", epoch)')
    shown = counted.replace(
        "    if val_loss < best:", "    print(rank, epoch)\n    if val_loss < best:"
    )
    save(shown)
    done = run_it("train.py")
    assert done.code == 0, done.err
    epochs = [[line for line in done.out.splitlines() if line.startswith(rank)] for rank in "01"]
    assert len(epochs[0]) == len(epochs[1]) < 40
    assert done.out.count("early stop") == 1


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ("torchvision.models.resnet18()", "torchvision.models.resnet18 makes a model with BatchNor"
         "m, so that each rank normalises by its own part of the batch"),
        ("torchvision.models.vgg16_bn()", "torchvision.models.vgg16_bn makes a model with BatchNor"
         "m, so"),
        ("nn.Sequential(torchvision.models.efficientnet_b0(), nn.Linear(9, 2))",
         "torchvision.models.efficientnet_b0 makes a model with BatchNorm, so"),
        ("timm.create_model('x')", "if timm.create_model makes a model with BatchNorm, each rank"),
        ("Net()", "if Net makes a model with BatchNorm, each rank normalises by its own part"),
        ("torchvision.models.get_model('x')", "if torchvision.models.get_model makes a model with"),
        ("torchvision.models.vgg16()", ""),
        ("torchvision.models.vit_b_16()", ""),
        ("nn.Linear(4, 2)", ""),
        ("nn.SyncBatchNorm.convert_sync_batchnorm(torchvision.models.resnet18())", ""),
    ],
)  # fmt: skip
def test_a_model_of_another_file_may_have_batch_norm(made: str, told: str) -> None:
    source = shape(PLAIN).replace("import torch\n", "import torch, torchvision, timm\n", 1)
    source = re.sub(r"model = nn.Seq.*", f"model = {made}", source.replace("import nn\n", (
        "import nn\nfrom net import Net\n"
    ), 1))  # fmt: skip
    notes = notes_of(source, "model")
    assert len(notes) == bool(told)
    assert all(each.split(": ", 1)[1].startswith(told) for each in notes)


def test_what_a_model_has_of_its_own_on_each_rank_is_noted() -> None:
    norms = STOPS.replace("nn.Dropout(0.1)", "nn.BatchNorm1d(4)")
    [walks] = notes_of(norms, "metrics over ranks")
    assert "the results differ a little: each rank has BatchNorm statistics of its own" in walks
    assert walks.endswith("(train.py:8). Print the values of rank 0")
    norms_note, _ = notes_of(norms.replace("nn.Linear(4, 1)", "nn.Dropout(0.1)"), "model")
    assert norms_note.endswith(
        "on GPUs, add before the wrapper: model = "
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)"
    )
    [masks] = notes_of(STOPS, "model")
    assert masks.startswith("train.py:8: with one seed on all ranks (train.py:5), dropout draws")
    assert "\ntorch.manual_seed(42 + rank)\nfor epoch in" in plan(STOPS, "train.py").after
    assert notes_of(STOPS.replace("manual_seed(42)", "manual_seed(get_rank())"), "model") == []


def test_a_rate_that_is_multiplied_by_the_number_of_ranks_is_noted() -> None:
    scaled = shape(HALF).replace("lr=", "lr=dist.get_world_size() * ")
    assert scaled != shape(HALF)
    [_, told] = notes_of(scaled, "sampler")
    assert "multiplies the learning rate by the number of ranks" in told
    assert len(notes_of(shape(HALF), "sampler")) == 1


APART = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
dist.init_process_group()
rank = dist.get_rank()
torch.manual_seed(0)
data = torch.randn(44, 4)
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
test_loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for x in loader:
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    number = right = 0
    with torch.no_grad():
        for x in test_loader:
            right += (model.module(x).sign() == x.sum(1, keepdim=True).sign()).sum().item()
            number += len(x)
    if rank == 0:
        print(right / number, number)
dist.destroy_process_group()
"""


def test_an_evaluation_of_one_rank_s_part_is_to_be_added_up(save: Save, run_it: Ran) -> None:
    found = plan_of_half(Path(save(APART, "apart.py")))
    assert found
    assert found.lacks == ["metrics over ranks"]
    save(found.after, "after.py")
    done = run_it("after.py")
    assert done.code == 0, done.err
    assert {line.split()[-1] for line in done.out.splitlines()} == {"44"}
    summed = APART.replace("    if rank", "    dist.all_reduce(torch.ones(1))\n    if rank")
    assert plan_of_half(Path(save(summed, "summed.py"))) is None


def test_an_evaluation_by_one_rank_needs_no_sampler() -> None:
    """What it were to add up with the others would wait for them."""
    head, _, rest = APART.partition("    number = right = 0\n")
    body, _, end = rest.partition("    if rank == 0:\n")
    under = "    if rank == 0:\n        number = right = 0\n"
    found = plan(head + under + textwrap.indent(body, "    ") + end, "train.py")
    [part] = [each for each in found.parts if "metrics" in each.name]
    assert part.saw.startswith("only one rank evaluates (train.py:23), with a sampler")
    assert not part.edits
    assert "leave out the sampler" in part.notes[0]


def test_an_all_reduce_of_gradients_is_no_metric() -> None:
    step = "        optimizer.step()"
    source = APART.replace(step, f"        dist.all_reduce(model.module.weight.grad)\n{step}", 1)
    [part] = [each for each in plan(source, "train.py").parts if "metrics" in each.name]
    assert part.status is Status.MISSING


OWN_BATCHES = """
import torch
x, y = torch.randn(32, 4), torch.randn(32, 1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for start in range(0, 32, 8):
    loss = (model(x[start:start + 8]) - y[start:start + 8]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
DIVIDED_BY_RANK = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset
dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
data = torch.randn(101, 4)
mine = Subset(data, range(rank, 101, size))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x in DataLoader(mine, batch_size=10):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
"""
UNKNOWN = {
    "data that is divided by rank": (DIVIDED_BY_RANK, "sampler", "train.py:8 seems to divide"),
    "data that is indexed by rank": (
        DIVIDED_BY_RANK.replace("Subset(data, range(rank, 101, size))", "data[rank::size]"),
        "sampler", "train.py:8 seems to divide",
    ),
    "batches that are cut by hand": (OWN_BATCHES, "sampler", "walks a DataLoader is not seen"),
    "no loop": ("import torch\nx = torch.ones(1, requires_grad=True)\nx.backward()", "model",
                "no loop over batches is seen"),
    "batches that are divided by rank": (
        DIVIDED_BY_RANK.replace("mine, batch_size=10", "data, batch_sampler=Own(rank, size)"),
        "sampler", "train.py:12 seems to divide",
    ),
    "one loader for all": (
        shape(PLAIN) + "for x, y in loader:\n    print(model(x))\n",
        "sampler", "makes the loader of the training and that of train.py:25",
    ),
    "a model of another file": (
        shape(PLAIN).replace("model(x), y", "trainer.model(x), y"), "model",
        "no call of the model that the optimizer has is seen in the loop",
    ),
    "DataParallel": (
        shape(PLAIN).replace("optimizer =", "model = nn.DataParallel(model)\noptimizer =")
        + "print(model.module)\n",
        "model", "has DataParallel, which is of one process",
    ),
    "arguments that may be anything": (
        shape(PLAIN).replace("shuffle=False", "**options"), "sampler", "unpacks its arguments",
    ),
    "a loader of another file": (
        shape(PLAIN).replace("import torch\n", "import torch\nfrom data import get_data\n", 1)
        .replace("loader = DataLoader(train_set, batch_size=8, shuffle=False)",
                 "loader, _ = get_data()"),
        "sampler", "walks what data.get_data makes, which is not read here",
    ),
    "a loader of another package": (
        shape(PLAIN).replace("import torch\n", "import torch\nfrom torchtext import data\n", 1)
        .replace("DataLoader(train_set, batch_size=8, shuffle=False)", "data.Iterator(train_set)"),
        "sampler", "walks what torchtext.data.Iterator makes",
    ),
    "a count without an end": (
        "from itertools import count\n" + OWN_BATCHES.replace("range(0, 32, 8)", "count(0, 8)"),
        "sampler", "walks a DataLoader is not seen",
    ),
    "a state from batch to batch": (
        shape(DRAWN).replace("model(x)", "model(x, state)").replace(
            "loss =", "found, state = model(x, state)\n    loss ="),
        "sampler", "hands a state from batch to batch",
    ),
    "a GPU by its number": (
        shape(PLAIN).replace("nn.Linear(8, 2))", "nn.Linear(8, 2)).to(gpu_id)"),
        "device", "moves to a GPU by its number",
    ),
    "while": (
        PLAIN.replace("for epoch in range(3):", "epoch = 0\nwhile (epoch := epoch + 1) < 4:"),
        "set_epoch", "counts its epochs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_the_text_does_not_show_is_unknown(name: str) -> None:
    source, part, words = UNKNOWN[name]
    found = plan(source, "train.py")
    [told] = [each for each in found.parts if each.name == part]
    assert told.status is Status.UNKNOWN
    assert words in told.saw
    assert told.edits == ()
    ast.parse(found.after)


def test_a_sampler_without_a_generator_draws_the_same_on_all_ranks() -> None:
    """torch's own is given one; of another one it is said."""
    drawn = SAMPLED.replace(", generator=draws", "")
    assert "(weights, 48, generator=torch.Generator().manual_seed(0))" in plan(drawn, "a.py").after
    own = SAMPLED.replace("torch.utils.data.WeightedRandomSampler", "Mine")
    [part] = [each for each in plan(own, "a.py").parts if each.name == "sampler"]
    assert "all ranks have to draw the same order" in part.notes[-1]


def test_a_rank_that_chooses_a_device_divides_no_data() -> None:
    source = DIVIDED_BY_RANK.replace("range(rank, 101, size)", "range(101)").replace(
        "torch.randn(101, 4)", "torch.randn(101, 4).to(rank)[: 100 if rank == 0 else 100]"
    )
    [part] = [each for each in plan(source, "train.py").parts if each.name == "sampler"]
    assert part.status is Status.MISSING


def test_what_a_print_calls_is_called_on_all_ranks() -> None:
    """They may meet there, or draw random numbers."""
    source = shape(FUNCTIONS).replace(
        "loss = train_epoch(args, model, device, train_loader, optimizer, epoch)",
        "print(train_epoch(args, model, device, train_loader, optimizer, epoch))",
    )
    after = plan(source, "train.py").after
    called = (
        "shown = train_epoch(args, ddp, device, train_loader, optimizer, epoch)  # on all ranks"
    )
    assert f"        {called}\n        if rank == 0:\n            print(shown)\n" in after
    two_lines = source.replace("print(train_epoch(args,", "print(train_epoch(args,\n           ")
    [part] = [each for each in plan(two_lines, "train.py").parts if "logging" in each.name]
    assert "train.py:67 calls train_epoch, in which all ranks meet" in part.notes[0]
    changed = [line.split()[0] for line in show_edits(two_lines, part.edits) if " - " in line]
    assert not {"67", "68"} & {*changed}


def test_a_print_that_only_makes_a_text_stays_one_line() -> None:
    own = "def tell(total):\n    return '{:.6f}'.format(total)\n\n\nfor epoch in range(3):"
    source = shape(PLAIN).replace("for epoch in range(3):", own)
    source = source.replace("{total / len(loader):.6f}", "{tell(total)}")
    assert 'if rank == 0:\n        print(f"epoch {epoch}: {tell(total)}")' in (
        plan(source, "train.py").after
    )


WRITTEN = """
import torch
from tensorboardX import SummaryWriter
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 4), torch.zeros(48, dtype=torch.long))
class Log:
    def __init__(self, folder):
        self.writer = SummaryWriter(folder) if folder else None
    def show(self, name, value, step):
        if self.writer is not None:
            self.writer.add_scalar(name, value, step)
def note(writer, model):
    for name, value in model.named_parameters():
        writer.add_histogram(name, value.sum().item(), 0)
def main():
    model, writer, log = nn.Linear(4, 2), SummaryWriter(log_dir="one"), Log("two")
    loader = DataLoader(data, batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SummaryWriter("three") as third:
        for epoch in range(2):
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            writer.add_scalar("loss", loss.item(), epoch)
            log.show("loss", loss.item(), epoch)
            third.add_scalar("loss", loss.item(), epoch)
            note(writer, model)
    writer.flush()
    log.writer.close()
if __name__ == "__main__":
    main()
"""
TENSORBOARD = """
import os
class SummaryWriter:
    def __init__(self, log_dir):
        os.makedirs(log_dir, exist_ok=True)
        self.file = open(f"{log_dir}/events.{os.getpid()}", "w")
    def add_scalar(self, name, value, step):
        print(name, f"{value:.4f}", step, file=self.file)
    add_histogram = add_scalar
    def flush(self): self.file.flush()
    def close(self): self.file.close()
    def __enter__(self): return self
    def __exit__(self, *error): self.close()
"""


def test_a_log_is_written_by_rank_0_as_by_one_process(save: Save, run_it: Ran) -> None:
    save(TENSORBOARD, "tensorboardX.py")
    save(WRITTEN, "before.py")
    after = plan(WRITTEN, "train.py").after
    save(after, "after.py")
    found = []
    for size, name in ((1, "before.py"), (2, "after.py")):
        done = run_it("-n", size, name)
        assert (done.code, done.err) == (0, "")
        files = sorted(Path().glob("*/events.*"))
        assert len(files) == 3
        found.append([each.read_text() for each in files])
        for each in files:
            each.unlink()
    assert found[0] == found[1]
    assert 'SummaryWriter(log_dir="one") if rank == 0 else None, Log("two")' in after
    again = part_of(after, "logging and saving by rank 0")
    assert (again.status, again.edits) == (Status.THERE, ())


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("run = wandb.init(project='x')", "run = wandb.init(project='x', mode=None if rank == 0 "
         'else "disabled")'),
        ("wandb.init()\nwandb.log({'a': wandb.config.b})", "wandb.init(mode=None if rank == 0 else "
         '"disabled")\nwandb.log({\'a\': wandb.config.b})'),
        ("wandb.init(mode='offline')", "wandb.init(mode='offline' if rank == 0 else \"disabled\")"),
        ("wandb.log({'a': 1})", "if rank == 0:\n    wandb.log({'a': 1})"),
        ("mlflow.start_run()", "if rank == 0:\n    mlflow.start_run()"),
        ("with mlflow.start_run() as run:\n    mlflow.pytorch.log_model(model, 'm')",
         "with mlflow.start_run() if rank == 0 else contextlib.nullcontext() as run:\n"
         "    if rank == 0:\n        mlflow.pytorch.log_model(model, 'm')"),
        ("handler = logging.FileHandler('a.log')", "handler = logging.FileHandler('a.log' if rank "
         "== 0 else os.devnull)"),
        ("logging.basicConfig(level=10, filename='a.log')", "logging.basicConfig(level=10, "
         "filename='a.log' if rank == 0 else os.devnull)"),
        ("rows = csv.writer(Path('a').open('w'))", "rows = csv.writer(open(Path('a') if rank == 0 "
         "else os.devnull, 'w'))"),
        ("rows = open('a')", "rows = open('a')"),
        ("for each in tqdm(loader): pass", "for each in tqdm(loader, disable=rank != 0): pass"),
        ("bar = tqdm(total=48)", "bar = tqdm(total=48, disable=rank != 0)"),
        ("figure.savefig('a.png')", "if rank == 0:\n    figure.savefig('a.png')"),
    ],
)  # fmt: skip
def test_what_writes_or_shows_is_of_rank_0(line: str, changed: str) -> None:
    head = "import csv, logging, mlflow, wandb\nfrom pathlib import Path\nfrom tqdm import tqdm\n"
    silent = re.sub(r"    print.*\n", "", shape(PLAIN))
    after = plan(f"{head}{silent}done = 1\n{line}\n", "train.py").after
    assert f"\n{changed}\ndist.destroy_process_group()" in after
    ast.parse(after)


@pytest.mark.parametrize(
    "use",
    [
        "folder = writer.log_dir",
        "evaluate(writer)",
        "state['writer'] = writer",
        "writer.flush(); writer.close()",
    ],
)
def test_a_writer_that_other_ranks_need_is_noted(use: str) -> None:
    head = "from torch.utils.tensorboard import SummaryWriter\nfrom other import evaluate\n"
    source = f"{head}{shape(PLAIN)}writer = SummaryWriter()\nwriter.close()\n{use}\n"
    found = plan(source, "train.py")
    *_, note = part_of(source, "logging and saving by rank 0").notes
    assert note.startswith(
        "train.py:27: each rank writes a log of its own to one folder, and train.py:29 needs it"
    )
    assert f"\nwriter = SummaryWriter()\nif rank == 0:\n    writer.close()\n{use}\n" in found.after


def test_a_bar_of_all_samples_is_moved_by_those_of_all_ranks() -> None:
    source = shape(PLAIN).replace("import torch\n", "from tqdm import tqdm\nimport torch\n", 1)
    source = source.replace("    total = 0.0\n", "    total = 0.0\n    bar = tqdm(total=48)\n")
    moved = source.replace("        total += ", "        bar.update(x.shape[0])\n        total += ")
    after = plan(moved, "train.py").after
    assert "        bar.update(x.shape[0] * dist.get_world_size())\n" in after
    kept = moved.replace("x.shape[0]", "1").replace(
        "print(f", "rows = 2 * len(x)\n    print(rows, f"
    )
    assert "bar.update(1)\n" in plan(kept, "train.py").after
    assert "rows = 2 * len(x)\n" in plan(kept, "train.py").after


def test_an_accelerator_is_a_gpu_and_an_image_is_a_file() -> None:
    source = SUMMED.replace(
        "import nn\n", "import nn\nfrom torchvision.utils import save_image\n", 1
    ).replace('    print(f"epoch', "    save_image(x, 'x.png')\n    print(f\"epoch")
    after = plan(source, "train.py").after
    assert 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))' in after
    assert "    if rank == 0:\n        save_image(x, 'x.png')\n" in after


RESUMED = """
import torch
from torch import nn
from torch.utils.data import DataLoader
class Trainer:
    def __init__(self, model, loader, path):
        self.model, self.loader, self.path = model, loader, path
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def save(self):
        torch.save(self.model.state_dict(), self.path)
    def load(self):
        self.model.load_state_dict(torch.load(self.path))
    def fit(self):
        for epoch in range(3):
            for x in self.loader:
                self.optimizer.zero_grad()
                self.model(x).mean().backward()
                self.optimizer.step()
            self.save()
        self.load()
trainer = Trainer(nn.Linear(4, 1), DataLoader(torch.load("data.pt"), batch_size=4), "best.pt")
trainer.fit()
"""
FOLDS = """
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader
out = Path("out")
data = torch.load("data.pt")
for fold in range(2):
    loader, model = DataLoader(data, batch_size=4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    torch.save({"model": model.state_dict()}, out / f"{fold}.pt")
    if fold:
        state = torch.load(out / f"{fold}.pt")
        model.load_state_dict(state["model"])
"""


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        (RESUMED, "        dist.barrier()  # until rank 0 has written the file\n"
         '        self.model.load_state_dict(torch.load(self.path, map_location="cpu"))\n'),
        (FOLDS, "    dist.barrier()  # until rank 0 has written the file\n    if fold:\n"
         '        state = torch.load(out / f"{fold}.pt", map_location="cpu")\n'),
    ],
)  # fmt: skip
def test_ranks_wait_for_the_file_where_they_read_it(source: str, lines: str) -> None:
    after = plan(source, "train.py").after
    assert lines in after
    assert after.count("barrier()") == 1
    assert 'torch.load("data.pt")' in after  # which no rank saves


def test_a_file_that_is_read_in_place_of_the_training_needs_no_wait() -> None:
    either = RESUMED.replace("        self.load()\n", "").replace(
        "trainer.fit()\n", "if trainer.path:\n    trainer.fit()\nelse:\n    trainer.load()\n"
    )
    assert "barrier" not in plan(either, "train.py").after
    both = either.replace("else:\n    trainer.load()", "trainer.load()")
    assert plan(both, "train.py").after.count("barrier()") == 1


def test_a_file_that_is_read_before_the_training_needs_no_wait() -> None:
    early = RESUMED.replace("        self.load()\n", "").replace(
        "        for epoch", "        self.load()\n        for epoch"
    )
    after = plan(early, "train.py").after
    assert "barrier" not in after
    assert 'torch.load(self.path, map_location="cpu")' in after


def test_a_print_of_the_master_process_is_of_rank_0() -> None:
    source = shape(HALF).replace("    print(epoch", "    if master_process: print(epoch")
    source = source.replace("for epoch", "master_process = dist.get_rank() == 0\nfor epoch", 1)
    part = part_of(source, "logging and saving by rank 0")
    assert not any("shares its line" in each for each in part.notes)


def test_data_that_no_rank_saves_is_read_as_it_is() -> None:
    source = shape(PLAIN).replace("inputs = torch.randn(48, 4)", "inputs = torch.load('data.pt')")
    source = source.replace('torch.save(model.state_dict(), "model.pt")\n', "")
    [part] = [each for each in plan(source, "train.py").parts if each.name == "resume"]
    assert part.status is Status.NOT_NEEDED
    assert "train.py:7 reads is saved by no rank" in part.saw


@pytest.mark.parametrize("made", ["dict(num_workers=0)", '{"num_workers": 0}'])
def test_unpacked_arguments_that_choose_no_samples_stay(made: str) -> None:
    source = shape(PLAIN).replace("shuffle=False", "shuffle=True, **options")
    source = source.replace("loader = Data", f"options = {made}\nloader = Data")
    after = plan(source, "train.py").after
    assert "sampler=DistributedSampler(train_set), **options)" in after


def test_an_unpacked_size_is_divided_beside_a_shuffle() -> None:
    source = shape(PLAIN).replace("batch_size=8, shuffle=False", "shuffle=True, **options")
    source = source.replace("loader = Data", "options = dict(batch_size=8)\nloader = Data")
    after = plan(source, "train.py").after
    divided = '**{**options, "batch_size": options["batch_size"] // dist.get_world_size()})'
    assert f"DataLoader(train_set, sampler=DistributedSampler(train_set), {divided}" in after


@pytest.mark.parametrize(
    ("made", "once"),
    [
        ("os.mkdir('out')", "os.makedirs('out', exist_ok=True)"),
        ("os.makedirs('out', exist_ok=True)", "os.makedirs('out', exist_ok=True)"),
        ("Path('out').mkdir()", "Path('out').mkdir(exist_ok=True)"),
        ("Path('out').mkdir(parents=True)", "Path('out').mkdir(parents=True, exist_ok=True)"),
    ],
)
def test_a_folder_that_another_rank_has_made_is_no_error(made: str, once: str) -> None:
    source = f"import os\nfrom pathlib import Path\n{shape(PLAIN)}{made}\n"
    assert f"\n{once}\ndist.destroy_process_group()" in plan(source, "train.py").after


def test_threads_of_one_process_give_way_to_processes() -> None:
    source = shape(PLAIN).replace(
        "optimizer =",
        "if torch.cuda.is_available():\n    model = nn.DataParallel(model)\noptimizer =",
    )
    found = plan(source, "train.py")
    assert "    model = model\nddp = DistributedDataParallel(model)\noptimizer =" in found.after
    [part] = [each for each in found.parts if each.name == "model"]
    assert "DataParallel is of one process" in part.notes[-1]
    assert "cross_entropy(ddp(x), y)" in found.after


SEEDED = """
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

def set_seed(seed):
    random.seed(seed)
    torch.manual_seed(seed)

class Noisy(Dataset):
    def __getitem__(self, index):
        return torch.ones(4) + random.random()
    def __len__(self):
        return 64

def main():
    set_seed(3)
    loader = DataLoader(Noisy(), batch_size=8)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for x in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()

main()
"""


def test_what_a_step_draws_is_drawn_by_a_seed_of_each_rank() -> None:
    after = plan(SEEDED, "train.py").after
    assert "    set_seed(3 + rank)\n    for epoch in" in after
    [note] = notes_of(SEEDED, "model")
    assert note.startswith("train.py:15: with one seed on all ranks (train.py:11), random.random")
    assert "set_seed(3 + rank)" not in plan(SEEDED.replace("random.random()", "1"), "a.py").after
    noise = SEEDED.replace("model(x)", "model(x + torch.randn_like(x))").replace(
        "random.random()", "1"
    )
    assert "    set_seed(3 + rank)\n    for epoch in" in plan(noise, "a.py").after
    alone = SEEDED.replace("set_seed(3)\n", "random.seed(3)\n").replace("set_seed(seed)", "other()")
    assert "    random.seed(3 + rank)\n    for epoch in" in plan(alone, "a.py").after
    unseeded = SEEDED.replace("    set_seed(3)\n", "")
    assert "rank)" not in plan(unseeded, "a.py").after.replace("get_rank()", "")


def test_a_seed_without_a_name_where_the_training_begins_is_made_anew(
    save: Save, run_it: Ran
) -> None:
    """Each library's new seed comes from its old one."""
    local = SEEDED.replace(
        "def main():\n    set_seed(3)\n", "def main():\n    set_seed(3)\n    fit()"
    )
    local = local.replace("    fit()    loader", "    fit()\n\ndef fit():\n    loader")
    local = local.replace("    set_seed(3)\n", "    seed = 3\n    set_seed(seed)\n")
    local = local.replace(
        "            model(x).mean()",
        "            print(x[0, 0].item())\n            model(x).mean()",
    )
    after = plan(local, "train.py").after
    lines = (
        "    torch.manual_seed(torch.initial_seed() + rank)\n"
        "    random.seed(random.randrange(2**32) + rank)\n"
        "    for epoch in"
    )
    assert lines in after
    save(after.replace("if rank == 0:", "if True:"))
    done = run_it("train.py")
    assert done.code == 0, done.err
    drawn = done.out.split()
    assert len({*drawn}) == len(drawn) == 2 * 24


def test_data_and_splits_are_drawn_by_one_seed() -> None:
    unseeded = SEEDED.replace("    set_seed(3)\n", "    order = np.random.permutation(64)\n")
    found = plan(unseeded, "train.py")
    assert "rank = dist.get_rank()\n" in found.after
    assert found.after.index("np.random.seed(0)\n") < found.after.index("def set_seed")
    assert any(
        "train.py:20 draws other numbers on each rank" in each
        for each in notes_of(unseeded, "sampler")
    )
    seeded = unseeded.replace("    order", "    np.random.seed(1)\n    order")
    assert "np.random.seed(0)" not in plan(seeded, "train.py").after
    given = SEEDED.replace("set_seed(3)", "torch.randperm(9, generator=torch.Generator())")
    assert "torch.manual_seed(0)" not in plan(given, "train.py").after


def test_data_that_each_round_draws_keep_one_seed() -> None:
    """A seed of each rank before the first training would make the parts of the second differ."""
    body = SEEDED[SEEDED.index("    loader =") : SEEDED.index("\nmain()")]
    folds = SEEDED.replace(
        body,
        "    for fold in range(2):\n        part = torch.randperm(64)\n"
        + textwrap.indent(body, "    "),
    )
    ast.parse(folds)
    assert "set_seed(3 + rank)" not in plan(folds, "train.py").after
    [note] = notes_of(folds, "model")
    assert note.endswith(
        "in each round, seed with seed before train.py:22, which all ranks have to draw alike, and "
        "with seed + rank before the training"
    )


def test_a_bad_batch_is_left_by_all_ranks() -> None:
    skips = shape(PLAIN).replace(
        "        loss.backward()",
        "        if not torch.isfinite(loss):\n            continue\n        loss.backward()",
    )
    after = plan(skips, "train.py").after
    assert "        decided = loss.detach() / dist.get_world_size()\n" in after
    assert "        if not torch.isfinite(decided):\n            continue\n" in after
    own = skips.replace("isfinite(loss)", "isfinite(x).all()")
    assert stop_of(own).status is Status.NOT_NEEDED


def test_one_function_that_always_trains_is_unknown_where_it_tests() -> None:
    """Which of its calls trains, nothing tells."""
    source = shape(FUNCTIONS).replace(
        "accuracy = evaluate(model, device, test_loader)",
        "accuracy = train_epoch(args, model, device, test_loader, optimizer, epoch)",
    )
    part = part_of(source, "sampler")
    assert part.status is Status.UNKNOWN
    assert "walks the loaders of train.py:61 and train.py:62" in part.saw


CASES = {
    "a word": (
        ("optimizer=None):", 'optimizer, mode):'),
        ("optimizer is not None", 'mode == "train"'),
        ("device, optimizer)\n", 'device, optimizer, "train")\n'),
        ("test_loader, device)", 'test_loader, device, optimizer, mode="test")'),
    ),
    "a default": (
        ("optimizer=None):", "optimizer, training=True):"),
        ("    training = optimizer is not None\n", ""),
        ("test_loader, device)", "test_loader, device, optimizer, training=False)"),
    ),
    "else": (
        (
            "            if training:\n",
            "            if not training:\n                pass\n            else:\n",
        ),
    ),
    "in": (
        ("optimizer=None):", 'optimizer, mode):'),
        ("optimizer is not None", 'mode in ("train", "warm-up")'),
        ("device, optimizer)\n", 'device, optimizer, "train")\n'),
        ("test_loader, device)", 'test_loader, device, optimizer, "test")'),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_call_that_trains_is_told_from_the_call_that_tests(name: str) -> None:
    source = shape(BOTH, shuffle=True)
    for old, new in CASES[name]:
        assert old in source
        source = source.replace(old, new)
    parts = {part.name: part for part in plan(source, "train.py").parts}
    assert {part.status for part in parts.values()} <= {Status.MISSING, Status.NOT_NEEDED}
    after = plan(source, "train.py").after
    assert "train_loader.sampler.set_epoch(epoch)" in after
    assert "test_loader = DataLoader(test_set, batch_size=4)" in after
    assert "run_epoch(ddp, test_loader" in after
    assert "        if training:\n            totals = torch.tensor(" in after


def test_sums_of_a_condition_within_the_batches_are_added_up_by_hand() -> None:
    """Behind the loop it does not tell a training from a test."""
    source = shape(BOTH).replace(
        "            if training:", "            if training and len(x) > 1:"
    )
    assert "        if training:\n            totals" in plan(source, "train.py").after
    hidden = source.replace(
        "training and len(x) > 1", "(loss.requires_grad if training else False)"
    )
    part = part_of(hidden, "metrics over ranks")
    assert part.status is Status.UNKNOWN
    assert "walks the batches of training and of tests" in part.saw


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('for phase in ["train", "val"]:', "for phase, loader in loaders.items():"),
        ("in loaders[phase]:", 'in (loaders["train"] if phase == "train" else loaders["val"]):'),
    ],
)
def test_loaders_of_a_dictionary_are_told_apart(old: str, new: str) -> None:
    made = """\
loaders = {
    "train": DataLoader(train_set, batch_size=8, shuffle=True),
    "val": DataLoader(test_set, batch_size=8),
}
"""
    source = shape(PHASES, shuffle=True)
    whole = source[source.index("loaders = {") : source.index("sizes =")]
    source = source.replace(whole, made).replace(old, new)
    if "items()" in new:
        source = source.replace("in loaders[phase]:", "in loader:")
    after = plan(source, "train.py").after
    assert '        loaders["train"].sampler.set_epoch(epoch)\n' in after
    assert "DataLoader(train_set, batch_size=8 // dist.get_world_size(), sampler=Dist" in after
    assert '"val": DataLoader(test_set, batch_size=8),' in after
    assert "UNKNOWN" not in status(plan(source, "train.py")).values()


def test_a_function_that_makes_both_loaders_divides_one() -> None:
    after = plan(shape(STAGES, shuffle=True), "train.py").after
    assert "batch_size=8 // dist.get_world_size() if train else 8" in after
    assert "if train else None)" in after


def test_a_wrapper_stands_behind_what_freezes_its_model() -> None:
    """What is trained is known when the model is wrapped: once more for each training."""
    frozen = "model[0].requires_grad_(False)\n"
    after = plan(shape(PLAIN).replace("optimizer =", f"{frozen}optimizer ="), "train.py").after
    assert f"{frozen}ddp = DistributedDataParallel(model)\n" in after
    wrapped = "    ddp = DistributedDataParallel(model)\n    for epoch in range(epochs):\n"
    assert wrapped in plan(shape(STAGES), "train.py").after


def test_a_function_that_trains_once_wraps_its_model_itself() -> None:
    """All else of it, and what it is called with, stays."""
    after = plan(shape(PHASES), "train.py").after
    assert "out = ddp(x)\n" in after
    assert "model = train_model(model, optimizer, scheduler, epochs=3)\n" in after
    assert "model.module" not in after


def test_another_loader_with_a_sampler_is_to_be_divided_by_hand() -> None:
    source = (
        shape(TOGETHER)
        .replace("4, SHUFFLE)", "4, sampler=mine)")
        .replace("4, False)", "4, sampler=mine)")
    )
    part = part_of(source, "sampler")
    assert any("makes another loader of that loop" in each for each in part.notes)


def test_results_in_lists_and_counts_of_tensors_are_of_all_ranks(save: Save, run_it: Ran) -> None:
    source = shape(PLAIN).replace("    total = 0.0\n", "    total, right, seen = 0.0, 0, []\n")
    source = source.replace(
        "        total += loss.item()\n",
        "        total += loss.item()\n        right += torch.sum(model(x).argmax(1) == y)\n"
        "        seen.extend(y.tolist())\n        kept.append({'rows': len(y)})\n",
    ).replace("{total / len(loader):.6f}", "{right.item()} of {len(seen)} of {len(kept)}")
    source = source.replace("seen = 0.0, 0, []", "seen, kept = 0.0, 0, [], []")
    before, after = run_both(source, save, run_it)
    assert after.out == before.out.replace("of 6", "of 12")  # batches of half the size
    assert "of 48 of 12" in after.out


def test_sums_in_a_dictionary_are_of_all_ranks(save: Save, run_it: Ran) -> None:
    """Under changing keys the whole of it, under others each by itself."""
    source = shape(PLAIN).replace(
        "    total = 0.0\n", '    total, sums, counts = 0.0, {}, {"right": 0, "loss": 0.0}\n'
    )
    source = source.replace(
        "        total += loss.item()\n",
        "        total += loss.item()\n        both = {'a': loss, 'b': 2 * loss}\n"
        "        for name, part in both.items():\n"
        "            sums[name] = sums.get(name, 0.0) + part.item()\n"
        "        counts['right'] += len(y)\n        counts['loss'] += loss.item()\n",
    ).replace(
        "{total / len(loader):.6f}",
        "{sums['b'] / 6:.5f} {counts['right']:.0f} {counts['loss']:.4f}",
    )
    before, after = run_both(source, save, run_it)
    assert after.out == before.out
    assert " 48 " in after.out


def test_counts_stay_integers(save: Save, run_it: Ran) -> None:
    source = shape(PLAIN).replace("    total = 0.0\n", "    total, right, seen = 0.0, 0, 0\n")
    source = source.replace(
        "        total += loss.item()\n",
        "        total = total + loss.item()\n"
        "        hits = (model(x).argmax(1) == y).sum().item()\n        right += hits\n"
        "        seen += y.size(0)\n",
    ).replace("{total / len(loader):.6f}", "{total / len(loader):.5f} {right:d} of {seen:d}")
    before, after = run_both(source, save, run_it)
    assert after.out == before.out
    assert "of 48" in after.out


@pytest.mark.parametrize(
    ("start", "added", "name"),
    [
        ("losses = []", "losses.append(loss.detach())", "losses"),
        ("log = {'loss': []}", "log['loss'].append(loss.item())", "log['loss']"),
        ("losses = []", "value = loss.item(); losses.append(value)", "losses"),
    ],
)
def test_losses_in_any_list_are_the_means_of_all_ranks(
    start: str, added: str, name: str, save: Save, run_it: Ran
) -> None:
    source = shape(PLAIN).replace("    total = 0.0\n", f"    {start}\n")
    source = source.replace("total += loss.item()", added)
    source = source.replace("{total / len(loader):.6f}", f"{{sum({name}) / len(loader):.5f}}")
    before, after = run_both(source, save, run_it)
    assert after.out == before.out


def test_what_is_collected_in_another_way_is_unknown() -> None:
    source = shape(PLAIN).replace("    total = 0.0\n", "    total, seen = 0.0, set()\n")
    source = source.replace("total += loss.item()", "seen.update(y.tolist())")
    source = source.replace("{total / len(loader):.6f}", "{len(seen)}")
    part = part_of(source, "metrics over ranks")
    assert part.status is Status.UNKNOWN
    assert "what seen of train.py" in part.saw


@pytest.mark.parametrize(
    "divides",
    [
        "loss = criterion(model(x), y) / len(y)",
        "loss = criterion(model(x), y)\n        loss = loss / x.size(0)",
        "loss = criterion(model(x), y)\n        loss /= len(x)",
    ],
)
def test_a_sum_that_is_divided_is_a_mean(divides: str) -> None:
    source = shape(PLAIN).replace("loss = nn.functional.cross_entropy(model(x), y)", divides)
    source = source.replace("model =", 'criterion = nn.CrossEntropyLoss(reduction="sum")\nmodel =')
    assert "        loss.backward()\n" in plan(source, "train.py").after
    whole = source.replace(divides, "loss = criterion(model(x), y)")
    assert "(loss * dist.get_world_size()).backward()" in plan(whole, "train.py").after


def test_a_stop_by_the_time_is_that_of_rank_0() -> None:
    ends = "        total += 1\n        if time.time() - start > 60:\n            break\n"
    source = shape(PLAIN).replace("        total += loss.item()\n", ends)
    timed = "import time\nimport torch\nstart = time.time()\n"
    source = source.replace("import torch\n", timed, 1)
    part = stop_of(source)
    assert part.status is Status.MISSING
    assert "leaves the loop by the time" in part.saw
    after = plan(source, "train.py").after
    assert "        decided = [time.time() - start > 60]\n" in after
    assert "        if decided[0]:\n            break\n" in after
    assert stop_of(source.replace("time.time() - start", "total")).status is Status.NOT_NEEDED


def test_hidden_gpus_are_shown_to_all_ranks() -> None:
    hides = 'import os\nimport torch\nos.environ["CUDA_VISIBLE_DEVICES"] = "0"\n'
    source = shape(PLAIN).replace("import torch\n", hides, 1)
    source = source.replace("nn.Linear(8, 2))", "nn.Linear(8, 2)).cuda()")
    assert "CUDA_VISIBLE_DEVICES" not in plan(source, "train.py").after
    assert any("leaves one GPU to all ranks" in each for each in notes_of(source, "device"))


def test_metrics_of_a_library_are_computed_on_all_ranks() -> None:
    source = shape(PLAIN).replace("import torch\n", "import torch\nimport torchmetrics\n", 1)
    source = source.replace("{total / len(loader):.6f}", "{metric.compute():.3f}")
    assert part_of(source, "metrics over ranks").status is Status.THERE
    shown = "  # on all ranks\n    if rank == 0:\n        print(shown)"
    assert shown in plan(source, "train.py").after


def test_a_run_of_a_tracker_is_no_meter() -> None:
    source = shape(PLAIN).replace("import torch\n", "import torch\nimport wandb\n", 1)
    source = source.replace("    total = 0.0\n", "    run = wandb.init()\n")
    source = source.replace("total += loss.item()", "run.log({'loss': loss.item()})")
    source = source.replace("{total / len(loader):.6f}", "{run.name}")
    assert "run of" not in part_of(source, "metrics over ranks").saw


def test_a_method_of_the_model_is_no_call_of_the_wrapper() -> None:
    net = (
        "class Net(nn.Linear):\n    def forward(self, x):\n        return super().forward(x)\n"
        "    def step(self, x, y):\n        return nn.functional.cross_entropy(self(x), y)\n\n"
    )
    made = "nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))"
    source = shape(PLAIN).replace("loader =", f"{net}loader =", 1).replace(made, "Net(4, 2)")
    source = source.replace("nn.functional.cross_entropy(model(x), y)\n", "model.step(x, y)\n")
    part = part_of(source, "model")
    assert part.status is Status.UNKNOWN
    assert "calls model.step, and only a call of the wrapper itself" in part.saw


def test_gradients_that_are_added_up_need_one_message() -> None:
    assert any("ddp.no_sync()" in each for each in notes_of(shape(ACCUMULATION), "model"))
    assert not any("no_sync" in each for each in notes_of(shape(PLAIN), "model"))


def test_of_two_loaders_of_one_function_the_training_s_is_told_its_epoch() -> None:
    source = shape(BOTH, shuffle=True).replace(
        "    train_loader = DataLoader(train_set, batch_size=8, shuffle=True)\n"
        "    test_loader = DataLoader(test_set, batch_size=4)\n",
        "    train_loader, test_loader = get_loader(8, True), get_loader(4, False)\n",
    )
    made = (
        "def get_loader(size, train):\n"
        "    return DataLoader(train_set if train else test_set, size, shuffle=train)\n\n\n"
    )
    source = source.replace("def main():", f"{made}def main():")
    call = "run_epoch(model, train_loader, device, optimizer)"
    source = source.replace(f"        of_training = {call}\n", "").replace(
        "*of_training", f"*{call}"
    )
    after = plan(source, "train.py").after
    assert "        train_loader.sampler.set_epoch(epoch)\n" in after
    assert "test_loader.sampler" not in after
    assert "size // dist.get_world_size() if train else size" in after


def test_what_makes_a_loader_that_is_not_seen_draws_nothing() -> None:
    source = shape(PLAIN).replace(
        "loader = DataLoader(train_set, batch_size=8, shuffle=False)",
        "loader, tests = [DataLoader(each, batch_size=8) for each in (train_set, test_set)]",
    )
    part = part_of(source, "sampler")
    assert (part.status, list(part.edits)) == (Status.UNKNOWN, [])
    assert "if it does, give it sampler=DistributedSampler(dataset)" in part.saw


def test_a_loss_between_the_samples_of_a_batch_is_noted() -> None:
    compared = (
        "        out = model(x)\n        loss = nn.functional.cross_entropy("
        "out @ out.T, torch.arange(len(x)))\n"
    )
    source = shape(PLAIN).replace(
        "        loss = nn.functional.cross_entropy(model(x), y)\n", compared
    )
    assert any("train.py:20 compares the samples" in each for each in notes_of(source, "sampler"))
    alone = source.replace("torch.arange(len(x))", "y")
    assert not any("compares" in each for each in notes_of(alone, "sampler"))


def test_a_while_that_counts_and_an_epoch_of_self_tell_the_sampler() -> None:
    counts = shape(TRAINER).replace(
        "        for epoch in range(epochs):\n",
        "        self.epoch = 0\n        while self.epoch < epochs:\n            self.epoch += 1\n",
    )
    assert ".sampler.set_epoch(self.epoch)\n" in plan(counts, "train.py").after
    of_self = shape(TRAINER).replace("for epoch in range", "for self.epoch in range")
    assert ".sampler.set_epoch(self.epoch)\n" in plan(of_self, "train.py").after


def test_a_model_that_makes_its_optimizer_is_wrapped() -> None:
    net = (
        "class Net(nn.Linear):\n    def forward(self, x):\n        return super().forward(x)\n"
        "    def optimizer(self):\n        return torch.optim.SGD(self.parameters(), lr=0.1)\n\n"
    )
    source = shape(PLAIN).replace("loader =", f"{net}loader =")
    source = source.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
                            "optimizer = model.optimizer()")  # fmt: skip
    source = source.replace(
        "nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))", "Net(4, 2)"
    )
    assert "cross_entropy(ddp(x), y)" in plan(source, "train.py").after


def test_a_stop_that_a_callback_sets_is_that_of_rank_0() -> None:
    leaves = "            if self.should_stop:\n                break\n"
    sets = "    def stop(self):\n        self.should_stop = True\n\n"
    source = shape(TRAINER).replace(
        "            self.history.append(total)\n",
        f"            self.history.append(total)\n{leaves}",
    )
    set_later = source.replace("    def save(", f"{sets}    def save(")
    part = stop_of(set_later)
    assert part.status is Status.MISSING
    assert "leaves the loop by self.should_stop, which is set elsewhere" in part.saw
    lines = (
        "            decided = [self.should_stop]\n"
        "            dist.broadcast_object_list(decided, 0)\n"
        "            self.should_stop = decided[0]\n"
    )
    after = plan(set_later, "train.py").after
    assert f"            self.history.append(total)\n{lines}{leaves}" in after
    assert stop_of(after).status is Status.THERE
    first = "            if not epoch:\n                pass\n            elif self.should"
    other = set_later.replace("            if self.should", first)
    part = stop_of(other)
    assert (part.status, part.edits) == (Status.UNKNOWN, ())
    assert part.notes[0].startswith("before it is asked for, on all ranks: `decided = [self.should")
    assert stop_of(source).status is Status.NOT_NEEDED


CALLBACKS = """
import torch
from torch import nn
from torch.utils.data import DataLoader
class Stop:
    def __init__(self, patience):
        self.patience = patience
    def on_epoch(self, trainer, epoch):
        if epoch >= self.patience and int(os.environ.get("RANK", 0)) == 0:
            trainer.stop = True
class Trainer:
    def __init__(self, settings, callbacks):
        self.settings, self.callbacks, self.stop = settings, callbacks, False
        self.model = nn.Linear(4, 1)
        self.optimizer = getattr(torch.optim, settings["kind"])(self.model.parameters(), lr=0.1)
    def fit(self, loader):
        for self.epoch in range(9):
            for x in loader:
                self.optimizer.zero_grad()
                self.model(x).mean().backward()
                self.optimizer.step()
            for each in self.callbacks:
                each.on_epoch(self, self.epoch)
            if self.stop:
                break
def main():
    settings = {"batch_size": 8, "kind": "SGD"}
    loader = DataLoader(torch.ones(32, 4), settings["batch_size"], shuffle=True)
    trainer = Trainer(settings, [Stop(2)])
    trainer.fit(loader)
    print("epochs", trainer.epoch)
main()
"""


def test_ranks_stop_together_by_the_flag_of_rank_0(save: Save, run_it: Ran) -> None:
    after = plan(CALLBACKS, "train.py").after
    assert "            loader.sampler.set_epoch(self.epoch)\n" in after
    assert 'DataLoader(train_set, settings["batch_size"] // dist.get_world_size(), ' in after
    save(f"import os\n{after}")
    done = run_it("train.py")
    assert (done.code, done.err, done.out) == (0, "", "epochs 2\n")


def test_each_of_two_loops_that_train_has_a_wrapper_of_its_own() -> None:
    student = shape(PLAIN).split("train_set = ")[1].split("model = ")[1]
    first, second = student.replace("model", "teacher"), student.replace("model", "student")
    source = shape(PLAIN).split("model = ")[0] + f"teacher = {first}student = {second}"
    found = plan(source, "train.py")
    assert Status.UNKNOWN not in status(found).values()
    for name in ("teacher", "student"):
        assert f"ddp_{name} = DistributedDataParallel({name})\n" in found.after
        assert f"cross_entropy(ddp_{name}(x), y)" in found.after
    assert found.after.count("loader.sampler.set_epoch(epoch)\n") == 2
    assert found.after.count("sampler=DistributedSampler(train_set") == 1


def test_what_one_of_two_trainings_does_not_show_is_noted() -> None:
    own = OWN_BATCHES[OWN_BATCHES.index("for ") :]
    part = part_of(f"{shape(PLAIN)}{own}", "sampler")
    assert part.status is Status.MISSING
    assert any("walks a DataLoader is not seen" in each for each in part.notes)


def test_only_a_model_that_has_batch_norm_is_told_to_normalise_together() -> None:
    source = shape(SHAPES["two models, losses in a list, a log in a file"]).replace(
        "= nn.Linear(4, 2),", "= nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)),"
    )
    notes = notes_of(source, "model")
    assert sum("SyncBatchNorm" in each for each in notes) == 1


def test_a_loader_without_an_end_is_told_its_epoch_by_hand() -> None:
    part = part_of(shape(ENDLESS), "set_epoch")
    assert part.status is Status.UNKNOWN
    assert "walks the loader again and again" in part.saw


def test_a_meter_of_another_file_is_to_be_added_up_by_hand() -> None:
    source = shape(METERS).replace("import sys\n", "import sys\nfrom meters import Meter\n", 1)
    source = source.replace("losses = AverageMeter()", "losses = Meter()")
    part = part_of(source, "metrics over ranks")
    assert part.status is Status.MISSING
    assert "call dist.all_reduce on what losses has added up, on all ranks" in part.notes[-1]


def test_a_sampler_that_is_made_in_the_call_is_shared_with_one_seed() -> None:
    source = shape(PLAIN).replace(
        "shuffle=False", "sampler=torch.utils.data.RandomSampler(train_set)"
    )
    after = plan(source, "train.py").after
    ast.parse(after)
    made = "RandomSampler(train_set, generator=torch.Generator().manual_seed(0)), rank,"
    assert f"sampler=Share(torch.utils.data.{made}" in after


@pytest.mark.parametrize(
    ("made", "shared"),
    [
        ("[[0, 1], [2, 3]]", "[[0, 1], [2, 3]]"),
        (
            "BatchSampler(RandomSampler(train_set), 8, drop_last=True)",
            "BatchSampler(RandomSampler(train_set, generator=torch.Generator().manual_seed(0)), 8, "
            "drop_last=True)",
        ),
    ],
)
def test_of_each_batch_of_a_sampler_a_rank_takes_a_part(made: str, shared: str) -> None:
    source = shape(PLAIN).replace("batch_size=8, shuffle=False", f"batch_sampler={made}")
    source = source.replace("import DataLoader", "import BatchSampler, DataLoader, RandomSampler")
    after = plan(source, "train.py").after
    assert f"batch_sampler=Share({shared}, rank, dist.get_world_size())" in after
    found: dict[str, type] = {}
    exec(after[after.index("class Share") : after.index("loader =")], found)
    batches = [range(5), [5, 6, 7, 8], (9,)]
    parts = [[*found["Share"](batches, rank, 2)] for rank in range(2)]
    assert parts == [[[0, 2], [5, 7]], [[1, 3], [6, 8]]]
    assert len(found["Share"](batches, 0, 2)) == 3
    notes = part_of(source, "sampler").notes
    assert "of a batch that the number of ranks does not divide, the rest is dropped" in notes[0]
    assert not any("draw the same order" in each for each in notes)


def test_what_no_sampler_draws_from_is_drawn_apart() -> None:
    """The sampler of batches draws from `random`, and dropout from torch."""
    source = (
        shape(BATCHES)
        .replace("self.draws.sample", "random.sample")
        .replace("nn.ReLU()", "nn.Dropout(0.1)")
    )
    source = source.replace("torch.manual_seed(0)\n", "torch.manual_seed(0)\nrandom.seed(0)\n")
    after = plan(source, "train.py").after
    assert "\ntorch.manual_seed(torch.initial_seed() + rank)\nfor epoch in" in after
    assert after.count("random.seed(") == 1
    assert "initial_seed" not in plan(source.replace("random.s", "torch.s"), "train.py").after


def test_noise_in_what_forward_calls_is_drawn_apart() -> None:
    net = (
        "class Net(nn.Linear):\n    def sample(self, x):\n        return torch.randn_like(x)\n"
        "    def forward(self, x):\n        return super().forward(self.sample(x))\n\n"
    )
    source = SEEDED.replace("def main():", f"{net}def main():").replace(
        "nn.Linear(4, 1)\n", "Net(4, 1)\n"
    )
    source = source.replace("random.random()", "1")
    assert "    set_seed(3 + rank)\n    for epoch in" in plan(source, "train.py").after


def test_a_condition_of_while_that_a_callback_sets_is_unknown() -> None:
    sets = "    def stop(self):\n        self.should_stop = True\n\n"
    source = shape(TRAINER).replace("    def save(", f"{sets}    def save(")
    source = source.replace(
        "        for epoch in range(epochs):", "        while not self.should_stop:"
    ).replace("print(epoch,", "print(")
    assert "leaves the loop by self.should_stop" in stop_of(source).saw


def test_a_process_that_exits_by_its_loss_leaves_the_others() -> None:
    source = shape(PLAIN).replace(
        "        loss.backward()",
        "        if loss.item() > 1e9:\n            sys.exit(1)\n        loss.backward()",
    )
    assert "        if decided.item() > 1e9:\n" in plan(f"import sys\n{source}", "a.py").after


def test_a_model_of_which_more_is_trained_later_is_wrapped_again() -> None:
    thaw = "    if epoch == 1:\n        model[0].requires_grad_(True)\n"
    source = shape(PLAIN).replace("    total = 0.0\n", f"{thaw}    total = 0.0\n")
    again = f"{thaw}        ddp = DistributedDataParallel(model)\n    total = 0.0\n"
    assert again in plan(source, "train.py").after
    assert notes_of(source, "model") == []
    inside = source.replace(thaw, "").replace(
        "        loss.backward()\n",
        "        loss.backward()\n        model[0].requires_grad_(True)\n",
    )
    [note] = notes_of(inside, "model")
    assert "changes which parameters are trained" in note


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ('.to(torch.device(f"cuda:{gpu}"))', '.to(torch.device("cuda"))'),
        ('.to("cuda:" + str(gpu))', '.to("cuda")'),
        ('.to(torch.device("cuda", gpu))', '.to(torch.device("cuda"))'),
        (".cuda(gpu)", ".cuda()"),
        (".cuda()\ntorch.cuda.set_device(0)", 'set_device(int(os.environ["LOCAL_RANK"]))'),
    ],
)
def test_one_gpu_by_a_number_gives_way_to_each_rank_s(named: str, words: str) -> None:
    source = shape(PLAIN).replace("nn.Linear(8, 2))", f"nn.Linear(8, 2)){named}")
    source = source.replace("import torch\n", "import os\nimport torch\ngpu = 0\n", 1)
    found = plan(source, "train.py")
    assert part_of(source, "device").status is Status.MISSING
    assert words in found.after
    own = source.replace("gpu = 0", 'gpu = int(os.environ["LOCAL_RANK"])')
    if "set_device" not in named:
        assert part_of(own, "device").status is Status.THERE


def test_dropout_within_modules_is_drawn_apart() -> None:
    for made in ("nn.LSTM(4, 4, 2, dropout=0.1)", "nn.TransformerEncoderLayer(4, 1)"):
        source = SEEDED.replace("nn.Linear(4, 1)", made).replace("random.random()", "1")
        assert any("dropout draws the same masks" in each for each in notes_of(source, "model"))


def test_a_bar_hides_no_loader() -> None:
    walked = "            for batch in self.loader:\n"
    source = shape(TRAINER, shuffle=True)
    assert walked in source
    by_bar = "            bar = tqdm(self.loader)\n            for batch in bar:\n"
    assert ".sampler.set_epoch(epoch)" in plan(source.replace(walked, by_bar), "train.py").after


def test_a_print_that_trains_is_of_all_ranks() -> None:
    once_more = "train_epoch(args, model, device, test_loader, optimizer, epoch)"
    source = shape(FUNCTIONS).replace(
        "accuracy = evaluate(model, device, test_loader)",
        f'accuracy = 0\n        print("final", {once_more})',
    )
    [part] = [each for each in plan(source, "train.py").parts if "logging" in each.name]
    assert any("calls train_epoch, in which all ranks meet" in each for each in part.notes)


def test_a_late_import_delays_no_process_group() -> None:
    after = plan(shape(PLAIN) + "import json\nprint(json.dumps(total))\n", "train.py").after
    assert after.index("dist.init_process_group()") < after.index("loader = DataLoader")


def test_names_of_the_script_are_not_taken() -> None:
    source = shape(PLAIN).replace(
        "import torch\n", "import torch\nimport torch.distributions as dist\n"
    )
    source = source.replace("total", "ddp") + "rank = 8\n"
    after = plan(source, "train.py").after
    assert "import torch.distributed as dist_\n" in after
    assert "rank_ = dist_.get_rank()" in after
    assert "ddp_ = DistributedDataParallel(model)" in after


def test_right_scripts_of_several_processes_are_told_nothing() -> None:
    scripts = [*ECOSYSTEM.glob("*.py"), *(ROOT / "playground" / "lessons").glob("*/lesson.py")]
    assert len(scripts) > 60
    known = ROOT / "playground" / "lessons" / "data_parallel" / "lesson.py"  # of one process
    for path in scripts:
        assert plan_of_half(path) is None, path
        assert path == known or plan_of_text(path) is None, path


@pytest.mark.parametrize("text", [b"\xff", b"def f(:", b"\xef\xbb\xbfx = 1", b"", b"x = '\xe9'"])
def test_what_cannot_be_read_has_no_plan(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(text)
    assert plan_of_text(path) is plan_of_half(path) is None
    assert plan_of_text(tmp_path / "none.py") is None


def test_edits_of_one_place_keep_their_order() -> None:
    source = shape(PLAIN)
    found = plan(source, "train.py")
    lines = found.after.splitlines()
    reduced, shown = (
        next(number for number, line in enumerate(lines) if words in line)
        for words in ("totals / dist", "if rank == 0:")
    )
    assert reduced + 1 == shown
    assert apply_edits(source, []) == source


EARLY_LINES = """
import logging
import torch
from torch import nn
logging.basicConfig(level=logging.INFO)
log = logging.getLogger("train")
log.setLevel(logging.INFO)
print(torch.__version__)
from torch.utils.data import DataLoader, TensorDataset
"""


def test_what_stands_before_the_process_group_does_not_use_its_rank(
    save: Save, run_it: Ran
) -> None:
    source = shape(FUNCTIONS).replace("\n\n\nclass Net", f"{EARLY_LINES}\n\nclass Net", 1)
    source = "import os\n" + source
    after = plan(source, "train.py").after
    save(after)
    done = run_it("train.py", "--epochs", 1)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0] == torch.__version__
    lines = after.splitlines()
    for words in ("logging.basicConfig(level=logging.INFO)", "log.setLevel(logging.INFO)"):
        assert words in lines  # they print nothing, so that all ranks may call them
    above = [lines[at - 1] for at, line in enumerate(lines) if "print(torch" in line]
    assert above == ['if int(os.environ.get("RANK", 0)) == 0:']


def test_a_print_before_any_import_of_os_is_told_without_lines() -> None:
    """An import that is added stands behind the last."""
    source = shape(PLAIN).replace("from torch import nn", "print(1)\nfrom torch import nn")
    [part] = [each for each in plan(source, "train.py").parts if "logging" in each.name]
    assert (part.status, part.edits) == (Status.UNKNOWN, ())
    assert "no os is known where they would be" in part.saw


def test_a_print_before_a_process_group_that_is_there_asks_the_environment() -> None:
    source = shape(HALF).replace("dist.init_process_group", "print(1)\ndist.init_process_group")
    after = plan(source, "train.py").after
    assert 'if int(os.environ.get("RANK", 0)) == 0:\n    print(1)\n' in after
    assert "if dist.get_rank() == 0:\n" in after


def test_a_training_in_the_module_forms_its_process_group_before_it(
    save: Save, run_it: Ran
) -> None:
    """`if __name__` may come behind what needs the group."""
    source = shape(PLAIN).replace("torch.save", 'if __name__ == "__main__":\n    torch.save')
    save(plan(source, "train.py").after)
    done = run_it("train.py")
    assert (done.code, done.err) == (0, "")


CONFIG = """
class Config:
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
"""


@pytest.mark.parametrize("device", ["self.device", "self.config.device"])
def test_ranks_add_up_on_the_device_that_the_function_itself_uses(
    save: Save, run_it: Ran, device: str
) -> None:
    source = shape(TRAINER).replace("\n\nclass Trainer", f"\n{CONFIG}\n\nclass Trainer")
    source = source.replace("        self.model = model\n", (
        "        self.config = Config()\n"
        "        self.device = torch.device(self.config.device)\n"
        "        self.model = model.to(self.device)\n"
    )).replace("                total += self.step(batch)", (
        f"                batch = [each.to({device}) for each in batch]\n"
        "                total += self.step(batch)"
    ))  # fmt: skip
    after = plan(source, "train.py").after
    assert f"torch.tensor([float(total)], device={device})" in after
    save(after)
    done = run_it("train.py")
    assert (done.code, done.err) == (0, "")


def test_names_are_bound_by_scope_and_before_their_line() -> None:
    bound = """
import os.path as path, sys
def f(a, *b, c=sys, **d):
    def g(): return a, b, c, d, later, path
    try: g()
    except ValueError as error: print(error, __file__)
    return [one for one in (two := b)], two
class C(dict):
    size: int = 1
    double = size * 2
later = f
"""
    assert find_unbound(bound) == set()
    assert find_unbound("from os import *\nx") == set()
    assert find_unbound("print(later)\nlater = 1\n") == {("", "later")}
    assert find_unbound("def f():\n    x = y\n    y = x\n") == {(".f", "y")}
    assert find_unbound("class C:\n    x = 1\n    def f(self): return x\n") == {(".C.f", "x")}


SAMPLERS = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
class Ahead:
    def __init__(self, batches):
        self.batches = batches
    def __iter__(self):
        for batch in self.batches:
            yield batch
def train(model, loader, optimizer):
    loss_sum, number = 0.0, 0
    for (x,) in loader:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        loss_sum += loss.item() * len(x); number += len(x)
    return loss_sum / number
@torch.no_grad()
def evaluate(model, loader):
    total = 0.0
    for (x,) in loader:
        total += model(x).sum().item()
    return total
def main():
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    train_set, test_set = (TensorDataset(torch.randn(size, 4)) for size in (40, 20))
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=4, sampler=sampler)
    test_loader = DataLoader(test_set, sampler=DistributedSampler(test_set, shuffle=False))
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        loss = train(model, loader, optimizer)
        total = evaluate(model.module, test_loader)
        if rank == 0:
            print(f"{loss:.5f} {total:.5f}")
    dist.destroy_process_group()
main()
"""


def part_of(source: str, name: str) -> Part:
    [part] = [each for each in plan(source, "train.py").parts if each.name == name]
    return part


def test_a_distributed_sampler_in_a_variable_needs_its_epoch() -> None:
    part = part_of(SAMPLERS, "set_epoch")
    assert part.status is Status.MISSING
    assert [edit.text for edit in part.edits] == ["        loader.sampler.set_epoch(epoch)\n"]
    fixed = SAMPLERS.replace("(train_set)\n", "(train_set, shuffle=False)\n")
    assert part_of(fixed, "set_epoch").status is Status.NOT_NEEDED


@pytest.mark.parametrize("change", [("", ""), ("loader, opt", "Ahead(loader), opt")])
def test_a_class_that_hands_batches_on_hides_no_sampler(change: tuple[str, str]) -> None:
    source = SAMPLERS.replace(f"= train(model, {change[0]}", f"= train(model, {change[1]}")
    part = part_of(source, "sampler")
    assert (part.status, part.edits) == (Status.THERE, ())
    assert part_of(source, "set_epoch").status is Status.MISSING


@pytest.mark.parametrize(
    "change",
    [
        ("= train(model, loader,", "= train(model, prefetch(loader),"),
        ("batch_size=4, sampler=sampler", "**settings(sampler)"),
    ],
)
def test_where_a_distributed_sampler_goes_may_be_unknown(change: tuple[str, str]) -> None:
    """Then no line divides anything a second time."""
    source = SAMPLERS.replace(*change)
    assert source != SAMPLERS
    for name in ("sampler", "set_epoch"):
        part = part_of(source, name)
        assert (part.status, part.edits) == (Status.UNKNOWN, ())


def test_all_sums_over_parts_of_the_samples_are_added_up(save: Save, run_it: Ran) -> None:
    found = plan_of_half(Path(save(SAMPLERS, "parts.py")))
    assert found
    assert found.lacks == ["set_epoch", "metrics over ranks"]
    [part] = [each for each in found.parts if "metrics" in each.name]
    assert part.saw == (
        "loss_sum, number of parts.py:14 would be of one rank's samples only; parts.py:24 walks "
        "one rank's part of the samples, and nothing adds up over the ranks"
    )
    save(found.after, "after.py")
    done = run_it("after.py")
    assert done.code == 0, done.err
    of_one = SAMPLERS.replace("batch_size=4", "batch_size=8")
    call = "        loss = train"
    save(of_one.replace(call, f"        loader.sampler.set_epoch(epoch)\n{call}"), "one.py")
    assert done.out == run_it("-n", 1, "one.py").out
    only = SAMPLERS.replace(", sampler=DistributedSampler(test_set, shuffle=False)", "").replace(
        "        loss = train", "        sampler.set_epoch(epoch)\n        loss = train"
    )
    found = plan_of_half(Path(save(only, "only.py")))
    assert found
    assert found.lacks == ["metrics over ranks"]


def test_a_function_that_one_rank_calls_adds_nothing_up() -> None:
    source = SAMPLERS.replace(
        "        total = evaluate", "        if rank == 0:\n            total = evaluate"
    )
    part = part_of(source, "metrics over ranks")
    assert part.saw.startswith("only one rank evaluates (train.py:24)")
    assert part.edits == ()


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        ('print(f"epoch {epoch} "\n          f"| {total:.3f}")', ""),
        ('print(f"""epoch\n{total}""")', "has a string of several lines, which an indent would"),
        ("print(total); total = 0", "shares its line"),
        ("if total: print(total)", "shares its line"),
    ],
)
def test_a_print_of_several_lines_gets_its_line_or_the_reason(shown: str, reason: str) -> None:
    source = shape(PLAIN).replace('print(f"epoch {epoch}: {total / len(loader):.6f}")', shown)
    part = part_of(source, "logging and saving by rank 0")
    if reason:
        assert reason in part.notes[0]
        assert part.notes[0].endswith(": put it under `if rank == 0:`, too")
        return
    assert not part.notes
    moved = shown.replace("\n", "\n    ")
    assert f"    if rank == 0:\n        {moved}\n" in plan(source, "train.py").after


def test_the_batch_is_whole_on_numbers_of_ranks_that_divide_it() -> None:
    [note] = part_of(shape(PLAIN), "sampler").notes
    assert note.startswith("the batch is divided: on any number of ranks that divides it, all")
