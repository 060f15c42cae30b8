"""Lines that bring together over the ranks what a loop over batches has added up or collected. Does
not import torch."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from playground.tools.doctor.data_parallel.edits import Edit, add_after
from playground.tools.doctor.data_parallel.meters import Meter
from playground.tools.doctor.data_parallel.script import TrainingScript
from playground.tools.doctor.data_parallel.sums import stays_integer
from playground.tools.doctor.data_parallel.text import Loop


def put_behind(script: TrainingScript, loop: ast.For, lines: Sequence[str]) -> Edit:
    """The lines behind the loop of the training: only where it trains, if it serves tests, too."""
    indent = script.indent_of(loop)
    if script.training and script.training.switch:
        return add_after(
            loop, indent, f"if {script.training.switch}:", *(f"    {each}" for each in lines)
        )
    return add_after(loop, indent, *lines)


def reduce_sums(
    script: TrainingScript,
    loop: ast.For,
    sums: Sequence[tuple[str, bool]],
    lists: Sequence[str] = (),
    loss: str = "",
) -> list[str]:
    """The lines after the loop that reduce over the ranks its sums, each with whether it is a mean
    per batch, its lists of numbers, and if there is no sum its last loss."""
    where = tell_device(script, loop)
    tensors = [each for each, _ in sums if script.has_attribute_after(each, loop)]
    numbers = [each for each, _ in sums if each not in tensors]
    lines = [
        line
        for each in lists
        for line in reduce_by(script, f"torch.tensor({each}{where})", f"{each} = {{}}.tolist()")
    ]
    last = [loss] if loss and not sums else []
    for each in tensors or last:
        lines += [f"{each} = {each}.detach()", f"{script.dist}.all_reduce({each})"]
    means = [each for each, is_mean in sums if is_mean] or last
    if numbers:
        lines += add_up(script, loop, numbers, is_mean=numbers == means)
        means = [] if numbers == means else means
    return lines + [f"{each} /= {script.size}" for each in means]


def reduce_by(script: TrainingScript, made: str, result: str, *, is_mean: bool = True) -> list[str]:
    """The lines that take the mean over the ranks of a tensor, or its sum. `made`: the code of the
    tensor; `result`: the statement that takes what is reduced, which stands there as {}."""
    total = script.text.fresh("totals")
    of_all = f"({total} / {script.size})" if is_mean else total
    return [
        f"{total} = {made}",
        f"{script.dist}.all_reduce({total})",
        result.format(of_all),
    ]


def add_up(
    script: TrainingScript, loop: Loop, names: Sequence[str], *, is_mean: bool = False
) -> list[str]:
    """The lines that add up numbers over the ranks, or take their means."""
    values = ", ".join(f"float({each})" for each in names)
    counts = [] if is_mean else [each for each in names if stays_integer(script, loop, each)]
    exact = ", dtype=torch.float64" if counts else ""
    made = f"torch.tensor([{values}]{exact}{tell_device(script, loop)})"
    held, whole = ", ".join(names), ", ".join(f"int({each})" for each in counts)
    result = f"{held} = {{}}.{'tolist' if len(names) > 1 else 'item'}()"
    kept = [f"{', '.join(counts)} = {whole}"] if counts else []
    return [*reduce_by(script, made, result, is_mean=is_mean), *kept]


def reduce_meter(script: TrainingScript, loop: ast.For, meter: Meter) -> list[str]:
    """The lines after the loop that add up over the ranks what a meter has; none if its sums are
    not seen."""
    return [*add_up(script, loop, meter.sums), *meter.results] if meter.sums else []


def reduce_table(script: TrainingScript, loop: Loop, table: str, is_mean: bool) -> list[str]:
    """The lines that add up over the ranks the sums in a dictionary, or take their means."""
    values = f"[float(each) for each in {table}.values()]"
    made = f"torch.tensor({values}{tell_device(script, loop)})"
    result = f"{table} = dict(zip({table}, {{}}.tolist()))"
    return reduce_by(script, made, result, is_mean=is_mean)


def reduce_losses(script: TrainingScript, losses: str) -> list[str]:
    """The lines that take the means over the ranks of a list of losses."""
    made = f"torch.stack({losses}).detach()"
    return reduce_by(script, made, f"{losses} = list{{}}")


def gather(script: TrainingScript, each: str) -> list[str]:
    """The lines that bring a list of all ranks together."""
    parts = script.text.fresh("parts")
    return [
        f"{parts} = [None] * {script.size}",
        f"{script.dist}.all_gather_object({parts}, {each})",
        f"{each} = [one for part in {parts} for one in part]",
    ]


def tell_device(script: TrainingScript, loop: Loop) -> str:
    """The argument that puts a tensor on the script's device; empty if there is none."""
    return f", device={device}" if (device := device_in(script, loop)) else ""


def device_in(script: TrainingScript, loop: Loop) -> str:
    """The device on which ranks add up: that of the script, if it has a name there."""
    text = script.text
    function = text.function_of(loop)
    bound = text.bound[id(function)] if function else set()
    moves = (node for node in ast.walk(loop) if isinstance(node, ast.Call) and node.args)
    for call in moves:  # x.to(self.device)
        to = call.args[0]
        is_name = isinstance(to, (ast.Name, ast.Attribute))
        if text.called(call) == "to" and is_name and "device" in ast.unparse(to).lower():
            return text.code(to)
    if "device" in bound or (0, "device") in text.made:
        return "device"
    owner = text.class_of(loop)
    if owner and (id(owner), "device") in text.made:
        return "self.device"
    if text.find_calls("is_available"):
        return '"cuda" if torch.cuda.is_available() else "cpu"'
    return '"cuda"' if script.names_gpu else ""
