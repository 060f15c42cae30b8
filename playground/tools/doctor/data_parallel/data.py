"""The part of the data: each rank's share of a batch. Does not import torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from playground.tools.doctor.data_parallel.batches import (
    divide_unpacked,
    draws_itself,
    find_division_of_drawn,
    find_elsewhere,
    list_names,
    list_unpacked,
    share_batches,
    share_drawn,
    share_indices,
    share_stream,
    share_unpacked,
)
from playground.tools.doctor.data_parallel.edits import Edit, add_before, replace_node
from playground.tools.doctor.data_parallel.model import Wrapping
from playground.tools.doctor.data_parallel.parts import Part, Status
from playground.tools.doctor.data_parallel.script import TrainingScript

NAME = "sampler"
ORDER = {"batch_size", "shuffle", "sampler", "batch_sampler"}
"""The arguments of a DataLoader that say which samples make up a batch."""
ROWS = {"arange", "diag", "diagonal", "eye", "fill_diagonal_"}
"""Functions by which a loss finds the pairs of one sample."""
RULE = "each rank needs its own part of each batch"


def find_sampler(script: TrainingScript) -> Part:
    """The part of each batch that a rank trains on."""
    ways = (
        keep_sampler,
        find_carried_state,
        divide_drawn,
        find_no_loader,
        divide_own_sampler,
        find_no_dataset,
        divide_stream,
    )
    found = (part for way in ways if (part := way(script)))
    return next(found, None) or divide_dataset(script)


def unknown(saw: str) -> Part:
    return Part(NAME, Status.UNKNOWN, saw)


def keep_sampler(script: TrainingScript) -> Part | None:
    """Of a script that has a DistributedSampler."""
    if has_distributed_sampler(script):
        return Part(NAME, Status.THERE, f"{script.at(script.loaders[0])} has a DistributedSampler")
    if lost := script.lost_sampler:
        return unknown(
            f"{script.at(lost)} makes a DistributedSampler, and whether the training has it is not "
            f"seen: {RULE}"
        )
    return None


def has_distributed_sampler(script: TrainingScript) -> bool:
    """Whether the only DataLoader of the training is given a DistributedSampler."""
    own = find_own_sampler(script)
    made = script.text.makers(own.value) if own and len(script.loaders) == 1 else ()
    return any(map(script.is_distributed_sampler, made))


def find_carried_state(script: TrainingScript) -> Part | None:
    """The part of a script that draws its batches itself, and hands a state from one to the
    next."""
    if not share_drawn(script) or not (call := find_carrying(script)):
        return None
    return unknown(
        f"{script.at(call)} hands a state from batch to batch: {RULE}, along the dimension of "
        "samples, and the first state has to be of that size, too"
    )


def find_carrying(script: TrainingScript) -> ast.Call | None:
    """A call of the model whose result is given to it in the next round."""
    assert script.training
    for call in Wrapping(script).find_forwards():
        statement = script.text.statement_of(call)
        if isinstance(statement, ast.Assign):
            got = {name for each in statement.targets for name in list_names(each)}
            if got & {each.id for each in call.args if isinstance(each, ast.Name)}:
                return call
    return None


def divide_drawn(script: TrainingScript) -> Part | None:
    """Of a script that draws its batches itself."""
    if not (share := share_drawn(script)):
        return None
    assert script.training
    assert script.training.batches
    loop = script.at(script.training.batches)
    if by := find_division_of_drawn(script, script.training.batches):
        return say_divided(script, by)
    saw = f"every rank would have the whole batch of {loop}, which the script draws itself"
    return Part(NAME, Status.MISSING, saw, [share], note_draws(script))


def find_no_loader(script: TrainingScript) -> Part | None:
    """Of a script whose loop over one DataLoader is not seen."""
    if not script.loop:
        return unknown(f"no one loop over batches is seen: {RULE}")
    if len(script.loaders) != 1 and (maker := find_elsewhere(script)):
        return unknown(
            f"{script.at(script.loop)} walks what {maker} makes, which is not read here: {RULE}, "
            "so give the DataLoader there sampler=DistributedSampler(dataset)"
        )
    if script.walks_several:
        made = sorted({*map(script.at, script.loaders)})
        lines = f"the loaders of {' and '.join(made)}" if made else "loaders of training and tests"
        return unknown(
            f"{script.at(script.loop)} walks {lines}: {RULE}, so give that of the training "
            "sampler=DistributedSampler(dataset)"
        )
    if len(script.loaders) != 1:
        has_loader = script.text.find_calls("DataLoader")
        cure = (
            "if it does, give it sampler=DistributedSampler(dataset), and a batch_size // "
            f"{script.size}"
            if has_loader
            else f"such as inputs.chunk({script.size})[{script.rank}]"
        )
        return unknown(
            f"that {script.at(script.loop)} walks a DataLoader is not seen: {RULE}, {cure}"
        )
    return None


def divide_own_sampler(script: TrainingScript) -> Part | None:
    """Of a DataLoader that is given a sampler."""
    if not (found := find_own_sampler(script)):
        return None
    call, whole = script.loaders[0], found.value
    if by := script.find_division(whole):
        return say_divided(script, by)
    saw = f"{script.at(call)} has a sampler that is not DistributedSampler: {RULE}"
    notes = note_order(script, call)
    if found.arg == "batch_sampler":
        edits = [*share_batches(script, call, whole)]
        notes[0] = (
            "each rank has a part of each batch, so the learning rate and the number of steps "
            "stay; of a batch that the number of ranks does not divide, the rest is dropped"
        )
    else:
        edits = [*share_indices(script, call, whole), *divide_batch(script, call)]
    if draws_itself(script, whole):
        notes.append(
            "all ranks have to draw the same order: let the sampler draw from a "
            "torch.Generator().manual_seed(0) of its own"
        )
    return Part(NAME, Status.MISSING, saw, edits, notes)


def find_no_dataset(script: TrainingScript) -> Part | None:
    """Of a DataLoader whose dataset is not seen, or is divided already."""
    call = script.loaders[0]
    if any(isinstance(each, ast.Starred) for each in call.args):
        return unknown(f"{script.at(call)} unpacks its arguments: {RULE}")
    data = dataset_of(call)
    if data is None:
        return unknown(f"the dataset of {script.at(call)} is not seen: {RULE}")
    by = script.find_division(data)
    return say_divided(script, by) if by else None


def divide_stream(script: TrainingScript) -> Part | None:
    """Of a DataLoader of an `IterableDataset`."""
    call = script.loaders[0]
    data, base = dataset_of(call), find_stream(script, call)
    if not (data and base):
        return None
    return Part(
        NAME,
        Status.MISSING,
        f"{script.at(call)} would give every rank all samples of a stream, in whole batches",
        [*share_stream(script, call, data, base), *divide_batch(script, call)],
        note_order(script, call),
    )


def divide_dataset(script: TrainingScript) -> Part:
    """Of any other DataLoader: a DistributedSampler."""
    call = script.loaders[0]
    data, given = dataset_of(call), arguments_of(call)
    assert data
    if (other := find_other_loop(script, call)) and not script.case_of(call):
        return unknown(
            f"{script.at(call)} makes the loader of the training "
            f"and that of {script.at(other)}: make them apart, and give that of the "
            f"training sampler=DistributedSampler(dataset)"
        )
    edits = [*divide(script, call, data)]
    if None in given:
        unpacked = given[None].value
        names = list_unpacked(script, unpacked)
        if names is not None and names & ORDER == {"batch_size"}:
            edits.append(divide_unpacked(script, unpacked))
        elif names is None or names & ORDER:
            if ORDER & given.keys() or len(call.args) > 1:
                return unknown(f"{script.at(call)} unpacks its arguments: {RULE}")
            edits = [share_unpacked(script, unpacked, data)]
    notes = note_order(script, call)
    for count, each in enumerate(script.more_loaders, 2):
        if is_plain(script, each) and (more := dataset_of(each)):
            edits += divide(script, each, more, name=f"train_set_{count}")
        else:
            notes.append(
                f"{script.at(each)} makes another loader of that loop: divide its batches, too"
            )
    lines = " and ".join(map(script.at, [call, *script.more_loaders]))
    return Part(
        NAME,
        Status.MISSING,
        f"{lines} would give every rank all samples, in whole batches",
        edits,
        notes,
    )


def is_plain(script: TrainingScript, call: ast.Call) -> bool:
    """Whether a DataLoader can be given a sampler: it has none, loads no stream, and its arguments
    are seen."""
    given = arguments_of(call)
    return not (
        {None, "sampler", "batch_sampler"} & given.keys()
        or any(isinstance(each, ast.Starred) for each in call.args)
        or find_stream(script, call)
        or find_other_loop(script, call)
    )


def arguments_of(call: ast.Call) -> dict[str | None, ast.keyword]:
    """The named arguments of a call, by name; None: what is unpacked."""
    return {each.arg: each for each in call.keywords}


def find_own_sampler(script: TrainingScript) -> ast.keyword | None:
    """The sampler, or the sampler of batches, that the DataLoader of the training is given."""
    given = {each.arg: each for call in script.loaders for each in call.keywords}
    return given.get("sampler") or given.get("batch_sampler")


def say_divided(script: TrainingScript, by: ast.AST) -> Part:
    """The part of a script that divides its data itself."""
    return unknown(
        f"{script.at(by)} seems to divide the data by rank already: all ranks need the same "
        "number of batches"
    )


def dataset_of(call: ast.Call) -> ast.expr | None:
    """What a DataLoader is given to load, if that is seen."""
    named = (each.value for each in call.keywords if each.arg == "dataset")
    return call.args[0] if call.args else next(named, None)


def find_stream(script: TrainingScript, call: ast.Call) -> str:
    """The class of streams that a DataLoader's dataset comes from, as the script calls it; empty if
    it is none of the script's own."""
    for made in script.text.makers(dataset_of(call)):
        owner = script.text.classes.get(script.text.called(made))
        for base in owner.bases if owner else []:
            if ast.unparse(base).endswith("IterableDataset"):
                return ast.unparse(base)
    return ""


def note_draws(script: TrainingScript) -> list[str]:
    """What drawing the same batch on all ranks depends on."""
    if script.text.find_calls("manual_seed", "seed_everything", "set_seed"):
        note = "all ranks draw the same batch, as they have the same seed"
    else:
        note = "all ranks have to draw the same batch: call torch.manual_seed(0) at the beginning"
    return [
        note,
        "the first dimension is taken for that of samples: else give chunk its dim. The number of "
        "ranks has to divide it",
    ]


def find_other_loop(script: TrainingScript, call: ast.Call) -> ast.AST | None:
    """A loop that walks what this call makes, besides that of the training."""
    walked = [
        node
        for node in ast.walk(script.text.tree)
        if isinstance(node, (ast.For, ast.comprehension))
        and not any(node is each.batches for each in script.trainings)
        and not any(isinstance(each, ast.Yield) for each in ast.walk(node))
        and script.text.class_of(node) not in script.loader_wrappers
    ]
    found = (node for node in walked if call in script.text.makers(node.iter))
    return next((node if isinstance(node, ast.For) else node.iter for node in found), None)


def divide(
    script: TrainingScript, call: ast.Call, data: ast.expr, name: str = "train_set"
) -> Iterator[Edit]:
    """The changes of a DataLoader's call: its part of each batch, by a sampler. `name`: of the
    dataset, if it has none."""
    text, given = script.text, arguments_of(call)
    words, case = text.code(data), script.case_of(call)
    if not (isinstance(data, (ast.Name, ast.Attribute)) or case):
        statement = text.statement_of(call)
        bound = text.fresh(name)
        indent = script.indent_of(statement)
        yield add_before(statement.lineno, indent, f"{bound} = {words}")
        yield replace_node(data, bound)
        words = bound
    shuffle = call.args[2] if len(call.args) > 2 else None
    shuffle = given["shuffle"].value if "shuffle" in given else shuffle
    is_true = isinstance(shuffle, ast.Constant) and shuffle.value is True
    is_case = shuffle is not None and bool(case) and ast.unparse(shuffle) == normalise(case)
    kind = "" if is_true or is_case else f", shuffle={text.code(shuffle) if shuffle else False}"
    sampler = f"sampler=DistributedSampler({words}{kind})"
    sampler += f" if {case} else None" if case else ""
    yield from divide_batch(script, call)
    if "shuffle" in given:
        yield replace_node(given["shuffle"], sampler)
    elif shuffle is not None:
        yield replace_node(shuffle, "False")
        yield script.add_argument(call, sampler)
    else:
        yield script.add_argument(call, sampler)


def normalise(code: str) -> str:
    """The code of an expression, with the quotes and blanks of `ast.unparse`."""
    return ast.unparse(ast.parse(code, mode="eval"))


def divide_batch(script: TrainingScript, call: ast.Call) -> Iterator[Edit]:
    """The change of the size of its batches, if it has one."""
    given = arguments_of(call)
    batch = call.args[1] if len(call.args) > 1 else None
    batch = given["batch_size"].value if "batch_size" in given else batch
    if batch is not None:
        words, case = script.text.operand(batch), script.case_of(call)
        whole = f" if {case} else {words}" if case else ""
        yield replace_node(batch, f"{words} // {script.size}{whole}")


def note_order(script: TrainingScript, call: ast.Call) -> list[str]:
    """What else the parts of the data depend on."""
    text = script.text
    notes = []
    if not (call.args[1:2] or any(each.arg in ("batch_size", None) for each in call.keywords)):
        notes.append("without batch_size, a batch has one sample on each rank")
    else:
        notes.append(
            "the batch is divided: on any number of ranks that divides it, all ranks together have "
            "it, so the learning rate and the number of steps stay"
        )
        notes += (
            f"{script.at(each)} multiplies the learning rate by the number of ranks: with a "
            "divided batch, leave that out"
            for each in find_scaled_rates(script)
        )
        notes += (
            f"{script.at(each)} compares the samples of a batch with each other: each rank has "
            "those of its own part, which is another loss. Gather the outputs of all ranks for it "
            "(torch.distributed.nn.functional.all_gather)"
            for each in find_comparisons(script)[:1]
        )
    notes += (
        f"{script.at(each)} downloads, on all ranks at once: download once, before they start"
        for each in text.calls
        if any(one.arg == "download" and ast.unparse(one.value) == "True" for one in each.keywords)
    )
    return notes


def find_comparisons(script: TrainingScript) -> list[ast.AST]:
    """What compares all samples of a batch with each other, as a contrastive loss does: a product
    with a transpose, or distances, in a function that also has the numbers of its rows."""
    text, loop = script.text, script.loop
    found = list[ast.AST]()
    for place in (*script.called_in_step, *([loop] if loop else [])):
        nodes = [*ast.walk(place)]
        calls = {text.called(node) for node in nodes if isinstance(node, ast.Call)}
        if calls & ROWS:
            found += (node for node in nodes if is_comparison(script, node))
    return found


def is_comparison(script: TrainingScript, node: ast.AST) -> bool:
    """Whether it is a product with the transpose of a name, or the distances of all pairs."""
    text = script.text
    if isinstance(node, ast.Call) and text.called(node) == "cdist":
        return True
    factors: list[ast.expr] = []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        factors = [node.right]
    elif isinstance(node, ast.Call) and text.called(node) in ("matmul", "mm"):
        factors = [*node.args[-1:]]
    for each in factors:
        of = each.func if isinstance(each, ast.Call) else each
        if isinstance(of, ast.Attribute) and isinstance(of.value, ast.Name):
            dims = [ast.unparse(arg) for arg in each.args] if isinstance(each, ast.Call) else []
            if of.attr in ("T", "t") or (of.attr == "transpose" and dims == ["0", "1"]):
                return True
    return False


def find_scaled_rates(script: TrainingScript) -> list[ast.AST]:
    """The products of a learning rate and the number of ranks."""
    text = script.text
    rates = [
        each.value
        for call in text.calls
        for each in call.keywords
        if each.arg == "lr" and ".optim." in f".{text.dotted(call.func)}"
    ]
    names = {rate.id for rate in rates if isinstance(rate, ast.Name)}
    assigned = [
        node.value
        for node in ast.walk(text.tree)
        if isinstance(node, ast.Assign) and names & {ast.unparse(each) for each in node.targets}
    ]
    products = (
        node
        for rate in (*rates, *assigned)
        for node in ast.walk(rate)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
    )
    return [each for each in products if any(map(script.is_size, ast.walk(each)))]
