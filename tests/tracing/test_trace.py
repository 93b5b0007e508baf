"""Layers, positions and gradients of a trace."""

import copy
import inspect
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import unilinattn as ula
from tests.hosts import named
from tests.tracing.models import Block, Model, added, ids
from tools.coverage_runs import models
from unilinattn import trace
from unilinattn.errors import InputError, UncoveredError
from unilinattn.testing import HOSTS, relative_error, tolerance
from unilinattn.testing.hosts import host, recurrent


def test_layers_are_in_order_with_their_names() -> None:
    host_trace = trace(host("mamba2").model(), host("mamba2").inputs())
    assert [layer.name for layer in host_trace.layers] == [f"backbone.layers.{k}.mixer" for k in range(2)]
    assert {(layer.kind, layer.architecture) for layer in host_trace.layers} == {("Mamba-2 (SSD)", "mamba2")}
    assert host_trace.model == "Mamba2ForCausalLM"
    assert "backbone.layers.1.mixer, Mamba-2 (SSD), (2, 13, 16) -> (2, 13, 16)" in repr(host_trace)
    assert {"unilinattn", "torch", "transformers"} <= host_trace.versions.keys()


def test_input_and_output_are_those_of_the_module() -> None:
    model, x, calls = host("mamba").model(), host("mamba").inputs(), []
    mixer = model.backbone.layers[1].mixer
    handle = mixer.register_forward_hook(lambda module, args, output: calls.append((args[0], output)))
    layer = trace(model, x).layers[1]
    handle.remove()
    (inputs, returned) = calls[0]
    assert torch.equal(layer.input, inputs)
    assert torch.equal(layer.output, returned)
    assert not layer.input.requires_grad


def test_a_shared_module_is_two_layers() -> None:
    shared = Block(added)
    host_trace = trace(Model(shared, shared), ids())
    assert [layer.name for layer in host_trace.layers] == ["blocks.0.mixer", "blocks.0.mixer#2"]
    assert not torch.equal(host_trace.layers[0].input, host_trace.layers[1].input)
    assert max(layer.operator.reconstruction_error() for layer in host_trace.layers) <= 1e-5


def test_the_residual_stream_is_the_other_summand_of_the_output() -> None:
    model, x = host("s4d").model(), host("s4d").inputs()
    host_trace = trace(model, x)
    assert torch.equal(host_trace.layers[0].residual, model.embeddings(x))
    assert relative_error(host_trace.layers[1].residual, model.embeddings(x) + host_trace.layers[0].output) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("asked", [None, torch.float32, torch.float64], ids=str)
def test_operators_compute_in_float32_at_least(dtype: torch.dtype, asked: torch.dtype | None) -> None:
    model = host("s4d").model().to(dtype)
    layer = trace(model, host("s4d").inputs(), dtype=asked).layers[0]
    expected = torch.float64 if torch.float64 in (dtype, asked) and asked is not torch.float32 else torch.float32
    assert layer.output.dtype == layer.operator.bias.dtype == expected
    assert layer.operator.reconstruction_error() <= (2e-2 if dtype.itemsize == 2 else 1e-5)


@pytest.mark.parametrize("inputs", [{"input_ids": None}, {"input_ids": None, "attention_mask": 1}], ids=str)
def test_inputs_may_be_a_mapping(inputs: dict[str, Tensor | None]) -> None:
    model, x = host("mamba").model(), host("mamba").inputs()
    arguments = {name: x if value is None else torch.ones_like(x) for name, value in inputs.items()}
    assert torch.equal(trace(model, arguments).layers[1].output, trace(model, x).layers[1].output)
    assert arguments.keys() == inputs.keys()


def test_positions_count_real_tokens() -> None:
    model, x = host("mamba2").model(), host("mamba2").inputs()
    mask = torch.ones_like(x)
    mask[1, :4] = 0
    host_trace = trace(model, {"input_ids": x, "attention_mask": mask})
    assert host_trace.positions(0).tolist() == [0, 4]
    assert host_trace.positions([3, -9]).tolist() == [3, 4]
    assert host_trace.positions(torch.tensor([0, 8])).tolist() == [0, 12]
    for target, number in ((9, "9"), ([0, -10], "-10")):
        with pytest.raises(InputError, match=f"target {number} is out of range: sequence 1 has 9 real positions"):
            host_trace.positions(target)
    with pytest.raises(InputError, match="target names 3 positions for 2 sequences"):
        host_trace.positions([0, 1, 2])


@pytest.mark.parametrize("side", ["left", "right"])
def test_negative_targets_count_from_the_last_real_token_of_each_sequence(side: str) -> None:
    model, x = host("mamba").model(), host("mamba").inputs()
    mask = torch.ones_like(x)
    mask[1, slice(0, 4) if side == "left" else slice(9, None)] = 0
    host_trace = trace(model, {"input_ids": x, "attention_mask": mask})
    first = 4 if side == "left" else 0
    assert host_trace.positions(-1).tolist() == [12, first + 8]
    assert host_trace.positions([-2, -9]).tolist() == [11, first]
    assert host_trace.positions([-13, 8]).tolist() == [0, first + 8]
    with pytest.raises(InputError, match="target -10 is out of range: sequence 1 has 9 real positions"):
        host_trace.positions(-10)
    # The target selects the row of that token, and its logit for the gradient.
    whole, row = ula.explain(host_trace, method="rollout"), ula.explain(host_trace, method="rollout", target=-1)
    assert torch.allclose(row.scores, whole.scores[[0, 1], [12, first + 8]], rtol=1e-5, atol=1e-6)
    named = host_trace.gradient([12, 8], 3)
    for actual, expected in zip(host_trace.gradient(-1, 3), named, strict=True):
        assert torch.equal(actual, expected)


def by_hooks(model: nn.Module, inputs: dict[str, Tensor], names: list[str], scalar: Callable) -> list[Tensor]:
    """d scalar / d mixer output by autograd through the host, with retained gradients of module outputs."""
    modules, outputs, handles = dict(model.named_modules()), {}, []
    for name in names:

        def keep(module: nn.Module, args: tuple, output: object, name: str = name) -> None:
            outputs[name] = output[0] if isinstance(output, tuple) else output
            outputs[name].retain_grad()

        handles.append(modules[name].register_forward_hook(keep))
    with torch.enable_grad():
        scalar(model(**inputs)).sum().backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return [outputs[name].grad for name in names]


WITH_LOGITS = [
    entry.name
    for entry in HOSTS
    if entry.name in {"mamba", "mamba, biases", "mamba2", "mamba2, limited steps", "s4d", "gpt2", "bert", "vit"}
    or "sliding" in entry.name
    or "grouped" in entry.name
]


REFERENCES = ("vim, no conv bias, wide kernel", "s4", "dss, softmax", "s5", "gss", "h3, three heads")
RECURRENT = tuple(entry.name for entry in models(recurrent.HOSTS))


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen parameters"])
@pytest.mark.parametrize(
    ("name", "limit"),
    [
        *((name, tolerance("unpromoted", torch.float64)) for name in (*WITH_LOGITS, *RECURRENT)),
        *((name, tolerance("law", torch.float64)) for name in REFERENCES),
    ],
)
def test_gradients_are_those_of_the_host(name: str, limit: float, frozen: bool) -> None:
    model, x = named(name).model().double(), named(name).inputs()
    x = x.double() if x.is_floating_point() else x
    parameters = inspect.signature(model.forward).parameters
    inputs = {next(iter(parameters)): x}
    if "use_cache" in parameters:
        inputs["use_cache"] = False
    host_trace = trace(model, x)
    names = [layer.name for layer in host_trace.layers]

    def at(position: int, token: int) -> Callable:
        def scalar(output: object) -> Tensor:
            logits = output.logits
            return logits[:, token] if logits.ndim == 2 else logits[:, position, token]

        return scalar

    # RWKV changes its weights when it runs, so it runs last.
    model.requires_grad_(not frozen)
    gradients = host_trace.gradient(target=-1, logit=1)
    assert all(parameter.grad is None for parameter in model.parameters())
    expected = by_hooks(model.requires_grad_(True), inputs, names, at(-1, 1))
    for actual, gradient in zip(gradients, expected, strict=True):
        assert relative_error(actual, gradient) <= limit


def test_gradients_of_other_targets() -> None:
    model, x = host("mamba").model().double(), host("mamba").inputs()
    mask = torch.ones_like(x)
    mask[1, 9:] = 0
    inputs = {"input_ids": x, "attention_mask": mask, "use_cache": False}
    host_trace = trace(model, inputs)
    names = [layer.name for layer in host_trace.layers]
    rows, real_last = torch.arange(2), torch.tensor([12, 8])
    predicted = model(**inputs).logits[rows, real_last].argmax(-1)
    cases: list[tuple[dict, Callable]] = [
        ({}, lambda out: out.logits[rows, real_last, predicted]),
        ({"target": 2, "logit": 4}, lambda out: out.logits[:, 2, 4]),
        ({"target": [5, -2], "logit": (3, 6)}, lambda out: difference(out.logits[rows, torch.tensor([5, 7])], 3, 6)),
        ({"logit": lambda out: out.logits.square().sum()}, lambda out: out.logits.square().sum()),
    ]
    for options, scalar in cases:
        gradients = by_hooks(model, inputs, names, scalar)
        for actual, expected in zip(host_trace.gradient(**options), gradients, strict=True):
            assert relative_error(actual, expected) <= 2e-6
    several = list(host_trace.gradients([2, -1], logit=4))
    for actual, target in zip(several, (2, -1), strict=True):
        for one, two in zip(actual, host_trace.gradient(target, logit=4), strict=True):
            assert relative_error(one, two) <= 2e-6


def difference(logits: Tensor, plus: int, minus: int) -> Tensor:
    return logits[:, plus] - logits[:, minus]


def test_the_gradient_before_the_output_projection_is_that_of_autograd() -> None:
    model, x = host("mamba").model().double(), host("mamba").inputs()
    host_trace, inner = trace(model, x), []
    grads = host_trace.gradient(target=-1, logit=1)

    def keep(module: nn.Module, args: tuple[Tensor]) -> None:
        args[0].retain_grad()
        inner.append(args[0])

    for block in model.backbone.layers:
        block.mixer.out_proj.register_forward_pre_hook(keep)
    model(x, use_cache=False).logits[:, -1, 1].sum().backward()
    for layer, grad, seen in zip(host_trace.layers, grads, inner, strict=True):
        assert relative_error(layer.before_output(grad), seen.grad) <= 2e-6


def test_traces_of_two_models_are_independent() -> None:
    one, two = host("mamba").model(1), host("mamba").model(2)
    x = host("mamba").inputs()
    first, second = trace(one, x), trace(two, x)
    assert not torch.equal(first.layers[0].output, second.layers[0].output)
    assert max(layer.operator.reconstruction_error() for t in (first, second) for layer in t.layers) <= 1e-5


def test_under_inference_mode() -> None:
    model, x = host("mamba").model(), host("mamba").inputs()
    with torch.inference_mode():
        host_trace = trace(model, x)
        errors = [layer.operator.reconstruction_error() for layer in host_trace.layers]
    assert max(errors) <= 1e-5
    assert all(torch.isfinite(grad).all() for grad in host_trace.gradient())


@pytest.mark.long
@pytest.mark.parametrize("name", ["mamba", "gpt2", "bert"])
def test_a_deep_copy_of_a_trace_does_not_depend_on_the_model(name: str) -> None:
    model, inputs = host(name).model(), host(name).inputs()
    host_trace = trace(model, inputs)
    results = {method: ula.explain(host_trace, method=method, target=-1) for method in ("logit", "attribution", "raw")}
    copied = copy.deepcopy(host_trace)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for method, result in results.items():
        assert torch.equal(ula.explain(copied, method=method, target=-1).scores, result.scores)
    assert copy.copy(host_trace).layers is host_trace.layers


def test_the_pickle_of_a_trace_is_refused() -> None:
    host_trace = trace(host("mamba").model(), host("mamba").inputs())
    for refused in (host_trace, host_trace.layers[0]):
        with pytest.raises(UncoveredError, match="cannot be pickled"):
            pickle.dumps(refused)
