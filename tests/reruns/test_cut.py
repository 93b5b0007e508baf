"""Runs without some edges: against y_i - sum T_ij x_j by definition, layer after layer, on every kind of host."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import hosts
from tests.hosts import named
from tests.shared import exact_trace
from tests.tracing.models import WIDTH, Block, Model, added, ids
from unilinattn import cut, trace
from unilinattn.call.nested import mapped
from unilinattn.errors import InputError
from unilinattn.host.recorder import main_tensor
from unilinattn.models import S4D
from unilinattn.operator.edges import is_causal
from unilinattn.testing import Host, left_as_found, promoted, relative_error, tolerance
from unilinattn.testing.checks import outputs, variant
from unilinattn.testing.hosts import host, transformers_model
from unilinattn.testing.hosts.basic import randomize
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Trace

EVERY_HOST = [case for name, table in hosts.tables().items() for case in hosts.cases(table, (), f"{name}/", turn=2)]
LIMIT = tolerance("reconstruction", torch.float64)
EXACT = tolerance("law", torch.float64)

Values = Callable[[Layer, int], dict[str, Tensor]]


def built(name: str) -> tuple[nn.Module, Tensor]:
    entry = named(name)
    return entry.model().double(), entry.inputs()


def logits(model: nn.Module, x: Any) -> Tensor:
    with torch.no_grad():
        return outputs(model(**x) if isinstance(x, dict) else model(x))[0]


@contextmanager
def returning(module: nn.Module, value: Tensor) -> Iterator[None]:
    """Let a module return a value as its output, by a hook of the test."""

    def replace(_: nn.Module, args: Any, output: Any) -> Any:
        own = main_tensor(output)
        return mapped(output, lambda t: value.clone() if t is own else t)

    hook = module.register_forward_hook(replace)
    try:
        yield
    finally:
        hook.remove()


def by_definition(
    model: nn.Module, x: Any, pairs: Sequence[tuple[int, int]], layers: Sequence[int], put: Values | None = None
) -> Tensor:
    """Cut one layer after the other, each by the vectors of its operator in a trace with the layers before it cut."""
    with ExitStack() as stack:
        for index in layers:
            layer = trace(model, x).layers[index]
            inputs = {p: v - (0 if put is None else put(layer, index)[p]) for p, v in layer.operator.inputs.items()}
            op, kept = variant(layer.operator, inputs=inputs), layer.output.clone()
            for port in op.ports:
                for i, j in {(i % kept.shape[1], j % op.inputs[port].shape[1]) for i, j in pairs}:
                    kept[:, i] -= op.contributions(i, port=port)[:, j]
            stack.enter_context(returning(layer.module, kept))
        return outputs(trace(model, x).output)[0]


def called_once(found: Trace) -> list[int]:
    """The first and the last layer whose module runs only once."""
    modules = [layer.module for layer in found.layers]
    once = [at for at, module in enumerate(modules) if sum(module is other for other in modules) == 1]
    return sorted({once[0], once[-1]})


def some_pairs(layers: Sequence[Layer]) -> list[tuple[int, int]]:
    length = layers[0].output.shape[1]
    pairs = [(-1, 0), (length - 1, length // 2), (length // 2, length // 3), (-1, -1)]
    causal = any(is_causal(layer.operator) for layer in layers)
    return pairs if causal or length == 1 else [*pairs, (0, length - 1)]


@pytest.mark.parametrize("host", EVERY_HOST)
def test_a_run_without_edges_is_that_of_the_definition(host: Host) -> None:
    model, x = host.model().double(), host.inputs()
    x = x.double() if x.is_floating_point() else x
    # Inside of `promoted` weights are drawn in float64, which are others.
    found = exact_trace(host)
    with promoted():
        layers = called_once(found)
        pairs = some_pairs([found.layers[at] for at in layers])
        expected = by_definition(model, x, pairs, layers)
        with left_as_found(model), cut(model, pairs, layers=layers):
            got = logits(model, x)
        with left_as_found(model), cut(model, []):
            unchanged = logits(model, x)
        whole = outputs(found.output)[0]
        assert relative_error(got, expected) <= LIMIT
        assert torch.equal(unchanged, whole)
        assert relative_error(got, whole) > 1e4 * LIMIT


@pytest.mark.parametrize("name", ["mamba", "s4d", "gpt2", "vit"])
def test_without_edges_the_output_is_the_models_bit_for_bit_in_one_thread(name: str) -> None:
    model, x = host(name).model(), host(name).inputs()
    if name in ("gpt2", "vit"):
        model.set_attn_implementation("eager")
    # With several threads MKL may choose fewer of them for a later call, which changes the order of its sums.
    rounding = 0.0 if torch.get_num_threads() == 1 else 1e-6
    plain = logits(model, x)
    with cut(model, []):
        assert relative_error(logits(model, x), plain) <= rounding
    assert relative_error(logits(model, x), plain) <= rounding


def zeroed(pairs: Sequence[tuple[int, int]], heads: Sequence[int] | None, eager: Callable[..., Any]) -> Any:
    """Return an eager attention function whose weights are set to zero at pairs, after the softmax."""

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        _, weights = eager(module, query, key, value, mask, **options)
        weights = weights.clone()
        for i, j in pairs:
            for head in range(weights.shape[1]) if heads is None else heads:
                weights[:, head, i, j] = 0
        groups = weights.shape[1] // value.shape[1]
        return (weights @ value.repeat_interleave(groups, dim=1)).transpose(1, 2).contiguous(), weights

    return attend


@pytest.mark.parametrize("heads", [None, [1, 3]])
@pytest.mark.parametrize(("name", "file"), [("gpt2", "gpt2"), ("llama, grouped queries", "llama")])
def test_cut_attention_is_attention_with_its_weights_set_to_zero(
    name: str, file: str, heads: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import import_module

    pairs = [(-1, 0), (7, 3), (7, 7), (12, 5)]
    model, x = built(name)
    model.set_attn_implementation("eager")
    if name == "gpt2":
        # The share of a bias of the values belongs to the bias of the layer, and no edge.
        for block in model.transformer.h:
            block.attn.c_attn.bias.data[2 * model.config.n_embd :] = 0
    with promoted():
        plain = logits(model, x)
        with cut(model, pairs, heads=heads):
            got = logits(model, x)
        modeling = import_module(f"transformers.models.{file}.modeling_{file}")
        monkeypatch.setattr(modeling, "eager_attention_forward", zeroed(pairs, heads, modeling.eager_attention_forward))
        expected = logits(model, x)
        assert relative_error(got, expected) <= LIMIT
        assert relative_error(expected, plain) > 1e-3


def test_nothing_later_depends_on_a_token_whose_edges_are_cut() -> None:
    # In a gated convolution T_ij depends on the tokens i and j only.
    settings = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=17)
    build = transformers_model(
        "Lfm2ForCausalLM", "Lfm2Config", **settings, intermediate_size=8, layer_types=["conv"], conv_L_cache=4
    )
    torch.manual_seed(0)
    model = randomize(build().eval()).double()
    x = torch.randint(16, (2, 9))
    changed = torch.where(torch.arange(9) == 4, 16, x)
    given, other = ({"input_ids": each, "use_cache": False} for each in (x, changed))
    assert relative_error(logits(model, other)[:, 5:], logits(model, given)[:, 5:]) > 1e-2
    with cut(model, [(i, 4) for i in range(5, 9)]):
        one, two = logits(model, given), logits(model, other)
    assert relative_error(one[:, 5:], two[:, 5:]) <= EXACT
    assert relative_error(one[:, 4:5], two[:, 4:5]) > 1e-2


def test_transposed_edges_are_other_edges() -> None:
    model, x = built("bert")
    with cut(model, [(5, 2), (8, 1)]):
        got = logits(model, x)
    with cut(model, [(2, 5), (1, 8)]):
        assert relative_error(logits(model, x), got) > 1e-3
    causal, x = built("mamba")
    with cut(causal, [(2, 5)]), pytest.raises(InputError, match=r"edge \(2, 5\): .* is causal"):
        causal(x)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_causal_layer_stays_causal_with_padding(side: str) -> None:
    """A row of padding may hold any weights: eager attention makes them equal, those of later keys too."""
    mask = torch.ones_like(host("bert").inputs())
    mask[1, slice(0, 3) if side == "left" else slice(-3, None)] = 0
    given = {"input_ids": host("bert").inputs(), "attention_mask": mask}
    for name, causal in (("llama, grouped queries", True), ("mamba", True), ("bert", False)):
        model = host(name).model()
        assert [is_causal(layer.operator) for layer in trace(model, given).layers] == [causal, causal]
        with cut(model, [(4, 6)]), pytest.raises(InputError, match="is causal") if causal else nullcontext():
            model(**given)


@pytest.mark.parametrize("name", ["mamba2", "llama, grouped queries", "bert"])
def test_a_mean_of_the_real_tokens_in_place_of_a_key(name: str) -> None:
    model, x = built(name)
    mask = torch.ones_like(x)
    mask[1, -3:] = 0
    given = {"input_ids": x, "attention_mask": mask}
    pairs = [(8, 2), (6, 5), (9, 9)]

    def mean(layer: Layer, index: int) -> dict[str, Tensor]:
        rows = [own[: int(m.sum())].mean(0) for own, m in zip(layer.operator.inputs["x"], mask, strict=True)]
        return {"x": torch.stack(rows)[:, None]}

    with promoted():
        expected = by_definition(model, given, pairs, [0, 1], mean)
        with cut(model, pairs, replace="mean"):
            got = logits(model, given)
        with cut(model, pairs):
            zero = logits(model, given)
        real = mask.bool()
        assert relative_error(got[real][None], expected[real][None]) <= LIMIT
        assert relative_error(zero[real][None], expected[real][None]) > 1e-4


@pytest.mark.parametrize("name", ["mamba", "llama, grouped queries"])
def test_the_tokens_of_another_run_in_place_of_keys(name: str) -> None:
    model, x = built(name)
    other, pairs = host(name).inputs(seed=1), [(8, 2), (-1, 5)]
    with promoted():
        found = trace(model, other)
        expected = by_definition(model, x, pairs, [0, 1], lambda layer, index: found.layers[index].operator.inputs)
        for given in (other, found):
            with cut(model, pairs, replace=given):
                assert relative_error(logits(model, x), expected) <= LIMIT
        plain = logits(model, x)
        assert relative_error(expected, plain) > 1e-4
        with cut(model, pairs, replace=x):
            assert relative_error(logits(model, x), plain) <= LIMIT
        with cut(model, pairs, replace=other[:, :-1]), pytest.raises(InputError, match=r"replace: the other inputs"):
            model(x)
        # Blocks may be nested: the other run is one without cuts.
        with cut(model, [(3, 3)]), cut(model, pairs, replace=other):
            both = logits(model, x)
        with cut(model, pairs, replace=found), cut(model, [(3, 3)]):
            assert torch.equal(logits(model, x), both)


@pytest.mark.long
def test_layers_by_index_and_by_name() -> None:
    model, x = built("jamba")
    names, edges = [layer.name for layer in trace(model, x).layers], [(8, 2)]
    runs = {}
    for layers in (None, 1, -3, names[1], [1, names[1]], [0, 1], [names[0], -3]):
        with cut(model, edges, layers=layers):
            runs[str(layers)] = logits(model, x)
    one, two = runs["1"], runs["[0, 1]"]
    assert all(torch.equal(runs[str(same)], one) for same in (-3, names[1], [1, names[1]]))
    assert torch.equal(runs[str([names[0], -3])], two)
    distinct = [one, two, runs["None"], logits(model, x)]
    assert all(not torch.equal(a, b) for at, a in enumerate(distinct) for b in distinct[:at])


def test_one_call_of_a_shared_module() -> None:
    block = Block(added)
    model, x = Model(block, block).double().eval(), ids()
    runs = []
    for layers in (0, "blocks.0.mixer", 1, "blocks.0.mixer#2"):
        with cut(model, [(5, 2)], layers=layers):
            runs.append(logits(model, x))
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[2], runs[3])
    assert relative_error(runs[0], runs[2]) > 1e-6


def test_edges_of_each_sequence() -> None:
    model, x = built("mamba2")
    edges = torch.tensor([[[8, 2], [9, 1]], [[5, 3], [-1, 0]]])
    with cut(model, edges):
        got = logits(model, x)
    for b in range(2):
        with cut(model, edges[b]):
            assert relative_error(logits(model, x[b : b + 1]), got[b : b + 1]) <= EXACT


@pytest.mark.parametrize("name", ["mamba", "mamba2", "llama, grouped queries"])
def test_padding_on_the_right_changes_nothing(name: str) -> None:
    model, x = built(name)
    mask = torch.ones_like(x)
    mask[1, 8:] = 0
    with promoted(), cut(model, [(7, 2), (5, 4)], replace="mean"):
        padded = logits(model, {"input_ids": x, "attention_mask": mask})[1:, :8]
        assert relative_error(padded, logits(model, x[1:, :8])) <= LIMIT


def test_channels_of_each_layer_by_a_function_of_its_operator() -> None:
    model, x = built("mamba2")
    seen: list[str] = []

    def long_memory(op: Any) -> list[int]:
        seen.append(op.name)
        row = op.rows(-1, heads=None)[0].abs()
        distance = row @ torch.arange(row.shape[-1]).flip(0).to(row) / row.sum(-1)
        return distance.topk(2).indices.tolist()

    with cut(model, [(8, 2)], heads=long_memory):
        got = logits(model, x)
    assert seen == [layer.name for layer in trace(model, x).layers]
    with cut(model, [(8, 2)]):
        assert relative_error(logits(model, x), got) > 1e-4


def test_a_model_that_is_itself_a_layer() -> None:
    model, x = S4D(WIDTH, 4).double().eval(), torch.randn(2, 7, WIDTH, dtype=torch.float64)
    op = trace(model, x).layers[0].operator
    expected = op.output.clone()
    expected[:, 5] -= op.contributions(5)[:, 1]
    with left_as_found(model), cut(model, [(5, 1)]):
        assert relative_error(model(x), expected) <= EXACT


def test_heads_add_up_in_a_layer() -> None:
    model, x = Model(Block(added)).double().eval(), ids()
    plain = logits(model, x)
    with cut(model, [(5, 1)]):
        whole = logits(model, x) - plain
    parts = []
    for head in range(WIDTH):
        with cut(model, [(5, 1)], heads=head):
            parts.append(logits(model, x) - plain)
    assert relative_error(torch.stack(parts).sum(0), whole) <= 1e-10
