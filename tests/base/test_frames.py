"""Whose frame a frame is."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from playground.base.frames import PACKAGE, add_program, is_program, is_raised_by_torch, is_standard

STDLIB = sysconfig.get_path("stdlib")


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("train.py", True),
        ("/elsewhere/playground/world/train.py", True),
        (f"{PACKAGE}lessons/p2p/lesson.py", True),
        (f"{PACKAGE}algorithms/all_reduce.py", True),
        (f"{PACKAGE}algorithms/executor.py", False),
        (f"{PACKAGE}algorithms/messages.py", False),
        (f"{PACKAGE}world/rank/rank.py", False),
        (f"{PACKAGE}explain/replay/record/recorder.py", False),
        (torch.__file__, False),
        (f"{STDLIB}/threading.py", False),
        ("/opt/dist-packages/yaml/__init__.py", False),
        ("<string>", False),
    ],
)
def test_the_program_s_files(path: str, known: bool) -> None:
    assert is_program(path) == known


def test_a_program_is_one_wherever_it_lies() -> None:
    file = "/opt/site-packages/mypackage/train.py"
    assert not is_program(file)
    add_program(file)
    assert is_program(file)
    assert not is_program("/opt/site-packages/mypackage/model.py")


def test_the_standard_library_holds_no_packages() -> None:
    assert is_standard(f"{STDLIB}/threading.py")
    assert not is_standard(f"{STDLIB}/site-packages/torch/__init__.py")
    assert not is_standard("train.py")


def define(code: str, file: str, module: str) -> Callable[..., object]:
    """The function `call` of this code, as if it stood in the module."""
    space: dict[str, Any] = {"__name__": module, "torch": torch}
    exec(compile(code, file, "exec"), space)
    call: Callable[..., object] = space["call"]
    return call


PROGRAM = define("def call(work=lambda: torch.zeros(-1)): work()", "train.py", "train")
TORCH = define("def call(work=lambda: torch.zeros(-1)): work()", "nn.py", "torch.nn")
TAP = define("def call(): torch.zeros(-1)", f"{PACKAGE}tap/tap.py", "playground.tap.tap")


@pytest.mark.parametrize(
    ("call", "by_torch"),
    [
        (PROGRAM, False),
        (partial(PROGRAM, TORCH), True),
        (partial(TORCH, PROGRAM), False),
        (partial(PROGRAM, TAP), False),
        (partial(TORCH, TAP), True),
    ],
    ids=["program", "torch", "program under torch", "tap", "tap under torch"],
)
def test_who_has_raised(call: Callable[[], object], by_torch: bool) -> None:
    """The tap stands between torch and what torch calls: its frames are nobody's."""
    with pytest.raises(RuntimeError) as caught:
        call()
    assert is_raised_by_torch(caught.value) == by_torch
