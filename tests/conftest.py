"""Shared fixtures. `world` comes from the plugin `playground.testing`, as it does for any
project."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from fixtures import Worlds
from gpus import COLD
from hosts import Network, make_network
from next_steps import printed_commands
from processes import ENOUGH
from programs import SCRIPT, ForkedProgram, Outcome

from playground.app import run as run_command_line
from playground.base.signals import do_nothing
from playground.testing import World
from playground.training import prepare
from playground.world.backends.nccl import SHARES_A_GPU, nccl_version
from playground.world.launcher.fork_client import preload
from playground.world.launcher.pool import end_worlds, keep_worlds

if TYPE_CHECKING:
    from browser import Browser

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
"""Before anybody imports torch: its threads are not to spin while they wait for each other, on
cores that workers share with the ranks of others. (They would compute a fifth of the time, and spin
in the rest.)"""

# A busy machine is no failure, and what is drawn is the same in every run: to see more,
# --hypothesis-profile explore.
hypothesis.settings.register_profile("the same each time", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("the same each time")

os.environ.setdefault("PLAYGROUND_TEST_TENTH", "0")
"""Which tenth of the exercises is judged by strangers' solutions, and of the chapters is shown by a
browser. `make stress` takes all. (What is tested does not depend on the day.)"""

FEW, FEWER = 600, 200
"""Samples to train on and to test on, in most tests."""
LIMIT, STRESS_LIMIT = float(os.environ.get("PLAYGROUND_TEST_LIMIT", "600")), 7200.0
"""Seconds after which a test fails, whatever it waits for."""
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)

for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_number) == signal.SIG_IGN:  # as under nohup, or in the background
        # the programs that tests start inherit what is ignored, but no handler
        signal.signal(_number, do_nothing)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    limit = STRESS_LIMIT if item.get_closest_marker("stress") else LIMIT

    def give_up(*_: object) -> None:
        pytest.fail(f"no end within {limit:g} s")

    handlers = {number: signal.getsignal(number) for number in HANDLED}
    signal.signal(signal.SIGALRM, give_up)
    # again: what follows a failure may wait, too
    signal.setitimer(signal.ITIMER_REAL, limit, ENOUGH)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        # what a test leaves would change what signals do in the next
        for number, handler in handlers.items():
            signal.signal(number, handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if newer := [item for item in items if needs_newer_torch(item)]:
        config.hook.pytest_deselected(items=newer)
        items[:] = [item for item in items if item not in newer]
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


def needs_newer_torch(item: pytest.Item) -> bool:
    """Whether a test looks at what this torch cannot do. Another test says what it answers then."""
    found = tuple(map(int, importlib.metadata.version("torch").split(".")[:2]))
    return any(found < mark.args for mark in item.iter_markers("torch"))


def pytest_collection_finish() -> None:
    """Let the fork server import, once, what the test modules import, and every rank that runs a
    function of theirs. (Not those modules themselves: ranks rewrite their asserts.) What a test
    computes in this process, it computes in one thread: another worker has the other core."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    shared = {"playground", "hypothesis", "torch", "torchvision"}
    shared |= {file.stem for file in (Path(__file__).parent / "support").glob("*.py")}
    preload("pytest", *(name for name in sys.modules if name.split(".")[0] in shared))


@pytest.fixture(scope="session", autouse=True)
def _kept_worlds() -> Iterator[None]:
    """Ranks of one test run the functions of the next, unless it asks for fresh ones."""
    keep_worlds()
    yield
    end_worlds()


@pytest.fixture(autouse=True)
def _own_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test joins a world to which the environment of the test run belongs."""
    place = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    for name in (*place, "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with a few digits in it."""
    folder = tmp_path_factory.mktemp("data")
    prepare.find_or_draw_digits(folder, "for tests", lambda line: None, FEW, FEWER)
    return folder


@pytest.fixture
def few_digits(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands find their data in that directory."""
    monkeypatch.setenv(prepare.DATA_DIR, str(data_dir))


@pytest.fixture(scope="session")
def digits_folder(data_dir: Path) -> Path:
    """The four files of those digits."""
    return prepare.raw_folder(data_dir, "digits")


@pytest.fixture(scope="session")
def real_mnist() -> Path:
    """A folder with MNIST's four .gz files, where this machine has one."""
    folder = Path(
        os.environ.get("PLAYGROUND_TEST_MNIST", Path(__file__).parents[2] / "shared" / "mnist")
    )
    if not folder.is_dir():
        pytest.skip(
            "no copy of MNIST on this machine (PLAYGROUND_TEST_MNIST names a folder with its .gz "
            "files)"
        )
    return folder


@pytest.fixture(scope="session")
def browser_of_the_session() -> Iterator[Browser]:
    from browser import browser

    with browser() as opened:
        yield opened


@pytest.fixture
def window(browser_of_the_session: Browser) -> Browser:
    """An empty window of the one browser."""
    browser_of_the_session.clear()
    return browser_of_the_session


WITHOUT_TORCH = """
import importlib, sys
sys.modules["torch"] = None  # an attempt to import it is an error, and takes no time
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] != "torch":
            raise
        print(module)
"""


@pytest.fixture(scope="session")
def nccl_size() -> int:
    """As many ranks as there are GPUs; two on one where NCCL can share it."""
    import torch

    gpus = torch.cuda.device_count()
    return 2 if gpus == 1 and nccl_version() >= SHARES_A_GPU else gpus


@pytest.fixture
def pair(nccl_size: int) -> int:
    """Two ranks with GPUs, or more: with one alone nothing travels."""
    if nccl_size < 2:
        pytest.skip(
            "needs two ranks: there is one GPU, and an NCCL before 2.30, which cannot share it"
        )
    return nccl_size


@pytest.fixture
def nccl(world: Worlds, nccl_size: int) -> World:
    return world(nccl_size, backend="nccl", timeout=COLD)


@pytest.fixture
def torch_is_imported() -> Callable[..., list[str]]:
    """`torch_is_imported(module, …)`: by which of these modules, in a new process that imports them
    one by one."""

    def ask(*modules: str) -> list[str]:
        command = [sys.executable, "-c", WITHOUT_TORCH, *modules]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    return ask


@pytest.fixture
def run_cli(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """The command line, run in this process (so that its ranks come from the session's fork
    server). The commands that it prints, there are."""

    def run(*words: Any) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["playground", *map(str, words)])
        with pytest.raises(SystemExit) as exit_:
            run_command_line()
        out, err = capfd.readouterr()
        if words[:1] != ("read",):  # tests/lessons/test_commands_named.py reads the chapters
            printed_commands(f"{out}\n{err}")
        return Outcome(int(exit_.value.code or 0), out, err)

    return run


@pytest.fixture
def start_cli() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """The command line as a process of its own, leading its own process group; none survives the
    test."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: Any, **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "playground", *map(str, words)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True, env={**os.environ, **environ},
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def fork_program() -> Iterator[Callable[..., ForkedProgram]]:
    """A module run as a program, in a process that has torch imported already; none survives the
    test."""
    forked: list[ForkedProgram] = []

    def fork(module: str, *words: Any, **environ: str) -> ForkedProgram:
        forked.append(ForkedProgram(module, [*map(str, words)], {**os.environ, **environ}))
        return forked[-1]

    yield fork
    for program in forked:
        program.close()


@pytest.fixture
def run_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_program: Callable[..., ForkedProgram]
) -> Callable[..., Outcome]:
    """`run_script(text, **environ)`: what becomes of a program of this text, in a process as
    `fork_program` starts."""

    def run(text: str, **environ: str) -> Outcome:
        (tmp_path / f"{SCRIPT}.py").write_text(textwrap.dedent(text))
        monkeypatch.syspath_prepend(tmp_path)
        program = fork_program(SCRIPT, **environ)
        out, err = program.communicate(timeout=ENOUGH)
        return Outcome(program.returncode, out, err)

    return run


@pytest.fixture
def hosts() -> Iterator[Callable[..., Network]]:
    """`hosts(size, rate="100mbit")`: a network of so many hosts on this machine, gone after the
    test."""
    made: list[Network] = []

    def make(size: int, rate: str | None = None) -> Network:
        made.append(make_network(size, rate))
        return made[-1]

    yield make
    for network in made:
        network.remove()
