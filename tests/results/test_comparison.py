"""`Comparison`: results by model and method."""

import pickle

import jaxtyping
import numpy as np
import pytest

from tests.results.samples import assert_same, make, make_target
from unilinattn.errors import InputError, OptionError
from unilinattn.results.comparison import Comparison


@pytest.fixture
def comparison() -> Comparison:
    return Comparison(
        {
            "mamba": {"raw": make(method="raw"), "rollout": make_target(method="rollout")},
            "gpt": {"raw": make(method="raw", kinds=("dense", "dense"), reconstruction_error={})},
        }
    )


def test_a_comparison_maps_models_to_methods_to_results(comparison: Comparison) -> None:
    assert list(comparison) == ["mamba", "gpt"]
    assert comparison.methods == ("raw", "rollout")
    assert comparison["mamba"]["rollout"].method == "rollout"
    assert [(model, method) for model, method, _ in comparison.results()] == [
        ("mamba", "raw"),
        ("mamba", "rollout"),
        ("gpt", "raw"),
    ]
    assert "llama" not in comparison
    assert comparison["gpt"].get("rollout") is None


def test_an_unknown_name_suggests_the_nearest(comparison: Comparison) -> None:
    with pytest.raises(OptionError, match=r"^There is no model 'mambo' here; did you mean 'mamba'\?"):
        comparison["mambo"]
    with pytest.raises(KeyError, match="did you mean 'rollout'"):
        comparison["mamba"]["rolout"]


def test_the_table_has_one_row_per_result(comparison: Comparison) -> None:
    lines = comparison.table().splitlines()
    assert len(lines) == 4
    assert lines[0].split("  ")[0] == "model"
    assert "dense x2" in lines[3]
    assert lines[1].endswith("3.0e-07")
    assert lines[3].endswith("-")
    assert comparison.table() in repr(comparison)


def test_the_data_frame_has_all_scores(comparison: Comparison) -> None:
    frame = comparison.to_dataframe()
    assert list(frame.columns[:2]) == ["model", "method"]
    assert len(frame) == sum(len(result.to_dataframe()) for *_, result in comparison.results())
    assert set(frame["model"]) == {"mamba", "gpt"}


def test_a_pickled_comparison_is_equal(comparison: Comparison) -> None:
    other = pickle.loads(pickle.dumps(comparison))
    assert_same(other["gpt"]["raw"], comparison["gpt"]["raw"])
    assert list(pickle.loads(pickle.dumps(comparison["mamba"]))) == ["raw", "rollout"]


def test_an_empty_comparison_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    for nothing in ({}, {"mamba": {}}):
        with pytest.raises(InputError, match="at least one"):
            Comparison(nothing)
    with pytest.raises(InputError, match="holds Attribution, not int"):
        Comparison({"mamba": {"raw": 3}})  # type: ignore[dict-item]  # refused, as tested


def test_a_result_is_an_array_and_a_comparison_is_none(comparison: Comparison) -> None:
    result = comparison["mamba"]["raw"]
    assert np.array_equal(np.asarray(result), result.scores.numpy())
    half = make(scores=make().scores.bfloat16().requires_grad_())
    assert half.scores.requires_grad is False
    assert np.array_equal(np.asarray(half), half.scores.float().numpy())
    assert np.asarray(result, dtype=np.float64).dtype == np.float64
    with pytest.raises(InputError, match=r"3 results .* np.asarray\(comparison\['mamba'\]\['raw'\]\)"):
        np.asarray(comparison)
