"""A script whose parts are looked for: what several of them ask. Does not import torch."""

from __future__ import annotations

import ast
import math
import re
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import StringIO

from playground.tools.doctor.data_parallel.edits import Edit
from playground.tools.doctor.data_parallel.text import (
    Function,
    Loop,
    TrainingText,
    find_method,
    find_results,
    walk_own,
)
from playground.tools.doctor.data_parallel.trainings import Training, find_trainings, follow, take

FIRST = re.compile(r"rank|(main|master)_process|is_(main|master)", re.IGNORECASE)
"""In a condition: only one rank does it."""
LOGS = {
    *("print", "add_scalar", "add_scalars", "add_image", "add_images", "add_histogram", "add_text"),
    *("add_figure", "add_graph", "add_hparams", "add_video", "add_pr_curve"),
}
WRITES_OUT = {"sys.stdout.write", "sys.stderr.write", "tqdm.tqdm.write", "tqdm.auto.tqdm.write"}
"""Functions that print, besides those named `LOGS`."""
SAVES = {
    *("save", "savefig", "save_image", "save_pretrained", "savetxt", "savez"),
    *("imsave", "write_jpeg", "write_png", "export"),
}
SAVERS = "torch.", "torchvision.", "matplotlib.", "numpy."
"""Packages whose functions of these names save."""
WRITES = {"savefig", "save_pretrained", "to_csv", "write_bytes", "write_text"}
"""Methods that write a file which they open themselves."""
MODE = re.compile(r"[wax]b?t?\+?")
"""The mode of a file that is opened to write."""
MOVES_FILES = {
    *(f"shutil.{name}" for name in ("copy", "copy2", "copyfile", "move")),
    *(f"os.{name}" for name in ("link", "remove", "rename", "replace", "symlink", "unlink")),
}
NOT_DATA = {"cuda", "device", "manual_seed", "print", "to"}
"""Calls that get a rank, and divide no data by it."""
LOGGERS = re.compile(
    r"(wandb|mlflow)\.[\w.]+$|log(ging|ger)?\.(log\w*|debug|info|warn|warning|error|critical|exception)$",
    re.IGNORECASE,
)
"""Calls that log: `logging.basicConfig` and `log.setLevel` print nothing."""
PER_BATCH = {"forward", "__getitem__", "__call__"}
"""Methods that are called for each batch, or sample."""
STRINGS = {"STRING", "FSTRING_MIDDLE", "TSTRING_MIDDLE"}
"""Names of tokens, of which those of f-strings are known since Python 3.12."""
OF_DDP = "torch.nn.parallel.DistributedDataParallel"


def is_of_rank(test: ast.If) -> bool:
    """Whether it is a condition on the rank."""
    return bool(FIRST.search(ast.unparse(test.test)))


@dataclass
class TrainingScript:
    """The text of a script, and what is known of its training."""

    text: TrainingText
    name: str
    """The name of its file."""
    collective: set[int] = field(default_factory=set)
    """The ids of its functions in which all ranks meet when the changes are made."""
    chosen: Training | None = None
    """The training that is asked for, if the script has several."""

    @cached_property
    def trainings(self) -> list[Training]:
        return find_trainings(self.text)

    @cached_property
    def training(self) -> Training | None:
        """The training that is asked for: the only one, if none is."""
        return self.chosen or (self.trainings[0] if len(self.trainings) == 1 else None)

    def choose(self) -> list[TrainingScript]:
        """The same script, for each of its trainings: itself, if it has only one."""
        if len(self.trainings) <= 1 or not all(each.batches for each in self.trainings):
            return [self]
        return [replace(self, chosen=each) for each in self.trainings]

    @cached_property
    def loop(self) -> ast.For | None:
        """The loop over its batches."""
        found = self.training and self.training.batches
        return found if isinstance(found, ast.For) else None

    @cached_property
    def has_start(self) -> bool:
        return bool(self.text.find_calls("init_process_group"))

    @cached_property
    def dist(self) -> str:
        """The name of torch.distributed."""
        known = (name for name, what in self.text.imports.items() if what == "torch.distributed")
        return next(known, "") or self.text.fresh("dist")

    @cached_property
    def rank(self) -> str:
        """An expression for the rank."""
        return f"{self.dist}.get_rank()" if self.has_start else self.text.fresh("rank")

    @cached_property
    def size(self) -> str:
        return f"{self.dist}.get_world_size()"

    @cached_property
    def wrapper(self) -> str:
        """The name of DistributedDataParallel, which `start` imports if the script does not."""
        known = (name for name, what in self.text.imports.items() if what == OF_DDP)
        return next(known, "DistributedDataParallel")

    @cached_property
    def starts_at_top(self) -> bool:
        """Whether the process group is to be formed behind the imports, as what needs it stands in
        the module itself; otherwise it is under `if __name__ == "__main__"`."""
        guard = self.text.guard
        if guard is None:
            return True
        return any(self.comes_before({0: guard.lineno}, each) for each in self.needs)

    @cached_property
    def needs(self) -> list[ast.Call]:
        """The calls that need the process group."""
        steps = [call for call in self.text.calls if self.is_of_optim(call)]
        loaders = [one for each in self.choose() for one in each.loaders]
        return [*steps, *loaders, *(each.backward for each in self.trainings)]

    def is_of_optim(self, call: ast.Call) -> bool:
        """Whether it calls what torch.optim has, by name or by `getattr(torch.optim, name)`."""
        func = call.func
        if isinstance(func, ast.Call) and self.text.called(func) == "getattr" and func.args:
            return self.text.dotted(func.args[0]) == "torch.optim"
        return ".optim." in f".{self.text.dotted(func)}"

    @cached_property
    def imports(self) -> list[ast.Import | ast.ImportFrom]:
        """The imports of the module itself, up to the first call that needs the process group."""
        first = min(
            (each.lineno for each in self.needs if self.text.function_of(each) is None),
            default=math.inf,
        )
        return [each for each in self.text.top_imports if each.lineno < first]

    @cached_property
    def start_lines(self) -> dict[int, int]:
        """The line on which the process group is formed, and those on which the functions around
        that line are called, each by the id of its function: 0 for the module."""
        text, found = self.text, dict[int, int]()
        if not self.has_start:
            imports = self.imports
            guard = None if self.starts_at_top else text.guard
            return {0: guard.lineno if guard else imports[-1].lineno if imports else 0}
        left = text.find_calls("init_process_group")[:1]
        for call in left:
            function = text.function_of(call)
            found[id(function) if function else 0] = call.lineno
            sites = [each for each in text.calls if function and text.resolve(each) is function]
            left += [each for each in sites if id(text.function_of(each)) not in found][:1]
        return found

    def comes_before(
        self, lines: Mapping[int, int], node: ast.AST, known: tuple[int, ...] = ()
    ) -> bool:
        """Whether it runs before these lines, each by the id of its function."""
        function = self.text.function_of(node)
        key = id(function) if function else 0
        if key in lines or function is None:
            return bool(getattr(node, "lineno", 0) < lines.get(key, math.inf))
        sites = [call for call in self.text.calls if self.text.resolve(call) is function]
        return key not in known and any(
            self.comes_before(lines, each, (*known, key)) for each in sites
        )

    def rank_at(self, node: ast.AST) -> str:
        """An expression for the rank where this node is, be the process group formed or not."""
        is_early = self.comes_before(self.start_lines, node)
        return 'int(os.environ.get("RANK", 0))' if is_early else self.rank

    def is_for_first(self, node: ast.AST) -> bool:
        """Whether it is under a condition on the rank."""
        return any(isinstance(each, ast.If) and is_of_rank(each) for each in self.text.climb(node))

    def find_division(self, expression: ast.AST) -> ast.AST | None:
        """What gives each rank a part of the data that an expression is, by its rank: an index, or
        an argument of a call. None if that is not seen."""
        text = self.text
        values: dict[str, list[ast.AST]] = {}
        for node in ast.walk(text.tree):
            if isinstance(node, ast.Assign):
                for target in (each for one in node.targets for each in ast.walk(one)):
                    if isinstance(target, ast.Name):
                        values.setdefault(target.id, []).append(node.value)
        left, seen = [expression], set[int]()
        for made in left:
            for node in ast.walk(made) if id(made) not in seen else ():
                if self.is_rank(node) and self.is_share(node, made):
                    return made
                if isinstance(node, ast.Name):
                    left += values.get(node.id, [])
                elif isinstance(node, ast.Call) and (function := text.resolve(node)):
                    left += find_results(function)
            seen.add(id(made))
        return None

    def is_rank(self, node: ast.AST) -> bool:
        return self.is_number(node, "rank")

    def is_size(self, node: ast.AST) -> bool:
        """Whether it is the number of ranks."""
        return self.is_number(node, "world_size")

    def is_number(self, node: ast.AST, word: str) -> bool:
        """Whether it is what torch's `get_{word}` returns, or is named so."""
        name = getattr(node, "attr", getattr(node, "id", ""))
        if word in name.lower() and isinstance(node, (ast.Name, ast.Attribute)):
            return True
        makers = self.text.makers(node) if isinstance(node, (ast.Name, ast.Call)) else ()
        return any(self.text.called(each) == f"get_{word}" for each in makers)

    def is_share(self, rank: ast.AST, made: ast.AST) -> bool:
        """Whether an expression, `made`, indexes by a rank in it, or hands the rank to a call."""
        inner = rank
        for each in self.text.climb(rank):
            if isinstance(each, ast.Compare):
                return False
            if isinstance(each, ast.Subscript) and each.slice is inner:
                return True
            if isinstance(each, ast.Call) and each.func is not inner:
                return self.text.called(each) not in NOT_DATA
            if inner is made:
                return False
            inner = each
        return False

    @cached_property
    def walked(self) -> list[list[ast.expr]]:
        """What the training takes its batches from, each followed to what it is: what its loop
        walks, or the argument of `next` in it."""
        if not (self.loop and self.training):
            return []
        taken = [
            call.args[0]
            for call in ast.walk(self.loop)
            if isinstance(call, ast.Call) and self.text.dotted(call.func) == "next" and call.args
            if not self.text.is_without_gradients(call)
        ]
        found, left = list[list[ast.expr]](), [self.loop.iter, *taken]
        for each in left:
            way = [*follow(self.text, each, self.training.values)]
            zipped = (one.args for one in way if self.is_zip(one) and isinstance(one, ast.Call))
            if several := next(zipped, None):
                left += several
            else:
                found.append(way)
        return found

    def is_zip(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and self.text.called(node) == "zip"

    @cached_property
    def loader_wrappers(self) -> list[ast.ClassDef]:
        """The script's own classes whose objects the training walks."""
        made = self.text.makers(self.loop.iter) if self.loop else set()
        found = (self.text.classes.get(self.text.called(call)) for call in made)
        return [each for each in found if each and find_method(each, "__iter__")]

    @cached_property
    def loaders(self) -> list[ast.Call]:
        """The calls that made what the training walks, or what its own class hands on: of the
        first that has some, where it walks several things at once."""
        held = (node for each in self.loader_wrappers for node in ast.walk(each))
        inner = [
            call
            for each in held
            if isinstance(each, ast.Attribute)
            for call in self.text.makers(each)
        ]
        made = next((found for way in self.walked if (found := self.find_loaders(way))), [])
        return [*dict.fromkeys(made + [each for each in inner if self.is_loader(each)])]

    @cached_property
    def more_loaders(self) -> list[ast.Call]:
        """The calls that made what else it walks in the same round, each by one call."""
        found = [made for way in self.walked if len(made := self.find_loaders(way)) == 1]
        return [*dict.fromkeys(one for made in found for one in made if one not in self.loaders)]

    def find_loaders(self, way: Sequence[ast.expr]) -> list[ast.Call]:
        """The calls that made an expression, followed to what it is."""
        last = way[-1]
        made = {last} if isinstance(last, ast.Call) else self.text.makers(last)
        found = {one for each in made for one in self.text.makers(each)}
        return sorted(filter(self.is_loader, found), key=lambda call: call.lineno)

    def is_loader(self, call: ast.Call) -> bool:
        return self.text.called(call) == "DataLoader"

    def case_of(self, loader: ast.Call) -> str:
        """The condition under which a call that makes several loaders makes that of the training:
        of a dictionary, or in the script's own function; empty if there is none."""
        text = self.text
        function = text.function_of(loader)
        values = self.training.values if self.training else {}
        around = next((each for each in text.climb(loader) if isinstance(each, ast.DictComp)), None)
        for each in (one for way in self.walked for one in way):
            if around and isinstance(each, ast.Subscript):
                key = take(text, each.slice, values)
                is_it = take(text, each.value, values) is around
                if is_it and isinstance(key, ast.Constant) and isinstance(around.key, ast.Name):
                    return f"{around.key.id} == {text.code(key)}"
            if function and isinstance(each, ast.Call) and text.resolve(each) is function:
                return text.tell_site(each)
        return ""

    @cached_property
    def walks_several(self) -> bool:
        """Whether the loop over batches is that of several loaders, one after the other, of which
        the training's is not seen."""
        return len(self.loaders) > 1 or (
            self.loop is not None
            and not self.loaders
            and isinstance(self.loop.iter, ast.Subscript)
            and bool(self.text.find_calls("DataLoader"))
        )

    @cached_property
    def called_in_step(self) -> list[ast.AST]:
        """The script's own functions that run for each batch, or sample: `forward`, `__getitem__`,
        those that are called in the loop over batches, and those that these call."""
        functions = [each for each in ast.walk(self.text.tree) if isinstance(each, Function)]
        loops = [each.batches for each in self.trainings if each.batches]
        own = (each for each in functions if each.name in PER_BATCH)
        return self.text.reach(*loops, *own)[len(loops) :]

    def is_distributed_sampler(self, call: ast.Call) -> bool:
        """Whether it makes a DistributedSampler, or one of the script's own class of that kind."""
        name = self.text.called(call)
        owner = self.text.classes.get(name)
        bases = [ast.unparse(each) for each in owner.bases] if owner else [name]
        return any(each.endswith("DistributedSampler") for each in bases)

    @cached_property
    def lost_sampler(self) -> ast.Call | None:
        """A DistributedSampler of which is not seen whether the training has it; None if there is
        none."""
        found = [call for call in self.text.calls if self.is_distributed_sampler(call)]
        given = {
            made
            for call in self.text.find_calls("DataLoader")
            for each in call.keywords
            if each.arg == "sampler"
            for made in self.text.makers(each.value)
        }
        return next((each for each in found if each not in given or not self.loaders), None)

    def indent_of(self, node: ast.stmt) -> str:
        line = self.text.lines[node.lineno - 1]
        return line[: len(line) - len(line.lstrip())]

    def stands_alone(self, statement: ast.stmt) -> bool:
        """Whether no other statement is on its lines."""
        end = self.text.lines[(statement.end_lineno or 0) - 1].encode()[statement.end_col_offset :]
        is_last = not end.strip() or end.strip().startswith(b"#")
        return is_last and len(self.indent_of(statement).encode()) == statement.col_offset

    def has_long_string(self, statement: ast.stmt) -> bool:
        """Whether a string in it goes on in another line: an indent there would be a part of it."""
        lines = self.text.lines[statement.lineno - 1 : statement.end_lineno]
        found = tokenize.generate_tokens(StringIO("\n".join([*lines, ""])).readline)
        tokens = (each for each in found if tokenize.tok_name[each.type] in STRINGS)
        return any(each.start[0] != each.end[0] for each in tokens)

    def at(self, node: ast.AST) -> str:
        return f"{self.name}:{getattr(node, 'lineno', 0)}"

    @cached_property
    def names_gpu(self) -> bool:
        """Whether the code names a GPU by its kind."""
        return any(
            (isinstance(node, ast.Constant) and str(node.value).startswith("cuda"))
            or (isinstance(node, ast.Attribute) and node.attr in ("cuda", "accelerator"))
            for node in ast.walk(self.text.tree)
        )

    @cached_property
    def summed_loss(self) -> ast.Call | None:
        """The call whose loss is the sum over samples, not their mean; None if there is none."""
        for call in self.text.calls:
            parent = self.text.parents[call]
            is_mean = isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Div)
            is_shown = isinstance(parent, ast.Attribute)
            is_sum = any(
                each.arg == "reduction" and ast.unparse(each.value) == "'sum'"
                for each in call.keywords
            )
            if is_sum and not (is_mean or is_shown or self.text.is_without_gradients(call)):
                return None if self.is_divided(call) else call
        return None

    def is_divided(self, summed: ast.Call) -> bool:
        """Whether a sum over samples is divided on its way to `backward`."""
        loss = self.training.loss if self.training else None
        if loss is None:
            return False
        way = self.list_sources(loss)
        names = {ast.unparse(each) for each in way if isinstance(each, ast.Name)}
        divided = [
            each.left
            for each in way
            if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Div)
        ]
        divided += [
            node.target
            for node in ast.walk(self.text.tree)
            if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div)
            if ast.unparse(node.target) in names
        ]
        return any(self.comes_from(each, summed) for each in divided)

    def comes_from(self, expression: ast.expr, made: ast.Call) -> bool:
        """Whether a value comes from a call, or from a call of what that has made."""
        return any(
            each is made or (isinstance(each, ast.Call) and made in self.text.makers(each.func))
            for each in self.list_sources(expression)
        )

    def list_sources(self, expression: ast.expr) -> list[ast.expr]:
        """An expression, its parts, and those of what its names are set to, and of what the
        script's own functions in it return."""
        found, left = dict[ast.expr, None](), [expression]
        for each in left:
            for node in ast.walk(each):
                if not isinstance(node, ast.expr) or node in found:
                    continue
                found[node] = None
                if key := self.text.key_of(node):
                    left += filter(None, self.text.settings.get(key, []))
                elif isinstance(node, ast.Call) and (function := self.text.resolve(node)):
                    left += find_results(function)
        return [*found]

    def add_argument(self, call: ast.Call, words: str) -> Edit:
        """One more argument, behind the last."""
        given = [*call.args, *(one.value for one in call.keywords)]
        if not given:
            end = call.end_lineno or 0, (call.end_col_offset or 0) - 1
            return Edit(end, end, words)
        last = max((each.end_lineno or 0, each.end_col_offset or 0) for each in given)
        return Edit(last, last, f", {words}")

    def is_log(self, node: ast.stmt) -> bool:
        """Whether the statement is nothing but a call that prints, logs or saves."""
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            return False
        name, dotted = self.text.called(node.value), self.text.dotted(node.value.func)
        return (
            (name in LOGS and self.text.resolve(node.value) is None)
            or dotted in WRITES_OUT
            or dotted in MOVES_FILES
            or name in WRITES
            or (name in SAVES and dotted.startswith(SAVERS))
            or bool(LOGGERS.search(dotted))
        )

    def find_written(self, call: ast.Call) -> ast.expr | None:
        """The name of the file that a call opens to write: of `open`, its method of a path, or a
        handler of logging. None for other calls."""
        dotted, given = (
            self.text.dotted(call.func),
            {each.arg: each.value for each in call.keywords},
        )
        if dotted.startswith("logging.") and dotted.endswith(("FileHandler", ".basicConfig")):
            first = call.args[:1] if dotted.endswith("Handler") else []
            return next(iter(first), given.get("filename"))
        is_path = isinstance(call.func, ast.Attribute) and call.func.attr == "open"
        given_mode = call.args[:1] if is_path else call.args[1:2]
        mode = next(iter(given_mode), given.get("mode"))
        if not (isinstance(mode, ast.Constant) and MODE.fullmatch(str(mode.value))):
            return None
        if isinstance(call.func, ast.Attribute) and is_path:
            return call.func.value
        return next(iter(call.args), None) if dotted == "open" else None

    def has_attribute_after(self, words: str, loop: Loop) -> bool:
        """Whether an attribute of an expression is taken after the loop, in its function:
        `total.item()`."""
        return any(
            isinstance(node, ast.Attribute)
            and node.lineno > (loop.end_lineno or 0)
            and ast.unparse(node.value) == words
            and self.text.function_of(node) is self.text.function_of(loop)
            for node in ast.walk(self.text.tree)
        )

    def is_used_after(self, words: str, loop: ast.For) -> bool:
        """Whether an expression is read after the loop, in its function."""
        text = self.text
        function = text.function_of(loop)
        body = walk_own(function) if function else ast.walk(text.tree)
        return any(
            isinstance(node, (ast.Name, ast.Attribute))
            and isinstance(node.ctx, ast.Load)
            and node.lineno > (loop.end_lineno or 0)
            and text.function_of(node) is function
            and ast.unparse(node) == words
            for node in body
        )
