"""Scores by head against the host's modules, of which all but one head's columns of the output projection are zero."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unilinattn as ula
from tests.methods.hosts import (
    BATCH,
    HOSTS,
    LENGTH,
    PART,
    close,
    part_added,
    real_map,
    real_tokens,
    references,
    traced,
)
from unilinattn.errors import OptionError, UncoveredError
from unilinattn.memory import max_memory
from unilinattn.methods import alti, latim, raw
from unilinattn.testing.hosts import host
from unilinattn.testing.promote import promoted
from unilinattn.tracing.trace import trace

HEADS = {"mamba": 12, "mamba2": 4, "s4d": 6, "llama": 4, "gpt2": 2, "delta rule": 2}
"""Heads of each host; a head of Mamba-1 and of S4D is one channel wide."""
NAMES = list(HEADS)
CASES = [
    *((name, "none") for name in NAMES),
    *(pytest.param(name, "left", marks=pytest.mark.slow) for name in NAMES),
]


@dataclass(frozen=True)
class Parts:
    """The vectors T^h_i(x_j) of a layer, (head, batch, query, key, out), exact and for f = SiLU."""

    shares: Tensor
    split: Tensor | None


def only_head(mixer: nn.Module, name: str, head: int) -> None:
    """Set the columns of the output projection to zero, but for those that read a head."""
    projection = HOSTS[name].projection(mixer)
    # Both halves of S4D's projection read the channels, and the second is the frozen gate.
    weight = {"s4d": lambda w: w.squeeze(-1)[: len(w) // 2], "gpt2": lambda w: w.T}.get(name, lambda w: w)
    columns = weight(projection.weight.data)
    width = columns.shape[1] // HEADS[name]
    columns[:, : head * width] = 0
    columns[:, (head + 1) * width :] = 0


@cache
def parts(name: str, padding: str = "none") -> tuple[Parts, ...]:
    entry, layers = HOSTS[name], []
    for place, whole in enumerate(references(name, padding)):
        given = whole.alpha if name in ("llama", "gpt2") else real_tokens(padding)
        by_head = []
        for head in range(HEADS[name]):
            mixer = entry.mixers(entry.model())[place]
            only_head(mixer, name, head)
            with torch.no_grad(), promoted():
                by_head.append(entry.reference(mixer, whole.input, given))
        split = [each["split_shares"] for each in by_head] if "split_shares" in by_head[0] else None
        layers.append(
            Parts(torch.stack([each["shares"] for each in by_head]), None if split is None else torch.stack(split))
        )
    return tuple(layers)


def norms(shares: Tensor, p: float, padding: str) -> Tensor:
    return torch.linalg.vector_norm(shares, p, dim=-1) * real_map(padding)


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_the_heads_of_the_definition_add_up_to_the_layer(name: str, padding: str) -> None:
    for layer, whole in zip(parts(name, padding), references(name, padding), strict=True):
        assert close(layer.shares.sum(0), whole.shares)
        assert not close(layer.shares[1:].sum(0), whole.shares)


@pytest.mark.parametrize("p", [1, 2.0, float("inf")])
@pytest.mark.parametrize(("name", "padding"), CASES)
def test_latim_is_the_norm_of_each_head_s_vector(name: str, padding: str, p: float) -> None:
    result = latim(traced(name, padding), p=p, by_head=True)
    assert result.dims == ("layer", "batch", "head", "query", "key")
    expected = torch.stack([norms(layer.shares, p, padding).transpose(0, 1) for layer in parts(name, padding)])
    assert close(result.scores, expected)
    assert not close(result.scores, expected.flip(2))
    assert result.heads == tuple(range(HEADS[name]))
    assert result.head_kind == ("channel" if name in ("mamba", "s4d") else "head")
    assert result.completeness_gap is not None and result.completeness_gap <= 1e-10


@pytest.mark.parametrize("chosen", [1, [1], [-1, 0]])
@pytest.mark.parametrize("name", NAMES)
def test_chosen_heads_are_summed_or_kept_apart(name: str, chosen: int | list[int]) -> None:
    places = torch.tensor([chosen] if isinstance(chosen, int) else chosen) % HEADS[name]
    together = latim(traced(name), heads=chosen)
    assert together.dims == ("layer", "batch", "query", "key") and together.heads is None
    expected = [norms(layer.shares[places].sum(0), 2, "none") for layer in parts(name)]
    assert close(together.scores, torch.stack(expected))
    apart = latim(traced(name), heads=chosen, by_head=True)
    assert apart.heads == tuple(places.tolist())
    assert close(apart.scores, latim(traced(name), by_head=True).scores[:, :, places])
    assert together.completeness_gap <= 1e-10 and apart.completeness_gap <= 1e-10


@pytest.mark.parametrize("name", NAMES)
def test_all_heads_together_are_the_layer(name: str) -> None:
    assert close(latim(traced(name), heads=list(range(HEADS[name]))).scores, latim(traced(name)).scores)


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_the_split_activation_has_heads_too(name: str) -> None:
    result = latim(traced(name, "left"), activation="silu", by_head=True)
    split = [layer.split for layer in parts(name, "left")]
    assert close(result.scores, torch.stack([norms(each, 2, "left").transpose(0, 1) for each in split]))
    whole = latim(traced(name, "left"), activation="silu")
    assert close(result.extras["decomposition_error"], whole.extras["decomposition_error"])
    some = latim(traced(name, "left"), activation="silu", heads=[0, 1])
    assert close(some.extras["decomposition_error"], whole.extras["decomposition_error"])


@pytest.mark.parametrize("name", NAMES)
def test_cancellation_is_over_heads_and_keys(name: str) -> None:
    sizes = [torch.linalg.vector_norm(layer.shares, 2, dim=-1).sum((0, 3)) for layer in parts(name)]
    sums = [torch.linalg.vector_norm(layer.shares.sum((0, 3)), 2, dim=-1) for layer in parts(name)]
    expected = torch.stack(sizes) / torch.stack(sums)
    result = latim(traced(name), by_head=True)
    assert close(result.extras["cancellation"], expected)
    assert (expected >= latim(traced(name)).extras["cancellation"] - 1e-12).all()


def units(shares: Tensor, residual: Tensor, y: Tensor, padding: str) -> tuple[Tensor, Tensor]:
    """The shares of pairs (head, key) and of the residual: [||y||_1 - ||y - unit||_1]^+ over their sum."""
    heads = len(shares)
    scores = torch.zeros(BATCH, heads, LENGTH, LENGTH, dtype=torch.float64)
    rest, real = torch.zeros(BATCH, LENGTH, dtype=torch.float64), real_tokens(padding)
    for b in range(BATCH):
        for i in range(LENGTH):
            if not real[b, i]:
                continue

            def gain(vector: Tensor, b: int = b, i: int = i) -> float:
                return max(float(y[b, i].abs().sum() - (y[b, i] - vector).abs().sum()), 0.0)

            for h in range(heads):
                for j in range(LENGTH):
                    scores[b, h, i, j] = gain(shares[h, b, i, j]) if real[b, j] else 0.0
            rest[b, i] = gain(residual[b, i])
            total = scores[b, :, i].sum() + rest[b, i]
            scores[b, :, i] /= total if total > 0 else 1
            rest[b, i] = rest[b, i] / total if total > 0 else 1
    return scores, rest


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_alti_divides_an_output_among_heads_keys_and_the_residual(name: str, padding: str) -> None:
    result = alti(traced(name, padding), by_head=True)
    assert result.dims == ("layer", "batch", "head", "query", "key")
    layers = list(zip(parts(name, padding), references(name, padding), strict=True))
    expected = [units(layer.shares, r.residual, r.residual + r.output, padding) for layer, r in layers]
    assert close(result.scores, torch.stack([scores for scores, _ in expected]))
    assert close(result.extras["residual"], torch.stack([rest for _, rest in expected]))
    sums = result.scores.sum((2, 4)) + result.extras["residual"]
    assert close(sums, real_tokens(padding).expand_as(sums).double())
    # The stream belongs to no key.
    wrong = [units(layer.shares, r.residual * 0, r.residual + r.output, padding)[0] for layer, r in layers]
    assert not close(result.scores, torch.stack(wrong))


@pytest.mark.parametrize("name", NAMES)
def test_cancellation_of_alti_is_over_heads_and_keys_in_l1(name: str) -> None:
    sizes = torch.stack([layer.shares.abs().sum((0, 3, 4)) for layer in parts(name)])
    sums = torch.stack([layer.shares.sum((0, 3)).abs().sum(-1) for layer in parts(name)])
    result = alti(traced(name), by_head=True)
    assert close(result.extras["cancellation"], sizes / sums)
    chosen = torch.stack([layer.shares[:2].sum(0).abs().sum((2, 3)) for layer in parts(name)])
    sums = torch.stack([layer.shares[:2].sum((0, 3)).abs().sum(-1) for layer in parts(name)])
    assert close(alti(traced(name), heads=[0, 1]).extras["cancellation"], chosen / sums)


@pytest.mark.parametrize("name", NAMES)
def test_alti_of_chosen_heads_and_without_the_stream(name: str) -> None:
    layers = list(zip(parts(name), references(name), strict=True))
    summed = [units(layer.shares[:2].sum(0)[None], r.residual, r.residual + r.output, "none") for layer, r in layers]
    result = alti(traced(name), heads=[0, 1])
    assert result.dims == ("layer", "batch", "query", "key")
    assert close(result.scores, torch.stack([scores[:, 0] for scores, _ in summed]))
    assert close(result.extras["residual"], torch.stack([rest for _, rest in summed]))
    alone = [units(layer.shares[1:2], r.residual * 0, r.output, "none") for layer, r in layers]
    result = alti(traced(name), heads=[1], by_head=True, residual=False)
    assert close(result.scores, torch.stack([scores for scores, _ in alone]))
    assert close(result.extras["residual"], torch.stack([rest for _, rest in alone]))


def test_alti_of_heads_scales_outputs_by_the_residual_multiplier() -> None:
    layer = part_added().layers[0]
    whole, stream = layer.operator.contributions(range(LENGTH)), layer.residual
    assert stream is not None
    result = alti(part_added(), layers=[0], heads=list(range(layer.operator.num_heads())))
    scores, rest = units(PART * whole[None], stream, stream + PART * layer.output, "none")
    assert close(result.scores[0], scores[:, 0]) and close(result.extras["residual"][0], rest)
    unscaled, _ = units(whole[None], stream, stream + PART * layer.output, "none")
    assert not close(result.scores[0], unscaled[:, 0])


@pytest.mark.parametrize("scope", ["core", "mixer", "unified"])
@pytest.mark.parametrize("name", NAMES)
def test_raw_is_the_map_of_each_head(name: str, scope: str) -> None:
    result = raw(traced(name), by_head=True, scope=scope)
    expected = torch.stack([layer.operator.matrix(scope, heads=None) for layer in traced(name).layers])
    assert close(result.scores, expected)
    width = expected.shape[2] // HEADS[name]
    assert result.head_kind == ("channel" if width > 1 or name in ("mamba", "s4d") else "head")
    if scope == "core":
        assert close(result.scores, torch.stack([r.alpha for r in references(name)]))
        assert close(result.scores.mean(2), raw(traced(name)).scores)
    chosen = raw(traced(name), by_head=True, scope=scope, heads=[-1, 0])
    assert chosen.heads == (expected.shape[2] - 1, 0)
    assert close(chosen.scores, expected[:, :, [-1, 0]])


@pytest.mark.parametrize("options", [{"sign": "abs", "normalize": "rows"}, {"discard": 0.4, "normalize": "min-max"}])
def test_the_treatment_of_raw_applies_to_each_head(options: dict[str, Any]) -> None:
    result = raw(traced("mamba2", "left"), by_head=True, **options)
    for head in range(4):
        assert close(result.scores[:, :, head], raw(traced("mamba2", "left"), heads=head, **options).scores)


@pytest.mark.parametrize("limit", [150_000, 300_000])
@pytest.mark.parametrize("method", [raw, latim, alti])
@pytest.mark.parametrize("name", ["mamba", "llama", "s4d", "delta rule"])
def test_a_memory_limit_does_not_change_the_scores(name: str, method: Any, limit: int) -> None:
    whole = method(traced(name), by_head=True)
    with max_memory(limit):
        assert close(method(traced(name), by_head=True).scores, whole.scores)


def test_a_residual_inside_the_module_passes_no_head() -> None:
    """BERT: T^h_i(x_j) = gamma / std_i (I - mean) W_o^h alpha^h_ij W_v^h x_j, and the residual is the input's part."""
    entry = host("bert")
    model = entry.model().double()
    with promoted():
        found = trace(model, entry.inputs())
        layer = found.layers[0]
        assert layer.operator.reconstruction_error() < 1e-10
        scores, shares = (method(found, layers=[0], by_head=True) for method in (latim, alti))
    module, x = model.get_submodule(layer.name), layer.input
    attention, output = module.self, module.output
    alpha = layer.operator.matrix(heads=None)
    value = (x @ attention.value.weight.T).unflatten(-1, (alpha.shape[1], -1))
    path = output.dense.weight.unflatten(1, (alpha.shape[1], -1))
    vectors = torch.einsum("bhij,bjhp,ohp->hbijo", alpha, value, path)
    before = (
        x
        + (alpha @ (value + attention.value.bias.view(value.shape[2:])).transpose(1, 2)).transpose(1, 2).flatten(2)
        @ output.dense.weight.T
    )
    before = before + output.dense.bias
    scale = torch.rsqrt(before.var(-1, correction=0, keepdim=True) + output.LayerNorm.eps) * output.LayerNorm.weight
    vectors = (vectors - vectors.mean(-1, keepdim=True)) * scale[:, :, None]
    real = layer.mask if layer.mask is not None else torch.ones(x.shape[:2], dtype=torch.bool)
    pairs = real[:, :, None] & real[:, None]
    assert close(scores.scores[0], (vectors.norm(dim=-1) * pairs).transpose(0, 1))
    assert scores.completeness_gap <= 1e-10
    around = (x - x.mean(-1, keepdim=True)) * scale
    y = layer.output
    gain = (y.abs() - (y - around).abs()).sum(-1).clamp_min(0)
    each = (y[:, :, None].abs() - (y[:, :, None] - vectors).abs()).sum(-1).clamp_min(0) * pairs
    total = gain + each.sum((0, 3))
    assert close(shares.extras["residual"][0], torch.where(total > 0, gain / total, 1.0) * real)
    assert shares.extras["residual"].max() > 0.01


@pytest.mark.long
def test_layers_with_different_numbers_of_heads_are_refused() -> None:
    found = traced("hybrid")
    for method in ("raw", "latim", "alti"):
        with pytest.raises(UncoveredError, match=rf"{method}: .*mamba has 4 heads and .*self_attn has 2, .* layers="):
            ula.explain(found, method=method, by_head=True, progress=False)
        assert ula.explain(found, method=method, by_head=True, layers=[1], progress=False).sizes["head"] == 2
    # Each layer has these heads.
    assert latim(found, heads=[0, 1]).dims == ("layer", "batch", "query", "key")


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (raw, {"by_head": True, "heads": "max"}, "by_head=True keeps every head, so heads='max' has nothing to reduce"),
        (raw, {"by_head": True, "compose": "rollout"}, "compose='rollout' multiplies maps of whole layers"),
        (alti, {"heads": [0], "compose": "rollout"}, "leave heads out"),
        (latim, {"by_head": True, "layers": "mean"}, "heads of different layers have nothing in common"),
        (latim, {"by_head": True, "residual": True}, "pass through no head; leave residual=True out"),
        (latim, {"heads": 1, "bias": "query"}, "leave bias='query' out"),
        (latim, {"heads": [4]}, r"latim, .*mixer: heads \[4\] are out of range"),
        (alti, {"heads": [1, -3], "by_head": True}, r"heads=\[1, -3\] names a head twice"),
        (alti, {"heads": "mean"}, "alti does not accept heads='mean'"),
        (raw, {"by_head": 1}, "raw does not accept by_head=1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(method: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        method(traced("mamba2"), **options)


@pytest.mark.parametrize("method", ["rollout", "attribution", "alti_logit"])
def test_methods_that_compose_layers_have_no_head_axis(method: str) -> None:
    with pytest.raises(OptionError, match=f"{method} takes no option 'by_head'"):
        ula.explain(traced("mamba2"), method=method, target=-1, by_head=True)
