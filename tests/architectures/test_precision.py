"""Float32 operators of half-precision hosts, and linear memory of passes on real layers."""

import pytest
import torch

from tests.hosts import every_host
from tools.coverage_runs import models
from unilinattn import trace
from unilinattn.testing import HOSTS, OPERATOR_LAWS, Host, operator_passes, require_linear_memory, tolerance
from unilinattn.testing.hosts import VOCABULARY, host


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_host(models(HOSTS), "entry")
def test_half_precision_hosts_are_reconstructed_in_float32(entry: Host, dtype: torch.dtype) -> None:
    x = entry.inputs()
    for layer in trace(entry.model().to(dtype), x.to(dtype) if x.is_floating_point() else x).layers:
        assert layer.output.dtype == torch.float32
        OPERATOR_LAWS["precision"](layer.operator, 0.0)
        assert layer.operator.reconstruction_error() <= tolerance("reconstruction", dtype)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "s4d"])
def test_passes_of_a_layer_allocate_linearly(name: str) -> None:
    model = host(name).model()

    def passes(length: int):  # type: ignore[no-untyped-def]  # as `operator_passes` returns
        ids = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))
        return operator_passes(trace(model, ids).layers[1].operator)

    require_linear_memory(passes, 192)
