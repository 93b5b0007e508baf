"""Token vectors, their similarity, and the convolution's channels, against loops."""

from dataclasses import replace

import pytest
import torch

from tests.analysis.plain import cosine, image, layer_of, spearman
from tests.hosts import named
from tests.methods.hosts import close, inputs, real_tokens, traced
from unilinattn import analysis, trace
from unilinattn.analysis.cores import core_of
from unilinattn.errors import InputError, OptionError, UncoveredError
from unilinattn.examples import TASKS, load
from unilinattn.operator.flow import Flow

FACTORS = {
    "keys": (analysis.token_keys, lambda core: core.mixer.key),
    "queries": (analysis.token_queries, lambda core: core.mixer.query),
    "values": (analysis.token_values, lambda core: core.value),
}


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("lag", [0, 2])
def test_means_by_token(name: str, padding: str, lag: int) -> None:
    function, factor = FACTORS[name]
    run = traced("mamba", padding)
    found = function(run, 1, lag=lag)
    vectors = factor(core_of(run.layers[1], 0)).flatten(2)
    ids, real = inputs(padding)["input_ids"], real_tokens(padding)
    seen = {}
    for b in range(ids.shape[0]):
        for t in range(lag, ids.shape[1]):
            if real[b, t] and real[b, t - lag]:
                seen.setdefault(int(ids[b, t - lag]), []).append(vectors[b, t])
    assert found.tokens.tolist() == sorted(seen)
    expected = torch.stack([sum(seen[token]) / len(seen[token]) for token in sorted(seen)])
    assert close(found.vectors, expected)


def test_centred_vectors_have_no_mean_and_the_same_differences() -> None:
    keys = analysis.token_keys(traced("mamba2"), 0, lag=1)
    assert keys.centred.vectors.mean(0).abs().max() < 1e-14
    assert close(keys.centred.vectors[1] - keys.centred.vectors[0], keys.vectors[1] - keys.vectors[0])
    assert keys.basis.shape == (len(keys.tokens), 2, 3)


def test_similarity_is_the_cosine() -> None:
    run = traced("mamba")
    keys, queries = analysis.token_keys(run, 0, lag=0), analysis.token_queries(run, 0)
    found = analysis.token_similarity(keys, queries)
    count = len(keys.tokens)
    expected = torch.tensor([[cosine(a, b) for b in queries.vectors] for a in keys.vectors], dtype=torch.float64)
    assert close(found.similarity, expected)
    beside = [float(expected[a, b]) for a in range(count) for b in range(count) if a != b]
    assert abs(found.same - sum(float(expected[a, a]) for a in range(count)) / count) < 1e-12
    assert abs(found.different - sum(beside) / len(beside)) < 1e-12
    assert abs(found.largest_different - max(map(abs, beside))) < 1e-12
    assert "on the diagonal" in repr(found)


def test_orthogonal_embeddings() -> None:
    axes = analysis.embeddings(3 * torch.eye(4))
    found = analysis.token_similarity(axes, axes)
    assert (found.same, found.different, found.largest_different) == (1, 0, 0)


def test_undefined_similarities_are_errors() -> None:
    some = analysis.embeddings(torch.eye(4))
    zero = replace(some, vectors=some.vectors * torch.tensor([1, 1, 0, 1])[:, None])
    with pytest.raises(InputError, match=r"vector of token 2 .* is zero"):
        analysis.token_similarity(some, zero)
    with pytest.raises(InputError, match="differ in tokens or features"):
        analysis.token_similarity(some, analysis.embeddings(torch.eye(3)))
    with pytest.raises(InputError, match="one token has no other"):
        one = analysis.embeddings(torch.ones(1, 3))
        analysis.token_similarity(one, one)
    with pytest.raises(InputError, match="lag=6 is out of range"):
        analysis.token_values(traced("mamba"), 0, lag=6)
    with pytest.raises(UncoveredError, match="no factor `query`"):
        analysis.token_keys(traced("llama"), 0, lag=0)
    vim = named("vim")
    with pytest.raises(InputError, match="token ids"):
        analysis.token_values(trace(vim.model(), vim.inputs()), 0)


def test_taps_by_token() -> None:
    for layer in traced("mamba").layers:
        found = analysis.convolution_taps(layer)
        conv = layer.module.conv1d.weight.squeeze(1).double().tolist()
        for lag in range(4):
            assert torch.equal(found.taps[:, lag], layer.module.conv1d.weight[:, 0, 3 - lag])
            best = [c for c, taps in enumerate(conv) if max(range(4), key=lambda k: abs(taps[3 - k])) == lag]
            assert found.channels(lag).tolist() == best
            for other in range(4):
                pair = [[abs(taps[3 - k]) for taps in conv] for k in (lag, other)]
                assert abs(float(found.correlation[lag, other]) - spearman(*pair)) < 1e-12


def test_convolutions_that_have_no_lags_are_errors() -> None:
    with pytest.raises(UncoveredError, match="has no short convolution"):
        analysis.convolution_taps(traced("llama").layers[0])
    with pytest.raises(OptionError, match="conv=1 is out of range"):
        analysis.convolution_taps(traced("mamba").layers[0], conv=1)
    with pytest.raises(OptionError, match="lag=4 is out of range"):
        analysis.convolution_taps(traced("mamba").layers[0]).channels(4)
    x = torch.randn(1, 3, 2)
    with pytest.raises(InputError, match="one tap"):
        analysis.convolution_taps(layer_of(Flow(x).conv(torch.randn(2, 1, 1)), x))
    with pytest.raises(InputError, match="differ in truth"):
        analysis.convolution_taps(layer_of(Flow(x).conv(torch.ones(2, 1, 2)), x))


def test_the_second_direction_of_vim() -> None:
    vim = named("vim")
    model = vim.model()
    layer = trace(model, vim.inputs()).layers[0]
    for conv, module in enumerate((layer.module.conv1d, layer.module.conv1d_b)):
        taps = analysis.convolution_taps(layer, conv=conv).taps
        assert torch.equal(taps, module.weight.squeeze(1).flip(-1)[:, : taps.shape[1]])


def test_the_findings_of_the_induction_paper() -> None:
    """On the shipped Mamba: orthogonal embeddings, split channels, keys that match the queries of the same token."""
    model = load("induction", "mamba")
    run = trace(model, TASKS["induction"].sample(32, 1_000_000).input_ids)
    vectors = analysis.embeddings(model.backbone.embeddings.weight)
    assert analysis.token_similarity(vectors, vectors).largest_different < 0.3
    assert analysis.convolution_taps(run.layers[1]).correlation[0, 1] < -0.5
    queries = analysis.token_queries(run, 1)
    match = {lag: analysis.token_similarity(analysis.token_keys(run, 1, lag=lag), queries) for lag in range(4)}
    assert match[2].same > 0.88
    assert match[2].different < 0.06
    assert all(match[lag].same < 0.4 for lag in (0, 1, 3))


def test_the_pictures(tmp_path) -> None:
    vectors = analysis.embeddings(torch.randn(5, 4))
    analysis.token_similarity(vectors, vectors).plot(tmp_path / "similarity.png")
    analysis.convolution_taps(traced("mamba").layers[0]).plot(tmp_path / "taps.png")
    assert image(tmp_path / "similarity.png") and image(tmp_path / "taps.png")
