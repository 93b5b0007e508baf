"""States made of outer products, k v^T or v k^T: the operand along whose axis a query sums is the key."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import unilinattn as ula
from tests.recording.test_states import Model
from unilinattn.errors import UncoveredError
from unilinattn.testing import relative_error

WIDTH = 6

Factors = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries, keys, values and decays of keys, (batch, token, channel)."""


def loop(
    outer: Callable[[Tensor, Tensor], Tensor], read: Callable[[Tensor, Tensor], Tensor], axis: int
) -> Callable[[Factors], Tensor]:
    """A recurrence with the keys along an axis of its state."""

    def outputs(factors: Factors) -> Tensor:
        query, key, value, decay = factors
        state, read_states = None, []
        for t in range(query.shape[1]):
            written = outer(key[:, t], value[:, t])
            state = written if state is None else decay[:, t].unsqueeze(-axis) * state + written
            read_states.append(read(state, query[:, t]))
        return torch.stack(read_states, 1)

    return outputs


def read_later(factors: Factors) -> Tensor:
    query, key, value, decay = factors
    state, states = torch.zeros(len(key), value.shape[2], key.shape[2], dtype=key.dtype), []
    for t in range(query.shape[1]):
        state = torch.addcmul(state * decay[:, t, None], value[:, t, :, None], key[:, t, None])
        states.append(state)
    return torch.einsum("btvk,btk->btv", torch.stack(states, 1), query)


def read_before(factors: Factors) -> Tensor:
    query, key, value, decay = factors
    state, outputs = value[:, 0, :, None] * key[:, 0, None], []
    for t in range(query.shape[1]):
        outputs.append((state @ query[:, t, :, None]).squeeze(2))
        state = torch.baddbmm(state * decay[:, t, None], value[:, t, :, None], key[:, t, None])
    return torch.stack(outputs, 1)


def delta_rule(factors: Factors) -> Tensor:
    query, key, value, decay = factors
    state, outputs = torch.zeros(len(key), value.shape[2], key.shape[2], dtype=key.dtype), []
    for t in range(query.shape[1]):
        unit = key[:, t, None] / key[:, t, None].norm(dim=-1, keepdim=True)
        state = state * decay[:, t, None] + (value[:, t, :, None] - state @ unit.mT) @ unit
        outputs.append((state @ query[:, t, :, None]).squeeze(2))
    return torch.stack(outputs, 1)


def delta_rule_of_softmax(factors: Factors) -> Tensor:
    """The first keys read zeros from a state of zeros, a factor that may be added."""
    query, key, value, decay = factors
    return delta_rule((query, key.softmax(-1), value, decay))


def in_place(factors: Factors) -> Tensor:
    query, key, value, decay = factors
    state, outputs = torch.zeros(len(key), value.shape[2], key.shape[2], dtype=key.dtype), []
    for t in range(query.shape[1]):
        state.mul_(decay[:, t, None]).add_(value[:, t, :, None] * key[:, t, None])
        outputs.append((state @ query[:, t, :, None]).squeeze(2))
    return torch.stack(outputs, 1)


FORMS: dict[str, Callable[[Factors], Tensor]] = {
    "k v, multiplied": loop(lambda k, v: k[..., None] * v[:, None], lambda s, q: (s * q[..., None]).sum(1), 1),
    "v k, multiplied": loop(lambda k, v: v[..., None] * k[:, None], lambda s, q: (s * q[:, None]).sum(2), 2),
    "v k, other factor first": loop(lambda k, v: k[:, None] * v[..., None], lambda s, q: (s * q[:, None]).sum(2), 2),
    "k v, matmul": loop(lambda k, v: k[..., None] @ v[:, None], lambda s, q: (q[:, None] @ s).squeeze(1), 1),
    "v k, matmul": loop(lambda k, v: v[..., None] @ k[:, None], lambda s, q: (s @ q[..., None]).squeeze(2), 2),
    "v k, bmm": loop(
        lambda k, v: torch.bmm(v[..., None], k[:, None]), lambda s, q: torch.bmm(s, q[..., None]).squeeze(2), 2
    ),
    "v k, einsum": loop(
        lambda k, v: torch.einsum("bv,bk->bvk", v, k), lambda s, q: torch.einsum("bvk,bk->bv", s, q), 2
    ),
    "v k, transposed": loop(lambda k, v: v[..., None] @ k[:, None], lambda s, q: (q[:, None] @ s.mT).squeeze(1), 2),
    "v k, read later": read_later,
    "v k, read before": read_before,
    "v k, delta rule": delta_rule,
    "v k, delta rule of softmax": delta_rule_of_softmax,
    "v k, in place": in_place,
    "v k, all tokens": lambda f: torch.einsum("btvk,btk->btv", (f[2][..., None] * f[1][:, :, None]).cumsum(1), f[0]),
    "v k, all tokens, einsum": lambda f: torch.einsum(
        "btvk,btk->btv", torch.einsum("btv,btk->btvk", f[2], f[1]).cumsum(1), f[0]
    ),
    "v k, summed over tokens": lambda f: (f[2].mT @ f[1] @ f[0].mT).mT,
}


class Layer(nn.Module):
    def __init__(self, form: str, keys: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.decay = (nn.Linear(WIDTH, keys, bias=False) for _ in range(3))
        self.value, self.form = nn.Linear(WIDTH, WIDTH, bias=False), FORMS[form]

    def forward(self, x: Tensor, frozen: bool = False) -> Tensor:
        factors = self.query(x), self.key(x), self.value(x), torch.sigmoid(self.decay(x))
        if frozen:
            query, key, value, decay = factors
            factors = query.detach(), key.detach(), value, decay.detach()
        return self.form(factors)


def shares(model: Model, ids: Tensor) -> Tensor:
    """The logit's shares by autograd, with detached queries, keys and decays."""
    x = model.embedding(ids).detach().requires_grad_()
    model.head(x + model.layer(x, frozen=True))[:, -1, 3].sum().backward()
    assert x.grad is not None
    return (x * x.grad).sum(2).detach()


@pytest.mark.parametrize("keys", [WIDTH, 4, 8])
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.long) if "," in form else form for form in FORMS]
)
def test_the_order_of_an_outer_product_does_not_decide_which_operand_is_its_value(form: str, keys: int) -> None:
    model = Model(Layer(form, keys)).eval().double()
    ids = torch.randint(20, (2, 5), generator=torch.Generator().manual_seed(1))
    trace = ula.trace(model, ids, progress=False)
    scores = {
        method: ula.explain(trace, method=method, target=-1, logit=3, progress=False).scores
        for method in ("logit", "lrp")
    }
    # Autograd cannot pass a state that is written over.
    same = "v k, multiplied" if form == "v k, in place" else form
    expected = shares(Model(Layer(same, keys)).eval().double(), ids)
    for method, actual in scores.items():
        assert relative_error(actual, expected) < 1e-12, method


@pytest.mark.parametrize("form", ["k v, multiplied", "v k, multiplied", "v k, matmul", "v k, in place"])
def test_keys_share_no_relevance_of_their_values(form: str) -> None:
    """In two layers, shares of keys would flow to other tokens than those of values."""
    model = Model(nn.Sequential(Layer(form, WIDTH), Layer(form, WIDTH))).eval().double()
    ids = torch.randint(20, (2, 5), generator=torch.Generator().manual_seed(1))
    trace = ula.trace(model, ids, progress=False)
    lrp, logit = (ula.explain(trace, method=name, target=-1, logit=3).scores for name in ("lrp", "logit"))
    assert relative_error(lrp, logit) < 1e-12


def test_a_state_that_is_written_in_place_has_relevances_and_no_gradient() -> None:
    ids = torch.randint(20, (1, 5), generator=torch.Generator().manual_seed(1))
    traces = [
        ula.trace(Model(Layer(form, WIDTH)).eval().double(), ids, progress=False)
        for form in ("v k, in place", "v k, multiplied")
    ]
    actual, expected = (ula.explain(trace, method="attn_lrp", target=-1, logit=3).scores for trace in traces)
    assert relative_error(actual, expected) < 1e-12
    for method in ("gradient", "input_x_gradient"):
        with pytest.raises(UncoveredError, match=r"writes in place .* instead of state.mul_\(decay\)"):
            ula.explain(traces[0], method=method, target=-1, logit=3)
