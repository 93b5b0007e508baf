"""States of a model and of torch: training, checkpoints, inference mode, autocast."""

import torch
from torch import nn

from tests.setups.harness import EVERY, HOSTS, each, require_same, setup, works
from unilinattn import explain, trace
from unilinattn.errors import ModelStateError, UnknownArchitectureError
from unilinattn.testing.hosts import Host


@setup("inference_mode", "model, trace, operators and `explain` inside `torch.inference_mode()`, against outside")
def inference_mode() -> float:
    def one(host: Host) -> float:
        with torch.inference_mode():
            ids, model = host.inputs(), host.model()
            explain(model, ids, method="latim")
            return works(model, ids, lambda: model(ids), like=(host.model(), ids))

    return each(one)


@setup("inference_mode, used outside", "a trace made inside it, operators and gradients outside")
def inference_mode_left() -> float:
    def one(host: Host) -> float:
        ids, model = host.inputs(), host.model()
        with torch.inference_mode():
            host_trace = trace(model, ids)
        expected = trace(model, ids)
        for actual, reference in zip(host_trace.gradient(), expected.gradient(), strict=True):
            require_same("gradient", actual, reference)
        for actual, reference in zip(host_trace.layers, expected.layers, strict=True):
            require_same(
                "before_output", actual.before_output(actual.output), reference.before_output(reference.output)
            )
        return max(layer.operator.reconstruction_error() for layer in host_trace.layers)

    return each(one)


@setup("inference_mode, gradients inside", "`explain(model, ids, method='attribution')` inside it, against outside")
def gradients_inside() -> float:
    def one(host: Host) -> float:
        ids, model = host.inputs(), host.model()
        expected = explain(model, ids, method="attribution", target=-1)
        with torch.inference_mode():
            result = explain(model, ids, method="attribution", target=-1)
        require_same("scores", result.scores, expected.scores)
        return result.worst_error[1]

    return each(one, ("Mamba", "Mamba-2", "Llama"))


@setup(
    "weights made in inference_mode",
    "`explain(model, ids, method='attribution')` with a model that was built inside it",
    refused=ModelStateError,
)
def inference_weights() -> float:
    host = HOSTS["Mamba"]
    with torch.inference_mode():
        model = host.model()
    explain(model, host.inputs(), method="attribution")
    return 0.0


@setup("gradient checkpointing", "`model.train()` without dropout, `gradient_checkpointing_enable()`, with gradients")
def gradient_checkpointing() -> float:
    def one(host: Host) -> float:
        ids, plain, model = host.inputs(), host.model(), host.model().train()
        model.gradient_checkpointing_enable()
        expected = explain(plain, ids, method="attribution", target=-1)
        require_same("scores", explain(model, ids, method="attribution", target=-1).scores, expected.scores)
        assert model.is_gradient_checkpointing
        return works(model, ids, lambda: model(ids), like=(plain, ids))

    return each(one, ("Mamba", "Mamba-2", "Llama"))


@setup("train mode without dropout", "`model.train()`")
def training() -> float:
    def one(host: Host) -> float:
        ids, model = host.inputs(), host.model().train()
        return works(model, ids, lambda: model(ids), like=(host.model(), ids))

    return each(one)


@setup("train mode with dropout", "`model.train()` with `attention_dropout=0.1`", refused=ModelStateError)
def dropout() -> float:
    host = HOSTS["Llama"]
    model = host.model().train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    trace(model, host.inputs())
    return 0.0


@setup("autocast", "`torch.autocast('cpu', torch.bfloat16)` around the trace")
def autocast() -> float:
    def one(host: Host) -> float:
        ids, model = host.inputs(), host.model()
        with torch.autocast("cpu", torch.bfloat16):
            return works(model, ids, lambda: model(ids))

    return each(one)


@setup("frozen parameters", "`model.requires_grad_(False)`, with gradients")
def frozen() -> float:
    def one(host: Host) -> float:
        ids, plain, model = host.inputs(), host.model(), host.model().requires_grad_(False)
        for actual, expected in zip(trace(model, ids).gradient(), trace(plain, ids).gradient(), strict=True):
            require_same("gradient", actual, expected)
        return works(model, ids, lambda: model(ids), like=(plain, ids))

    return each(one)


@setup("the user's own hooks", "forward hooks on every module: they run, and are not removed")
def own_hooks() -> float:
    def one(host: Host) -> float:
        ids, model, calls = host.inputs(), host.model(), []
        for module in model.modules():
            module.register_forward_hook(lambda module, args, output: calls.append(module))
        trace(model, ids)
        assert len(set(map(id, calls))) > len(EVERY)
        return works(model, ids, lambda: model(ids), like=(host.model(), ids))

    return each(one)


@setup("a config that asks for more", "`config.output_hidden_states = config.use_cache = True`")
def configured() -> float:
    def one(host: Host) -> float:
        ids, model = host.inputs(), host.model()
        model.config.output_hidden_states = model.config.use_cache = True
        error = works(model, ids, lambda: model(ids), like=(host.model(), ids))
        assert model.config.use_cache
        return error

    return each(one, ("Mamba", "Mamba-2", "Llama"))


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids).logits + 2 * self.inner(input_ids).logits


class Reversing(Twice):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids).logits + self.inner(input_ids.flip(1)).logits.flip(1)


@setup(
    "a model run in both directions",
    "a wrapper that adds the reversed logits of the reversed text: it mixes tokens outside of all layers",
    refused=UnknownArchitectureError,
)
def model_run_in_both_directions() -> float:
    host = HOSTS["Mamba"]
    ids, model = host.inputs(), Reversing(host.model())
    return works(model, ids, lambda: model(ids))


@setup("a model called twice", "a wrapper that runs the model twice on the same ids: two streams of tokens")
def model_called_twice() -> float:
    def one(host: Host) -> float:
        ids, model = host.inputs(), Twice(host.model())
        count = len(trace(host.model(), ids).layers)
        calls = trace(model, ids)
        names = [layer.name for layer in calls.layers]
        assert [f"{name}#2" for name in names[:count]] == names[count:]
        assert [stream.layers for stream in calls.streams] == [(*range(count),), (*range(count, 2 * count),)]
        return works(model, ids, lambda: model(ids))

    return each(one)
