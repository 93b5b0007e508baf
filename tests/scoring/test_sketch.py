"""Estimated norms of all pairs: `latim` with a sketch."""

import pytest
import torch

import unilinattn as ula
from tests.hosts import named
from unilinattn.errors import OptionError, UncoveredError
from unilinattn.scoring.sketch import sign_sketch
from unilinattn.testing.hosts import HOSTS

NAMES = ("mamba", "mamba2", "llama, grouped queries")


@pytest.fixture(scope="module", params=NAMES)
def trace(request):
    torch.manual_seed(0)
    host = named(request.param)
    return ula.trace(host.model().double().eval(), host.inputs(), progress=False)


def latim(trace, **options):
    return ula.explain(trace, method="latim", progress=False, **options)


def vectors(layer):
    """T_ij x_j as (batch, query, key, out)."""
    return layer.operator.contributions(torch.arange(layer.output.shape[1]))


def test_estimates_are_the_norms_of_the_projected_vectors(trace) -> None:
    result = latim(trace, sketch=5, seed=3)
    for scores, layer in zip(result.scores, trace.layers, strict=True):
        sketch = sign_sketch(5, layer.output.shape[-1], 3, layer.output)
        assert torch.equal(sketch.abs(), torch.full_like(sketch, 5**-0.5))
        expected = (vectors(layer) @ sketch.mT).norm(dim=-1)
        torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-12)
        other = (vectors(layer) @ sign_sketch(5, sketch.shape[1], 4, sketch).mT).norm(dim=-1)
        assert not torch.allclose(scores, other, rtol=1e-2)


def test_the_largest_keys_of_each_row_are_exact(trace) -> None:
    plain, estimated, mended = latim(trace), latim(trace, sketch=3), latim(trace, sketch=3, exact_keys=2)
    chosen = torch.zeros_like(plain.scores, dtype=torch.bool)
    chosen.scatter_(-1, estimated.scores.topk(2).indices, True)
    torch.testing.assert_close(mended.scores[chosen], plain.scores[chosen], rtol=1e-9, atol=1e-12)
    assert torch.equal(mended.scores[~chosen], estimated.scores[~chosen])
    assert not torch.allclose(estimated.scores[chosen], plain.scores[chosen], rtol=1e-2)


def test_all_keys_exact_is_the_plain_result_without_a_standard_error(trace) -> None:
    keys = trace.layers[0].output.shape[1]
    plain, mended = latim(trace), latim(trace, sketch=2, exact_keys=keys)
    torch.testing.assert_close(mended.scores, plain.scores, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(mended.extras["bias"], plain.extras["bias"])
    torch.testing.assert_close(mended.extras["cancellation"], plain.extras["cancellation"], rtol=1e-5, atol=1e-8)
    assert not mended.extras["standard_error"].any()


def test_the_squared_norm_is_unbiased_with_the_stated_variance() -> None:
    size, draws = 8, 2000
    v = torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = v.square().sum()
    found = torch.stack([(sign_sketch(size, 20, seed, v) @ v).square().sum() for seed in range(draws)]) / whole
    variance = 2 / size * (1 - v.pow(4).sum() / whole**2)
    assert abs(float(found.mean()) - 1) < 4 * float(variance / draws) ** 0.5
    assert float(found.var()) == pytest.approx(float(variance), rel=0.15)


@pytest.mark.long
def test_standard_errors_are_those_of_repeated_sketches() -> None:
    torch.manual_seed(0)
    host = named("mamba2")
    trace = ula.trace(host.model().double().eval(), host.inputs(), progress=False)
    plain = latim(trace).scores
    draws = [latim(trace, sketch=64, seed=seed) for seed in range(30)]
    measured = torch.stack([(one.scores - plain).square() for one in draws]).mean(0).mean(-1).sqrt()
    stated = torch.stack([one.extras["standard_error"] for one in draws]).mean(0)
    # The stated error is an upper bound, which is reached by vectors with many equal entries.
    assert bool((measured < 1.2 * stated).all())
    assert bool((measured > 0.4 * stated)[stated > 0].all())


def test_the_options_are_stored() -> None:
    host = HOSTS[0]
    result = latim(ula.trace(host.model().eval(), host.inputs(), progress=False), sketch=4, seed=7, exact_keys=1)
    assert {name: result.options[name] for name in ("sketch", "seed", "exact_keys")} == {
        "sketch": 4,
        "seed": 7,
        "exact_keys": 1,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sketch": 4, "p": 1}, "estimates the l2 norms of exact contributions: leave p out"),
        ({"sketch": 4, "residual": True}, "leave residual out"),
        ({"sketch": 4, "compose": "rollout"}, "leave residual out|leave compose out"),
        ({"sketch": 4, "target": -1}, "the row of a target takes linear time without it; leave sketch or target out"),
        ({"exact_keys": 2}, "exact_keys=2 is of estimated norms; give sketch too"),
        ({"sketch": 0}, "greater than or equal to 1"),
        ({"sketch": 4, "by_head": True}, "leave heads and by_head out"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message) -> None:
    host = HOSTS[0]
    trace = ula.trace(host.model().eval(), host.inputs(), progress=False)
    with pytest.raises(OptionError, match=message):
        latim(trace, **options)


def test_a_layer_with_stages_after_its_projection_is_refused() -> None:
    host = named("s4d")
    trace = ula.trace(host.model().eval(), host.inputs(), progress=False)
    with pytest.raises(UncoveredError, match="has stages after its output projection, so its norms"):
        latim(trace, sketch=4)
