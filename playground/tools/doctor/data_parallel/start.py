"""The parts with which a process becomes a rank: a process group, and a device. Does not import
torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

from playground.tools.doctor.data_parallel.edits import Edit, add_after, add_before, replace_node
from playground.tools.doctor.data_parallel.parts import Part, Status
from playground.tools.doctor.data_parallel.script import LOGGERS, OF_DDP, TrainingScript
from playground.world.backends.nccl import OWN_GPU, OWN_GPU_FIRST

OF_SAMPLER = "torch.utils.data.DistributedSampler"
CUDA = re.compile(r"""^f?['"]cuda:(\{|['"] \+)""")
"""The text of an expression that makes the name of a GPU."""
NUMBER = re.compile(r"^\d+$|gpu|device_id", re.IGNORECASE)
"""The text of the number of a GPU."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
ONE_GPU = 'all ranks would use the first GPU: "cuda" has to be the rank\'s own'
CONVERSIONS = {"int", "str", "format", "get", "getenv", "max", "min"}
"""Functions whose result says what their argument says."""
NO_CHOICES = {
    *("print", "seed", "manual_seed", "manual_seed_all", "seed_everything", "set_seed"),
    *("set_description", "device_ids", "output_device", "disable", "position"),
}
"""Functions, and names of arguments, that get a rank and choose no GPU."""


def find_start(script: TrainingScript, parts: Collection[Part]) -> Part:
    """The process group, and the imports that the changes need. `parts`: the others."""
    text, name, imports = script.text, "start", script.imports
    added = list_imports(script, parts)
    edits = [add_after(imports[-1], "", *added)] if imports and added else []
    if script.has_start:
        call = text.find_calls("init_process_group")[0]
        return Part(name, Status.THERE, f"{script.at(call)} forms the process group", edits)
    if not imports:
        return Part(
            name,
            Status.UNKNOWN,
            f"{script.name} has no import at its top level: call "
            "torch.distributed.init_process_group() before anything else",
        )
    saw = "no process group is formed: without it, no process knows its rank"
    return Part(name, Status.MISSING, saw, [*edits, *form_group(script, imports[-1])])


def list_imports(script: TrainingScript, parts: Collection[Part]) -> list[str]:
    """The imports that the process group and the changes of these parts need, but for those that
    the script has."""
    changed = {part.name for part in parts if part.edits}
    lines = [edit.text for part in parts for edit in part.edits]
    needed = {f"import torch.distributed as {script.dist}": "torch.distributed"}
    for module in ("torch", "os", "contextlib"):
        if any(re.search(rf"\b{module}\.", line) for line in lines):
            needed = {f"import {module}": module} | needed
    if "model" in changed:
        needed[f"from torch.nn.parallel import {script.wrapper}"] = OF_DDP
    if any("DistributedSampler(" in line for line in lines):
        needed["from torch.utils.data import DistributedSampler"] = OF_SAMPLER
    known = {*script.text.find_imports(at_top=True)}
    return [line for line, what in needed.items() if (line.rpartition(" ")[2], what) not in known]


def form_group(script: TrainingScript, last_import: ast.stmt) -> Iterator[Edit]:
    """The lines that form the process group, and destroy it in the end."""
    first = (
        f"{script.dist}.init_process_group()",
        f"{script.rank} = {script.dist}.get_rank()",
    )
    end = f"{script.dist}.destroy_process_group()"
    guard = script.text.guard
    if guard and not script.starts_at_top:
        body, indent = guard.body, script.indent_of(guard.body[0])
        yield add_before(body[0].lineno, indent, *first)
    else:
        body, indent = script.text.tree.body, ""
        yield add_after(last_import, "", "", *first)
    if not is_exit(body[-1]):
        yield add_after(body[-1], indent, end)


def find_device(script: TrainingScript) -> Part:
    """The GPU of each rank: "cuda" has to be its own."""
    name, text = "device", script.text
    numbered = None if script.names_gpu else find_numbered(script)
    if not (script.names_gpu or numbered):
        saw = "the text names no GPU: on CPUs nothing is missing"
        return Part(name, Status.NOT_NEEDED, saw)
    chosen = text.find_calls("set_device", "set_device_index")
    if found := [each for each in chosen if is_own(script, each)]:
        return Part(name, Status.THERE, f"{script.at(found[0])} chooses the rank's GPU")
    if reads_local_rank(script):
        return Part(name, Status.THERE, "LOCAL_RANK is read")
    if used := find_own_device(script):
        return Part(name, Status.THERE, f"{script.at(used)} names the rank's GPU")
    if numbered:
        saw = f"{script.at(numbered)} moves to a GPU by its number, the same one on all ranks"
        rule = 'let that number be int(os.environ["LOCAL_RANK"])'
        return Part(name, Status.UNKNOWN, f"{saw}: {rule}")
    lines = (
        "if torch.cuda.is_available():",
        f'    {OWN_GPU}  # "cuda" is this GPU',
    )
    if text.imports.get("torch", "torch") != "torch" or script.has_start:
        return Part(name, Status.UNKNOWN, f"{ONE_GPU}. Call {OWN_GPU_FIRST}")
    guard = text.guard
    if guard and not script.starts_at_top:
        edits = [add_before(guard.body[0].lineno, script.indent_of(guard.body[0]), *lines)]
    else:
        imports = script.imports
        edits = [add_after(imports[-1], "", *lines)] if imports else []
    edits += (replace_node(node, words) for node, words in find_shared(script))
    hidden = [*find_hidden(script)]
    for each in hidden:
        if text.parents[each] is text.tree and script.stands_alone(each):
            edits.append(Edit((each.lineno, 0), ((each.end_lineno or 0) + 1, 0), ""))
    notes = [
        f"{script.at(each)} leaves one GPU to all ranks: take that line away" for each in hidden
    ]
    return Part(name, Status.MISSING, ONE_GPU, edits, notes)


def is_own(script: TrainingScript, call: ast.Call) -> bool:
    """Whether the arguments of a call depend on the rank."""
    given = [*call.args, *(each.value for each in call.keywords)]
    sources = [one for each in given for one in script.list_sources(each)]
    return any(script.is_rank(each) or "RANK" in ast.unparse(each) for each in sources)


def find_shared(script: TrainingScript) -> Iterator[tuple[ast.expr, str]]:
    """What names one GPU, the same on all ranks, by a number or by a name, and what is to stand in
    its place."""
    text = script.text
    for node in ast.walk(text.tree):
        is_text = isinstance(node, ast.Constant) and re.fullmatch(r"cuda:\d+", str(node.value))
        is_made = isinstance(node, (ast.JoinedStr, ast.BinOp)) and CUDA.match(ast.unparse(node))
        if not isinstance(node, ast.expr):
            continue
        if is_text or (is_made and not any(map(script.is_rank, ast.walk(node)))):
            yield node, '"cuda"'
        elif isinstance(node, ast.Call) and not is_own(script, node):
            name = text.called(node)
            of_torch = text.dotted(node.func).startswith("torch.")
            if name in ("set_device", "set_device_index"):
                yield node.args[0], 'int(os.environ["LOCAL_RANK"])'
            elif name == "device" and of_torch and len(node.args) == 2:
                yield node, f"{text.code(node.func)}({text.code(node.args[0])})"
            elif name == "cuda" and node.args and NUMBER.search(ast.unparse(node.args[0])):
                yield node, f"{text.code(node.func)}()"


def find_hidden(script: TrainingScript) -> Iterator[ast.stmt]:
    """The statements that hide GPUs from the process."""
    for node in ast.walk(script.text.tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            words = ast.unparse(node.targets[0])
            if words.startswith("os.environ[") and VISIBLE in words:
                yield node


def uses_gpu(script: TrainingScript) -> bool:
    """Whether the text puts something on "cuda", and does not only compare with that."""
    text = script.text
    return any(call.args == [] for call in text.find_calls("cuda")) or any(
        isinstance(node, ast.Constant)
        and str(node.value).startswith("cuda")
        and not isinstance(text.parents.get(node), ast.Compare)
        for node in ast.walk(text.tree)
    )


def reads_local_rank(script: TrainingScript) -> bool:
    """Whether the environment's LOCAL_RANK is read, and what is read may choose a GPU."""
    return any(may_choose_gpu(script, node, set()) for node in find_local_rank(script))


def find_local_rank(script: TrainingScript) -> Iterator[ast.Constant]:
    """Where the environment's LOCAL_RANK is named."""
    for node in ast.walk(script.text.tree):
        if isinstance(node, ast.Constant) and "LOCAL_RANK" in str(node.value):
            yield node


def may_choose_gpu(script: TrainingScript, node: ast.expr, followed: set[str]) -> bool:
    """Whether the value of an expression may reach what chooses a GPU: not if it is compared,
    printed, a seed, or given to DistributedDataParallel alone, which moves no model. `followed`:
    the names whose uses have been looked at."""
    text = script.text
    inner: ast.AST = node
    for each in text.climb(node):
        if isinstance(each, ast.Compare) or (
            isinstance(each, ast.UnaryOp) and isinstance(each.op, ast.Not)
        ):
            return False
        if isinstance(each, ast.Subscript) and each.slice is inner and inner is not node:
            return True
        if isinstance(each, ast.keyword) and each.arg in NO_CHOICES:
            return False
        if isinstance(each, ast.Call) and each.func is not inner:
            name, dotted = text.called(each), text.dotted(each.func)
            if name in NO_CHOICES or LOGGERS.search(dotted):
                return False
            if name not in CONVERSIONS:
                return True
        if isinstance(each, ast.stmt):
            return reaches(script, each, followed)
        inner = each
    return False


def find_numbered(script: TrainingScript) -> ast.Call | None:
    """Where something is moved to a GPU that only its name tells: .to(gpu_id)."""
    moves = (call for call in script.text.find_calls("to") if call.args)
    found = (call for call in moves if re.search("gpu", ast.unparse(call.args[0]), re.IGNORECASE))
    return next(found, None)


def reaches(script: TrainingScript, statement: ast.stmt, followed: set[str]) -> bool:
    """Whether a value that a statement takes from an expression may choose a GPU later."""
    if not isinstance(statement, ast.Assign):
        return not isinstance(statement, (ast.Expr, ast.If, ast.While, ast.Assert))
    names = [each.id for each in statement.targets if isinstance(each, ast.Name)]
    if len(names) < len(statement.targets):
        return True
    new = {*names} - followed
    followed |= new
    return any(
        isinstance(each, ast.Name)
        and isinstance(each.ctx, ast.Load)
        and each.id in new
        and may_choose_gpu(script, each, followed)
        for each in ast.walk(script.text.tree)
    )


def find_own_device(script: TrainingScript) -> ast.AST | None:
    """Where a GPU is named by the rank: f"cuda:{rank}", torch.device("cuda", rank), .to(rank),
    rank % torch.cuda.device_count()."""
    for node in ast.walk(script.text.tree):
        is_device = (isinstance(node, ast.JoinedStr) and may_choose_gpu(script, node, set())) or (
            isinstance(node, ast.Call) and script.text.called(node) in ("device", "to", "cuda")
        )
        is_share = isinstance(node, ast.BinOp) and "device_count" in ast.unparse(node.right)
        if (is_device or is_share) and any(map(script.is_rank, ast.walk(node))):
            return node
    return None


def is_exit(statement: ast.stmt) -> bool:
    """Whether a process leaves by this statement."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and (ast.unparse(statement.value.func) in ("sys.exit", "exit", "quit", "os._exit"))
    )
