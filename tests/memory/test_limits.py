"""`max_memory`: requests above it are refused before allocation; linear passes are linear at their peak."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import unilinattn as ula
from tests.laws.structures import STRUCTURES, Draw, Structure
from tests.memory.hosts import NAMES, linear, traced
from unilinattn.errors import FactorError, InputError, MemoryLimitError, OptionError
from unilinattn.memory import allowed, max_memory, reserved
from unilinattn.mixers import DiagonalDecay
from unilinattn.scoring.gradient_maps import weighted_blocks
from unilinattn.testing import mixer_passes
from unilinattn.testing.checks import matrix_free, without_matrices
from unilinattn.testing.hosts import host
from unilinattn.testing.peak import peak_of
from unilinattn.tracing.trust import require_exact

LENGTH = 192
MAP = 4 * LENGTH**2


@pytest.mark.parametrize(
    ("method", "options", "count", "way"),
    [
        ("raw", {}, 2, r"target=, for fewer layers with layers=\[\.\.\.\], or allow more with max_memory=294912"),
        ("latim", {}, 2, "target="),
        ("alti", {}, 2, "target="),
        ("raw", {"layers": "mean"}, 1, "target=, or allow more"),
        ("rollout", {}, 1, "target=, or allow more with max_memory=147456"),
        ("attention_grad", {}, 1, "target="),
        ("alti", {"compose": "rollout"}, 1, "target="),
    ],
    ids=str,
)
def test_results_above_the_limit_are_refused_with_their_sizes(
    method: str, options: dict[str, Any], count: int, way: str
) -> None:
    trace = traced("mamba", LENGTH)
    # Cache the errors of the layers, whose computation takes two vectors per token.
    require_exact(trace.layers)
    stream = trace.layers[0].output.nbytes

    def refused() -> None:
        axes = "2 x 1 x 192 x 192" if count == 2 else "1 x 192 x 192"
        message = rf"{method}: the result .*, {axes} numbers of 4 bytes, takes .* KiB, and max_memory allows .*{way}"
        with pytest.raises(MemoryLimitError, match=message):
            ula.explain(trace, method=method, max_memory=count * MAP - 1, **options)

    assert peak_of(refused).peak < 2.1 * stream


def test_maps_that_are_kept_for_all_rows_are_refused_before_the_result() -> None:
    message = (
        r"attribution without a target keeps the maps of 2 layers, .* 288.0 KiB, .*target=, or .*max_memory=294912"
    )
    with pytest.raises(MemoryLimitError, match=message):
        ula.explain(traced("mamba", LENGTH), method="attribution", max_memory=2 * MAP - 1)


def test_a_matrix_above_the_limit_is_refused() -> None:
    op = traced("mamba", LENGTH).layers[0].operator
    message = r"the core matrix of .* with heads=None, 1 x 24 x 192 x 192 numbers of 4 bytes, takes 3.4 MiB"

    def refused() -> None:
        with max_memory(1 << 20), pytest.raises(MemoryLimitError, match=message):
            op.matrix(heads=None)

    assert peak_of(refused).peak == 0
    with max_memory(1 << 20):
        assert op.matrix(heads=slice(0, 2)).shape == (1, 2, LENGTH, LENGTH)


def test_allocated_bytes_count_towards_the_limit() -> None:
    with max_memory(1000), reserved(600, "one thing", "take less"):
        assert allowed() == 400
        with pytest.raises(MemoryLimitError, match=r"another takes 500 bytes in addition to 600 .* max_memory=1100"):
            reserved(500, "another", "take less").__enter__()
    assert allowed() > 1000


@pytest.mark.parametrize("limit", [1 << 20, 3 << 19])
@pytest.mark.parametrize(("scope", "heads"), [("core", "mean"), ("unified", "mean"), ("core", "max"), ("core", None)])
@pytest.mark.parametrize("name", NAMES)
def test_blocks_and_tiles_stay_within_the_limit(name: str, scope: str, heads: Any, limit: int) -> None:
    trace = traced(name, LENGTH)
    op = trace.layers[0].operator
    with max_memory(limit):
        for run in (
            lambda: [None for _ in op.row_blocks(scope=scope, heads=heads)],
            lambda: [None for _ in op.pairwise().tiles(True)],
        ):
            assert peak_of(run).peak <= limit + linear(trace)


@pytest.mark.parametrize("structure", [s for s in STRUCTURES if s.linear], ids=lambda s: s.name)
def test_passes_of_mixers_are_linear_at_their_peak(structure: Structure) -> None:
    def peaks(length: int) -> dict[str, int]:
        mixer = matrix_free(structure.mixer(Draw(0, 1, length, torch.float32)), "peak")
        return {name: peak_of(run).peak for name, run in mixer_passes(mixer).items()}

    short, long = peaks(512), peaks(1024)
    for name, bytes_ in short.items():
        assert long[name] <= 2.3 * bytes_, name


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpt2"])
def test_passes_of_operators_are_linear_at_their_peak(name: str) -> None:
    def peaks(length: int) -> dict[str, int]:
        op = without_matrices(traced(name, length).layers[0].operator, "peak")
        uses: dict[str, Callable[[], Any]] = {
            "apply": lambda: op.apply(op.inputs),
            "adjoint": lambda: op.adjoint(op.output),
            "rows": lambda: op.rows([-1]),
            "left_multiply": lambda: op.left_multiply(op.output.new_ones(1, 1, length)),
        }
        return {use: peak_of(run).peak for use, run in uses.items()}

    short, long = peaks(256), peaks(512)
    for use, bytes_ in short.items():
        assert long[use] <= 2.3 * bytes_, use


@pytest.mark.parametrize("name", ["mamba", "mamba2", "s4d"])
def test_attribution_of_a_target_allocates_vectors_and_blocks(name: str) -> None:
    trace = traced(name, LENGTH)
    grads = [torch.ones_like(layer.output) for layer in trace.layers]
    limit = 1 << 19
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(trace), "gradients", lambda *_: iter([grads]))
        patch.setattr(type(trace.layers[0]), "pullback", lambda _: lambda grad: grad)
        peak = peak_of(lambda: ula.explain(trace, method="attribution", target=-1, max_memory=limit)).peak
    assert peak <= limit + linear(trace)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "gpt2"])
def test_maps_weighted_by_gradients_are_computed_in_blocks(name: str) -> None:
    trace, limit = traced(name, LENGTH), 1 << 19
    layer = trace.layers[0]
    gradients = layer.core_pullback()(torch.ones_like(layer.output))

    def blocks() -> None:
        for _ in weighted_blocks(trace, layer, [gradients], "clamp"):
            pass

    with max_memory(limit):
        assert peak_of(blocks).peak <= limit + linear(trace)
    with max_memory(1000), pytest.raises(MemoryLimitError, match=r"the weighted map of .*, and max_memory allows"):
        blocks()


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: s.name)
def test_factors_in_any_layout_work(structure: Structure) -> None:
    draw = Draw(0, 2, 70, torch.float64)
    factors = structure.factors(draw)
    build = structure.bind(draw)
    plain = build(**factors)
    strided = build(**{name: torch.stack([f, f], -1)[..., 0] for name, f in factors.items()})
    turned = build(**{name: f.mT.contiguous().mT if f.ndim > 1 else f for name, f in factors.items()})
    for mixer in (strided, turned):
        for name, run in mixer_passes(plain).items():
            assert torch.allclose(mixer_passes(mixer)[name](), run(), rtol=1e-12, atol=1e-12), name
        assert torch.allclose(mixer.tile(), plain.tile(), rtol=1e-12, atol=1e-12)
        for one, two in zip(mixer.reduced_rows(32), plain.reduced_rows(32), strict=True):
            assert torch.allclose(one, two, rtol=1e-12, atol=1e-12)


def test_expanded_factors_and_values_work() -> None:
    one = torch.randn(1, 1, 1, 3, dtype=torch.float64)
    decay = -torch.rand(1, 1, 4, 3, dtype=torch.float64)
    shapes = [(2, 70, 1, 3), (2, 70, 1, 3), (2, 70, 4, 3)]
    wide = [factor.expand(shape) for factor, shape in zip((one, one, decay), shapes, strict=True)]
    expanded, plain = DiagonalDecay(*wide), DiagonalDecay(*(factor.clone() for factor in wide))
    value = torch.randn(2, 1, 4, 1, dtype=torch.float64).expand(-1, 70, -1, 2)
    assert torch.equal(expanded.apply(value), plain.apply(value.clone()))
    assert torch.equal(expanded.adjoint(value), plain.adjoint(value.clone()))
    for actual, reference in zip(expanded.reduced_rows(32), plain.reduced_rows(32), strict=True):
        assert torch.equal(actual, reference)


@pytest.mark.parametrize("heads", [24, -25, [0, 24]])
def test_heads_out_of_range_are_refused_before_anything_is_computed(heads: Any) -> None:
    op = traced("mamba", LENGTH).layers[0].operator

    def refused() -> None:
        for use in (lambda: op.rows(-1, heads=heads), lambda: op.matrix(heads=heads)):
            with pytest.raises(OptionError, match=r"out of range: this scope has 24 heads, 0 to 23"):
                use()

    assert peak_of(refused).peak < 1000


def test_different_devices_are_refused() -> None:
    model, ids = host("mamba").model(), host("mamba").inputs()
    with pytest.raises(InputError, match=r"input_ids is on meta, and MambaForCausalLM is on cpu; move one of them"):
        ula.trace(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | {"input_ids": ids.to("meta")})
    op = ula.trace(model, ids).layers[0].operator
    with pytest.raises(InputError, match=r"is on cpu, got port 'x' on meta"):
        op.apply(op.inputs["x"].to("meta"))
    with pytest.raises(InputError, match=r"for rows, got \(2, 1, 12\)"):
        op.left_multiply(torch.ones(2, 1, 12))
    query, decay = torch.ones(1, 4, 1, 2), torch.zeros(1, 4, 1, 2)
    with pytest.raises(FactorError, match=r"several devices: 'query' on cpu, 'key' on meta"):
        DiagonalDecay(query, query.to("meta"), decay)


@pytest.mark.parametrize("shape", [(1, 0, 12), (0, 5, 12)])
def test_inputs_without_a_token_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"inputs_embeds has shape .* at least one sequence of one token"):
        ula.trace(host("mamba").model(), {"inputs_embeds": torch.zeros(shape)})
