"""`tools.systems`: the record of the models of other packages, its table, and the outcome of a model."""

import json
from pathlib import Path

import torch
from torch import nn

from tools import systems
from tools.markers import read_section
from tools.sweep_pages import OUTCOMES
from tools.systems import measure, section
from tools.systems_models import SYSTEMS, System, ids

ROOT = Path(__file__).parents[2]


def test_the_page_is_that_of_the_record() -> None:
    record = json.loads((ROOT / systems.RECORD).read_text())
    assert read_section((ROOT / systems.PAGE).read_text(), systems.SECTION) == section(record)
    assert [row["name"] for row in record["rows"]] == list(SYSTEMS)
    assert {row["outcome"] for row in record["rows"]} <= set(OUTCOMES) - set(systems.FAILURES)


def test_each_package_has_a_version_for_its_environment() -> None:
    pinned = {
        line.partition("==")[0].lower() for line in (ROOT / "tools/systems_packages.txt").read_text().splitlines()
    }
    packages = {entry.package for entry in SYSTEMS.values()} - {"torch"}
    assert {name.lower().replace("-", "_") for name in packages} <= {name.replace("-", "_") for name in pinned}


def test_the_outcome_of_a_model_has_its_errors_and_its_gap() -> None:
    result = measure(SYSTEMS["nn.MultiheadAttention in a block"])
    assert result["outcome"] == "works" and result["layers"] == result["maps"] == 2
    assert result["error32"] < 1e-6 and result["error64"] < 1e-14 and result["gap"] < 1e-12


def test_a_refusal_has_its_reason_and_a_missing_package_is_no_failure() -> None:
    assert "passes a nonlinearity" in measure(SYSTEMS["nn.LSTM"])["message"]

    def missing() -> tuple[nn.Module, torch.Tensor]:
        import no_such_package  # type: ignore[import-not-found]

        return no_such_package.Model(), ids()

    assert measure(System("missing", "none", missing))["outcome"] == "unbuilt"


def test_changed_outcomes_are_named() -> None:
    stored = [{"name": "a", "outcome": "works"}, {"name": "b", "outcome": "refused"}]
    fresh = [
        {"name": "a", "outcome": "refused"},
        {"name": "b", "outcome": "refused"},
        {"name": "c", "outcome": "works"},
    ]
    assert systems.differences(stored, fresh) == ["a: was works, is refused", "c: was never recorded, is works"]
