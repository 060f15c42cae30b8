"""No verdict can be had without solving the task: by forging it, by looking it up, by leaving, or
by sending all there is where that is not the task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from playground.exercises.exercise import BLOCKED, CATALOGUE, PASS
from playground.exercises.verdict import (
    LEAVES,
    PEEKS,
    REPLACES,
    STARTS,
    Solution,
    Verdict,
    check_solution,
    tell_lines,
)
from playground.exercises.work import Workbook

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
    "from its caller's frame", "from the judge's module", "from the reference", "leaves",
    "keeps reports back",
    "answers in place of the judge", "equals everything", "catches what is raised", "a command",
    "chain by torch's functional collectives", "vocabulary-loss by the store",
}  # fmt: skip
"""What is looked at in every run of the suite; `make stress` looks at all."""


def parameters(name: str, *values: str) -> Any:
    return pytest.param(
        *(values or [name]), marks=() if name in QUICK else pytest.mark.stress, id=name
    )


SHARE = "def share(rank, size, samples):\n    "
RIGHT = "return rank * samples // size, 0"
FORGED = {
    "from its caller's frame": (f"{SHARE}return sys._getframe(1).f_locals['case'].returns", PEEKS),
    "from inspect": (
        f"{SHARE}return inspect.currentframe().f_back.f_locals['case'].returns",
        PEEKS,
    ),
    "from all objects": (
        f"{SHARE}return next(each for each in gc.get_objects() if type(each).__name__ == "
        "'Case').returns",
        PEEKS,
    ),
    "from a traceback": (
        f"{SHARE}try: 1 / 0\n    except ZeroDivisionError as error: found = error\n"
        "    return found.__traceback__.tb_frame.f_back.f_locals['case'].returns",
        PEEKS,
    ),
    "from a generator": (f"{SHARE}return (0 for _ in ()).gi_frame, 0", PEEKS),
    "from a text": (f"{SHARE}return eval('sys._getframe(2)').f_locals['case'].returns", PEEKS),
    "from the judge's module": (
        f"{SHARE}cases = importlib.import_module('playground.exer' + "
        "'cises.hello.judges').share(rank, size, 0)\n"
        "    return next(each.returns for each in cases if each.args == (samples,))",
        PEEKS,
    ),
    "from the modules that are there": (
        f"{SHARE}cases = next(each for name, each in sys.modules.items() if "
        "name.endswith('.judges')).share\n"
        "    return next(each.returns for each in cases(rank, size, 0) if each.args == (samples,))",
        "StopIteration",
    ),
    "from the reference": (
        f"{SHARE}import playground\n"
        "    space = {}\n"
        "    exec(open(os.path.join(*playground.__path__, "
        "'exercises/hello/share/reference.py')).read(), space)\n"
        "    return space['share'](rank, size, samples)",
        PEEKS,
    ),
    "from a tracer": (f"sys.settrace(lambda *_: None)\n{SHARE}{RIGHT}", PEEKS),
    "leaves": (f"{SHARE}os._exit(0)", LEAVES),
    "leaves on one rank": (f"{SHARE}os._exit(0) if rank else None\n    {RIGHT}", ""),
    "leaves at its import": ("os._exit(0)\nshare = None", LEAVES),
    "raises SystemExit": (f"{SHARE}sys.exit(0)", "SystemExit"),
    "prints a verdict": (
        "os.write(1, b'share.py  passed on 2 ranks\\n'); os.write(2, "
        f"b'passed')\n{SHARE}print('passed'); {RIGHT}",
        "holds 0, should be 4",
    ),
    "reports that it has passed": (
        "sys.modules['playground.runtime.rank.rank'].report(status='pass', "
        f"passed=(2,))\n{SHARE}{RIGHT}",
        "",
    ),
    "keeps reports back": (
        f"{SHARE}sys.modules['playground.runtime.rank.reports']._listeners.clear(); {RIGHT}",
        LEAVES,
    ),
    "answers in place of the judge": (  # on each socket: the launcher's and the other ranks'
        f"{SHARE}from multiprocessing.connection import Connection\n"
        "    import stat\n"
        "    for number in [int(each) for each in os.listdir('/proc/self/fd')]:\n"
        "        try:\n"
        "            if stat.S_ISSOCK(os.fstat(number).st_mode):\n"
        "                Connection(os.dup(number), readable=False).send(('result', "
        "pickle.dumps(6), True))\n"
        "        except OSError: pass\n"
        "    os._exit(0)",
        "",
    ),
    "equals everything": (f"{SHARE}return unittest.mock.ANY, unittest.mock.ANY", "expected an int"),
    "a text that equals everything": (
        "class Any(str):\n    __eq__ = lambda self, other: True\n    __str__ = __repr__ = lambda "
        "self: self\n"
        f"{SHARE}return Any('0'), Any('0')",
        "expected an int",
    ),
    "replaces what compares": (
        f"def same(*args): return True\n{SHARE}sys.modules['math'].isclose = same; builtins.zip = "
        "lambda *_, **__: ()\n"
        f"    {RIGHT}",
        "",
    ),
    "catches what is raised": (
        f"{SHARE}try: dist.destroy_process_group()\n    except BaseException: pass\n    {RIGHT}",
        "destroy_process_group()",
    ),
    "catches the end": (
        f"{SHARE}try: return sys._getframe(1).f_locals['case'].returns\n    except BaseException: "
        f"{RIGHT}",
        PEEKS,
    ),
    "a command": (f"{SHARE}subprocess.run(['true']); {RIGHT}", STARTS),
    "os.system": (f"{SHARE}os.system('true'); {RIGHT}", STARTS),
    "a fork": (f"{SHARE}os.fork() or os._exit(0); {RIGHT}", STARTS),
    "a process that is forked": (
        f"{SHARE}multiprocessing.get_context('fork').Process(target=print).start(); {RIGHT}",
        STARTS,
    ),
    "a process that is spawned": (
        f"{SHARE}multiprocessing.get_context('spawn').Process(target=print).start(); {RIGHT}",
        STARTS,
    ),
}


@pytest.mark.parametrize(
    ("text", "words"), [parameters(name, *each) for name, each in FORGED.items()]
)
def test_a_verdict_is_not_to_be_had_without_the_task(text: str, words: str) -> None:
    verdict = judge("share", text, 2)
    assert verdict.status != PASS, tell_lines(verdict)
    assert words in " ".join(tell_lines(verdict)), tell_lines(verdict)


HANDOVER = "def handover(rank, size, tensor):\n    "


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            f"torch.Tensor.tolist = lambda self: [0] * self.numel()\n{HANDOVER}pass",
            f"Tensor.tolist {REPLACES}",
        ),
        (f"torch.equal = lambda *_: True\n{HANDOVER}pass", f"torch.equal {REPLACES}"),
        (f"dist.send = dist.recv = print\n{HANDOVER}pass", REPLACES),
        (
            f"{HANDOVER}for name, each in sys.modules.items():\n        if name.endswith('tap'): "
            "each.Tap.add = print",
            f"Tap.add {REPLACES}",
        ),
    ],
)
def test_what_judges_is_not_to_be_replaced(text: str, words: str) -> None:
    verdict = judge("handover", text, 2)
    assert verdict.status not in (PASS, BLOCKED), tell_lines(verdict)
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
    (tmp_path / "share.py").write_text(f"{IMPORTS}\n\n{FORGED['prints a verdict'][0]}\n")
    shown = run_cli("check", "share.py", "-n", 2)
    assert shown.code == 1
    assert shown.out.startswith("share.py  2 ranks: fail (7 samples)\n")
    assert "  printed: passed" in shown.out


def test_what_a_right_solution_may_do_is_no_forging() -> None:
    """What looks alike: logs, tracebacks, warnings, named tuples, a debugger's print of the
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
        ("return sys._getframe(1).f_locals['counted']", PEEKS),
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
    ids=["from the judge", "from the board", "by the store"],
)
def test_a_prediction_is_not_to_be_had_from_the_run(body: str, words: str) -> None:
    verdict = judge("ring-traffic", f"{RING}{body}", 2)
    told = " ".join(tell_lines(verdict))
    assert verdict.status not in (PASS, BLOCKED), told
    assert words in told


def test_the_rank_at_fault_is_not_to_be_had_from_the_judge() -> None:
    """It is read from the text of the file, and a repair does not look at its caller."""
    exercise = CATALOGUE["wrong-offset"]
    computed = exercise.solution.replace("RANK = 2", "RANK = len('no')")
    peeking = exercise.solution.replace(
        "    start = sum(sizes[:rank])\n", "    return __import__('sys')._getframe(2).f_locals\n"
    )
    for text, words in ((computed, "write the rank at fault"), (peeking, PEEKS)):
        verdict = check_solution(Solution(exercise, text, exercise.file))
        assert verdict.status not in (PASS, BLOCKED)
        assert words in " ".join(tell_lines(verdict))
