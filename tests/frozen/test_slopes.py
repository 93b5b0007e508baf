"""Norms in half precision and slopes of activations in a frozen run, against torch's norms and known derivatives."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from unilinattn.frozen.run import frozen
from unilinattn.rules.forms import FORMS
from unilinattn.rules.freezing import Freezing
from unilinattn.testing import relative_error, tolerance
from unilinattn.tracing.trace import trace

EXACT, NEARLY = tolerance("law", torch.float64), tolerance("reconstruction", torch.float64)
CHANNELS = 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-3, 1e3])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm", "group_norm"])
def test_norms_of_half_precision_are_those_of_torch(norm: str, size: float, dtype: torch.dtype) -> None:
    # Squares of such numbers are beyond float16, and torch takes the smallest denominator of float32.
    function = getattr(functional, norm)
    x = (size * torch.randn(2, CHANNELS, 7)).to(dtype)
    x = x if norm == "group_norm" else x.mT
    arguments = (2,) if norm == "group_norm" else ((CHANNELS,),)
    got, _ = FORMS[norm](x, *arguments)
    assert got.dtype == dtype
    assert relative_error(got, function(x, *arguments)) <= tolerance("reconstruction", dtype)


def test_a_stream_whose_squares_are_beyond_float16_has_shares() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=17, n_embd=8, n_layer=1, n_head=2, n_positions=9, tie_word_embeddings=False)
    model = GPT2LMHeadModel(config).eval()
    model.transformer.wte.weight.data *= 5e4
    shares = frozen(trace(model.half(), torch.arange(9)[None])).complete_shares(-1, 3)
    assert float(shares.tokens.abs().sum()) > 0
    assert float((shares.gap / shares.size).max()) <= tolerance("layer", torch.float16)


NEAR = torch.tensor([1e-13, -1e-13, 1e-11, 0.0], dtype=torch.float64)
SLOPED: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    # Each function with its derivative at zero.
    "silu": (functional.silu, 1 / 2),
    "gelu": (functional.gelu, 1 / 2),
    "tanh": (torch.tanh, 1),
    "sigmoid": (torch.sigmoid, 1 / 4),
    "erf": (torch.erf, 2 / torch.pi**0.5),
    "elu": (functional.elu, 1),
    "celu": (functional.celu, 1),
    "mish": (functional.mish, 3 / 5),
    "softsign": (functional.softsign, 1),
    "hardswish": (functional.hardswish, 1 / 2),
    "hardsigmoid": (functional.hardsigmoid, 1 / 6),
    "sin": (torch.sin, 1),
    "logsigmoid": (functional.logsigmoid, 1 / 2),
    "hardtanh": (functional.hardtanh, 1),
    "tanhshrink": (functional.tanhshrink, 0),
    "softshrink": (lambda x: functional.softshrink(x, 0.5), 0),
    "hardshrink": (lambda x: functional.hardshrink(x, 0.5), 0),
    "threshold": (lambda x: functional.threshold(x, 0.5, 0.0), 0),
    # Quantised values.
    "round": (torch.round, 0),
    "trunc": (torch.trunc, 0),
}

JUMPS: dict[str, Callable[[Tensor], Tensor]] = {"sign": torch.sign, "floor": torch.floor, "ceil": torch.ceil}
"""Functions without a derivative at zero."""


def value_and_slope(function: Callable[[Tensor], Tensor], point: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value of a function in a frozen run, and its slope."""
    x = point.clone().requires_grad_()
    with forward_ad.dual_level(), Freezing(lambda: "here", lambda func, args, result: result):
        y = function(x.clone())
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


@pytest.mark.parametrize("name", SLOPED)
def test_slopes_near_zero_are_the_derivative_there(name: str) -> None:
    function, derivative = SLOPED[name]
    assert torch.allclose(
        value_and_slope(function, NEAR)[1], torch.tensor(derivative, dtype=NEAR.dtype), rtol=NEARLY, atol=0
    )


FAR = torch.tensor([-800.0, -40.0, -3.5, -1.0, -1e-3, 1e-3, 1.0, 2.9, 40.0, 800.0], dtype=torch.float64)


@pytest.mark.parametrize("name", [*SLOPED, *JUMPS])
def test_slopes_are_those_of_the_line_to_zero(name: str) -> None:
    function = JUMPS[name] if name in JUMPS else SLOPED[name][0]
    value, slope = value_and_slope(function, FAR)
    at_zero = function(torch.zeros((), dtype=FAR.dtype))
    assert relative_error(value[None], function(FAR)[None]) <= EXACT
    assert relative_error((slope * FAR)[None], (function(FAR) - at_zero)[None]) <= EXACT


ACTIVATIONS: dict[str, Callable[[bool], nn.Module]] = {
    "ReLU": nn.ReLU,
    "LeakyReLU": lambda inplace: nn.LeakyReLU(0.1, inplace),
    "RReLU": lambda inplace: nn.RReLU(inplace=inplace),
    "PReLU": lambda inplace: nn.PReLU(CHANNELS),
    "SiLU": nn.SiLU,
    "ELU": lambda inplace: nn.ELU(inplace=inplace),
    "Threshold": lambda inplace: nn.Threshold(0.5, 0.0, inplace),
    "abs": lambda inplace: Absolute(inplace),
}


class Absolute(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        return x.abs_() if self.inplace else x.abs()


class Activated(nn.Module):
    """Attention and an activation of the tokens' channels."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.attention = nn.Embedding(9, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.first, self.activation, self.last = nn.Linear(8, CHANNELS), activation, nn.Linear(CHANNELS, 9)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        x = self.first(x + self.attention(x, x, x, need_weights=False)[0])
        return self.last(self.activation(x.flatten(0, 1))).unflatten(0, input_ids.shape)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_torch_have_shares_also_in_place(name: str, inplace: bool) -> None:
    """The oracle multiplies what each token sends by the slopes of the last token."""
    model, ids = Activated(ACTIVATIONS[name](inplace)).eval().double(), torch.arange(7)[None]
    shares = frozen(trace(model, ids)).complete_shares(-1, 3)
    x, attention = model.embedding(ids), model.attention
    maps = attention(x, x, x, average_attn_weights=False)[1][0, :, -1]
    values = (x[0] @ attention.in_proj_weight[16:].T).unflatten(1, (2, 4))
    sent = (maps.T[..., None] * values).flatten(1) @ attention.out_proj.weight.T
    sent[-1] += x[0, -1]
    point = model.first(x + attention(x, x, x)[0])[0, -1:].detach()
    slope = model.activation(point.clone()) / point
    expected = (slope * (sent @ model.first.weight.T)) @ model.last.weight[3]
    assert relative_error(shares.tokens.reshape(1, -1), expected.reshape(1, -1)) <= EXACT
    assert float((shares.gap / shares.size).max()) <= EXACT
