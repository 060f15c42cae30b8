"""In a rank: sees the files that it writes and reads."""

from __future__ import annotations

import os
import platform
from stat import S_ISREG
from typing import Any

from playground.base.upstream import count_collectives, list_groups
from playground.explain.right.log import FILE
from playground.explain.right.watcher import Notes, Watcher, describe_shard, guarded, tensors_in
from playground.tap import ranks_of

MOST_FILES = 64
"""How many uses of files are told."""


class FileWatcher(Watcher):
    """Sees what `torch.save` has written, and what `torch.load` reads."""

    looks_at_training = True

    def __init__(self, notes: Notes) -> None:
        super().__init__(notes)
        self.told = 0
        """How many uses were told."""

    @guarded
    def file_saved(self, file: Any, saved: Any) -> None:
        shards = [describe_shard(each) for each in tensors_in(saved)]
        self.tell_use(file, is_read=False, is_part=any(each and each[0] for each in shards))

    @guarded
    def file_loaded(self, file: Any) -> None:
        self.tell_use(file, is_read=True)

    def tell_use(self, file: Any, *, is_read: bool, is_part: bool = False) -> None:
        """Write that this rank reads or has written a file, and how many collectives each of its
        groups had counted by then: that orders the uses of several ranks."""
        if not isinstance(file, str | os.PathLike) or self.told >= MOST_FILES:
            return
        clocks = []
        for group in list_groups():
            counted = count_collectives(group)
            if counted is None:
                return
            clocks.append((group.group_name, list(ranks_of(group)), counted))
        try:
            stat = os.stat(file)
        except OSError:  # there is none, or another process has moved it meanwhile
            return
        if not S_ISREG(stat.st_mode):  # such as /dev/null
            return
        self.told += 1
        # an inode that is free again is another file's, so the path counts, too
        identity = [platform.node(), stat.st_dev, stat.st_ino, os.path.realpath(os.fsdecode(file))]
        self.notes.log.tell(
            FILE, is_read, os.fsdecode(file), identity, clocks,
            self.notes.step, self.notes.write_line(), is_part,
        )  # fmt: skip
