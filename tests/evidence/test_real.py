"""Pretrained checkpoints: rankings on numbers worked out by hand, the split, the default, and a missing wheel."""

from pathlib import Path

import pytest
import torch

from evidence import checkpoints, real, truths
from evidence.truths import Input
from unilinattn.examples import TASKS, load
from unilinattn.optional import MissingExtraError


def line(checkpoint: str, method: str, spearman: float, hit: float, half: str = "choose") -> list[real.Row]:
    head = {"checkpoint": checkpoint, "half": half, "tokens": "all", "method": method}
    return [{**head, "metric": "spearman", "mean": spearman}, {**head, "metric": "hit_at_1", "mean": hit}]


def test_rankings_of_known_numbers_with_and_without_a_sink() -> None:
    truth = torch.tensor([0.5, 3.0, 1.0], dtype=torch.float64)
    scores = torch.tensor([9.0, 2.0, 1.0], dtype=torch.float64)
    everything = torch.ones(3, dtype=torch.bool)
    # Ranks (3, 2, 1) against (1, 3, 2): 1 - 6 * (4 + 1 + 1) / 24.
    assert real.ranked(scores, truth, everything) == pytest.approx({"hit_at_1": 0.0, "spearman": -0.5})
    rest = torch.tensor([False, True, True])
    assert real.ranked(scores, truth, rest) == pytest.approx({"hit_at_1": 1.0, "spearman": 1.0})


def test_the_halves_share_no_input_and_differ_by_one_at_most() -> None:
    halves = [real.half(index) for index in range(64)]
    assert halves.count("choose") == halves.count("report") == 32
    assert halves[0] != halves[1]


def test_the_default_is_the_best_mean_on_the_chosen_half_of_methods_that_every_checkpoint_has() -> None:
    lines = [
        *line("a", "logit", 0.5, 0.1),
        *line("b", "logit", 0.3, 0.1),
        *line("a", "lrp", 0.4, 0.9),
        *line("b", "lrp", 0.4, 0.9),
        *line("a", "alti", 0.9, 0.9),
        *line("a", "raw", 0.1, 0.1),
        *line("b", "raw", 0.1, 0.1),
        *line("a", "raw", 1.0, 1.0, "report"),
        *line("b", "raw", 1.0, 1.0, "report"),
        *line("a", "recency", 1.0, 1.0),
        *line("b", "recency", 1.0, 1.0),
    ]
    # logit and lrp have the same mean correlation, and lrp the larger hit@1.
    assert real.best_method(lines) == "lrp"


def test_differences_to_a_baseline_are_paired() -> None:
    rows = []
    for index in range(20):
        for method, value in (("logit", index / 20 + 0.1), ("recency", index / 20), ("random", 0.0)):
            numbers = {"hit_at_1": 0.0, "spearman": value}
            rows.append({"checkpoint": "a", "method": method, "input": index, "all": numbers, "no sinks": numbers})
    summary = real.summary(rows)
    (of_logit,) = (
        row
        for row in summary
        if (row["method"], row["half"], row["tokens"], row["metric"]) == ("logit", "both", "all", "spearman")
    )
    assert of_logit["over recency"] == {"mean": 0.1, "low": 0.1, "high": 0.1, "count": 20}
    assert of_logit["low"] < of_logit["mean"] < of_logit["high"]


def test_a_missing_wheel_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(checkpoints.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(MissingExtraError, match=r"pip download --no-deps .*rxnmapper==0\.4\.3"):
        checkpoints.atom_maps(download=False)


def test_tokens_of_a_reaction_join_to_its_text() -> None:
    for text in truths.texts("reactions"):
        assert "".join(checkpoints.smiles_tokens(text)) == text


def test_methods_of_many_passes_are_no_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "METHODS", ("logit", "rollout", "kernel_shap", "occlusion", "knockout"))
    model = load("induction", "mamba2")
    ids = TASKS["induction"].sample(1, 0).input_ids[0, :12].tolist()
    methods = real.candidates(model, Input(tuple(ids), 11, 3, predicted=False))
    assert methods.keys() == {"logit", "rollout"}


def test_a_real_model_and_its_scores_are_read_from_the_cache() -> None:
    try:
        model, vocabulary = checkpoints.atom_maps(download=False)
    except MissingExtraError as error:
        pytest.skip(str(error))
    example = truths.CHECKPOINTS["rxnmapper"].inputs(model, vocabulary)[0]
    # The masked atom of an amide can be copied from the reactants: the model is sure of it.
    assert float(truths.log_probability(model, example)(torch.tensor([example.ids]))) > -0.7
