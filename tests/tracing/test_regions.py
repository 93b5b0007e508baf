"""Models that mix tokens in their own forward: its regions are layers, exact, and the model stays as it is."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.tracing.models import VOCABULARY, Output
from unilinattn.errors import UncoveredError
from unilinattn.testing import relative_error
from unilinattn.testing.state import differences, model_state

WIDTH, HEADS, DEPTH = 8, 2, 2


def attention(x: Tensor, mask: Tensor | None = None, *, causal: bool = True) -> Tensor:
    query, key, value = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in x.chunk(3, -1))
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if causal else None
    scores = scores if hidden is None else scores.masked_fill(hidden, -1e9)
    scores = scores if mask is None else scores.masked_fill(mask[:, None, None] == 0, -1e9)
    return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(attention(self.inner(x)))


class Weights(nn.Module):
    """The modules of a transformer, which its subclasses call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(32, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * DEPTH + 1))
        self.attentions = nn.ModuleList(Attention() for _ in range(DEPTH))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 16) for _ in range(DEPTH))
        self.down = nn.ModuleList(nn.Linear(16, WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.drop = nn.Dropout(0.1)

    def embedded(self, input_ids: Tensor) -> Tensor:
        return self.embed(input_ids) + self.position[: input_ids.shape[1]]

    def output(self, x: Tensor) -> Output:
        return Output(self.head(self.norms[-1](x)))


class InModules(Weights):
    def forward(self, input_ids: Tensor) -> Output:
        x = self.embedded(input_ids)
        for at, mixer in enumerate(self.attentions):
            x = x + self.drop(mixer(self.norms[2 * at](x)))
            x = x + self.down[at](functional.gelu(self.up[at](self.norms[2 * at + 1](x))))
        return self.output(x)


class Inline(Weights):
    def forward(self, input_ids: Tensor) -> Output:
        x = self.embedded(input_ids)
        for at, mixer in enumerate(self.attentions):
            x = x + self.drop(mixer.outer(attention(mixer.inner(self.norms[2 * at](x)))))
            x = x + self.down[at](functional.gelu(self.up[at](self.norms[2 * at + 1](x))))
        return self.output(x)


class Body(Weights):
    """No module for the projections of queries either, and padding."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, causal: bool = True) -> Tensor:
        x = self.embedded(input_ids)
        for norm, mixer in zip(self.norms, self.attentions, strict=False):
            inner, outer = mixer.inner, mixer.outer
            hidden = norm(x) @ inner.weight.T + inner.bias
            x = x + attention(hidden, attention_mask, causal=causal) @ outer.weight.T
        return x


class WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Body(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, causal: bool = True) -> Output:
        return Output(self.head(self.body(input_ids, attention_mask, causal)))


class PostNormed(Weights):
    def forward(self, input_ids: Tensor) -> Output:
        x = self.embedded(input_ids)
        for at in (0, 0, 1):
            x = self.norms[at](x + attention(self.attentions[at].inner(x)))
        return self.output(x)


class Written(Weights):
    """A linear recurrence whose states are written into one tensor."""

    def forward(self, input_ids: Tensor) -> Output:
        x = self.embedded(input_ids)
        decay, value = self.attentions[0].outer(x).sigmoid(), self.attentions[1].outer(x)
        state, states = torch.zeros_like(value[:, 0]), torch.zeros_like(value)
        for token in range(x.shape[1]):
            state = decay[:, token] * state + (1 - decay[:, token]) * value[:, token]
            states[:, token] = state
        return self.output(x + states)


class Pixels(Weights):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.first = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, pixel_values: Tensor) -> Output:
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1)
        for norm, mixer in zip(self.norms, self.attentions, strict=False):
            x = x + mixer.outer(attention(mixer.inner(norm(x)), causal=False))
        return Output(self.head(x[:, 0]))


def ids(batch: int = 2, length: int = 7) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


def padded() -> dict[str, Tensor]:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": ids(), "attention_mask": mask}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], object], list[str]]] = {
    "inline": (Inline, ids, ["region_0", "region_2"]),
    "weights and padding, in a body": (WithHead, padded, ["body.region_0", "body.region_1"]),
    "post-normed, shared": (PostNormed, ids, ["region_0", "region_1", "region_2"]),
    "written in place": (Written, ids, ["region_0"]),
    "pixels": (Pixels, lambda: {"pixel_values": torch.randn(2, 3, 8, 8)}, ["region_3", "region_4"]),
}


@pytest.mark.parametrize("name", CASES)
def test_regions_of_a_forward_are_exact_layers(name: str) -> None:
    build, inputs, layers = CASES[name]
    model = build().eval()
    before = model_state(model)
    traced = ula.trace(model, inputs())
    assert [layer.name for layer in traced.layers] == layers
    assert traced.model == type(model).__name__
    assert all(layer.reconstruction_error() <= 1e-6 for layer in traced.layers)
    for method in ("latim", "knockout", "contribution", *([] if name == "pixels" else ["logit"])):
        result = ula.explain(traced, method=method, target=-1)
        assert result.scores.isfinite().all() and result.scores.any()
    assert not differences(before, model_state(model))


@pytest.mark.parametrize("method", ["logit", "lrp", "latim", "alti", "rollout", "attribution", "knockout"])
def test_a_region_is_explained_as_the_same_module(method: str) -> None:
    torch.manual_seed(0)
    inline, modules = Inline().eval().double(), InModules().eval().double()
    modules.load_state_dict(inline.state_dict())
    actual, expected = (ula.explain(model, ids(), method=method, target=-1).scores for model in (inline, modules))
    assert expected.any() and relative_error(actual, expected) <= 1e-10


def test_inputs_and_flags_may_differ_from_the_recorded_ones() -> None:
    model = WithHead().eval()
    for inputs in (
        {"input_ids": ids(1, 5)},
        {"input_ids": ids(3, 9)},
        {"input_ids": ids(3, 9), "causal": False},
        {"input_ids": ids(3, 9)},
        padded(),
    ):
        traced = ula.trace(model, inputs)
        first = traced.layers[0].operator
        assert first.reconstruction_error() <= 1e-6
        assert bool(first.matrix("core").triu(1).any()) != inputs.get("causal", True)
        with torch.no_grad():
            assert torch.equal(traced.output.logits, model(**inputs).logits)
    model.double()
    assert ula.trace(model, ids()).layers[0].output.dtype == torch.float64


class Decides(Weights):
    def forward(self, input_ids: Tensor) -> Output:
        x = self.embedded(input_ids)
        mixed = attention(self.attentions[0].inner(x))
        scale = 1 if mixed.sum() > 0 else -1
        return self.output(x + scale * mixed)


class Counts(Weights):
    """Another output at each run."""

    runs = 0

    def forward(self, input_ids: Tensor) -> Output:
        Counts.runs += 1
        x = self.embedded(input_ids)
        return self.output(x + attention(self.attentions[0].inner(x)) * Counts.runs)


class Branches(Weights):
    """Another function in every second run."""

    runs = 0

    def forward(self, input_ids: Tensor) -> Output:
        Branches.runs += 1
        x = self.embedded(input_ids)
        x = x.relu() if Branches.runs % 2 else x.abs()
        return self.output(x + attention(self.attentions[0].inner(x)))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (Decides, r"decides by numbers of its tokens \(__bool__\)"),
        (Counts, "differs by .* when parts of it run as modules"),
        (Branches, "calls other functions than in an earlier run"),
    ],
)
def test_a_forward_that_is_no_fixed_sequence_of_calls_is_refused(build: Callable[[], nn.Module], reason: str) -> None:
    model, call = build().eval(), nn.Module.__call__
    with pytest.raises(UncoveredError, match=reason):
        ula.trace(model, ids())
    assert nn.Module.__call__ is call
    assert not any("region" in path for path, _ in model.named_modules())
