"""Lessons that are programs: what they print is true, is what their chapters show, and would show a
mistake. What each function leaves is compared with an oracle."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from boards import source_of
from fixtures import Run, Worlds
from ranks import needs_shm
from test_lessons import docstring_table
from test_readme import form
from torch import nn
from torch.nn.utils import parameters_to_vector

from playground.lessons import PATH, mnist
from playground.lessons.gpt import GPT, make_batch, next_token_loss
from playground.lessons.p2p import lesson as p2p
from playground.lessons.zero import lesson as zero
from playground.runtime.remote import ROOT
from playground.training.one_process import EXACT

PROGRAMS = [lesson.name for lesson in PATH if lesson.is_program]
LONGEST = {"zero": 150}
"""Statements that a program may have, if more than 120."""
GIVEN = {"playground.lessons.gpt", "playground.lessons.mnist"}
LIBRARIES = {"torch", "torchvision"}


def count_statements(tree: ast.AST) -> int:
    """However they are wrapped, and without docstrings."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return sum(
        not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in statements
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_read_in_one_go(name: str) -> None:
    source = source_of(name)
    tree = ast.parse(source)
    assert count_statements(tree) <= LONGEST.get(name, 120)
    assert [line for line in source.splitlines() if len(line) > 100] == []
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert [each.name for each in functions if each.args.defaults or each.args.kw_defaults] == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_imports_torch_and_what_is_given(name: str) -> None:
    imported = set[str]()
    for node in ast.walk(ast.parse(source_of(name))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module))
    assert {module for module in imported if module.split(".")[0] not in LIBRARIES} <= GIVEN


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_chapter_shows_the_whole_of_its_program(name: str) -> None:
    """Every function and class, as it is."""
    folder = next(ROOT / lesson.path for lesson in PATH if lesson.name == name)
    chapter = (folder / "README.md").read_text(encoding="utf-8")
    source = source_of(name)
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            assert str(ast.get_source_segment(source, node)) in chapter, node.name


def shown_output(name: str) -> tuple[list[str], list[str]]:
    """The words of the first command that a chapter shows, and the lines below it."""
    folder = next(ROOT / lesson.path for lesson in PATH if lesson.name == name)
    chapter = (folder / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^\$ python -m playground (.*)\n((?:.*\n)*?)```", chapter, re.MULTILINE)
    assert found
    return found[1].split(), found[2].splitlines()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_s_docstring_shows_what_its_chapter_shows(name: str) -> None:
    words, shown = shown_output(name)
    docstring = str(ast.get_docstring(ast.parse(source_of(name))))
    assert f"    python -m playground {' '.join(words)}\n" in docstring
    example = re.findall(r"^    (.*)$", docstring.split("lesson.py\n")[1], re.MULTILINE)
    assert len(example) > 3
    assert [line for line in example if line != "…" and line not in shown] == []


def test_p2p_prints_what_its_chapter_shows(run_cli: Run) -> None:
    words, shown = shown_output("p2p")
    ran = run_cli(*words)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    left_out = [line for line in lines if "any_source" in line or "tags" in line]
    assert len(left_out) == 6
    place = shown.index("…")
    assert sorted(lines) == sorted([*shown[:place], *left_out, *shown[place + 1 :]])


def test_zero_prints_what_its_chapter_shows(run_cli: Run) -> None:
    """All bytes to the letter; the differences are rounding, of another machine perhaps."""
    words, shown = shown_output("zero")
    ran = run_cli(*words, "--steps", 3)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert form(lines) == form(shown)
    assert [line.split()[:-1] for line in lines] == [line.split()[:-1] for line in shown]
    assert max(differences(ran.out)) <= EXACT


def leave_tensors(rank: int, size: int) -> dict[str, float]:
    """What each function of p2p leaves."""
    functions = [
        p2p.blocking, p2p.immediate, p2p.exchange, p2p.batch, p2p.ring, p2p.any_source, p2p.tags,
    ]  # fmt: skip
    return {function.__name__: function(rank, size).item() for function in functions}


def test_p2p_leaves_what_its_tables_say(world: Worlds) -> None:
    by_rank = world(3).run(leave_tensors)
    for name in by_rank[0]:
        table = docstring_table("p2p", name)
        assert [row["after"] for row in table] == [found[name] for found in by_rank], name


@pytest.mark.parametrize(
    ("size", "backend"),
    [(2, "gloo"), (4, "gloo"), (5, "gloo"), pytest.param(3, "shm", marks=needs_shm)],
)
def test_p2p_in_any_world(size: int, backend: str, world: Worlds) -> None:
    found = world(size, backend=backend).run(leave_tensors)
    left = [(rank - 1) % size for rank in range(size)]
    expected = {
        "blocking": [1.0, 1.0, 0.0, 0.0, 0.0],
        "immediate": [1.0, 1.0, 0.0, 0.0, 0.0],
        "exchange": [10.0 + other for other in left],
        "batch": [10.0 + other for other in left],
        "ring": [float(size), *(rank + 1.0 for rank in range(1, size))],
        "any_source": [10.0, *(20.0 + 2 * rank for rank in range(1, size))],
        "tags": [0.0, 4.0, 0.0, 0.0, 0.0],
    }
    for name, values in expected.items():
        assert [each[name] for each in found] == values[:size], name


def train_alone(batches: list[torch.Tensor]) -> torch.Tensor:
    """One process with the whole batches: the parameters at the end."""
    torch.manual_seed(1234)
    model = GPT()
    optimizer = torch.optim.Adam(model.parameters(), zero.LR)
    for batch in batches:
        optimizer.zero_grad()
        next_token_loss(model, batch).backward()
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


class Most:
    """The most bytes of gradients, and of parameters, that a model has in backward."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        self.gradients = self.parameters = 0
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.look)

    def look(self, _: torch.Tensor) -> None:
        grads = [param.grad.nbytes for param in self.params if param.grad is not None]
        self.gradients = max(self.gradients, sum(grads))
        self.parameters = max(self.parameters, zero.count_bytes(self.params))


def train_by_every_method(
    rank: int, size: int
) -> dict[str, tuple[float, list[float], tuple[float, float]]]:
    """By method: the difference from one process, what it holds, and the most that the model has in
    backward, both in bytes of the parameters."""
    torch.set_default_dtype(torch.float64)
    try:
        batches = [[make_batch(2, seed=size * step + r) for r in range(size)] for step in range(3)]
        expected = train_alone([torch.cat(parts) for parts in batches])
        found = {}
        for train in (zero.data_parallel, zero.zero1, zero.zero2, zero.zero3, zero.fsdp):
            torch.manual_seed(1234)
            model = GPT()
            most = Most(model)
            held = train(model, [parts[rank] for parts in batches])
            params = parameters_to_vector(model.parameters()).detach()
            off = (params - expected).abs().max().item()
            whole = expected.nbytes
            found[train.__name__] = (
                off,
                [count / whole for count in held],
                (most.gradients / whole, most.parameters / whole),
            )
        return found
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_zero_is_one_training_and_each_stage_shards_one_more(size: int, world: Worlds) -> None:
    shards = {"data_parallel": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}
    block = 111_840 / 235_440  # the largest layer, in parameters
    for found in world(size, timeout=300).run(train_by_every_method):
        assert {*found} == {*shards}
        for name, (off, held, (gradients, parameters)) in found.items():
            assert off <= EXACT, name
            form = [
                copies / (size if shards[name] >= first else 1)
                for copies, first in ((1, 3), (1, 2), (2, 1))
            ]
            assert held == pytest.approx(form, rel=1e-3), name
            if name in ("zero2", "zero3"):  # it reduces and frees in backward, not after it
                assert gradients == pytest.approx(block)
            if name == "zero3":  # only the layer that runs is there
                assert parameters == pytest.approx(block)


def differences(printed: str) -> list[float]:
    """The last number of each line that ends in one."""
    return [float(last) for last in re.findall(r" (\S*\d)$", printed, re.MULTILINE)]


P2P_LINES = [
    "dist.send(tensor, dst=1)", "dist.recv(tensor, src=0)", "request = dist.irecv(tensor, src=0)",
    "sending = dist.isend(number, dst=right)", "receiving = dist.irecv(received, src=left)",
    "for request in dist.batch_isend_irecv(operations):\n        request.wait()", "token += 1",
    "dist.send(2 * received, dst=sender)", "dist.recv(first, src=0, tag=LETTER)",
]  # fmt: skip
ZERO_LINES = [
    "dist.all_reduce(param.grad)", "param.grad /= dist.get_world_size()",
    "grads /= dist.get_world_size()", "dist.reduce_scatter_tensor(self.shard.grad, grads)",
    "dist.all_gather_into_tensor(self.full, self.shard.detach())", "flat.reduce_gradients()",
    "flat.gather()", "self.flat.gather()", "layer.register_full_backward_pre_hook(self.gather)",
    "layer.register_forward_pre_hook(self.gather)", "param.grad = None",
    "param.register_post_accumulate_grad_hook(self.on_gradient)",
]  # fmt: skip
KEY_LINES = [
    *(("p2p", line, 2) for line in P2P_LINES),
    *(("zero", line, size) for size in (2, 4) for line in ZERO_LINES),
]
QUICK = {("zero", "grads /= dist.get_world_size()", 2), *KEY_LINES[: len(P2P_LINES)]}
ROUNDING = 1e-13


@pytest.mark.parametrize(
    ("name", "line", "size"),
    [
        pytest.param(
            *each, marks=[] if each in QUICK else pytest.mark.stress, id=" ".join(map(str, each))
        )
        for each in KEY_LINES
    ],
)
def test_without_a_key_line_the_check_fails(
    name: str, line: str, size: int, run_cli: Run, tmp_path: Path
) -> None:
    """The program fails, or prints a difference that is 10^6 times rounding, or more."""
    source = source_of(name)
    assert line in source
    file = tmp_path / "lesson.py"
    file.write_text(source.replace(line, "pass", 1), encoding="utf-8")
    steps = ("--set", "STEPS=3") if name == "zero" else ()
    ran = run_cli("run", "-n", size, "--timeout", 120, *steps, file)
    assert ran.code == 1 or "nan" in ran.out or max(differences(ran.out)) >= 1e6 * ROUNDING


def test_with_all_lines_the_check_passes(run_cli: Run) -> None:
    ran = run_cli("zero", "-n", 2, "--steps", 2)
    assert (ran.code, ran.err) == (0, "")
    assert len(differences(ran.out)) == 5
    assert max(differences(ran.out)) <= ROUNDING


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("p2p", "-n", 1), "a message needs two ranks: start 2 or more"),
        (("zero", "-n", 5), "shards must be equal: choose a number of ranks that divides 48"),
    ],
)
def test_a_number_of_ranks_that_cannot_be_is_refused_in_one_line(
    words: tuple[object, ...], told: str, run_cli: Run
) -> None:
    ran = run_cli(*words)
    assert (ran.code != 0, ran.out, ran.err.count("\n")) == (True, "", 1)
    assert told in ran.err


def test_mnist_as_it_is_given(digits_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network of the tutorial, and its accuracy: a fraction, without dropout."""
    monkeypatch.setattr(mnist, "FOLDER", digits_folder.parents[1])
    test_set = mnist.load_mnist(train=False)
    images, labels = test_set.tensors
    assert images.shape == (len(labels), 1, 28, 28)
    net = mnist.Net()
    assert sum(param.numel() for param in net.parameters()) == 21_840
    net.fc2.bias.data[labels[0]] += 1e6  # it says the same of every image
    fraction = (labels == labels[0]).float().mean().item()
    assert mnist.accuracy(net, test_set) == pytest.approx(fraction)
    assert net.training
