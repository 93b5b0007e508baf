"""`alti` against its definition, on models that record the residual stream of every layer."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.hosts import named as host
from unilinattn.errors import StreamError, UncoveredError
from unilinattn.testing.hosts import randomize
from unilinattn.testing.promote import promoted
from unilinattn.tracing import residual
from unilinattn.tracing.trace import Trace

WIDTH, VOCABULARY, LENGTH = 16, 31, 9
CONFIG = transformers.MambaConfig(
    vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=4, num_hidden_layers=1, residual_in_fp32=False
)


class Norm(nn.RMSNorm):
    def __init__(self) -> None:
        super().__init__(WIDTH)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.up(x)))


def mixer() -> nn.Module:
    from transformers.models.mamba.modeling_mamba import MambaMixer

    return MambaMixer(CONFIG, layer_idx=0)


class Noting(nn.Module):
    """A model that records the true (stream, multiplier) of each layer."""

    depth = 3

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norms = nn.ModuleList(Norm() for _ in range(self.depth))
        self.mixers = nn.ModuleList(mixer() for _ in range(self.depth))
        self.mlps = nn.ModuleList(MLP() for _ in range(self.depth))
        self.mlp_norms = nn.ModuleList(Norm() for _ in range(self.depth))
        self.last = Norm()
        self.noted: list[tuple[Tensor, float]] = []

    def add(self, x: Tensor, out: Tensor, multiplier: float = 1.0) -> Tensor:
        self.noted.append((x.clone(), multiplier))
        return x + multiplier * out if multiplier != 1 else x + out

    def forward(self, input_ids: Tensor) -> Tensor:
        self.noted.clear()
        x = self.embed(input_ids)
        for at in range(self.depth):
            x = self.layer(x, at)
        return self.last(x)

    def layer(self, x: Tensor, at: int) -> Tensor:
        raise NotImplementedError


class Flat(Noting):
    def layer(self, x: Tensor, at: int) -> Tensor:
        return self.add(x, self.mixers[at](self.norms[at](x)))


class FlatWithMLPs(Noting):
    def layer(self, x: Tensor, at: int) -> Tensor:
        x = self.add(x, self.mixers[at](self.norms[at](x)))
        return x + self.mlps[at](self.mlp_norms[at](x))


class FlatMLPFirst(Noting):
    def layer(self, x: Tensor, at: int) -> Tensor:
        x = x + self.mlps[at](self.mlp_norms[at](x))
        return self.add(x, self.mixers[at](self.norms[at](x)))


class FlatScaled(Noting):
    def layer(self, x: Tensor, at: int) -> Tensor:
        x = self.add(0.9 * x, self.mixers[at](self.norms[at](x)), 0.3)
        return x + 0.5 * self.mlps[at](self.mlp_norms[at](x))


class FlatParallel(Noting):
    """The MLP runs before the mixer, in parallel to it."""

    def layer(self, x: Tensor, at: int) -> Tensor:
        parallel = self.mlps[at](self.mlp_norms[at](x))
        return self.add(x, self.mixers[at](self.norms[at](x))) + parallel


class Block(nn.Module):
    """A module around the norms, mixer and MLP of one layer, which runs the code of the model."""

    def __init__(self, model: Noting, at: int) -> None:
        super().__init__()
        self.run, self.at = [model], at
        modules = (model.norms, model.mixers, model.mlps, model.mlp_norms)
        self.norm, self.mixer, self.mlp, self.mlp_norm = (each[at] for each in modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.run[0].layer(x, self.at)


def in_blocks(flat: type[Noting]) -> type[Noting]:
    class Blocks(flat):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(self, at) for at in range(self.depth))

        def forward(self, input_ids: Tensor) -> Tensor:
            self.noted.clear()
            x = self.embed(input_ids)
            for block in self.blocks:
                x = block(x)
            return self.last(x)

    Blocks.__name__ = f"{flat.__name__}InBlocks"
    return Blocks


class Postnorm(Noting):
    def layer(self, x: Tensor, at: int) -> Tensor:
        x = self.norms[at](self.add(x, self.mixers[at](x)))
        return self.mlp_norms[at](x + self.mlps[at](x))


class NormedResidual(Noting):
    def layer(self, x: Tensor, at: int) -> Tensor:
        x = self.norms[at](x)
        return self.add(0.7 * x, self.mixers[at](x), 0.4)


class Unnormed(Noting):
    def layer(self, x: Tensor, at: int) -> Tensor:
        x = x + 0.1 * self.mlps[at](x)
        return self.add(x, self.mixers[at](x))


FLAT = [Flat, FlatWithMLPs, FlatMLPFirst, FlatScaled, FlatParallel, Postnorm, NormedResidual, Unnormed]
MODELS = [*FLAT, *map(in_blocks, FLAT)]


class HiddenStream(Noting):
    """No module receives the stream between MLP and mixer, because the norm is a function."""

    def layer(self, x: Tensor, at: int) -> Tensor:
        x = x + self.mlps[at](self.mlp_norms[at](x))
        return self.add(x, self.mixers[at](functional.rms_norm(x, (WIDTH,))))


class NormedOutput(Noting):
    def layer(self, x: Tensor, at: int) -> Tensor:
        return self.add(x, self.mlp_norms[at](self.mixers[at](self.norms[at](x))))


class WrittenStream(Noting):
    def layer(self, x: Tensor, at: int) -> Tensor:
        out = self.mixers[at](self.norms[at](x))
        self.noted.append((x.clone(), 1.0))
        x += out
        return x


def built(model: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return randomize(model().eval()).to(dtype)


def ids() -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def definition(shares: Tensor, stream: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """C_ij = [||y_i||_1 - ||y_i - T_ij||_1]^+ over its row's sum, T_ii with the stream (LaTIM Eq. 6).

    Also returns the amplification of rounding errors in each row by the division.
    """
    eye = torch.eye(shares.shape[1], dtype=shares.dtype)
    shares = shares + eye[:, :, None] * stream[:, :, None]
    size = y.abs().sum(-1)[:, :, None]
    gain = (size - (y[:, :, None] - shares).abs().sum(-1)).clamp_min(0)
    total = gain.sum(-1, keepdim=True)
    return torch.where(total > 0, gain / total.masked_fill(total == 0, 1), eye), (total / size).clamp_max(1)


def traced(model: nn.Module) -> ula.Trace:
    """Run and trace a model; the trace does not change the records of the run."""
    with torch.no_grad():
        model(ids())
    return ula.trace(model, ids())


def deviation(trace: Trace, model: "Noting", scores: Tensor) -> float:
    """The largest difference from the definition on the recorded streams, in units of the row's rounding error."""
    worst = 0.0
    for layer, (stream, multiplier), actual in zip(trace.layers, model.noted, scores, strict=True):
        shares = multiplier * layer.operator.contributions(torch.arange(LENGTH)).double()
        expected, scale = definition(shares, stream.double(), stream.double() + multiplier * layer.output.double())
        worst = max(worst, float(((actual.double() - expected).abs() * scale).max()))
    return worst


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_alti_agrees_with_its_definition_on_the_true_stream(
    kind: type[Noting], dtype: torch.dtype, close: float
) -> None:
    model = built(kind, dtype)
    with promoted() if dtype == torch.float64 else nullcontext():
        trace = traced(model)
    for layer, (stream, multiplier) in zip(trace.layers, model.noted, strict=True):
        assert layer.multiplier == pytest.approx(multiplier, rel=1e-6)
        assert layer.residual is not None
        assert (layer.residual - stream).abs().max() <= 4 * torch.finfo(dtype).eps * stream.abs().max()
    result = ula.explain(trace, method="alti")
    assert deviation(trace, model, result.scores) <= close
    assert set(result.stream_error) == {layer.name for layer in trace.layers}
    assert max(result.stream_error.values()) <= (1e-6 if dtype == torch.float32 else 1e-14)


@pytest.mark.parametrize("tokens", [[3], [3, 3, 3]])
@pytest.mark.parametrize("kind", [Flat, FlatWithMLPs, FlatMLPFirst, FlatParallel, in_blocks(Flat)])
def test_the_stream_of_a_repeated_token_is_not_its_norm(kind: type[Noting], tokens: list[int]) -> None:
    """The normed vector of one token is a multiple of its stream, where the weights of the norm are equal."""
    for norm in (*(model := built(kind)).norms, *model.mlp_norms):
        norm.weight.data.fill_(1)
    model.requires_grad_(False)(x := torch.tensor([tokens]))
    for layer, (stream, multiplier) in zip(ula.trace(model, x).layers, model.noted, strict=True):
        assert layer.multiplier == multiplier and torch.equal(layer.stream, stream.to(layer.stream))


@pytest.mark.parametrize("kind", [HiddenStream, in_blocks(HiddenStream)], ids=lambda kind: kind.__name__)
def test_a_stream_that_no_module_receives_is_refused(kind: type[Noting]) -> None:
    trace = ula.trace(built(kind), ids())
    assert [layer.residual for layer in trace.layers] == [None] * kind.depth
    assert [step.stream_error() for step in trace.steps] == [None] * kind.depth
    with pytest.raises(UncoveredError, match=r"output of mixers.0; no module received a stream"):
        ula.explain(trace, method="alti")


def test_a_norm_between_the_output_and_the_stream_is_part_of_what_is_added() -> None:
    trace = traced(built(NormedOutput))
    layer = trace.layers[0]
    assert layer.added is not layer and layer.added.operator.reconstruction_error() < 1e-6
    # The operator of the layer itself is unchanged, and the stream plus what is added is the next stream.
    assert layer.operator.reconstruction_error() < 1e-6
    error = trace.steps[0].stream_error()
    assert error is not None and error < 1e-12
    assert ula.explain(trace, method="alti").scores.isfinite().all()


def test_a_stream_modified_in_place_is_exact_or_missing() -> None:
    model = built(WrittenStream)
    trace = traced(model)
    for layer, (stream, _) in zip(trace.layers, model.noted, strict=True):
        assert layer.residual is None or torch.allclose(layer.residual, stream, rtol=1e-12)


@pytest.mark.long
def test_a_wrongly_assigned_sibling_raises_stream_error() -> None:
    model = built(FlatMLPFirst, torch.float32)
    found = ula.trace(model, ids())
    ula.explain(found, method="alti")
    step = found.steps[1]
    layer, right = step.layers[0], step.layers[0].stream
    assert right is not None
    for wrong in (right + found.layers[0].output, found.layers[0].stream, right * (1 + 1e-4)):
        layer.stream = wrong
        error = step.stream_error()
        assert error is not None
        assert error > step.stream_tolerance() == 1e-5
        for method, options in (("alti", {}), ("alti", {"compose": "rollout"}), ("latim", {"residual": True})):
            with pytest.raises(StreamError, match=rf"{method}: .* output of mixers.1 do not .* {error:.1e}, and 1e-05"):
                ula.explain(found, method=method, **options)
        ula.explain(found, method="alti", layers=[0, 2])
        ula.explain(found, method="latim")
    layer.stream, layer.multiplier = right, 1.001
    with pytest.raises(StreamError):
        ula.explain(found, method="alti")


def test_a_parallel_branch_requires_independence(monkeypatch: pytest.MonkeyPatch) -> None:
    # If all modules count as independent of the layer, the MLP of the hidden stream becomes a parallel branch.
    assert ula.trace(built(HiddenStream), ids()).layers[0].residual is None
    monkeypatch.setattr(residual, "followed_back", lambda child, block, before: ([before[0].output], []))
    model = built(HiddenStream)
    wrong = traced(model).layers[0].residual
    assert wrong is not None
    assert not torch.allclose(wrong, model.noted[0][0].double(), rtol=1e-2)


def without_outputs(model: nn.Module, projection: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        if f".{projection}." in f".{name}":
            parameter.data.zero_()
    return model


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_an_output_of_zeros_has_a_stream(kind: type[Noting]) -> None:
    model = without_outputs(built(kind), "out_proj")
    trace = traced(model)
    for layer, (stream, _) in zip(trace.layers, model.noted, strict=True):
        assert not layer.output.any()
        assert layer.residual is not None
        assert torch.allclose(layer.residual, stream, rtol=1e-12, atol=0)
    scores = ula.explain(trace, method="alti").scores
    assert torch.equal(scores, torch.eye(LENGTH, dtype=scores.dtype).expand_as(scores))


@pytest.mark.parametrize(
    ("name", "projection", "steps"),
    [
        ("mamba", "out_proj", 2),
        ("mamba2", "out_proj", 2),
        ("gpt2", "c_proj", 2),
        ("gpt neox, parallel", "dense", 2),
        ("llama, grouped queries", "o_proj", 2),
        ("falcon h1", "o_proj", 2),
        ("falcon h1", "out_proj", 2),
        ("minimax", "out_proj", 3),
    ],
)
def test_zero_initialised_projections_of_real_hosts(name: str, projection: str, steps: int) -> None:
    entry = host(name)
    plain = ula.trace(entry.model(), entry.inputs())
    trace = ula.trace(without_outputs(entry.model(), projection), entry.inputs())
    zero = [at for at, layer in enumerate(trace.layers) if not layer.output.any()]
    assert zero
    first = trace.layers[zero[0]]
    assert first.residual is not None
    if zero[0] == 0:
        assert torch.allclose(first.residual, plain.layers[0].residual)
    errors = [step.stream_error() for step in trace.steps]
    assert len(errors) == steps
    assert all(error is not None and error <= 1e-6 for error in errors)
    scores = ula.explain(trace, method="alti", layers=zero).scores
    assert torch.equal(scores, torch.eye(entry.length).expand_as(scores))


HELD = {
    "mamba": ("backbone.layers", None),
    "llama, grouped queries": ("model.layers", "mlp"),
    "gpt neox, in sequence, no biases": ("gpt_neox.layers", "mlp"),
    "falcon h1": ("model.layers", "feed_forward"),
    "recurrent gemma": ("model.layers", "mlp_block"),
}


@pytest.mark.parametrize("name", HELD)
def test_stream_and_outputs_sum_to_the_next_stream(name: str) -> None:
    """The stream after a step plus the output of the block's MLP is the stream before the next step."""
    entry = host(name)
    model, (blocks, mlp) = entry.model(), HELD[name]
    added: list[Tensor] = []
    for block in model.get_submodule(blocks) if mlp else ():
        block.get_submodule(mlp).register_forward_hook(lambda module, args, output: added.append(output.clone()))
    trace = ula.trace(model, entry.inputs())
    for at, (step, later) in enumerate(zip(trace.steps, trace.steps[1:], strict=False)):
        after = step.layers[0].residual + sum(layer.multiplier * layer.output for layer in step.layers)
        after = after + added[at] if mlp else after
        assert torch.allclose(after, later.layers[0].residual, rtol=1e-5, atol=1e-5)


def test_zamba_s_shared_attention_has_no_stream_and_is_exact_without_residual() -> None:
    entry = host("zamba")
    trace = ula.trace(entry.model().double(), entry.inputs())
    attention = [layer for layer in trace.layers if layer.kind == "softmax attention"]
    mamba = [layer.name for layer in trace.layers if layer not in attention]
    with pytest.raises(UncoveredError, match=r"pre_ff_layernorm takes this output itself.* Use residual=False"):
        ula.explain(trace, method="alti")
    assert set(ula.explain(trace, method="alti", layers=mamba).stream_error) == set(mamba)
    alone = dict(method="alti", residual=False, layers=[layer.name for layer in attention])
    result = ula.explain(trace, **alone)
    assert ula.estimate(trace, **alone).shape == tuple(result.scores.shape)
    for layer, scores in zip(attention, result.scores, strict=True):
        shares = layer.operator.contributions(torch.arange(entry.length))
        expected, _ = definition(shares, torch.zeros_like(layer.output), layer.output)
        assert (scores - expected).abs().max() <= 1e-12
