"""The part of the model: it is wrapped, and the wrapper is what the training calls. Does not import
torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

from playground.tools.doctor.data_parallel.edits import Edit, add_after, add_before, replace_node
from playground.tools.doctor.data_parallel.parts import Part, Status
from playground.tools.doctor.data_parallel.script import TrainingScript
from playground.tools.doctor.data_parallel.text import (
    Function,
    Key,
    find_method,
    is_guard,
    walk_own,
)

NORMS = "BatchNorm1d", "BatchNorm2d", "BatchNorm3d"
SYNCED = "convert_sync_batchnorm", "SyncBatchNorm"
NORMED = re.compile(
    r"(deeplabv3|densenet|efficientnet|fcn_|googlenet|inception|lraspp|maxvit|mc3_|mnasnet|mobilenet"
    r"|r2plus1d|r3d_|regnet|resnet|resnext|s3d|shufflenet|wide_resnet)|vgg\d+_bn$"
)
"""The names of torchvision's models with BatchNorm."""
NOT_NORMED = re.compile(
    r"(torch|transformers|peft|copy)\.(?!hub\.)|torchvision\.(?!models\.get_model\.)"
)
"""What makes other models, of which none has a BatchNorm that the text does not show."""
OF_HUB = "torch.hub.load", "timm.create_model"
"""What makes a model by its name."""
FILLS = {"apply"}
"""Methods that give a model other values, which may be random."""
TO_MODULE = {"train", "eval", "parameters", "zero_grad", "named_parameters"}
"""What DistributedDataParallel passes on, or does as the model does."""


def find_model(script: TrainingScript) -> Part:
    """The model: DistributedDataParallel has to wrap it, and forward has to go through the
    wrapper."""
    name, text = "model", script.text
    rule = "DistributedDataParallel averages the gradients in backward()"
    if found := text.find_calls("DistributedDataParallel", "DDP"):
        return Part(name, Status.THERE, f"{script.at(found[0])} wraps the model")
    threads = text.find_calls("DataParallel")
    if threads and not can_leave_out(script, threads):
        return Part(
            name,
            Status.UNKNOWN,
            f"{script.at(threads[0])} has DataParallel, which "
            f"is of one process: wrap the model that it is given by "
            f"DistributedDataParallel in its place; {rule}",
        )
    if not script.training or script.training.batches is None:
        why = "no loop over batches is seen"
        return Part(name, Status.UNKNOWN, f"{why}: wrap each model that is trained; {rule}")
    wrapping = Wrapping(script, several=script.chosen is not None)
    try:
        edits = wrapping.find_edits()
    except UnknownShape as why:
        return Part(
            name,
            Status.UNKNOWN,
            f"{why}: wrap the model, and call the wrapper in the training; {rule}",
        )
    scaled, summed = scale_sum(script)
    left_out = [replace_node(call, text.code(call.args[0])) for call in threads]
    models = wrapping.wrapped.values()
    notes = [*note_model(script, models, bool(wrapping.again)), *note_threads(script, threads)]
    return Part(
        name,
        Status.MISSING,
        f"nothing averages the gradients: {rule}",
        [*edits, *left_out, *scaled],
        [*notes, *summed],
    )


def note_model(
    script: TrainingScript, models: Iterable[ast.expr], is_wrapped_again: bool
) -> Iterator[str]:
    """What is said of the models that are wrapped."""
    yield from (
        f"{script.at(each)} changes which parameters are trained, after the model is wrapped: wrap "
        "it again there"
        for each in find_unfreezing(script)[:1]
        if not is_wrapped_again
    )
    yield from note_accumulation(script)
    yield from (
        f"{script.at(each)}: {tell_norms(script, each)}each rank normalises by its own part of the "
        f"batch. To normalise by the whole on GPUs, add before the wrapper: {model} = "
        f"torch.nn.SyncBatchNorm.convert_sync_batchnorm({model})"
        for model, each in find_normalised(script, models)
    )


def note_accumulation(script: TrainingScript) -> Iterator[str]:
    """What is said of gradients that are added up over several batches."""
    loop = script.training.batches if script.training else None
    for call in script.text.find_calls("step") if loop else ():
        around = [each for each in script.text.climb(call) if isinstance(each, ast.If)]
        counts = [each for each in around if any(is_rest(node) for node in ast.walk(each.test))]
        if counts and any(each is loop for each in script.text.climb(call)):
            yield (
                f"{script.at(counts[0])}: gradients are averaged in every backward(). To send them "
                "once for each step, have the others under `with ddp.no_sync():`, forward included"
            )
            return


def is_rest(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)


def note_threads(script: TrainingScript, threads: Iterable[ast.Call]) -> Iterator[str]:
    """What is said of calls of DataParallel that are left out."""
    for call in threads:
        yield (
            f"{script.at(call)}: DataParallel is of one process, so the model stays as it is; a "
            'checkpoint that was saved with it has "module." before each name'
        )


def scale_sum(script: TrainingScript) -> tuple[list[Edit], list[str]]:
    """The change by which the average of gradients is that of a loss which is a sum over samples;
    and why."""
    summed = script.summed_loss
    if not (summed and script.training):
        return [], []
    adds = (
        f"{script.at(summed)} adds up the losses of samples, and the average over ranks is a "
        f"{script.size}-th of the sum"
    )
    loss = script.training.loss
    if not isinstance(loss, ast.Name):
        return [], [f"{adds}: multiply the loss by {script.size}"]
    edit = replace_node(loss, f"({loss.id} * {script.size})")
    return [edit], [f"{adds}: so the loss is multiplied by {script.size}"]


def find_unfreezing(script: TrainingScript) -> list[ast.AST]:
    """What changes `requires_grad` in the loop over epochs, or in a function that is called
    there."""
    text, epochs = script.text, script.training.epochs if script.training else None
    places = text.reach(epochs) if epochs else []
    own = (each for each in places if getattr(each, "name", "") != "__init__")
    return [node for place in own for node in text.find_set_trained(place)]


def can_leave_out(script: TrainingScript, threads: Sequence[ast.Call]) -> bool:
    """Whether the model can take the place of these calls of DataParallel: nothing asks for their
    `module`."""
    attributes = (node for node in ast.walk(script.text.tree) if isinstance(node, ast.Attribute))
    return all(each.args for each in threads) and not any(
        each.attr == "module" for each in attributes
    )


def find_normalised(
    script: TrainingScript, models: Iterable[ast.expr]
) -> Iterator[tuple[str, ast.Call]]:
    """The models that may have BatchNorm, with their first layer of it, or what makes a model of
    another package: of a model of the script's own class, one that the class makes, or a class that
    it makes."""
    text, norms = script.text, find_norms_apart(script)
    if text.find_calls(*SYNCED):
        return
    for model in models:
        makers = sorted(text.makers(model), key=lambda made: made.lineno)
        left: list[ast.AST] = [text.classes.get(text.called(made)) or made for made in makers]
        for each in left:
            calls = (node for node in ast.walk(each) if isinstance(node, ast.Call))
            inner = (text.classes.get(text.called(call)) or text.resolve(call) for call in calls)
            left += [one for one in dict.fromkeys(inner) if one and one not in left]
        inside = [node for each in left for node in ast.walk(each) if isinstance(node, ast.Call)]
        own = [norm for norm in norms if norm in inside]
        own += (call for call in inside if text.dotted(call.func) in OF_HUB)
        own += (made for made in makers if is_of_elsewhere(script, made))
        if own or (norms and not left):
            yield ast.unparse(model), (own or norms)[0]


def is_of_elsewhere(script: TrainingScript, made: ast.Call) -> bool:
    """Whether a model is made in another file, or by a package that is not known to have none with
    BatchNorm."""
    text = script.text
    is_own = text.resolve(made) is not None or text.called(made) in text.classes
    return not (is_own or NOT_NORMED.match(f"{text.dotted(made.func)}."))


def tell_norms(script: TrainingScript, each: ast.Call) -> str:
    """What is said of BatchNorm where the text does not name it."""
    text = script.text
    if text.called(each) in NORMS:
        return ""
    words = text.code(each.func)
    if is_normed(script, each):
        return f"{words} makes a model with BatchNorm, so that "
    return f"if {words} makes a model with BatchNorm, "


def is_normed(script: TrainingScript, call: ast.Call) -> bool:
    """Whether it makes a model of torchvision's with BatchNorm."""
    package, _, name = script.text.dotted(call.func).rpartition(".")
    return package.startswith("torchvision.models") and bool(NORMED.match(name))


def find_norms_apart(script: TrainingScript) -> list[ast.Call]:
    """The BatchNorm layers whose statistics each rank has of its own, and what makes a model of
    torchvision's that has some."""
    if script.text.find_calls(*SYNCED):
        return []
    made = (call for call in script.text.calls if is_normed(script, call))
    return [*script.text.find_calls(*NORMS), *made]


def is_parameter(function: Function, name: str) -> bool:
    given = (each for each in ast.walk(function.args) if isinstance(each, ast.arg))
    return any(each.arg == name for each in given)


class UnknownShape(Exception):
    """The text does not show how the model comes to its call."""


class Wrapping:
    """Finds how a model is wrapped, and the wrapper comes to the forward of the training."""

    def __init__(self, script: TrainingScript, several: bool = False) -> None:
        """`several`: the names of the wrappers tell whose they are."""
        assert script.training
        self.several = several
        self.script = script
        self.text = script.text
        self.training = script.training
        self.ddp = script.text.fresh("ddp")
        self.edits: list[Edit] = []
        self.passed: set[int] = set()
        """The parameters that are the wrapper now, by the ids of their functions."""
        self.wrapped: dict[Key, ast.expr] = {}
        """An expression of what is wrapped, by its key."""
        self.again: list[Edit] = []
        """The statements that wrap it once more."""

    def find_edits(self) -> list[Edit]:
        """Raises `UnknownShape`."""
        calls = [*self.find_forwards()]
        if not calls and (other := self.find_method()):
            raise UnknownShape(
                f"{self.script.at(other)} calls {ast.unparse(other.func)}, and only a call of the "
                "wrapper itself averages gradients: have forward call that method"
            )
        if not calls:
            raise UnknownShape("no call of the model that the optimizer has is seen in the loop")
        for call in calls:
            self.use_wrapper(call.func)
        if len(self.wrapped) > 1 and not self.several:
            named = Wrapping(self.script, several=True)
            edits, self.again = named.find_edits(), named.again
            return edits
        self.again = [edit for each in self.wrapped.values() for edit in self.wrap_again(each)]
        return [*self.edits, *(self.wrap(*each) for each in self.wrapped.items()), *self.again]

    def find_method(self) -> ast.Call | None:
        """A call of a method of the model's own in the training; None if there is none."""
        assert self.training.batches
        models, text = self.find_models(), self.text
        for call in ast.walk(self.training.batches):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            owners = models & text.makers(call.func.value)
            own = (text.classes.get(text.called(each)) for each in owners)
            if any(find_method(each, call.func.attr) for each in own):
                return call
        return None

    def name_wrapper(self, model: ast.expr) -> str:
        """The name of the wrapper of this model."""
        name = self.ddp
        if self.several:
            name = f"{name}_{ast.unparse(model).rpartition('.')[2]}"
        return f"self.{name}" if isinstance(model, ast.Attribute) else name

    def find_models(self) -> set[ast.Call]:
        """What made the models whose parameters an optimizer has."""
        text = self.text
        optimizers = [
            call
            for call in text.calls
            if self.script.is_of_optim(call) and "lr_scheduler" not in text.dotted(call.func)
        ]
        inside = [node for call in optimizers for node in ast.walk(call)]
        named = {node.id for node in inside if isinstance(node, ast.Name)}
        for node in ast.walk(text.tree):  # the list of parameters may have a name
            if isinstance(node, ast.Assign) and named & {
                ast.unparse(each) for each in node.targets
            }:
                inside += ast.walk(node.value)
        own = filter(None, map(text.class_of, optimizers))  # which makes its own optimizer
        names = [each.name for each in own if find_method(each, "forward")]
        made = {*text.find_calls(*names)}
        return made.union(
            *(
                self.find_owner(node.func.value)
                for node in inside
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("parameters", "named_parameters")
            )
        )

    def find_owner(self, node: ast.expr) -> set[ast.Call]:
        """What made the model that it is, or is a part of: `model.head`."""
        while not (found := self.text.makers(node)) and isinstance(node, ast.Attribute):
            node = node.value
        return found

    def find_forwards(self) -> Iterator[ast.Call]:
        """The calls of the model in the loop, and in the functions that it calls."""
        assert self.training.batches
        models = self.find_models()
        left: list[ast.AST] = [self.training.batches]
        known = set[int]()
        while left:
            place = left.pop()
            if id(place) in known:
                continue
            known.add(id(place))
            for node in ast.walk(place):
                if not isinstance(node, ast.Call) or self.text.is_without_gradients(node):
                    continue
                if function := self.text.resolve(node):
                    if function.name != "__init__":
                        left.append(function)
                elif models & self.text.makers(node.func):
                    yield node

    def use_wrapper(self, node: ast.expr) -> None:
        """Have this expression be the wrapper. Raises `UnknownShape`."""
        text = self.text
        key = text.key_of(node)
        if key is None:
            raise UnknownShape(f"{self.script.at(node)} calls {ast.unparse(node)}")
        function = next((each for each in self.all_functions() if id(each) == key[0]), None)
        if function and is_parameter(function, key[1]) and not self.trains_in(function):
            self.pass_wrapper(function, key[1])
            return
        self.wrapped.setdefault(key, node)
        self.edits.append(replace_node(node, self.name_wrapper(node)))

    def all_functions(self) -> Iterator[Function]:
        return (node for node in ast.walk(self.text.tree) if isinstance(node, Function))

    def pass_wrapper(self, function: Function, name: str) -> None:
        """Have a parameter be the wrapper: what is no call of it uses its module."""
        text = self.text
        if id(function) in self.passed:
            return
        self.passed.add(id(function))
        sites = [call for call in text.calls if text.resolve(call) is function]
        trains = [call for call in sites if call in self.training.path] or sites
        if len(trains) != 1:
            raise UnknownShape(f"{function.name} is called at {len(sites)} places")
        before = len(self.edits)
        forwards = {id(call.func) for call in self.find_forwards()}
        for node in walk_own(function):
            if not (isinstance(node, ast.Name) and node.id == name):
                continue
            if isinstance(node.ctx, ast.Store):
                raise UnknownShape(f"{self.script.at(node)} assigns {name}")
            parent = text.parents[node]
            is_kept = isinstance(parent, ast.Attribute) and parent.attr in TO_MODULE
            if id(node) not in forwards and not is_kept and not self.is_passed_on(node):
                self.edits.append(replace_node(node, f"{name}.module"))
        key = id(function), name
        given = {call: text.bind_all(call).get(key) for call in sites}
        if (model := given[trains[0]]) is None:
            raise UnknownShape(f"what {self.script.at(trains[0])} passes as {name} is not seen")
        asks_module = len(self.edits) > before
        self.use_wrapper(model)
        for call, other in given.items():  # tests, on all ranks
            if other is None or other is model:
                continue
            if text.key_of(other) == text.key_of(model):
                self.use_wrapper(other)
            elif asks_module:
                raise UnknownShape(f"{self.script.at(call)} passes another model")

    def trains_in(self, function: Function) -> bool:
        """Whether the whole training is in a function."""
        whole = self.training.epochs or (None if self.training.is_lost else self.training.batches)
        return whole is not None and self.text.function_of(whole) is function

    def is_passed_on(self, node: ast.Name) -> bool:
        """Whether it is passed to a function that calls it in the training, and gets the
        wrapper."""
        call = self.text.parents[node]
        call = self.text.parents[call] if isinstance(call, ast.keyword) else call
        function = self.text.resolve(call) if isinstance(call, ast.Call) else None
        return function in self.training.functions or id(function) in self.passed

    def find_place(self, node: ast.AST) -> ast.stmt | None:
        """The statement around it behind which a line is reached by all that comes after it; None
        in the loop over epochs, or batches."""
        text, training = self.text, self.training
        found = text.statement_of(node)
        for each in text.climb(found):
            if isinstance(each, (Function, ast.ClassDef)) or is_guard(each):
                break
            if any(each is one for one in training.path):
                break
            if isinstance(each, ast.stmt):
                found = each
        inner = [one for one in (training.epochs, training.batches) if one]
        return None if any(one in (found, *text.climb(found)) for one in inner) else found

    def wrap_again(self, sample: ast.expr) -> list[Edit]:
        """The statements that wrap the model once more, behind those of the loop over epochs which
        change what of it is trained."""
        text, epochs = self.text, self.training.epochs
        owner = text.class_of if isinstance(sample, ast.Attribute) else text.function_of
        if not epochs or owner(epochs) is not owner(sample):
            return []
        line, found, left = self.line_of(sample), list[Edit](), [*epochs.body]
        for each in left:
            if each in self.training.path and not isinstance(each, ast.If):
                continue
            if isinstance(each, ast.If) and self.changes_trained(each):
                left += [*each.body, *each.orelse]
            elif isinstance(each, (ast.Expr, ast.For)) and self.changes_trained(each):
                found.append(add_after(each, self.script.indent_of(each), line))
        return found

    def line_of(self, sample: ast.expr) -> str:
        """The statement that wraps the model."""
        return f"{self.name_wrapper(sample)} = {self.script.wrapper}({ast.unparse(sample)})"

    def changes_trained(self, statement: ast.AST) -> bool:
        """Whether a statement changes which parameters are trained."""
        return any(self.text.find_set_trained(each) for each in self.text.reach(statement))

    def find_last(self, key: Key) -> ast.stmt | None:
        """The last statement before the training that makes the model, moves it, or says what of it
        is trained; None if there is none. Raises `UnknownShape`."""
        text = self.text
        own = [
            node
            for node in ast.walk(text.tree)
            if isinstance(node, (ast.Name, ast.Attribute)) and text.key_of(node) == key
        ]
        last: ast.stmt | None = None
        trained = [
            node
            for node in self.training.path
            if isinstance(node, ast.stmt) and not isinstance(node, Function)
        ]
        for node in own:
            parent = text.parents[node]
            moves = isinstance(parent, ast.Attribute) and parent.attr in ("to", "cuda")
            fills = isinstance(parent, ast.Attribute) and parent.attr in FILLS
            statement = self.find_place(node)
            if statement and statement not in trained and self.changes_trained(statement):
                fills = True
            if not (isinstance(node.ctx, ast.Store) or moves or fills):
                continue
            if statement in trained:  # what the training returns
                continue
            if statement is None and not fills:
                raise UnknownShape(f"{self.script.at(node)} makes the model in the loop")
            if statement is None or any(
                text.function_of(each) is text.function_of(statement)
                and statement.lineno > (each.end_lineno or 0)
                for each in trained
            ):  # loaded in the loop, or when the training is over
                continue
            if last and text.function_of(statement) is not text.function_of(last):
                if fills:
                    continue
                raise UnknownShape(f"{self.script.at(node)} makes or moves the model again")
            last = statement if last is None or statement.lineno > last.lineno else last
        return last

    def wrap(self, key: Key, sample: ast.expr) -> Edit:
        """The statement that wraps the model: behind the last that makes it, moves it, or says what
        of it is trained; before the training if it is a parameter."""
        text = self.text
        last = self.find_last(key)
        line = self.line_of(sample)
        function = text.function_of(sample)
        if last is None and function and is_parameter(function, key[1]):
            whole = self.training.epochs or self.training.batches
            assert whole
            start = text.outermost_statement(whole)
            return add_before(start.lineno, self.script.indent_of(start), line)
        if last is None:
            raise UnknownShape(f"where {ast.unparse(sample)} is made is not seen")
        return add_after(last, self.script.indent_of(last), line)
