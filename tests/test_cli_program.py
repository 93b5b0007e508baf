"""The command line as a program: its help, interrupts and exit codes."""

import subprocess
import sys
from pathlib import Path

import pytest

from unilinattn import cli
from unilinattn.cli import listing


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert {"compare", "evaluate", "explain", "list"} <= set(out.split())
    with pytest.raises(SystemExit):
        cli.main(["evaluate", "--help"])
    assert "positive_perturbation" in capsys.readouterr().out


def test_an_interrupted_command_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(listing, "entries", interrupted)
    assert cli.main(["list"]) == 130
    assert capsys.readouterr().err == "unilinattn list: interrupted\n"


@pytest.mark.slow
def test_the_module_runs_as_a_program() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "unilinattn", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])

    assert run("--version").stdout == "unilinattn 0.1.0\n"
    failed = run("compare", "--task", "copyng")
    assert failed.returncode == 2 and "did you mean" in failed.stderr and "Traceback" not in failed.stderr
    assert run().returncode == 2
