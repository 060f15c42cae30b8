"""The container for Codespaces and VS Code installs what README says, with what a run needs."""

from __future__ import annotations

import json
import re
import tomllib

from playground.base.remote import ROOT

FOLDER = ROOT / ".devcontainer"
DOCKERFILE = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
SETTINGS = json.loads((FOLDER / "devcontainer.json").read_text(encoding="utf-8"))


def test_its_commands_are_those_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line.partition("#")[0].strip() for line in readme.splitlines()]
    installs = [line for line in lines if line.startswith("pip install ")]
    assert len(installs) == 2
    ran = re.findall(r"^RUN (.*)$", DOCKERFILE, re.MULTILINE)
    assert [*ran, SETTINGS["postCreateCommand"]] == installs


def test_its_python_is_one_that_is_promised_and_that_running_names() -> None:
    [image, version] = re.findall(r"^FROM (python:(3\.\d+))$", DOCKERFILE, re.MULTILINE)[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    least = project["requires-python"].removeprefix(">=")
    numbers = [[*map(int, each.split("."))] for each in (version, least)]
    assert numbers[0] >= numbers[1]
    running = (ROOT / "playground/lessons/running.md").read_text(encoding="utf-8")
    assert f'docker run -it -v "${{PWD}}:/playground" -w /playground {image} bash' in running


def test_it_is_built_from_its_own_file_with_shared_memory_as_doctor_wants_it() -> None:
    assert (FOLDER / SETTINGS["build"]["dockerfile"]).is_file()
    [size] = re.findall(r"--shm-size=(\d+)g", " ".join(SETTINGS["runArgs"]))
    assert int(size) >= 1
