"""`unilinattn list`, and the arguments of the commands."""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from unilinattn import cli
from unilinattn.cli import listing
from unilinattn.cli.arguments import DTYPES, parser
from unilinattn.evaluation import checkpoints
from unilinattn.registry import Method, list_architectures, list_methods, overridden
from unilinattn.tracing.trust import Trust

ROOT = Path(__file__).parents[1]


def test_list_names_every_architecture_and_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    for text in ("Mamba-1 (S6)", "transformers.models.mamba2.modeling_mamba2.Mamba2Mixer", "rollout", "latim"):
        assert text in out


@pytest.mark.long
def test_list_prints_the_options_of_a_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "latim"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("latim: LaTIM: C_ij") and "page      docs/methods/latim.md" in lines[2]
    assert (ROOT / "docs" / "methods" / "latim.md").is_file() and "vectors that tokens contribute" in lines[1]
    place = lines.index("  p = 2.0")
    assert [line.strip() for line in lines[place + 1 : place + 3]] == [
        "accepts float >= 1",
        "order of the norm, at least 1; float('inf') for the maximum",
    ]
    assert cli.main(["list", "mamba2"]) == 0
    assert "host  transformers.models.mamba2.modeling_mamba2.Mamba2Mixer" in capsys.readouterr().out
    assert cli.main(["list", "latm"]) == 2
    message = capsys.readouterr().err
    assert "no method or architecture is named 'latm'; did you mean 'latim' or" in message


def test_list_prints_the_entries_of_other_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(listing, "entry_points", lambda group: [group])
    mine = Method("mine", "My scores.", lambda trace, target=None: None)
    with overridden(mine):
        assert cli.main(["list", "mine"]) == 0
        assert capsys.readouterr().out == "mine: My scores.\nNo options\n"
        assert cli.main(["list", "raw"]) == 0
        assert "question  The same by attention maps" in capsys.readouterr().out


def test_the_listed_entries_are_those_of_the_registry() -> None:
    own = [name for name, each in list_architectures().items() if each.build.__module__.startswith("unilinattn.")]
    architectures, methods = listing.entries()
    assert [each.name for each in architectures] == own
    for each in architectures:
        registered = list_architectures()[each.name]
        assert each == (registered.name, registered.kind, registered.summary, registered.hosts)
    own = [name for name, each in list_methods().items() if each.function.__module__.startswith("unilinattn.")]
    assert [each.name for each in methods] == own
    for method in methods:
        registered = list_methods()[method.name]
        assert method == (registered.name, registered.summary, registered.options)


def test_the_list_takes_less_than_a_second() -> None:
    code = "import time; from unilinattn.cli import main; main(['list']); print(time.process_time())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout.splitlines()[-1]) < 1


def test_the_arguments_name_the_accepted_values() -> None:
    assert ", ".join(checkpoints.DTYPES) == DTYPES
    trust = next(action for action in _actions("explain") if action.dest == "trust")
    assert tuple(trust.choices or ()) == get_args(Trust)


def _actions(command: str) -> list[argparse.Action]:
    commands, _ = parser("")
    (chosen,) = [action for action in commands._actions if isinstance(action, argparse._SubParsersAction)]
    return chosen.choices[command]._actions
