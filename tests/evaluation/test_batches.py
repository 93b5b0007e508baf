from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import unilinattn as ula
from tests.evaluation import tiny
from unilinattn.errors import InputError, OptionError


@pytest.mark.long
def test_a_batch_has_the_numbers_of_its_samples() -> None:
    model, data, selection = tiny.model().double(), tiny.data(), tiny.selection()
    asked: dict[str, Any] = {"methods": ["logit", "raw"], "metrics": ["ap", "hit_at_1"], "selection": selection}
    alone, together = (ula.evaluate({"m": model}, data, **asked, batch_size=size) for size in (1, len(data)))
    assert len(alone) == len(together)
    for one, other in zip(alone, together, strict=True):
        assert {**one, "value": 0, "parts": 0} == {**other, "value": 0, "parts": 0}
        assert one["value"] == pytest.approx(other["value"], abs=1e-9)
    with pytest.raises(OptionError, match="mine is a function, which takes one sample at a time"):
        ula.evaluate({"m": model}, data, {"mine": lambda trace, sample: sample}, ["ap"], batch_size=2)
    with pytest.raises(OptionError, match="batch_size=0; give 1 or more samples"):
        ula.evaluate({"m": model}, data, ["logit"], ["ap"], batch_size=0)


@pytest.mark.long
def test_the_perturbed_inputs_of_a_batch_run_together() -> None:
    model, runs = tiny.model().double(), [0]

    def count(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        runs[0] += 1

    model.register_forward_pre_hook(count)
    data = [
        replace(sample, target=target, relevant=None, valid=None, label=label)
        for sample, target, label in zip(tiny.data(3), (-1, -2, -3), (4, None, 2), strict=True)
    ]
    unlabelled = [replace(sample, label=None) for sample in data]
    options = {"masking": "token", "mask_token_id": 0}
    metrics = [(name, options) for name in ("activation_auac", "pruning_au_mse", "comprehensiveness", "deletion")]
    counts = []
    for samples in (data, unlabelled):
        tables = []
        for size in (1, 3):
            runs[0] = 0
            tables.append(ula.evaluate({"m": model}, samples, ["logit", "input_x_gradient"], metrics, batch_size=size))
            counts.append(runs[0])
        single, joint = ({(r["method"], r["sample"], r["metric"]): r["value"] for r in table} for table in tables)
        assert single == pytest.approx(joint, abs=1e-9)
        assert len(set(single.values())) > len(single) / 2
    assert counts[1] < 0.7 * counts[0] and counts[3] < 0.7 * counts[2]


@pytest.mark.parametrize("metric", ["ap", ("comprehensiveness", {"masking": "token", "mask_token_id": 0})])
def test_an_error_of_a_batch_names_its_sample(metric: Any) -> None:
    model, samples = tiny.model(), tiny.data(2)
    relevant = torch.arange(samples[0].inputs.shape[1]) == 1
    # The second sample has no key to rank or to remove.
    masks = {"first": None, "second": torch.zeros_like(relevant)}
    data = [
        replace(sample, target=-1, name=name, relevant=relevant, valid=valid)
        for sample, (name, valid) in zip(samples, masks.items(), strict=True)
    ]
    with pytest.raises(InputError, match=r"model m, sample second, logit, (ap|comprehensiveness).*: "):
        ula.evaluate({"m": model}, data, ["logit"], [metric], baselines=[], batch_size=2)


def test_each_sample_of_a_batch_is_ranked_by_its_masks() -> None:
    model, samples = tiny.model().double(), tiny.data(3)
    keys = torch.arange(samples[0].inputs.shape[1])
    masks = [(keys == 1, keys < 5), (keys == 3, keys > 0), (keys < 2, keys < 4)]
    data = [
        replace(sample, target=-1, relevant=relevant, valid=valid)
        for sample, (relevant, valid) in zip(samples, masks, strict=True)
    ]
    metrics = ["auc", "ap", "recall_at_k", "hit_at_1"]
    singles, batch = (ula.evaluate({"m": model}, data, ["logit"], metrics, batch_size=size) for size in (1, 3))
    values = [row["value"] for row in singles]
    assert [row["value"] for row in batch] == pytest.approx(values, abs=1e-12)
    # Other masks would have other numbers.
    others = [replace(sample, relevant=masks[0][0], valid=masks[0][1]) for sample in data]
    mixed = ula.evaluate({"m": model}, others, ["logit"], metrics, batch_size=3)
    assert [row["value"] for row in mixed] != pytest.approx(values, abs=1e-3)
