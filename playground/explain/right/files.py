"""Rules on files that ranks write and read, and on what was loaded (F, R). Does not import
torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from playground.explain.right.facts import FileUse, RankFacts
from playground.explain.right.finding import HINT, PROBABLE, Finding


def find_shared_file(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """F1-file: one rank writes a file.

    Probable: `torch.save` has written one file on two ranks of a host, and no collective of a group
    that has both came between. (They may take turns by a lock or a `Store`.) Unknown: a rank has
    sent or received messages.
    Source: the tutorial "Getting started with distributed data parallel", in which rank 0 alone
    saves.
    """
    found: dict[tuple[str, str], tuple[set[int], int]] = {}
    for one, other in pairs_of(facts):
        written, others = (
            {place_of(each, one, other): each for each in rank.files if not each.is_read}
            for rank in (one, other)
        )
        for place in written.keys() & others.keys():
            first = written[place]
            key = first.path, one.where(first.line)
            ranks, _ = found.setdefault(key, (set(), first.step))
            ranks |= {one.rank, other.rank}
    for (path, where), (ranks, step) in found.items():
        yield Finding(
            rule="F1-file",
            level=PROBABLE,
            what=f"several ranks write one file at the same time, {path}",
            ranks=tuple(sorted(ranks)),
            since=step,
            where=where,
            why="torch.save writes the same path on these ranks, and nothing comes between: the "
            "file may be a mixture",
            fix="let rank 0 save, or give each rank a file of its own",
        )


def find_early_load(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """F4-race: a file is loaded after it has been saved.

    A hint: a rank loads the file that another rank of the host saves, and no collective of a group
    that has both came between. Unknown: as for F1-file. A program that waits for the file in
    another way, as by a `Store` or a lock, looks the same.
    """
    for one, other in pairs_of(facts):
        for writer, reader in ((one, other), (other, one)):
            read = {place_of(each, one, other): each for each in reader.files if each.is_read}
            known = set()  # what the writer has read before: it resumes, and so may the reader
            for use in writer.files:
                place = place_of(use, one, other)
                if use.is_read:
                    known.add(place)
                if use.is_read or place not in read or place in known:
                    continue
                yield Finding(
                    rule="F4-race",
                    level=HINT,
                    what=f"rank {reader.rank} loads {use.path} while rank {writer.rank} saves it",
                    ranks=tuple(sorted((writer.rank, reader.rank))),
                    since=use.step,
                    where=reader.where(read[place].line),
                    why="nothing comes between saving and loading: the file may be the one before, "
                    "or a part of this one",
                    fix="call dist.barrier() after rank 0 has saved, and before others load",
                )
                return


def find_overwritten(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """R1-source: the rank that has loaded a checkpoint is the source of the broadcast.

    Probable: before the first step, a broadcast from a rank that has called no `load_state_dict`,
    and has read no file by `torch.load`, overwrites a parameter that `load_state_dict` has written
    on another rank. Unknown: ranks send messages (the source may have its values from another); the
    source has left no log. Source: the documentation of `torch.distributed.broadcast`.
    """
    known = {each.rank: each for each in facts if not each.unknown and not each.has_messages}
    found: dict[tuple[int, str], list[int]] = {}
    for rank in known.values():
        for each in rank.overwritten:
            source = known.get(each.source)
            if source and not source.has_restored and not any(use.is_read for use in source.files):
                found.setdefault((each.source, rank.where(each.line)), []).append(rank.rank)
    for (source_rank, where), ranks in found.items():
        yield Finding(
            rule="R1-source",
            level=PROBABLE,
            what="a broadcast overwrites weights that load_state_dict has brought",
            ranks=tuple(ranks),
            since=0,
            where=where,
            why=f"it sends what rank {source_rank} has, which has loaded nothing",
            fix="give broadcast the rank that has loaded as src, or load on all ranks",
        )


def pairs_of(facts: Sequence[RankFacts]) -> Iterator[tuple[RankFacts, RankFacts]]:
    """Pairs of ranks that are known to agree by collectives alone."""
    known = [each for each in facts if not each.unknown and not each.has_messages]
    yield from combinations(known, 2)


def place_of(use: FileUse, one: RankFacts, other: RankFacts) -> tuple[object, ...]:
    """The file, and the clocks of the groups that have both ranks."""
    clocks = [
        (name, clock) for name, ranks, clock in use.clocks if {one.rank, other.rank} <= {*ranks}
    ]
    return *use.identity, *sorted(clocks)
