"""Gradients hold one block at a time: counted, estimated, and equal to a run that keeps everything."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unilinattn as ula
from tests.memory.hosts import HOSTS
from unilinattn.errors import ModelStateError
from unilinattn.testing import relative_error
from unilinattn.testing.hosts import transformers_model
from unilinattn.testing.peak import Peak, peak_of
from unilinattn.tracing.substitution import through_operators
from unilinattn.tracing.trace import Trace, trace

IDS = dict(vocab_size=31, pad_token_id=None, bos_token_id=None, eos_token_id=None)


def build(name: str, layers: int = 2) -> nn.Module:
    models = {
        "mamba": ("MambaForCausalLM", "MambaConfig", dict(hidden_size=64, num_hidden_layers=layers)),
        "mamba2": (
            "Mamba2ForCausalLM",
            "Mamba2Config",
            dict(hidden_size=64, num_hidden_layers=layers, state_size=32, num_heads=4, head_dim=32, n_groups=1),
        ),
        "gpt2": ("GPT2LMHeadModel", "GPT2Config", dict(n_embd=64, n_layer=layers, n_head=4)),
    }
    model, config, options = models[name]
    torch.manual_seed(0)
    return transformers_model(model, config, **options, **IDS)().eval()


def traced(name: str, length: int, layers: int = 2) -> Trace:
    found = trace(build(name, layers), torch.randint(31, (1, length)), progress=False)
    for layer in found.layers:
        assert layer.operator.chains
    return found


def counted(found: Trace) -> Peak:
    return peak_of(lambda: next(found.gradients([-1])))


@contextmanager
def kept_whole(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run gradients as plain autograd does: every layer's intermediate values are kept."""
    with monkeypatch.context() as patch:
        patch.setattr(import_module("unilinattn.tracing.trace"), "recomputing", through_operators)
        yield


@pytest.mark.parametrize("name", ["mamba", "mamba2", "gpt2"])
def test_a_deeper_model_takes_little_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = traced(name, 96, 2), traced(name, 96, 6)
    grown = counted(many).peak - counted(few).peak
    with kept_whole(monkeypatch):
        whole = counted(many).peak - counted(few).peak
    vectors = 4 * 96 * 64 * 4
    assert grown <= 4 * vectors
    assert whole > 3 * grown


@pytest.mark.parametrize("length", [96, 192])
@pytest.mark.parametrize("name", ["mamba", "mamba2", "gpt2"])
def test_the_estimate_counts_the_backward_pass(name: str, length: int) -> None:
    found = traced(name, length)
    said, own = ula.estimate(found, method="attribution", target=-1), counted(found)
    (first, *_) = said.layers
    assert (first.name, first.kind) == ("gradients", "forward and backward pass")
    assert 0.5 <= first.bytes / own.peak <= 2, (first.bytes, own.peak)
    assert 0.5 <= first.operations / own.multiplications <= 2, (first.operations, own.multiplications)
    assert "gradients" in repr(said)


@pytest.mark.parametrize(
    "name", ["mamba", "mamba2", "gpt2", "zamba", "zamba2", "jamba", "falcon h1", "qwen3 next", "s4d"]
)
def test_gradients_are_those_of_a_run_that_keeps_everything(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = next(entry for entry in HOSTS if entry.name == name)
    model, x = entry.model().double(), entry.inputs()
    found = trace(model, x)
    targets: list[Any] = [-1, 1, -1]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    several = list(found.gradients(targets))
    with kept_whole(monkeypatch):
        whole = list(found.gradients(targets))
    for got, expected in zip(several, whole, strict=True):
        assert max(relative_error(one, two) for one, two in zip(got, expected, strict=True)) <= 1e-12
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())
    assert any(float(grad.norm()) > 0 for grad in several[1])


@pytest.mark.parametrize("name", ["mamba", "gpt2"])
def test_nothing_is_kept_from_target_to_target(name: str) -> None:
    found = traced(name, 40)

    def peak(targets: int) -> int:
        def run() -> None:
            for grads in found.gradients(range(targets)):
                del grads

        return peak_of(run).peak

    assert peak(8) <= 1.1 * peak(1)


def test_frozen_weights_do_not_matter() -> None:
    model = build("mamba").double()
    found = trace(model, torch.randint(31, (1, 20)))
    live = found.gradient(-1)
    model.requires_grad_(False)
    for one, two in zip(trace(model, found.ids).gradient(-1), live, strict=True):
        assert relative_error(one, two) <= 1e-12


def test_a_weight_that_changes_between_targets_is_noticed() -> None:
    model = build("mamba")
    gradients = trace(model, torch.randint(31, (1, 20))).gradients([3, 4])
    next(gradients)
    with torch.no_grad():
        model.backbone.layers[0].mixer.D.mul_(2)
    with pytest.raises(ModelStateError, match="this gradient would not be that of the traced model"):
        next(gradients)


def test_the_pull_through_a_last_projection_builds_no_graph() -> None:
    found = traced("mamba", 64)
    grads = found.gradient(-1)
    layer = found.layers[0]
    pulled: list[Tensor] = []
    peak = peak_of(lambda: pulled.append(layer.before_output(grads[0]))).peak
    # The operand of the product is a copy without subnormal numbers.
    assert peak <= pulled[0].nbytes + grads[0].nbytes
    weight = found.host.backbone.layers[0].mixer.out_proj.weight
    assert relative_error(pulled[0], grads[0] @ weight) <= 1e-6
