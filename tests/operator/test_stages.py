"""Each stage against its definition, and `Flow` against the forward pass that it freezes."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from unilinattn.errors import OptionError, UncoveredError
from unilinattn.mixers import Dense, Toeplitz
from unilinattn.operator.flow import Flow
from unilinattn.operator.operator import MixerOperator
from unilinattn.operator.reconstruction import worst_error
from unilinattn.operator.scopes import SCOPES
from unilinattn.operator.stages import (
    Branch,
    Center,
    Matrix,
    Mix,
    Scale,
    Stage,
    channel_groups,
    run,
    run_adjoint,
    run_on_zeros,
    walk,
)
from unilinattn.testing import relative_error
from unilinattn.testing.hosts import host
from unilinattn.testing.peak import peak_of
from unilinattn.tracing.trace import trace

BATCH, LENGTH, CHANNELS = 2, 5, 6


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def stages() -> dict[str, Stage]:
    return {
        "matrix": Matrix("input", normal(4, CHANNELS), normal(4)),
        "matrix without bias": Matrix("input", normal(4, CHANNELS)),
        "scale a channel": Scale("gate", normal(BATCH, LENGTH, CHANNELS), normal(CHANNELS)),
        "scale a group": Scale("norm", normal(BATCH, LENGTH, 3)),
        "scale a token": Scale("norm", normal(BATCH, LENGTH, 1)),
        "scale of all tokens": Scale("norm", normal(1, 1, CHANNELS)),
        "centre": Center("norm", 2),
        "mix": Mix("core", Dense(normal(BATCH, 3, LENGTH, LENGTH)), normal(CHANNELS)),
        "convolution": Mix("conv", Toeplitz(normal(CHANNELS, 3), batch=BATCH, length=LENGTH)),
        "branch": Branch(
            "core",
            (
                (Mix("core", Dense(normal(BATCH, 3, LENGTH, LENGTH))), Scale("gate", normal(BATCH, LENGTH, 2))),
                (Scale("skip", normal(1, 1, 3)),),
                (),
            ),
        ),
    }


every_stage = pytest.mark.parametrize("name", stages())


@every_stage
def test_a_stage_is_affine_with_its_adjoint(name: str) -> None:
    stage, x, y = stages()[name], normal(BATCH, LENGTH, CHANNELS), normal(BATCH, LENGTH, CHANNELS)
    linear = stage.apply(2 * x - y, bias=False)
    assert relative_error(linear, 2 * stage.apply(x, bias=False) - stage.apply(y, bias=False)) < 1e-13
    assert relative_error(stage.apply(x), stage.apply(x, bias=False) + stage.apply(0 * x)) < 1e-13
    g = torch.randn_like(linear)
    (grad,) = torch.autograd.grad((stage.apply(x.requires_grad_()) * g).sum(), x)
    assert relative_error(stage.adjoint(g), grad) < 1e-13


@every_stage
def test_stages_apply_to_each_column(name: str) -> None:
    stage, x = stages()[name], normal(BATCH, LENGTH, CHANNELS, 3, 2)
    each = [[stage.apply(x[..., a, b]) for b in range(2)] for a in range(3)]
    expected = torch.stack([torch.stack(row, dim=-1) for row in each], dim=-2)
    assert relative_error(stage.apply(x), expected) < 1e-13
    g = torch.randn_like(expected)
    each = [[stage.adjoint(g[..., a, b]) for b in range(2)] for a in range(3)]
    assert relative_error(stage.adjoint(g), torch.stack([torch.stack(row, dim=-1) for row in each], dim=-2)) < 1e-13


@every_stage
def test_a_token_wise_stage_restricts_to_tokens(name: str) -> None:
    stage, x = stages()[name], normal(BATCH, LENGTH, CHANNELS)
    if stage.mixes:
        return
    index = torch.tensor([[4, 0, 2], [1, 1, 3]])
    rows = torch.arange(BATCH)[:, None]
    assert relative_error(stage.at(index).apply(x[rows, index]), stage.apply(x)[rows, index]) < 1e-15


def test_groups_are_the_channels_that_a_stage_treats_separately() -> None:
    actual = {name: stage.groups for name, stage in stages().items()}
    assert actual == {
        "matrix": None,
        "matrix without bias": None,
        "scale a channel": 6,
        "scale a group": 3,
        "scale a token": 1,
        "scale of all tokens": 6,
        "centre": None,
        "mix": 3,
        "convolution": 6,
        "branch": 6,
    }
    parts = stages()
    assert channel_groups([parts["scale a group"], Scale("gate", normal(1, 1, 2))]) == 6
    assert channel_groups([parts["scale a group"], parts["centre"]]) is None
    assert channel_groups([]) == 1
    # Branches inside branches are read once at each level: twice would be 2^50 times.
    nested: Stage = parts["scale a group"]
    for _ in range(50):
        nested = Branch("branch", ((nested,),))
    assert channel_groups([nested]) == channel_groups([parts["scale a group"]])


def test_a_chain_runs_in_order_and_back() -> None:
    chain = (Matrix("input", normal(4, CHANNELS)), Scale("gate", normal(1, 1, 4)), Matrix("output", normal(3, 4)))
    whole = chain[2].weight @ torch.diag(chain[1].scale[0, 0]) @ chain[0].weight
    x = normal(BATCH, LENGTH, CHANNELS)
    assert relative_error(run(chain, x), x @ whole.T) < 1e-14
    assert relative_error(run_adjoint(chain, run(chain, x)), run(chain, x) @ whole) < 1e-14
    nested = (Branch("output", (chain, ())),)
    assert [stage.role for stage in walk(nested)] == ["output", "input", "gate", "output"]


@pytest.mark.parametrize("biased", range(5))
def test_the_pass_of_zeros_leaves_out_products_with_zeros(biased: int) -> None:
    bias = {biased: normal(4)}
    chain = (
        Scale("input", normal(1, LENGTH, 1), bias.get(0)),
        Matrix("input", normal(4, 4), bias.get(1)),
        Mix("core", Dense(normal(BATCH, 2, LENGTH - 1, LENGTH)), bias.get(2)),
        Matrix("output", normal(4, 4), bias.get(3)),
    )
    zeros = torch.zeros(BATCH, LENGTH, 4, dtype=torch.float64)
    expected, result = run(chain, zeros), run_on_zeros(chain, zeros + 1)
    assert torch.equal(result, expected) and bool(result.any()) == (biased < 4)
    whole, fewer = peak_of(lambda: run(chain, zeros)), peak_of(lambda: run_on_zeros(chain, zeros))
    left_out = (0, BATCH * LENGTH * 4 * 4)[biased > 0] + (0, BATCH * (LENGTH - 1) * LENGTH * 4)[biased > 2]
    assert whole.multiplications - fewer.multiplications >= left_out


@pytest.mark.parametrize("name", ["mamba, biases", "mamba, no conv bias", "mamba2", "gpt2", "llama, grouped queries"])
def test_the_bias_is_the_output_for_a_zero_input(name: str) -> None:
    model = host(name)
    for layer in trace(model.model(), model.inputs()).layers:
        op = layer.operator
        zeros = {port: torch.zeros_like(x) for port, x in op.inputs.items()}
        assert torch.equal(op.bias, op.apply(zeros))


def test_a_copy_of_a_flow_shares_its_values_and_not_its_later_stages() -> None:
    x, first, second = normal(BATCH, LENGTH, CHANNELS), normal(4, CHANNELS), normal(3, 4)
    computed = list[int]()

    def factor() -> torch.Tensor:
        computed.append(1)
        return normal(BATCH, LENGTH, 4)

    flow = Flow(x).matrix(first, role="input").scale(factor, role="gate")
    norm = normal(1, 1, 4)
    one, other = flow.copy().matrix(second, role="output"), flow.copy().scale(norm, role="norm")
    assert [len(each.chain) for each in (flow, one, other)] == [2, 3, 3]
    assert torch.equal(one.value, flow.value @ second.T)
    assert torch.equal(other.value, flow.value * norm) and computed == [1]
    assert [stage.role for stage in flow.matrix(second, role="output").chain] == ["input", "gate", "output"]


def test_an_uncovered_stage_raises_its_reason_when_it_is_used() -> None:
    x = normal(BATCH, LENGTH, CHANNELS)
    flow = Flow(x).matrix(normal(4, CHANNELS), role="input").core(Dense(normal(BATCH, 2, LENGTH, LENGTH)))
    flow.unmapped("output", "an output gate that nobody knows", 3)
    op = MixerOperator(flow.chains, inputs=flow.inputs, output=normal(BATCH, LENGTH, 3))
    assert op.matrix("core").shape == (BATCH, LENGTH, LENGTH)
    assert op.matrix("unified").shape == (BATCH, LENGTH, LENGTH)
    for use in (lambda: op.apply(x), lambda: op.contributions(0), lambda: op.bias, lambda: op.adjoint(op.output)):
        with pytest.raises(UncoveredError, match="an output gate that nobody knows"):
            use()


@pytest.mark.parametrize("name", ["silu", "swish", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "linear"])
def test_a_frozen_slope_is_the_activation_and_smooth_at_zero(name: str) -> None:
    x = torch.cat([normal(1, 40, 3) * 5, torch.zeros(1, 1, 3, dtype=torch.float64)], dim=1)
    flow = Flow(x).activation(name)
    assert relative_error(flow.value, ACT2FN[name](x)) < 1e-14
    assert torch.isfinite(flow.chain[0].scale).all()
    assert torch.equal(flow.chain[0].apply(2 * x), 2 * flow.value)


def test_an_unknown_activation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UncoveredError, match=r"activation 'sillu'; did you mean 'silu'\? Accepted: gelu, "):
        Flow(normal(1, 2, 3)).activation("sillu")


def test_a_convolution_equals_that_of_torch() -> None:
    x, conv = normal(BATCH, LENGTH, CHANNELS), nn.Conv1d(CHANNELS, CHANNELS, 4, groups=CHANNELS, padding=3).double()
    expected = conv(x.transpose(1, 2))[..., :LENGTH].transpose(1, 2)
    assert relative_error(Flow(x).conv(conv.weight, conv.bias).value, expected) < 1e-14


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_norms_equal_those_of_torch(groups: int) -> None:
    x, weight, bias = normal(BATCH, LENGTH, CHANNELS), normal(CHANNELS), normal(CHANNELS)
    flat = x.flatten(0, 1)
    layer = functional.group_norm(flat, groups, weight, bias, eps=1e-3).view_as(x)
    assert relative_error(Flow(x).layer_norm(weight, bias, eps=1e-3, groups=groups).value, layer) < 1e-14
    parts = x.unflatten(2, (groups, -1))
    rms = torch.stack([functional.rms_norm(part, part.shape[-1:], eps=1e-3) for part in parts.unbind(2)], dim=2)
    assert relative_error(Flow(x).rms_norm(weight, 1e-3, groups=groups).value, weight * rms.flatten(2)) < 1e-14
    assert relative_error(Flow(x).rms_norm(None, 1e-3, groups=groups).value, rms.flatten(2)) < 1e-14


def test_a_flow_has_the_gradients_of_the_forward_pass() -> None:
    x, weight, norm = normal(BATCH, LENGTH, CHANNELS), normal(4, CHANNELS), normal(4)

    def by_hand(x: Tensor) -> Tensor:
        hidden = functional.silu(x @ weight.T)
        return functional.rms_norm(hidden * torch.sigmoid(hidden), (4,), norm, eps=1e-3)

    def flowing(x: Tensor) -> Tensor:
        flow = Flow(x).matrix(weight, role="input").activation("silu")
        return flow.gate(torch.sigmoid(flow.value)).rms_norm(norm, 1e-3).value

    ours, theirs = (torch.autograd.functional.jacobian(f, x) for f in (flowing, by_hand))
    assert relative_error(ours, theirs) < 1e-13


def test_factors_frozen_on_the_core_s_output_are_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    x, calls = torch.randn(2, 5, 8, dtype=torch.float64), []
    plain = Dense.apply
    monkeypatch.setattr(Dense, "apply", lambda self, value: calls.append(value) or plain(self, value))
    core = Dense(torch.randn(2, 4, 5, 5, dtype=torch.float64).softmax(-1))
    flow = Flow(x).core(core).activation("silu").rms_norm(None, 1e-6).layer_norm(None, None, eps=1e-6)
    op = MixerOperator(flow.chains, inputs=flow.inputs, output=x)
    op.matrix("core")
    op.left_multiply(torch.randn(2, 1, 5, dtype=torch.float64))
    assert not calls
    actual = op.apply(x)
    # Once for all that is frozen on it, and once for the operator itself.
    assert len(calls) == 2
    op.apply(x)
    assert len(calls) == 3
    y = functional.silu(plain(core, x.unflatten(2, (4, 2))).flatten(2))
    assert (
        relative_error(actual, functional.layer_norm(functional.rms_norm(y, (8,), eps=1e-6), (8,), eps=1e-6)) <= 1e-14
    )


def test_an_absent_mask_adds_no_stage() -> None:
    flow = Flow(normal(BATCH, LENGTH, CHANNELS))
    assert flow.scale(None, role="input").chain == ()


def test_every_scope_is_described_with_its_source() -> None:
    assert list(SCOPES) == ["core", "mixer", "unified", "layer"]
    op = MixerOperator(
        {"x": (Mix("core", Dense(normal(BATCH, 3, LENGTH, LENGTH))),)},
        inputs={"x": normal(BATCH, LENGTH, CHANNELS)},
        output=normal(BATCH, LENGTH, CHANNELS),
    )
    with pytest.raises(OptionError, match="Accepted: core, layer, mixer, unified"):
        op.num_heads("everything")


@pytest.mark.parametrize("scope", ["core", "mixer"])
def test_stages_between_two_cores_belong_to_their_map(scope: str) -> None:
    first, last = (Mix("core", Dense(normal(BATCH, 3, LENGTH, LENGTH))) for _ in range(2))
    gate, scale = Scale("gate", normal(BATCH, LENGTH, CHANNELS)), Scale("norm", normal(BATCH, LENGTH, 1))
    projection, x = Matrix("output", normal(CHANNELS, CHANNELS)), normal(BATCH, LENGTH, CHANNELS)

    def operator(*chain: Stage) -> MixerOperator:
        return MixerOperator({"x": chain}, inputs={"x": x}, output=x)

    # A branch without a core, and the stages of a branch behind its core and in front of the last one.
    between = (Branch("act", ((gate,), (scale,))), Branch("output", ((), (last, projection))))
    op = operator(projection, Branch("output", ((first, gate),)), *between)
    factors = (gate.factor + scale.factor) * gate.factor
    per_channel = [m.mixer.tile().repeat_interleave(CHANNELS // 3, 1) for m in (first, last)]
    expected = per_channel[1] @ (factors.transpose(1, 2)[..., None] * per_channel[0])
    assert relative_error(op.matrix(scope, heads=None), expected) <= 1e-12
    for chain in (
        (Branch("output", ((), (projection, first, projection))), last),
        (first, Branch("output", ((), (projection,))), last),
        (first, Branch("output", ((), (projection, last))), projection),
        # Behind a sum with another core, as of a mean of all tokens.
        (Branch("output", ((Branch("output", ((), (first, projection))), last), (first, scale))),),
    ):
        with pytest.raises(UncoveredError, match=f"a stage inside scope '{scope}' mixes channels"):
            operator(*chain).matrix(scope)


def test_a_reconstruction_error_is_that_of_the_worst_sequence() -> None:
    reference = torch.ones(3, LENGTH, CHANNELS)
    output = reference.clone()
    output[1] *= 1.5
    assert worst_error(output, reference) == pytest.approx(0.5)
