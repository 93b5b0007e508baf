"""Parts of the conformance kit other than laws: tolerances, promotion, rounding, margins, hosts."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import unilinattn
from tests import margins
from unilinattn import trace
from unilinattn.errors import OptionError
from unilinattn.testing import (
    HOST_LAWS,
    HOSTS,
    TOLERANCES,
    LawViolation,
    Margin,
    host_rounding,
    left_as_found,
    promoted,
    recorded_margins,
    relative_error,
    rounding_limit,
    tolerance,
)
from unilinattn.testing.checks import require_close
from unilinattn.testing.hosts import host
from unilinattn.tracing.layer import Layer


def test_the_table_of_tolerances() -> None:
    assert tolerance("reconstruction", torch.float32) == 1e-5
    assert tolerance("reconstruction", torch.float64) == 1e-10
    assert tolerance("unpromoted", torch.float64) == 2e-6
    assert tolerance("reconstruction", torch.bfloat16) == tolerance("reconstruction", torch.float16) == 2e-2
    with pytest.raises(TypeError):
        TOLERANCES["reconstruction", torch.float32] = 1.0
    with pytest.raises(OptionError, match=r"no tolerance stands for 'law' in torch.int64"):
        tolerance("law", torch.int64)


JUDGES = ("checks", "mixer_laws", "laws", "host_laws", "conformance", "promote", "rounding", "margins")


@pytest.mark.parametrize("module", ["call.exactness", *(f"testing.{name}" for name in JUDGES)])
def test_nothing_that_judges_reads_the_environment(module: str) -> None:
    source = Path(unilinattn.__file__).parent.joinpath(*module.split(".")).with_suffix(".py").read_text()
    assert re.findall(r"os\.environ|getenv|import os", source) == []


def test_the_error_is_that_of_the_worst_sequence_and_infinite_for_nan() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    assert relative_error(expected + torch.tensor([[0.0], [0.1]]), expected) == pytest.approx(0.1 * 2**0.5 / 0.5)
    assert relative_error(expected, expected) == 0
    assert relative_error(torch.zeros(2, 2), torch.zeros(2, 2)) == 0
    assert relative_error(torch.ones(2, 2), torch.zeros(2, 2)) == float("inf")
    assert relative_error(expected * torch.nan, expected) == float("inf")
    assert relative_error(expected, expected * torch.inf) == float("inf")
    assert relative_error(expected * torch.inf, expected * torch.inf) == float("inf")


FORCED = {
    "float": lambda x: x.float(),
    "to, by position": lambda x: x.to(torch.float32),
    "to, by name": lambda x: x.to(dtype=torch.float32),
    "to, with a device": lambda x: x.to("cpu", torch.float32),
    "type": lambda x: x.type(torch.float32),
    "type by a string": lambda x: x.type("torch.FloatTensor"),
    "type by a tensor type": lambda x: x.type(torch.FloatTensor),
    "a factory": lambda x: torch.zeros(2, dtype=torch.float32),
    "a factory without a dtype": lambda x: torch.ones(2),
    "a new tensor": lambda x: x.new_zeros(2, dtype=torch.float32),
    "a softmax": lambda x: torch.softmax(x, -1, dtype=torch.float32),
    "a functional softmax": lambda x: nn.functional.softmax(x, dim=-1, dtype=torch.float32),
    "a softmax by position": lambda x: x.softmax(-1, torch.float32),
    "a sum": lambda x: x.sum(dtype=torch.float32),
    "complex": lambda x: x.to(torch.complex64).real,
}


@pytest.mark.parametrize("how", FORCED)
def test_a_promoted_host_cannot_force_float32(how: str) -> None:
    x = torch.randn(3, dtype=torch.float64)
    assert FORCED[how](x).dtype == torch.float32
    with promoted():
        assert FORCED[how](x).dtype == torch.float64
    with pytest.raises(KeyboardInterrupt), promoted():
        raise KeyboardInterrupt
    assert FORCED[how](x).dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


def test_promotion_does_not_change_other_dtypes() -> None:
    x = torch.arange(3)
    with promoted():
        assert x.to(torch.bfloat16).dtype == torch.bfloat16
        assert x.half().dtype == torch.float16
        assert x.long().dtype == torch.int64
        assert torch.tensor([1, 2]).dtype == torch.int64


def test_a_promoted_host_has_no_float32_error() -> None:
    model, x = host("mamba2").model().double(), host("mamba2").inputs()
    forced = model(x, use_cache=False).logits
    with promoted():
        exact = model(x, use_cache=False).logits
    assert exact.dtype == torch.float64
    assert 1e-9 < relative_error(forced, exact) < 1e-4


@pytest.mark.parametrize("name", ["mamba", "mamba2", "s4d", "llama, grouped queries", "bert"])
def test_the_rounding_of_a_host_is_a_few_units_of_its_dtype(name: str) -> None:
    model, x, unit = host(name).model(), host(name).inputs(), torch.finfo(torch.float32).eps
    with left_as_found(model):
        measured = host_rounding(model, x)
    assert len(measured) == host(name).layers
    assert all(0.2 * unit < rounding < 40 * unit for rounding in measured)
    # After `.double()`, only hosts that cast to float32 internally still round to float32.
    forced = max(host_rounding(model.double(), x))
    assert forced < 1e-14 if name not in ("mamba", "mamba2") else 0.01 * unit < forced < 10 * unit


def test_an_error_above_the_rounding_of_the_host_is_refused() -> None:
    entry = host("mamba2")
    layer, _ = trace(entry.model(), entry.inputs()).layers
    rounding, _ = host_rounding(entry.model(), entry.inputs())
    limit = rounding_limit(rounding, torch.float32)
    assert 5e-7 < limit < 5e-6
    HOST_LAWS["reconstruction"](layer.operator, limit)
    # Far below a fixed limit such as 1e-5.
    layer.operator.output.mul_(1 + 3 * limit)
    with pytest.raises(LawViolation, match="relative error"):
        HOST_LAWS["reconstruction"](layer.operator, limit)


def test_the_rounding_is_measured_without_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = host("mamba").model(), host("mamba").inputs()
    measured = host_rounding(model, x)
    monkeypatch.setattr(Layer, "flow", None)
    assert host_rounding(model, x) == measured


def test_limits_are_at_least_one_unit_and_at_most_half_of_the_digits() -> None:
    assert rounding_limit(0.0, torch.float64) == pytest.approx(1e-10, rel=1e-3)
    assert rounding_limit(0.0, torch.float32) == pytest.approx(8 * torch.finfo(torch.float32).eps, rel=1e-3)
    assert rounding_limit(1e-6, torch.float32) == pytest.approx(8e-6, rel=1e-3)
    # An error of more than half of the digits is not rounding.
    for dtype in (torch.float32, torch.float64):
        assert rounding_limit(0.1, dtype) == torch.finfo(torch.float32).eps ** 0.5


def test_every_comparison_of_the_kit_is_recorded() -> None:
    x = torch.ones(1, 3)
    with recorded_margins() as outer, recorded_margins() as inner:
        require_close("apply", x, x, 1e-3, "first")
        with pytest.raises(LawViolation):
            require_close("adjoint", 1.5 * x, x, 1e-3, "second")
    require_close("apply", x, x, 1e-3, "behind")
    assert inner == outer == [Margin("apply", "first", 0.0, 1e-3), Margin("adjoint", "second", 0.5, 1e-3)]


@pytest.mark.parametrize(
    ("explanation", "pairs"),
    [
        ("1.2e-07 <= 2e-06\n +  where 1.2e-07 = relative_error(a, b)", [(1.2e-07, 2e-06)]),
        ("tensor(3.0e-08) < 1e-06", [(3e-08, 1e-06)]),
        ("1e-09 < 2e-07 < 0.0001", [(1e-09, 2e-07), (2e-07, 1e-4)]),
        ("1.5 == 1.0 ± 1.0e-06", [(0.5, 1e-06)]),
        ("3 <= 7", []),
        ("'a' == 'a'", []),
    ],
)
def test_margins_of_assertions_are_parsed(explanation: str, pairs: list[tuple[float, float]]) -> None:
    assert margins.read(explanation) == pairs


def test_hosts_have_unique_names() -> None:
    assert len({entry.name for entry in HOSTS}) == len(HOSTS)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "s4d", "gpt2", "bert"])
def test_random_weights_depend_only_on_the_seed_and_none_is_zero(name: str) -> None:
    entry = host(name)
    state = torch.random.get_rng_state()
    first, again, other = entry.model(3), entry.model(3), entry.model(4)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(entry.inputs(), entry.inputs())
    for (path, one), two, three in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), path
        assert not torch.equal(one, three), path
        assert float(one.std()) > 1e-2, path
        assert float((one == 0).float().mean()) == 0, path
