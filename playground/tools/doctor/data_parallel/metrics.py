"""The part of metrics: what is added up over batches is to be added up over ranks, too. Does not
import torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from playground.tools.doctor.data_parallel.edits import Edit, add_after
from playground.tools.doctor.data_parallel.meters import Meter, find_meters
from playground.tools.doctor.data_parallel.model import find_norms_apart
from playground.tools.doctor.data_parallel.parts import Part, Status
from playground.tools.doctor.data_parallel.script import TrainingScript
from playground.tools.doctor.data_parallel.text import Loop, find_results
from playground.tools.doctor.data_parallel.trainings import take

SHARING = "all_reduce", "reduce", "all_gather", "all_gather_object"
"""Calls by which ranks add up metrics, most often."""
SHARING_OTHERWISE = (
    "gather", "gather_object", "all_gather_into_tensor", "reduce_scatter", "broadcast",
    "broadcast_object_list", "send", "isend", "batch_isend_irecv", "gather_for_metrics",
)  # fmt: skip
"""Further calls by which they may."""
BATCHES = ast.Call, ast.Dict, ast.DictComp, ast.Tuple, ast.List, ast.ListComp
"""What a loop appends to a list of results, besides numbers."""
SUMMED = re.compile(r"==|\.eq\(|\bsum\(")
OF_MODEL = re.compile(r"state_dict\(|parameters\(|\brange\(")
"""In what a loop walks: these are no samples."""
TABLES = {"dict", "defaultdict", "Counter", "OrderedDict"}
"""Functions that make a dictionary."""
COUNTED = re.compile(r"\.size\(|\blen\(|\.shape\b|\.numel\(|^\d+$")
"""In what is added up: it is a sum over samples, not the mean of a batch."""


def find_metrics(script: TrainingScript) -> Part:
    """What is added up over batches: it has to be reduced over the ranks."""
    name = "metrics over ranks"
    if found := find_sharing(script):
        return Part(name, Status.THERE, f"{script.at(found[0])} brings ranks together")
    apart = find_evaluations_apart(script)
    if alone := next((each for each in apart if is_on_first(script, each)), None):
        saw = (
            f"only one rank evaluates ({script.at(alone)}), with a sampler that gives it a part of "
            "the samples"
        )
        note = "leave out the sampler of that DataLoader: the rank evaluates all samples"
        return Part(name, Status.MISSING, saw, notes=[note])
    if not (script.loop and script.training) and not apart:
        return Part(
            name,
            Status.UNKNOWN,
            "no one loop over batches is seen: what it adds up "
            f"is of one rank's samples, so call {script.dist}.all_reduce on it",
        )
    if script.walks_several and script.loop:
        saw = (
            f"{script.at(script.loop)} walks the batches of training and of tests: call "
            f"{script.dist}.all_reduce on what comes from the loader that is divided, and leave "
            "the rest, of which each rank has all"
        )
        return Part(name, Status.UNKNOWN, saw)
    if script.training and script.training.serves_tests and not script.training.switch:
        assert script.loop
        saw = (
            f"{script.at(script.loop)} walks the batches of training and of tests: call "
            f"{script.dist}.all_reduce on what it adds up in the training, and leave the rest, of "
            "which each rank has all"
        )
        return Part(name, Status.UNKNOWN, saw)
    found_in = [*reduce_training(script), *(reduce_evaluation(script, each) for each in apart)]
    notes = [*note_prints(script), *(note for each in found_in for note in each.notes)]
    if not apart:
        notes += note_validation(script)
    if not found_in:
        saw = "the loop adds up nothing that is used after it"
        return Part(name, Status.NOT_NEEDED, saw, notes=notes)
    saws = "; ".join(each.saw for each in found_in)
    return Part(name, Status.MISSING, saws, [one for each in found_in for one in each.edits], notes)


@dataclass(frozen=True)
class Reduction:
    """What is of one rank's samples, and the lines that add it up over the ranks."""

    saw: str
    edits: Sequence[Edit] = ()
    notes: Sequence[str] = ()


def reduce_training(script: TrainingScript) -> Iterator[Reduction]:
    """What the loop of the training adds up, or has a meter collect."""
    loop = script.loop
    if not (loop and script.training):
        return
    if script.training.functions:
        script.collective.add(id(script.text.function_of(script.training.backward)))
    at, lines, saws, notes = script.at(loop), list[str](), list[str](), list[str]()
    totals = find_totals(script)
    if totals.names:
        saws.append(f"{', '.join(totals.names)} of {at} would be of one rank's samples only")
        lines += reduce_sums(script, loop, totals.sums, totals.lists, totals.loss)
        lines += (line for each in totals.tables for line in reduce_table(script, loop, *each))
    others = [words for words, of_numbers in find_filled(script, loop).items() if not of_numbers]
    if others:
        saws.append(f"{', '.join(others)} of {at} would hold one rank's part only")
        lines += (line for each in others for line in gather(script, each))
    for meter in find_meters(script, loop):
        saws.append(f"{meter.name} of {script.at(meter.call)} would collect one rank's samples")
        if not meter.sums:
            notes.append(
                f"{script.at(meter.call)}: after the loop, call {script.dist}.all_reduce on what "
                f"{meter.name} has added up, on all ranks"
            )
        lines += reduce_meter(script, loop, meter)
    if saws:
        note_meeting(script, loop)
        edits = [put_behind(script, loop, lines)] if lines else []
        yield Reduction("; ".join(saws), edits, notes)


def put_behind(script: TrainingScript, loop: ast.For, lines: Sequence[str]) -> Edit:
    """The lines behind the loop of the training: only where it trains, if it serves tests, too."""
    indent = script.indent_of(loop)
    if script.training and script.training.switch:
        return add_after(
            loop, indent, f"if {script.training.switch}:", *(f"    {each}" for each in lines)
        )
    return add_after(loop, indent, *lines)


def reduce_evaluation(script: TrainingScript, loop: ast.For) -> Reduction:
    """What a loop over one rank's part of the samples adds up."""
    note_meeting(script, loop)
    at = script.at(loop)
    saw = f"{at} walks one rank's part of the samples, and nothing adds up over the ranks"
    if sums := [*find_sums(script, loop)]:
        lines = reduce_sums(script, loop, sums, [], "")
        return Reduction(saw, [add_after(loop, script.indent_of(loop), *lines)])
    note = f"{at}: call {script.dist}.all_reduce on its sums and counts, on all ranks"
    return Reduction(saw, notes=[note])


def note_prints(script: TrainingScript) -> list[str]:
    """What is said of the first print within the loop."""
    inside = ast.walk(script.loop) if script.loop else ()
    return [
        f"{script.at(each)}: what this prints within the loop is of rank 0's samples"
        for each in inside
        if isinstance(each, ast.stmt) and script.is_log(each)
    ][:1]


def note_meeting(script: TrainingScript, loop: Loop) -> None:
    """Note that all ranks meet behind this loop."""
    if function := script.text.function_of(loop):
        script.collective.add(id(function))


def is_on_first(script: TrainingScript, node: ast.AST) -> bool:
    """Whether only one rank comes to this node: by a condition around it, or around a call of its
    function."""
    if script.is_for_first(node):
        return True
    function = script.text.function_of(node)
    sites = (
        call for call in script.text.calls if function and script.text.resolve(call) is function
    )
    return any(map(script.is_for_first, sites))


@dataclass(frozen=True)
class Totals:
    """What a loop over batches makes of them, and is used after it."""

    sums: Sequence[tuple[str, bool]] = ()
    """Each with whether it is a mean per batch."""
    lists: Sequence[str] = ()
    loss: str = ""
    """The last loss; empty if there are lists, or it is not used."""
    tables: Sequence[tuple[str, bool]] = ()
    """Dictionaries of sums, each with whether they are means per batch."""

    @property
    def names(self) -> list[str]:
        """Those whose values become the same on all ranks."""
        last = [self.loss] if self.loss and not self.sums else []
        return [*self.lists, *(each for each, _ in (*self.sums, *self.tables)), *last]


def find_totals(script: TrainingScript) -> Totals:
    """What the training makes of its batches."""
    if not script.loop or not script.training:
        return Totals()
    lists = [words for words, of_numbers in find_filled(script, script.loop).items() if of_numbers]
    loss = "" if lists else loss_after(script, script.loop)
    tables = [*find_tables(script, script.loop)]
    return Totals([*find_sums(script, script.loop)], lists, "" if tables else loss, tables)


def find_sharing(script: TrainingScript) -> list[ast.Call]:
    """The calls by which ranks may add up metrics: those that take gradients do not."""
    return [
        call
        for call in script.text.find_calls(*SHARING)
        if not any(
            isinstance(node, ast.Attribute) and node.attr == "grad" for node in ast.walk(call)
        )
    ]


def find_evaluations_apart(script: TrainingScript) -> list[ast.For]:
    """The loops without gradients over one rank's part of the samples, of a script that prints and
    in which ranks add nothing up."""
    text = script.text
    if shares_results(script) or not text.find_calls("print"):
        return []
    found = []
    for node in ast.walk(text.tree):
        if isinstance(node, ast.For) and text.is_without_gradients(node):
            samplers = (
                each.value
                for call in text.makers(node.iter)
                for each in call.keywords
                if each.arg == "sampler" and text.called(call) == "DataLoader"
            )
            made = (one for each in samplers for one in text.makers(each))
            if any(map(script.is_distributed_sampler, made)):
                found.append(node)
    return found


def shares_results(script: TrainingScript) -> bool:
    """Whether ranks may bring together what they have added up."""
    others = script.text.find_calls(*SHARING_OTHERWISE) or "torchmetrics" in script.text.source
    return bool(others or find_sharing(script))


def tells_a_part(script: TrainingScript) -> bool:
    """Whether a script prints what only one rank's samples are in: of an evaluation, or what its
    training adds up over the batches of a DistributedSampler."""
    if shares_results(script) or not script.text.find_calls("print"):
        return False
    meters = find_meters(script, script.loop) if script.loop else ()
    return bool(find_evaluations_apart(script) or find_totals(script).sums or any(meters))


def reduce_sums(
    script: TrainingScript,
    loop: ast.For,
    sums: Sequence[tuple[str, bool]],
    lists: Sequence[str],
    loss: str,
) -> list[str]:
    """The lines after the loop that reduce over the ranks its sums, each with whether it is a mean
    per batch, its lists of numbers, and if there is no sum its last loss."""
    text, lines = script.text, list[str]()
    where = tell_device(script, loop)
    tensors = [each for each, _ in sums if script.has_attribute_after(each, loop)]
    numbers = [each for each, _ in sums if each not in tensors]
    for each in lists:
        numbers_of_all = text.fresh("totals")
        lines += [
            f"{numbers_of_all} = torch.tensor({each}{where})",
            f"{script.dist}.all_reduce({numbers_of_all})",
            f"{each} = ({numbers_of_all} / {script.size}).tolist()",
        ]
    last = [loss] if loss and not sums else []
    for each in tensors or last:
        lines += [f"{each} = {each}.detach()", f"{script.dist}.all_reduce({each})"]
    means = [each for each, is_mean in sums if is_mean] or last
    if numbers:
        lines += add_up(script, loop, numbers, is_mean=numbers == means)
        means = [] if numbers == means else means
    return lines + [f"{each} /= {script.size}" for each in means]


def reduce_meter(script: TrainingScript, loop: ast.For, meter: Meter) -> list[str]:
    """The lines after the loop that add up over the ranks what a meter has; none if its sums are
    not seen."""
    return [*add_up(script, loop, meter.sums), *meter.results] if meter.sums else []


def add_up(
    script: TrainingScript, loop: Loop, names: Sequence[str], *, is_mean: bool = False
) -> list[str]:
    """The lines that add up numbers over the ranks, or take their means."""
    total = script.text.fresh("totals")
    values = ", ".join(f"float({each})" for each in names)
    of_all = f"({total} / {script.size})" if is_mean else total
    return [
        f"{total} = torch.tensor([{values}]{tell_device(script, loop)})",
        f"{script.dist}.all_reduce({total})",
        f"{', '.join(names)} = {of_all}.{'tolist' if len(names) > 1 else 'item'}()",
    ]


def reduce_table(script: TrainingScript, loop: Loop, table: str, is_mean: bool) -> list[str]:
    """The lines that add up over the ranks the sums in a dictionary, or take their means."""
    total = script.text.fresh("totals")
    of_all = f"({total} / {script.size})" if is_mean else total
    values = f"[float(each) for each in {table}.values()]"
    return [
        f"{total} = torch.tensor({values}{tell_device(script, loop)})",
        f"{script.dist}.all_reduce({total})",
        f"{table} = dict(zip({table}, {of_all}.tolist()))",
    ]


def find_tables(script: TrainingScript, loop: ast.For) -> Iterator[tuple[str, bool]]:
    """The dictionaries in which the loop adds up under changing keys, and that are used after it,
    each with whether they hold means per batch."""
    found = dict[str, bool]()
    target: ast.expr
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            target, added = node.target, node.value
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
            target, added = node.targets[0], node.value.right  # table[key] = table.get(key, 0) + x
        else:
            continue
        if isinstance(target, ast.Subscript) and is_table(script, target.value):
            words = ast.unparse(target.value)
            is_own = isinstance(node, ast.AugAssign) or words in ast.unparse(node.value)
            if is_own and not isinstance(target.slice, ast.Constant):
                found[words] = not (is_over_samples(ast.unparse(added)) or script.summed_loss)
    yield from ((words, each) for words, each in found.items() if script.is_used_after(words, loop))


def is_table(script: TrainingScript, node: ast.expr) -> bool:
    """Whether a name is set to a dictionary, once."""
    made = take(script.text, node, {})
    is_call = isinstance(made, ast.Call) and script.text.called(made) in TABLES
    return is_call or isinstance(made, (ast.Dict, ast.DictComp))


def find_sums(script: TrainingScript, loop: ast.For) -> Iterator[tuple[str, bool]]:
    """What the loop adds up and is used after it, and whether that is a mean per batch."""
    found = dict[str, bool]()
    for node in ast.walk(loop):
        if not (isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)):
            continue
        target, words = node.target, ast.unparse(node.target)
        if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
            used = ast.unparse(target.value) if is_table(script, target.value) else ""
            words = script.text.code(target)
        else:
            used = words if isinstance(target, (ast.Name, ast.Attribute)) else ""
        if used and script.is_used_after(used, loop):
            own = script.text.resolve(node.value) if isinstance(node.value, ast.Call) else None
            values = find_results(own) if own else [node.value]
            if not isinstance(node.value, ast.Constant):  # which counts batches
                is_sum = any(map(is_over_samples, map(ast.unparse, values)))
                found[words] = not (is_sum or script.summed_loss)
    yield from found.items()


def is_over_samples(words: str) -> bool:
    """Whether what is added up is a sum over samples, by its text."""
    return bool(COUNTED.search(words) or (SUMMED.search(words) and ".mean(" not in words))


def find_filled(script: TrainingScript, loop: ast.For) -> dict[str, bool]:
    """The lists that the loop fills and that are used after it; and whether with numbers of its
    batches, `losses.append(loss.item())`."""
    found = dict[str, bool]()
    for node in ast.walk(loop):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        words, name, given = ast.unparse(node.func.value), node.func.attr, node.args[0]
        is_number = name == "append" and ast.unparse(given).endswith(".item()")
        if is_number or name == "extend" or (name == "append" and isinstance(given, BATCHES)):
            found[words] = is_number or found.get(words, False)
    return {words: each for words, each in found.items() if script.is_used_after(words, loop)}


def gather(script: TrainingScript, each: str) -> list[str]:
    """The lines that bring a list of all ranks together."""
    parts = script.text.fresh("parts")
    return [
        f"{parts} = [None] * {script.size}",
        f"{script.dist}.all_gather_object({parts}, {each})",
        f"{each} = [one for part in {parts} for one in part]",
    ]


def loss_after(script: TrainingScript, loop: ast.For) -> str:
    """The loss, if the loop makes it, and it is used after it."""
    assert script.training
    owner = script.training.loss
    while isinstance(owner, ast.Call) and owner.args:  # scaler.scale(loss)
        owner = owner.args[0]
    if not isinstance(owner, ast.Name) or not any(
        node is loop for node in script.text.climb(script.training.backward)
    ):
        return ""
    return owner.id if script.is_used_after(owner.id, loop) else ""


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


def note_validation(script: TrainingScript) -> list[str]:
    """What is said of loops under no_grad."""
    text = script.text
    for node in ast.walk(text.tree):
        if (
            isinstance(node, ast.For)
            and node is not script.loop
            and text.is_without_gradients(node)
            and not OF_MODEL.search(ast.unparse(node.iter))
        ):
            walks = f"{script.at(node)} walks its samples on every rank"
            if norms := find_norms_apart(script):
                return [
                    f"{walks}, and the results differ a little: each rank has BatchNorm statistics "
                    f"of its own ({script.at(norms[0])}). Print the values of rank 0"
                ]
            return [
                f"{walks}: the result is right, and the same on all, unless the model has "
                "BatchNorm; python -m playground read ddp divides them"
            ]
    return []
