"""Perturbation tests refuse inputs, relevance, fractions and models that they cannot test."""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.evaluation.votes import MASK, PAD, VOTES, Votes
from unilinattn.errors import InputError, OptionError
from unilinattn.evaluation.perturbation import PerturbationTest
from unilinattn.testing.hosts import host

IDS, PIXELS = torch.tensor([[2, 3, 2], [3, 3, 2]]), torch.randn(2, 3, 4, 4)
TOKEN = dict(masking="token", mask_token_id=MASK)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("inputs", "relevance", "options", "error", "words"),
    [
        (IDS, [[1.0]], TOKEN, InputError, "with entries; got list"),
        (IDS, torch.ones(2, 3).long(), TOKEN, InputError, "got torch.int64"),
        (IDS, torch.ones(6), TOKEN, InputError, r"\(batch, token\) or \(batch, row, column\)"),
        (IDS, torch.ones(2, 0), TOKEN, InputError, "with entries"),
        (IDS, torch.ones(2, 4), TOKEN, InputError, r"\(2, 4\) does not fit inputs of 2 sequences with 3 tokens"),
        (IDS, torch.full((2, 3), torch.nan), TOKEN, InputError, "relevance holds NaN"),
        (IDS, torch.ones(2, 3, 1), TOKEN, InputError, "the inputs have 0 image tensors"),
        (PIXELS, torch.ones(2, 3), dict(masking="zero"), InputError, "no token ids"),
        (PIXELS, torch.ones(2, 3, 2), dict(masking="zero"), InputError, "does not divide 2 images of 4 x 4 pixels"),
        (PIXELS, torch.ones(1, 2, 2), dict(masking="zero"), InputError, "does not divide"),
        (PIXELS, torch.ones(2, 8, 8), dict(masking="zero"), InputError, "does not divide"),
        (PIXELS, torch.ones(2, 2, 2), TOKEN, OptionError, "images have the maskings 'zero', 'mean', 'blur' and"),
        (PIXELS, torch.ones(2, 2, 2), dict(masking="reference"), InputError, "the reference NoneType"),
        (
            IDS,
            torch.ones(2, 3),
            dict(masking="reference", reference=IDS[:1]),
            InputError,
            r"reference torch.*1, 3",
        ),
        (
            IDS,
            torch.ones(2, 3),
            dict(masking="reference", reference=IDS.float()),
            InputError,
            "reference torch.float32",
        ),
        (
            PIXELS,
            torch.ones(2, 2, 2),
            dict(masking="reference", reference=PIXELS * math.nan),
            InputError,
            "without NaN",
        ),
        (PIXELS, torch.ones(2, 2, 2), dict(masking="zero", reference=PIXELS), OptionError, "'zero' came with a ref"),
        (IDS, torch.ones(2, 3), dict(masking="blur"), OptionError, "'blur' is for images"),
        (IDS, torch.ones(2, 3), dict(masking="zeros"), OptionError, "unknown masking 'zeros'; did you mean 'zero'"),
        (IDS, torch.ones(2, 3), dict(masking="token"), OptionError, "mask_token_id=None"),
        (IDS, torch.ones(2, 3), dict(masking="zero", mask_token_id=1), OptionError, "the other maskings take none"),
        (IDS, torch.ones(2, 3), dict(masking="token", mask_token_id=-1), OptionError, "mask_token_id=-1"),
        (IDS, torch.ones(2, 3), dict(masking="zero"), InputError, "Votes takes no inputs_embeds"),
        (IDS, torch.ones(2, 3), dict(**TOKEN, labels=torch.tensor([0])), InputError, r"integers of shape \(2,\)"),
        (IDS, torch.ones(2, 3), dict(**TOKEN, labels=torch.tensor([0.0, 1.0])), InputError, "got torch.float32"),
        (IDS, torch.ones(2, 3), dict(**TOKEN, labels=torch.tensor([0, 2])), InputError, "has classes 0 to 1"),
        (IDS, torch.ones(2, 3), dict(**TOKEN, valid=torch.ones(2, 3)), InputError, "valid must be boolean"),
        (IDS, torch.ones(2, 3), dict(**TOKEN, valid=torch.ones(3).bool()), InputError, "valid must be boolean"),
        (IDS, torch.ones(2, 3), dict(**TOKEN, valid=torch.zeros(2, 3).bool()), InputError, "no valid unit"),
    ],
)
def test_what_cannot_be_tested_is_refused(inputs, relevance, options, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        PerturbationTest(Votes(None if inputs.is_floating_point() else VOTES), inputs, relevance, **options)


def test_an_id_beyond_the_vocabulary_and_padded_tokens_are_refused() -> None:
    model, ids = host("mamba").model(), torch.tensor([[3, 5, PAD]])
    size = model.config.vocab_size
    with pytest.raises(OptionError, match=f"the model knows ids 0 to {size - 1}"):
        PerturbationTest(model, ids, torch.rand(1, 3), masking="token", mask_token_id=size)
    given = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    with pytest.raises(InputError, match="valid marks 1 padded tokens"):
        PerturbationTest(model, given, torch.rand(1, 3), **TOKEN, valid=torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(InputError, match="target 2 is out of range: sequence 0 has 2 real positions"):
        PerturbationTest(model, given, torch.rand(1, 3), **TOKEN, target=2)
    embeds = model.get_input_embeddings()(ids)
    with pytest.raises(InputError, match="give the ids"):
        PerturbationTest(model, {"inputs_embeds": embeds}, torch.rand(1, 3), **TOKEN)
    assert PerturbationTest(model, {"inputs_embeds": embeds}, torch.rand(1, 3), masking="mean").pruning().area > 0


@pytest.mark.parametrize("fractions", [(), (0.5,), (0.2, 0.2), (0.5, 0.1), (-0.1, 0.5), (0.5, 1.1), (0.1, math.nan)])
def test_fractions_that_make_no_curve_are_refused(fractions: tuple[float, ...]) -> None:
    test = PerturbationTest(Votes(VOTES), IDS, torch.rand(2, 3), **TOKEN)
    with pytest.raises(OptionError, match="in rising order"):
        test.positive(fractions)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (torch.full((2, 2), torch.nan), "returned NaN among its logits"),
        (torch.ones(2), r"returned torch.float32 \(2,\); logits"),
        (SimpleNamespace(last_hidden_state=torch.ones(2, 2)), "returned SimpleNamespace"),
        (SimpleNamespace(logits=torch.ones(2, 5, 4)), "logits of each scored token"),
    ],
)
def test_a_model_without_logits_is_refused(returned, words: str) -> None:
    class Returns(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> object:
            return returned

    with pytest.raises(InputError, match=words):
        PerturbationTest(Returns(), IDS, torch.rand(2, 3), **TOKEN)


def test_infinite_logits_have_a_probability_and_no_squared_change() -> None:
    test = PerturbationTest(Votes([[0.0, -math.inf]] * 5), IDS, torch.rand(2, 3), **TOKEN)
    assert test.activation((0.0, 1.0)).values.tolist() == [[1.0, 1.0]] * 2
    with pytest.raises(InputError, match="infinite logits"):
        test.pruning()
