"""`knockout` against runs of the model inside `cut`, one for each token or edge of each sequence."""

import copy
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.methods.hosts import HOSTS, inputs
from unilinattn import cut, explain, trace
from unilinattn.errors import InputError, OptionError
from unilinattn.methods import knockout
from unilinattn.progress import scope
from unilinattn.results.attribution import Attribution
from unilinattn.testing import left_as_found, promoted, relative_error
from unilinattn.testing.hosts import host
from unilinattn.tracing.trace import Trace

LENGTH = 6
LIMIT = 1e-10


def hosted(name: str, padding: str = "none") -> tuple[nn.Module, dict[str, Tensor], Trace]:
    model, given = HOSTS[name].model(), inputs(padding)
    if hasattr(model, "set_attn_implementation") and name in ("llama", "gpt2"):
        model.set_attn_implementation("eager")
    return model, given, trace(model, given)


def logits(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**given).logits
    return found


def outgoing(token: int) -> list[tuple[int, int]]:
    return [(i, token) for i in range(token + 1, LENGTH)]


def dropped(model: nn.Module, given: dict[str, Tensor], edges: Sequence[Any], **options: Any) -> Tensor:
    """The drop of the predicted logits at every position."""
    plain = logits(model, given)
    with cut(model, list(edges), **options):
        after = logits(model, given)
    best = plain.argmax(-1, keepdim=True)
    return (plain - after).gather(-1, best).squeeze(-1)


@pytest.mark.long
@pytest.mark.parametrize("name", ["mamba", "mamba2", "llama", "delta rule", "hybrid"])
def test_tokens_are_cut_one_after_the_other(name: str) -> None:
    with promoted():
        model, given, found = hosted(name)
        expected = torch.stack([dropped(model, given, outgoing(t)) for t in range(LENGTH)], dim=-1)
        with left_as_found(model):
            every = explain(found, method="knockout")
        assert every.dims == ("batch", "query", "key")
        assert relative_error(every.scores, expected) <= LIMIT
        last = explain(found, method="knockout", target=[-1, 2])
        assert last.dims == ("batch", "key")
        assert relative_error(last.scores, torch.stack([expected[0, -1], expected[1, 2]])) <= LIMIT
    # Nothing passes to earlier tokens, and a token keeps its edge to itself.
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1)
    assert float(every.scores[:, ~later].abs().max()) <= LIMIT * float(every.scores.abs().max())
    assert float(every.scores[:, later].abs().min()) > 0


@pytest.mark.long
def test_few_sequences_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with promoted():
        found = hosted("mamba2")[2]
        whole = knockout(found, target=-1).scores
        for tokens in (5 * LENGTH, 1):
            monkeypatch.setattr(import_module("unilinattn.scoring.numbers"), "TOKENS", tokens)
            assert relative_error(knockout(found, target=-1).scores, whole) <= LIMIT


def test_edges_are_cut_one_after_the_other() -> None:
    edges = [(5, 2), (-1, -2), (3, 3)]
    with promoted():
        model, given, found = hosted("mamba2")
        result = explain(found, method="knockout", target=-1, edges=torch.tensor(edges), layers=[1], heads=[0, 2])
        assert result.dims == ("batch", "query", "key")
        expected = torch.zeros(2, LENGTH, LENGTH, dtype=torch.float64)
        for i, j in edges:
            expected[:, i, j] = dropped(model, given, [(i, j)], layers=[1], heads=[0, 2])[:, -1]
        assert relative_error(result.scores, expected) <= LIMIT
    assert float(result.scores[:, 5, 2].abs().min()) > 0


def test_windows_of_layers_are_cut_together() -> None:
    with promoted():
        model = host("s4d").model().double()
        x = host("s4d").inputs()[:, :LENGTH]
        found = trace(model, x)
        names = [layer.name for layer in found.layers]
        result = explain(found, method="knockout", target=-1, window=1)
        assert (result.dims, result.layers) == (("layer", "batch", "key"), tuple(names))
        alone = [explain(found, method="knockout", target=-1, layers=[name]).scores for name in names]
        assert relative_error(result.scores.flatten(1), torch.stack(alone).flatten(1)) <= LIMIT
        every = explain(found, method="knockout", target=-1).scores
        wide = explain(found, method="knockout", target=-1, window=3).scores
        assert relative_error(wide.flatten(1), torch.stack([every, every]).flatten(1)) <= LIMIT
        # An even window holds one layer more after its own than before it.
        two = explain(found, method="knockout", target=-1, window=2).scores
        assert relative_error(two.flatten(1), torch.stack([every, alone[1]]).flatten(1)) <= LIMIT
        assert relative_error(every, alone[1]) > 1e-3


def test_the_measure_and_the_logit() -> None:
    with promoted():
        model, given, found = hosted("mamba")
        plain = logits(model, given)[:, -1]
        with cut(model, outgoing(2)):
            after = logits(model, given)[:, -1]
        best = plain.argmax(-1)
        every = torch.arange(2)
        expected = {
            ("logit", None): plain[every, best] - after[every, best],
            ("logit", 3): plain[:, 3] - after[:, 3],
            ("logit", (3, 1)): plain[:, 3] - plain[:, 1] - after[:, 3] + after[:, 1],
            ("log-probability", 3): plain.log_softmax(-1)[:, 3] - after.log_softmax(-1)[:, 3],
        }
        for (measure, logit), drop in expected.items():
            result = explain(found, method="knockout", target=-1, measure=measure, logit=logit)
            assert relative_error(result.scores[:, 2][None], drop[None]) <= LIMIT
        own = explain(found, method="knockout", logit=lambda output: output.logits[:, -1, 3])
        assert own.dims == ("batch", "key")
        assert relative_error(own.scores[:, 2][None], expected["logit", 3][None]) <= LIMIT


@pytest.mark.long
def test_values_in_place_of_the_tokens() -> None:
    with promoted():
        model, given, found = hosted("llama")
        other = trace(model, {"input_ids": given["input_ids"].flip(0)})
        for replace in ("mean", other):
            result = explain(found, method="knockout", target=-1, replace=replace)
            expected = [dropped(model, given, outgoing(t), replace=replace)[:, -1] for t in range(LENGTH)]
            assert relative_error(result.scores, torch.stack(expected, dim=-1)) <= LIMIT
    assert result.options["replace"] == "another run of LlamaForCausalLM"


def test_a_classifier_has_no_queries() -> None:
    model, x = host("vit").model().double(), host("vit").inputs().double()
    with promoted():
        found = trace(model, x)
        result = explain(found, method="knockout", logit=1)
        length = found.layers[0].output.shape[1]
        with torch.no_grad():
            plain = model(x).logits[:, 1]
            with cut(model, [(i, 3) for i in range(length) if i != 3]):
                expected = plain - model(x).logits[:, 1]
    assert result.dims == ("batch", "key")
    assert relative_error(result.scores[:, 3][None], expected[None]) <= LIMIT


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_no_module_is_copied_and_every_chunk_is_one_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given, found = hosted(name)
    plain, modules, sequences = copy.deepcopy, list[nn.Module](), list[int]()

    def copied(value: Any, *args: Any) -> Any:
        modules.extend([value] if isinstance(value, nn.Module) else [])
        return plain(value, *args)

    monkeypatch.setattr(copy, "deepcopy", copied)
    copy.deepcopy(nn.Linear(1, 1))
    assert len(modules) == 1
    modules.clear()
    monkeypatch.setattr(import_module("unilinattn.scoring.numbers"), "TOKENS", 4 * LENGTH)
    model.register_forward_pre_hook(
        lambda _, args, kwargs: sequences.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    batch = len(given["input_ids"])
    explain(found, method="knockout", target=-1)
    # The value without a cut is that of the trace. Two runs tell, once for a trace, that copies share nothing.
    assert sequences == [batch, 2 * batch] + [4] * (batch * LENGTH // 4)
    sequences.clear()
    explain(found, method="knockout", target=-1)
    assert sequences == [4] * (batch * LENGTH // 4)
    with cut(model, outgoing(2)):
        model(**given)
    assert not modules


def test_a_result_can_be_saved(tmp_path: Any) -> None:
    found = hosted("mamba2")[2]
    result = explain(found, method="knockout", target=-1, edges=[(5, 2)], window=1, channels=lambda op: [0])
    stored = Attribution.load(result.save(tmp_path / "result.safetensors"))
    assert torch.equal(stored.scores, result.scores)
    assert stored.options["edges"] == [[5, 2]]
    assert stored.options["channels"] == "<lambda>"
    result.to_html()


def test_progress_settings_are_left() -> None:
    before = dict(scope())
    explain(hosted("mamba")[2], method="knockout", target=-1)
    assert dict(scope()) == before


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (dict(edges=[(5, 2)]), OptionError, r"knockout: edges are cut for one target; give a position"),
    (dict(edges=[(6, 2)], target=-1), InputError, r"knockout: edge \(6, 2\) is out of range; positions are -6 to 5"),
    (dict(edges=[(2, 5)], target=-1), InputError, r"edge \(2, 5\): .* is causal"),
    (dict(edges=[5, 2], target=-1), OptionError, r"knockout does not accept edges=\[5, 2\]"),
    (dict(edges=[], target=-1), OptionError, r"knockout does not accept edges=\[\]"),
    (dict(window=0), OptionError, r"window=0: Input should be greater than or equal to 1"),
    (dict(layers=[7]), OptionError, r"knockout: layer 7 is out of range"),
    (dict(layers="mean"), OptionError, r"layers='mean'"),
    (dict(heads=9), OptionError, r"heads=9: the core of .* has heads 0 to 3"),
    (dict(heads=0, channels=0), OptionError, r"knockout: heads and channels both restrict the cut"),
    (dict(replace="man"), OptionError, r"replace='man'; did you mean 'mean'\?"),
    (dict(measure="probability"), OptionError, r"measure='probability'; did you mean 'log-probability'\?"),
    (dict(measure="log-probability", logit=lambda out: out.logits[:, 0, 0]), OptionError, "needs a token or class id"),
    (dict(logit=99, target=-1), InputError, r"logit 99 is out of range: the model has logits 0 to 16"),
    (dict(logit=lambda out: out.logits.sum()), InputError, r"the function `logit` returned \(\) for 2 sequences"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_bad_options_say_what_is_accepted(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        explain(hosted("mamba2")[2], method="knockout", **options)


def test_models_without_logits_are_refused() -> None:
    model = host("mamba").model().backbone
    found = trace(model, host("mamba").inputs())
    with pytest.raises(InputError, match="no logits; give `logit` as a function of its output"):
        explain(found, method="knockout", measure="log-probability", target=-1)
