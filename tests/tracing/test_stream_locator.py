"""A trace searches no block again in which an earlier one found no sum, until something of the model changes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import unilinattn as ula
from unilinattn.tracing import residual, stream_locator

DEPTH = 2


def bert() -> nn.Module:
    """Return a model that norms its stream, so that no layer is added to one."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, vocab_size=50)
    return transformers.BertModel(transformers.BertConfig(**sizes, num_hidden_layers=DEPTH)).eval()


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, vocab_size=50)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=DEPTH)).eval()


def gemma() -> nn.Module:
    """Return a model that norms what it adds to its stream."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, vocab_size=50, head_dim=8)
    config = transformers.Gemma2Config(**sizes, num_key_value_heads=2, num_hidden_layers=DEPTH)
    return transformers.Gemma2ForCausalLM(config).eval()


def ids(length: int = 9) -> torch.Tensor:
    return torch.randint(0, 50, (1, length), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The searches that were made, each a layer and a block."""
    made: list[tuple[str, str]] = []
    search = residual.locate_in_stream

    def noted(layer: Any, block: Any) -> bool:
        made.append((layer.name, block.name))
        return search(layer, block)

    monkeypatch.setattr(stream_locator, "locate_in_stream", noted)
    return made


def reasons(trace: ula.Trace) -> list[tuple[object, ...]]:
    return [(layer.stream is None, layer.reads_its_output, layer.no_residual) for layer in trace.layers]


def test_a_second_trace_makes_no_search_that_found_nothing(searches: list[tuple[str, str]]) -> None:
    model = bert()
    first = ula.trace(model, ids())
    assert len(searches) > DEPTH and all(layer.stream is None for layer in first.layers)
    searches.clear()
    assert reasons(ula.trace(model, ids())) == reasons(first)
    assert not searches


def scaled(model: Any) -> None:
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight.mul_(2)


CHANGES: list[Callable[[Any], object]] = [
    scaled,
    lambda model: model.encoder.layer[1].register_forward_hook(lambda module, args, output: None),
    lambda model: model.encoder.layer[1].register_forward_pre_hook(lambda module, args: None),
    lambda model: setattr(model.encoder.layer[1], "forward", model.encoder.layer[1].forward),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_searched_again(change: Callable[[Any], object], searches: list[tuple[str, str]]) -> None:
    model = bert()
    ula.trace(model, ids())
    count = len(searches)
    change(model)
    searches.clear()
    ula.trace(model, ids())
    assert len(searches) == count


def test_a_search_among_few_tokens_does_not_tell_of_others(searches: list[tuple[str, str]]) -> None:
    model = bert()
    ula.trace(model, ids(1))
    count = len(searches)
    searches.clear()
    ula.trace(model, ids(9))
    assert len(searches) == count


def test_found_sums_are_verified_in_each_trace(searches: list[tuple[str, str]]) -> None:
    model = llama()
    first = ula.trace(model, ids())
    count = len(searches)
    assert all(layer.stream is not None for layer in first.layers)
    searches.clear()
    assert reasons(ula.trace(model, ids(12))) == reasons(first)
    assert len(searches) == count


@pytest.fixture
def candidates(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The candidates that were ruled out, or not, by a few of their elements."""
    tried: list[object] = []
    possible = residual.possible_sums

    def noted(sums: Iterator[Any], added: torch.Tensor) -> Iterator[Any]:
        return possible((tried.append(each) or each for each in sums), added)

    monkeypatch.setattr(residual, "possible_sums", noted)
    return tried


def streams(trace: ula.Trace) -> list[torch.Tensor]:
    return [stream for layer in trace.layers for stream in (layer.stream, layer.next_stream) if stream is not None]


@pytest.mark.parametrize("build", [llama, gemma])
def test_a_second_trace_tries_the_sums_of_the_first(build: Callable[[], nn.Module], candidates: list[object]) -> None:
    model = build()
    ula.trace(model, ids())
    assert len(candidates) > 2 * DEPTH
    candidates.clear()
    again = ula.trace(model, ids(12))
    assert not candidates
    whole = ula.trace(build(), ids(12))
    assert candidates and len(streams(whole)) == 2 * DEPTH
    assert all(map(torch.equal, streams(again), streams(whole)))


@pytest.mark.parametrize("number", [1, 10**6])
def test_a_sum_of_an_earlier_trace_that_is_none_now_is_searched(number: int, candidates: list[object]) -> None:
    model = llama()
    first = ula.trace(model, ids())
    _, outcomes = stream_locator._earlier[model]
    assert len(outcomes) == DEPTH
    for search, outcome in outcomes.items():
        outcomes[search] = outcome._replace(candidates=(number,))
    candidates.clear()
    again = ula.trace(model, ids())
    assert candidates
    assert all(map(torch.equal, streams(again), streams(first)))
    candidates.clear()
    ula.trace(model, ids())
    assert not candidates
