"""Products over heads and their geometric mean, against their definition in float64."""

import math

import pytest
import torch
from torch import Tensor

import unilinattn as ula
from tests.methods.hosts import close, references, traced
from tests.methods.refused import HOSTS
from unilinattn.errors import ExactnessWarning
from unilinattn.examples import TASKS, load
from unilinattn.kernels.exponents import scaled_product, signed_root, times_power_of_two
from unilinattn.memory import max_memory
from unilinattn.operator.selection import REDUCTIONS
from unilinattn.options import Raw
from unilinattn.scoring.maps import attention_map, attention_rows
from unilinattn.tracing.trace import Trace

LITTLE = 1 << 14
"""Bytes that hold a few channels of a host."""


def geometric_mean(alpha: Tensor) -> Tensor:
    """The root of the size of the product over heads with its sign, entry by entry in float64."""
    batch, heads, queries, keys = alpha.shape
    out = torch.zeros(batch, queries, keys, dtype=torch.float64)
    for b in range(batch):
        for i in range(queries):
            for j in range(keys):
                entries = alpha[b, :, i, j].tolist()
                if all(entries):
                    sign = math.prod(math.copysign(1, entry) for entry in entries)
                    out[b, i, j] = sign * 2 ** (sum(math.log2(abs(entry)) for entry in entries) / heads)
    return out


def shipped() -> Trace:
    return ula.trace(load("induction", "mamba"), TASKS["induction"].sample(1, 0).input_ids[:, :16])


@pytest.mark.parametrize("name", ["mamba", "mamba2", "gpt2", "s4d", "llama"])
def test_the_geometric_mean_is_its_definition(name: str) -> None:
    for at, reference in enumerate(references(name)):
        layer, options = traced(name).layers[at], Raw(heads="geometric-mean")
        rows = torch.arange(reference.alpha.shape[-1]).expand(reference.alpha.shape[0], -1)
        assert close(attention_map(layer, options), geometric_mean(reference.alpha))
        assert close(attention_rows(layer, options, rows), geometric_mean(reference.alpha))
    # The product of an odd number of negative entries is negative.
    assert (geometric_mean(reference.alpha) < 0).any() == (name in ("mamba", "s4d"))


@pytest.mark.parametrize("target", [None, -1])
def test_the_geometric_mean_of_a_shipped_model_does_not_underflow(target: int | None) -> None:
    trace = shipped()
    with pytest.warns(ExactnessWarning, match=r"underflows float32 in 1 of 2 layers .*2\*\*-\d+.*'geometric-mean'"):
        product = ula.explain(trace, method="raw", heads="product", target=target)
    assert (product.scores[0, :, -1 if target is None else slice(None)] == 0).all()
    assert "geometric-mean" in product.warnings[0]
    result = ula.explain(trace, method="raw", heads="geometric-mean", target=target)
    assert not result.warnings
    for scores, layer in zip(result.scores, trace.layers, strict=True):
        expected = geometric_mean(layer.operator.matrix(heads=None).double())
        expected = expected if target is None else expected[:, -1]
        assert torch.allclose(scores.double(), expected, rtol=1e-5, atol=0)
        assert (scores != 0).sum() > scores.numel() / 3
    rollout = ula.explain(trace, method="rollout", heads="geometric-mean", target=target).scores
    assert rollout[..., -1, :-1].abs().max() > 0 if target is None else rollout[:, :-1].abs().max() > 0


@pytest.mark.long
def test_warnings_of_maps_read_layers_whose_tokens_are_pooled() -> None:
    model, inputs = HOSTS["Hiera"]()
    trace = ula.trace(model.eval(), inputs)
    assert len({layer.output.shape[1] for layer in trace.layers}) > 1
    scores = [ula.explain(trace, method="rollout", heads=heads).scores for heads in ("mean", "product")]
    assert scores[0].shape == scores[1].shape and not scores[0].equal(scores[1])


@pytest.mark.parametrize("heads", ["product", "geometric-mean"])
@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_parts_of_the_channels_give_the_same(name: str, heads: str) -> None:
    operator = traced(name).layers[0].operator
    for scope in ("core", "unified"):
        whole = operator.matrix(scope, heads=heads)
        with max_memory(LITTLE):
            parts = torch.cat([block for _, block in operator.row_blocks(scope=scope, heads=heads)], 1)
        assert torch.allclose(parts, whole, rtol=1e-12, atol=0)


def test_factors_that_leave_the_range_on_the_way_give_a_product_within_it() -> None:
    factors = torch.tensor([1e30, 1e30, -1e-30, 1e-30, 1e-38, 3e37, *[2.0] * 300, *[0.5] * 300]).reshape(1, -1, 1)
    # Plain products pass through infinity and zero.
    assert not factors[:, :2].prod(1).isfinite().all()
    product, count = factors.double().prod(1), factors.shape[1]
    assert torch.allclose(times_power_of_two(*scaled_product(factors)).double(), product, rtol=1e-5)
    assert torch.allclose(
        signed_root(scaled_product(factors), count).double(), -(product.abs() ** (1 / count)), rtol=1e-6
    )


def test_the_product_of_64_heads_is_ordered_by_its_logarithms() -> None:
    sizes = torch.rand(1, 64, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e-6 + 1e-9
    heads = sizes.float()
    assert not heads.prod(1).any()
    means = REDUCTIONS["geometric-mean"](heads)
    logarithms = heads.double().log().mean(1)
    assert torch.allclose(means.double().log(), logarithms, rtol=1e-6)
    assert torch.equal(means.argsort(), logarithms.argsort())
    assert (means > torch.finfo(torch.float32).tiny).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_powers_of_two_are_exact(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    least, most = math.frexp(info.tiny)[1] - 1, math.frexp(info.max)[1] - 1
    exponents = torch.arange(least, most + 1)
    expected = torch.tensor([1.5 * 2.0**exponent for exponent in exponents.tolist()], dtype=dtype)
    assert torch.equal(times_power_of_two(torch.full_like(expected, 1.5), exponents), expected)
    far = times_power_of_two(expected[:1], torch.tensor([most - least]))
    assert torch.equal(far, expected[-1:])


def test_a_product_within_range_has_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    assert not ula.explain(traced("gpt2"), method="raw", heads="product").warnings
    assert not [warning for warning in recwarn if "underflows" in str(warning.message)]
