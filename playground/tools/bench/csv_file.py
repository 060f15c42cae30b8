"""The rows of a benchmark as CSV: after every point the file holds all rows so far, whatever then ends the run."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path

from playground.runtime.errors import PlaygroundError, UsageError
from playground.tools.bench.columns import CSV_FIELDS
from playground.tools.bench.results import Row


class CsvFile:
    """One line per row, under the names that JSON has for the fields. Without a path, nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.failure: OSError | None = None

    def begin(self) -> None:
        """Make the file, with its header. Raises `UsageError` if that fails: nothing has been measured yet."""
        try:
            self.write([])
        except OSError as error:
            raise UsageError(f"--csv {self.path} cannot be written: {error.strerror}") from None

    def update(self, rows: Sequence[Row]) -> None:
        """Have these rows in the file. If that fails, the measurement goes on: `check` says so at the end."""
        try:
            self.write(rows)
            self.failure = None
        except OSError as error:
            self.failure = error

    def check(self) -> None:
        """Raise `PlaygroundError` unless every row is in the file."""
        if self.failure:
            raise PlaygroundError(f"--csv {self.path} lacks rows ({self.failure.strerror}): they are printed above")

    def write(self, rows: Sequence[Row]) -> None:
        """Write all anew beside the file, then put it in its place: a disk that is full costs no row that is there."""
        if self.path is None:
            return
        target = self.path.resolve()
        if (target.exists() and not target.is_file()) or not os.access(target.parent, os.W_OK):
            write_rows(target, rows)  # a pipe or a device, or a file in a folder that is not ours
            return
        part = target.with_name(f"{target.name}.part")
        try:
            write_rows(part, rows)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, CSV_FIELDS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(map(vars, rows))
