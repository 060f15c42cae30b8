"""The types of what fixtures give: `world`, and those of tests/conftest.py."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

from hosts import Network
from programs import ForkedProgram, Outcome

from playground.testing import World

Worlds = Callable[..., World]
Run = Callable[..., Any]
"""Of `run_cli` and `run_script`: what is returned is an `Outcome`."""
Start = Callable[..., "subprocess.Popen[str]"]
Fork = Callable[..., ForkedProgram]
Ran = Callable[..., Outcome]
Save = Callable[..., str]
"""Of `run_it` and `save`."""
Networks = Callable[..., Network]
