"""Models whose weights accelerate loads for each call have the operators and scores of the model in memory."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import unilinattn as ula
from tests.hosts import named
from unilinattn.call.offloaded import loaded
from unilinattn.errors import ModelStateError

accelerate = pytest.importorskip("accelerate")

HOSTS = ("mamba", "mamba2", "gpt2", "qwen3 next", "bert", "jamba")
METHODS = ("raw", "rollout", "latim", "alti", "logit", "attn_lrp", "attribution", "knockout")


def offloaded(model: nn.Module, kind: str, folder: Path) -> nn.Module:
    model = copy.deepcopy(model)
    if kind == "cpu":
        return accelerate.cpu_offload(model, torch.device("cpu"))
    return accelerate.disk_offload(model, str(folder), torch.device("cpu"))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["cpu", "disk"])
@pytest.mark.parametrize("name", HOSTS)
def test_an_offloaded_model_has_the_scores_of_the_model_in_memory(name: str, kind: str, tmp_path: Path) -> None:
    plain, ids = named(name).model(), named(name).inputs()
    model = offloaded(plain, kind, tmp_path)
    expected, trace = ula.trace(plain, ids), ula.trace(model, ids)
    assert max(layer.reconstruction_error() for layer in trace.layers) < 1e-5
    for method in METHODS:
        scores, same = (ula.explain(each, method=method, target=-1).scores for each in (trace, expected))
        torch.testing.assert_close(scores, same, rtol=1e-5, atol=1e-6)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_weights_in_files_are_mapped_and_not_read(tmp_path: Path) -> None:
    model = offloaded(named("mamba").model(), "disk", tmp_path)
    layer = ula.trace(model, named("mamba").inputs()).layers[0]
    before = layer.operator.apply(layer.input)
    with loaded(layer.module):
        assert not any(parameter.is_meta for parameter in layer.module.parameters())
    assert all(parameter.is_meta for parameter in layer.module.parameters())
    file = next(tmp_path.glob("backbone.layers.0.mixer.out_proj.weight.dat"))
    file.write_bytes(bytes(file.stat().st_size))
    # The operator has no copy, so that it reads the zeros that the file now holds.
    assert bool(before.any())
    assert not bool(layer.operator.apply(layer.input).any())


def test_changed_weights_in_the_memory_of_the_cpu_are_refused(tmp_path: Path) -> None:
    model = offloaded(named("mamba").model(), "cpu", tmp_path)
    layer = ula.trace(model, named("mamba").inputs()).layers[0]
    layer.operator  # noqa: B018  the property builds it
    with loaded(layer.module), torch.no_grad():
        layer.module.out_proj.weight.mul_(2)
    with pytest.raises(ModelStateError, match="changed since the trace"):
        layer.operator.apply(layer.input)
