"""Statistics and similarity of maps against loops over rows."""

import math

import pytest
import torch
from torch import Tensor

from tests.analysis.plain import entropy, image, shares, spearman
from tests.hosts import named
from tests.methods.hosts import BATCH, LENGTH, real_tokens, traced
from unilinattn import analysis, trace
from unilinattn.errors import InputError, MemoryLimitError, OptionError
from unilinattn.memory import max_memory
from unilinattn.testing.promote import promoted

WITHIN = 0.9


def row_values(row: list[float], query: int, keys: list[int]) -> tuple[float, float, float, int]:
    share = dict(zip(keys, shares([row[j] for j in keys]), strict=True))
    distance = sum(p * abs(query - j) for j, p in share.items())
    one, two = sum(abs(row[j]) for j in keys), math.sqrt(sum(row[j] ** 2 for j in keys))
    sparsity = (math.sqrt(len(keys)) - one / two) / (math.sqrt(len(keys)) - 1)
    memory = next(d for d in range(len(row)) if sum(p for j, p in share.items() if abs(query - j) <= d) >= WITHIN)
    return distance, entropy(list(share.values())), sparsity, memory


def by_rows(maps: Tensor, real: Tensor, causal: bool) -> tuple[list[list[float]], int]:
    """Means of the four statistics by head, and the number of rows."""
    batch, heads, length, _ = maps.shape
    rows = []
    for b in range(batch):
        for i in range(length):
            keys = [j for j in range(length) if real[b, j] and (j <= i or not causal)]
            if real[b, i] and len(keys) > 1:
                rows.append((b, i, keys))
    means = []
    for h in range(heads):
        values = [row_values(maps[b, h, i].tolist(), i, keys) for b, i, keys in rows]
        means.append([sum(column) / len(rows) for column in zip(*values, strict=True)])
    return means, len(rows)


def check(measured, maps: Tensor, real: Tensor, causal: bool) -> None:
    expected, rows = by_rows(maps, real, causal)
    assert measured.rows == rows
    for at, name in enumerate(("distance", "entropy", "sparsity", "memory")):
        column = torch.tensor([values[at] for values in expected], dtype=torch.float64)
        assert (getattr(measured, name) - column).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["mamba", "llama", "s4d"])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_causal_maps(name: str, padding: str) -> None:
    run = traced(name, padding)
    found = analysis.map_statistics({"a": run}, within=WITHIN)
    for measured, layer in zip(found.models["a"], run.layers, strict=True):
        check(measured, layer.operator.matrix(heads=None), real_tokens(padding), causal=True)
    assert "90%" in repr(found)


def test_bidirectional_maps_scopes_and_reductions() -> None:
    vim = named("vim")
    with promoted():
        run = trace(vim.model().double(), vim.inputs().double())
        every = torch.ones(run.layers[0].output.shape[:2], dtype=torch.bool)
        for scope, heads in (("core", None), ("unified", "mean"), ("mixer", slice(1, 3))):
            found = analysis.map_statistics(run, scope=scope, heads=heads).models[run.model]
            for measured, layer in zip(found, run.layers, strict=True):
                maps = layer.operator.matrix(scope, heads)
                check(measured, maps if maps.ndim == 4 else maps[:, None], every, causal=False)


def test_blocks_of_rows_give_the_same(monkeypatch) -> None:
    run = traced("mamba")
    whole = analysis.map_statistics(run).models[run.model][0]
    with max_memory(50_000):
        assert len(list(run.layers[0].operator.row_blocks(heads=None, extra_elements=16 * 12))) > 1
        parts = analysis.map_statistics(run).models[run.model][0]
    assert (parts.distance - whole.distance).abs().max() < 1e-12
    assert torch.equal(parts.memory, whole.memory)


def test_undefined_statistics_are_errors() -> None:
    host = named("gpt2")
    model = host.model()
    with pytest.raises(InputError, match=r"no row of transformer.h.0.attn has two or more keys"):
        analysis.map_statistics(trace(model, host.inputs()[:, :1]))
    with pytest.raises(OptionError, match=r"within=0\.0"):
        analysis.map_statistics(trace(model, host.inputs()), within=0.0)
    silent = traced("mamba")
    with pytest.raises(InputError, match="a row of zeros"):
        analysis.map_statistics(silent_s4d())
    with max_memory(100), pytest.raises(MemoryLimitError):
        analysis.map_statistics(silent)


def silent_s4d():
    host = named("s4d")
    model = host.model()
    with torch.no_grad():
        model.layers[0].mixer.kernel.C.zero_()
    return trace(model, host.inputs())


def plain_divergence(p: list[float], q: list[float]) -> float:
    """(KL(p | m) + KL(q | m)) / 2 in bits, m the mean of both."""

    def relative(x: list[float], m: list[float]) -> float:
        return sum(a * math.log2(a / b) for a, b in zip(x, m, strict=True) if a)

    m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return (relative(p, m) + relative(q, m)) / 2


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_similarity_of_all_layers(padding: str) -> None:
    runs = {name: traced(name, padding) for name in ("mamba", "llama")}
    found = analysis.layer_similarity(runs)
    layers = [layer for run in runs.values() for layer in run.layers]
    maps = [layer.operator.matrix() for layer in layers]
    real = real_tokens(padding)
    for a in range(len(maps)):
        for b in range(len(maps)):
            ranks, divergences = [], []
            for s in range(BATCH):
                for i in range(LENGTH):
                    keys = [j for j in range(i + 1) if real[s, j]]
                    if real[s, i] and len(keys) > 1:
                        p, q = (shares([float(maps[x][s, i, j]) for j in keys]) for x in (a, b))
                        ranks.append(spearman(p, q))
                        divergences.append(plain_divergence(p, q))
            assert abs(float(found.rank_correlation[a, b]) - sum(ranks) / len(ranks)) < 1e-10
            assert abs(float(found.divergence[a, b]) - sum(divergences) / len(divergences)) < 1e-10
    assert found.names[0] == "mamba: backbone.layers.0.mixer"
    assert "rank correlation" in repr(found)


def test_similarity_of_two_maps() -> None:
    valid = torch.ones(1, 2, 3, dtype=torch.bool)
    a = torch.tensor([[[1.0, 2.0, 4.0], [1.0, 0.0, 0.0]]])
    b = torch.tensor([[[-4.0, -2.0, -1.0], [0.0, 0.0, 3.0]]])
    found = analysis.map_similarity(a, b, valid)
    assert abs(found.divergence - (plain_divergence([1 / 7, 2 / 7, 4 / 7], [4 / 7, 2 / 7, 1 / 7]) + 1) / 2) < 1e-12
    assert abs(found.rank_correlation - (-1 - 0.5) / 2) < 1e-12
    same = analysis.map_similarity(a, -3 * a, valid)
    assert (same.rank_correlation, same.divergence) == (pytest.approx(1), pytest.approx(0, abs=1e-15))
    # A row of equal weights orders no keys: its divergence counts, its ranks do not.
    flat = torch.tensor([[[1.0, 1.0, 1.0], [0.0, 0.0, 3.0]]])
    assert analysis.map_similarity(a, flat, valid).rank_correlation == pytest.approx(-0.5)


def test_undefined_similarities_are_errors() -> None:
    one, valid = torch.ones(1, 2, 3), torch.ones(1, 2, 3, dtype=torch.bool)
    with pytest.raises(InputError, match="equal shape"):
        analysis.map_similarity(one, one[:, :1], valid)
    with pytest.raises(InputError, match=r"a row of zeros, .*index \(0, 1\)"):
        analysis.map_similarity(one, one * torch.tensor([1.0, 0.0])[:, None], valid)
    with pytest.raises(InputError, match="no row has two or more valid keys"):
        analysis.map_similarity(one, one, torch.zeros_like(valid))
    host = named("gpt2")
    runs = {"a": trace(host.model(), host.inputs()), "b": trace(host.model(), host.inputs()[:, :4])}
    with pytest.raises(InputError, match=r"different shapes .*trace the same sequences"):
        analysis.layer_similarity(runs)
    with max_memory(600), pytest.raises(MemoryLimitError, match="compare fewer or shorter sequences"):
        analysis.layer_similarity(traced("mamba"))


@pytest.mark.long
def test_the_pictures(tmp_path) -> None:
    runs = {name: traced(name) for name in ("mamba", "llama")}
    analysis.map_statistics(runs).plot(tmp_path / "statistics.png")
    analysis.layer_similarity(runs).plot(tmp_path / "similarity.png")
    assert image(tmp_path / "statistics.png") and image(tmp_path / "similarity.png")
