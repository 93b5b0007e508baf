"""Inputs beside the tokens: shares are those of all vectors that enter the first block, or are refused by name."""

import gc
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import unilinattn as ula
from tests.methods.hosts import HOSTS
from unilinattn.errors import UncoveredError
from unilinattn.testing import TOLERANCES, left_as_found, relative_error
from unilinattn.tracing.token_source import find_sources

IDS = torch.tensor([[1, 2, 3, 4, 5], [7, 6, 5, 4, 3]])
LIMIT = TOLERANCES["layer", torch.float32]


class Joined(nn.Module):
    """A causal model that reads a second input at one place."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.inner: Any = HOSTS["llama"].model().float()
        self.config = self.inner.config

    def get_input_embeddings(self) -> Any:
        return self.inner.get_input_embeddings()

    def forward(
        self,
        input_ids: Tensor,
        image: Tensor | None = None,
        prompt_input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        image_mask: Tensor | None = None,
    ) -> Any:
        x = self.get_input_embeddings()(input_ids)
        width = x.shape[-1]
        if image is not None and self.place == "placed":
            x = torch.cat([image[..., :width], x[:, image.shape[1] :]], 1)
        if image is not None and self.place == "summed":
            x = x + image[:, :1, :width]
        hidden = self.inner.model(inputs_embeds=x).last_hidden_state
        if image is not None and self.place == "end":
            hidden = hidden + image[:, :1, :width]
        if prompt_input_ids is not None:
            hidden = hidden + self.get_input_embeddings()(prompt_input_ids).mean(1, keepdim=True)
        if image_mask is not None:
            hidden = hidden * image_mask.float().mean()
        return {"logits": self.inner.lm_head(hidden)}


def picture() -> Tensor:
    return torch.randn(2, 2, 64, generator=torch.Generator().manual_seed(0))


def joined(place: str) -> Joined:
    torch.manual_seed(0)
    return Joined(place).eval()


@pytest.mark.long
@pytest.mark.parametrize("place", ["placed", "end"])
def test_a_trace_asks_once_where_its_tokens_come_from_and_keeps_nothing(place: str) -> None:
    model, runs = joined(place), []
    trace = ula.trace(model, {"input_ids": IDS, "image": picture()}, progress=False)
    model.register_forward_pre_hook(lambda module, args: runs.append(module))
    counts = []
    for _ in range(2):
        with suppress(UncoveredError):
            find_sources(model, trace.arguments, trace.layers)
        counts.append(len(runs))
    assert counts[0] == counts[1] > 0
    layer = weakref.ref(trace.layers[-1])
    del trace
    gc.collect()
    assert layer() is None


@pytest.mark.parametrize("place", ["placed", "summed"])
def test_vectors_from_another_input_are_tokens(place: str) -> None:
    model, image = joined(place), picture()
    given = {"input_ids": IDS, "image": image}
    with left_as_found(model):
        result = ula.explain(model, given, method="logit", target=-1, progress=False)
    entered: list[Tensor] = []
    model.inner.model.layers[0].register_forward_pre_hook(lambda module, args: entered.append(args[0].detach()))
    with torch.no_grad():
        model(**given)
    expected = ula.explain(model.inner, {"inputs_embeds": entered[0]}, method="logit", target=-1, progress=False)
    assert relative_error(result.scores, expected.scores) <= LIMIT
    assert relative_error(result.extras["bias"][:, None], expected.extras["bias"][:, None]) <= LIMIT
    assert bool((result.scores[:, :2].abs() > 1e-3).any())


@pytest.mark.long
@pytest.mark.parametrize("method", ["logit", "lrp", "alti_logit"])
def test_an_input_beside_the_tokens_is_refused_by_name(method: str) -> None:
    model, image = joined("end"), picture()
    given = {"input_ids": IDS, "image": image, "image_mask": torch.ones(2, 1), "token_type_ids": torch.ones_like(IDS)}
    with left_as_found(model), pytest.raises(UncoveredError, match="image reaches the output of Joined beside the "):
        ula.explain(model, given, method=method, target=-1, progress=False)
    prompted = {"input_ids": IDS, "prompt_input_ids": IDS[:, :2], "image": torch.randn(2, 1, 64)}
    with pytest.raises(UncoveredError, match="prompt_input_ids and image reach the output"):
        ula.explain(model, prompted, method=method, target=-1, progress=False)


def test_an_input_of_a_small_effect_is_refused_too() -> None:
    """The shares of the tokens may be as small: a model with random weights hardly moves with its image."""
    given = {"input_ids": IDS, "image": 3e-6 * picture()}
    with pytest.raises(UncoveredError, match="image reaches the output of Joined beside the "):
        ula.explain(joined("end"), given, method="logit", target=-1, progress=False)


def test_only_the_input_that_reaches_the_output_is_named() -> None:
    given = {"input_ids": IDS, "prompt_input_ids": IDS[:, :2], "image": picture()}
    with pytest.raises(UncoveredError, match=r"^prompt_input_ids reaches the output of Joined"):
        ula.explain(joined("summed"), given, method="logit", target=-1, progress=False)


def test_an_input_that_nothing_reads_is_accepted() -> None:
    model = joined("nowhere")
    result = ula.explain(model, {"input_ids": IDS, "image": picture()}, method="logit", target=-1, progress=False)
    assert torch.equal(result.scores, ula.explain(model, IDS, method="logit", target=-1, progress=False).scores)


@pytest.mark.skipif(
    transformers.__version__ == "5.6.2", reason="Fuyu of transformers 5.6.2 takes patches in another shape"
)
def test_the_patches_of_an_image_among_the_ids_are_tokens() -> None:
    text = transformers.PersimmonConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    config = transformers.FuyuConfig(text_config=text.to_dict(), patch_size=2, image_token_id=19)
    model = transformers.FuyuForCausalLM(config).eval()
    ids = torch.tensor([[19, 19, 3, 4, 5]])
    patches = torch.randn(1, 2, 12)
    result = ula.explain(model, {"input_ids": ids, "image_patches": patches}, method="logit", target=-1, progress=False)
    assert result.completeness_gap is not None and result.completeness_gap <= LIMIT
    assert bool((result.scores[0, :2].abs() > 0).all())


def test_a_path_of_the_pixels_around_the_blocks_is_refused() -> None:
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=8, patch_size=4, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    ).eval()

    def around(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor:
        logits: Tensor = output.logits + kwargs["pixel_values"].mean((1, 2, 3))[:, None]
        return logits

    pixels = torch.randn(1, 3, 8, 8)
    assert ula.explain(model, {"pixel_values": pixels}, method="logit", progress=False).completeness_gap is not None
    model.register_forward_hook(around, with_kwargs=True)
    with pytest.raises(UncoveredError, match="pixel_values reaches the output of ViTForImageClassification"):
        ula.explain(model, {"pixel_values": pixels}, method="logit", progress=False)


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("image", picture().mul(100).abs().to(torch.uint8)),
        ("masked_image", picture()),
        ("codes", torch.arange(20).view(2, 10)),
    ],
    ids=["bytes", "a name like that of a mask", "codes"],
)
def test_content_of_any_dtype_and_name_is_refused(name: str, image: Tensor) -> None:
    model = Ending(name).eval()
    with pytest.raises(UncoveredError, match=f"{name} reaches the output of Ending"):
        ula.explain(model, {"input_ids": IDS, name: image}, method="logit", target=-1, progress=False)


def test_a_large_constant_among_the_logits_hides_nothing() -> None:
    model = joined("end")
    model.register_forward_hook(
        lambda module, args, out: {"logits": out["logits"].index_fill(-1, torch.tensor([0]), -1e30)}
    )
    with pytest.raises(UncoveredError, match="image reaches the output"):
        ula.explain(model, {"input_ids": IDS, "image": picture()}, method="logit", target=-1, progress=False)


@pytest.mark.long
def test_a_function_of_the_output_that_another_input_reaches_is_refused() -> None:
    model = joined("nowhere")

    def with_value(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        return {**out, "value": out["logits"][..., 0] + kwargs["image"].mean((1, 2))[:, None]}

    model.register_forward_hook(with_value, with_kwargs=True)
    given = {"input_ids": IDS, "image": picture()}
    assert ula.explain(model, given, method="logit", logit=lambda out: out["logits"][:, -1, 3], progress=False).dims
    with pytest.raises(UncoveredError, match="image reaches the output"):
        ula.explain(model, given, method="logit", logit=lambda out: out["value"][:, -1], progress=False)


class Ending(nn.Module):
    """A causal model that adds the mean of an input of some name after its last layer."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        self.inner: Any = HOSTS["llama"].model().float()

    def forward(self, input_ids: Tensor, **others: Tensor) -> Any:
        hidden = self.inner.model(input_ids).last_hidden_state
        return {"logits": self.inner.lm_head(hidden + others[self.name].float().flatten(1).mean(1)[:, None, None])}


class Series(nn.Module):
    """A causal model of a time series, whose numbers are projected before its first block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner: Any = HOSTS["llama"].model().float()
        self.project = nn.Linear(1, self.inner.config.hidden_size)

    def forward(self, values: Tensor) -> Any:
        return self.inner(inputs_embeds=self.project(values))


def test_an_argument_that_is_projected_is_not_the_stream() -> None:
    model, values = Series().eval(), torch.randn(2, 5, 1, generator=torch.Generator().manual_seed(0))
    result = ula.explain(model, values, method="logit", target=-1, progress=False)
    with torch.no_grad():
        vectors = model.project(values)
    expected = ula.explain(model.inner, {"inputs_embeds": vectors}, method="logit", target=-1, progress=False)
    assert relative_error(result.scores, expected.scores) <= LIMIT
    assert relative_error(result.extras["bias"][:, None], expected.extras["bias"][:, None]) <= LIMIT


@pytest.mark.parametrize("method", ["gradient", "logit"])
def test_masks_and_positions_do_not_hide_the_ids(method: str) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner: Any = HOSTS["llama"].model().float()

        def forward(self, idx: Tensor, attention_mask: Any = None, position_ids: Any = None) -> Any:
            # A scale after the embedding tells its output from what enters the first block.
            vectors = 3 * self.inner.get_input_embeddings()(idx)
            return self.inner(inputs_embeds=vectors, attention_mask=attention_mask, position_ids=position_ids)

    model = Named().eval()
    more = {"attention_mask": torch.ones_like(IDS), "position_ids": torch.arange(5).expand(2, 5)}
    alone = ula.explain(model, IDS, method=method, target=-1, progress=False)
    beside = ula.explain(model, {"idx": IDS, **more}, method=method, target=-1, progress=False)
    assert relative_error(beside.scores, alone.scores) <= LIMIT


def test_places_of_the_tokens_are_part_of_their_vectors() -> None:
    torch.manual_seed(0)
    config = transformers.LayoutLMConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LayoutLMForTokenClassification(config).eval()
    boxes = torch.tensor([0, 10, 20, 30]) + torch.arange(5)[:, None]
    given = {"input_ids": IDS, "bbox": boxes.expand(2, 5, 4)}
    result = ula.explain(model, given, method="logit", target=-1, progress=False)
    assert result.completeness_gap is not None and result.completeness_gap <= LIMIT
    # An id can stand for an absent token only where the vectors of the tokens are those of their ids.
    assert ula.explain(model, given, method="occlusion", target=-1, baseline=3, progress=False).scores.shape == (2, 5)


def test_ids_of_tokens_before_sequences_are_looked_up_by_token() -> None:
    config = transformers.XLNetConfig(d_model=16, n_layer=2, n_head=2, d_inner=24, vocab_size=20)
    torch.manual_seed(0)
    model = transformers.XLNetForSequenceClassification(config).double().eval()
    result = ula.explain(model, IDS, method="logit", target=-1, progress=False)
    assert result.completeness_gap < 1e-12
    alone = torch.cat([ula.explain(model, row[None], method="logit", target=-1, progress=False).scores for row in IDS])
    torch.testing.assert_close(result.scores, alone, rtol=1e-9, atol=1e-12)
    gradient = ula.explain(model, IDS, method="input_x_gradient", target=-1, progress=False).scores
    alone = ula.explain(model, IDS[1:], method="input_x_gradient", target=-1, progress=False).scores
    torch.testing.assert_close(gradient[1:], alone, rtol=1e-9, atol=1e-12)


def test_an_id_that_takes_the_place_of_others_leaves_the_ids_looked_up() -> None:
    class Placed(Joined):
        def forward(self, input_ids: Tensor, **arguments: Any) -> Any:
            return super().forward(torch.where(input_ids == 5, 1, input_ids))

    model = Placed("none")
    assert ula.explain(model, IDS, method="logit", target=-1, progress=False).completeness_gap < LIMIT
