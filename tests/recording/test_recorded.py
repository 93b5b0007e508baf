"""Recorded operators of modules in every layout, and the modules that recording refuses with the function."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.recording import modules
from unilinattn.architectures.recorded import recorded
from unilinattn.call import Call
from unilinattn.errors import ModelStateError, UncoveredError
from unilinattn.host.inputs import bound_arguments
from unilinattn.host.module_calls import as_tokens
from unilinattn.operator.operator import MixerOperator
from unilinattn.testing import relative_error
from unilinattn.testing.hosts import randomize

LIMIT = 1e-12


def operator(module: nn.Module, *inputs: Tensor) -> MixerOperator:
    """Return the recorded operator of a module in float64."""
    module = randomize(module.double().eval())
    with torch.no_grad():
        output = module(*inputs)
    x, output = as_tokens(inputs[0]), as_tokens(output)
    flow = recorded(Call(module, "module", bound_arguments(module, inputs, {}), x, output))
    return MixerOperator(flow.chains, inputs=flow.inputs, output=output, name="module")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def require_complete(op: MixerOperator) -> None:
    """The operator is exact, and contributions of all tokens and the bias add up."""
    assert op.reconstruction_error() < LIMIT
    assert relative_error(op.contributions(1).sum(1) + op.bias[:, 1], op.output[:, 1]) < LIMIT


@pytest.mark.parametrize("name", modules.MODULES)
def test_the_operator_is_the_module_on_its_input(name: str) -> None:
    build, shape = modules.MODULES[name]
    require_complete(operator(build(), draw(*shape)))


@pytest.mark.parametrize("name", modules.MODULES)
def test_the_operator_is_linear_and_has_its_adjoint(name: str) -> None:
    build, shape = modules.MODULES[name]
    op = operator(build(), draw(*shape))
    x, g = as_tokens(draw(*shape, seed=1)), draw(*op.output.shape, seed=2)
    forward, backward = (op.apply(x, bias=False) * g).sum(), (x * op.adjoint(g)).sum()
    assert float((forward - backward).abs()) < LIMIT * float(op.apply(x, bias=False).norm() * g.norm())
    assert float((op.apply(2 * x) - op.bias - 2 * op.apply(x, bias=False)).norm()) < 1e-10 * float(g.norm() + x.norm())


@pytest.mark.parametrize("name", modules.ATTENTION)
def test_the_core_is_the_matrix_of_the_attention(name: str) -> None:
    build, shape = modules.MODULES[name]
    op = operator(build(), draw(*shape))
    core = op.matrix("core", heads=None)
    torch.testing.assert_close(core.sum(-1), torch.ones_like(core.sum(-1)), rtol=1e-10, atol=1e-10)
    # Without a mixer on the carried path the core is the identity.
    assert float(core.diagonal(dim1=-2, dim2=-1).sum(-1).amax()) < core.shape[-1] - 1


def test_a_cross_attention_has_a_port_for_each_stream() -> None:
    op = operator(modules.Cross(), draw(2, 7, 16), draw(2, 5, 16, seed=1))
    assert set(op.ports) == {"x", "memory"} and op.reconstruction_error() < LIMIT
    assert op.matrix("core").shape == (2, 7, 5)


class Hidden(nn.Module):
    """Adds a tensor that another part of the model left in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.left = nn.Linear(16, 16), torch.ones(2, 7, 16, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).cumsum(1) + self.left


class Squared(nn.Module):
    """Adds a function of the tokens that is frozen."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) + x.softmax(-1)


class Outside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.cumsum(x.detach().numpy(), 1)) + 0 * x


class Bessel(nn.Module):
    """A function without a rule."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x.cumsum(1))


class AcrossSequences(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) + 1e-4 * x.flip(0)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "an attribute of unknown origin": (Hidden, "the output of 'attribute' depends on the tokens"),
    "a frozen function that is added": (Squared, "the output of 'softmax' depends on the tokens"),
    "a function without a rule": (Bessel, "'special_bessel_j0'"),
    "another sequence": (AcrossSequences, "tokens lie along different axes"),
    "a nonlinear recurrence": (lambda: modules.First(nn.LSTM(16, 16, batch_first=True)), "passes a nonlinearity"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_linear_map_of_the_tokens_is_refused_by_its_function(name: str) -> None:
    build, reason = REFUSED[name]
    with pytest.raises(UncoveredError, match=reason):
        operator(build(), draw(2, 7, 16))


def test_a_computation_outside_of_torch_misses_the_output() -> None:
    """Its values are constants of the module's run, and the trace compares the operator with another input's output."""
    module, x = Outside().double(), draw(2, 7, 16)
    with torch.no_grad():
        output = module(x)
    call = Call(module, "module", {"x": x}, x, output)
    with pytest.raises(UncoveredError):
        recorded(call)


class Transformed(nn.Module):
    """Weights that are transformed between the softmax and the product."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(2, (4, 4)).transpose(1, 2)
        weights = (q @ q.mT).softmax(-1)
        weights = self.heads(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return (weights @ q).transpose(1, 2).flatten(2)


def test_a_weight_that_is_transformed_after_the_softmax_is_that_of_the_core() -> None:
    module = Transformed()
    op = operator(module, x := draw(2, 7, 16))
    q = x.unflatten(2, (4, 4)).transpose(1, 2)
    with torch.no_grad():
        weights = module.heads((q @ q.mT).softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    assert relative_error(op.matrix("core", heads=None), weights) < LIMIT


class GatedAttention(nn.Module):
    """Attention over activated values, times an activated gate."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate = nn.Linear(6, 18, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        mixed = functional.scaled_dot_product_attention(query, key, functional.silu(value), is_causal=True)
        return mixed * functional.silu(self.gate(x))


@pytest.mark.parametrize("length", [1, 4])
def test_the_mixed_values_of_one_token_are_no_gate(length: int) -> None:
    module, x, probe = GatedAttention(), draw(2, length, 6), draw(2, length, 6, seed=1)
    op = operator(module, x)
    query, key, value = module.qkv(x).chunk(3, -1)
    # The frozen slope of SiLU is the sigmoid.
    values = module.qkv(probe).chunk(3, -1)[2] * torch.sigmoid(value)
    mixed = functional.scaled_dot_product_attention(query, key, values, is_causal=True)
    assert relative_error(op.apply(probe), mixed * functional.silu(module.gate(x))) < LIMIT


def test_later_changes_of_the_weights_are_refused_and_do_not_reach_a_copy_of_the_operator() -> None:
    module = modules.Batched()
    op = operator(module, x := draw(2, 7, 16))
    before, copied = op.apply(x), copy.deepcopy(op)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    with pytest.raises(
        ModelStateError, match=r"a weight \(16, 16\) that the operator reads .* changed since the trace"
    ):
        op.apply(x)
    assert torch.equal(copied.apply(x), before)


def test_a_read_of_tokens_by_a_frozen_order_is_exact() -> None:
    class TopTokens(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            order = x.norm(dim=-1).argsort(1)
            return x.gather(1, order[..., None].expand_as(x)).cumsum(1)

    assert operator(TopTokens(), draw(2, 7, 16)).reconstruction_error() < LIMIT


def test_gelu_in_place_and_slices_written_into_zeros_are_stages() -> None:
    class Written(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            out[:, 1:] = x[:, :-1]
            return functional.relu_(out) + x

    assert operator(Written(), draw(2, 7, 16)).reconstruction_error() < LIMIT


class Copied(nn.Module):
    """Writes tokens into memory that holds other numbers, as a cache of a convolution does."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.full_like(x, torch.nan).copy_(x.cumsum(1))
        gate = x.sigmoid().fill_(value=2.0)
        return out * gate + x.clone().zero_() + x.clone().copy_(torch.ones(16))


class HalfAtATime(nn.Module):
    """Writes its output in two steps into memory that no function initialises."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[..., ::2] = x[..., 1::2].cumsum(1)
        out[..., 1::2] = x[..., ::2]
        return out


@pytest.mark.parametrize("build", [Copied, HalfAtATime])
def test_what_is_written_over_leaves_nothing(build: type[nn.Module]) -> None:
    """With deterministic algorithms torch fills memory that no function initialises with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert operator(build(), draw(2, 7, 16)).reconstruction_error() < LIMIT
    finally:
        torch.use_deterministic_algorithms(False)


def test_random_numbers_written_into_tokens_are_refused_by_their_function() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.cumsum(1) + x.clone().normal_()

    with pytest.raises(UncoveredError, match="'normal' is applied to values that depend on the tokens"):
        operator(Noisy(), draw(2, 7, 16))


class Gates(nn.Module):
    """A gated recurrence in a loop, whose steps are written by `step`."""

    def __init__(self, step: Callable[..., Tensor]) -> None:
        super().__init__()
        self.gate, self.value, self.step = nn.Linear(16, 16), nn.Linear(16, 16), step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self.gate(x).sigmoid(), self.value(x).clone())


def out_of_place(a: Tensor, v: Tensor) -> Tensor:
    h, states = torch.zeros_like(v[:, 0]), []
    for t in range(v.shape[1]):
        h = h * a[:, t] + v[:, t]
        states.append(h)
    return torch.stack(states, 1)


def in_place(a: Tensor, v: Tensor) -> Tensor:
    h, states = torch.zeros_like(v[:, 0]), []
    for t in range(v.shape[1]):
        h.mul_(a[:, t]).add_(v[:, t])
        states.append(h.clone())
    return torch.stack(states, 1)


def operators_in_place(a: Tensor, v: Tensor) -> Tensor:
    h, states = torch.zeros_like(v[:, 0]), []
    for t in range(v.shape[1]):
        h = h.clone()
        h *= a[:, t]
        h += v[:, t]
        states.append(h)
    return torch.stack(states, 1)


def fused_product(a: Tensor, v: Tensor) -> Tensor:
    h, states = v[:, 0].clone(), [v[:, 0]]
    for t in range(1, v.shape[1]):
        h = torch.addcmul(v[:, t], h, a[:, t])
        states.append(h)
    return torch.stack(states, 1)


def views_of_a_sum(a: Tensor, v: Tensor) -> Tensor:
    for t in range(1, v.shape[1]):
        v[:, t].add_(v[:, t - 1] * a[:, t])
    return v


def views_in_two_steps(a: Tensor, v: Tensor) -> Tensor:
    for t in range(1, v.shape[1]):
        v[:, t] += v[:, t - 1] * a[:, t]
    return v


def copies_into_views(a: Tensor, v: Tensor) -> Tensor:
    out, states = torch.zeros_like(v), out_of_place(a, v)
    view = out.view(*out.shape[:2], 4, 4)
    for t in range(v.shape[1]):
        out[:, t].copy_(states[:, t])
    return view.flatten(2)


def written_behind_a_view(a: Tensor, v: Tensor) -> Tensor:
    states = out_of_place(a, v) / 2
    turned = states.transpose(1, 2)
    states *= 2
    turned.add_(turned)
    return states / 2


FORMS = (
    in_place,
    operators_in_place,
    fused_product,
    views_of_a_sum,
    views_in_two_steps,
    copies_into_views,
    written_behind_a_view,
)


@pytest.mark.parametrize("form", FORMS)
def test_writes_in_place_are_the_functions_out_of_place(form: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    reference, x = Gates(out_of_place), draw(2, 5, 16)
    module = Gates(form)
    module.load_state_dict(reference.state_dict())
    expected, op = operator(reference, x), operator(module, x)
    assert op.reconstruction_error() < LIMIT
    for row in range(5):
        assert relative_error(op.contributions(row), expected.contributions(row)) < LIMIT


def test_a_write_that_autograd_does_not_see_is_refused() -> None:
    def step(a: Tensor, v: Tensor) -> Tensor:
        h = v.cumsum(1)
        h.data.mul_(a)
        return h

    with pytest.raises(UncoveredError, match=r"'mul_' is not covered: it writes in place.*write it out of place"):
        operator(Gates(step), draw(2, 5, 16))
