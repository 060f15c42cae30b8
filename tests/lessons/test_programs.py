"""Lessons that are programs: what the command prints, torchrun prints, and the chapter shows; and
their checks see what is wrong."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
from fixtures import Run
from ranks import TORCH

from playground.base.remote import file_of
from playground.lessons import LESSONS, ROWS
from playground.lessons.lesson_row import Lesson
from playground.training import prepare

PROGRAMS = [*ROWS]


def quiet(*warning: str) -> list[Any]:
    """The programs as parameters, where torch prints no warnings: older ones warn of fully_shard's
    layers."""
    return [
        pytest.param(
            lesson, id=lesson.name, marks=[pytest.mark.torch(2, 15)] * (lesson.name in warning)
        )
        for lesson in PROGRAMS
    ]


WRONG_ON_PURPOSE = {"failures", "prove"}
"""Lessons of whose programs some are wrong, and are told so on stderr."""
RESTARTS: dict[str, int] = {"elastic": 2}
"""By lesson, how often its ranks are started again: it kills them."""
SMALLER: dict[str, tuple[str, ...]] = {
    "zero": ("--steps", "3"),
    "tensor": ("--steps", "3"),
    "experts": ("--steps", "2"),
    "ddp": ("--epochs", "1"),
    "sgd": ("--epochs", "1"),
    "prove": ("--samples", "192"),
    "scaling": ("--rounds", "1"),
    "memory": ("--steps", "1"),
    "ladder": ("--steps", "2", "--batch-size", "8"),
    "pipeline": ("--blocks", "4", "--sequences", "1"),
    "parameter-server": ("--steps", "4", "--compute", "1"),
    "data-parallel": ("--steps", "1", "--operations", "10"),
    "bert": ("--steps", "3"),
}
"""By lesson, constants with which its program is quick, as options of its command."""
VARIES = {
    "hello", "zero", "tensor", "experts", "sgd", "ddp", "prove", "scaling", "ladder", "pipeline",
    "memory", "context", "mesh", "parameter-server", "data-parallel", "bert",
}  # fmt: skip
"""Lessons that print what differs from run to run, such as times and process ids."""


@dataclass(frozen=True, kw_only=True)
class KeyLine:
    """A line on which the idea of a program depends."""

    lesson: str
    line: str
    """Without its indentation: the first of these."""
    size: int = 2

    def __str__(self) -> str:
        return f"{self.lesson}-{self.size}-{self.line.strip()}"


def key_lines(lesson: str, *lines: str, sizes: Sequence[int] = (2, 4)) -> list[KeyLine]:
    """These lines of a program, on worlds of these sizes."""
    return [KeyLine(lesson=lesson, line=line, size=size) for size in sizes for line in lines]


CHECKS = {
    "hello": r"largest difference between the two lists (\S+)$",
    "p2p": r"largest difference from the expected data (\S+)$",
    "collectives": r"largest difference from the expected numbers (\S+)$",
    "sgd": r"largest difference from one process (\S+)$",
    "allreduce": r"^\w+(?: +[\d-]+){6} +(\S+)$",
    "ddp": r"largest difference of any rank from one process (\S+)$",
    "ladder": r"^(?!no_averaging)\w+ .* largest difference (\S+)$",
    "zero": r"^\w+(?: +\d+)+ +(\S+)$",
    "tensor": r" difference (\S+)$",
    "experts": r" difference (\S+)$",
    "pipeline": r"largest difference (\S+)$",
    "context": r" difference (\S+)$",
    "mesh": r"^(?:\d+ x ){3}\d+(?: +\d+){4} +(\S+)$",
    "scaling": r"largest difference of a gradient from one process (\S+)$",
    "memory": r"^\w+: largest difference of a gradient from one process (\S+)$",
    "gpt": r"largest difference from the formulas, with [\w']+ blocks (\S+)$",
    "prove": r"^(?:mean_gradient|DDP|sum_over_batch) +differs from one process by (\S+)$",
    "failures": r"^right .* (\S+)$",
    "checkpoint": r"largest difference (\S+)$",
    "bytes": r"ms, from \w+ (\S+)$",
    "bert": r"^\w+ +\d\.\d{4} .* (\S+)$",
    "data-parallel": r"^(?!average_losses)\w+(?: +[\d,]+){4} +(\S+)$",
    "elastic": r"largest difference from a training that was not killed (\S+)$",
    "rpc": r", difference (\S+)$",
    "parameter-server": r"^synchronous .* (\S+)$",
}
"""By lesson, a regular expression: its groups are the differences that the program prints."""
ZERO = [
    "dist.all_reduce(param.grad)", "param.grad /= dist.get_world_size()",
    "self.shard.grad /= dist.get_world_size()",
    "dist.reduce_scatter_tensor(self.shard.grad, grads)",
    "dist.all_gather_into_tensor(self.full, self.shard.detach())", "flat.reduce_gradients()",
    "flat.gather()", "self.flat.gather()", "layer.register_forward_pre_hook(self.gather)",
    "layer.register_full_backward_pre_hook(self.gather)", "param.grad = None",
    "param.register_post_accumulate_grad_hook(on_gradient)", "self.flat.reduce_gradients()",
    "when_complete(flat.params, flat.reduce_gradients)",
    "when_complete(self.flat.params, self.reduce)",
]  # fmt: skip
KEY_LINES = [
    *key_lines(
        "p2p",
        "token += 1", "dist.send(tensor, dst=1)", "dist.recv(tensor, src=0)",
        "sending = dist.isend(number, dst=right)", "dist.send(2 * received, dst=sender)",
        "receiving = dist.irecv(received, src=left)", "dist.recv(first, src=0, tag=LETTER)",
        sizes=(2,),
    ),
    *key_lines(
        "sgd",
        "average_gradients(model)", "dist.all_reduce(", "param.grad /= size",
    ),
    *key_lines(
        "ddp",
        "ddp = DistributedDataParallel(model)", "loss += add", "loss.backward()",
        "clip_grad_norm_(ddp.parameters(), MAX_NORM)",
    ),
    *key_lines(
        "ladder",
        "dist.all_reduce(param.grad)", "param.grad /= dist.get_world_size()",
        "dist.all_reduce(message)", "vector_to_parameters(message, grads)",
        "handles.append(dist.all_reduce(", "param.register_post_accumulate_grad_hook(start)",
        "buckets[-1].append(param)", "self.handle = dist.all_reduce(self.message, async_op=",
        "vector_to_parameters(self.message, self.grads)", "when_complete(bucket.params, ",
        "missing.remove(param)", "missing.update(params)", "action()",
        "param.register_post_accumulate_grad_hook(on_gradient)", "param.grad = piece",
        "self.message /= dist.get_world_size()", "call()",
    ),
    *key_lines("zero", *ZERO),
    *key_lines(
        "tensor",
        "dist.all_reduce(total)", "dist.all_gather(parts, x)",
        "dist.reduce_scatter(total, parts)", "param.register_post_accumulate_grad_hook(",
        "linear.weight = shard(linear.weight, 1)", "linear.bias = linear.bias if",
        "ctx.in_backward = in_backward", "row_parallel(block.attention.out)",
        "x = x + self.after(", "total = x.clone()", "column_parallel(gpt.lm_head)",
    ),
    *key_lines(
        "experts",
        "dist.all_to_all_single(arrived, rows, ", "keep_experts(model)",
        "dist.all_to_all_single(arriving, leaving)", "sum_over_ranks(param.grad)",
        "sum_over_ranks(layer.counts)", "ctx.way_back = received, sent",
    ),
    *key_lines(
        "pipeline",
        "inputs = torch.empty(SEQUENCES, T, C)", "dist.recv(inputs, src=self.rank - 1",
        "inputs.requires_grad_()", "outputs = token_loss(outputs,", "self.held[m] = ",
        "dist.recv(gradient, src=self.rank + 1", "outputs.backward(gradient)",
        "stage.forward(m)", "stage.backward(m)", "stage.backward(m - warm_up)",
        "schedule.step(stage.inputs, target=stage.targets)", "schedule(stage)",
    ),
    *key_lines(
        "context",
        "block = pass_on(block)", "out[rows], lse[rows] = merge(",
        "scores = scores.masked_fill(", "delta = (dout * out)",
        "dq[rows] += added_dq",
        "block[2:, ..., keys, :] += torch.stack(", "dk, dv = pass_on(block[2:])",
        "dist.all_reduce(gradients)", "handle.wait()", "both_lse = torch.logaddexp(",
        "with context_parallel(", "mask = keys <= ", sizes=(2, 3),
    ),
    *key_lines(
        "mesh",
        "dist.all_reduce(message, group=self.group)",
        "dist.reduce_scatter_tensor(shard, message, group=self.group)",
        "dist.all_gather_into_tensor(message, shard, group=self.group)",
        "dist.recv(message, group=group, group_src=src)", "operation = dist.isend",
        "tensor.dist = World(", "context.dist = World(", "pipeline.dist = World(",
        "zero.dist = World(",
        "*(tensor.ParallelBlock(block, tensor.f, tensor.g)",
        "stage.inputs = ", "stage.targets = ", "vars(pipeline).update(",
        "pipeline.one_forward_one_backward(stage)",
        "flat.reduce_gradients()", "optimizer.step()", "flat.gather()",
        "groups.setdefault(tuple(others), []).append(rank)",
    ),
    *key_lines(
        "failures",
        "return train(DistributedDataParallel(make_model()), make_batches(rank, size))",
        "torch.manual_seed(1234)",
    ),
    *key_lines(
        "collectives",
        "dist.broadcast(", "dist.reduce(", "dist.all_reduce(tensor, op=dist.ReduceOp.SUM)",
        "dist.scatter(", "dist.gather(", "dist.all_gather(", "dist.reduce_scatter(",
        "dist.all_to_all(", "dist.all_gather_into_tensor(", "dist.reduce_scatter_tensor(",
        "dist.all_reduce(tensor, group=group)", "dist.all_reduce(tensor, op=op)",
        "dist.broadcast_object_list(", "dist.all_gather_object(", sizes=(2,),
    ),
    *key_lines(
        "allreduce",
        "tensor += received", "exchange(tensor, target, tensors[source], source)",
        "tensor.copy_(sum(tensors))", "exchange(outgoing, right, incoming, left)",
        "tensor += incoming", "outgoing, incoming = incoming, outgoing", "chunk += incoming",
        "exchange(outgoing, right, chunk, left)", "ring_reduce_scatter(tensor)",
        "ring_all_gather(tensor)", "dist.all_reduce(expected)",
        "send(tensor, dst=0)", "send(tensor, dst=other)", "recv(received, src=other)", sizes=(3, 4),
    ),
    *key_lines(
        "hello",
        "dist.all_gather_object(", "store.set(", 'dist.init_process_group("gloo")',
    ),
    *key_lines(
        "prove",
        "dist.all_reduce(param.grad)", "param.grad /= dist.get_world_size()",
        "optimizer.zero_grad()", "loss.backward()", "optimizer.step()",
        "loss = F.cross_entropy(model(inputs), labels, reduction",
    ),
    *key_lines(
        "gpt",
        "dist.all_reduce(total)", "dist.all_reduce(by_library)", "loss.backward()",
        "seen.add(memory.data_ptr())", "kept[innermost] += ",
    ),
    *key_lines(
        "memory",
        "dist.all_reduce(grad)", "grad /= dist.get_world_size()", "output.backward(grad)",
        "ctx.save_for_backward(x)", "return None, x.grad", "copies = {",
        "return Recompute.apply(", "return checkpoint(",
    ),
    *key_lines(
        "bytes",
        "dist.all_reduce(tensor)", "tensor /= self.size",
        "link.average(model.weight.grad)", "left /= left.norm()", "link.average(left)",
        "link.average(right)", "right = matrix.T @ left", "error = matrix - model.weight.grad",
    ),
    *key_lines(
        "elastic",
        "batches.sampler.set_epoch(epoch)",
        "step += 1", "model.load_state_dict(", "optimizer.load_state_dict(",
        "random_generator().set_rng_state(random_state)",
    ),
    *key_lines(
        "checkpoint",
        "rows[low - first : high - first] = ", 'torch.save({"first": first',
        "index.append(", "torch.save(own, ", "torch.save(index, ",
        "block.part(low, high).copy_(", "high = [min(pair)", "dcp.load(",
    ),
    *key_lines(
        "rpc",
        "objects[number] = function(*args)", "self.outputs.backward(gradient)",
        "self.inputs = inputs.detach()", "return None, ctx.graph.call(", "thread.start()",
        "RemoteForward.apply(", "torch.manual_seed(seed)", "dist_autograd.backward(",
    ),
    *key_lines(
        "parameter-server",
        "server.parameters.step(sum(gradients.values())", "dist.all_reduce(gradient, ",
        "worker = dist.recv(gradient", "dist.send_object_list([self.parameters.weight]",
        "dist.send(compute_gradient(", "gradient = compute_gradient(",
    ),
    *key_lines(
        "scaling",
        "dist.all_reduce(flat)", "flat /= size", "param.grad.copy_(", "loss.backward()",
        "model.zero_grad()", "flat = flat[param.numel() :]",
    ),
    *key_lines(
        "bert",
        "logits = data_parallel(model, ", "return data_parallel(LossModel(",
        "return one_device(", "return self.classify(", "wrapped = wrap(model)",
    ),
    *key_lines(
        "data-parallel",
        "copies = {id(tensor)", "replicas.append(deepcopy(", "return losses @ ",
        "return torch.cat(", "return [copy_to(", sizes=(1,),
    ),
]  # fmt: skip
QUICK = {
    "hello": KeyLine(lesson="hello", line="dist.all_gather_object("),
    "p2p": KEY_LINES[0],
    "sgd": KeyLine(lesson="sgd", line="average_gradients(model)"),
    "ddp": KeyLine(lesson="ddp", line="loss.backward()"),
    "ladder": KeyLine(lesson="ladder", line="self.message /= dist.get_world_size()"),
    "zero": KeyLine(lesson="zero", line=ZERO[2]),
    "tensor": KeyLine(lesson="tensor", line="dist.all_reduce(total)"),
    "experts": KeyLine(lesson="experts", line="sum_over_ranks(param.grad)"),
    "failures": KeyLine(lesson="failures", line="torch.manual_seed(1234)"),
    "collectives": KeyLine(lesson="collectives", line="dist.reduce_scatter("),
    "allreduce": KeyLine(lesson="allreduce", line="chunk += incoming", size=3),
    "pipeline": KeyLine(lesson="pipeline", line="dist.recv(gradient, src=self.rank + 1"),
    "context": KeyLine(lesson="context", line="block[2:, ..., keys, :] += torch.stack("),
    "mesh": KeyLine(lesson="mesh", line="flat.gather()"),
    "scaling": KeyLine(lesson="scaling", line="flat /= size"),
    "memory": KeyLine(lesson="memory", line="output.backward(grad)"),
    "gpt": KeyLine(lesson="gpt", line="seen.add(memory.data_ptr())"),
    "prove": KeyLine(lesson="prove", line="param.grad /= dist.get_world_size()"),
    "checkpoint": KeyLine(lesson="checkpoint", line="block.part(low, high).copy_("),
    "bytes": KeyLine(lesson="bytes", line="error = matrix - model.weight.grad"),
    "rpc": KeyLine(lesson="rpc", line="self.outputs.backward(gradient)"),
    "parameter-server": KeyLine(lesson="parameter-server", line="dist.all_reduce(gradient, "),
    "bert": KeyLine(lesson="bert", line="logits = data_parallel(model, "),
    "data-parallel": KeyLine(lesson="data-parallel", line="return losses @ ", size=1),
    "elastic": KeyLine(lesson="elastic", line="random_generator().set_rng_state(random_state)"),
}
"""Of each lesson, the one that the suite tries; the others wait for `make stress`."""
NEW_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Each start under torchrun has a store without the addresses of the start before."""
RESTARTED = re.compile(r"rank \d of \d was killed by SIGKILL; restart \d")
"""What the command says on stderr when it starts the ranks of a lesson again."""
ABOUT_DATA = "looking for MNIST", "data"
"""What the command says on stderr of a lesson that needs data, after what the lesson is about: how
these lines begin."""
NOT_MNIST = "These digits are drawn: "
"""How a line begins that is said where MNIST is out of reach."""
ROUNDING = 1e-16
"""A difference that is as good as none."""


@pytest.fixture(autouse=True)
def _few_digits(few_digits: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MNIST is out of reach, so programs train on a few digits. What they save is in a folder."""
    monkeypatch.setenv(prepare.MIRROR, str(tmp_path))
    monkeypatch.chdir(tmp_path)


def source_of(lesson: Lesson) -> Path:
    return file_of(lesson.module)


ROUNDED = re.compile(r"\b(?:\d(?:\.\d+)?e-(?:1[2-9]|[2-9]\d)|0e\+00)")
"""What is left by float64's rounding: it differs between processors."""


def form(line: str, exact: bool) -> str:
    """A line with # for each number, unless the numbers are the same in every run."""
    spaced = ROUNDED.sub("rounding", " ".join(line.split()))
    return spaced if exact else re.sub(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", "#", spaced)


def shown_in_chapter(lesson: Lesson) -> tuple[list[str], list[str]]:
    """The first run of the command that the chapter shows: its words, and the lines below."""
    chapter = (source_of(lesson).parent / "README.md").read_text(encoding="utf-8")
    pattern = rf"```console\n\$ python -m playground ({lesson.name}\b[^\n]*)\n(.*?)```"
    shown = re.search(pattern, chapter, re.DOTALL)
    assert shown, "the chapter shows no run"
    return shlex.split(shown[1], comments=True)[1:], shown[2].splitlines()


def run_by_torchrun(lesson: Lesson, size: int, folder: Path) -> list[str]:
    """The lines that the lesson's file prints under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}"]
    for attempt in range(3):
        logs = folder / f"logs {attempt}"  # a file for each rank: in one stream, lines would mix
        done = subprocess.run(
            [
                *command, "--standalone", "--local-addr=127.0.0.1", "--redirects=1",
                f"--log-dir={logs}", f"--max-restarts={RESTARTS.get(lesson.name, 0)}",
                str(source_of(lesson)),
            ],
            cwd=folder, capture_output=True, text=True, timeout=600,
            env={**os.environ, "OMP_NUM_THREADS": "1", **NEW_STORES},
        )  # fmt: skip
        if "terminate called" not in done.stderr:
            break  # C++ may end a rank at its very end, while a thread of gloo's is taken down
    assert done.returncode == 0, done.stderr
    texts = [log.read_text(encoding="utf-8") for log in logs.rglob("stdout.log")]
    return "".join(texts).splitlines()


def by_rank(lines: Iterable[str]) -> dict[str, list[str]]:
    """Each rank's lines, in their order. Which rank comes first depends on how busy they are."""
    found = defaultdict(list)
    for line in lines:
        found[line.split(" has ")[0].split(":")[0] if line.startswith("Rank ") else ""].append(line)
    return found


def size_of(words: Sequence[str], lesson: Lesson) -> int:
    return int(words[words.index("-n") + 1]) if "-n" in words else lesson.default_size


@pytest.mark.parametrize("lesson", quiet("zero"))
def test_command_chapter_and_torchrun_print_one_text(
    lesson: Lesson, run_cli: Run, tmp_path: Path
) -> None:
    exact = lesson.name not in VARIES
    words, shown = shown_in_chapter(lesson)
    ran = run_cli(lesson.name, *words, *["--check", "off"] * (lesson.name in WRONG_ON_PURPOSE))
    about_data = [
        line for line in ran.err.splitlines() if line.startswith((f"{lesson.name}: ", *ABOUT_DATA))
    ]
    told = [lesson.name, *ABOUT_DATA] * lesson.needs_mnist
    assert [line.split(":")[0] for line in about_data] == told
    heard = [
        line
        for line in ran.err.splitlines()
        if line not in about_data
        and not line.startswith(NOT_MNIST)
        and (TORCH >= (2, 15) or "playground" in line)
        and not (lesson.name in RESTARTS and RESTARTED.fullmatch(line))
    ]
    assert (ran.code, heard) == (0, [])  # older torch warns of its own calls
    printed = [form(line, exact) for line in ran.out.splitlines()]
    endings = {rank: iter(lines) for rank, lines in by_rank(ran.out.splitlines()).items()}
    for rank, lines in by_rank(line for line in shown if line.strip() != "…").items():
        forms = (form(line, exact) for line in endings[rank])
        for line in lines:
            assert form(line, exact) in forms, f"{line}: not printed, or not in this place"
    by_torchrun = run_by_torchrun(lesson, size_of(words, lesson), tmp_path)
    assert sorted(form(line, exact) for line in by_torchrun) == sorted(printed)


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, id=str(key), marks=[] if key in QUICK.values() else pytest.mark.stress)
        for key in KEY_LINES
    ],
)
def test_without_its_key_line_the_check_of_a_program_fails(
    key: KeyLine, run_cli: Run, tmp_path: Path
) -> None:
    """It ends with a sentence and exit code 1. If it prints all of its differences, the largest one
    is 10^6 times as large."""
    name, file = key.lesson, tmp_path / "lesson.py"
    text = source_of(LESSONS[name]).read_text(encoding="utf-8")
    pattern = rf"^( *){re.escape(key.line)}.*$"
    broken, count = re.subn(pattern, r"\1pass", text, count=1, flags=re.MULTILINE)
    assert count == 1, f"{key.line} does not stand there"
    file.write_text(broken, encoding="utf-8")
    right = run_cli(name, "-n", key.size, *SMALLER.get(name, ()))
    assert right.code == 0, right.err
    restarts = "--restarts", RESTARTS.get(name, 0)
    wrong = run_cli("run", "-n", key.size, *restarts, *sets_of(name), file)
    assert (wrong.code, "playground: " in wrong.err) == (1, True)
    before, after = (differences(CHECKS[name], ran.out) for ran in (right, wrong))
    if len(after) == len(before):
        assert not largest(after) < 1e6 * max(*before, ROUNDING)


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A change of a program after which all that it compares is still the same."""

    lesson: str
    old: str
    new: str
    said: str
    """What the program then ends with."""
    size: int = 2


STEP = "        server.parameters.step(gradient / len(server.pushes))\n"
MISTAKES = {
    "scaling, no optimizer.step": Mistake(
        lesson="scaling",
        old="    average_gradients(model, gbit)\n    optimizer.step()\n",
        new="    average_gradients(model, gbit)\n",
        said="optimizer.step was called 3 times, not 9",
    ),
    "parameter-server, a sum in place of a mean": Mistake(
        lesson="parameter-server",
        old=f"{STEP}        server.reply(worker)\n",
        new="        server.parameters.step(gradient)\n        server.reply(worker)\n",
        said="not a step of LR / workers with each gradient: asynchronous",
        size=3,
    ),
    "parameter-server, a gradient is used twice": Mistake(
        lesson="parameter-server",
        old=f"{STEP}        waiting.append(worker)\n",
        new=f"{STEP}{STEP}        waiting.append(worker)\n",
        said="not a step of LR / workers with each gradient: bounded",
        size=3,
    ),
    "failures, no zero_grad": Mistake(
        lesson="failures",
        old="    for inputs, targets in batches:\n        optimizer.zero_grad()\n",
        new="    for inputs, targets in batches:\n",
        said="right: not the training of one process",
    ),
    "elastic, no snapshot": Mistake(
        lesson="elastic",
        old="                    save(file, model, optimizer, step)\n",
        new="                    pass\n",
        said="this start does not begin after a snapshot of the start before",
    ),
    "elastic, no snapshot is loaded": Mistake(
        lesson="elastic",
        old="done, random_state = load(file, model, optimizer)",
        new="done, random_state = 0, None",
        said="this start does not begin after a snapshot of the start before",
    ),
    "data-parallel, no optimizer.step": Mistake(
        lesson="data-parallel",
        old="            optimizer.step()  # on",
        new="            pass  # on",
        said="nothing is trained: no parameter has changed",
        size=1,
    ),
    "bert, the whole batch on each rank": Mistake(
        lesson="bert",
        old="tokens.chunk(size)[rank], labels.chunk(size)[rank], devices",
        new="tokens, labels, devices",
        said="average_gradients: each rank computes the loss of the whole batch",
    ),
    "bert, no optimizer.step": Mistake(
        lesson="bert",
        old="            optimizer.step()\n",
        new="",
        said="nothing is trained: no parameter has changed",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_that_both_sides_of_a_comparison_make_is_named(
    mistake: Mistake,
    run_cli: Run,
    tmp_path: Path,
    digits_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(prepare.DATA_DIR, str(digits_folder.parents[1]))
    name, file = mistake.lesson, tmp_path / "lesson.py"
    text = source_of(LESSONS[name]).read_text(encoding="utf-8")
    assert text.count(mistake.old) == 1
    file.write_text(text.replace(mistake.old, mistake.new), encoding="utf-8")
    restarts = "--restarts", RESTARTS.get(name, 0)
    ran = run_cli("run", "-n", mistake.size, *restarts, *sets_of(name), file)
    assert ran.code == 1
    said = " ".join(ran.err.partition("\nTraceback")[0].split())  # which is wrapped
    assert re.search(rf"playground: .*{re.escape(mistake.said)}", said)


def test_every_program_has_a_key_line() -> None:
    assert {*QUICK} == {*CHECKS} == {lesson.name for lesson in PROGRAMS}


@pytest.mark.parametrize("lesson", PROGRAMS, ids=lambda lesson: lesson.name)
def test_key_lines_stand_in_their_program(lesson: Lesson) -> None:
    """Most are deleted in `make stress` only, which would be late to hear that one was reworded."""
    lines = [line.strip() for line in source_of(lesson).read_text(encoding="utf-8").splitlines()]
    keys = {key.line for key in (*KEY_LINES, *QUICK.values()) if key.lesson == lesson.name}
    assert [key for key in keys if not any(line.startswith(key) for line in lines)] == []


def sets_of(name: str) -> list[str]:
    """The constants of `SMALLER`, for `run`."""
    words = SMALLER.get(name, ())
    pairs = zip(words[::2], words[1::2], strict=True)
    sets = (f"{option[2:].replace('-', '_').upper()}={value}" for option, value in pairs)
    return [word for each in sets for word in ("--set", each)]


def differences(check: str, printed: str) -> list[float]:
    """The differences that a program has printed."""
    return [float(each) for each in re.findall(check, printed, re.MULTILINE)]


def largest(differences: Sequence[float]) -> float:
    """nan is no small difference."""
    return nan if any(map(isnan, differences)) else max(differences)


def count_statements(tree: ast.AST) -> int:
    """However they are wrapped, and without docstrings."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return sum(
        not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in statements
    )


LONGEST = {
    "failures": 134,
    "zero": 154,
    "memory": 137,
    "pipeline": 135,
    "tensor": 134,
    "context": 134,
    "experts": 132,
    "mesh": 156,
    "bytes": 146,
    "checkpoint": 129,
    "parameter-server": 133,
    "data-parallel": 127,
}
"""Statements that a program may have, if more than 126."""
GIVEN = {f"playground.lessons.{name}" for name in ("devices", "gpt", "mnist")}
"""What a program may import of ours."""


@pytest.mark.parametrize("lesson", PROGRAMS, ids=lambda lesson: lesson.name)
def test_a_program_is_read_in_one_go(lesson: Lesson) -> None:
    source = source_of(lesson).read_text(encoding="utf-8")
    tree = ast.parse(source)
    assert count_statements(tree) <= LONGEST.get(lesson.name, 126)
    assert [line for line in source.splitlines() if len(line) > 100] == []
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert [each.name for each in functions if each.args.defaults or each.args.kw_defaults] == []


ONLY_PRINT = {
    "allreduce": {"reduce_number", "compare", "run"},
    "bert": {"print_row"},
    "data-parallel": {"print_chunks", "print_row", "run", "time_threads"},
    "experts": {"run"},
    "failures": {"compare"},
    "gpt": {"find_shapes", "print_block", "print_row", "print_step"},
    "tensor": {"count_kib", "run"},
}
"""By lesson, functions that its chapter describes and does not show: they print the table."""


@pytest.mark.parametrize("lesson", PROGRAMS, ids=lambda lesson: lesson.name)
def test_a_chapter_shows_the_whole_of_its_program(lesson: Lesson) -> None:
    """Every function and class, as it is, but those that only print; and the run that the docstring
    shows."""
    source = source_of(lesson).read_text(encoding="utf-8")
    chapter = (source_of(lesson).parent / "README.md").read_text(encoding="utf-8")
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if node.name in ONLY_PRINT.get(lesson.name, ()):
                assert f"`{node.name}`" in chapter
                continue
            assert str(ast.get_source_segment(source, node)) in chapter, node.name
    words, shown = shown_in_chapter(lesson)
    docstring = str(ast.get_docstring(tree))
    assert f"    python -m playground {' '.join([lesson.name, *words])}\n" in docstring
    example = re.findall(r"^    (.*)$", docstring.split("lesson.py\n")[1], re.MULTILINE)
    assert len(example) > 3
    assert [line for line in example if line != "…" and line not in shown] == []


OF_ONE_PROCESS = {"gpt", "data-parallel"}
"""Lessons whose chapter has the reader write a program of one process: tests/test_readme.py runs
it."""


@pytest.mark.parametrize("lesson", quiet("zero", "mesh"))
def test_programs_of_a_chapter_run_under_run(
    lesson: Lesson, run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the reader saves. One of p2p's is a deadlock, with the report that it shows."""
    monkeypatch.chdir(tmp_path)
    chapter = (source_of(lesson).parent / "README.md").read_text(encoding="utf-8")
    blocks = [
        block
        for block in re.findall(r"^```python\n(.*?)^```$", chapter, re.DOTALL | re.MULTILINE)
        if '\ndist.init_process_group("gloo")\n' in block
    ]
    assert bool(blocks) != (lesson.name in OF_ONE_PROCESS)
    for number, block in enumerate(blocks):
        file = tmp_path / f"program_{number}.py"
        file.write_text(block, encoding="utf-8")
        ran = run_cli("run", "-n", 2, file)
        deadlock = re.search(r"^playground: deadlock: (?:.*\n)*?(?=```)", chapter, re.MULTILINE)
        if ran.code == 1 and deadlock:
            deadlock_form, told = (
                form(" ".join(text.split()).replace("both_send.py", file.name), exact=False)
                for text in (deadlock[0], ran.err)
            )
            assert told == deadlock_form
        else:
            assert (ran.code, ran.err) == (0, "")
            assert ran.out.count("Rank ") == 2


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--letter", "x"), 2, "Invalid value for '--letter': 'x' is not a valid integer."),
        (("--lettre", "3"), 2, "No such option '--lettre'."),
        (("--ranks", "3"), 2, "No such option '--ranks'. Did you mean '-n', '--world-size'?"),
        (("--letter", "3", "4"), 2, "Got unexpected extra argument (4)"),
        (("--timeout", "0"), 2, "Invalid value for '--timeout'"),
        (("-n", "1"), 1, "a message needs at least 2 ranks (lesson.py:"),
    ],
)
def test_what_a_lesson_cannot_do_is_one_line(
    words: tuple[str, ...], code: int, said: str, run_cli: Run
) -> None:
    ran = run_cli("p2p", *words)
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.startswith(f"playground: {said}")
    assert ran.err.count("\n") == 1


def test_its_constants_are_options_with_their_comments(run_cli: Run) -> None:
    shown = " ".join(run_cli("p2p", "--help").out.split())
    parcel = "a tag: recv(tag=7) takes only a message that was sent with tag=7"
    assert f"--parcel INTEGER {parcel} [default: 7]" in shown
    assert "--letter INTEGER another tag [default: 8]" in shown


def test_a_constant_has_the_value_that_is_given(run_cli: Run) -> None:
    """With one tag for both, messages keep their order."""
    same = run_cli("p2p", "--letter", 7)
    assert "Rank 1 has data -4.0 after tags, expected 4.0\n" in same.out
    assert "Rank 1: largest difference from the expected data 8.0\n" in same.out


@pytest.mark.torch(2, 15)  # older ones warn of fully_shard's layers
def test_the_bytes_of_zero_are_to_the_letter_those_of_its_docstring(run_cli: Run) -> None:
    ran = run_cli("zero", "--steps", 2)
    assert (ran.code, ran.err) == (0, "")
    rows = [line.split()[:-1] for line in ran.out.splitlines()[1:]]
    docstring = str(ast.get_docstring(ast.parse(source_of(LESSONS["zero"]).read_text("utf-8"))))
    example = [line.split()[:-1] for line in docstring.splitlines() if "e-14" in line]
    assert len(example) == 3
    assert [row for row in example if row not in rows] == []


def test_ranks_that_cannot_have_equal_shards_are_refused_in_one_line(run_cli: Run) -> None:
    ran = run_cli("zero", "-n", 5)
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert "shards must be equal: choose a number of ranks that divides 24" in ran.err
