"""Padding masks in recorded layers: what is made of a mask alone is a constant of the call, and may be added."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.tracing.models import WIDTH, Model, Output, ids
from unilinattn.errors import UncoveredError

MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]], device="cpu")

Form = Callable[[Tensor, Tensor], Tensor]

DECAYS: dict[str, Form] = {
    "a sum": lambda gate, mask: gate * mask[..., None].to(gate) + (1 - mask[..., None].to(gate)),
    "where": lambda gate, mask: torch.where(mask[..., None] != 0, gate, 1.0),
    "where of a mask": lambda gate, mask: torch.where(mask[..., None] != 0, gate, 1 - mask[..., None].to(gate)),
    "masked_fill": lambda gate, mask: gate.masked_fill(mask[..., None] == 0, 1.0),
    "lerp": lambda gate, mask: torch.lerp(torch.ones_like(gate), gate, mask[..., None].to(gate)),
}
"""Decays with which a padded token keeps the state."""


class Recurrent(nn.Module):
    """A gated linear RNN whose padded steps keep the state, with a learned vector at real tokens."""

    def __init__(self, decay: Form) -> None:
        super().__init__()
        self.value, self.gate, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.offset, self.decay = nn.Parameter(torch.randn(WIDTH)), decay

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x))
        real = mask[..., None].to(x)
        value, gate = (1 - gate) * self.value(x) * real, self.decay(gate, mask)
        state, states = torch.zeros_like(value[:, 0]), []
        for t in range(x.shape[1]):
            state = gate[:, t] * state + value[:, t]
            states.append(state)
        result: Tensor = self.last(torch.stack(states, 1)) + real * self.offset
        return result


class Padded(Model):
    """A model whose layers get its mask in some form."""

    def __init__(self, form: Callable[[Tensor, Tensor], Tensor], decay: Form) -> None:
        torch.manual_seed(0)
        super().__init__(Recurrent(decay), Recurrent(decay))
        self.form = form

    def forward(self, input_ids: Tensor, attention_mask: Any = None) -> Output:
        x = self.embed(input_ids)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        for block in self.blocks:
            x = x + block(x, self.form(mask, x))
        return Output(self.head(x))


def given(mask: Tensor, x: Tensor) -> Tensor:
    return mask


FORMS: dict[str, Form] = {
    "the mask": given,
    "booleans": lambda mask, x: mask.bool(),
    "numbers": lambda mask, x: mask.to(x),
}


def explained(model: Padded, *, padded: bool, method: str = "logit") -> Tensor:
    inputs = {"input_ids": ids(batch=2), "attention_mask": MASK} if padded else {"input_ids": ids(batch=2)[1:, :4]}
    return ula.explain(model, inputs, method=method, target=-1, progress=False).scores


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", DECAYS)
def test_padding_that_keeps_the_state_is_exact(decay: str, form: str) -> None:
    model = Padded(FORMS[form], DECAYS[decay]).double().eval()
    host_trace = ula.trace(model, {"input_ids": ids(batch=2), "attention_mask": MASK})
    assert max(layer.operator.reconstruction_error() for layer in host_trace.layers) <= 1e-12
    # It has stages, and is no single one.
    assert all(layer.operator.matrix().shape[-1] == 7 for layer in host_trace.layers)
    for method in ("logit", "lrp"):
        scores, alone = explained(model, padded=True, method=method), explained(model, padded=False, method=method)
        assert torch.allclose(scores[1:, :4], alone, rtol=1e-9, atol=1e-12) and not scores[1, 4:].any()


@pytest.mark.long
def test_a_long_loop_that_is_one_stage_is_exact_too() -> None:
    model = Padded(given, DECAYS["a sum"]).double().eval()
    inputs = {"input_ids": ids(40), "attention_mask": (torch.arange(40) < torch.tensor([[40], [25]])).long()}
    host_trace = ula.trace(model, inputs)
    assert max(layer.operator.reconstruction_error() for layer in host_trace.layers) <= 1e-12


def test_a_mask_that_tokens_decide_is_added_to_no_values() -> None:
    def decided(mask: Tensor, x: Tensor) -> Tensor:
        return functional.relu(x.sum(-1)) > 0

    with pytest.raises(UncoveredError, match="depends on the tokens and is added"):
        ula.trace(Padded(decided, DECAYS["a sum"]).double().eval(), ids(batch=2))
