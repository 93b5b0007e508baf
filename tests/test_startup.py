"""Ctrl-C during the imports of the command line."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SENDS = """
import os, signal, sys
class Sender:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
# A shell starts background jobs with SIGINT ignored, which their processes inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Sender())
"""
"""A `sitecustomize`, imported when Python starts, that interrupts the process at the import of a module."""

SCRIPT = """
import sys
from unilinattn.cli import main
if __name__ == "__main__":
    sys.exit(main())
"""
"""The script that an installer writes for the command."""


def interrupted(tmp_path: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(SENDS.format(module=module))
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("start", ["module", "script"])
def test_an_interrupted_import_ends_the_command_with_one_line(tmp_path: Path, start: str) -> None:
    script = tmp_path / "unilinattn"
    script.write_text(SCRIPT)
    arguments = ["-m", "unilinattn"] if start == "module" else [str(script)]
    done = interrupted(tmp_path, "torch.nn", *arguments, "explain", "folder", "--text", "a")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "unilinattn: interrupted\n")


def test_an_interrupted_import_of_the_library_raises(tmp_path: Path) -> None:
    code = """
import unilinattn
try:
    unilinattn.trace
except KeyboardInterrupt:
    print("raised")
"""
    done = interrupted(tmp_path, "torch.nn", "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "raised\n", "")


def test_an_import_of_the_library_that_was_interrupted_can_be_repeated(tmp_path: Path) -> None:
    code = """
import sys
import unilinattn
try:
    unilinattn.methods
except KeyboardInterrupt:
    # The finder that sends the interrupt.
    del sys.meta_path[0]
    print("rollout" in unilinattn.list_methods(), "mamba" in unilinattn.list_architectures())
"""
    done = interrupted(tmp_path, "unilinattn.methods.rollout", "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True\n", "")


def test_help_and_list_import_no_torch(tmp_path: Path) -> None:
    # An import of torch would end the process with 130 and the message of the interrupt.
    for arguments in (["--help"], ["--version"], ["list"], ["list", "latim"], ["explain", "--help"]):
        done = interrupted(tmp_path, "torch", "-m", "unilinattn", *arguments)
        assert (done.returncode, done.stderr) == (0, "") and done.stdout
    done = interrupted(
        tmp_path, "torch", "-c", "import unilinattn; print(dir(unilinattn) == sorted(unilinattn.__all__))"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
    done = interrupted(tmp_path, "torch", "-m", "unilinattn", "evaluate", "--help")
    assert (done.returncode, done.stderr) == (130, "unilinattn: interrupted\n")


def test_a_command_handles_interrupts_of_later_imports(tmp_path: Path) -> None:
    # `compare` imports transformers when it runs.
    done = interrupted(tmp_path, "transformers", "-m", "unilinattn", "compare")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "unilinattn compare: interrupted\n")
