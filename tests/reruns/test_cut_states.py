"""A cut model is restored whatever happens, blocks nest or say why not, and what a cut cannot do is refused."""

import contextlib
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.host.test_isolation import sweep
from tests.host.test_threads import elsewhere
from tests.hosts import named
from tests.tracing.models import VOCABULARY, Block, Model, added, ids
from unilinattn import cut, explain, through_operators, trace
from unilinattn.errors import (
    ExactnessError,
    InputError,
    ModelStateError,
    OptionError,
    UnilinattnError,
    UnknownArchitectureError,
)
from unilinattn.testing import left_as_found, relative_error, tolerance
from unilinattn.testing.hosts import host

EDGES = [(5, 2), (6, 1)]
EXACT = tolerance("law", torch.float64)


def small(blocks: int = 2) -> nn.Module:
    return Model(*(Block(added) for _ in range(blocks))).double().eval()


def logits(model: nn.Module, x: Any = None, **options: Any) -> Tensor:
    found: Tensor = model(ids() if x is None else x, **options).logits
    return found


def test_nested_blocks_cut_the_edges_of_both() -> None:
    model = small()
    plain = logits(model)
    with cut(model, EDGES):
        together = logits(model)
    with left_as_found(model):
        with cut(model, EDGES[:1]):
            one = logits(model)
            with cut(model, EDGES[1:]):
                assert relative_error(logits(model), together) <= EXACT
            assert torch.equal(logits(model), one)
        assert torch.equal(logits(model), plain)
    with cut(model, EDGES, layers=0), cut(model, EDGES, layers=[-1]):
        assert relative_error(logits(model), together) <= EXACT
    with cut(model, EDGES, channels=[0, 2]), cut(model, EDGES, channels=[1, 3, 4, 5], replace="zero"):
        assert relative_error(logits(model), together) <= EXACT
    with (
        cut(model, EDGES, layers=[0]),
        cut(model, [(6, 2), (6, 1)]),
        pytest.raises(OptionError, match=r"two nested cuts share an edge of blocks.0.mixer"),
    ):
        logits(model)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ({"heads": [0, 2]}, {"heads": 2}),
        ({"channels": [0, 2]}, {"channels": [2, 5]}),
        ({"heads": slice(0, 3)}, {"channels": -4}),
        ({"heads": 1}, {}),
        ({}, {"channels": 1}),
        ({"heads": lambda op: [3]}, {"heads": torch.arange(6) == 3}),
    ],
)
def test_nested_blocks_with_an_edge_in_a_head_or_channel_of_both_are_refused(outer: Any, inner: Any) -> None:
    model = small(1)
    with left_as_found(model), cut(model, EDGES, **outer):
        with cut(model, EDGES[:1], **inner), pytest.raises(OptionError, match="two nested cuts share an edge"):
            logits(model)
        # Other edges are no conflict.
        with cut(model, [(6, 2), (5, 1)], **inner):
            both = logits(model)
    with cut(model, [(6, 2), (5, 1)], **inner), cut(model, EDGES, **outer):
        assert relative_error(logits(model), both) <= EXACT


def test_negative_layers_count_from_the_last() -> None:
    model = small()
    for negative, layer in ((-2, 0), (-1, 1)):
        with cut(model, EDGES, layers=layer):
            expected = logits(model)
        with cut(model, EDGES, layers=negative):
            assert torch.equal(logits(model), expected)
    with cut(model, EDGES, layers=-3), pytest.raises(OptionError, match="layer -3 is out of range; layers 0 to 1 ran"):
        logits(model)


def test_blocks_that_end_in_another_order() -> None:
    model, plain = small(), None
    with left_as_found(model):
        plain = logits(model)
        one, two = cut(model, EDGES[:1]), cut(model, EDGES[1:])
        one.__enter__()
        with cut(model, EDGES[1:]):
            pass
        two.__enter__()
        one.__exit__(None, None, None)
        inside = logits(model)
        two.__exit__(None, None, None)
        assert torch.equal(logits(model), plain)
    with cut(model, EDGES[1:]):
        assert torch.equal(logits(model), inside)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["block", "module", "edges"])
def test_an_exception_leaves_the_model_as_found(error: type[BaseException], where: str) -> None:
    model = small()

    def fail(*_: object) -> None:
        raise error("stop here")

    hook = model.head.register_forward_pre_hook(fail) if where == "module" else contextlib.nullcontext()
    edges = [(2, 5)] if where == "edges" else EDGES
    expected = InputError if where == "edges" else error
    with left_as_found(model), pytest.raises(expected), cut(model, edges):
        if where == "block":
            fail()
        logits(model)
    if where == "module":
        hook.remove()  # type: ignore[union-attr]  # a handle
    assert "forward" not in vars(model)


@pytest.mark.parametrize("sample", [20, pytest.param(None, marks=pytest.mark.slow)])
def test_an_interrupt_on_any_line(sample: int | None) -> None:
    model = small(1)
    logits(model)
    trace(model, ids())  # a model's first trace searches for mixers, later ones do not

    def run() -> None:
        with cut(model, EDGES):
            model(ids())

    sweep(model, run, ("unilinattn/reruns/cut.py", "unilinattn/call/entries.py", contextlib.__file__), sample)


def test_calls_from_other_threads_are_cut_too_and_other_cuts_are_refused() -> None:
    model = small()
    with cut(model, EDGES):
        inside = logits(model)
        assert torch.equal(elsewhere(lambda: logits(model)), inside)

        def second() -> None:
            with cut(model, EDGES):
                pass

        with pytest.raises(ModelStateError, match="is inside a `cut` of another thread"):
            elsewhere(second)
        assert torch.equal(logits(model), inside)
    elsewhere(second)


def test_a_cut_model_is_not_traced() -> None:
    model = host("mamba").model()
    x = host("mamba").inputs()
    found = trace(model, x)
    for inside in (
        lambda: trace(model, x),
        lambda: found.gradient(),
        lambda: explain(found, method="knockout", target=-1),
    ):
        with left_as_found(model), cut(model, EDGES):
            with pytest.raises(ModelStateError, match="MambaForCausalLM is inside a `cut`"):
                inside()
            model(x)


def test_a_models_own_hooks_run_once() -> None:
    model, calls = small(), []
    model.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.register_forward_hook(lambda *_: calls.append("after"))
    model.blocks[1].mixer.register_forward_pre_hook(lambda *_: calls.append("inside"))
    trace(model, ids())
    calls.clear()
    with cut(model, EDGES):
        logits(model)
    assert calls == ["before", "inside", "after"]


@pytest.mark.slow
def test_a_compiled_model_is_cut_too() -> None:
    model = host("mamba").model()
    x = host("mamba").inputs()
    compiled = torch.compile(model, backend="eager")
    plain = logits(compiled, x)
    with cut(model, EDGES):
        expected = logits(model, x)
    with cut(compiled, EDGES):
        assert torch.equal(logits(compiled, x), expected)
    assert torch.equal(logits(compiled, x), plain)
    assert not torch.equal(expected, plain)


def test_no_gradients_are_computed() -> None:
    model = small()
    with cut(model, EDGES):
        assert not logits(model).requires_grad
    assert logits(model).requires_grad


def test_through_operators_and_cut_go_together() -> None:
    model, x = host("mamba").model().double(), host("mamba").inputs()
    with cut(model, EDGES):
        expected = logits(model, x)
        with through_operators(model):
            assert relative_error(logits(model, x), expected) <= 2e-6
    with through_operators(model), cut(model, EDGES):
        assert relative_error(logits(model, x), expected) <= 2e-6


@pytest.mark.long
def test_a_text_is_generated_without_a_cache() -> None:
    model, x = host("llama, grouped queries").model(), host("llama, grouped queries").inputs()
    settings = dict(max_new_tokens=3, do_sample=False, pad_token_id=0)
    with cut(model, [(-1, 0), (-1, -2)]):
        text = model.generate(x, use_cache=False, **settings)
        longer = x
        for _ in range(3):
            longer = torch.cat([longer, logits(model, longer)[:, -1:].argmax(-1)], dim=1)
        assert torch.equal(text, longer)
        with pytest.raises(InputError, match=r"was given past_key_values inside a `cut`.*use_cache=False"):
            model.generate(x, use_cache=True, **settings)
        assert model(x, use_cache=True).past_key_values is None


BAD: list[tuple[dict[str, Any], type[UnilinattnError], str]] = [
    (
        dict(edges=[(7, 0)]),
        InputError,
        r"edge \(7, 0\) is out of range: blocks.0.mixer has 7 query and 7 key positions",
    ),
    (dict(edges=[(1, 4)]), InputError, r"edge \(1, 4\): blocks.0.mixer is causal.*did you mean \(4, 1\)"),
    (dict(layers=2), OptionError, r"cut: layer 2 is out of range; layers 0 to 1 ran"),
    (dict(layers=[0, -3]), OptionError, r"cut: layer -3 is out of range; layers 0 to 1 ran"),
    (dict(layers="blocks.1.mixr"), OptionError, r"cut: no layer 'blocks.1.mixr'; did you mean 'blocks.1.mixer'"),
    (dict(heads=6), OptionError, r"heads=6: the core of blocks.0.mixer has heads 0 to 5"),
    (dict(channels=[0, 9]), OptionError, r"channels=\[0, 9\]: the core of blocks.0.mixer has channels 0 to 5"),
    (dict(heads=0, channels=0), OptionError, r"heads and channels both restrict the cut"),
    (
        dict(replace="means"),
        OptionError,
        r"unknown replace 'means'; did you mean 'mean'\? Accepted: mean, zero. Or other",
    ),
    (dict(replace=ids(6)), InputError, r"replace: the other inputs reach blocks.0.mixer as \(2, 6, 6\), and these as"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_bad_input_says_what_is_accepted(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = small()
    with left_as_found(model), pytest.raises(error, match=message), cut(model, **{"edges": EDGES, **options}):
        logits(model)


def test_inputs_are_checked_as_those_of_a_trace() -> None:
    model = host("mamba").model()
    with (
        cut(model, EDGES),
        pytest.raises(InputError, match="input_ids reach from 0 to 99; the model knows ids 0 to 30"),
    ):
        model(torch.tensor([[0, 99]]))
    with cut(model, []), pytest.raises(InputError, match="integer token ids of shape"):
        model(torch.zeros(1, 3))


@pytest.mark.skipif(transformers.__version__ == "5.6.2", reason="T5 of transformers 5.6.2 is refused")
def test_a_model_with_an_encoder_and_a_decoder_needs_layers() -> None:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval().double()
    given = {"input_ids": ids(), "decoder_input_ids": ids(5)}
    with pytest.raises(OptionError, match="has an encoder and a decoder, in which an edge names different tokens"):
        cut(model, EDGES).__enter__()
    names = [layer.name for layer in trace(model, given).layers]
    assert len(names) == 3
    plain = model(**given).logits
    outputs = []
    for name, edge in zip(names, [(2, 5), (4, 2), (4, 6)], strict=True):
        with cut(model, [edge], layers=name):
            outputs.append(model(**given).logits)
    assert all(relative_error(one, plain) > 1e-6 for one in outputs)


def test_a_layer_that_misses_its_operator_is_refused() -> None:
    model = small()
    hook = model.blocks[1].mixer.register_forward_hook(lambda module, args, output: 1.1 * output)
    with cut(model, EDGES, layers=1), pytest.raises(ExactnessError, match=r"the operator of blocks.1.mixer misses"):
        logits(model)
    with cut(model, EDGES, layers=0):
        logits(model)
    hook.remove()


def test_a_model_with_an_unknown_mixer_is_refused() -> None:
    model = Model(Block(added), Block(lambda block, x: x + x.cumsum(1) * block.mixer(x)[:, :1].mean())).eval()
    with left_as_found(model), cut(model, EDGES), pytest.raises(UnknownArchitectureError, match="moves information"):
        logits(model)


def test_active_dropout_is_refused() -> None:
    model = Model(Block(lambda block, x: x + block.dropout(block.mixer(x)))).train()
    with left_as_found(model), cut(model, EDGES), pytest.raises(ModelStateError, match=r"dropout with p = 0.5"):
        logits(model)


def test_a_long_input_runs_through_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = host("mamba").model().double(), torch.randint(31, (1, 40))
    with cut(model, [(30, 2), (39, 8)]):
        expected = logits(model, x)
        for name, value in {"SUBSTITUTE_ABOVE": 20}.items():
            monkeypatch.setattr(f"unilinattn.reruns.cut.{name}", value)
        monkeypatch.setattr("unilinattn.host.substitution.PREFIX", 16)
        assert relative_error(logits(model, x), expected) <= 2e-6


def test_a_host_that_rescales_its_weights_is_cut_in_every_pass() -> None:
    entry = named("rwkv")
    model, x = entry.model(), entry.inputs()
    with left_as_found(model), cut(model, EDGES):
        assert torch.equal(logits(model, x), logits(model, x))
