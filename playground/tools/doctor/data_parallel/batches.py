"""Shares of batches that no plain DataLoader makes: of a stream, of a sampler of the script's own,
of a loader whose arguments are unpacked, of batches that the script draws itself. Does not import
torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from playground.tools.doctor.data_parallel.edits import Edit, add_before, replace_node
from playground.tools.doctor.data_parallel.model import Wrapping
from playground.tools.doctor.data_parallel.script import TrainingScript
from playground.tools.doctor.data_parallel.text import owner_of

SHARE = '''\
class {name}({base}):
    """The samples of one rank: every rank has as many, and what is left over is dropped."""

    def __init__(self, samples, rank, size):
        self.samples, self.rank, self.size = samples, rank, size

    def __iter__(self):
        for group in zip(*[iter(self.samples)] * self.size):
            yield group[self.rank]


'''


SHARE_OF_INDICES = '''\
class {name}:
    """The indices of one rank, of a sampler that draws the same order on all ranks."""

    def __init__(self, sampler, rank, size):
        self.sampler, self.rank, self.size = sampler, rank, size

    def __len__(self):
        return len(self.sampler) // self.size

    def __iter__(self):
        for group in zip(*[iter(self.sampler)] * self.size):
            yield group[self.rank]


'''
SHARE_OF_BATCHES = '''\
class {name}:
    """The part of each batch of one rank, of batches that all ranks draw alike: every rank has as
    many indices, and what is left over is dropped."""

    def __init__(self, batches, rank, size):
        self.batches, self.rank, self.size = batches, rank, size

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for batch in map(list, self.batches):
            if part := batch[self.rank : len(batch) // self.size * self.size : self.size]:
                yield part


'''
OF_TENSORS = {"torch", "numpy", "itertools", "random", "math"}
"""Packages from whose functions batches are tensors, if the script draws them itself."""
DRAWS = {"RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler"}
"""torch's samplers that draw from the generator which they are given."""
KEEPS = {"BatchSampler", "SequentialSampler"}
"""Those that draw nothing."""


def share_stream(
    script: TrainingScript, call: ast.Call, data: ast.expr, base: str
) -> Iterator[Edit]:
    """The changes of a DataLoader of a stream: of samples that follow each other, every rank takes
    one."""
    yield from put_in_share(script, call, data, SHARE, base=base)


def share_indices(script: TrainingScript, call: ast.Call, sampler: ast.expr) -> Iterator[Edit]:
    """The changes of a DataLoader with a sampler: of indices that follow each other, every rank
    takes one. All ranks draw the same."""
    yield from seed_draws(script, sampler)
    yield from put_in_share(script, call, sampler, SHARE_OF_INDICES)


def share_batches(script: TrainingScript, call: ast.Call, batches: ast.expr) -> Iterator[Edit]:
    """The changes of a DataLoader with a sampler of batches: of each batch, every rank takes a
    part. All ranks draw the same."""
    yield from seed_draws(script, batches)
    yield from put_in_share(script, call, batches, SHARE_OF_BATCHES)


def seed_draws(script: TrainingScript, sampler: ast.expr) -> Iterator[Edit]:
    """The changes by which torch's samplers draw the same on all ranks."""
    for made in find_samplers(script, sampler):
        is_seeded = any(each.arg == "generator" for each in made.keywords)
        if script.text.called(made) in DRAWS and not is_seeded:
            yield script.add_argument(made, "generator=torch.Generator().manual_seed(0)")


def draws_itself(script: TrainingScript, sampler: ast.expr) -> bool:
    """Whether it may draw from a generator that it is not given."""
    names = {script.text.called(each) for each in find_samplers(script, sampler)}
    is_listed = isinstance(sampler, ast.List | ast.Tuple)
    return not is_listed and not (names and names <= {*DRAWS, *KEEPS})


def find_samplers(script: TrainingScript, sampler: ast.expr) -> list[ast.Call]:
    """The calls that make a sampler, and those that make what a BatchSampler is given."""
    text, found = script.text, [*script.text.makers(sampler)]
    for made in found:
        if text.called(made) == "BatchSampler":
            given = (*made.args, *(each.value for each in made.keywords))
            found += (one for each in given for one in text.makers(each) if one not in found)
    return found


def put_in_share(
    script: TrainingScript, call: ast.Call, whole: ast.expr, text: str, **names: str
) -> Iterator[Edit]:
    """The changes that put an argument of a call into a class of this text, added above."""
    name = script.text.fresh("Share")
    *_, place, _ = script.text.climb(call)  # a statement of the module itself
    above = [place, *getattr(place, "decorator_list", ())]
    first = min(getattr(each, "lineno", 0) for each in above)
    yield Edit((first, 0), (first, 0), text.format(name=name, **names))
    begin, end = replace_node(whole, "").start, replace_node(whole, "").end
    yield Edit(begin, begin, f"{name}(")
    yield Edit(end, end, f", {script.rank}, {script.size})")


def share_unpacked(script: TrainingScript, unpacked: ast.expr, data: ast.expr) -> Edit:
    """The change of a DataLoader whose other arguments are a dictionary, which has the size of the
    batch."""
    known, samples = script.text.code(unpacked), script.text.code(data)
    sampler = f'DistributedSampler({samples}, shuffle={known}.get("shuffle", False))'
    return divide_unpacked(script, unpacked, f', "shuffle": False, "sampler": {sampler}')


def divide_unpacked(script: TrainingScript, unpacked: ast.expr, more: str = "") -> Edit:
    """The change of the size of the batch in a dictionary of arguments; `more`: others that
    change."""
    known = script.text.code(unpacked)
    words = f'{{**{known}, "batch_size": {known}["batch_size"] // {script.size}{more}}}'
    return replace_node(unpacked, words)


def list_unpacked(script: TrainingScript, unpacked: ast.expr) -> set[str] | None:
    """The names of a dictionary's arguments; None if they are not all seen."""
    if isinstance(unpacked, ast.IfExp):
        ways = [list_unpacked(script, each) for each in (unpacked.body, unpacked.orelse)]
    elif isinstance(unpacked, ast.Call) and script.text.called(unpacked) == "dict":
        ways = [None if unpacked.args else {str(each.arg) for each in unpacked.keywords}]
    elif isinstance(unpacked, ast.Dict):
        names = [each.value for each in unpacked.keys if isinstance(each, ast.Constant)]
        ways = [{*map(str, names)} if len(names) == len(unpacked.keys) else None]
    elif isinstance(unpacked, ast.Name) and not is_changed(script, unpacked.id):
        ways = [
            list_unpacked(script, node.value)
            for node in ast.walk(script.text.tree)
            if isinstance(node, ast.Assign)
            and unpacked.id in {each.id for each in node.targets if isinstance(each, ast.Name)}
        ]
    else:
        ways = []
    seen = [each for each in ways if each is not None]
    return set().union(*seen) if seen and len(seen) == len(ways) else None


def is_changed(script: TrainingScript, name: str) -> bool:
    """Whether a dictionary of this name is given further items, by a method or one by one."""
    return any(
        isinstance(node, (ast.Attribute, ast.Subscript)) and ast.unparse(node.value) == name
        for node in ast.walk(script.text.tree)
    )


def share_drawn(script: TrainingScript) -> Edit | None:
    """The line that takes a rank's part of a batch that the script draws itself, the same one on
    all ranks. None if that is not seen."""
    if script.training is None or script.training.batches is None or script.loaders:
        return None
    if script.walks_several or find_elsewhere(script):
        return None
    loop, way = script.training.batches, {id(node) for node in script.training.path}
    if (
        isinstance(loop, ast.For)
        and script.text.find_calls("DataLoader")
        and name_batch(script, loop)
    ):
        return None  # it may walk a DataLoader
    models = Wrapping(script).find_models()

    def is_use(statement: ast.stmt) -> bool:
        calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call))
        return id(statement) in way or any(models & script.text.makers(call.func) for call in calls)

    place = next((at for at, each in enumerate(loop.body) if is_use(each)), len(loop.body))
    names = [*name_batch(script, loop)]
    for each in loop.body[:place]:
        if isinstance(each, ast.Assign) and is_drawn(script, each.value):
            names += (name for target in each.targets for name in list_names(target))
    given = {
        node.id
        for each in loop.body[place:]
        for node in ast.walk(each)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    owners = filter(None, map(owner_of, script.text.find_calls("backward")))
    losses = {each.id for owner in owners for each in ast.walk(owner) if isinstance(each, ast.Name)}
    names = [name for name in dict.fromkeys(names) if name in given - losses]
    names = names or [*name_drawn_ahead(script, loop.body[place:])]
    if not names:
        return None
    share = f".chunk({script.size})[{script.rank}]"
    line = f"{names[0]} = {names[0]}{share}"
    if len(names) > 1:
        several = ", ".join(names)
        line = f"{several} = (each{share} for each in ({several}))"
    use = loop.body[place]
    return add_before(use.lineno, script.indent_of(use), line)


def find_elsewhere(script: TrainingScript) -> str:
    """What of another file or package has made what the loop walks, with dots; empty if that is
    not seen."""
    if not script.loop:
        return ""
    text = script.text
    walked = [node.id for node in ast.walk(script.loop.iter) if isinstance(node, ast.Name)]
    for call in text.calls:  # what a parameter is given
        walked += (ast.unparse(given) for to, given in text.bind(call) if to.arg in walked)
    made = (
        text.dotted(node.value.func)
        for node in ast.walk(text.tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if any(name in walked for each in node.targets for name in list_names(each))
    )
    roots = {what.partition(".")[0] for what in text.imports.values()} - OF_TENSORS
    return next((each for each in made if each.partition(".")[0] in roots), "")


def name_drawn_ahead(script: TrainingScript, body: Sequence[ast.stmt]) -> Iterator[str]:
    """The names of a batch that the first of these statements uses, and one after it draws for the
    next round."""
    used = {node.id for each in body[:1] for node in ast.walk(each) if isinstance(node, ast.Name)}
    for each in body[1:]:
        if isinstance(each, ast.Assign) and is_drawn(script, each.value):
            drawn = (name for target in each.targets for name in list_names(target))
            yield from (name for name in drawn if name in used)


def find_division_of_drawn(script: TrainingScript, loop: ast.For | ast.While) -> ast.AST | None:
    """What divides by rank the data from which a loop draws its batches; None if that is not
    seen."""
    drawn = [
        each.value
        for each in loop.body
        if isinstance(each, ast.Assign) and is_drawn(script, each.value)
    ]
    walked = [loop.iter] if isinstance(loop, ast.For) else []
    return next(filter(None, map(script.find_division, [*walked, *drawn])), None)


def name_batch(script: TrainingScript, loop: ast.For | ast.While) -> Sequence[str]:
    """The names of what the loop walks, unless those are numbers."""
    if isinstance(loop, ast.While):
        return []
    walked = script.text.called(loop.iter) if isinstance(loop.iter, ast.Call) else ""
    is_number = walked in ("range", "trange", "count") or "range(" in ast.unparse(loop.iter)
    names = [] if is_number else list_names(loop.target)
    return names[1:] if walked == "enumerate" else names


def is_drawn(script: TrainingScript, value: ast.expr) -> bool:
    """Whether it is a part of data, or a result of the script's own function."""
    if isinstance(value, ast.Tuple):
        return all(is_drawn(script, each) for each in value.elts)
    if isinstance(value, ast.Call):
        is_moved = script.text.called(value) in ("to", "cuda") and owner_of(value) is not None
        return script.text.called(value) == "next" or (
            script.text.resolve(value) is not None or is_moved
        )
    return isinstance(value, ast.Subscript)


def list_names(target: ast.expr) -> list[str]:
    """The names that an assignment to it binds."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return [name for each in target.elts for name in list_names(each)]
    return [target.id] if isinstance(target, ast.Name) else []
