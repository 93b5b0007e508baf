"""`unilinattn list`, its file of the registered entries, and the arguments of the commands."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from tools import surface
from unilinattn import cli
from unilinattn.cli import listing
from unilinattn.cli.arguments import DTYPES, parser
from unilinattn.evaluation import checkpoints
from unilinattn.registry import Method, list_methods, overridden
from unilinattn.tracing.trust import Trust

ROOT = Path(__file__).parents[1]


def test_list_names_every_architecture_and_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    for text in ("Mamba-1 (S6)", "transformers.models.mamba2.modeling_mamba2.Mamba2Mixer", "rollout", "latim"):
        assert text in out


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
    assert surface.main(["--check"]) == 0


def test_a_stale_list_is_detected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    other = replace(list_methods()["raw"], summary="Other scores.")
    with overridden(other):
        assert surface.main(["--check"]) == 1
    assert "registered.json is stale: run `python -m tools.surface`" in capsys.readouterr().out


def test_the_arguments_name_the_accepted_values() -> None:
    assert ", ".join(checkpoints.DTYPES) == DTYPES
    trust = next(action for action in _actions("explain") if action.dest == "trust")
    assert tuple(trust.choices or ()) == get_args(Trust)


def _actions(command: str) -> list[argparse.Action]:
    commands, _ = parser("")
    (chosen,) = [action for action in commands._actions if isinstance(action, argparse._SubParsersAction)]
    return chosen.choices[command]._actions
