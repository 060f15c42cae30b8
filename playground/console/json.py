"""Results as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path


def to_document(content: Mapping[str, object]) -> str:
    """One JSON document. A number that JSON has no word for (a diverged loss is NaN) becomes null."""
    return json.dumps(to_json_safe(content), allow_nan=False)


def to_json_safe(value: object) -> object:
    """`value` made of what JSON has: dataclasses as objects with their fields, tuples as lists, paths as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json_safe(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): to_json_safe(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_safe(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
