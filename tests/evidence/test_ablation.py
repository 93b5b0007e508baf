"""Cuts and deletions on text, against runs that change the model or the tokens by hand, and the stored prompts."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import unilinattn as ula
from evidence import ablation, record
from evidence import ablation_measures as measures
from evidence.texts import VOCABULARY
from evidence.truths import documented
from unilinattn.evaluation import Case, Sample

PROMPTS = measures.prompts("mamba2")

SHORT = min(range(len(PROMPTS)), key=lambda position: len(PROMPTS[position].example.ids))
"""The position of the shortest prompt."""


def log_p(host: torch.nn.Module, target: int | None, **inputs: Tensor) -> Tensor:
    assert target is not None
    with torch.no_grad():
        return host(**inputs).logits[:, -1].double().log_softmax(-1)[:, target]


@pytest.fixture(scope="module")
def hosts() -> dict[str, torch.nn.Module]:
    return {name: documented(name)[0] for name in measures.LAYERS}


@pytest.fixture(scope="module")
def case(hosts: dict[str, torch.nn.Module]) -> Case:
    example = PROMPTS[SHORT].example
    sample = Sample(inputs=torch.tensor([example.ids]), target=-1, label=example.target, name=str(SHORT))
    trace = ula.trace(hosts["mamba2"], sample.inputs, progress=False)
    return Case(hosts["mamba2"], sample, trace, ula.explain(trace, method="logit", target=-1, progress=False))


@pytest.mark.parametrize("name", measures.LAYERS)
def test_windows_are_consecutive_layers_of_the_model(name: str, hosts: dict[str, torch.nn.Module]) -> None:
    layers = len(ula.trace(hosts[name], torch.tensor([PROMPTS[SHORT].example.ids]), progress=False).layers)
    windows = list(measures.windows(name).values())
    assert windows == [[start, start + 1] for start in range(layers - 1)]


def test_sources_have_the_largest_effect_before_the_last_tokens() -> None:
    effects = torch.tensor([[0.0, 5, 1, 9, 2, 3, 99], [4.0, 1, 2, 0, 6, 5, 99]])
    assert measures.source_of(effects, measures.SOURCES["important"]).tolist() == [3, 4]
    assert measures.source_of(effects, measures.SOURCES["distant"]).tolist() == [1, 0]


def test_other_tokens_are_all_but_the_important_and_the_last_one() -> None:
    generators = [torch.Generator().manual_seed(seed) for seed in range(200)]
    drawn = measures.others(6, torch.full((200,), 2), generators)
    assert drawn.shape == (200, measures.OTHERS)
    assert set(drawn.flatten().tolist()) == {0, 1, 3, 4}


def test_edges_to_later_tokens_are_all_of_them() -> None:
    edges = measures.to_later(torch.tensor([1, 3]), 5)
    assert [set(map(tuple, of_prompt.tolist())) for of_prompt in edges] == [{(2, 1), (3, 1), (4, 1)}, {(4, 3)}]
    assert measures.to_last(torch.tensor([1, 3]), 5).tolist() == [[[4, 1]], [[4, 3]]]


@pytest.mark.parametrize("name", measures.LAYERS)
def test_a_cut_in_the_last_layer_takes_a_contribution_from_its_last_output(name: str) -> None:
    host = documented(name)[0].double()
    ids, target = torch.tensor([PROMPTS[SHORT].example.ids]), torch.tensor([PROMPTS[SHORT].example.target])
    length, key = ids.shape[1], 4
    trace = ula.trace(host, ids, progress=False)
    layer = trace.layers[-1]
    share = layer.operator.contributions(-1)[0, ..., key, :].reshape(-1)

    def without(module: torch.nn.Module, arguments: object, output: Tensor) -> Tensor:
        changed = output.clone()
        changed[0, -1] -= share
        return changed

    handle = host.get_submodule(layer.name).register_forward_hook(without)
    try:
        expected = log_p(host, int(target), input_ids=ids)
    finally:
        handle.remove()
    edges = measures.to_last(torch.tensor([key]), length)
    after = measures.log_probabilities(host, ids, target, edges, [len(trace.layers) - 1])
    torch.testing.assert_close(after, expected, rtol=1e-10, atol=1e-10)
    assert float((after - log_p(host, int(target), input_ids=ids)).abs()) > 1e-6


def test_the_falls_of_a_prompt_are_those_of_single_runs(hosts: dict[str, torch.nn.Module]) -> None:
    host, position = hosts["gated_deltanet"], SHORT
    prompt = measures.prompts("gated_deltanet")[position]
    windows = measures.windows("gated_deltanet")
    rows = measures.cut_falls(host, "gated_deltanet", {position: prompt}, windows)
    falls = {(row["method"], row["metric"]): row["value"] for row in rows}
    ids, target = torch.tensor([prompt.example.ids]), prompt.example.target
    before = log_p(host, target, input_ids=ids)
    effects = list(prompt.effects)
    for source, last in measures.SOURCES.items():
        key = max(range(len(effects) - last), key=lambda at: effects[at])
        assert falls[measures.REPLACED, source] == effects[key]
        every = [(query, key) for query in range(key + 1, len(effects))]
        runs = [(label, [(-1, key)], layers) for label, layers in windows.items()]
        for label, pairs, layers in [*runs, (measures.ALL, [(-1, key)], None), (measures.OUTGOING, every, None)]:
            with ula.cut(host, pairs, layers=layers):
                after = log_p(host, target, input_ids=ids)
            assert falls[label, source] == pytest.approx(float(before - after), abs=1e-4)
    assert (measures.ALL, measures.OTHER) in falls


def test_pseudo_values_are_those_of_the_rank_correlation() -> None:
    x = torch.tensor([1.0, 2, 3, 4, 5], dtype=torch.float64)
    torch.testing.assert_close(measures.pseudo_values(x, x**3), torch.ones(5, dtype=torch.float64))
    # 1 - 6 sum d^2 / (n (n^2 - 1)): all five, and without the third one, whose rank does not differ.
    y = torch.tensor([2.0, 1, 3, 5, 4], dtype=torch.float64)
    whole, without = 1 - 6 * 4 / 120, 1 - 6 * 4 / 60
    assert float(measures.pseudo_values(x, y)[2]) == pytest.approx(5 * whole - 4 * without)


def test_a_deletion_replaces_ranked_tokens_by_the_same_random_ones(case: Case) -> None:
    ids, length = case.sample.inputs, case.sample.inputs.shape[1]
    generator = torch.Generator().manual_seed(measures.DRAWS_SEED + SHORT)
    drawn = torch.randint(1, VOCABULARY, (measures.DRAWS, length), generator=generator)
    order = case.scores[:-1].argsort(descending=True)
    before = log_p(case.model, case.sample.label, input_ids=ids)
    measured = measures.deletion(case, "reference")
    for at, ranked in enumerate((order, order.flip(0))):
        for number, fraction in enumerate(measures.FRACTIONS):
            removed = ranked[: math.ceil(fraction * (length - 1))]
            changed = ids.repeat(measures.DRAWS, 1)
            changed[:, removed] = drawn[:, removed]
            falls = before - log_p(case.model, case.sample.label, input_ids=changed)
            assert float(measured[at, number]) == pytest.approx(float(falls.mean()), abs=1e-4)
            assert measures.deletion_fall(case, "reference", at, number) == float(measured[at, number])
    assert measures.deletion_fall(case, "reference", 0) > measures.deletion_fall(case, "reference", 1)


def test_a_deletion_by_the_mean_embedding_is_that_of_the_prompt(case: Case) -> None:
    ids, length = case.sample.inputs, case.sample.inputs.shape[1]
    host: Any = case.model
    embeddings = host.get_input_embeddings()(ids).detach()
    before = log_p(case.model, case.sample.label, input_ids=ids)
    removed = case.scores[:-1].argsort(descending=True)[: math.ceil(measures.FRACTIONS[0] * (length - 1))]
    changed = embeddings.clone()
    changed[:, removed] = embeddings.mean(1, keepdim=True)
    fall = before - log_p(case.model, case.sample.label, inputs_embeds=changed)
    assert float(measures.deletion(case, "mean")[0, 0]) == pytest.approx(float(fall), abs=1e-4)


def test_the_middle_is_one_window_or_the_mean_of_two() -> None:
    assert ablation._middle("mamba2") == {"layers 2 to 3": 0.5, "layers 3 to 4": 0.5}
    assert ablation._middle("gated_deltanet") == {"layers 2 to 3": 1.0}


@pytest.mark.parametrize("name", measures.LAYERS)
def test_every_prompt_has_an_effect_of_each_token(name: str) -> None:
    assert len(measures.prompts(name)) == ablation.STUDY.size.scored
    assert all(len(prompt.example.ids) == len(prompt.effects) for prompt in measures.prompts(name))


def test_models_that_are_trained_once_are_measured_once(tmp_path: Path) -> None:
    assert ablation.STUDY.measure({}, 1, ablation.STUDY.size, tmp_path) == {}


def test_the_numbers_of_a_quick_run_are_as_recorded(tmp_path: Path) -> None:
    study = ablation.STUDY
    tables = study.measure(study.hosts(tmp_path, 0), 0, study.quick, tmp_path)
    numbers = record.summaries({name: {0: table} for name, table in tables.items()})
    count, different = record.differences(numbers, record.read(study.name)["quick"])
    assert len(different) <= record.DIFFERENT_SHARE * count, different
