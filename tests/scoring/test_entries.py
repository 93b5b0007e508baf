"""Compositions over streams that no layer joins: the patches of an image among the tokens of a text."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import unilinattn as ula
from tests.discovery.test_windows import mllama
from unilinattn.errors import UncoveredError
from unilinattn.reruns.entries import NONE, SEVERAL, stream_entries
from unilinattn.testing import promoted, randomize, relative_error

LIMIT = 1e-10
IMAGE = 19
PATCHES, CLS = 4, 1


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    with promoted():
        yield


def llava(feature: int = -1) -> nn.Module:
    sizes = dict(hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2)
    vision = transformers.CLIPVisionConfig(**sizes, image_size=4, patch_size=2)
    text = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=20)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, vision_feature_layer=feature
    )
    torch.manual_seed(0)
    return randomize(transformers.LlavaForConditionalGeneration(config).double().eval())


def inputs(*texts: list[int], images: int = 1) -> dict[str, Tensor]:
    pixels = torch.randn(len(texts) * images, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return {"input_ids": torch.tensor(texts), "pixel_values": pixels}


TEXTS = [3, *[IMAGE] * PATCHES, 4, 5], [4, 5, *[IMAGE] * PATCHES, 6]


@pytest.mark.long
@pytest.mark.parametrize("feature", [-1, -2])
def test_rollout_goes_on_in_the_image(feature: int) -> None:
    """The product of the text's maps, of the places of the patches, and of the maps of the layers before them."""
    trace = ula.trace(llava(feature), inputs(*TEXTS), progress=False)
    assert [stream.shape for stream in trace.streams] == [(2, CLS + PATCHES), (2, 7)]
    maps = [
        ula.explain(trace, method="raw", layers=[index], sign="keep", progress=False).scores[0] for index in range(4)
    ]
    eye = torch.eye(12, dtype=torch.float64).expand(2, 12, 12)
    expected = torch.zeros(2, 7, 12, dtype=torch.float64)
    for row, ids in enumerate(TEXTS):
        patch = CLS
        for token, index in enumerate(ids):
            expected[row, token, 5 + token if index != IMAGE else patch] = 1
            patch += index == IMAGE
    for attention in reversed(maps[:2] if feature == -1 else maps[:1]):
        step = eye.clone()
        step[:, :5, :5] += attention
        expected = expected @ step
    for attention in maps[2:]:
        expected = expected + attention @ expected
    result = ula.explain(trace, method="rollout", sign="keep", progress=False)
    assert relative_error(result.scores[:, 5:], expected) < LIMIT
    assert bool((result.scores[:, -1, 1:5] != 0).all())


COMPOSED = (
    "rollout",
    ula.methods.Alti(compose="rollout"),
    ula.methods.Latim(compose="rollout"),
    "attribution",
    "contribution",
    "alti_logit",
    "attention_grad",
)


@pytest.mark.long
def test_several_images_of_a_text_are_one_sequence_of_patches() -> None:
    """The maps of two images are the blocks of one map among the patches of both."""
    trace = ula.trace(llava(), inputs([3, *[IMAGE] * PATCHES, 4, *[IMAGE] * PATCHES, 5], images=2), progress=False)
    assert [stream.shape for stream in trace.streams] == [(2, CLS + PATCHES), (1, 11)]
    maps = [
        ula.explain(trace, method="raw", layers=[index], sign="keep", progress=False).scores[0] for index in range(4)
    ]
    expected = torch.zeros(11, 21, dtype=torch.float64)
    patches = [CLS + patch + image * (CLS + PATCHES) for image in range(2) for patch in range(PATCHES)]
    for token, index in enumerate(trace.arguments["input_ids"][0].tolist()):
        expected[token, patches.pop(0) if index == IMAGE else 10 + token] = 1
    for attention in maps[1::-1]:
        expected = expected @ (torch.eye(21).double() + torch.block_diag(*attention, torch.zeros(11, 11)))
    for attention in maps[2:]:
        expected = expected + attention[0] @ expected
    result = ula.explain(trace, method="rollout", sign="keep", progress=False)
    assert result.streams["key"] == {"vision_tower": 10, "language_model": 11}
    assert relative_error(result.scores[0, 10:], expected) < LIMIT
    for method in COMPOSED:
        whole, row = (ula.explain(trace, method=method, target=target, progress=False).scores for target in (None, -1))
        assert relative_error(row, whole[:, -1]) < LIMIT


@pytest.mark.long
@pytest.mark.parametrize("method", ["alti", "latim"])
def test_layers_of_the_images_of_a_text_have_a_product_for_each_image(method: str) -> None:
    two = inputs([3, *[IMAGE] * PATCHES, 4, *[IMAGE] * PATCHES, 5], images=2)
    options = dict(method=method, compose="rollout", progress=False)
    both = ula.explain(llava(), two, layers=[0, 1], **options).scores
    whole = ula.explain(llava(), two, **options).scores[0, :10]
    assert relative_error(whole[None], torch.cat([torch.block_diag(*both), torch.zeros(10, 11)], 1)[None]) < LIMIT
    for image in range(2):
        one = {**inputs(TEXTS[0]), "pixel_values": two["pixel_values"][image : image + 1]}
        single = ula.explain(llava(), one, layers=[0, 1], **options).scores
        assert relative_error(both[image : image + 1], single) < LIMIT


@pytest.mark.long
def test_tokens_of_one_of_several_images_are_not_cut() -> None:
    two = inputs([3, *[IMAGE] * PATCHES, 4, *[IMAGE] * PATCHES, 5], images=2)
    with pytest.raises(UncoveredError, match=r"not in one of its images.*vision_tower 2 x 5, language_model 1 x 11\)"):
        ula.explain(llava(), two, method="knockout", target=-1, progress=False)
    text = ula.explain(llava(), two, method="knockout", layers=[2, 3], target=-1, progress=False)
    assert text.scores.shape == (1, 11) and bool((text.scores != 0).any())


@pytest.mark.long
def test_sinks_of_several_images_are_counted_over_all_patches() -> None:
    model = llava()
    with torch.no_grad():
        # A class token that exceeds the patches in every layer.
        model.model.vision_tower.embeddings.class_embedding.fill_(1e4)
        model.model.vision_tower.pre_layrnorm = nn.Identity()
    two = inputs([3, *[IMAGE] * PATCHES, 4, *[IMAGE] * PATCHES, 5], images=2)
    result = ula.explain(model, two, method="rollout", progress=False)
    assert result.sinks is not None and result.sinks[0][:2] == (0, CLS + PATCHES)


@pytest.mark.long
def test_keys_that_no_layer_writes_are_patches_of_the_image() -> None:
    """Cross-attention reads the patches of tiles without those that fill them up, which is another tensor."""
    trace = ula.trace(*mllama(), progress=False)
    (entry,) = stream_entries(trace)
    patches = [0, 1, 2, 3, 4, 8, 9, 10, 11, 12]
    assert entry.written.layers == () and entry.tokens.tolist() == [patches]
    maps = [
        ula.explain(trace, method="raw", layers=[index], sign="keep", progress=False).scores[0, 0] for index in range(4)
    ]
    places = torch.zeros(10, 16, dtype=torch.float64)
    places[range(10), patches] = 1
    image = (torch.eye(16) + maps[1]) @ (torch.eye(16) + maps[0])
    expected = torch.cat([maps[3] @ places @ image, torch.eye(4) + maps[2]], 1)
    result = ula.explain(trace, method="rollout", sign="keep", progress=False)
    assert result.streams["key"] == {"encoder": 10, "vision_model": 16, "language_model": 4}
    assert relative_error(result.scores[:, 26:, 10:], expected[None]) < LIMIT
    assert not bool(result.scores[:, 26:, :10].any())
    row = ula.explain(trace, method="rollout", sign="keep", target=-1, progress=False)
    assert relative_error(row.scores, result.scores[:, -1]) < LIMIT


@pytest.mark.long
@pytest.mark.parametrize("method", COMPOSED, ids=str)
def test_the_row_of_a_target_is_that_of_all_rows(method: Any) -> None:
    trace = ula.trace(llava(), inputs(*TEXTS), progress=False)
    whole, row = (ula.explain(trace, method=method, target=target, progress=False).scores for target in (None, -1))
    assert relative_error(row, whole[:, -1]) < LIMIT
    # Contributions with negative products are left out.
    assert bool((row[:, CLS : CLS + PATCHES] != 0).any())
    # A patch in the text is the patch of the image.
    assert not bool(row[:, 5:][torch.tensor(TEXTS) == IMAGE].any())


@pytest.mark.long
def test_relevances_begin_with_the_tokens_that_have_shares() -> None:
    trace = ula.trace(llava(), inputs(*TEXTS), progress=False)
    whole, row = (
        ula.explain(trace, method="transformer_attribution", target=target, progress=False) for target in (None, -1)
    )
    assert row.sizes["key"] == 7 and len(row.layers) == 2 and bool((row.scores != 0).any())
    assert relative_error(row.scores, whole.scores[:, -1]) < LIMIT


# The token at 3 is a patch in both texts.
@pytest.mark.long
@pytest.mark.parametrize("target", [-1, 3])
def test_shares_of_vectors_go_on_in_the_image(target: int) -> None:
    trace = ula.trace(llava(), inputs(*TEXTS), progress=False)
    result = ula.explain(trace, method="alti_logit", target=target, progress=False)
    total = result.scores.sum(-1) + result.extras["bias"] + result.extras["remainder"]
    assert float((total - result.extras["logit"]).abs().max()) < LIMIT
    assert not bool(result.scores[:, 5:][torch.tensor(TEXTS) == IMAGE].any())
    assert bool((result.scores[:, CLS : CLS + PATCHES] != 0).all())
    whole = ula.explain(trace, method="alti_logit", progress=False)
    assert relative_error(whole.scores[:, target], result.scores) < LIMIT


class Joined(nn.Module):
    """Two encoders, and a third one of tokens of both."""

    def __init__(self, how: str) -> None:
        super().__init__()
        layers = (nn.TransformerEncoderLayer(8, 2, 12, dropout=0, batch_first=True) for _ in range(3))
        self.first, self.second, self.third = (
            nn.TransformerEncoder(layer, 1, enable_nested_tensor=False) for layer in layers
        )
        self.how, self.cls, self.head = how, nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 3)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        one = self.first(first)
        two = one if self.how in ("dropped twice", "alternating") else self.second(second)
        cls = self.cls.expand(len(one), -1, -1)
        match self.how:
            case "joined":
                tokens = torch.cat([cls, two, one], 1)
            case "summed":
                tokens = torch.cat([cls, one + two], 1)
            case "dropped":
                tokens = one[:, [4, 0]]
            case "alternating":
                some = torch.tensor([4, 0])
                tokens = self.first(one.index_copy(1, some, self.second(one[:, some])))
            case "dropped twice":
                tokens = self.second(one[:, [4, 0, 2]])[:, [2, 0]]
            case _:
                tokens = torch.cat([one.flip(0), cls], 1)
        return self.head(self.third(tokens)[:, 0])


def joined(how: str, second: int = 3) -> ula.Trace:
    torch.manual_seed(0)
    vectors = {"first": torch.randn(2, 5, 8).double(), "second": torch.randn(2, second, 8).double()}
    return ula.trace(randomize(Joined(how).double().eval()), vectors, progress=False)


@pytest.mark.long
def test_entries_of_several_streams() -> None:
    by_read = {entry.read.name: entry.among(2).tolist() for entry in stream_entries(joined("joined"))}
    assert by_read == {"second": [[NONE, 0, 1, 2, *[NONE] * 5]] * 2, "first": [[*[NONE] * 4, 0, 1, 2, 3, 4]] * 2}
    (entry,) = stream_entries(joined("dropped"))
    assert entry.tokens.tolist() == [[4, 0], [9, 5]] and entry.among(2).tolist() == [[4, 0]] * 2
    # Two images of one sequence.
    assert entry.among(1).tolist() == [[4, 0, 9, 5]]
    # What comes through a stream between two others does not enter the last one again.
    twice = {
        (entry.read.name, entry.written.name): entry.tokens[0].tolist()
        for entry in stream_entries(joined("dropped twice"))
    }
    assert twice == {("first", "second"): [4, 0, 2], ("second", "third"): [2, 0]}


@pytest.mark.long
def test_tokens_without_a_single_origin_are_refused() -> None:
    trace = joined("summed", 5)
    with pytest.raises(UncoveredError, match=r"a token of third begins as several tokens"):
        ula.explain(trace, method="rollout", target=0, progress=False)
    # Runs of the model need no product of maps.
    assert ula.explain(trace, method="knockout", target=0, progress=False).sizes["key"] == 16
    trace = joined("alternating")
    assert [stream.layers for stream in trace.streams] == [(0, 2, 3), (1,)]
    with pytest.raises(UncoveredError, match="goes back to its first stream"):
        ula.explain(trace, method="rollout", target=0, progress=False)
    (entry,) = stream_entries(joined("other sequences"))
    assert entry.among(2).tolist() == [[*[SEVERAL] * 5, NONE]] * 2


def test_streams_that_layers_join_have_no_entries() -> None:
    ids = dict(vocab_size=19, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0)
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, **ids)
    model = randomize(transformers.T5ForConditionalGeneration(config).double().eval())
    arguments = {"input_ids": torch.tensor([[3, 4, 5, 6]]), "decoder_input_ids": torch.tensor([[0, 7]])}
    assert not stream_entries(ula.trace(model, arguments, progress=False))
