"""What a verdict is not had by: leaving, printing, a value of another type, or sending all there is
where that is not the task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from playground.exercises.attempt import LEAVES, Solution
from playground.exercises.exercise import BLOCKED, CATALOGUE, PASS
from playground.exercises.verdict import Verdict, check_solution, tell_lines
from playground.exercises.workbook import Workbook

IMPORTS = """\
import builtins, gc, importlib, inspect, multiprocessing, os, pickle
import subprocess, sys, threading, unittest.mock
import torch
import torch.distributed as dist
import torch.nn.functional as F
"""


def judge(name: str, text: str, world: int | None = None) -> Verdict:
    exercise = CATALOGUE[name]
    before = Workbook(Path("nowhere")).solutions_before(exercise)
    return check_solution(
        Solution(exercise, f"{IMPORTS}\n\n{text}\n", exercise.file), before, world
    )


QUICK = {
    "leaves", "equals everything", "catches what is raised",
    "chain by torch's functional collectives", "vocabulary-loss by the store",
}  # fmt: skip
"""What is looked at in every run of the suite; `make stress` looks at all."""


def parameters(name: str, *values: str) -> Any:
    return pytest.param(
        *(values or [name]), marks=() if name in QUICK else pytest.mark.stress, id=name
    )


SHARE = "def share(rank, size, samples):\n    "
RIGHT = "return rank * samples // size, 0"
NOT_SOLVED = {
    "leaves": (f"{SHARE}os._exit(0)", LEAVES),
    "leaves on one rank": (f"{SHARE}os._exit(0) if rank else None\n    {RIGHT}", ""),
    "leaves at its import": ("os._exit(0)\nshare = None", LEAVES),
    "raises SystemExit": (f"{SHARE}sys.exit(0)", "SystemExit"),
    "prints a verdict": (
        "os.write(1, b'share.py  passed on 2 ranks\\n'); os.write(2, "
        f"b'passed')\n{SHARE}print('passed'); {RIGHT}",
        "holds 0, should be 4",
    ),
    "equals everything": (f"{SHARE}return unittest.mock.ANY, unittest.mock.ANY", "expected an int"),
    "a text that equals everything": (
        "class Any(str):\n    __eq__ = lambda self, other: True\n    __str__ = __repr__ = lambda "
        "self: self\n"
        f"{SHARE}return Any('0'), Any('0')",
        "expected an int",
    ),
    "catches what is raised": (
        f"{SHARE}try: dist.destroy_process_group()\n    except BaseException: pass\n    {RIGHT}",
        "destroy_process_group()",
    ),
}


@pytest.mark.parametrize(
    ("text", "words"), [parameters(name, *each) for name, each in NOT_SOLVED.items()]
)
def test_a_task_that_is_not_solved_does_not_pass(text: str, words: str) -> None:
    verdict = judge("share", text, 2)
    assert verdict.status != PASS, tell_lines(verdict)
    assert words in " ".join(tell_lines(verdict)), tell_lines(verdict)


def test_a_tensor_of_a_class_of_its_own_is_compared_as_a_tensor() -> None:
    text = """\
class Any(torch.Tensor):
    dtype = shape = unittest.mock.ANY
    def tolist(self): return [unittest.mock.ANY] * self.numel()
    def detach(self): return self
    def flatten(self): return self
    def as_subclass(self, _): return self
    def __getitem__(self, _): return self


def swap(rank, size, tensor):
    return torch.zeros_like(tensor).as_subclass(Any)"""
    verdict = judge("swap", text, 2)
    assert verdict.status != PASS
    assert "holds 0, should be 10" in " ".join(tell_lines(verdict)), tell_lines(verdict)


def test_words_that_a_solution_prints_are_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "share.py").write_text(f"{IMPORTS}\n\n{NOT_SOLVED['prints a verdict'][0]}\n")
    shown = run_cli("check", "share.py", "-n", 2)
    assert shown.code == 1, shown.err
    assert shown.out.startswith("share.py  2 ranks: fail (7 samples)\n")
    assert "  printed: passed" in shown.out


def test_a_right_solution_may_log_and_print_its_stack() -> None:
    """Logs, tracebacks, warnings, named tuples, a debugger's print of the
    stack."""
    text = f"""\
import collections, logging, traceback, typing, warnings
Pair = collections.namedtuple("Pair", "begin end")


class Share(typing.NamedTuple):
    begin: int
    end: int


{SHARE}logging.getLogger("mine").warning("I am %s", rank)
    warnings.warn("a warning", stacklevel=2)
    gc.collect()
    traceback.print_stack()
    try:
        1 / 0
    except ZeroDivisionError:
        traceback.print_exc()
    ends = [0]
    for other in range(size):
        ends.append(ends[-1] + samples // size + (other < samples % size))
    return tuple(Pair(*Share(ends[rank], ends[rank + 1])))"""
    verdict = judge("share", text, 2)
    assert verdict.status == PASS, tell_lines(verdict)


ALL = """\
def gather(tensor):
    everyones = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, tensor.contiguous())
    return everyones


def gather_objects(value):
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, value)
    return everyones


"""
SENDS_ALL = {
    "handover": "(rank, size, tensor):\n    everyones = gather(tensor)\n    if rank == 1: "
    "tensor.copy_(everyones[0])",
    "handover by a broadcast": "(rank, size, tensor):\n    for root in range(size):\n"
    "        theirs = tensor.clone(); dist.broadcast(theirs, root)\n"
    "        if root == 0 and rank == 1: tensor.copy_(theirs)",
    "swap": "(rank, size, tensor):\n    return gather(tensor)[rank ^ 1 if rank ^ 1 < size else "
    "rank]",
    "shift": "(rank, size, tensor):\n    tensor.copy_(gather(tensor)[rank - 1])",
    "token-ring": "(rank, size, tensor):\n    return sum(gather(tensor)[: (rank or size - 1) + 1])",
    "column": "(rank, size, matrix, index):\n    everyones = gather(matrix)\n"
    "    if rank == 1: matrix[:, index] = everyones[0][:, index]",
    "chain": "(rank, size, tensor):\n    tensor.copy_(sum(gather(tensor)))",
    "reduce-scatter": "(rank, size, tensor):\n    tensor.copy_(sum(gather(tensor)))",
    "ring": "(rank, size, tensor):\n    everyones = [tensor.clone() for _ in range(size)]\n"
    "    for root in range(size): dist.broadcast(everyones[root], root)\n    "
    "tensor.copy_(sum(everyones))",
    "doubling": "(rank, size, tensor):\n    tensor.copy_(sum(gather(tensor)))",
    "all-to-all": "(rank, size, chunks):\n    return [each[rank] for each in "
    "gather(torch.stack(chunks))]",
    "groups": "(rank, size, tensor):\n    tensor.copy_(gather(tensor)[rank % 2])",
    "token-loss": "(rank, size, model, inputs, labels):\n"
    "    x, y = (torch.cat(gather(each)) for each in (inputs, labels))\n"
    "    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()",
    "uneven": "(rank, size, model, batches, step):\n"
    "    everyones = gather_objects(batches)\n"
    "    for number in range(max(map(len, everyones))):\n"
    "        model.zero_grad()\n"
    "        now = [each[number] for each in everyones if number < len(each)]\n"
    "        losses = [F.mse_loss(model(x), y) for x, y in now]\n"
    "        torch.stack(losses).mean().backward()\n"
    "        step()",
    "clip": "(rank, size, stage, max_norm):\n"
    "    grads = [param.grad for param in stage.parameters() if param.grad is not None]\n"
    "    everyones = [each for grads in gather_objects(grads) for each in grads]\n"
    "    norm = torch.cat([each.flatten() for each in everyones]).norm().item() if everyones else "
    "0.0\n"
    "    for grad in grads: grad *= min(1, max_norm / norm)\n"
    "    return norm",
    "sync": "(rank, size, parameters, compute, steps, lr):\n"
    "    for _ in range(steps):\n"
    "        mine = compute(parameters) if rank else torch.zeros_like(parameters)\n"
    "        parameters -= lr * sum(gather(mine)) / (size - 1)",
    "mirrored": "(rank, size, tokens, columns, rows):\n"
    "    up, down = torch.cat(gather(columns.detach()), 1), torch.cat(gather(rows.detach()))\n"
    "    width = columns.shape[1]\n"
    "    up[:, rank * width : (rank + 1) * width] = columns\n"
    "    down[rank * width : (rank + 1) * width] = rows\n"
    "    return torch.relu(tokens @ up) @ down",
    "combine": "(rank, size, results, received, sent, order, weights):\n"
    "    everyones = gather_objects([each.clone() for each in results.split(received)])\n"
    "    back = torch.cat([each[rank] for each in everyones])\n"
    "    rows = torch.empty_like(back)\n"
    "    rows[order] = back\n"
    "    return (rows.unflatten(0, weights.shape) * weights[:, :, None]).sum(1)",
    "two-by-two": "(rank, size, data, tensor, tokens, targets, columns, rows):\n"
    "    everyones = gather_objects([tokens, targets, columns.detach(), rows.detach()])\n"
    "    up = torch.cat([everyones[each][2] for each in (0, 1)], 1).requires_grad_()\n"
    "    down = torch.cat([everyones[each][3] for each in (0, 1)]).requires_grad_()\n"
    "    x, y = (torch.cat([each[place] for each in everyones[::2]]) for place in (0, 1))\n"
    "    loss = F.mse_loss(torch.relu(x @ up) @ down, y)\n"
    "    loss.backward()\n"
    "    columns.grad, rows.grad = up.grad.chunk(2, 1)[rank % 2], down.grad.chunk(2)[rank % 2]\n"
    "    return loss.detach()",
    "vocabulary-loss by the store": "(rank, size, logits, targets):\n"
    "    store, name = dist.distributed_c10d._get_default_store(), f'mine {len(targets)} "
    "{float(logits[0, 0])}'\n"
    "    name = f'{len(targets)}'\n"
    "    store.set(f'{name} of {rank}', pickle.dumps(logits.tolist()))\n"
    "    parts = [torch.tensor(pickle.loads(store.get(f'{name} of {each}'))).double() for each in "
    "range(size)]\n"
    "    return F.cross_entropy(torch.cat(parts, 1), targets)",
    "chain by torch's functional collectives": "(rank, size, tensor):\n"
    "    from torch.distributed import _functional_collectives\n"
    "    tensor.copy_(_functional_collectives.all_reduce(tensor, 'sum', dist.group.WORLD))",
    "chain by the group's own method": "(rank, size, tensor):\n    "
    "dist.group.WORLD.allreduce([tensor]).wait()",
    "chain by what is wrapped": "(rank, size, tensor):\n    dist.all_reduce.__wrapped__(tensor)",
    "broadcast by all_gather": "(rank, size, tensor, root):\n    "
    "tensor.copy_(gather(tensor)[root])",
}


@pytest.mark.parametrize("name", [parameters(name) for name in SENDS_ALL])
def test_what_sends_all_there_is_does_not_pass(name: str) -> None:
    exercise = CATALOGUE[name.partition(" by ")[0]]
    verdict = judge(exercise.name, f"{ALL}def {exercise.function}{SENDS_ALL[name]}")
    told = " ".join(tell_lines(verdict))
    assert verdict.status not in (PASS, BLOCKED), told
    assert verdict.mistake in ("sends more than it must", "short cut"), told


RING = "def ring_traffic(ranks, elements):\n    "


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "board = importlib.import_module('playground.lessons.all_reduce.lesson')\n"
            "    steps, _ = board.measure(board.ring, torch.ones(elements))\n"
            "    return {'messages': steps}",
            "is not to be used here, says the task",
        ),
        (
            "dist.distributed_c10d._get_default_store().set('mine', str(elements))\n"
            "    sent = 4 * elements * (ranks - 1)\n"
            "    return {'messages': 2 * ranks - 2, 'all_bytes': 2 * sent, 'root_bytes': sent}",
            "have left it; 0 are enough",
        ),
    ],
    ids=["from the board", "by the store"],
)
def test_a_prediction_is_not_to_be_had_from_the_run(body: str, words: str) -> None:
    verdict = judge("ring-traffic", f"{RING}{body}", 2)
    told = " ".join(tell_lines(verdict))
    assert verdict.status not in (PASS, BLOCKED), told
    assert words in told


def test_the_rank_at_fault_is_read_from_the_text() -> None:
    exercise = CATALOGUE["wrong-offset"]
    computed = exercise.solution.replace("RANK = 2", "RANK = len('no')")
    verdict = check_solution(Solution(exercise, computed, exercise.file))
    assert verdict.status not in (PASS, BLOCKED)
    assert "write the rank at fault" in " ".join(tell_lines(verdict))
