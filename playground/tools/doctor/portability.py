"""The checks of a script that has run here: would it also work on nccl, on more ranks, with unequal data?

What the ranks have not called is not seen; where tensors would be on a machine with GPUs, only the text tells.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections import Counter
from collections.abc import Iterator

from playground.runtime.backends import BACKENDS
from playground.runtime.black_box import COLLECTIVE, MAKE_DDP, RECEIVE, SEND, Kind, Operation
from playground.tools.doctor import Finding, error, find_checks, warning
from playground.tools.doctor.script import Run, Script

NOT_IN_NCCL = ("monitored_barrier", "all_gather_coalesced")
"""Operations that torch's nccl backend lacks."""
Message = tuple[int, int, tuple[int, ...]]
"""Sender, receiver, group."""


def list_messages(run: Run) -> Iterator[tuple[int, Message, Operation]]:
    """The known parts of messages whose ends are known, each with the rank that called it."""
    for state in run.states:
        for one in state.operations:
            if one.kind != COLLECTIVE and one.peer is not None:
                ends = (state.rank, one.peer) if one.kind == SEND else (one.peer, state.rank)
                yield state.rank, (*ends, one.group), one


def check_agreement(script: Script) -> Iterator[Finding]:
    for size, found in [(run.size, run.diagnosis) for run in script.runs if run.diagnosis]:
        saw = f"on {size} ranks: {' '.join(found.sentence.split())}"
        yield error(saw, "ranks call operations that match, equally often, in the same order", found.cure)


def check_failure(script: Script) -> Iterator[Finding]:
    first, run = script.runs[0], script.runs[-1]
    if first.failure:
        fix = f"torchrun --nproc-per-node {first.size} {script.path} shows the traceback"
        yield error(first.failure, "a script returns on all ranks", fix)
    elif run.failure:
        saw = f"it works on {first.size} ranks; {run.failure}"
        fix = "derive peers, groups and shards from get_world_size(), not from a constant"
        yield error(saw, "a script works on any number of ranks", fix)


def check_call_counts(script: Script) -> Iterator[Finding]:
    """Ranks of a run that has returned all the same: nobody may have waited for the last calls."""
    for run in (run for run in script.runs if run.has_returned):
        counts = {state.rank: state.counts for state in run.states}
        lines = {(state.rank, one.channel): one.line for state in run.states for one in state.operations}
        for (rank, channel), line in lines.items():
            kind, group, peer, tag, number = channel
            others = {other: counts[other].get(channel, 0) for other in group} if kind == COLLECTIVE else {}
            if kind == SEND and peer is not None and (RECEIVE, group, None, tag, number) not in counts[peer]:
                others = {peer: counts[peer].get((RECEIVE, group, rank, tag, number), 0)}
            if fewer := [other for other, count in others.items() if count < counts[rank][channel]]:
                saw = f"on {run.size} ranks: {kind}s of rank {rank}: {counts[rank][channel]} ({line}), "
                saw += f"{RECEIVE if kind == SEND else kind}s of rank {fewer[0]}: {others[fewer[0]]}"
                yield error(saw, "a collective is called by its whole group, a send has a receive", Kind.ENDED.cure)
                return


def check_branches(script: Script) -> Iterator[Finding]:
    met: dict[object, dict[str, str]] = {}
    for run in script.runs:
        for one in (one for state in run.states for one in state.operations if one.peer is None):
            file, _, number = one.line.partition(" in ")[0].rpartition(":")
            source = linecache.getline(str(script.path.with_name(file or "?")), int(number or 0))
            if one.kind == COLLECTIVE and one.name in source:  # not what DDP calls, or `join`
                met.setdefault((run.size, one.channel, one.index), {})[one.line] = one.name
    calls = {tuple(sorted(lines)): name for lines in met.values() for name in lines.values() if len(lines) > 1}
    for lines, name in calls.items():
        saw = f"ranks meet in {name} from different lines: {', '.join(lines)}"
        yield warning(saw, "a collective in a branch needs its like in the others", "call it after the branches")


def check_any_source(script: Script) -> Iterator[Finding]:
    for line in sorted({one.line for one in script.operations() if one.kind == RECEIVE and one.peer is None}):
        yield warning(f"a receive from anyone ({line})", "nccl receives from a given rank only", "pass src to recv")


def check_nccl_operations(script: Script) -> Iterator[Finding]:
    for name, line in sorted({(one.name, one.line) for one in script.operations() if one.name in NOT_IN_NCCL}):
        yield warning(f"{name} ({line})", "nccl lacks it", "call it in a group of gloo: new_group(backend='gloo')")


def check_tags(script: Script) -> Iterator[Finding]:
    for run in script.runs:
        parts: dict[tuple[str, Message], list[Operation]] = {}
        for _, message, one in list_messages(run):
            parts.setdefault((one.kind, message), []).append(one)
        for (kind, message), sent in parts.items():
            if kind == SEND and len(tags := {one.tag for one in sent}) > 1:
                orders = [[(one.tag, one.index) for one in part] for part in (sent, parts.get((RECEIVE, message), []))]
                known = {*orders[0]} & {*orders[1]}
                mixed = [key for key in orders[0] if key in known] != [key for key in orders[1] if key in known]
                saw = f"tags {', '.join(map(str, sorted(tags)))} from rank {message[0]} to rank {message[1]}, "
                saw += f"{'not ' * mixed}received in the order of sending ({sent[0].line})"
                rule = "nccl ignores tags: messages between two ranks arrive in the order of sending"
                yield warning(saw, rule, "receive in the order of sending")
                return


def check_message_order(script: Script) -> Iterator[Finding]:
    """Play the messages as nccl may run them: those of a rank one after the other, unless it calls them in a batch."""
    for run in script.runs:
        parts = [(rank, (*message, one.tag, one.index), one) for rank, message, one in list_messages(run)]
        known = Counter(key for _, key, _ in parts)
        queues: dict[int, list[dict[object, Operation]]] = {state.rank: [] for state in run.states}
        for rank, key, one in ((rank, key, one) for rank, key, one in parts if known[key] == 2):
            last = next(reversed(queues[rank][-1].values())) if queues[rank] else None
            if last and last.line == one.line and not 0 < last.done < one.issued:
                queues[rank][-1][key] = one
            else:
                queues[rank].append({key: one})
        while True:
            heads = Counter(key for queue in queues.values() for key in next(iter(queue), {}))
            if not (ready := {key for key, count in heads.items() if count == 2}):
                break
            for queue in filter(None, queues.values()):
                queue[0] = {key: one for key, one in queue[0].items() if key not in ready}
                queue[:] = filter(None, queue)
        if stuck := {one.line for queue in queues.values() for one in next(iter(queue), {}).values()}:
            saw = f"on {run.size} ranks: messages, called one by one, cross each other ({', '.join(sorted(stuck))})"
            rule = "nccl runs them in the order of calls, and large ones wait for their receivers"
            yield warning(saw, rule, "call them together: batch_isend_irecv")
            return


def check_device(script: Script) -> Iterator[Finding]:
    source = script.path.read_bytes()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("init_process_group"):
            given = [*node.args[:1], *(each.value for each in node.keywords if each.arg == "backend")]
            for name in (ast.literal_eval(each) for each in given if isinstance(each, ast.Constant)):
                if name in BACKENDS and BACKENDS[name].device_type == "cpu":
                    saw = f"backend {name} is given ({script.path.name}:{node.lineno})"
                    yield warning(saw, "nccl is for GPUs, and the default is gloo and nccl", "leave the backend out")
    lines = (one.line for one in script.operations() if one.dtype or one.name == MAKE_DDP)
    first = next((line for line in lines if line.startswith(f"{script.path.name}:")), "")
    if first and not re.search(b"cuda|accelerator", source, re.IGNORECASE):
        saw = f"tensors of the CPU ({first}): {script.path.name} names no GPU"
        yield warning(saw, "nccl takes tensors of a GPU only", "make tensors on torch.device('cuda', LOCAL_RANK)")


CHECKS = find_checks(globals())
