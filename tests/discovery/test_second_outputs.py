"""Later code may read the state, or the keys and values, that a layer returns beside its output."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from unilinattn.discovery.noise import noisy_beside
from unilinattn.errors import UncoveredError
from unilinattn.testing import relative_error

WIDTH = 16
IDS = torch.tensor([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]])


class Recurrent(nn.Module):
    """A gated recurrence that returns its last state, and begins with one."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.decay, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, first: Tensor | None = None, frozen: bool = False) -> tuple[Tensor, Tensor]:
        value, decay = self.value(x), torch.sigmoid(self.decay(x))
        decay = decay.detach() if frozen else decay
        state, states = torch.zeros_like(value[:, 0]) if first is None else first, []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + (1 - decay[:, t]) * value[:, t]
            states.append(state)
        return self.out(torch.stack(states, 1)), state


class Attention(nn.Module):
    """Attention whose keys and values are those of an earlier layer, if it is given some."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.keys, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, shared: Any = None) -> tuple[Tensor, Any]:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(2, (2, -1)).transpose(1, 2)

        key, value = map(heads, self.keys(x).chunk(2, -1)) if shared is None else shared
        mixed = functional.scaled_dot_product_attention(heads(self.query(x)), key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2)), (key, value)


class Model(nn.Module):
    """Two layers; `use` says what becomes of what the first one returns beside its output."""

    def __init__(self, build: type[nn.Module], use: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.use = nn.Embedding(23, WIDTH), nn.Linear(WIDTH, 23), use
        self.layers = nn.ModuleList([build(), build()])

    def forward(self, input_ids: Tensor, frozen: bool = False) -> Tensor:
        return self.run(self.embedding(input_ids), **({"frozen": True} if frozen else {}))

    def run(self, x: Tensor, **options: Any) -> Tensor:
        y, other = self.layers[0](x, **options)
        x = x + y
        if self.use == "no one":
            return self.head(x + self.layers[1](x, **options)[0])
        if self.use == "the next layer":
            other = 3 * other if isinstance(other, Tensor) else other
            return self.head(x + self.layers[1](x, other, **options)[0])
        return self.head(x + other[:, None])


def model(build: type[nn.Module], use: str) -> Model:
    return Model(build, use).eval().double()


@pytest.mark.parametrize("target", [0, -1])
@pytest.mark.parametrize("use", ["no one", "the next layer", "all tokens"])
def test_tokens_of_a_state_that_a_later_layer_begins_with_have_shares(use: str, target: int) -> None:
    host = model(Recurrent, use)
    scores = ula.explain(host, IDS, method="logit", target=target, logit=4).scores
    x = host.embedding(IDS).detach().requires_grad_()
    host.run(x, frozen=True)[:, target, 4].sum().backward()
    assert x.grad is not None
    assert relative_error(scores, (x * x.grad).sum(2)) < 1e-12
    assert use == "no one" or bool((scores != 0).all())
    if use == "the next layer":
        with pytest.raises(UncoveredError, match=r"layers.1 reads several tensors \((first, x|x, first)\)"):
            ula.explain(host, IDS, method="rollout", target=target)


def test_a_layer_that_attends_to_keys_of_an_earlier_one_is_refused_and_not_left_out() -> None:
    host = model(Attention, "the next layer")
    with pytest.raises(UncoveredError, match=r"^layers\.1 .* strict=False, .* such as 'occlusion' and 'input_x_grad"):
        ula.trace(host, IDS)
    trace = ula.trace(host, IDS, strict=False)
    assert [layer.opaque for layer in trace.layers] == [False, True]
    for method in ("occlusion", "input_x_gradient"):
        assert ula.explain(trace, method=method, target=-1).scores.shape == IDS.shape


@pytest.mark.parametrize(
    ("shape", "moved"),
    [
        # Keys, a second stream, a state, two feature maps, weights of attention, one number of each sequence.
        ((2, 3, 8, 5), "tokens"),
        ((2, 8, 5), "tokens"),
        ((2, 6), "all"),
        ((2, 8, 4, 4), "none"),
        ((2, 3, 4, 4), "none"),
        ((2, 3, 8, 8), "none"),
        ((2,), "none"),
    ],
)
def test_noise_moves_what_comes_from_the_perturbed_tokens(shape: tuple[int, ...], moved: str) -> None:
    tokens = torch.arange(8, device="cpu") % 2 == 0
    for perturbed in (tokens, tokens.expand(2, -1)):
        change = noisy_beside(torch.zeros(shape, device="cpu"), perturbed) != 0
        if moved == "tokens":
            axis = shape.index(8)
            assert change.index_select(axis, tokens.nonzero()[:, 0]).all()
            assert not change.index_select(axis, (~tokens).nonzero()[:, 0]).any()
        else:
            assert change.all() if moved == "all" else not change.any()


def test_keys_that_nothing_reads_again_change_nothing() -> None:
    trace = ula.trace(model(Attention, "no one"), IDS)
    assert [layer.name for layer in trace.layers] == ["layers.0", "layers.1"]
    assert ula.explain(trace, method="logit", target=-1).completeness_gap < 1e-12


class Storing(Attention):
    """Attention that leaves its keys and values in an attribute or a dictionary, or reads those of an earlier one."""

    def __init__(self) -> None:
        super().__init__()
        self.earlier: list[Any] = []

    def forward(self, x: Tensor, stored: Any = None) -> tuple[Tensor, Any]:
        shared = None
        if self.earlier:
            shared = self.earlier[0].left if stored is None else stored["keys"]
        output, keys = super().forward(x, shared)
        if stored is None:
            self.left = keys
        else:
            stored["keys"] = keys
        return output, None


class Stores(Model):
    def __init__(self, how: str) -> None:
        super().__init__(Storing, how)
        self.layers[1].earlier.append(self.layers[0])

    def run(self, x: Tensor, **options: Any) -> Tensor:
        stored: dict[str, Any] | None = None if self.use == "an attribute" else {}
        for layer in self.layers:
            x = x + layer(x, stored)[0]
        return self.head(x)


@pytest.mark.parametrize("how", ["an attribute", "a dictionary"])
def test_values_that_a_layer_leaves_for_a_later_one_are_refused_with_the_reason(how: str) -> None:
    with pytest.raises(UncoveredError, match=r"raises (Key|Attribute)Error .* for later code in an attribute"):
        ula.trace(Stores(how).eval().double(), IDS)
