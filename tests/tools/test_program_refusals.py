"""What a program itself refuses is one line, if all ranks refuse it; constants that it has, and
those that it has not."""

from __future__ import annotations

import pytest
from fixtures import Ran, Save
from programs import Outcome

TRAIN = """
import os
import torch
import torch.distributed as dist

EPOCHS = 10
BATCH_SIZE = 128  # of all ranks together
LR = 0.1
SIZES = (1, 2)
NAME = "x"
SHUFFLE = True
SAMPLES = EPOCHS * BATCH_SIZE
rank = int(os.environ["RANK"])
values = EPOCHS, BATCH_SIZE, LR, SIZES, NAME, SHUFFLE, SAMPLES
print(f"{rank}: {values}\\n", end="")
"""


@pytest.mark.parametrize("how", ["script", "module"])
def test_constants_have_the_values_that_are_set(save: Save, run_it: Ran, how: str) -> None:
    save(TRAIN)
    sets = ["EPOCHS=2", "LR=1", "SIZES=3,4,5", "NAME=a=b", "SHUFFLE=False"]
    words = [word for each in sets for word in ("--set", each)]
    ran = run_it(*words, *(["-m", "train"] if how == "module" else ["train.py"]))
    told = "(2, 128, 1.0, (3, 4, 5), 'a=b', False, 256)"
    lines = [f"0: {told}", f"1: {told}"]
    assert (ran.code, sorted(ran.out.splitlines())) == (0, lines)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("EPOCHS=two", "Invalid value for --set EPOCHS: 'two' is not a valid integer."),
        ("EPOCHS=2.5", "Invalid value for --set EPOCHS: '2.5' is not a valid integer."),
        ("LR=high", "Invalid value for --set LR: 'high' is not a valid float."),
        ("SIZES=1,b", "Invalid value for --set SIZES: 'b' is not a valid integer."),
        ("SHUFFLE=perhaps", "Invalid value for --set SHUFFLE: 'perhaps' is not a valid boolean"),
        ("EPOCH=2", "--set EPOCH=2: train.py has no constant EPOCH: did you mean EPOCHS?"),
        ("epochs=2", "--set epochs=2: train.py has no constant epochs: did you mean EPOCHS?"),
        ("X=2", "--set X=2: train.py has no constant X: choose one of EPOCHS, BATCH_SIZE, LR, "),
        (
            "SAMPLES=5",
            "--set SAMPLES=5: train.py, line 12, does not assign SAMPLES one literal: only a ",
        ),
        ("EPOCHS", "--set EPOCHS: write NAME=VALUE, as in --set EPOCHS=2"),
    ],
)
def test_a_constant_that_cannot_be_set_is_refused_before_anything_starts(
    save: Save, run_it: Ran, setting: str, said: str
) -> None:
    ran = run_it("--set", setting, save(TRAIN))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"playground: {said}")
    assert ran.err.count("\n") == 1


def test_a_folder_and_a_program_without_constants_have_none_to_be_set(
    save: Save, run_it: Ran
) -> None:
    save("print('here')", "package/__main__.py")
    assert run_it("--set", "A=1", "package") == Outcome(
        2, "", "playground: --set: the text of package cannot be read here: name a file\n"
    )
    assert run_it("--set", "A=1", save("a = 1")) == Outcome(
        2,
        "",
        "playground: --set A=1: train.py has no constant A: assign it a literal at the top level\n",
    )


def test_a_line_is_named_by_its_number_whatever_is_set(save: Save, run_it: Ran) -> None:
    text = (
        'SIZES = (\n    1,\n    2,\n)\nNAME = "x"\nif SIZES[0] == 7:\n    raise ValueError(NAME)\n'
    )
    ran = run_it("-n", 1, "--set", "SIZES=7,8,9", "--set", "NAME=two", save(text))
    assert ran.code == 1, ran.err
    assert "failed: ValueError: two\n" in ran.err
    assert 'train.py", line 7, in <module>\n    raise ValueError(NAME)\n' in ran.err


REFUSED = """
import os, sys
import torch
import torch.distributed as dist
BATCH_SIZE = 128
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def run():
    {inside}

{before}
dist.init_process_group("gloo")
run()
dist.all_reduce(torch.ones(1))
print("trained")
"""
BY_ALL = {
    "an assertion": (
        'assert BATCH_SIZE % size == 0, f"{BATCH_SIZE} in {size}"',
        "128 in 3 (train.py:9)",
    ),
    "messages that differ": (
        'assert rank > 5, f"rank {rank}\\n  of {size}"',
        "rank 0 of 3 (train.py:9)",
    ),
    "an exit": ('sys.exit("no such data:\\nfetch it")', "no such data: fetch it"),
}
"""A line of a program that all ranks run, and what is said."""


@pytest.mark.parametrize("where", ["before", "inside"])
@pytest.mark.parametrize("name", BY_ALL)
def test_what_all_ranks_refuse_is_one_line(save: Save, run_it: Ran, name: str, where: str) -> None:
    """Whether they have formed their process group or not."""
    line, said = BY_ALL[name]
    text = REFUSED.format(**{"inside": "pass", "before": "", where: line})
    said = said.replace(":9)", ":9)" if where == "inside" else ":11)")
    assert run_it("-n", 3, save(text)) == Outcome(1, "", f"playground: {said}\n")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('assert rank != 1, "not I"', "AssertionError: not I"),
        ('assert rank != 1, "not I"; rank or sys.exit(0)', "AssertionError: not I"),
        ('sys.exit("not I") if rank == 1 else None', "SystemExit: not I"),
        ("assert rank != 1", "AssertionError"),
    ],
)
def test_what_one_rank_refuses_is_its_failure(
    save: Save, run_it: Ran, line: str, said: str
) -> None:
    ran = run_it("-n", 2, save(REFUSED.format(inside=line, before="")))
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith(f"playground: rank 1 of 2 failed: {said}\nTraceback ")
    assert 'train.py", line 9, in run\n' in ran.err


@pytest.mark.parametrize(
    "line",
    [
        "assert False",
        'raise ValueError("wrong")',
        "sys.exit(3)",
        'assert rank, "not I"; raise ValueError("wrong")',
        "from torch.testing import assert_close; assert_close(torch.ones(1), torch.zeros(1))",
    ],
)
def test_no_other_end_of_all_ranks_is_a_refusal(save: Save, run_it: Ran, line: str) -> None:
    ran = run_it("-n", 2, save(REFUSED.format(inside=line, before="")))
    assert (ran.code, ran.out) == (1, "")
    assert " of 2 failed: " in ran.err
    assert 'train.py", line 9, in run\n' in ran.err
