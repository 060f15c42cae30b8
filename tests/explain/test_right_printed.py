"""What a program prints of one rank's samples, by its text."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from playground.explain.right.printed import Print, find_print

IN_MODULE = """
    for x, y in loader:
        total += loss(x, y).item()
        seen += len(y)
    mean = total / seen
    if rank == 0:
        print("mean", mean)
"""
IN_FUNCTION = """
    def evaluate(loader):
        right = []
        for x, y in loader:
            right.append((model(x) == y).sum())
        return sum(right) / 10

    def main():
        accuracy = evaluate(loader)
        if is_main():
            log.info(accuracy)
"""
CALLED_IN_PRINT = """
    def evaluate(loader):
        for x, y in tqdm(loader):
            right += (model(x) == y).sum()
        return right
    if dist.get_rank() == 0: print(evaluate(loader))
"""
LOSS_SHARED = """
    def train():
        dist.all_reduce(losses)
        return losses

    def evaluate(loader):
        for x, y in loader:
            right += (model(x) == y).sum()
        return right / 10

    def main():
        loss = train()
        accuracy = evaluate(loader)
        if rank == 0:
            print(loss, accuracy)
"""
BY_FUNCTION = """
    def average(value):
        dist.all_reduce(value)
        return value

    def share(value):
        return average(value)

    def main():
        for x, y in loader:
            right += (model(x) == y).sum()
        total = share(right)
        if rank == 0:
            print(right)
"""
AVERAGED = "for p in model.parameters(): dist.all_reduce(p.grad)\n"


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        (IN_MODULE, 2, Print(7, ("mean",))),
        (IN_FUNCTION, 4, Print(11, ("accuracy",))),
        (CALLED_IN_PRINT, 3, Print(6, ("evaluate(…)",))),
        (f"{IN_MODULE}    {AVERAGED}", 2, Print(7, ("mean",))),
        (LOSS_SHARED, 7, Print(15, ("accuracy",))),
        (LOSS_SHARED.replace("all_reduce(losses)", "all_reduce(right)"), 7, None),
        (LOSS_SHARED.replace("all_reduce(losses)", "all_reduce()"), 7, None),
        (LOSS_SHARED.replace("return right / 10", "dist.all_reduce(x); return right"), 7, None),
        (LOSS_SHARED.replace("loss = train()", "dist.all_reduce(loss)"), 7, None),
        (LOSS_SHARED.replace("train()", "train(accuracy)"), 7, None),
        (BY_FUNCTION, 10, None),
        (BY_FUNCTION.replace("share(right)", "share(y)"), 10, Print(14, ("right",))),
        (LOSS_SHARED.replace("right +=", "right[0][1] +="), 7, Print(15, ("accuracy",))),
        (IN_MODULE, 3, None),
        (IN_MODULE.replace("rank == 0", "verbose"), 2, None),
        (IN_MODULE.replace("loss(x, y).item()", "1").replace("len(y)", "1"), 2, None),
        (IN_MODULE.replace('"mean", mean', '"done"'), 2, None),
        (f"{IN_MODULE}    dist.all_reduce(total)\n", 2, None),
        (f"{IN_MODULE}    import torchmetrics\n", 2, None),
        (f"{IN_MODULE}    from helper import mean_of_ranks\n", 2, None),
        (f"{IN_MODULE}    import other\n", 2, Print(7, ("mean",))),
        ("for x in (", 1, None),
    ],
)
def test_sums_of_a_loop_that_one_rank_prints_are_found(
    tmp_path: Path, text: str, line: int, told: Print | None
) -> None:
    (tmp_path / "helper.py").write_text("def mean_of_ranks(x): dist.all_reduce(x)\n")
    (tmp_path / "other.py").write_text("import helper_of_nobody, other\n")
    (tmp_path / "train.py").write_text(textwrap.dedent(text))
    assert find_print(str(tmp_path / "train.py"), line) == told


def test_of_a_program_without_a_file_nothing_is_found() -> None:
    assert find_print("<stdin>", 2) is None
