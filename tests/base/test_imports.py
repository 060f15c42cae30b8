"""What a program sets in its environment before it imports torch."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest
from fixtures import Fork, Start
from processes import ENOUGH
from programs import Outcome

from playground.base.imports import find_settings, read_once


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("os.environ['OMP_PROC_BIND'] = 'true'", {"OMP_PROC_BIND": "true"}),
        ("os.environ.setdefault('OMP_PROC_BIND', 'true')", {"OMP_PROC_BIND": "true"}),
        ("os.environ.setdefault('KMP_BLOCKTIME', '1')", {"KMP_BLOCKTIME": "200"}),
        ("os.environ.update(MKL_DYNAMIC='0')", {"MKL_DYNAMIC": "0"}),
        ("os.environ.update({'MKL_DYNAMIC': '0', name: '1'})", {"MKL_DYNAMIC": "0"}),
        ("environ['TORCHINDUCTOR_CPP_WRAPPER'] = '1'", {"TORCHINDUCTOR_CPP_WRAPPER": "1"}),
        ("os.environ['OMP_NUM_THREADS'] = '3'", {}),  # torch is told in the rank
        ("os.environ['MY_OWN'] = '3'", {}),
        ("os.environ['OMP_PROC_BIND'] = str(True)", {}),
        ("if debug:\n  os.environ['OMP_PROC_BIND'] = 'true'", {}),
        ("import torch\nos.environ['OMP_PROC_BIND'] = 'true'", {}),
        ("from .mine import all\nos.environ['OMP_PROC_BIND'] = 'true'", {}),
        ("import sys\nos.environ['OMP_PROC_BIND'] = 'true'", {"OMP_PROC_BIND": "true"}),
    ],
)
def test_what_a_program_surely_sets_is_found(source: str, found: dict[str, str]) -> None:
    assert find_settings(ast.parse(source), {"KMP_BLOCKTIME": "200"}) == found


def test_what_a_process_reads_once_is_told_from_what_it_reads_again() -> None:
    environ = {"LC_ALL": "C", "OMP_NUM_THREADS": "2", "OMP_PLACES": "cores", "RANK": "1"}
    assert read_once(environ) == (("LC_ALL", "C"), ("OMP_PLACES", "cores"))


def run_text(fork_program: Fork, folder: Path, text: str, **environ: str) -> Outcome:
    """How `playground run -n 2` of a script with this text ends."""
    (folder / "train.py").write_text(textwrap.dedent(text))
    program = fork_program("playground", "run", "-n", 2, folder / "train.py", **environ)
    out, err = program.communicate(timeout=ENOUGH)
    return Outcome(program.returncode, out, err)


def test_a_script_is_obeyed_that_sets_variables_before_its_import_of_torch(
    fork_program: Fork, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    done = run_text(
        fork_program,
        tmp_path,
        f"""
        import os, sys
        assert "torch" not in sys.modules
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        os.environ["TMPDIR"] = {str(tmp_path / "there")!r}
        os.environ["OMP_NUM_THREADS"] = "2"
        os.environ["PYTORCH_JIT"] = "0"
        os.environ["TORCH_LOGS"] = "+aot"
        import importlib.util, tempfile
        assert importlib.util.find_spec("torch") and "torch" not in sys.modules
        import torch.distributed as dist
        import logging, torch, warnings
        warnings.simplefilter("ignore")
        double = lambda x: 2 * x
        print(
            dist.get_debug_level().name, tempfile.gettempdir(), torch.get_num_threads(),
            torch.jit.script(double) is double,
            logging.getLogger("torch._functorch.aot_autograd").level,
        )
        assert torch.__spec__.loader is torch.__loader__
        dist.init_process_group("gloo")
        """,
    )
    line = f"DETAIL {tmp_path / 'there'} 2 True 10\n"
    assert (done.code, done.out, done.err) == (0, 2 * line, "")


def test_a_constant_is_set_before_the_import_that_all_ranks_share(
    start_cli: Start, tmp_path: Path
) -> None:
    text = """
import os
os.environ["TORCH_COMPILE_JOB_ID"] = "mine"
import torch
print(torch.compiler.config.job_id)
torch.distributed.init_process_group("gloo")
"""
    (tmp_path / "train.py").write_text(text)
    program = start_cli("run", "-n", "2", str(tmp_path / "train.py"))
    assert program.communicate(timeout=ENOUGH) == ("mine\n" * 2, "")


def test_a_variable_that_has_no_effect_any_more_is_told(fork_program: Fork, tmp_path: Path) -> None:
    done = run_text(
        fork_program,
        tmp_path,
        """
        import os
        os.environ["OMP_DYNAMIC"] = str(True)
        import torch
        print(os.environ["OMP_DYNAMIC"])
        torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()  # the other may still be connecting
        """,
    )
    told = (
        "playground: OMP_DYNAMIC had been read before the program set it, so that has no effect: "
        f"set it for the command, OMP_DYNAMIC=… {tmp_path / 'train.py'}\n"
    )
    assert (done.code, done.out, done.err) == (0, "True\n" * 2, told)


def test_a_script_of_numpy_alone_finds_it(fork_program: Fork, tmp_path: Path) -> None:
    done = run_text(
        fork_program,
        tmp_path,
        """
        import sys
        import numpy as np
        print(np.arange(3).sum(), "torch" in sys.modules)
        import torch.nn
        print(torch.from_numpy(np.ones(2)).sum().item(), np is sys.modules["numpy"])
        torch.distributed.init_process_group("gloo")
        """,
    )
    assert (done.code, sorted(done.out.split("\n")), done.err) == (
        0, ["", "2.0 True", "2.0 True", "3 False", "3 False"], "",
    )  # fmt: skip
