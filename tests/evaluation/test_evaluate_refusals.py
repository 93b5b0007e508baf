"""Requests that `evaluate` refuses, and errors that name their sample."""

import math
from typing import Any

import pytest
import torch

from tests.evaluation import tiny
from tests.evaluation.test_evaluate import stored_evaluation
from unilinattn.errors import InputError, OptionError, UnilinattnError
from unilinattn.evaluation import Sample
from unilinattn.examples import TASKS


def refused(error: type[UnilinattnError], message: str, **changed: Any) -> None:
    with pytest.raises(error, match=message):
        stored_evaluation(None, **changed)


@pytest.mark.usefixtures("unchecked")
def test_bad_requests_are_refused() -> None:
    (one,) = tiny.data(1)
    refused(OptionError, "unknown method 'rolout'; did you mean 'rollout'", methods=["rolout"])
    refused(OptionError, "did you mean 'scope'", methods=[("raw", {"scop": "core"})])
    refused(OptionError, "unknown metric 'aucc'; did you mean 'auc'", metrics=["aucc"])
    refused(OptionError, "metric auc takes no option 'masking'", metrics=[("auc", {"masking": "zero"})])
    refused(OptionError, "did you mean 'zero'", metrics=[("sufficiency", {"masking": "zeros"})])
    refused(OptionError, "unknown baseline 'chance'", baselines=["chance"])
    refused(OptionError, "two rows are called 'random'", methods={"random": "raw"})
    refused(OptionError, "names 'raw' twice", methods=["raw", "raw"])
    refused(OptionError, "give it a label", metrics=[lambda case: 0.0])
    refused(OptionError, "methods='raw'; give a list", methods="raw")
    refused(OptionError, "select_by='ape' is none of the metrics; did you mean 'ap'", select_by="ape")
    refused(OptionError, "by the function 'mine'", metrics={"mine": lambda case: 0.0})
    refused(InputError, "models must be a mapping", models={})
    refused(InputError, "model 's4d' is a str", models={"s4d": "path"})
    refused(InputError, "data is empty", data=[])
    refused(InputError, "data holds a Tensor; give a list of", data=[one.inputs])
    task = TASKS["induction"]
    for value in (task, task.sample(1, 0)):
        refused(InputError, r"data is an? \w+, a task.*`evaluation.task_samples\('induction', 8\)`", data=value)
        refused(InputError, r"selection is an? \w+, a task", selection=value)
        refused(InputError, r"data holds an? \w+, a task", data=[value])
    for value in (one, 5, None):
        refused(InputError, f"data is an? {type(value).__name__}; give a list of", data=value)
    refused(InputError, "needs `relevant`, and sample 1 has none", data=[one, Sample(inputs=one.inputs)])
    named = Sample(inputs=one.inputs, relevant=one.relevant, name="a")
    refused(InputError, "samples 0 and 1 of data have the same name 'a'", data=[named, named])
    refused(InputError, "needs `foreground`", metrics=["mean_iou"])


@pytest.mark.long
def test_errors_name_model_sample_method_and_metric() -> None:
    (one,) = tiny.data(1)
    nothing = Sample(inputs=one.inputs, relevant=torch.zeros(7, 7, dtype=torch.bool), name="empty")
    refused(InputError, "model s4d, sample empty, rollout, ap: None of the 7 rows", data=[nothing], methods=["rollout"],
            baselines=[], selection=None)  # fmt: skip
    half = Sample(inputs=one.inputs.repeat(2, 1))
    looks = {"look": lambda case: 0.0}
    quiet: dict[str, Any] = {"metrics": looks, "selection": None, "baselines": [], "methods": ["rollout"]}
    refused(InputError, "sample 0: a sample is one sequence or image; its inputs hold 2", **quiet | {"data": [half]})
    for value in (math.nan, math.inf):
        bad = {"bad": lambda case, value=value: value}
        refused(InputError, f"rollout, bad: the value is {value}", **quiet | {"metrics": bad})
    refused(InputError, "activation_auac: the metric needs the scores of one query; give the sample a target",
            **quiet | {"metrics": ["activation_auac"]})  # fmt: skip
    refused(InputError, r"f: the function returned \(7, 7, 7\)",
            **quiet | {"methods": {"f": lambda t, s: torch.rand(7, 7, 7)}})  # fmt: skip
    ragged = Sample(inputs=one.inputs, target=-1, grid=(2, 2), valid=torch.ones(7, dtype=torch.bool),
                    foreground=torch.eye(4, dtype=torch.bool))  # fmt: skip
    refused(InputError, "mean_iou: a grid of 2 x 2 patches does not fit 7 valid keys",
            **quiet | {"data": [ragged], "metrics": ["mean_iou"]})  # fmt: skip
    short = Sample(inputs=one.inputs, relevant=one.relevant[4])  # type: ignore[index]  # not None
    refused(InputError, r"ap: relevant of shape \(7,\) does not fit scores of shape \(7, 7\); give the sample a target",
            **quiet | {"data": [short], "metrics": ["ap"]})  # fmt: skip
