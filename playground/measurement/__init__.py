"""Measurements: calls timed in turns, and the environment. Does not import torch."""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]
"""A row of results, or several figures, as JSON prints them: values by name."""
