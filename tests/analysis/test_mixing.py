"""The kinds of mixing of HMA ACL Theorem 1, measured on real hosts."""

import pytest
import torch
import transformers
from torch import nn

from tests.analysis.plain import image
from tests.methods.hosts import IDS, inputs
from unilinattn import analysis, trace
from unilinattn.analysis.mixing import CONTROLLED, FIXED, GATED
from unilinattn.errors import InputError
from unilinattn.testing import HOSTS
from unilinattn.testing.hosts.delta import HOSTS as DELTA_HOSTS
from unilinattn.testing.hosts.reference import HOSTS as REFERENCE_HOSTS

MODELS = {host.name: host for host in (*HOSTS, *DELTA_HOSTS, *REFERENCE_HOSTS)}

KINDS = {
    FIXED: ("s4d", "s4", "dss, softmax", "s5"),
    GATED: ("gss", "h3", "hyena", "hyena, order 3", "multi-head hyena, a head a channel"),
    CONTROLLED: ("mamba", "mamba2", "gpt2", "vim", "multi-head hyena", "qwen3 next"),
}


def two(name: str) -> torch.Tensor:
    first, second = MODELS[name].inputs(1), MODELS[name].inputs(2)
    return torch.stack([first[0], second[0]])


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in KINDS.items() for name in names])
def test_real_hosts_have_the_kinds_of_the_theorem(kind: str, name: str) -> None:
    model = MODELS[name].model()
    measured = analysis.taxonomy(trace(model, two(name)))
    assert {layer.kind for layer in measured.layers} == {kind}
    assert kind in repr(measured)
    assert all(layer.mixing == 0 for layer in measured.layers) == (kind != CONTROLLED)


@pytest.mark.parametrize("name", ["s4d", "dss, softmax", "h3", "hyena", "mamba", "mamba2", "gpt2"])
def test_the_change_is_that_of_whole_matrices_of_separate_runs(name: str) -> None:
    model = MODELS[name].model()
    both = two(name)
    singles = [trace(model, both[at : at + 1]) for at in range(2)]
    for row, *layers in zip(analysis.taxonomy(trace(model, both)).layers, *(x.layers for x in singles), strict=True):
        first, second = (layer.operator.matrix(heads=None) for layer in layers)
        assert torch.equal(first, second) == (row.kind != CONTROLLED)


def test_the_gating_is_the_change_of_the_hosts_gate() -> None:
    model = MODELS["gss"].model()
    module = model.layers[0].mixer
    both, gates = two("gss"), []
    with torch.no_grad():
        hook = module.to_u.register_forward_hook(lambda _, __, output: gates.append(output))
        traced = trace(model, both)
        hook.remove()
    first, second = gates[-1].double()
    change = float((second - first).norm() / first.norm())
    assert abs(analysis.taxonomy(traced).layers[0].gating - change) < 1e-5 * change


def constant_mamba(*, gate: bool) -> nn.Module:
    """Mamba whose convolution ignores the tokens, so that its step sizes, keys and queries are constants."""
    torch.manual_seed(0)
    config = transformers.MambaConfig(hidden_size=6, state_size=3, num_hidden_layers=1, **IDS)
    model = transformers.MambaForCausalLM(config).eval()
    mixer = model.backbone.layers[0].mixer
    with torch.no_grad():
        mixer.conv1d.weight.zero_()
        mixer.conv1d.bias.fill_(1.0)
        if not gate:
            mixer.in_proj.weight[mixer.intermediate_size :] = 0
    return model


@pytest.mark.parametrize(("gate", "kind"), [(True, GATED), (False, FIXED)])
def test_the_kind_is_measured_and_not_that_of_the_class(gate: bool, kind: str) -> None:
    model = constant_mamba(gate=gate)
    assert [layer.kind for layer in analysis.taxonomy(trace(model, inputs())).layers] == [kind]


def test_undefined_comparisons_are_errors() -> None:
    model = MODELS["mamba"].model()
    ids = two("mamba")
    with pytest.raises(InputError, match="holds 1 sequence; trace a batch of two"):
        analysis.taxonomy(trace(model, ids[:1]))
    with pytest.raises(InputError, match=r"same input at backbone.layers.0.mixer"):
        analysis.taxonomy(trace(model, ids[:1].expand(2, -1)))
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    with pytest.raises(InputError, match="padding"):
        analysis.taxonomy(trace(model, {"input_ids": ids, "attention_mask": mask}))


def test_the_picture(tmp_path) -> None:
    measured = analysis.taxonomy(trace(MODELS["h3"].model(), two("h3")))
    measured.plot(tmp_path / "kinds.png")
    assert image(tmp_path / "kinds.png")
