"""The Hugging Face hub, through its own libraries: what is there is had whole or not at all, and without long waits.

Those libraries know its caches, mirrors (HF_ENDPOINT), access tokens and proxies; they are imported when they are used.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from playground.runtime.files import NoData
from playground.training.prepare import NETWORK_TIMEOUT, Say

INSTALL = "pip install 'playground[hub]'"
CACHE_ALONE = "HF_HUB_OFFLINE=1 takes what is in the hub's cache"
NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
"""Valid names of models and datasets on the hub."""
PARTS = {"huggingface_hub": ("constants", "errors", "utils.logging"), "datasets": ("utils.logging",)}
"""The libraries, and their modules that are used here."""
MODEL_FILES = ("config.json", "model.safetensors", "vocab.txt", "tokenizer.json", "tokenizer_config.json")


def is_installed(library: str) -> bool:
    """Whether one of the hub's libraries is there, without importing it."""
    return importlib.util.find_spec(library) is not None


def fetch_model(name: str, say: Say = lambda line: None) -> Path:
    """The folder in the hub's cache that holds a model's `MODEL_FILES`, fetched where they are not there yet.

    Without a network, what was fetched before will do. Raises `NoData`: no library, no network, no such model, or a
    download that broke off (of which nothing is used; the next one goes on from there).
    """
    hub = import_library("huggingface_hub")
    problem = find_problem(hub)
    say(f"looking for {name} {'in the cache of the hub' if problem else 'on the hub'}")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=[*MODEL_FILES], local_files_only=bool(problem)))
    except hub.errors.RepositoryNotFoundError:
        why = f"the hub has no model {name} that you may read"
        raise NoData(f"{why}: check its name; `hf auth login` if it is not public", why=why) from None
    except Exception as error:  # which ones it raises depends on its version, and on that of its HTTP library
        why = f"{name} could not be fetched from the hub ({problem or describe(error)})"
        raise NoData(f"{why}: retry with a network, or give a folder with {', '.join(MODEL_FILES[:3])}", why) from None


def load_split(name: str, split: str) -> Iterable[Any]:
    """The rows of a dataset's split, as dictionaries, fetched where they are not there yet. Raises `NoData`."""
    datasets, problem = import_library("datasets"), find_problem(import_library("huggingface_hub"))
    try:
        if problem:
            raise ConnectionError(problem)
        return datasets.load_dataset(name, split=split)
    except Exception as error:  # as above
        why = f"{name} could not be fetched from the hub ({describe(error)})"
        raise NoData(f"{why}: retry with a network; {CACHE_ALONE}", why) from None


def import_library(name: str) -> Any:
    """One of the hub's libraries, told to draw its bars on terminals alone. Raises `NoData` where there is none."""
    try:
        for part in PARTS[name]:  # which an import of the library alone may leave for later
            importlib.import_module(f"{name}.{part}")
        library = importlib.import_module(name)
    except ImportError as error:
        why = f"the package {name} is not installed"
        raise NoData(f"the hub is asked through {name}, which cannot be imported ({error}): {INSTALL}", why) from None
    library.utils.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        library.utils.disable_progress_bars()
    return library


def find_problem(hub: Any) -> str:
    """Why the hub does not answer, "" if it does. Takes `NETWORK_TIMEOUT` at most, the name look-up included. Its
    libraries would retry for a minute. Where HF_HUB_OFFLINE is set they do without a network, and nothing is asked."""
    if hub.constants.HF_HUB_OFFLINE:
        return ""
    problems = [f"{hub.constants.ENDPOINT} did not answer within {NETWORK_TIMEOUT:g} s"]

    def ask() -> None:
        try:
            hub.utils.get_session().head(hub.constants.ENDPOINT, timeout=NETWORK_TIMEOUT)
            problems.clear()
        except Exception as error:  # as above
            problems[:] = [f"{hub.constants.ENDPOINT}: {describe(error)}"]

    thread = threading.Thread(target=ask, daemon=True)  # a look-up of a name cannot be told to stop
    thread.start()
    thread.join(NETWORK_TIMEOUT)
    return problems[0] if problems else ""


def describe(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
