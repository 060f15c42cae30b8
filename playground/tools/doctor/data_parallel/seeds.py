"""Random numbers: what all ranks have to draw alike, as a split of the data, and what each draws
apart, as the masks of dropout. Does not import torch."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence

from playground.tools.doctor.data_parallel.batches import draws_itself, share_drawn
from playground.tools.doctor.data_parallel.edits import Edit, add_after, add_before
from playground.tools.doctor.data_parallel.script import TrainingScript
from playground.tools.doctor.data_parallel.text import Loop, TrainingText, find_results
from playground.tools.doctor.data_parallel.trainings import Training

SEEDS = {
    "torch.manual_seed": "torch",
    "torch.random.manual_seed": "torch",
    "numpy.random.seed": "numpy",
    "random.seed": "random",
}
"""Calls that seed a library's numbers."""
SEEDING = {"torch": "manual_seed", "numpy": "random.seed", "random": "seed"}
"""How each library is seeded, behind its name."""
AGAIN = {
    "torch": "initial_seed()",
    "numpy": "random.randint(2**31 - 1)",
    "random": "randrange(2**32)",
}
"""What gives a number that comes from the seed of each, behind its name."""
SEEDS_ALL = {"seed_everything", "set_seed"}
"""Functions of other packages that seed them all."""
DROP_BY_DEFAULT = {"Transformer", "TransformerEncoderLayer", "TransformerDecoderLayer"}
MAY_DROP = {"LSTM", "GRU", "RNN", "MultiheadAttention"}
"""Modules of torch.nn with dropout, the latter if that is asked for."""
DROPS = {"Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "dropout"}
NOISE = {
    *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "normal"),
    *("bernoulli", "multinomial", "poisson", "uniform", "gauss", "random", "choice", "choices"),
    *("sample", "shuffle", "permutation"),
}
SPLITS = {"random_split": "torch", "train_test_split": "numpy"}
"""Functions of other packages, and the library whose numbers they draw."""


def library_of(script: TrainingScript, call: ast.Call) -> str:
    """The library whose numbers a call draws; empty if it draws none that is known here."""
    text = script.text
    name, root = text.called(call), text.dotted(call.func).partition(".")[0]
    is_given = any(each.arg in ("generator", "random_state") for each in call.keywords)
    if is_given or text.resolve(call):
        return ""
    if name in SPLITS:
        return SPLITS[name]
    return root if name in NOISE and root in SEEDING else ""


def find_seeds(script: TrainingScript) -> dict[str, list[ast.Call]]:
    """The calls that seed each library's numbers."""
    text, found = script.text, dict[str, list[ast.Call]]()
    for call in text.calls:
        library = SEEDS.get(text.dotted(call.func), "")
        libraries = [library] if library else []
        if text.called(call) in SEEDS_ALL and text.resolve(call) is None:
            libraries = [*SEEDING]
        function = text.function_of(call) if libraries else None
        if function and not any(text.resolve(each) is function for each in text.calls):
            continue  # nothing calls it
        for each in libraries:
            found.setdefault(each, []).append(call)
    return found


def runs_in_step(script: TrainingScript, call: ast.Call) -> bool:
    """Whether it draws for a step, or a sample: in the loop of the training, in a function that is
    called there, in `forward` or `__getitem__`."""
    loops = [each.batches for each in script.trainings if each.batches]
    places = [*script.called_in_step, *loops]
    return any(each in places for each in script.text.climb(call))


def find_unseeded(script: TrainingScript) -> dict[str, ast.Call]:
    """The first call that draws data, or a split of them, of each library that has no seed."""
    seeds, found = find_seeds(script), dict[str, ast.Call]()
    for call in sorted(script.text.calls, key=lambda each: each.lineno):
        library = library_of(script, call)
        if library and library not in seeds and not runs_in_step(script, call):
            found.setdefault(library, call)
    return found


def seed_alike(script: TrainingScript) -> tuple[list[Edit], list[str]]:
    """The lines, after the imports, that seed the libraries from which the script draws its data,
    or a split of them, without a seed; and why."""
    found = find_unseeded(script)
    notes = [
        f"{script.at(call)} draws other numbers on each rank: with one seed, all have the same "
        "data, and the same parts of them"
        for call in found.values()
    ]
    named = ((name_library(script, library), SEEDING[library]) for library in found)
    lines = [f"{name}.{seed}(0)" for name, seed in named if name]
    if not (lines and script.imports):
        return [], notes
    return [add_after(script.imports[-1], "", *lines)], notes


def name_library(script: TrainingScript, library: str) -> str:
    """How the script names a library; empty if it does not import it as a whole."""
    names = script.text.imports.items()
    return next((name for name, what in names if what == library), "")


def seed_apart(script: TrainingScript) -> tuple[list[Edit], list[str]]:
    """The lines, before the training, that give each rank numbers of its own where all ranks have
    one seed, and a step draws some; and why."""
    text, training = script.text, script.training
    kept = find_drawn_alike(script)
    seeded = {name: calls for name, calls in find_seeds(script).items() if name not in kept}
    unseeded = find_unseeded(script).keys() - kept
    seeds = [each for found in seeded.values() for each in found]
    added = [name for each in SEEDING if each in unseeded and (name := name_library(script, each))]
    drawn = find_drawn_in_step(script, {*seeded, *unseeded})
    loop = training and (training.epochs or training.batches)
    if not ((seeds or added) and drawn and training and loop):
        return [], []
    if any(script.is_rank(node) for call in seeds for node in ast.walk(call)):
        return [], []
    at = f" ({script.at(seeds[-1])})" if seeds else ""
    why = f"{script.at(drawn[0])}: with one seed on all ranks{at}, {tell_drawn(script, drawn[0])}"
    if again := find_drawn_again(script, training):
        seed = text.code(seeds[-1].args[0]) if seeds and seeds[-1].args else "0"
        note = (
            f"{why} on all: in each round, seed with {seed} before {script.at(again)}, which all "
            f"ranks have to draw alike, and with {seed} + {script.rank} before the training"
        )
        return [], [note]
    place = text.statement_of(loop)
    lines = [] if kept else [*seed_by_names(script, seeds, place)]
    lines = lines or [*seed_anew(script, seeded, drawn)]
    lines += (f"{name}.{SEEDING[text.imports[name]]}({script.rank})" for name in added)
    if not lines:
        return [], [f"{why} on all: give each rank a seed of its own before {script.at(place)}"]
    edit = add_before(place.lineno, script.indent_of(place), *dict.fromkeys(lines))
    return [edit], [f"{why} on all: each gets a seed of its own"]


def seed_by_names(
    script: TrainingScript, seeds: Sequence[ast.Call], place: ast.stmt
) -> Iterator[str]:
    """The lines at a place that seed as all these calls do, with the rank added; none if one of
    them has no name there."""
    lines = [[*reseed(script, each, place)] for each in seeds]
    if all(lines):
        yield from (line for each in lines for line in each)


def seed_anew(
    script: TrainingScript, seeded: Collection[str], drawn: Sequence[ast.Call]
) -> Iterator[str]:
    """The lines that seed each library by a number that comes from its seed, with the rank added:
    torch, which seeds a DataLoader's workers, and those that are drawn from."""
    used = {"torch", *(library_of(script, each) for each in drawn)}
    for library in SEEDING:
        if library in used and library in seeded and (name := name_library(script, library)):
            yield f"{name}.{SEEDING[library]}({name}.{AGAIN[library]} + {script.rank})"


def find_drawn_again(script: TrainingScript, training: Training) -> ast.Call | None:
    """What draws its data, or a split of them, in each round of a loop around the training."""
    inner = (training.batches, training.epochs)
    around = [each for each in training.path if isinstance(each, Loop) and each not in inner]
    places = script.text.reach(*around) if around else []
    calls = (node for each in places for node in ast.walk(each) if isinstance(node, ast.Call))
    drawn = (each for each in calls if library_of(script, each))
    return next((each for each in drawn if not runs_in_step(script, each)), None)


def find_drawn_in_step(script: TrainingScript, seeded: set[str]) -> list[ast.Call]:
    """What draws numbers of a library that is seeded, for a step, or a sample, by line."""
    text = script.text

    def is_drawn(call: ast.Call) -> bool:
        name, dotted = text.called(call), text.dotted(call.func)
        is_transform = name.startswith("Random") and ".transforms" in f".{dotted}"
        if name in DROPS or is_transform or drops_inside(text, call):
            return "torch" in seeded
        is_noise = library_of(script, call) in seeded and runs_in_step(script, call)
        return is_noise and not text.is_without_gradients(call)

    return sorted(filter(is_drawn, text.calls), key=lambda each: each.lineno)


def drops_inside(text: TrainingText, call: ast.Call) -> bool:
    """Whether it makes a module of torch.nn's, or a model of transformers', that has dropout."""
    name = text.called(call)
    given = [ast.unparse(each.value) for each in call.keywords if each.arg == "dropout"]
    if name in DROP_BY_DEFAULT or (name in MAY_DROP and given):
        return not {"0", "0.0"}.intersection(given)
    return name == "from_pretrained" and text.dotted(call.func).startswith("transformers.AutoModel")


def tell_drawn(script: TrainingScript, call: ast.Call) -> str:
    if script.text.called(call) in DROPS or drops_inside(script.text, call):
        return "dropout draws the same masks"
    return f"{script.text.code(call.func)} draws the same numbers"


def find_drawn_alike(script: TrainingScript) -> set[str]:
    """The libraries of which all ranks have to draw the same numbers in the training: those from
    which its batches, or their order, are drawn."""
    text, found = script.text, set[str]()
    if share_drawn(script):
        return {*SEEDING}
    for given in (each for call in script.loaders for each in call.keywords):
        if given.arg not in ("sampler", "batch_sampler") or not draws_itself(script, given.value):
            continue
        made = text.makers(given.value)
        if made and all(map(script.is_distributed_sampler, made)):
            continue
        owners = [
            text.classes[name] for each in made if (name := text.called(each)) in text.classes
        ]
        calls = (node for each in owners for node in ast.walk(each) if isinstance(node, ast.Call))
        libraries = {library for each in calls if (library := library_of(script, each))}
        found |= libraries or {*SEEDING}
    return found


def reseed(script: TrainingScript, seed: ast.Call, place: ast.stmt) -> Iterator[str]:
    """The lines at a place that seed as this call does, with the rank added; none if its seed has
    no name there."""
    text, value = script.text, seed.args[0] if seed.args else None
    function = text.function_of(seed)
    if value is None:
        return
    if function and function is not text.function_of(place):  # a function that seeds
        sites = [call for call in text.calls if text.resolve(call) is function]
        if len(sites) != 1 or len(sites[0].args) != 1 or sites[0].keywords:
            return
        if find_results(function) or not isinstance(value, ast.Name):
            return
        seed, value = sites[0], sites[0].args[0]
    if has_names_at(script, value, place):
        yield f"{text.code(seed.func)}({text.operand(value)} + {script.rank})"


def has_names_at(script: TrainingScript, value: ast.expr, place: ast.stmt) -> bool:
    """Whether the names of an expression mean the same at a place."""
    text = script.text
    function = text.function_of(place)
    for node in ast.walk(value):
        if isinstance(node, ast.Name):
            known = text.key_of(node)
            own = id(function) if function and node.id in text.bound[id(function)] else 0
            if known is None or known[0] != own:
                return False
    return True
