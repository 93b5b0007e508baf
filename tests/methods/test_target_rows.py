"""The scores of a target are its row of the scores of all tokens, for every structure of options that builds rows."""

from typing import Any

import pytest
import torch
from torch import Tensor

import unilinattn as ula
from tests.methods.hosts import BATCH, CASES, LENGTH, close, traced
from unilinattn.testing import promoted

ON_EVERY_HOST: list[tuple[str, dict[str, Any]]] = [
    ("rollout", {}),
    ("rollout", {"sign": "abs"}),
    ("rollout", {"normalize": "rows"}),
    ("rollout", {"heads": "max"}),
]
ON_ONE_HOST: list[tuple[str, dict[str, Any]]] = [
    ("raw", {}),
    ("raw", {"normalize": "min-max"}),
    ("raw", {"discard": 0.5, "layers": "mean"}),
    ("raw", {"sign": "clamp", "normalize": "rows"}),
    ("raw", {"by_head": True}),
    ("raw", {"by_head": True, "normalize": "min-max", "heads": [1, 0]}),
    ("latim", {}),
    ("latim", {"bias": "query", "p": 1}),
    ("latim", {"normalize": "min-max"}),
    ("latim", {"normalize": "rows", "residual": True}),
    ("latim", {"by_head": True, "p": 1}),
    ("latim", {"by_head": True, "normalize": "min-max"}),
    ("latim", {"by_head": True, "activation": "silu"}),
    ("alti", {}),
    ("alti", {"by_head": True}),
    ("attention_grad", {}),
    ("transformer_attribution", {}),
]
ROWS = [
    *((*case, *call) for case in CASES for call in ON_EVERY_HOST),
    *(("mamba2", padding, *call) for padding in ("none", "left", "right") for call in ON_ONE_HOST),
]


@pytest.mark.filterwarnings("ignore:the trace passes position_ids")
@pytest.mark.parametrize(("name", "padding", "method", "options"), ROWS, ids=str)
def test_a_target_selects_its_row(name: str, padding: str, method: str, options: dict[str, Any]) -> None:
    trace = traced(name, padding)
    with promoted():
        whole = ula.explain(trace, method=method, **options)
        for target in (0, -1, [3, -2]):
            row, positions = ula.explain(trace, method=method, target=target, **options), trace.positions(target)

            def selected(values: Tensor, batch: int, query: int, at: Tensor = positions) -> Tensor:
                return values.movedim((batch, query), (0, 1))[torch.arange(BATCH), at].movedim(0, batch)

            assert row.dims == tuple(dim for dim in whole.dims if dim != "query")
            assert close(row.scores, selected(whole.scores, whole.dims.index("batch"), whole.dims.index("query")))
            for extra, values in whole.extras.items():
                if values.shape[1:3] == (BATCH, LENGTH):
                    assert close(row.extras[extra], selected(values, 1, 2)), extra
