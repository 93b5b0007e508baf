"""Small attributions for the tests of results."""

import dataclasses
from typing import Any

import torch

from unilinattn.results.attribution import Attribution

LAYERS, BATCH, LENGTH = 2, 2, 5


TOKENS = [["the", "<b>", "\n", "é", "漢"], ["a", "b", "c", "", ""]]


MASK = torch.tensor([[True] * 5, [True, True, True, False, False]])


def make(**changes: Any) -> Attribution:
    values: dict[str, Any] = {
        "scores": torch.randn(LAYERS, BATCH, LENGTH, LENGTH),
        "dims": ("layer", "batch", "query", "key"),
        "method": "latim",
        "options": {"p": float("inf"), "target": None, "layers": [0, 1]},
        "scope": "layer",
        "tokens": TOKENS,
        "mask": MASK,
        "layers": ("h.0", "h.1"),
        "kinds": ("dense", "Toeplitz"),
        "model": "tiny",
        "versions": {"torch": "2"},
        "reconstruction_error": {"h.0": 1e-7, "h.1": 3e-7},
        "completeness_gap": 1e-9,
        "extras": {"bias": torch.randn(LAYERS, BATCH, LENGTH), "other": torch.arange(3)},
    }
    return Attribution(**(values | changes))


def make_target(**changes: Any) -> Attribution:
    return make(**({"scores": torch.randn(BATCH, LENGTH), "dims": ("batch", "key"), "extras": {}} | changes))


def labels(result: Attribution) -> dict[str, Any]:
    tensors = {"scores", "mask", "extras"}
    return {f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name not in tensors}


def assert_same(first: Attribution, second: Attribution) -> None:
    assert labels(first) == labels(second)
    assert first.scores.dtype == second.scores.dtype
    assert torch.equal(first.scores, second.scores)
    assert (first.mask is None) == (second.mask is None)
    if first.mask is not None and second.mask is not None:
        assert torch.equal(first.mask, second.mask)
    assert first.extras.keys() == second.extras.keys()
    assert all(torch.equal(first.extras[name], second.extras[name]) for name in first.extras)
