"""No method runs the sequences of a batch one by one: its number of torch calls hardly depends on the batch size."""

import pytest
import torch

import unilinattn as ula
from benchmarks.memory import usage
from unilinattn.testing.hosts import host

METHODS = ("raw", "rollout", "latim", "alti", "attribution", "contribution", "logit", "lrp", "alti_logit")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba", "gpt2"])
def test_calls_by_batch_size(name: str) -> None:
    model = host(name).model()
    ids = torch.randint(16, (4, 12), generator=torch.Generator().manual_seed(0))
    calls: dict[str, list[int]] = {method: [] for method in METHODS}
    for batch in (ids[:1], ids):
        trace = ula.trace(model, batch, progress=False)
        for layer in trace.layers:
            layer.reconstruction_error()
        for method in METHODS:
            run = usage(lambda trace=trace, method=method: ula.explain(trace, method=method, target=-1), "cpu")
            calls[method].append(run.calls)
    # One by one there would be four times as many.
    assert {method: whole < 2 * alone for method, (alone, whole) in calls.items()} == dict.fromkeys(METHODS, True)
