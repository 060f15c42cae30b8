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
GROUPED = ast.Dict, ast.DictComp, ast.Tuple, ast.List, ast.ListComp
BATCHES = ast.Call, *GROUPED
"""What a loop appends to a list of results, besides numbers."""
NUMBERS, LOSSES, RESULTS = "numbers", "losses", "results"
"""What a loop may append to a list."""
NUMBER = re.compile(r"\.item\(\)|^float\(")
INTEGER = re.compile(
    r"^len\(.*\)$|\.size\(\d*\)$|\.size\(\)\[\d+\]$|\.shape\[\d+\]$|\.numel\(\)$|^\d+$|"
    r"(==|\.eq\(|\.ne\(|!=).*\.sum\(\)(\.item\(\))?$|^int\("
)
"""The text of an integer that a loop adds."""
COLLECTS = {"add", "add_batch", "append", "extend", "record", "update"}
"""Methods by which an object may collect something of each batch."""
SUMMED = re.compile(r"==|\.eq\(|\bsum\(")
OF_MODEL = re.compile(r"state_dict\(|parameters\(|\brange\(")
"""In what a loop walks: these are no samples."""
OF_METRICS = ("torchmetrics", "torcheval")
"""Libraries whose metrics add up over the ranks."""
TABLES = {"dict", "defaultdict", "Counter", "OrderedDict"}
"""Functions that make a dictionary."""
COUNTED = re.compile(r"\.size\(|\blen\(|\.shape\b|\.numel\(|^\d+$")
"""In what is added up: it is a sum over samples, not the mean of a batch."""


def find_metrics(script: TrainingScript) -> Part:
    """What is added up over batches: it has to be reduced over the ranks."""
    name = "metrics over ranks"
    if found := find_sharing(script):
        return Part(name, Status.THERE, f"{script.at(found[0])} brings ranks together")
    if library := find_library(script):
        saw = f"{library} brings ranks together in compute(), which all ranks have to call"
        return Part(name, Status.THERE, saw)
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
    unfollowed = find_unfollowed(script, script.loop) if script.loop and not found_in else []
    if unfollowed:
        assert script.loop
        saw = (
            f"what {', '.join(unfollowed)} of {script.at(script.loop)} collects is of one rank's "
            f"samples: bring it together on all ranks, by {script.dist}.all_reduce, before it is "
            "shown"
        )
        return Part(name, Status.UNKNOWN, saw, notes=notes)
    if not found_in:
        saw = "the loop adds up nothing that is used after it"
        return Part(name, Status.NOT_NEEDED, saw, notes=notes)
    saws = "; ".join(each.saw for each in found_in)
    return Part(name, Status.MISSING, saws, [one for each in found_in for one in each.edits], notes)


def find_library(script: TrainingScript) -> str:
    """The library whose metrics are of all ranks; empty if the script imports none."""
    roots = {name.partition(".")[0] for name in script.text.imports.values()}
    return next((each for each in OF_METRICS if each in roots), "")


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
    totals, filled = find_totals(script), find_filled(script, loop)
    if totals.names:
        saws.append(f"{', '.join(totals.names)} of {at} would be of one rank's samples only")
        lines += reduce_sums(script, loop, totals.sums, totals.lists, totals.loss)
        lines += (line for each in totals.tables for line in reduce_table(script, loop, *each))
    losses = [words for words, given in filled.items() if given == LOSSES]
    if losses:
        saws.append(f"{', '.join(losses)} of {at} would be of one rank's samples only")
        lines += (line for each in losses for line in reduce_losses(script, each))
    others = [words for words, given in filled.items() if given == RESULTS]
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
        f"{script.at(each)}: what this logs within the loop is of rank 0's samples: a count is "
        "its part of all"
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
    filled = find_filled(script, script.loop)
    lists = [words for words, given in filled.items() if given == NUMBERS]
    loss = "" if LOSSES in filled.values() or lists else loss_after(script, script.loop)
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
    counts = [] if is_mean else [each for each in names if is_count(script, loop, each)]
    exact = ", dtype=torch.float64" if counts else ""
    held, whole = ", ".join(names), ", ".join(f"int({each})" for each in counts)
    return [
        f"{total} = torch.tensor([{values}]{exact}{tell_device(script, loop)})",
        f"{script.dist}.all_reduce({total})",
        f"{held} = {of_all}.{'tolist' if len(names) > 1 else 'item'}()",
        *([f"{', '.join(counts)} = {whole}"] if counts else []),
    ]


def is_count(script: TrainingScript, loop: Loop, name: str) -> bool:
    """Whether a sum begins as an integer, and only integers are added to it."""
    targets = [(each, added) for each, added in find_additions(loop) if ast.unparse(each) == name]
    keys = {key for each, _ in targets if (key := script.text.key_of(each))}
    begins = [each for key in keys for each in script.text.settings.get(key, [])]
    values = [each.value for each in begins if isinstance(each, ast.Constant)]
    added = [ast.unparse(follow_once(loop, each)) for _, each in targets]
    return (
        bool(values)
        and all(type(each) is int for each in values)
        and all(INTEGER.search(each) for each in added)
    )


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
    for target, added in find_additions(loop):
        held = table_of(target)
        if held is not target and not is_table(script, held):
            continue
        is_name = isinstance(held, (ast.Name, ast.Attribute))
        if is_name and script.is_used_after(ast.unparse(held), loop):
            added = follow_once(loop, added)
            own = script.text.resolve(added) if isinstance(added, ast.Call) else None
            values = find_results(own) if own else [added]
            if not isinstance(added, ast.Constant):  # which counts batches
                is_sum = any(map(is_over_samples, map(ast.unparse, values)))
                found[script.text.code(target)] = not (is_sum or script.summed_loss)
    yield from found.items()


def find_additions(loop: Loop) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What the loop adds to, and what it adds: `total += x`, and `total = total + x`."""
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            yield node.target, node.value
        elif (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.BinOp)
            and isinstance(node.value.op, ast.Add)
            and ast.unparse(node.value.left) == ast.unparse(node.targets[0])
        ):
            yield node.targets[0], node.value.right


def is_over_samples(words: str) -> bool:
    """Whether what is added up is a sum over samples, by its text."""
    return bool(COUNTED.search(words) or (SUMMED.search(words) and ".mean(" not in words))


def find_filled(script: TrainingScript, loop: ast.For) -> dict[str, str]:
    """The lists that the loop fills and that are used after it, each with what it is given: numbers
    of batches, `losses.append(loss.item())`, losses, which are tensors, or results of samples."""
    found = dict[str, str]()
    for node in ast.walk(loop):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        name, given = node.func.attr, follow_once(loop, node.args[0])
        words, used = script.text.code(node.func.value), table_of(node.func.value)
        if not script.is_used_after(ast.unparse(used), loop):
            continue
        is_result = name == "extend" or isinstance(given, GROUPED)
        if name == "append" and NUMBER.search(ast.unparse(given)) and not is_result:
            found[words] = NUMBERS
        elif name == "append" and is_loss(script, node.args[0]):
            found[words] = LOSSES
        elif name == "extend" or (name == "append" and isinstance(given, BATCHES)):
            found.setdefault(words, RESULTS)
    return found


def table_of(node: ast.expr) -> ast.expr:
    """The dictionary of which it is an item, or itself."""
    is_item = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
    return node.value if is_item and isinstance(node, ast.Subscript) else node


def is_loss(script: TrainingScript, given: ast.expr) -> bool:
    """Whether it is the loss of a batch, detached or not."""
    loss = name_loss(script)
    while isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) and not given.args:
        given = given.func.value  # loss.detach().clone()
    return isinstance(given, ast.Name) and given.id == loss


def follow_once(loop: Loop, value: ast.expr) -> ast.expr:
    """What a name is set to in the loop, if that is done once; any other expression itself."""
    if not isinstance(value, ast.Name):
        return value
    made = [
        node.value
        for node in ast.walk(loop)
        if isinstance(node, ast.Assign) and value.id in map(ast.unparse, node.targets)
    ]
    return made[0] if len(made) == 1 else value


def find_unfollowed(script: TrainingScript, loop: ast.For) -> list[str]:
    """What else the loop collects in, or adds to, and is used after it."""
    found = dict[str, None]()
    for node in ast.walk(loop):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            is_log = isinstance(node, ast.stmt) and script.is_log(node)
            if value.func.attr in COLLECTS and value.args and not is_log:
                found[ast.unparse(value.func.value)] = None
        elif isinstance(node, ast.AugAssign) and not isinstance(node.value, ast.Constant):
            found[ast.unparse(table_of(node.target))] = None
    known = {*map(ast.unparse, (loop.target, loop.iter))}
    return [each for each in found if each not in known and script.is_used_after(each, loop)]


def reduce_losses(script: TrainingScript, each: str) -> list[str]:
    """The lines that take the means over the ranks of a list of losses."""
    total = script.text.fresh("totals")
    return [
        f"{total} = torch.stack({each}).detach()",
        f"{script.dist}.all_reduce({total})",
        f"{each} = list({total} / {script.size})",
    ]


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
    name = name_loss(script)
    if not name or not any(node is loop for node in script.text.climb(script.training.backward)):
        return ""
    return name if script.is_used_after(name, loop) else ""


def name_loss(script: TrainingScript) -> str:
    """The name of the loss; empty if it has none."""
    owner = script.training.loss if script.training else None
    while isinstance(owner, ast.Call) and owner.args:  # scaler.scale(loss)
        owner = owner.args[0]
    return owner.id if isinstance(owner, ast.Name) else ""


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
    """What is said of loops under no_grad, or of the training's, if it tests, too."""
    text = script.text
    shared = script.training and script.training.serves_tests
    for node in ast.walk(text.tree):
        is_apart = isinstance(node, ast.For) and text.is_without_gradients(node)
        if (
            isinstance(node, ast.For)
            and (shared if node is script.loop else is_apart)
            and not OF_MODEL.search(ast.unparse(node.iter))
        ):
            of = "the samples of tests" if node is script.loop else "its samples"
            walks = f"{script.at(node)} walks {of} on every rank"
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
