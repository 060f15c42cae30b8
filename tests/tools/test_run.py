"""A script under `run`: what it finds is what torchrun gives it, every end of it has one outcome,
and nothing is left of it."""

from __future__ import annotations

import ast
import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections import Counter
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from fixtures import Fork, Ran, Run, Save, Start
from processes import ENOUGH, by_hand, free_port, session_ends, session_members
from programs import ForkedProgram, Outcome
from terminal import open_terminal

from playground.base.files import temporary_folder
from playground.base.remote import file_of
from playground.site.texts import CHAPTERS
from playground.tools.failures.programs import DEADLOCK, FAILURE, PROGRAMS, TIMEOUT, find

HEAD = """
import os, signal, sys, time
import torch
import torch.distributed as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
"""
APART = (
    "playground: no rank has formed a process group: these were 2 independent runs of\n{}.\n"
    "What makes them one: python -m playground doctor {more}\n"
)
GONE = 2.0
"""Seconds after which no process is left of a run whose launcher was ended."""


# --- what it finds ---

DUMP = """
import json, os, signal, sys, multiprocessing
there = dict(
    argv=sys.argv, path=sys.path, words=sys.orig_argv, name=__name__, file=__file__, doc=__doc__,
    spec=str(__spec__), package=__package__, folder=os.getcwd(), names=sorted(globals()),
    method=multiprocessing.get_start_method(allow_none=True), flags=str(sys.flags),
    main=sys.modules["__main__"].__file__, warnings=sys.warnoptions,
    hook=sys.excepthook is sys.__excepthook__,
    signals={each.name: str(signal.getsignal(each)) for each in (signal.SIGTERM, signal.SIGCHLD)},
    environ=dict(os.environ),
)
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump(there, file)
"""
DIFFERENT = {
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",  # another run
    "TORCHELASTIC_ERROR_FILE",  # the launcher hears of a failure from the rank itself
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",  # ranks of one host meet on loopback
    "TORCH_CPP_LOG_LEVEL",  # what torch logs there is raised as well
}  # fmt: skip
"""Variables that are others than torchrun's, or that one of both sets alone."""


@pytest.mark.parametrize("how", [(), pytest.param(("--spawn",), marks=pytest.mark.stress)])
def test_a_script_finds_what_it_finds_under_torchrun(
    save: Save, start_cli: Start, fork_program: Fork, tmp_path: Path, how: tuple[str, ...]
) -> None:
    words = ["-n", "2", "sub/dump.py"], ["--nproc-per-node", "2", "sub/dump.py"]
    save(DUMP, "sub/dump.py")
    for name in ("ours", "torchruns"):
        (tmp_path / name).mkdir()
    ours = start_cli("run", *how, *words[0], "ours", OMP_NUM_THREADS="1")
    other = fork_program("torch.distributed.run", *words[1], "torchruns", OMP_NUM_THREADS="1")
    assert ours.communicate(timeout=ENOUGH) == (
        "",
        APART.format("sub/dump.py", more="sub/dump.py ours"),
    )
    assert ours.returncode == 0
    assert (other.communicate(timeout=ENOUGH)[0], other.returncode) == ("", 0)
    for rank in ("0", "1"):
        found, given = (
            json.loads((tmp_path / name / rank).read_text()) for name in ("ours", "torchruns")
        )
        environs = [found.pop("environ"), given.pop("environ")]
        different = {
            name
            for name in environs[0].keys() | environs[1].keys()
            if environs[0].get(name) != environs[1].get(name)
        }
        assert different <= DIFFERENT
        for each in (found, given):
            each["argv"].remove("ours" if each is found else "torchruns")
            each["words"].remove("ours" if each is found else "torchruns")
        assert found == given


def test_a_module_a_folder_and_an_archive_are_run_as_python_runs_them(
    save: Save, run_it: Ran, tmp_path: Path
) -> None:
    told = "import sys\nprint(sys.argv, __name__, __package__, sys.path[0])\n"
    save(f"from . import beside\n{told}", "package/__main__.py")
    save("", "package/beside.py")
    save(told, "folder/__main__.py")
    save(told, "alone.py")
    with zipfile.ZipFile("archive.zip", "w") as archive:
        archive.writestr("__main__.py", told)
    for words in (("-m", "package"), ("-m", "alone"), ("folder",), ("archive.zip",)):
        python = subprocess.run(
            [sys.executable, *words, "--lr", "3"], capture_output=True, text=True, check=True
        )
        ours = run_it("-n", 1, *words, "--lr", "3")
        assert (ours.code, ours.out, ours.err) == (0, python.stdout, "")


def test_it_reads_what_this_command_reads(save: Save, run_script: Run) -> None:
    save(HEAD + "print(sorted(sys.stdin) if rank == 0 else '')")
    save("one\ntwo\n", "input")
    done = run_script(
        """
        import os, sys
        from playground.app import run

        if __name__ == "__main__":
            os.dup2(os.open("input", os.O_RDONLY), 0)
            sys.argv = ["playground", "run", "-n", "2", "train.py"]
            run()
        """
    )
    assert (done.code, done.err) == (0, APART.format("train.py", more="train.py"))
    assert sorted(done.out.split("\n")) == ["", "", r"['one\n', 'two\n']"]


def test_what_it_starts_itself_works(save: Save, run_it: Ran) -> None:
    save("""
        import multiprocessing, os, subprocess, sys

        class Numbers:
            unpicklable = lambda: None
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return index

        def child(number):
            open(f"child-{os.environ['RANK']}-{number}", "w").close()

        def main():
            from torch.utils.data import DataLoader

            spawned = multiprocessing.get_context("spawn").Process(target=child, args=(0,))
            spawned.start()
            spawned.join()
            print([batch.tolist() for batch in DataLoader(Numbers(), batch_size=2, num_workers=2)])
            subprocess.run([sys.executable, "-c", "print('a child')"], check=True)

        if __name__ == "__main__":
            from torch.distributed.elastic.multiprocessing.errors import record

            record(main)()
    """)
    ran = run_it("-n", 1, "train.py")
    assert (ran.code, ran.err) == (0, "")
    assert sorted(ran.out.splitlines()) == ["[[0, 1], [2, 3]]", "a child"]
    assert [file.name for file in Path().glob("child-*")] == ["child-0-0"]


def test_each_rank_has_its_own_hash_seed_if_it_is_spawned(save: Save, run_it: Ran) -> None:
    save("""
        letters = set("abcdefghijklmnopqrstuvwxyz")
        print(" ".join(letters))
    """)
    forks, spawned = (run_it(*how, "train.py") for how in ((), ("--spawn",)))
    assert len({*forks.out.splitlines()}) == 1
    assert "a set is walked in its own order (train.py:3), which forks share" in forks.err
    assert len({*spawned.out.splitlines()}) > 1
    assert (forks.code, spawned.code, spawned.err) == (
        0,
        0,
        APART.format("train.py", more="train.py"),
    )


# --- how it ends ---

ENDS = {
    "an import fails": ("import no_such_module", 1, r"rank \d of 3 failed: ModuleNotFoundError"),
    "a syntax error": ("x = 1\ndef f(:", 2, r"train\.py, line 2: invalid syntax"),
    "it exits 3 on a rank": (
        "sys.exit(3 if rank == 1 else 0)", 1, r"rank 1 of 3 failed: SystemExit: 3"
    ),
    "a rank leaves early": (
        "dist.init_process_group('gloo')\nif rank == 2:\n    sys.exit(0)\ndist.barrier()", 1,
        r"rank 2 has finished while ranks? [01-]+ (is|are) in barrier\s+\(train\.py:9\)"
        r"(?s:.*)\nrank [01] then lost its connection to rank 2 "
        r"\(Connection (closed|reset) by peer\)",
    ),
    "a rank never comes": (
        "if rank != 2:\n    dist.init_process_group('gloo')", 1,
        r"deadlock: rank 2 has finished where ranks 0-1 are in\s+init_process_group"
        r"(?s:.*)call init_process_group on all ranks\n$",
    ),
    "a rank is killed": (
        "dist.init_process_group('gloo')\nif rank == 2:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.barrier()", 1, r"rank 2 of 3 was killed by SIGKILL",
    ),
    "a rank raises": (
        "dist.init_process_group('gloo')\nif rank == 1:\n    raise ValueError('too late')\n"
        "dist.barrier()", 1,
        r'rank 1 of 3 failed: ValueError: too late\nTraceback .*\n  File ".*train\.py", line 8, in '
        r"<module>",
    ),
}  # fmt: skip
"""Text of a script, the exit code, and what is said."""


@pytest.mark.parametrize("name", ENDS)
def test_an_end_that_is_none_is_named_once(save: Save, run_it: Ran, name: str) -> None:
    text, code, said = ENDS[name]
    ran = run_it("-n", 3, save(text if code == 2 else HEAD + text))
    assert (ran.code, ran.out) == (code, "")
    assert re.match(f"playground: {said}", ran.err), ran.err
    assert ran.err.count("playground: ") == 1


def test_there_is_no_such_program(save: Save, run_it: Ran, tmp_path: Path) -> None:
    for words, said in (
        (("away.py",), f"run away.py: there is no such file, in {tmp_path}"),
        (("-m", "no.such.module"), "run -m no.such.module: there is no module no on sys.path"),
    ):
        assert run_it(*words) == Outcome(2, "", f"playground: {said}\n")


def test_its_handler_of_sigterm_is_called(save: Save, fork_program: Fork) -> None:
    text = """
        def leave(*_):
            os.write(1, b"caught\\n")  # print may be interrupted in print
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        print("ready", flush=True)
        time.sleep(100)
    """
    save(HEAD + textwrap.dedent(text))
    for grace, code in (((), 143), (("--grace", "30"), 0)):
        program = fork_program("playground", "run", "-n", "2", *grace, "train.py")
        assert [program.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        program.send_signal(signal.SIGTERM)
        told = "" if code else APART.format("train.py", more="train.py")
        assert program.communicate(ENOUGH) == ("caught\n" * 2, told)
        assert program.returncode == code


INTERRUPTED = """
import atexit, subprocess, time
def say(words):
    os.write(1, f"{words}\\n".encode())  # print may be interrupted in print
dist.init_process_group("gloo")
atexit.register(say, f"atexit of {rank}")
child = subprocess.Popen(["sleep", "1000"])
try:
    say("ready")
    if rank == 0:
        time.sleep(1000)
    else:
        dist.all_reduce(torch.ones(1))  # raises, and so does Ctrl-C, when rank 0 has ended
except KeyboardInterrupt:
    if rank == 0:
        time.sleep(SECONDS)
        say("caught")
finally:
    if rank == 0:
        say(f"finally, {-child.wait()}")
"""


@pytest.mark.parametrize(
    ("seconds", "grace"),
    [
        ("0.1", ()),
        ("1000", ("--grace", "0.3")),
        pytest.param("1.5", ("--grace", "30"), marks=pytest.mark.stress),
        pytest.param("1000", (), marks=pytest.mark.stress),
    ],
)
def test_ctrl_c_is_a_keyboard_interrupt_in_every_rank(
    save: Save, fork_program: Fork, seconds: str, grace: tuple[str, ...]
) -> None:
    save(HEAD + INTERRUPTED.replace("SECONDS", seconds))
    program = fork_program("playground", "run", "-n", "2", *grace, "train.py")
    assert [program.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(ENOUGH)
    said = {"atexit of 0", "atexit of 1", "caught", "finally, 2"}
    if seconds == "1000":  # rank 1 ends by itself where it had not entered the all-reduce yet
        assert {*out.splitlines()} <= {"atexit of 1"}
    else:
        assert sorted(out.splitlines()) == sorted(said)
    assert (program.returncode, err.splitlines()[-1]) == (130, "playground: interrupted")
    assert session_ends(program.pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_launcher_is_ended(
    save: Save, fork_program: Fork, number: signal.Signals
) -> None:
    save(HEAD + 'os.fork()\nos.write(1, b"ready\\n")\ntime.sleep(100)\n')
    program = fork_program("playground", "run", "-n", "2", "train.py")
    assert [program.stdout.readline() for _ in range(4)] == ["ready\n"] * 4
    program.send_signal(number)
    program.wait(ENOUGH)
    end = time.monotonic() + GONE
    while session_members(program.pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert session_members(program.pid) == []
    assert program.returncode == (-number if number == signal.SIGKILL else 128 + number)


@pytest.mark.stress
def test_a_hundred_megabytes_arrive_whole(save: Save, start_cli: Start) -> None:
    save('for _ in range(100):\n    print(("x" * 1023 + "\\n") * 1024, end="")\n')
    ran = start_cli("run", "-n", 2, "train.py")
    assert ran.stdout
    assert {*ran.stdout} == {"x" * 1023 + "\n"}
    assert ran.wait(ENOUGH) == 0


def plain_script(name: str) -> str:
    """A program of `break` as a script for torchrun."""
    function = find(name)
    tree = ast.parse(file_of(function.module).read_text())
    ours = {f"{each.replace('-', '_')}{end}" for each in PROGRAMS for end in ("", "_cured")}
    parts = [
        ast.unparse(node)
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.ClassDef))
        or (isinstance(node, ast.FunctionDef) and node.name not in ours - {function.name})
    ]
    call = f"{function.name}(dist.get_rank(), dist.get_world_size())"
    return "\n".join([*parts, "dist.init_process_group('gloo')", f"print({call})"])


SOME = ("absent-rank", "killed")


@pytest.mark.parametrize(
    "name",
    [name if name in SOME else pytest.param(name, marks=pytest.mark.stress) for name in PROGRAMS],
)
def test_a_program_of_break_is_named_as_break_names_it(
    save: Save, run_it: Ran, run_cli: Ran, name: str
) -> None:
    expected = PROGRAMS[name]
    known = json.loads(run_cli("break", name, "--json").out)["programs"][0]
    limit = ("--timeout", 1.5) if expected.symptom == TIMEOUT else ()
    ran = run_it("-n", 3, *limit, save(plain_script(name)))
    said = " ".join(ran.err.split())
    if expected.symptom == DEADLOCK:  # or a rank has ended that another waits for
        lost = r"rank \d then lost its connection to .* \(Connection (closed|reset) by peer\)"
        assert re.match(f"playground: (deadlock: |.*{lost})", said)
    if expected.symptom == FAILURE:
        assert expected.words in said
    if expected.symptom not in (FAILURE, DEADLOCK, TIMEOUT):
        assert ran.code == 0, ran.err
        results = ["nan" if each is None else str(each) for each in known["results"]]  # JSON's
        assert sorted(ran.out.split()) == sorted(results)
    else:
        assert ran.code == 1, ran.err
    for rank in known["culprits"] if expected.symptom in (DEADLOCK, TIMEOUT) else ():
        named = re.sub(r"(\d+)-(\d+)", lambda span: spell_out(*map(int, span.groups())), said)
        assert re.search(rf"ranks? (\d+, )*{rank}\b", named), said
    cure = known["told"].strip().splitlines()[-1] if known["diagnosis"] else ""
    assert re.sub(r" \(\S+:\d+\)", "", cure) in re.sub(r" \(\S+:\d+\)", "", ran.err)


def spell_out(first: int, last: int) -> str:
    return ", ".join(map(str, range(first, last + 1)))


# --- its options ---


def test_what_follows_the_script_is_its_own(save: Save, run_it: Ran) -> None:
    save("import sys\nprint(sys.argv)")
    ran = run_it("-n", 1, "train.py", "-n", 5, "--", "--dry")
    assert (ran.code, ran.out) == (0, "['train.py', '-n', '5', '--', '--dry']\n")
    said = "playground: --dry stands after train.py, so the script gets it"
    assert ran.err.startswith(said)


FAILS_ONCE = (
    HEAD
    + """
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
count, most = (os.environ[f"TORCHELASTIC_{name}"] for name in ("RESTART_COUNT", "MAX_RESTARTS"))
print(f"{rank} {count} {most}\\n", end="")
print("to stderr", file=sys.stderr)
dist.barrier()  # both have printed
if rank == 1 and count == "0":
    raise ValueError("once")
dist.barrier()
dist.destroy_process_group()
"""
)


def test_it_is_restarted_recorded_and_its_output_goes_to_files(save: Save, run_it: Ran) -> None:
    save(FAILS_ONCE)
    words = ("--restarts", 1, "--see", "run.json", "--output-dir", "logs", "train.py")
    ran = run_it(*words)
    assert (ran.code, ran.out) == (0, "")
    told = "rank 1 of 2 failed: ValueError: once; restart 1\n--see: run.json shows "
    assert ran.err.startswith(told)
    written = {file.name: file.read_text() for file in Path("logs").iterdir()}
    assert written == {
        "rank0.stdout": "0 0 1\n0 1 1\n",
        "rank1.stdout": "1 0 1\n1 1 1\n",
        "rank0.stderr": "to stderr\n" * 2,
        "rank1.stderr": "to stderr\n" * 2,
    }
    events = json.loads(Path("run.json").read_text())["traceEvents"]
    sources = [each["args"]["source"] for each in events if "source" in each.get("args", {})]
    assert "train.py:8 in <module>" in sources


def test_the_output_of_rank_0_alone(save: Save, run_it: Ran) -> None:
    save(HEAD + "print('of', rank)\nprint('error of', rank, file=sys.stderr)")
    told = "error of 0\n" + APART.format("train.py", more="train.py")
    assert run_it("--output", "first", "train.py") == Outcome(0, "of 0\n", told)
    refused = run_it("--output", "none", "train.py")
    assert (refused.code, refused.out) == (2, "")
    assert "'none' is not one of 'ranks', 'rounds', 'first'" in refused.err


def test_another_users_link_is_not_written_through(save: Save, run_it: Ran) -> None:
    save("print('of a rank')")
    with temporary_folder("shared") as folder:
        folder.chmod(0o1777)
        (folder / "diary").write_text("dear diary")
        (folder / "rank0.stdout").symlink_to(folder / "diary")
        os.lchown(folder / "rank0.stdout", 65534, 65534)
        ran = run_it("-n", 1, "--output-dir", folder, "train.py")
        assert (folder / "diary").read_text() == "dear diary"
    why = f"{folder}/rank0.stdout: it is another user's link"
    assert ran == Outcome(2, "", f"playground: --output-dir {folder}: {why}\n")


def test_a_full_disk_names_the_file(save: Save, run_it: Ran, tmp_path: Path) -> None:
    save("print('of a rank')")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.stdout").symlink_to("/dev/full")
    ran = run_it("-n", 1, "--output-dir", "logs", "train.py")
    assert ran == Outcome(1, "", "playground: No space left on device: logs/rank0.stdout\n")


def test_without_torch_distributed_these_are_independent_runs(save: Save, run_it: Ran) -> None:
    save("print('trained')")
    ran = run_it("train.py")
    assert ran == Outcome(0, "trained\n" * 2, APART.format("train.py", more="train.py"))
    assert run_it("-n", 1, "train.py") == Outcome(0, "trained\n", "")
    save("import torch.distributed as dist\ndist.init_process_group('gloo')\nexit()")
    assert run_it("train.py") == Outcome(0, "", "")
    save("print('trained')", "package/train.py")
    told = run_it("-m", "package.train").err
    assert told.endswith("of\npackage.train.\nWhat makes them one: python -m playground read ddp\n")


QUIET = {
    "help": ("import argparse\nargparse.ArgumentParser().parse_args()", ("--help",), 0),
    "failed": ("raise SystemExit(3)", (), 1),
    "a child forms the group": (
        """
        import subprocess, sys
        code = "import torch.distributed as dist; dist.init_process_group('gloo'); dist.barrier()"
        subprocess.run([sys.executable, "-c", code], check=True)
        """, (), 0),
}  # fmt: skip


@pytest.mark.parametrize("how", QUIET)
def test_runs_are_not_called_independent_where_that_is_wrong(
    save: Save, run_it: Ran, how: str
) -> None:
    source, words, code = QUIET[how]
    save(source)
    ran = run_it("train.py", *words)
    assert ran.code == code
    assert "independent runs" not in ran.err


ORDER = """
import os, sys
for number in range(100):
    print("out", number)
    print("err", number, file=sys.stderr)
os.write(1, b"descriptor, ")
sys.stdout.buffer.write(b"buffer, ")
print("text", end="")
os._exit(0)
"""


def test_stdout_and_stderr_keep_their_order_where_both_go_to_one_file(
    save: Save, tmp_path: Path
) -> None:
    save(ORDER)
    words = [sys.executable, "-m", "playground", "run", "-n", "1", "train.py"]
    with open(tmp_path / "log", "w") as log:
        subprocess.run(words, stdout=log, stderr=log, check=True, timeout=ENOUGH)
    lines = [f"{stream} {number}\n" for number in range(100) for stream in ("out", "err")]
    assert (tmp_path / "log").read_text() == "".join(lines) + "descriptor, buffer, text"


ENCODED = """
import sys
print(sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors, type(sys.stdout.buffer).__name__)
print("\\udcff \\u03b2")
"""


@pytest.mark.parametrize(
    "environ",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "C.UTF-8"},
        {"PYTHONIOENCODING": "latin-1:xmlcharrefreplace"},
        {"PYTHONIOENCODING": "utf-8:strict"},
    ],
)
def test_streams_are_those_of_python_u(save: Save, environ: dict[str, str]) -> None:
    """The encoding, what becomes of characters that it lacks, and the bytes."""
    save(ENCODED)
    there = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG"))}
    for name in ("PYTHONIOENCODING", "PYTHONUTF8"):
        there.pop(name, None)
    ours, pythons = (
        subprocess.run(
            [sys.executable, *words, "train.py"],
            env=there | environ, capture_output=True, timeout=ENOUGH,
        )
        for words in (["-m", "playground", "run", "-n", "1"], ["-u"])
    )  # fmt: skip
    assert (ours.returncode, ours.stdout) == (pythons.returncode, pythons.stdout)
    assert (b"UnicodeEncodeError" in ours.stderr) == (b"UnicodeEncodeError" in pythons.stderr)


def read_until(terminal: int, words: bytes) -> bytes:
    shown = b""
    while words not in shown:
        assert wait([terminal], ENOUGH), shown
        shown += os.read(terminal, 2**16)
    return shown


@pytest.mark.parametrize(
    ("text", "prompt", "answer", "shown"),
    [
        ("print('hello,', input('name? '))", b"name? ", b"Ada\n", b"hello, Ada"),
        (
            "word = 'at a breakpoint'\nbreakpoint()\npass",
            b"(Pdb) ",
            b"p word\n",
            b"'at a breakpoint'",
        ),
    ],
)
def test_a_prompt_is_shown_before_its_answer(
    save: Save, text: str, prompt: bytes, answer: bytes, shown: bytes
) -> None:
    save(text)
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "playground", "run", "-n", "1", "train.py"]
    with subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as program:
        os.close(theirs)
        read_until(ours, prompt)
        os.write(ours, answer)
        read_until(ours, shown)
        os.write(ours, b"c\n")  # of the debugger
        assert program.wait(ENOUGH) == 0
    os.close(ours)


def test_ranks_know_the_size_of_the_terminal(save: Save) -> None:
    save("import shutil\nprint(*shutil.get_terminal_size())")
    words = [sys.executable, "-m", "playground", "run", "-n", "1", "train.py"]
    environ = {**os.environ, "NO_COLOR": "1"}
    for name in ("COLUMNS", "LINES"):
        environ.pop(name, None)
    with open_terminal(width=70) as terminal:
        subprocess.run(
            words, stdout=terminal.stream, stderr=terminal.stream, env=environ, check=True,
            timeout=ENOUGH,
        )  # fmt: skip
    assert terminal.shown == f"[rank 0] {70 - len('[rank 0] ')} 24\n"


def test_a_module_among_the_installed_packages_has_lines(
    save: Save, start_cli: Start, tmp_path: Path
) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    save(
        HEAD + "dist.init_process_group('gloo')\nif rank == 0:\n    dist.barrier()\n",
        "mine/train.py",
    )
    (tmp_path / "mine").rename(packages / "mine")
    ran = start_cli("run", "-n", 2, "-m", "mine.train", PYTHONPATH=str(packages))
    _, err = ran.communicate(timeout=ENOUGH)
    assert ran.returncode == 1
    assert "train.py:8 in <module>" in err


SEE_THREAD = """
import threading, torch, torch.distributed as dist
dist.init_process_group("gloo")
def work():
    for _ in range(20):
        dist.all_reduce(torch.ones(100))
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def test_a_deadlock_in_finally_begins_with_what_was_raised(save: Save, run_it: Ran) -> None:
    save(
        HEAD
        + """
dist.init_process_group("gloo")
try:
    if rank == 1:
        raise ValueError("sample 333: truncated")
    dist.all_reduce(torch.ones(1))
finally:
    dist.barrier()
"""
    )
    err = run_it("train.py").err
    first, second, *_ = err.splitlines()
    assert first == "playground: rank 1 had raised ValueError: sample 333: truncated (train.py:10)"
    assert second.startswith("deadlock: rank 1 is in barrier (train.py:13) where rank 0 is in")
    assert err.rstrip().endswith(
        '    raise ValueError("sample 333: truncated")\nValueError: sample 333: truncated'
    )


def test_ranks_that_call_from_a_thread_are_recorded(save: Save, run_it: Ran) -> None:
    save(SEE_THREAD)
    ran = run_it("--see", "run.json", "train.py")
    assert ran.code == 0, ran.err
    events = json.loads(Path("run.json").read_text())["traceEvents"]
    begun = Counter((each["name"], each["pid"]) for each in events if each["ph"] == "b")
    assert begun == {("all_reduce", 0): 20, ("all_reduce", 1): 20}


def test_a_run_in_silence_ends_at_its_timeout(save: Save, run_it: Ran) -> None:
    save(HEAD + "time.sleep(100)")
    ran = run_it("--timeout", 1, "train.py")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("playground: no sign of life for 1 s from ranks 0-1 of 2")
    assert 'train.py", line 6, in <module>' in ran.err


def test_dry_says_what_would_be_run_and_what_would_fail(save: Save, run_it: Ran) -> None:
    save("import torch.distributed as dist\ndist.init_process_group('gloo')\nprint('ran')")
    ran = run_it("--dry", "train.py")
    assert "2 checks of its text (own gpu, set order): nothing found\n" in ran.out
    save("import torch.distributed as dist\ndist.init_process_group('gloo')  # not on a GPU yet\n")
    ran = run_it("--dry", "-n", 3, "--restarts", 2, "train.py", "--lr", "a b")
    line = "torchrun --nproc-per-node 3 --max-restarts 2 train.py --lr 'a b'"
    assert (ran.code, ran.err) == (0, "")
    assert f"as does: {line}\n" in ran.out
    assert "3 checks of its text (device, own gpu, set order): 1 found something\n" in ran.out
    assert "not looked at: what it calls and how it trains, as nothing was run" in ran.out
    assert '  note, device: for GPUs: leave out "gloo" (train.py:2)\n' in ran.out
    document = json.loads(run_it("--dry", "--json", "train.py").out)
    assert [each["check"] for each in document["faults"]] == ["device"]
    assert document["torchrun"] == "torchrun --nproc-per-node 2 train.py"
    save("import torch\nimport torch.distributed as dist\ndist.init_process_group()\n"
         "device = torch.device('cuda')\n")  # fmt: skip
    ran = run_it("--dry", "train.py")
    assert "warning, own-gpu: all ranks would use the first GPU" in ran.out
    assert "not data parallel yet" not in ran.out
    save("import torch\nmodel = torch.nn.Linear(1, 1).to('cuda')\nfor _ in range(2):\n"
         "    model(torch.ones(1, 1)).sum().backward()\n")  # fmt: skip
    ran = run_it("--dry", "train.py")
    assert "warning, own-gpu: all ranks would use the first GPU" in ran.out
    assert "not data parallel yet: python -m playground doctor train.py\n" in ran.out
    save("import torch, os\nimport torch.distributed as dist\ndist.init_process_group()\n"
         "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
         "y = torch.ones(1).to('cuda:0')\n")  # fmt: skip
    ran = run_it("--dry", "train.py")
    assert "warning, own-gpu: the text names cuda:0, on all ranks (train.py:5)\n" in ran.out
    refused = run_it("--json", "train.py")
    assert (refused.code, refused.out) == (2, "")


def test_in_a_world_that_is_there_it_is_a_rank(save: Save, fork_program: Fork) -> None:
    """Started as torchrun starts it, and restarts it."""
    save(FAILS_ONCE)

    def start(count: int) -> list[ForkedProgram]:
        port = free_port()
        restarts = {"TORCHELASTIC_RESTART_COUNT": str(count), "TORCHELASTIC_MAX_RESTARTS": "1"}
        return [
            fork_program("playground", "run", "train.py", **by_hand(rank, 2, port), **restarts)
            for rank in range(2)
        ]

    _, failed = start(0)
    out, err = failed.communicate(ENOUGH)
    assert (failed.returncode, out) == (1, "1 0 1\n")
    assert "rank 1 of 2 failed: ValueError: once" in err
    again = start(1)
    for rank, program in enumerate(again):
        assert program.communicate(ENOUGH) == (f"{rank} 1 1\n", "to stderr\n")
        assert program.returncode == 0


@pytest.mark.stress
def test_under_torchrun_it_joins_the_world_that_is_there(save: Save) -> None:
    save(FAILS_ONCE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", "1", "-m", "playground", "run", "train.py"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == ["0 0 1", "0 1 1", "1 0 1", "1 1 1"]
    assert "rank 1 of 2 failed: ValueError: once" in ran.stderr


def test_under_slurm_it_joins_the_world_of_the_other_tasks(save: Save, fork_program: Fork) -> None:
    save(
        HEAD
        + """
dist.init_process_group("gloo")
dist.all_reduce(one := torch.full((1,), rank + 1.0))
print(one.item(), rank, os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"])
dist.destroy_process_group()
"""
    )
    step = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "here", "SLURM_NODEID": "0",
        "MASTER_PORT": free_port(),
    }  # fmt: skip
    tasks = [
        fork_program("playground", "run", "train.py", **step, SLURM_PROCID=task, SLURM_LOCALID=task)
        for task in ("0", "1")
    ]
    said = [("3.0 0 0 2\n", ""), ("3.0 1 1 2\n", "")]
    assert [task.communicate(ENOUGH) for task in tasks] == said
    assert [task.returncode for task in tasks] == [0, 0]


STANDS = """
import os, threading, time
import torch
import torch.distributed as dist
from playground.explain.hang import standstill
standstill.SETTLED, standstill.LIMIT, standstill.PATIENCE = 0.1, 0.5, 1.0

def wait(end=time.monotonic() + 120):
    while not os.path.exists("go on") and time.monotonic() < end: time.sleep(0.01)

def send_later():
    wait()
    dist.send(torch.ones(1), 0)

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.recv(torch.ones(1), 1)
elif "thread" in os.environ["HOW"]:
    threading.Thread(target=send_later, name="sends later").start()
    dist.recv(torch.ones(1), 0)
else:
    send_later()
if dist.get_rank() == 0 and "thread" in os.environ["HOW"]:
    dist.send(torch.ones(1), 1)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (
            "thread",
            [
                "no rank has made progress", "the run goes on", "probably a deadlock: rank 0 is in "
                "receive from rank 1 (train.py:17) where rank 1 is in receive from rank 0 (:20)",
                "what thread sends later does (rank 1)",
            ],
        ),
        (
            "own code",
            ["rank 1 is in the program (train.py:9) while rank 0 is in receive from rank 1 (:17)"],
        ),
    ],
)  # fmt: skip
def test_ranks_that_others_have_started_tell_once_that_they_stand_still(
    how: str, told: list[str], save: Save, fork_program: Fork
) -> None:
    save(STANDS)
    port = free_port()
    first, second = (
        fork_program("playground", "run", "train.py", **by_hand(rank, 2, port), HOW=how)
        for rank in range(2)
    )
    said = ""
    while told[-1] not in " ".join(said.split()):
        line = first.stderr.readline()
        assert line, said
        said += line
    assert (first.poll(), second.poll()) == (None, None)
    Path("go on").touch()
    _, rest = first.communicate(ENOUGH)
    assert [words for words in told if words not in " ".join(said.split())] == []
    assert "in receive" not in rest
    assert second.communicate(ENOUGH) == ("", "")
    assert (first.returncode, second.returncode) == (0, 0)


def test_json_is_said_to_be_for_dry(run_cli: Run) -> None:
    told = " ".join(run_cli("run", "--help").out.split())
    assert "--json With --dry, print one JSON document instead of text." in told
    chapter = (CHAPTERS["run"].parents[2] / "lessons" / "running.md").read_text(encoding="utf-8")
    [sentence] = re.findall(r"- (.*?) take `--json`", chapter, re.DOTALL)
    assert sentence.startswith("`run --dry`, ")


def test_an_option_of_another_name_is_found(run_cli: Run) -> None:
    ran = run_cli("run", "--record", "x.html", "train.py")
    assert ran.code == 2
    assert ran.err.strip() == "playground: No such option '--record'. Did you mean '--see'?"
