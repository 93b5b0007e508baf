"""Later code may read the state, or the keys and values, that a layer returns beside its output."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.recording.test_frozen_module import as_one_stage
from unilinattn.discovery.noise import noisy_beside
from unilinattn.errors import UncoveredError
from unilinattn.testing import relative_error

WIDTH, HEADS = 16, 2
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


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "no heads": (lambda y: y, lambda y: y.unflatten(2, (HEADS, -1)).transpose(1, 2)),
    "heads before tokens": (lambda y: y.unflatten(2, (HEADS, -1)).transpose(1, 2), lambda y: y),
    "heads after tokens": (lambda y: y.unflatten(2, (HEADS, -1)), lambda y: y.transpose(1, 2)),
}
"""How vectors of tokens are handed on, and how these become (batch, head, token, channel)."""


class Attention(nn.Module):
    """Attention that reads keys and values of an earlier layer, if it is given some.

    `mixes` adds to its values those of the earlier layer, by a gate of each token and head, instead.
    """

    def __init__(self, layout: str = "heads before tokens", mixes: bool = False) -> None:
        super().__init__()
        self.query, self.keys, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, HEADS)
        (self.handed_on, self.with_heads), self.mixes = LAYOUTS[layout], mixes

    def forward(self, x: Tensor, shared: Any = None, frozen: bool = False) -> tuple[Tensor, Any]:
        query, (key, value), gate = self.query(x), self.keys(x).chunk(2, -1), self.gate(x).sigmoid()
        if frozen:
            query, key, gate = query.detach(), key.detach(), gate.detach()
        key, value = map(self.handed_on, (key, value))
        if shared is not None:
            key, value = (key, self._mixed(gate, value, shared[1])) if self.mixes else shared
        query = query.unflatten(2, (HEADS, -1)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(query, *map(self.with_heads, (key, value)), is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2)), (key, value)

    def _mixed(self, gate: Tensor, value: Tensor, earlier: Tensor) -> Tensor:
        gate = self.handed_on(gate.repeat_interleave(WIDTH // HEADS, 2))
        return gate * value + (1 - gate) * earlier


class Model(nn.Module):
    """Two layers; `use` says what becomes of what the first one returns beside its output."""

    def __init__(self, build: Callable[[], nn.Module], use: str) -> None:
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


def model(build: Callable[[], nn.Module], use: str) -> Model:
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


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_that_an_earlier_layer_returned_have_shares(
    layout: str, mixes: bool, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if whole:
        as_one_stage(monkeypatch)
    host = model(partial(Attention, layout, mixes), "the next layer")
    trace = ula.trace(host, IDS)
    assert [layer.name for layer in trace.layers] == ["layers.0", "layers.1"]
    x = host.embedding(IDS).detach().requires_grad_()
    host.run(x, frozen=True)[:, -1, 4].sum().backward()
    assert x.grad is not None
    for method in ("logit", "lrp"):
        scores = ula.explain(trace, method=method, target=-1, logit=4).scores
        assert relative_error(scores, (x * x.grad).sum(2)) < 1e-12
    reason = "reads several tensors" if mixes else "vectors that layers.0 returned beside its output"
    for method, options in (("rollout", {}), ("alti", {}), ("alti", {"compose": "rollout"}), ("attention_grad", {})):
        with pytest.raises(UncoveredError, match=reason):
            ula.explain(trace, method=method, target=-1, **options)


def test_what_a_token_decides_is_that_of_one_layout_in_the_others() -> None:
    expected, *others = (
        ula.explain(model(partial(Attention, layout), "the next layer"), IDS, method="attn_lrp", target=-1).scores
        for layout in LAYOUTS
    )
    assert all(relative_error(scores, expected) < 1e-12 for scores in others)


def test_as_many_heads_as_tokens_are_refused() -> None:
    host, ids = model(Attention, "the next layer"), IDS[:, :HEADS]
    with pytest.raises(UncoveredError, match=r"argument 'shared\[0\]' \(2, 2, 2, 8\) has as many heads as tokens"):
        ula.trace(host, ids)
    trace = ula.trace(host, ids, strict=False)
    assert [layer.opaque for layer in trace.layers] == [False, True]
    for method in ("occlusion", "input_x_gradient"):
        assert ula.explain(trace, method=method, target=-1).scores.shape == ids.shape


OUTPUT = torch.zeros(2, 8, 5, device="cpu")


@pytest.mark.parametrize(
    ("shape", "moved"),
    [
        # Keys, a second stream, a state, a feature map, one number of each sequence.
        ((2, 3, 8, 5), "tokens"),
        ((2, 8, 3, 5), "tokens"),
        ((2, 8, 4, 4), "tokens"),
        ((2, 3, 5, 8), "tokens"),
        ((2, 8, 5), "tokens"),
        ((2, 6), "all"),
        ((2, 3, 4, 4), "none"),
        ((2,), "none"),
    ],
)
def test_noise_moves_what_comes_from_the_perturbed_tokens(shape: tuple[int, ...], moved: str) -> None:
    tokens = torch.arange(8, device="cpu") % 2 == 0
    for perturbed in (tokens, tokens.expand(2, -1)):
        change = noisy_beside(torch.zeros(shape, device="cpu"), OUTPUT, perturbed) != 0
        if moved == "tokens":
            axis = shape.index(8)
            assert change.index_select(axis, tokens.nonzero()[:, 0]).all()
            assert not change.index_select(axis, (~tokens).nonzero()[:, 0]).any()
        else:
            assert change.all() if moved == "all" else not change.any()


def test_noise_moves_as_many_channels_as_tokens_but_no_weights_of_attention() -> None:
    tokens = torch.arange(8, device="cpu") % 2 == 0
    heads = torch.ones(2, 8, 8, 5, device="cpu")
    assert torch.equal((noisy_beside(heads, OUTPUT, tokens) != heads).all((0, 1, 3)), tokens)
    for shape in ((2, 3, 8, 8), (2, 8, 8)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu")
        change = noisy_beside(x, OUTPUT, tokens) != x
        assert bool(change.movedim(-2, 0)[tokens].all()) and not bool(change.movedim(-2, 0)[~tokens].any())
        assert torch.equal(noisy_beside(x.softmax(-1), OUTPUT, tokens), x.softmax(-1))
    # Beside a feature map others are, of any size.
    assert torch.equal(noisy_beside(heads, torch.zeros(2, 5, 4, 4, device="cpu"), tokens), heads)


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
    reason = (
        r"from NumPy or an attribute" if how == "an attribute" else r"raises KeyError .* later code in an attribute"
    )
    with pytest.raises(UncoveredError, match=reason):
        ula.trace(Stores(how).eval().double(), IDS)


class Leaving(Attention):
    """Attention that leaves its keys and values in itself, or reads those that another one left."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.earlier = form, list[Any]()

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:  # type: ignore[override]
        output, (key, value) = super().forward(x, self.earlier[0].left() if self.earlier else None)
        if self.form == "a pair":
            self.pair = key, value
        elif self.form == "a list":
            self.values = [key, value]
        elif self.form == "a dictionary":
            self.by_name = {"key": key, "value": value}
        else:
            self.key, self.value = key, value
        return output, None

    def left(self) -> Any:
        if self.form == "a dictionary":
            return tuple(self.by_name.values())
        if self.form == "a list":
            return tuple(self.values)
        return self.pair if self.form == "a pair" else (self.key, self.value)


@pytest.mark.parametrize("form", ["a pair", "a list", "a dictionary", "attributes"])
def test_values_that_an_earlier_call_left_in_a_layer_hide_no_later_one(form: str) -> None:
    host = model(partial(Leaving, form), "no one")
    host.layers[1].earlier.append(host.layers[0])  # type: ignore[union-attr, operator]
    host(IDS)
    before = [id(t) for t in host.layers[0].left()]  # type: ignore[operator]
    with pytest.raises(UncoveredError, match=r"layers\.1 .* from NumPy or an attribute, such as one that an"):
        ula.trace(host, IDS)
    assert [id(t) for t in host.layers[0].left()] == before  # type: ignore[operator]
