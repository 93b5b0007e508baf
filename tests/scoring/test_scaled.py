"""Products of maps beyond the range of float32, against products in float64 with the logarithm of their scale apart."""

from collections.abc import Callable, Sequence
from functools import cache
from math import frexp, inf, ldexp
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM

import unilinattn as ula
from tests.subnormal import counted, subnormals
from unilinattn.kernels.exponents import times_power_of_two
from unilinattn.results.attribution import Attribution
from unilinattn.scoring.scaled import ScaledProduct
from unilinattn.tracing.trace import Trace

LAYERS, LENGTH = 48, 12
RANGE = torch.finfo(torch.float32)


@cache
def deep(padding: str = "none") -> Trace:
    """48 random Mamba layers, whose product exceeds 2**256."""
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=LAYERS, state_size=8, initializer_range=1.0)
    model = MambaForCausalLM(config).eval()
    ids, mask = torch.randint(32, (2, LENGTH)), torch.ones(2, LENGTH, dtype=torch.long)
    if padding != "none":
        mask[1, :4] = 0
        mask = mask if padding == "left" else mask.flip(1)
    return ula.trace(model, {"input_ids": ids, "attention_mask": mask})


def log_product(maps: Sequence[Tensor], identity: bool = True) -> tuple[list[list[list[float]]], list[list[int]]]:
    """Return the rows of A_n ... A_1 in float64, each with its largest entry in [0.5, 1), and their exponents."""
    batch, length, _ = maps[0].shape
    rows = [[[float(i == j) for j in range(length)] for i in range(length)] for _ in range(batch)]
    exponents = [[0] * length for _ in range(batch)]
    for each in maps:
        a = each.double().tolist()
        for b in range(batch):
            new, sizes = [], []
            for i in range(length):
                weights = [a[b][i][j] + (identity and i == j) for j in range(length)]
                reach = [frexp(w)[1] + exponents[b][j] for j, w in enumerate(weights) if w and any(rows[b][j])]
                top = max(reach, default=0)
                parts = [ldexp(w, max(exponents[b][j] - top, -2000)) for j, w in enumerate(weights)]
                row = [sum(parts[j] * rows[b][j][k] for j in range(length)) for k in range(length)]
                shift = frexp(max(map(abs, row)))[1]
                new.append([ldexp(value, -shift) for value in row])
                sizes.append(top + shift)
            rows[b], exponents[b] = new, sizes
    return rows, exponents


def maps_of(trace: Trace) -> list[Tensor]:
    """The float32 maps of the layers, without pairs of padding."""
    return [layer.operator.matrix() * pairs_of(trace) for layer in trace.layers]


def pairs_of(trace: Trace) -> Tensor:
    mask = trace.layers[0].mask
    return torch.ones(()) if mask is None else (mask[:, :, None] & mask[:, None, :]).float()


@cache
def expected(padding: str) -> tuple[Tensor, Tensor]:
    rows, exponents = log_product(maps_of(deep(padding)))
    values = torch.tensor(rows, dtype=torch.float64)
    return values * pairs_of(deep(padding)), torch.tensor(exponents)


def require_scaled(result: Attribution, values: Tensor, exponents: Tensor) -> None:
    """Check scores * 2**log2_scale row by row, relative to the largest entry of the row."""
    scale = result.extras["log2_scale"]
    assert scale.shape == result.scores.shape[:-1]
    assert result.scores.isfinite().all()
    difference = (exponents - scale).clamp(-60, 60).exp2().unsqueeze(-1) * values - result.scores.double()
    assert float(difference.abs().max()) < 1e-4
    real = values.abs().amax(-1) > 0
    assert (result.scores.abs().amax(-1)[real] >= 0.5).all()
    assert (result.scores.abs() < 1).all()


@pytest.mark.long
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("method", ["rollout", "raw"])
def test_48_random_layers_have_a_scaled_product(method: str, padding: str) -> None:
    options = {"compose": "rollout"} if method == "raw" else {}
    values, exponents = expected(padding)
    assert int(exponents.max()) > 2 * 128
    require_scaled(ula.explain(deep(padding), method=method, **options), values, exponents)
    last = [int(row.nonzero().max()) for row in values.abs().sum(-1)]
    row = ula.explain(deep(padding), method=method, target=-1, **options)
    require_scaled(row, values[range(2), last], exponents[range(2), last])


@pytest.mark.long
def test_results_with_a_scale_are_selected_saved_merged_and_drawn(tmp_path: Path) -> None:
    whole, row = (ula.explain(deep(), method="rollout", target=target) for target in (None, -1))
    for result in (whole, row):
        scale = result.extras["log2_scale"]
        assert torch.equal(result.select(batch=1).extras["log2_scale"], scale[1])
        loaded = Attribution.load(result.save(tmp_path / "scores.safetensors"))
        assert torch.equal(loaded.extras["log2_scale"], scale)
        assert f"2**{scale.max():.0f}" in repr(result)
        merged = result.spans([[(0, 5)], [(2, 4)]], unit="tokens")
        assert merged.extras["log2_scale"].shape == merged.scores.shape[:-1]
        result.plot()
        assert "log2_scale" in result.to_html()
    # The query of a span is that of its last token.
    assert float(whole.spans([[(0, 5)], [(2, 4)]], unit="tokens").extras["log2_scale"][0, 0]) == float(
        whole.extras["log2_scale"][0, 4]
    )


@pytest.mark.long
def test_normalised_products_need_no_scale() -> None:
    assert "log2_scale" not in ula.explain(deep(), method="rollout", normalize="rows").extras
    for method in ("alti", "latim"):
        for target in (None, -1):
            result = ula.explain(deep(), method=method, compose="rollout", target=target)
            assert "log2_scale" not in result.extras
            assert torch.allclose(result.scores.sum(-1), torch.ones(()), atol=1e-3)
            assert subnormals(result.scores) == 0


@cache
def shallow(dtype: torch.dtype, head: float) -> Trace:
    """Two Mamba layers; `head` multiplies the unembedding, and so the gradients of logits."""
    torch.manual_seed(1)
    config = MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=2, state_size=4, tie_word_embeddings=False)
    model = MambaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        model.lm_head.weight.mul_(head)
    return ula.trace(model.to(dtype), torch.randint(8, (2, 5)))


GRADIENTS: list[tuple[str, float, dict[str, Any]]] = [
    ("attribution", 1e25, {}),
    ("attribution", 1e25, {"gradient": "per-head"}),
    ("contribution", 1e25, {}),
    ("attention_grad", 1e25, {}),
    # The maps are weighted by the gradient and by the relevance, which has its size.
    ("transformer_attribution", 1e15, {}),
]


def last_logits(output: Any) -> Tensor:
    return output.logits[:, -1].sum(-1)


@pytest.mark.parametrize(("method", "head", "options"), GRADIENTS, ids=str)
@pytest.mark.parametrize(
    "chosen",
    [{"logit": 3}, {"logit": 3, "target": -1}, {"logit": last_logits}],
    ids=["a logit", "a target", "a function"],
)
def test_products_weighted_by_large_gradients_are_scaled(
    method: str, head: float, options: dict[str, Any], chosen: dict[str, Any]
) -> None:
    result = ula.explain(shallow(torch.float32, head), method=method, **chosen, **options)
    exact = ula.explain(shallow(torch.float64, head), method=method, **chosen, **options).scores
    largest = exact.abs().amax(-1)
    assert largest.max() > RANGE.max
    scaled = result.scores.double() * result.extras["log2_scale"].exp2().unsqueeze(-1)
    assert float(((scaled - exact).abs().amax(-1) / largest).max()) < 1e-3


def plain(maps: Sequence[Tensor], identity: bool) -> Tensor:
    """The product as float32 matrices, without a scale."""
    rho = torch.eye(maps[0].shape[-1]).expand_as(maps[0]).contiguous()
    for each in maps:
        rho = torch.baddbmm(rho, each, rho) if identity else each @ rho
    return rho


def multiplied(maps: Sequence[Tensor], identity: bool) -> tuple[Tensor, Tensor | None]:
    product = ScaledProduct(torch.eye(maps[0].shape[-1]).repeat(maps[0].shape[0], 1, 1))
    for each in maps:
        if identity:
            product.add_maps(lambda each=each: [(slice(None), each.clone())])
        else:
            product.replace_by_map(each.clone())
    scale = product.finish()
    return product.values, scale


def random_maps(count: int = 10) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(3, 7, 7, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("identity", [True, False])
def test_products_within_range_are_the_plain_ones_to_the_bit(identity: bool) -> None:
    values, scale = multiplied(random_maps(), identity)
    assert scale is None
    assert torch.equal(values, plain(random_maps(), identity))


@pytest.mark.parametrize("powers", [[60] * 10, [-60] * 10, [90] * 5 + [-90] * 5, [-90] * 5 + [90] * 5], ids=str)
def test_maps_times_powers_of_two_have_the_digits_of_the_maps(powers: list[int]) -> None:
    maps = random_maps()
    values, scale = multiplied([each * 2.0**by for each, by in zip(maps, powers, strict=True)], identity=False)
    reference = plain(maps, identity=False)
    if sum(powers) == 0:
        assert scale is None
        assert torch.equal(values, reference)
        return
    assert scale is not None
    assert torch.equal(times_power_of_two(values, scale.long().unsqueeze(-1) - sum(powers)), reference)


def test_a_sequence_within_range_keeps_its_bits_beside_one_beyond_it() -> None:
    maps = random_maps()
    for each in maps:
        each[1] *= 1e12
    values, scale = multiplied(maps, identity=True)
    assert scale is not None
    assert scale[[0, 2]].eq(0).all()
    assert scale[1].gt(300).all()
    assert torch.equal(values[[0, 2]], plain(random_maps(), identity=True)[[0, 2]])
    rows, exponents = (torch.tensor(part) for part in log_product(maps))
    assert torch.equal(scale[1], exponents[1].double())
    assert torch.allclose(values[1].double(), rows[1].double(), atol=1e-5)


def test_rows_of_different_size_keep_their_entries() -> None:
    # The first row of a causal product stays at one while the last one passes 2**400.
    maps = [torch.diag(torch.tensor([0.0, 7.0, 2.0**40])).unsqueeze(0) + torch.ones(3, 3).tril(-1) for _ in range(10)]
    values, scale = multiplied(maps, identity=True)
    rows, exponents = (torch.tensor(part) for part in log_product(maps))
    assert scale is not None
    assert torch.equal(scale, exponents.double())
    assert torch.allclose(values.double(), rows.double(), rtol=1e-6)
    assert scale[0, 2] > 399 and scale[0, 0] == 1


def test_no_product_reads_subnormal_numbers() -> None:
    maps = [torch.eye(7).expand(3, 7, 7) + 1e-15 * torch.ones(3, 7, 7).tril(-1) for _ in range(8)]
    product = ScaledProduct(torch.eye(7).repeat(3, 1, 1))

    def multiply(step: Callable[[Tensor], None]) -> Callable[[], None]:
        return lambda: [step(each.clone()) for each in maps] and None

    assert not counted(multiply(product.replace_by_map)).found
    product = ScaledProduct(torch.eye(7).repeat(3, 1, 1) * 1e-15)
    assert not counted(multiply(lambda each: product.add_maps(lambda: [(slice(None), each * 1e-25)]))).found
    row = ScaledProduct(torch.ones(3, 1, 7) * 1e-3)
    assert not counted(multiply(lambda each: row.left_multiply(lambda values: values @ (each * 1e-12)))).found
    assert row.finish() is not None


@pytest.mark.parametrize("wrong", [inf, float("nan")])
def test_maps_that_are_not_finite_stay_so(wrong: float) -> None:
    maps = random_maps()
    maps[3][0, 2, 2] = wrong
    assert not multiplied(maps, identity=True)[0].isfinite().all()
