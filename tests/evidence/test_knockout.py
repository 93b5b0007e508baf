"""Cuts in windows of layers of a small Llama, against single runs, and the claims on numbers of known thirds."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import unilinattn as ula
from evidence import knockout, section
from evidence.ablation_measures import ALL, DISTANT, IMPORTANT, OTHER, OUTGOING, REPLACED, Prompt, others
from evidence.claims import Claim, Results, outcomes, verdict
from evidence.rows import number
from evidence.truths import Input
from unilinattn.evaluation import Table

LAYERS = 4
WINDOWS = {"layers 1 to 2": range(2), "layers 3 to 4": range(2, 4)}


def prompt(length: int, seed: int) -> Prompt:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(50, (length,), generator=generator).tolist()
    return Prompt(Input(tuple(ids), length - 1, ids[0], True), torch.rand(length, generator=generator).tolist())


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=LAYERS
    )
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        # At the initial scale a cut changes nothing that float64 tells from rounding.
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(20)
    return model


def log_p(model: LlamaForCausalLM, example: Input) -> float:
    with torch.no_grad():
        return float(model(torch.tensor([example.ids])).logits[0, -1].log_softmax(-1)[example.target])


def test_windows_are_all_layers_one_after_the_other() -> None:
    assert [layer for window in knockout.WINDOWS.values() for layer in window] == list(range(knockout.LAYERS))


def test_falls_are_those_of_single_runs(model: LlamaForCausalLM) -> None:
    batch = {at: prompt(9, at) for at in (3, 5)}
    falls = knockout.falls(model, batch, WINDOWS)
    for row, (position, each) in enumerate(batch.items()):
        effects = list(each.effects)
        important = max(range(8), key=lambda at: effects[at])
        generator = torch.Generator().manual_seed(position)
        drawn = others(9, torch.tensor([important]), [generator])[0, : knockout.DRAWN].tolist()
        tokens = {
            IMPORTANT: [important],
            DISTANT: [max(range(5), key=lambda at: effects[at])],
            OTHER: drawn,
        }
        before = log_p(model, each.example)
        for source, keys in tokens.items():
            assert float(falls[REPLACED, source][row]) == pytest.approx(sum(effects[key] for key in keys) / len(keys))
            cuts = [(label, list(layers), False) for label, layers in WINDOWS.items()] + [(ALL, None, False)]
            cuts += [] if source == OTHER else [(OUTGOING, None, True)]
            for label, layers, is_later in cuts:
                after = []
                for key in keys:
                    edges = [(query, key) for query in range(key + 1, 9)] if is_later else [(8, key)]
                    with ula.cut(model, edges, layers=layers):
                        after.append(log_p(model, each.example))
                expected = before - sum(after) / len(after)
                assert float(falls[label, source][row]) == pytest.approx(expected, rel=1e-9, abs=1e-10)
                assert abs(expected) > 1e-7


def test_short_prompts_have_no_distant_token(model: LlamaForCausalLM) -> None:
    rows = knockout.cut_rows(model, "smollm2", [prompt(length, length) for length in (5, 3, 6)], WINDOWS)
    assert {row["sample"] for row in rows if row["metric"] == DISTANT} == {"2"}
    assert {row["sample"] for row in rows if row["metric"] == IMPORTANT} == {"0", "1", "2"}
    assert [row["sample"] for row in rows] == sorted(row["sample"] for row in rows)


def test_stored_prompts_are_those_of_the_truths() -> None:
    counts = {name: len(knockout.prompts(name)) for name in knockout.LISTS}
    assert counts == {"smollm2": 160, "smollm2-far-first": 73}
    assert all(len(each.example.ids) == len(each.effects) for name in counts for each in knockout.prompts(name))


def verdicts(late: float) -> dict[str, str]:
    """The verdicts of all claims if cuts in late windows lower log p by `late`, and others by 1."""
    generator = torch.Generator().manual_seed(0)
    labels = [*knockout.WINDOWS, ALL, OUTGOING, REPLACED]
    rows = [
        number(label, source, late + noise if label in labels[4:6] else 1 + noise, model=name, sample=str(at))
        for name in knockout.LISTS
        for at in range(40)
        for noise in (0.01 * float(torch.rand((), generator=generator)),)
        for label in labels
        for source in knockout.SOURCES
    ]
    claims: list[Claim] = knockout.KNOCKOUT.claims()
    every = outcomes(claims, Results({knockout.CUTS: {section.SEED: Table(rows)}}))
    return {claim.text: verdict(claim, [row for row in every if row["claim"] == at]) for at, claim in enumerate(claims)}


def test_verdicts_follow_the_windows() -> None:
    later, earlier = verdicts(2.0), verdicts(0.5)
    late = "From a distant token, late windows matter more than early ones"
    assert (later[late], earlier[late]) == ("holds", "contradicted")
    early = "From random other tokens, early windows matter more than late ones"
    assert (later[early], earlier[early]) == ("contradicted", "holds")
    middle = "From a distant token, middle windows matter more than early ones"
    assert later[middle] == earlier[middle] == "inconclusive"
