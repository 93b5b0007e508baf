"""The methods of captum against plain loops over `inputs_embeds`, on hosts of five kinds."""

from functools import cache, partial
from itertools import combinations
from math import factorial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.methods.hosts import HOSTS, inputs
from unilinattn import explain, trace
from unilinattn.errors import OptionError
from unilinattn.testing import left_as_found, promoted, relative_error
from unilinattn.testing.hosts import delta, host, mamba
from unilinattn.tracing.trace import Trace

METHODS = ("gradient", "input_x_gradient", "integrated_gradients", "smoothgrad", "occlusion", "kernel_shap")
KINDS = ("mamba", "mamba2", "llama", "qwen3.5", "zamba2")
LENGTH = 6
LIMIT = 1e-8


@cache
def hosted(name: str, padding: str = "none") -> tuple[nn.Module, dict[str, Tensor], Trace]:
    others = {each.name: each for each in (*delta.HOSTS, *mamba.HOSTS)}
    model = HOSTS[name].model() if name in HOSTS else others[name].model().double()
    given = inputs(padding)
    with promoted():
        return model, given, trace(model, given)


class Plain:
    """The predicted logit at the last token as a function of `inputs_embeds`, for one sequence of a host."""

    def __init__(self, name: str, padding: str, sequence: int) -> None:
        self.model, given, _ = hosted(name, padding)
        self.given = {key: value[sequence : sequence + 1] for key, value in given.items() if key != "input_ids"}
        self.real = self.given.get("attention_mask", torch.ones(1, LENGTH))[0].bool()
        if padding == "left" and name in HOSTS and HOSTS[name].positions:
            self.given["position_ids"] = (self.real.long().cumsum(0) - 1).clamp_min(0)[None]
        self.table = self.model.get_input_embeddings().weight.detach()
        self.x = self.table[given["input_ids"][sequence]]
        self.last = int(self.real.nonzero()[-1])
        self.best = int(self.logits(self.x).argmax())

    def logits(self, x: Tensor) -> Tensor:
        with promoted():
            return self.model(inputs_embeds=x[None], **self.given).logits[0, self.last]

    def __call__(self, x: Tensor) -> Tensor:
        return self.logits(x)[self.best]

    def gradient(self, x: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(self(leaf), leaf)[0] * self.real[:, None]

    def without(self, baseline: Tensor, tokens: list[int]) -> Tensor:
        x = self.x.clone()
        x[tokens] = baseline
        return x


def plain(method: str, f: Plain, options: dict[str, Any]) -> Tensor:
    """The scores of one sequence from their definition."""
    baseline = {"zero": torch.zeros_like(f.table[0]), "mean-embedding": f.table.mean(0)}.get(
        options.get("baseline", "zero"), f.table[3]
    )
    if method == "gradient":
        return f.gradient(f.x).abs().sum(-1)
    if method == "input_x_gradient":
        return (f.x * f.gradient(f.x)).sum(-1)
    if method == "integrated_gradients":
        start = torch.where(f.real[:, None], baseline, f.x)
        points, weights = np.polynomial.legendre.leggauss(options["n_steps"])
        total = torch.zeros_like(f.x)
        for point, weight in zip((points + 1) / 2, weights / 2, strict=True):
            total += float(weight) * f.gradient(start + float(point) * (f.x - start))
        return ((f.x - start) * total).sum(-1)
    if method == "smoothgrad":
        torch.manual_seed(options["seed"])
        spread = f.x[f.real].max() - f.x[f.real].min()
        copies = [f.x.clone() for _ in range(options["n_samples"])]
        for copy in copies:
            copy[f.real] += 0.15 * spread * torch.randn(copy[f.real].shape, dtype=torch.float64)
        return torch.stack([f.gradient(copy).abs().sum(-1) for copy in copies]).mean(0)
    with torch.no_grad():
        if method == "occlusion":
            return occluded(f, baseline, options.get("window", 1))
        count = int(f.real.sum())
        if 2**count - 2 <= options["n_samples"]:
            return shapley_sum(f, baseline)
        return shapley_regression(f, baseline, options)


def occluded(f: Plain, baseline: Tensor, window: int) -> Tensor:
    drops: list[list[Tensor]] = [[] for _ in range(LENGTH)]
    real = f.real.nonzero().flatten().tolist()
    for start in range(len(real) - window + 1):
        tokens = real[start : start + window]
        drop = f(f.x) - f(f.without(baseline, tokens))
        for j in tokens:
            drops[j].append(drop)
    return torch.stack([sum(each, torch.zeros(())) / max(len(each), 1) for each in drops])


def shapley_sum(f: Plain, baseline: Tensor) -> Tensor:
    """The sum over all coalitions of the change that a token brings, by the formula of Shapley."""
    real = f.real.nonzero().flatten().tolist()
    value = {
        subset: f(f.without(baseline, [j for j in real if j not in subset]))
        for size in range(len(real) + 1)
        for subset in combinations(real, size)
    }
    scores = torch.zeros(LENGTH, dtype=torch.float64)
    for subset, before in value.items():
        for j in set(real) - set(subset):
            share = factorial(len(subset)) * factorial(len(real) - len(subset) - 1) / factorial(len(real))
            scores[j] += share * (value[tuple(sorted((*subset, j)))] - before)
    return scores


def shapley_regression(f: Plain, baseline: Tensor, options: dict[str, Any]) -> Tensor:
    """Least squares over coalitions drawn as captum draws them: a size, then normal numbers above a threshold."""
    real = f.real.nonzero().flatten().tolist()
    count = len(real)
    torch.manual_seed(options["seed"])
    size = torch.arange(count, dtype=torch.float64)
    chances = (count - 1) / (size * (count - size))
    chances[0] = 0
    coalitions = [torch.ones(count), torch.zeros(count)]
    with promoted():
        drawn = torch.distributions.Categorical(chances)
        while len(coalitions) < options["n_samples"]:
            chosen = int(drawn.sample())
            numbers = torch.randn(1, count)
            coalitions.append((numbers > torch.kthvalue(numbers, count - chosen).values)[0].double())
    design = torch.stack([torch.cat([c.double(), torch.ones(1, dtype=torch.float64)]) for c in coalitions])
    values = torch.stack([f(f.without(baseline, [real[k] for k in range(count) if not c[k]])) for c in coalitions])
    weight = torch.ones(len(coalitions), dtype=torch.float64)
    weight[:2] = 1e6
    normal = design.T @ (weight[:, None] * design)
    scores = torch.zeros(LENGTH, dtype=torch.float64)
    scores[real] = torch.linalg.solve(normal, design.T @ (weight * values))[:-1]
    return scores


OPTIONS: dict[str, dict[str, Any]] = {
    "integrated_gradients": {"n_steps": 7, "baseline": "mean-embedding"},
    "smoothgrad": {"n_samples": 4, "seed": 3},
    "kernel_shap": {"n_samples": 30, "seed": 5},
}


def compared(name: str, padding: str, method: str, options: dict[str, Any]) -> None:
    _, given, found = hosted(name, padding)
    with promoted():
        result = explain(found, method=method, target=-1, **options)
    assert result.dims == ("batch", "key")
    expected = torch.stack([plain(method, Plain(name, padding, b), options) for b in range(len(given["input_ids"]))])
    assert float(expected.abs().max()) > 1e-3
    assert relative_error(result.scores, expected) <= LIMIT


QUICK = {("gradient", name) for name in KINDS} | {(method, "mamba2") for method in METHODS}
CASES = [
    pytest.param(method, name, marks=() if (method, name) in QUICK else pytest.mark.slow)
    for method in METHODS
    for name in KINDS
]


@pytest.mark.parametrize(("method", "name"), CASES)
def test_scores_equal_their_definition(method: str, name: str) -> None:
    compared(name, "none", method, OPTIONS.get(method, {}))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("occlusion", {"window": 2, "baseline": 3}),
        ("integrated_gradients", {"n_steps": 1, "baseline": 3}),
        ("kernel_shap", {"n_samples": 12, "seed": 1, "baseline": "mean-embedding"}),
    ],
)
def test_options(method: str, options: dict[str, Any]) -> None:
    compared("mamba2", "left", method, options)


def test_other_definitions_give_other_scores() -> None:
    found, f = hosted("llama")[2], Plain("llama", "none", 0)
    with promoted():
        signed = explain(found, method="gradient", target=-1, sign="keep").scores[0]
        product = explain(found, method="input_x_gradient", target=-1).scores[0]
        shares = explain(found, method="logit", target=-1).scores[0]
        path = explain(found, method="integrated_gradients", target=-1, n_steps=7).scores[0]
    assert relative_error(signed[None], f.gradient(f.x).sum(-1)[None]) <= LIMIT
    assert relative_error(signed.abs()[None], plain("gradient", f, {})[None]) > 1e-2
    assert relative_error(product[None], shares[None]) > 1e-2, "the frozen model has another gradient"
    assert relative_error(path[None], plain("integrated_gradients", f, {"n_steps": 8})[None]) > 1e-6
    assert relative_error(path[None], plain("integrated_gradients", f, OPTIONS["integrated_gradients"])[None]) > 1e-2


def test_the_convergence_delta_is_reported() -> None:
    found = hosted("mamba2")[2]
    with promoted():
        result = explain(found, method="integrated_gradients", target=-1, n_steps=5)
        fine = explain(found, method="integrated_gradients", target=-1, n_steps=400, baseline="mean-embedding")
    plains = [Plain("mamba2", "none", b) for b in range(2)]
    start, end = torch.stack([torch.stack([f(0 * f.x), f(f.x)]) for f in plains]).detach().unbind(1)
    missed = result.scores.sum(1) - (end - start)
    for name, expected in {"delta": missed, "logit": end, "baseline": start}.items():
        assert torch.allclose(result.extras[name], expected, rtol=LIMIT)
    assert result.completeness_gap == pytest.approx(float((missed / (end - start)).abs().max()), rel=1e-8)
    assert f"completeness gap {result.completeness_gap:.1e}" in repr(result)
    assert fine.completeness_gap is not None and fine.completeness_gap < 1e-3 < result.completeness_gap


@pytest.mark.slow
def test_without_a_target_each_row_explains_its_position() -> None:
    for name, padding in (("mamba2", "left"), ("llama", "right")):
        found = hosted(name, padding)[2]
        for method in ("gradient", "integrated_gradients"):
            options = OPTIONS.get(method, {})
            with promoted():
                whole = explain(found, method=method, **options)
                assert whole.dims == ("batch", "query", "key")
                for target in (0, -1, [2, 1]):
                    row = explain(found, method=method, target=target, **options)
                    at = torch.arange(2), found.positions(target)
                    assert relative_error(whole.scores[at], row.scores) <= LIMIT
                    assert all(torch.allclose(whole.extras[k][at], v) for k, v in row.extras.items())


@pytest.mark.long
def test_shapley_values() -> None:
    """Exact if all coalitions fit and for a number that is additive in the tokens, otherwise an estimate."""
    model, given, _ = hosted("llama")
    everything = 2**LENGTH - 2
    with promoted():
        found = trace(model, {**given, "output_hidden_states": True})
        sums = explain(found, method="kernel_shap", n_samples=40, logit=lambda out: out.hidden_states[0].sum((1, 2)))
        exact, more, drawn = (
            explain(found, method="kernel_shap", target=-1, n_samples=count)
            for count in (everything, 500, everything - 1)
        )
    table = model.get_input_embeddings().weight.detach()
    assert relative_error(sums.scores, table[given["input_ids"]].sum(-1)) <= LIMIT
    assert sums.dims == ("batch", "key") and sums.completeness_gap is not None and sums.completeness_gap < 1e-8
    with torch.no_grad():
        expected = torch.stack([shapley_sum(Plain("llama", "none", b), torch.zeros_like(table[0])) for b in range(2)])
    assert relative_error(exact.scores, expected) <= LIMIT and torch.equal(exact.scores, more.scores)
    assert exact.completeness_gap is not None and exact.completeness_gap <= LIMIT
    assert relative_error(drawn.scores, expected) > 1e-2
    assert drawn.completeness_gap is not None and drawn.completeness_gap < 1e-3


def test_one_token_has_the_whole_difference() -> None:
    model = HOSTS["mamba"].model()
    with promoted():
        result = explain(model, torch.tensor([[4]]), method="kernel_shap", target=-1)
        logits = model(torch.tensor([[4]])).logits[0, -1]
        empty = model(inputs_embeds=torch.zeros(1, 1, 6)).logits[0, -1]
    assert torch.allclose(result.scores[0, 0], (logits - empty)[logits.argmax()])


@pytest.mark.parametrize("method", ["smoothgrad", "kernel_shap"])
def test_a_seed_repeats_its_numbers(method: str) -> None:
    found, options = hosted("mamba2")[2], {**OPTIONS[method], "target": -1}
    before = torch.get_rng_state()
    one, two = (explain(found, method=method, **options) for _ in range(2))
    other = explain(found, method=method, **{**options, "seed": 17})
    assert torch.equal(one.scores, two.scores) and not torch.equal(one.scores, other.scores)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_left_as_found(method: str) -> None:
    model, _, found = hosted("mamba2")
    parameter = next(model.parameters())
    parameter.requires_grad_(False)
    with left_as_found(model):
        explain(found, method=method, target=-1, **OPTIONS.get(method, {}))
    assert not parameter.requires_grad
    parameter.requires_grad_(True)
    with left_as_found(model), pytest.raises(ZeroDivisionError):
        explain(found, method=method, logit=lambda out: 1 / 0)
    assert all(each.requires_grad and each.grad is None for each in model.parameters())


@pytest.mark.parametrize("method", ["gradient", "input_x_gradient"])
def test_gradients_of_a_trace_take_two_runs(method: str) -> None:
    """One finds the vectors of the tokens, and one has the graph."""
    model, _, found = hosted("llama")
    runs: list[None] = []
    handle = model.register_forward_hook(lambda *_: runs.append(None))
    with handle:
        explain(found, method=method, target=-1)
    assert len(runs) == 2


def test_queries_of_inputs_that_cannot_be_repeated_are_explained_one_by_one() -> None:
    """An argument with three rows belongs to two sequences, of which none can be repeated."""

    class WithTable(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Tensor, table: Tensor) -> Any:
            return self.model(input_ids, use_cache=False)

    model, given, found = hosted("llama")
    with promoted():
        other = trace(WithTable(model).eval(), {**given, "table": torch.ones(3, 2)})
        whole, plain = (explain(each, method="gradient").scores for each in (other, found))
    assert relative_error(whole, plain) <= LIMIT


def test_the_logit_can_be_a_token_a_difference_or_a_function() -> None:
    found = hosted("mamba2")[2]
    with promoted():
        run = partial(explain, found, method="input_x_gradient")
        tokens = [run(target=-1, logit=token).scores for token in (4, 2)]
        assert relative_error(run(target=-1, logit=(4, 2)).scores, tokens[0] - tokens[1]) <= LIMIT
        own = run(logit=lambda out: out.logits[:, -1, 4])
        assert relative_error(own.scores, tokens[0]) <= LIMIT and own.dims == ("batch", "key")
        dropped = explain(found, method="occlusion", logit=lambda out: out.logits[:, -1, 4] * 2).scores
        assert relative_error(dropped, 2 * explain(found, method="occlusion", target=-1, logit=4).scores) <= LIMIT


def test_patches_of_an_image_are_tokens() -> None:
    model, x = host("vit").model().double(), host("vit").inputs().double()
    with promoted():
        found = trace(model, x)
        result = explain(found, method="input_x_gradient", logit=1)
        dropped = explain(found, method="occlusion", logit=1)
        streams: list[Tensor] = []
        keep = model.vit.embeddings.register_forward_hook(lambda _, args, out: streams.append(out.requires_grad_()))
        logits = model(x).logits[:, 1]
        keep.remove()
        (slope,) = torch.autograd.grad(logits.sum(), streams[0])
        expected = (slope * streams[0]).detach().sum(-1)
        hide = torch.ones_like(streams[0])
        hide[:, 2] = 0
        cover = model.vit.embeddings.register_forward_hook(lambda _, args, out: out * hide)
        with torch.no_grad():
            without = model(x).logits[:, 1]
        cover.remove()
    assert result.dims == ("batch", "key")
    assert relative_error(result.scores, expected) <= LIMIT
    assert relative_error(dropped.scores[:, 2:3], (logits - without).detach()[:, None]) <= LIMIT
    with pytest.raises(OptionError, match=r"needs an embedding of token ids.* use 'zero'"):
        explain(found, method="occlusion", logit=1, baseline="mean-embedding")


@pytest.mark.long
def test_half_precision_runs_in_the_hosts_dtype() -> None:
    model = HOSTS["llama"].model().bfloat16()
    for method in METHODS:
        result = explain(model, inputs(), method=method, target=-1, trust="warn", **OPTIONS.get(method, {}))
        assert result.scores.dtype == torch.float32 and bool(result.scores.isfinite().all())
