"""What the text of a training shows, without running it: where a name leads, what a loop takes its
batches from, which model it calls. Does not import torch.

A name leads to the calls that made its value: through assignments, arguments of the script's own
functions and classes, results, attributes of `self`, and calls that return what they are given. A
value from elsewhere leads nowhere, and nothing is said of it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from typing import TypeGuard

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.While
Key = tuple[int, str]
"""A name: the id of its function or, for an attribute of `self`, of its class, or 0 for the module;
and its text."""
SAME = {
    "to",
    "cuda",
    "cpu",
    "float",
    "double",
    "half",
    "bfloat16",
    "train",
    "eval",
    "requires_grad_",
    "share_memory",
    "apply",
}
"""Methods of a module that return it."""
WALKS = {
    *("enumerate", "tqdm", "trange", "iter", "next", "track", "zip", "islice", "cycle"),
    *("compile", "DataParallel"),
}
"""Functions whose result walks, or calls, their first argument."""
NO_GRAD = {"no_grad", "inference_mode"}


class TrainingText:
    """The text of a script. Raises `SyntaxError`."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines = source.splitlines()
        self.tree = ast.parse(source)
        self.parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }
        self.imports = dict(self.find_imports())
        self.top_imports = [
            node for node in self.tree.body if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        self.functions = {node.name: node for node in self.tree.body if isinstance(node, Function)}
        self.classes = {
            node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)
        }
        self.under_way = set[int]()
        """The functions whose results are being followed, by their ids."""
        self.calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        self.bound: dict[int, set[str]] = {}
        """The names that a function binds, by its id."""
        self.made: dict[Key, set[ast.Call]] = {}
        """What made the value of a name."""
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                self.bound[id(node)] = find_bound(node)
        self.follow()

    def find_imports(self, at_top: bool = False) -> Iterator[tuple[str, str]]:
        """The names of imports, and what each stands for. `at_top`: those of the module itself."""
        for node in ast.walk(self.tree):
            if at_top and self.function_of(node):
                continue
            if isinstance(node, ast.Import):
                for one in node.names:
                    whole = one.name if one.asname else one.name.partition(".")[0]
                    yield one.asname or whole, whole
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for one in node.names:
                    yield one.asname or one.name, f"{node.module}.{one.name}"

    def dotted(self, node: ast.AST) -> str:
        """What a name with dots stands for, by the imports: "torch.nn.Linear"; empty for others."""
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, node.id)
        if isinstance(node, ast.Attribute) and (before := self.dotted(node.value)):
            return f"{before}.{node.attr}"
        return ""

    def called(self, call: ast.Call) -> str:
        """The last name of what is called: "save" of torch.save."""
        if isinstance(call.func, ast.Attribute):
            return call.func.attr
        return self.dotted(call.func).rpartition(".")[2]

    def find_calls(self, *names: str) -> list[ast.Call]:
        """The calls of functions, or methods, with one of these last names, by line."""
        found = [call for call in self.calls if self.called(call) in names]
        return sorted(found, key=lambda call: call.lineno)

    def code(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.source, node) or ast.unparse(node)

    def operand(self, node: ast.expr) -> str:
        """The code of an expression, to stand beside an operator."""
        simple = ast.Constant | ast.Name | ast.Attribute | ast.Subscript | ast.Call
        return self.code(node) if isinstance(node, simple) else f"({self.code(node)})"

    def reach(self, *places: ast.AST) -> list[ast.AST]:
        """The script's own functions that are called in these places, and in each other, behind
        the places themselves."""
        found = [*places]
        for place in found:
            calls = (node for node in ast.walk(place) if isinstance(node, ast.Call))
            called = (self.resolve(call) for call in calls)
            found += [each for each in dict.fromkeys(called) if each and each not in found]
        return found

    def climb(self, node: ast.AST) -> Iterator[ast.AST]:
        """Its parents, from the inside on."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function_of(self, node: ast.AST) -> Function | None:
        return next((each for each in self.climb(node) if isinstance(each, Function)), None)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        return next((each for each in self.climb(node) if isinstance(each, ast.ClassDef)), None)

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The innermost statement around it, or itself."""
        if isinstance(node, ast.stmt):
            return node
        return next(each for each in self.climb(node) if isinstance(each, ast.stmt))

    def outermost_statement(self, node: ast.AST) -> ast.stmt:
        """The statement around it that stands directly in its function, in the module, or under
        `if __name__ == "__main__"`."""
        found = self.statement_of(node)
        for each in self.climb(found):
            if isinstance(each, (Function, ast.ClassDef)) or is_guard(each):
                break
            if isinstance(each, ast.stmt):
                found = each
        return found

    def key_of(self, node: ast.AST) -> Key | None:
        """The name that `node` is."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = self.class_of(node)
            return (id(owner), node.attr) if owner and node.value.id == "self" else None
        if not isinstance(node, ast.Name):
            return None
        inside = (each for each in self.climb(node) if isinstance(each, (Function, ast.ClassDef)))
        around = next(inside, None)
        if isinstance(around, ast.ClassDef) and isinstance(node.ctx, ast.Store):
            return id(around), node.id
        function = self.function_of(node)
        while function and node.id not in self.bound[id(function)]:
            function = self.function_of(function)
        return (id(function) if function else 0), node.id

    def makers(self, node: ast.AST | None) -> set[ast.Call]:
        """The calls that made the value of an expression."""
        if isinstance(node, ast.IfExp):
            return self.makers(node.body) | self.makers(node.orelse)
        if not isinstance(node, ast.Call):
            key = node and self.key_of(node)
            return set(self.made.get(key, ())) if key else set()
        if isinstance(node.func, ast.Attribute) and node.func.attr in SAME:
            return self.makers(node.func.value)
        if self.called(node) in WALKS and node.args:
            return self.makers(node.args[0])
        function = self.resolve(node)
        if function is None or function.name == "__init__":
            return {node}
        if id(function) in self.under_way:  # it calls itself
            return set()
        self.under_way.add(id(function))
        found = set[ast.Call]().union(*(self.makers(each) for each in find_results(function)))
        self.under_way.remove(id(function))
        return found

    def resolve(self, call: ast.Call) -> Function | None:
        """The script's own function, method or constructor that is called."""
        if isinstance(call.func, ast.Name):
            if owner := self.classes.get(call.func.id):
                return find_method(owner, "__init__")
            return self.functions.get(call.func.id)
        if not isinstance(call.func, ast.Attribute) or call.func.attr in SAME:
            return None
        receiver, name = call.func.value, call.func.attr
        if isinstance(receiver, ast.Name) and receiver.id == "self":
            return find_method(self.class_of(call), name)
        owners = {self.called(made) for made in self.makers(receiver)}
        return find_method(self.classes.get(owners.pop()), name) if len(owners) == 1 else None

    def bind(self, call: ast.Call) -> Iterator[tuple[ast.arg, ast.expr]]:
        """The parameters of the script's own function, and what the call gives them."""
        if not (function := self.resolve(call)):
            return
        named = [*function.args.posonlyargs, *function.args.args]
        is_method = isinstance(self.parents[function], ast.ClassDef)
        yield from zip(named[is_method:], call.args, strict=False)
        known = {each.arg: each for each in (*named, *function.args.kwonlyargs)}
        for each in call.keywords:
            if each.arg in known:
                yield known[each.arg], each.value

    def follow(self) -> None:
        """Find what made the value of each name."""
        assigns = [
            (target, node.value)
            for node in ast.walk(self.tree)
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        ]
        has_grown = True
        while has_grown:
            before = sum(map(len, self.made.values()))
            for target, value in assigns:
                self.assign(target, value)
            for call in self.calls:
                for parameter, given in self.bind(call):
                    function = self.resolve(call)
                    self.made.setdefault((id(function), parameter.arg), set()).update(
                        self.makers(given)
                    )
            has_grown = before != sum(map(len, self.made.values()))

    def bind_all(self, call: ast.Call) -> dict[Key, ast.expr]:
        """The parameters of the script's own function as a call sets them, defaults included."""
        if not (function := self.resolve(call)):
            return {}
        named = [*function.args.posonlyargs, *function.args.args]
        defaults = [
            *zip(reversed(named), reversed(function.args.defaults), strict=False),
            *zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True),
        ]
        given = {parameter.arg: value for parameter, value in defaults if value}
        given |= {parameter.arg: value for parameter, value in self.bind(call)}
        return {(id(function), name): value for name, value in given.items()}

    def tell_site(self, call: ast.Call) -> str:
        """The condition, on a parameter, by which the script's own function knows this call from
        all others; empty if there is none."""
        others = [
            self.bind_all(each)
            for each in self.calls
            if each is not call and self.resolve(each) is self.resolve(call)
        ]
        own = sorted(self.bind_all(call).items(), key=lambda one: is_number(one[1]))
        for key, given in own:
            if not isinstance(given, ast.Constant) or len(self.settings[key]) != len(others) + 1:
                continue
            values = [each.get(key) for each in others]
            if all(isinstance(each, ast.Constant) and each.value != given.value for each in values):
                if isinstance(given.value, bool):
                    return key[1] if given.value else f"not {key[1]}"
                return f"{key[1]} == {self.code(given)}"
        return ""

    @cached_property
    def settings(self) -> dict[Key, list[ast.expr | None]]:
        """What each name is set to, place by place; None: by other means than an assignment, or a
        call of its function."""
        found: dict[Key, list[ast.expr | None]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Name, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
                if key := self.key_of(node):
                    found.setdefault(key, []).append(self.find_setting(node))
            elif isinstance(node, ast.arg):
                function = self.function_of(node)
                sites = [each for each in self.calls if function and self.resolve(each) is function]
                key = (id(function), node.arg)
                given = [self.bind_all(each).get(key) for each in sites]
                found.setdefault(key, []).extend(given or [None])
        return found

    def find_setting(self, target: ast.expr) -> ast.expr | None:
        """What an assignment sets its target to; None if it is of another statement."""
        around = self.parents[target]
        if isinstance(around, (ast.Assign, ast.AnnAssign)):
            return around.value
        whole = self.parents[around]
        if isinstance(around, ast.Tuple) and isinstance(whole, ast.Assign):
            values = getattr(whole.value, "elts", [])
            is_one_each = around in whole.targets and len(values) == len(around.elts)
            return values[around.elts.index(target)] if is_one_each else None
        return None

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            function = self.resolve(value) if isinstance(value, ast.Call) else None
            for each in find_results(function) if function else [value]:
                if isinstance(each, ast.Tuple) and len(each.elts) == len(target.elts):
                    for one, part in zip(target.elts, each.elts, strict=True):
                        self.assign(one, part)
        elif key := self.key_of(target):
            self.made.setdefault(key, set()).update(self.makers(value))

    def is_without_gradients(self, node: ast.AST) -> bool:
        """Whether it is under `no_grad` or `inference_mode`."""
        for each in self.climb(node):
            marks = [item.context_expr for item in each.items] if isinstance(each, ast.With) else []
            marks += each.decorator_list if isinstance(each, Function) else []
            names = {
                self.called(mark)
                if isinstance(mark, ast.Call)
                else self.dotted(mark).rpartition(".")[2]
                for mark in marks
            }
            if names & NO_GRAD:
                return True
        return False

    def find_set_trained(self, place: ast.AST) -> list[ast.AST]:
        """What sets `requires_grad` in it."""
        return [
            node
            for node in ast.walk(place)
            if (
                isinstance(node, ast.Attribute)
                and node.attr == "requires_grad"
                and isinstance(node.ctx, ast.Store)
            )
            or (isinstance(node, ast.Call) and self.called(node) == "requires_grad_")
        ]

    def is_bound(self, name: str) -> bool:
        """Whether the script uses a name at all."""
        return name in self.imports or any(
            getattr(node, "id", getattr(node, "arg", getattr(node, "name", None))) == name
            for node in ast.walk(self.tree)
        )

    def is_read(self, name: str) -> bool:
        """Whether the script reads a name, or passes it on."""
        return any(
            isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
            for node in ast.walk(self.tree)
        )

    def fresh(self, name: str) -> str:
        """This name, or one like it that the script does not use."""
        while self.is_bound(name):
            name += "_"
        return name

    @property
    def guard(self) -> ast.If | None:
        """`if __name__ == "__main__":`"""
        return next((node for node in self.tree.body if is_guard(node)), None)


def names_in(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def owner_of(call: ast.Call) -> ast.expr | None:
    """What the method is called on; None for a function."""
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def is_number(node: ast.expr) -> bool:
    """Whether it is a number, which may be the same by chance elsewhere."""
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def is_guard(node: ast.AST) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def find_method(owner: ast.ClassDef | None, name: str) -> Function | None:
    bodies = owner.body if owner else []
    return next((each for each in bodies if isinstance(each, Function) and each.name == name), None)


def find_bound(function: Function) -> set[str]:
    """The names that a function binds, its parameters included."""
    arguments = function.args
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    names = {each.arg for each in (*given, arguments.vararg, arguments.kwarg) if each}
    elsewhere = set[str]()
    for node in walk_own(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            elsewhere.update(node.names)
    return names - elsewhere


def walk_own(function: Function) -> Iterator[ast.AST]:
    """Its nodes, without those of functions in it."""
    left: list[ast.AST] = [*function.body]
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, (Function, ast.Lambda)):
            left.extend(ast.iter_child_nodes(node))


def find_results(function: Function) -> list[ast.expr]:
    """What it returns or, of a generator, what it walks to hand it on."""
    returns = (node for node in walk_own(function) if isinstance(node, ast.Return))
    walked = [
        loop.iter
        for loop in walk_own(function)
        if isinstance(loop, ast.For)
        and any(
            isinstance(node, ast.Yield)
            and node.value
            and ast.unparse(node.value) == ast.unparse(loop.target)
            for node in ast.walk(loop)
        )
    ]
    return [*(node.value for node in returns if node.value), *walked]
