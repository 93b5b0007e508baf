"""A module as one stage equals the stages of its functions, and a loop over tokens its frozen recurrence."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.recording import modules
from tests.recording.modules import HEADS, TOKENS, WIDTH, Projected
from tests.recording.test_recorded import LIMIT, REFUSED, draw, operator
from unilinattn.architectures import recorded as recording
from unilinattn.errors import UncoveredError
from unilinattn.operator.stages import WHOLE
from unilinattn.recording import compilation, frozen_module
from unilinattn.testing import relative_error
from unilinattn.testing.hosts import randomize

BATCH = TOKENS[0]


def as_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no function of a module be a stage."""

    def refused(*_: Any, **__: Any) -> None:
        raise UncoveredError("no function is a stage")

    monkeypatch.setattr(recording, "chains_of", refused)
    monkeypatch.setattr(recording, "chains_around_core", lambda *_: None)


@pytest.mark.parametrize("name", modules.MODULES)
def test_one_stage_equals_those_of_the_functions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, shape = modules.MODULES[name]
    # However many stages a loop takes.
    monkeypatch.setattr(compilation, "MOST", 10**6)
    monkeypatch.setattr(recording, "MANY", 10**6)
    stages = operator(build(), draw(*shape))
    assert all(stage.role != WHOLE for stage in stages.chains["x"])
    as_one_stage(monkeypatch)
    one = operator(build(), draw(*shape))
    assert [[stage.role for stage in chain] for chain in one.chains.values()] == [[WHOLE]]
    assert one.reconstruction_error() < LIMIT
    x = draw(*one.inputs["x"].shape, seed=1)
    assert relative_error(one.apply(x, bias=False), stages.apply(x, bias=False)) < LIMIT
    assert float((one.bias - stages.bias).norm()) < LIMIT * float(one.output.norm())
    assert relative_error(one.contributions([0, -1]), stages.contributions([0, -1])) < LIMIT
    g = draw(*one.output.shape, seed=2)
    assert relative_error(one.adjoint(g), stages.adjoint(g)) < LIMIT


class Opened(Projected):
    """Multiplies the values of each token by a gate that reads all earlier tokens."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v * k.cumsum(1).sigmoid() + v.cumsum(1)


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_sigmoid_that_reads_more_tokens_is_a_gate(is_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_whole:
        as_one_stage(monkeypatch)
    module, x, other = Opened(), draw(*TOKENS), draw(*TOKENS, seed=1)
    op = operator(module, x)
    with torch.no_grad():
        k, v = module.qkv(x).chunk(3, 2)[1], module.qkv(other).chunk(3, 2)[2]
        expected = module.out(v * k.cumsum(1).sigmoid() + v.cumsum(1))
    assert relative_error(op.apply(other), expected) < LIMIT


RECTIFIERS: dict[str, Callable[[Tensor], Tensor]] = {
    "limit": lambda x: x.clamp(min=0),
    "limit in place": lambda x: x.clone().clamp_min_(0.0),
    "maximum": lambda x: torch.maximum(x, x.new_zeros(())),
    "maximum of several": lambda x: torch.max(torch.zeros_like(x), x),
}


class Rectified(Projected):
    """Multiplies the values of each token by a rectified gate before they are summed."""

    def __init__(self, rectify: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.rectify = rectify

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (v * self.rectify(k)).cumsum(1)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("name", RECTIFIERS)
def test_a_rectified_gate_is_one_however_it_is_written(
    name: str, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_whole:
        as_one_stage(monkeypatch)
    module, x, other = Rectified(RECTIFIERS[name]), draw(*TOKENS), draw(*TOKENS, seed=1)
    op = operator(module, x)
    with torch.no_grad():
        k, v = module.qkv(x).chunk(3, 2)[1], module.qkv(other).chunk(3, 2)[2]
        expected = module.out((v * k.relu()).cumsum(1))
    assert relative_error(op.apply(other), expected) < LIMIT


class Regrouped(Projected):
    """Adds the values of every token to its group by a function without stages, and gates the sums by the queries."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return grouped(v) * q


def grouped(v: Tensor) -> Tensor:
    """Return the sums of every third token, each where its group's first token was."""
    groups = (torch.arange(v.shape[1]) % 3)[None, :, None].expand(v.shape)
    return torch.zeros_like(v).scatter_add_(1, groups, v)


def test_a_value_without_stages_does_not_make_its_gate_the_value() -> None:
    module, x, other = Regrouped(), draw(*TOKENS), draw(*TOKENS, seed=1)
    op = operator(module, x)
    assert [stage.role for stage in op.chains["x"]] == ["input", "core", "gate", "output"]
    assert op.reconstruction_error() < LIMIT
    with torch.no_grad():
        q, v = module.qkv(x).chunk(3, 2)[0], module.qkv(other).chunk(3, 2)[2]
        expected = module.out(grouped(v) * q)
    assert relative_error(op.apply(other), expected) < LIMIT


@pytest.mark.long
def test_the_passes_that_choose_values_do_not_grow_with_the_steps_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    original = frozen_module._LayerFreezing._tokens

    def counted(self: Any, tensor: Tensor, element: int) -> Any:
        passes[-1] += 1
        return original(self, tensor, element)

    monkeypatch.setattr(frozen_module._LayerFreezing, "_tokens", counted)
    as_one_stage(monkeypatch)
    for length in (16, 128):
        passes.append(0)
        operator(delta_loop(), draw(BATCH, length, WIDTH))
    assert 0 < passes[0] < passes[1] < 2.5 * passes[0]


def test_a_module_of_two_streams_has_a_stage_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(2, 7, WIDTH), draw(2, 5, WIDTH, seed=1)
    stages = operator(modules.Cross(), *inputs)
    as_one_stage(monkeypatch)
    one = operator(modules.Cross(), *inputs)
    assert set(one.ports) == set(stages.ports) == {"x", "memory"} and one.reconstruction_error() < LIMIT
    for port in one.ports:
        g = draw(*one.output.shape, seed=2)
        assert relative_error(one.adjoint(g, port=port), stages.adjoint(g, port=port)) < LIMIT
    assert float((one.bias - stages.bias).norm()) < LIMIT * float(one.output.norm())


def test_what_is_no_map_of_the_tokens_of_a_sequence_stays_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    as_one_stage(monkeypatch)
    for name in REFUSED.keys() - {"a function without a rule"}:
        with pytest.raises(UncoveredError, match="no function is a stage"):
            operator(REFUSED[name][0](), draw(*TOKENS))


def test_a_second_input_is_no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of another shape than the input, such as masks, may depend on tokens: they multiply, and add nothing."""

    class Biased(Projected):
        def forward(self, x: Tensor, offset: Tensor) -> Tensor:
            return self.out(self.qkv(x)[..., :WIDTH].cumsum(1) + offset)

    as_one_stage(monkeypatch)
    with pytest.raises(UncoveredError, match="no function is a stage"):
        operator(Biased(), draw(*TOKENS), draw(WIDTH, seed=1))


def test_a_wrong_derivative_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage's image of the input and its bias are compared with the module's output."""
    right = frozen_module._derivative
    monkeypatch.setattr(frozen_module, "_derivative", lambda *arguments: right(*arguments) * (1 + 1e-4))
    as_one_stage(monkeypatch)
    with pytest.raises(UncoveredError, match="no function is a stage"):
        operator(modules.LinearAttention(), draw(*TOKENS))


@pytest.mark.long
@pytest.mark.parametrize("has_core", [True, False])
def test_parameters_and_modes_are_as_before_and_the_graph_is_freed(
    has_core: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_core:
        monkeypatch.setattr(recording, "chains_around_core", lambda *_: None)
    module = delta_loop()
    module.out.weight.requires_grad_(False)
    before = {name: p.requires_grad for name, p in module.named_parameters()}
    op = operator(module, draw(BATCH, 80, WIDTH))
    assert {name: p.requires_grad for name, p in module.named_parameters()} == before
    assert all(p.grad is None for p in module.parameters())
    stage = next(stage for stage in op.chains["x"] if stage.role in ("core", WHOLE))
    result = weakref.ref(stage.mixer.left.value if has_core else stage.result)  # type: ignore[attr-defined]
    op.apply(op.inputs["x"])
    del op, stage
    gc.collect()
    assert result() is None


class Model(nn.Module):
    """Two blocks of loops over tokens between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mixers = nn.ModuleList(delta_loop() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.long
def test_methods_that_read_vectors_explain_loops_and_those_of_maps_say_why_they_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recording, "chains_around_core", lambda *_: None)
    ids = torch.randint(20, (BATCH, 9), generator=torch.Generator().manual_seed(0))
    trace = ula.trace(randomize(Model().eval()), ids, progress=False)
    logit = lambda out: out[:, -1, 3]  # noqa: E731
    result = ula.explain(trace, logit=logit, progress=False)
    assert result.method == "lrp" and float(result.completeness_gap) < 1e-4
    for method in ("latim", "alti"):
        errors = ula.explain(trace, method=method, target=-1).reconstruction_error
        assert set(errors) == {"mixers.0", "mixers.1"} and max(errors.values()) < 1e-4
    for method in ("raw", "rollout", "attention_grad"):
        options = {"logit": logit} if method == "attention_grad" else {}
        with pytest.raises(UncoveredError, match=r"mixers\.\d is one stage as a whole.*loop over tokens") as refusal:
            ula.explain(trace, method=method, target=-1, **options)
        advice = str(refusal.value).partition("Methods that work here")[2]
        assert "'latim'" in advice and "'raw'" not in advice and "'rollout'" not in advice


OUTER = {
    "einsum": lambda k, v: torch.einsum("bhk,bhv->bhkv", k, v),
    "broadcast": lambda k, v: k[..., None] * v[..., None, :],
}
READ = {
    "einsum": lambda q, state: torch.einsum("bhk,bhkv->bhv", q, state),
    "broadcast": lambda q, state: (q[..., None] * state).sum(-2),
}
FEATURES = {"none": lambda x: x, "elu + 1": lambda x: functional.elu(x) + 1, "silu": functional.silu}


class GatedLoop(Projected):
    """Gated linear attention or a decayed delta rule in Python, normed and gated, with features of queries and keys."""

    def __init__(self, rule: str, style: str, features: str) -> None:
        super().__init__()
        self.rule, self.style, self.features = rule, style, FEATURES[features]
        self.rate, self.decay, self.gate = nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH // HEADS, eps=1e-6)

    def factors(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).unbind(2)
        decay = self.decay(x).sigmoid().unflatten(2, (HEADS, -1))
        return self.features(q), self.features(k), v, decay, self.rate(x).sigmoid()

    def scan(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        outer, read = OUTER[self.style], READ[self.style]
        state, outputs = q.new_zeros(len(q), HEADS, q.shape[3], q.shape[3]), []
        for step in range(q.shape[1]):
            state = state * decay[:, step, :, :, None]
            written = v[:, step]
            if self.rule == "delta":
                written = rate[:, step, :, None] * (written - read(k[:, step], state))
            state = state + outer(k[:, step], written)
            outputs.append(read(q[:, step], state))
        return torch.stack(outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.norm(self.scan(*self.factors(x)))
        return self.out(mixed.flatten(2) * functional.silu(self.gate(x)))


def delta_loop() -> GatedLoop:
    return GatedLoop("delta", "einsum", "none")


@pytest.mark.long
@pytest.mark.parametrize("length", [6, 12, 80])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("style", OUTER)
@pytest.mark.parametrize("rule", ["gated", "delta"])
def test_the_values_of_a_loop_carry_and_its_queries_keys_decays_and_gates_are_frozen(
    rule: str, style: str, features: str, length: int
) -> None:
    module, x, other = GatedLoop(rule, style, features), draw(2, length, WIDTH), draw(2, length, WIDTH, seed=1)
    op = operator(module, x)
    assert [stage.role for stage in op.chains["x"]].count("core") == 1 and op.reconstruction_error() < LIMIT
    with torch.no_grad():
        q, k, v, decay, rate = module.factors(x)
        scale = module.scan(q, k, v, decay, rate).square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        mixed = module.scan(q, k, module.factors(other)[2], decay, rate) * scale * module.norm.weight
        expected = module.out(mixed.flatten(2) * functional.silu(module.gate(x)))
    assert relative_error(op.apply(other), expected) < LIMIT
