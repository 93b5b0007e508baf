"""A second input of whole numbers, under any name: its tokens have shares, or it is refused by name."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unilinattn as ula
from unilinattn.errors import UncoveredError
from unilinattn.testing import relative_error


def draw(length: int, seed: int) -> Tensor:
    return torch.randint(1, 23, (2, length), generator=torch.Generator().manual_seed(seed))


class Translator(nn.Module):
    """torch's encoder and decoder of texts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.other = nn.Embedding(23, 16), nn.Embedding(23, 16)
        self.inner = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
        self.head = nn.Linear(16, 23)

    def run(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.head.weight.dtype)
        return self.head(self.inner(self.embedding(source), self.other(target), tgt_mask=mask))

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        return self.run(input_ids, decoder_input_ids)


class Renamed(Translator):
    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:  # type: ignore[override]
        return self.run(src, tgt)


@pytest.mark.long
@pytest.mark.parametrize("length", [5, 9])
def test_the_tokens_of_a_decoder_have_shares_under_any_name(length: int) -> None:
    ids = draw(9, 0), draw(length, 1)
    results = []
    for model, names in ((Translator(), ("input_ids", "decoder_input_ids")), (Renamed(), ("src", "tgt"))):
        arguments = dict(zip(names, ids, strict=True))
        results.append(ula.explain(model.eval().double(), arguments, method="logit", logit=lambda o: o[:, -1, 4]))
    named, other = results
    assert other.sizes["key"] == 9 + length and relative_error(other.scores, named.scores) < 1e-12
    assert other.completeness_gap is not None and other.completeness_gap < 1e-12


class Both(nn.Module):
    """Two inputs for each token, of which `read` makes vectors before the layer, and `end` after it."""

    def __init__(self, *, end: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.second, self.end = nn.Embedding(23, 16), nn.Embedding(23, 16), end
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.head = nn.Linear(16, 23)

    def run(self, x: Tensor, z: Tensor) -> Tensor:
        before, after = (0, self.second(z)) if self.end else (self.second(z), 0)
        return self.head(self.layer(self.embedding(x) + before) + after)


class Unnamed(Both):
    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.run(x, z)


class Positions(Both):
    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        return self.run(x, pos)


class Segments(Both):
    def forward(self, x: Tensor, segment_ids: Tensor) -> Tensor:
        return self.run(x, segment_ids)


def shares(build: Callable[..., nn.Module], arguments: Mapping[str, Tensor], *, end: bool) -> Any:
    return ula.explain(build(end=end).eval().double(), arguments, method="logit", logit=lambda o: o[:, -1, 4])


@pytest.mark.parametrize("counted", [False, True])
def test_a_second_id_of_each_token_is_refused_by_name(counted: bool) -> None:
    numbers = torch.arange(7).expand(2, -1) if counted else draw(7, 1)
    with pytest.raises(UncoveredError, match=r"^z reaches the output of Unnamed beside the vectors of its tokens"):
        shares(Unnamed, {"x": draw(7, 0), "z": numbers}, end=True)


@pytest.mark.parametrize(("build", "name"), [(Positions, "pos"), (Segments, "segment_ids")], ids=["pos", "words"])
def test_numbers_that_are_named_as_places_or_kinds_are_no_content(build: type[Both], name: str) -> None:
    result = shares(build, {"x": draw(7, 0), name: draw(7, 1)}, end=True)
    assert result.sizes["key"] == 7 and result.completeness_gap < 1e-12


def test_a_second_id_that_enters_the_layer_is_in_the_vectors_of_its_token() -> None:
    model, arguments = Unnamed(end=False).eval().double(), {"x": draw(7, 0), "z": draw(7, 1)}
    result = ula.explain(model, arguments, method="logit", logit=lambda o: o[:, -1, 4])
    vectors = model.embedding(arguments["x"]) + model.second(arguments["z"])
    trace = ula.trace(nn.Sequential(model.layer, model.head), vectors.detach())
    expected = ula.explain(trace, method="logit", logit=lambda o: o[:, -1, 4])
    assert relative_error(result.scores, expected.scores) < 1e-12
