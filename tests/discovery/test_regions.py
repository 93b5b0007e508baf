"""Models whose forward mixes tokens: its regions are exact layers, and the model is unchanged."""

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.tracing.models import VOCABULARY, Output
from unilinattn.errors import UncoveredError
from unilinattn.testing import left_as_found, relative_error
from unilinattn.testing.hosts import randomize
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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("method", ["logit", "lrp", "latim", "alti", "rollout", "attribution", "knockout"])
def test_a_region_is_explained_as_the_same_module(method: str) -> None:
    torch.manual_seed(0)
    inline, modules = Inline().eval().double(), InModules().eval().double()
    modules.load_state_dict(inline.state_dict())
    actual, expected = (ula.explain(model, ids(), method=method, target=-1).scores for model in (inline, modules))
    assert expected.any() and relative_error(actual, expected) <= 1e-10


@pytest.mark.long
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


class Set(Weights):
    """Numbers and a table in attributes, and a number that Python reads from the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.table, self.activation = 1.0, torch.ones(WIDTH), nn.GELU()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Output:
        x = self.embedded(input_ids)
        used = len(x[0]) if attention_mask is None else int(attention_mask.sum(1).max())
        mixed = attention(self.attentions[0].inner(x)[:, :used]) * self.scale * self.table
        return self.output(x + functional.pad(self.activation(mixed), (0, 0, 0, x.shape[1] - used)))


@pytest.mark.long
def test_attributes_may_change_between_traces() -> None:
    model = Set().eval()

    def change(**attributes: object) -> None:
        for name, value in attributes.items():
            setattr(model, name, value)
        inputs = {"input_ids": ids(), "attention_mask": mask}
        traced = ula.trace(model, inputs)
        with torch.no_grad():
            assert relative_error(traced.output.logits, model(**inputs).logits) <= 1e-6
        assert all(layer.reconstruction_error() <= 1e-6 for layer in traced.layers)

    mask = torch.ones(2, 7, dtype=torch.long)
    change()
    change(scale=3.0)
    change(table=2 * torch.ones(WIDTH))
    change(activation=nn.Tanh())
    mask[:, 5:] = 0
    change()


class Signed(Weights):
    """The sign of the branch is that of the stream."""

    def forward(self, input_ids: Tensor) -> Output:
        x = self.embedded(input_ids)
        return self.output(x + attention(self.attentions[0].inner(x)) * (1 if x.sum() > 0 else -1))


@pytest.mark.long
def test_a_number_that_python_reads_before_a_region_is_that_of_its_run() -> None:
    torch.manual_seed(0)
    model = Signed().eval()
    refused = 0
    for seed in range(6):
        inputs = torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(seed))
        traced = ula.trace(model, inputs)
        with torch.no_grad():
            assert relative_error(traced.output.logits, model(inputs).logits) <= 1e-6
        try:
            ula.explain(traced, method="occlusion", target=-1)
        except UncoveredError as error:
            refused += "or with other numbers" in str(error)
    assert refused


@pytest.mark.long
def test_a_model_in_half_precision_and_one_of_a_class_with_requirements() -> None:
    traced = ula.trace(Inline().eval().bfloat16(), ids())
    assert all(layer.reconstruction_error() <= 2e-2 for layer in traced.layers)

    class Strict(Inline):
        def __init_subclass__(cls, *, key: str) -> None:
            raise AssertionError

        def __new__(cls, size: int) -> "Strict":
            return super().__new__(cls)

        def __init__(self, size: int) -> None:
            super().__init__()

        def forward(self, input_ids: Tensor) -> Output:
            assert type(self) is Strict
            return super().forward(input_ids)

    assert len(ula.trace(Strict(3).eval(), ids()).layers) == 2


class Decides(Weights):
    def forward(self, input_ids: Tensor) -> Output:
        x = self.embedded(input_ids)
        mixed = attention(self.attentions[0].inner(x))
        scale = 1 if mixed.sum() > 0 else -1
        return self.output(x + scale * mixed)


class Views(Weights):
    """Scores that are masked through a view."""

    def forward(self, input_ids: Tensor) -> Output:
        x = self.embedded(input_ids)
        scores = x @ x.transpose(1, 2)
        scores.view(-1, x.shape[1]).masked_fill_(torch.arange(x.shape[1]) > 3, -1e9)
        return self.output(x + scores.softmax(-1) @ x)


class Counts(Weights):
    """Another output at each run."""

    runs = 0

    def forward(self, input_ids: Tensor) -> Output:
        Counts.runs += 1
        x = self.embedded(input_ids)
        return self.output(x + attention(self.attentions[0].inner(x)) * Counts.runs)


class Counter(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        Counts.runs += 1
        return x * Counts.runs


class CountsInside(Weights):
    """A submodule with another output at each run."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()

    def forward(self, input_ids: Tensor) -> Output:
        x = self.embedded(input_ids)
        return self.output(x + self.counter(attention(self.attentions[0].inner(x))))


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
        (Views, r"writes into a view of a tensor \(masked_fill_\)"),
        (CountsInside, "differs by .* when parts of it run as modules"),
        (Counts, "or with other numbers, than in an earlier run"),
        (Branches, "calls other functions, or with other numbers, than"),
    ],
)
def test_a_forward_that_is_no_fixed_sequence_of_calls_is_refused(build: Callable[[], nn.Module], reason: str) -> None:
    model, call = build().eval(), nn.Module.__call__
    with pytest.raises(UncoveredError, match=reason):
        ula.trace(model, ids())
    assert nn.Module.__call__ is call
    assert not any("region" in path for path, _ in model.named_modules())


@pytest.mark.long
def test_a_module_that_mixes_the_vectors_it_looks_up_is_a_region() -> None:
    config = transformers.MobileBertConfig(
        vocab_size=40,
        hidden_size=16,
        embedding_size=8,
        intra_bottleneck_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
    )
    model = randomize(transformers.MobileBertForMaskedLM(config)).double().eval()
    inputs = torch.randint(1, 40, (2, 7), generator=torch.Generator().manual_seed(0))
    with left_as_found(model):
        trace = ula.trace(model, inputs)
    assert [layer.name for layer in trace.layers] == [
        "mobilebert.embeddings.region_0",
        *(f"mobilebert.encoder.layer.{number}.attention" for number in range(2)),
    ]
    # Each vector is joined by those of its neighbours.
    joined = trace.layers[0].operator.contributions(3).any(-1)
    assert joined.tolist() == [[False, False, True, True, True, False, False]] * 2
    assert max(layer.reconstruction_error() for layer in trace.layers) < 1e-12
    assert ula.explain(trace, method="logit", target=-1).completeness_gap < 1e-12


class Bare(Inline):
    """Returns a tensor, as a layer does, but reads ids."""

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = super().forward(input_ids).logits
        return logits


@pytest.mark.long
def test_a_model_that_is_itself_the_layer_that_mixes_is_taken_apart() -> None:
    torch.manual_seed(0)
    bare = randomize(Bare().double()).eval()
    ids = torch.randint(VOCABULARY, (2, 7))
    trace = ula.trace(bare, ids, progress=False)
    assert len(trace.layers) == DEPTH and not any(layer.name == "Bare" for layer in trace.layers)
    assert ula.explain(trace, method="logit", target=-1, progress=False).completeness_gap < 1e-10
