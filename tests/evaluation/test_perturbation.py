"""Perturbation tests against runs of the model one sequence and one replaced token at a time, and by hand."""

import copy
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tests.evaluation.votes import MASK, PAD, VOTES, Votes
from tests.hosts import named
from unilinattn.errors import InputError, OptionError
from unilinattn.evaluation.masking import BLUR, gaussian_blur
from unilinattn.evaluation.perturbation import PerturbationCurve, PerturbationTest
from unilinattn.testing import promoted
from unilinattn.testing.hosts import host, transformers_model


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Hosts in float64 throughout, also where they force float32."""
    with promoted():
        yield


def test_a_worked_example() -> None:
    # 2 votes of 2 for class 0, and 3 of 1 for class 1: logits (4, 3), so class 0 is predicted.
    ids = torch.tensor([[2, 3, 2, 3, 3]])
    relevance = torch.tensor([[0.9, 0.1, 0.8, 0.3, 0.2]])
    test = PerturbationTest(Votes(VOTES), ids, relevance, masking="token", mask_token_id=MASK)
    assert (test.logits.tolist(), test.labels.tolist()) == ([[4.0, 3.0]], [0])
    fifths = (0.2, 0.4, 0.6, 0.8)
    # Most relevant first: logits (2, 3), (0, 3), (0, 2), (0, 1): class 1 from the first removal on.
    assert test.positive(fifths).values.tolist() == [[0.0, 0.0, 0.0, 0.0]]
    # Least relevant first: (4, 2), (4, 1), (4, 0), (2, 0).
    assert test.negative(fifths).values.tolist() == [[1.0, 1.0, 1.0, 1.0]]
    assert (test.positive(fifths).area, test.negative(fifths).area) == (0.0, pytest.approx(1.0))
    # Added most relevant first: logits (0, 0), (2, 0), (4, 0), (4, 1), (4, 2), (4, 3).
    halves = [1 / (1 + math.exp(b - a)) for a, b in [(0, 0), (2, 0), (4, 0), (4, 1), (4, 2), (4, 3)]]
    activation = test.activation((0.0, *fifths, 1.0))
    assert activation.values[0].tolist() == pytest.approx(halves, abs=1e-12)
    assert activation.area == pytest.approx((sum(halves) - (halves[0] + halves[-1]) / 2) / 5, abs=1e-12)
    # Removed most relevant first: (4, 3), (2, 3), (0, 3), (0, 2), (0, 1), (0, 0).
    falling = [1 / (1 + math.exp(b - a)) for a, b in [(4, 3), (2, 3), (0, 3), (0, 2), (0, 1), (0, 0)]]
    deletion = test.deletion((0.0, *fifths, 1.0))
    assert deletion.values[0].tolist() == pytest.approx(falling, abs=1e-12)
    assert deletion.area == pytest.approx((sum(falling) - (falling[0] + falling[-1]) / 2) / 5, abs=1e-12)
    # Removed least relevant first, the squared distance from (4, 3).
    assert test.pruning((0.0, *fifths, 1.0)).values.tolist() == [[0.0, 1.0, 4.0, 9.0, 13.0, 25.0]]
    p = 1 / (1 + math.exp(-1))
    # Of five tokens, 1 to 20 % are one token and 50 % are three.
    without = [1 / (1 + math.exp(1))] * 4 + [1 / (1 + math.exp(2))]
    only = [1 / (1 + math.exp(-2))] * 4 + [1 / (1 + math.exp(-3))]
    assert test.comprehensiveness() == pytest.approx(p - sum(without) / 5, abs=1e-12)
    assert test.sufficiency() == pytest.approx(p - sum(only) / 5, abs=1e-12)


def test_the_reversed_order_exchanges_the_curves() -> None:
    ids, relevance = torch.tensor([[2, 3, 2, 3, 3]]), torch.tensor([[0.9, 0.1, 0.8, 0.3, 0.2]])
    tests = [
        PerturbationTest(Votes(VOTES), ids, scores, masking="token", mask_token_id=MASK)
        for scores in (relevance, -relevance)
    ]
    good, bad = tests
    assert torch.equal(good.positive().values, bad.negative().values)
    assert good.positive().area < bad.positive().area
    assert good.activation().area > bad.activation().area
    assert good.deletion().area < bad.deletion().area
    assert good.comprehensiveness() > bad.comprehensiveness()
    assert good.sufficiency() < bad.sufficiency()
    # Pruning takes absolute scores, so that the order has to be reversed by other means.
    assert torch.equal(good.pruning().values, bad.pruning().values)
    inverse = PerturbationTest(Votes(VOTES), ids, 1 / relevance, masking="token", mask_token_id=MASK)
    assert good.pruning((0.0, 0.2, 0.4)).area < inverse.pruning((0.0, 0.2, 0.4)).area


def test_the_area_of_a_curve() -> None:
    values = torch.rand(3, 4, dtype=torch.float64)
    curve = PerturbationCurve((0.1, 0.2, 0.5, 0.9), values)
    expected = np.trapezoid(values.numpy().mean(0), curve.fractions) / 0.8
    assert curve.area == pytest.approx(expected, abs=1e-12)
    assert PerturbationCurve((0.1, 0.5, 0.9), torch.full((2, 3), 0.25).double()).area == pytest.approx(0.25)
    assert PerturbationCurve((0.1, 0.5, 0.9), values[:, :3].flip(1)).area != pytest.approx(
        PerturbationCurve((0.1, 0.5, 0.6), values[:, :3]).area
    )


Replace = Callable[[torch.nn.Module, dict[str, torch.Tensor], list[int]], dict[str, torch.Tensor]]


def by_token(model: torch.nn.Module, given: dict[str, torch.Tensor], removed: list[int]) -> dict[str, torch.Tensor]:
    ids = given["input_ids"].clone()
    for place in removed:
        ids[0, place] = MASK
    return {**given, "input_ids": ids}


def by_embedding(mean: bool) -> Replace:
    def replace(model: torch.nn.Module, given: dict[str, torch.Tensor], removed: list[int]) -> dict[str, torch.Tensor]:
        embeds = model.get_input_embeddings()(given["input_ids"]).clone()
        real = [row for row, token in zip(embeds[0], given["input_ids"][0].tolist(), strict=True) if token != PAD]
        value = sum(real) / len(real) if mean else torch.zeros_like(embeds[0, 0])
        for place in removed:
            embeds[0, place] = value
        return {**{k: v for k, v in given.items() if k != "input_ids"}, "inputs_embeds": embeds}

    return replace


def loop_logits(
    model: torch.nn.Module, ids: torch.Tensor, scores: torch.Tensor, fraction: float, keep: bool, replace: Replace
) -> torch.Tensor:
    """The last real token's logits, one sequence at a time, the tokens sorted by Python."""
    rows = []
    for sequence, row in zip(ids, scores.tolist(), strict=True):
        real = [place for place, token in enumerate(sequence.tolist()) if token != PAD]
        order = sorted(real, key=lambda place: row[place], reverse=True)
        taken = order[: math.ceil(fraction * len(order))]
        removed = [place for place in real if place not in taken] if keep else taken
        given = {"input_ids": sequence[None], "attention_mask": (sequence != PAD).long()[None]}
        with torch.no_grad():
            rows.append(model(**replace(model, given, removed)).logits[0, real[-1]])
    return torch.stack(rows)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    ("name", "masking", "replace"),
    [
        ("mamba", "token", by_token),
        ("mamba", "zero", by_embedding(False)),
        ("gpt2", "token", by_token),
        ("gpt2", "mean", by_embedding(True)),
    ],
)
def test_the_curves_are_those_of_single_runs_of_a_host(name: str, masking, replace: Replace) -> None:
    model = host(name).model().double()
    ids = torch.tensor([[3, 5, 7, 4, 2, 6, 8], [4, 2, 3, 9, 5, PAD, PAD]])
    scores = torch.randn(2, 7, dtype=torch.float64)
    scores[1, 5:] = torch.nan
    labels = torch.tensor([3, 6])
    test = PerturbationTest(
        model,
        {"input_ids": ids, "attention_mask": (ids != PAD).long()},
        scores,
        masking=masking,
        mask_token_id=MASK if masking == "token" else None,
        labels=labels,
    )
    full = loop_logits(model, ids, scores, 0, False, replace)
    torch.testing.assert_close(test.logits, full, atol=1e-10, rtol=0)
    fractions = (0.1, 0.7)

    def expected(order: torch.Tensor, keep: bool, measure: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return torch.stack([measure(loop_logits(model, ids, order, f, keep, replace)) for f in fractions], -1)

    def probability(logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(-1)[[0, 1], labels]

    found = {
        "positive": (test.positive(fractions), scores, False, lambda y: (y.argmax(-1) == labels).double()),
        "negative": (test.negative(fractions), -scores, False, lambda y: (y.argmax(-1) == labels).double()),
        "activation": (test.activation(fractions), scores, True, probability),
        "pruning": (test.pruning(fractions), -scores.abs(), False, lambda y: ((y - full) ** 2).sum(-1)),
    }
    for which, (curve, order, keep, measure) in found.items():
        torch.testing.assert_close(
            curve.values, expected(order, keep, measure), atol=1e-9, rtol=0, msg=lambda text, which=which: which + text
        )
    falls = [probability(full)[:, None] - expected(scores, keep, probability) for keep in (False, True)]
    assert test.comprehensiveness(fractions) == pytest.approx(float(falls[0].mean()), abs=1e-10)
    assert test.sufficiency(fractions) == pytest.approx(float(falls[1].mean()), abs=1e-10)
    assert test.comprehensiveness(fractions) != pytest.approx(test.sufficiency(fractions))


def loop_blur(image: torch.Tensor, sigma: float) -> torch.Tensor:
    """The two-dimensional sum over the neighbours of every pixel."""
    height, width = image.shape
    radius = math.ceil(3 * sigma)
    blurred = torch.zeros_like(image)
    for i in range(height):
        for j in range(width):
            total = weights = 0.0
            for di in range(-radius, radius + 1):
                for dj in range(-radius, radius + 1):
                    weight = math.exp(-(di**2 + dj**2) / (2 * sigma**2))
                    row, column = min(max(i + di, 0), height - 1), min(max(j + dj, 0), width - 1)
                    total, weights = total + weight * float(image[row, column]), weights + weight
            blurred[i, j] = total / weights
    return blurred


@pytest.mark.parametrize("sigma", [0.4, 1.5])
def test_the_blur_is_a_gaussian_mean_of_the_neighbours(sigma: float) -> None:
    images = torch.randn(1, 2, 5, 6, dtype=torch.float64)
    expected = torch.stack([loop_blur(image, sigma) for image in images[0]])
    torch.testing.assert_close(gaussian_blur(images, sigma)[0], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("masking", ["zero", "mean", "blur", "reference"])
def test_removed_patches_are_replaced_pixel_by_pixel(masking) -> None:
    model = Votes()
    images = torch.randn(2, 3, 6, 4, dtype=torch.float64)
    relevance, other = torch.randn(2, 3, 2), torch.randn_like(images)
    options = {"reference": other} if masking == "reference" else {}
    curve = PerturbationTest(model, images, relevance, masking=masking, **options).positive((0.5, 0.9))
    assert curve.values.shape == (2, 2) and len(model.log.seen) == 3
    for fraction, ran in zip((0.5, 0.9), model.log.seen[1:], strict=True):
        expected = images.clone()
        for b in range(2):
            patches = sorted(((float(relevance[b, i, j]), i, j) for i in range(3) for j in range(2)), reverse=True)
            for _, i, j in patches[: math.ceil(6 * fraction)]:
                for channel in range(3):
                    plane = images[b, channel]
                    values = {
                        "zero": torch.zeros_like(plane),
                        "mean": torch.full_like(plane, float(plane.mean())),
                        "blur": loop_blur(plane, BLUR * 4),
                        "reference": other[b, channel],
                    }[masking]
                    expected[b, channel, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2] = values[
                        2 * i : 2 * i + 2, 2 * j : 2 * j + 2
                    ]
        torch.testing.assert_close(ran, expected, atol=1e-12, rtol=0)


def test_removed_tokens_are_replaced_by_those_of_a_reference() -> None:
    model, ids, other = Votes(VOTES), torch.tensor([[2, 3, 2, 3]]), torch.tensor([[3, 2, 3, 2]])
    scores = torch.tensor([[1.0, 4.0, 3.0, 2.0]])
    PerturbationTest(model, ids, scores, masking="reference", reference=other).positive((0.25, 0.5))
    assert [ran.tolist() for ran in model.log.seen[1:]] == [[[2, 2, 2, 3]], [[2, 2, 3, 3]]]


@pytest.mark.usefixtures("in_float64")
def test_a_map_of_pixels_and_a_map_of_patches_on_a_vision_transformer() -> None:
    entry = host("vit")
    model, images = entry.model().double(), entry.inputs().double()
    relevance = torch.rand(len(images), 2, 2, dtype=torch.float64)
    patches = PerturbationTest(model, {"pixel_values": images}, relevance, masking="zero")
    # Spread over its pixels, an untied map removes whole patches at whole quarters.
    pixels = relevance.repeat_interleave(4, 1).repeat_interleave(4, 2)
    spread = PerturbationTest(model, images, pixels, masking="zero")
    quarters = (0.25, 0.5, 0.75)
    torch.testing.assert_close(patches.pruning(quarters).values, spread.pruning(quarters).values, atol=1e-10, rtol=0)
    for fraction, column in zip(quarters, patches.pruning(quarters).values.T, strict=True):
        for b, found in enumerate(column.tolist()):
            removed = relevance[b].flatten().argsort()[: int(4 * fraction)]
            masked = images[b].clone()
            for patch in removed.tolist():
                masked[:, 4 * (patch // 2) : 4 * (patch // 2) + 4, 4 * (patch % 2) : 4 * (patch % 2) + 4] = 0
            with torch.no_grad():
                before, after = model(images[b][None]).logits, model(masked[None]).logits
            assert found == pytest.approx(float(((before - after) ** 2).sum()), abs=1e-10)


def test_only_valid_tokens_are_removed_and_counted() -> None:
    model, ids = Votes(VOTES), torch.tensor([[2, 3, 3, 4, 2]])
    valid = torch.tensor([[True, True, True, False, True]])
    test = PerturbationTest(
        model, ids, torch.tensor([[4.0, 3.0, 2.0, 9.0, 1.0]]), masking="token", mask_token_id=MASK, valid=valid
    )
    test.positive((0.5, 1.0))
    assert [ran.tolist() for ran in model.log.seen[1:]] == [[[1, 1, 3, 4, 2]], [[1, 1, 1, 4, 1]]]
    test.activation((0.0, 0.25))
    assert [ran.tolist() for ran in model.log.seen[3:]] == [[[2, 1, 1, 4, 1]]]


def test_tied_tokens_are_removed_in_an_order_drawn_by_the_seed_for_each_sequence() -> None:
    ids = torch.full((1, 12), 2)

    def removed(relevance: torch.Tensor, tokens: torch.Tensor, seed: int) -> torch.Tensor:
        model = Votes(VOTES)
        PerturbationTest(model, tokens, relevance, masking="token", mask_token_id=MASK, seed=seed).positive((0.5, 1.0))
        return model.log.seen[1] == MASK

    first, again, other = (removed(torch.zeros(1, 12), ids, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert int(first.sum()) == 6 and not first[0, :6].all() and not first[0, 6:].all()
    both = removed(torch.cat([torch.zeros(1, 12), torch.rand(1, 12)]), ids.repeat(2, 1), 0)
    assert torch.equal(both[:1], first)


def test_the_number_of_removed_tokens_is_not_raised_by_rounding() -> None:
    model, ids = Votes(VOTES), torch.full((1, 100), 2)
    test = PerturbationTest(model, ids, torch.rand(1, 100), masking="token", mask_token_id=MASK)
    test.positive((0.005, 0.07, 0.29, 0.57))
    assert 0.07 * 100 > 7
    assert [int((ran == MASK).sum()) for ran in model.log.seen[1:]] == [1, 7, 29, 57]


def test_the_model_and_the_inputs_are_left_as_found() -> None:
    # RWKV rescales its weights in place at its first pass in a mode.
    model = named("rwkv").model()
    before = copy.deepcopy(model.state_dict())
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    ids = torch.tensor([[3, 2, 4, 5]])
    test = PerturbationTest(model, ids, torch.rand(1, 4), masking="zero")
    test.positive()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits[:, -1].double(), test.logits, atol=1e-6, rtol=0)
    # Later writes into the caller's tensors change nothing.
    curve = test.pruning().values
    ids.fill_(7)
    assert torch.equal(test.pruning().values, curve)


@pytest.mark.usefixtures("in_float64")
def test_the_target_counts_real_tokens_and_the_labels_default_to_the_prediction() -> None:
    model = host("mamba").model().double()
    ids = torch.tensor([[3, 5, 7, 4], [4, 2, PAD, PAD]])
    given = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    with torch.no_grad():
        logits = model(**given).logits
    for target, places in {-1: [3, 1], 0: [0, 0]}.items():
        test = PerturbationTest(model, given, torch.rand(2, 4), masking="token", mask_token_id=MASK, target=target)
        torch.testing.assert_close(test.logits, logits[[0, 1], places], atol=1e-10, rtol=0)
        assert torch.equal(test.labels, logits[[0, 1], places].argmax(-1))
        assert test.positive((0.0, 1.0)).values[:, 0].tolist() == [1.0, 1.0]


def gpt2_classifier() -> torch.nn.Module:
    settings = dict(n_embd=8, n_layer=1, n_head=2, n_positions=8, vocab_size=12, pad_token_id=PAD, bos_token_id=2)
    return transformers_model("GPT2ForSequenceClassification", "GPT2Config", **settings, eos_token_id=2)().eval()


def test_a_classifier_that_finds_its_last_token_by_the_ids_keeps_it() -> None:
    ids = torch.tensor([[3, 4, 5, 6], [7, 8, PAD, PAD]])
    given = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    model, relevance = gpt2_classifier(), torch.rand(2, 4)
    assert PerturbationTest(model, given, relevance, masking="token", mask_token_id=MASK).pruning().area > 0
    with pytest.raises(OptionError, match="mask_token_id=0 is the padding token of GPT2ForSequenceClassification"):
        PerturbationTest(model, given, relevance, masking="token", mask_token_id=PAD)
    with pytest.raises(InputError, match="gives other logits for inputs_embeds than for the ids"):
        PerturbationTest(model, given, relevance, masking="zero")
    assert PerturbationTest(model, ids[:1], relevance[:1], masking="zero").pruning().area > 0
