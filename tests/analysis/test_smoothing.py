"""Mean cosine similarity of tokens against a loop over pairs."""

import pytest
import torch
from torch import Tensor

from tests.analysis.plain import cosine, image
from tests.hosts import named
from tests.methods.hosts import close, real_tokens, traced
from unilinattn import analysis, trace
from unilinattn.errors import InputError, UncoveredError


def by_pairs(features: Tensor, real: Tensor, exclude: tuple[int, ...] = ()) -> Tensor:
    """HMA arXiv Eq. 24."""
    means = []
    for x, mask in zip(features, real, strict=True):
        kept = [t for t in range(len(x)) if mask[t] and t not in exclude]
        pairs = [cosine(x[i], x[j]) for i in kept for j in kept if i < j]
        means.append(sum(pairs) / len(pairs))
    return torch.tensor(means, dtype=torch.float64)


@pytest.mark.parametrize("name", ["mamba", "llama"])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("exclude", [(), (3,)])
def test_every_depth_is_the_mean_over_pairs(name: str, padding: str, exclude: tuple[int, ...]) -> None:
    run, real = traced(name, padding), real_tokens(padding)
    found = analysis.oversmoothing({"a model": run}, exclude=exclude).similarity["a model"]
    streams = [run.layers[0].stream, *(layer.next_stream for layer in run.layers)]
    assert close(found, torch.stack([by_pairs(stream, real, exclude) for stream in streams]))
    assert torch.equal(analysis.oversmoothing(run, exclude=exclude).similarity[run.model], found)


def test_equal_and_orthogonal_features() -> None:
    real = torch.ones(1, 3, dtype=torch.bool)
    assert float(analysis.token_cosine(torch.ones(1, 3, 4), real)) == pytest.approx(1, abs=1e-15)
    assert float(analysis.token_cosine(torch.eye(3)[None], real)) == 0


def test_undefined_similarities_are_errors() -> None:
    run = traced("mamba")
    with pytest.raises(InputError, match="fewer than two tokens"):
        analysis.oversmoothing(run, exclude=range(5))
    with pytest.raises(InputError, match="out of range: the sequences have 6 tokens"):
        analysis.oversmoothing(run, exclude=[6])
    features = torch.randn(2, 3, 4)
    features[1, 2] = 0
    real = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(InputError, match="token 2 of sequence 1 are zero"):
        analysis.token_cosine(features, real)
    real[1, 2] = False
    assert close(analysis.token_cosine(features, real), by_pairs(features, real))


def test_an_unknown_stream_is_an_error() -> None:
    host = named("bert")
    run = trace(host.model(), host.inputs())
    with pytest.raises(UncoveredError, match=r"residual stream at bert.encoder.layer.0.attention is unknown"):
        analysis.oversmoothing(run)


def test_the_picture(tmp_path) -> None:
    found = analysis.oversmoothing({"mamba": traced("mamba"), "llama": traced("llama")})
    found.plot(tmp_path / "smoothing.png")
    assert image(tmp_path / "smoothing.png")
    assert "mamba" in repr(found)
