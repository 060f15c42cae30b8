"""The part of resuming: all ranks read what rank 0 has written. Does not import torch."""

from __future__ import annotations

from playground.tools.doctor.data_parallel.edits import Edit, add_before
from playground.tools.doctor.data_parallel.parts import Part, Status
from playground.tools.doctor.data_parallel.script import TrainingScript
from playground.tools.doctor.data_parallel.text import Function


def find_resume(script: TrainingScript) -> Part:
    name, text = "resume", script.text
    loads = [each for each in text.find_calls("load") if text.dotted(each.func) == "torch.load"]
    saves = [each for each in text.find_calls("save") if text.dotted(each.func) == "torch.save"]
    if not loads:
        saw = "no torch.load is seen: each rank begins anew" if saves else "no checkpoint is saved"
        return Part(name, Status.NOT_NEEDED, saw)
    if not (saves or script.names_gpu or text.find_calls("load_state_dict")):
        saw = f"what {script.at(loads[0])} reads is saved by no rank"
        return Part(name, Status.NOT_NEEDED, saw)
    edits = list[Edit]()
    for each in loads:
        statement = text.outermost_statement(each)
        path = script.training.path if saves and script.training else []
        before = [*saves, *(one for one in path if not isinstance(one, Function))]
        is_after = any(
            getattr(one, "end_lineno", each.lineno) < each.lineno
            and text.function_of(one) is text.function_of(each)
            for one in before
        )
        has_barrier = any(call.lineno < each.lineno for call in text.find_calls("barrier"))
        if is_after and not has_barrier:
            wait = f"{script.dist}.barrier()  # until rank 0 has written the file"
            edits.append(add_before(statement.lineno, script.indent_of(statement), wait))
        if not any(one.arg == "map_location" for one in each.keywords) and len(each.args) < 2:
            edits.append(script.add_argument(each, 'map_location="cpu"'))
    if not edits:
        saw = f"{script.at(loads[0])} reads the file on all ranks"
        return Part(name, Status.THERE, saw)
    saw = f"{script.at(loads[0])}: all ranks read what rank 0 has written, to their own devices"
    return Part(name, Status.MISSING, saw, edits)
