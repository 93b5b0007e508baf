"""Models inside the wrappers of nnsight and TransformerLens.

The tests with the real packages are skipped where these are absent; the others replace the classes by stand-ins.
"""

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import unilinattn as ula
from unilinattn.errors import InputError, ModelStateError, UnknownArchitectureError
from unilinattn.host.wrappers import unwrapped
from unilinattn.testing import left_as_found
from unilinattn.testing.hosts import transformers_model

IDS = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(0))

COMMON = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2}
MODELS = {
    "mamba": transformers_model("MambaForCausalLM", "MambaConfig", state_size=4, **COMMON),
    "mamba2": transformers_model(
        "Mamba2ForCausalLM", "Mamba2Config", num_heads=4, head_dim=8, n_groups=1, state_size=4, chunk_size=4, **COMMON
    ),
    "llama": transformers_model(
        "LlamaForCausalLM", "LlamaConfig", num_attention_heads=2, num_key_value_heads=1, intermediate_size=24, **COMMON
    ),
}


def built(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def shares(model: Any) -> torch.Tensor:
    return ula.explain(model, IDS, target=-1, logit=3).scores


class StandIn:
    """Stand-in for nnsight's Envoy, which is no module."""

    def __init__(self, module: nn.Module, edits: tuple[str, ...] = ()) -> None:
        self._module, self._edits = module, edits


class BridgeStandIn(nn.Module):
    """Stand-in for TransformerLens's bridge, which is a module and does not register the model that it runs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["original_model"] = module


def test_the_module_inside_nnsight(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("mamba")
    with pytest.raises(InputError, match="model is a StandIn"):
        unwrapped(StandIn(model))
    monkeypatch.setitem(sys.modules, "nnsight", SimpleNamespace(Envoy=StandIn))
    assert unwrapped(StandIn(model)) is model
    assert unwrapped(StandIn(nn.DataParallel(model))) is model


def test_edits_of_nnsight_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nnsight", SimpleNamespace(Envoy=StandIn))
    with pytest.raises(ModelStateError, match=r"edits of nnsight.*clear_edits"):
        unwrapped(StandIn(built("mamba"), ("an edit",)))


def test_the_model_of_a_bridge_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("mamba")
    monkeypatch.setitem(sys.modules, "transformer_lens.model_bridge", SimpleNamespace(TransformerBridge=BridgeStandIn))
    assert torch.equal(shares(BridgeStandIn(model)), shares(model))


@pytest.fixture
def nnsight(request: pytest.FixtureRequest) -> Any:
    if request.config.getoption("--thorough"):
        pytest.skip("checked signatures take modules only, and nnsight's wrapper is none")
    return pytest.importorskip("nnsight", reason="needs nnsight")


@pytest.mark.parametrize("name", MODELS)
def test_nnsight(name: str, nnsight: Any) -> None:
    model = built(name)
    wrapped = nnsight.NNsight(copy.deepcopy(model))
    with left_as_found(wrapped._module):
        assert torch.equal(shares(wrapped), shares(model))
    with wrapped.trace(IDS):
        logits = wrapped.output.logits.save()
    with torch.no_grad():
        assert torch.equal(logits, model(IDS).logits)
    # An edge is cut in nnsight's runs too.
    with ula.cut(wrapped, [(-1, 3)]), torch.no_grad(), wrapped.trace(IDS):
        cut = wrapped.output.logits.save()
    with ula.cut(model, [(-1, 3)]), torch.no_grad():
        assert torch.equal(cut, model(IDS).logits)
    assert not torch.equal(cut, logits)


def test_an_edit_of_nnsight(nnsight: Any) -> None:
    wrapped = nnsight.NNsight(built("mamba"))
    with wrapped.edit(inplace=True):
        wrapped.backbone.layers[0].output[:] = 0
    with pytest.raises(ModelStateError, match="edits of nnsight"):
        ula.trace(wrapped, IDS)
    wrapped.clear_edits()
    assert torch.equal(shares(wrapped), shares(built("mamba")))


def bridge_of(model: Any, folder: Path) -> Any:
    lens = pytest.importorskip("transformer_lens.model_bridge", reason="needs TransformerLens")
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0")
    special = {"unk_token": "w0", "bos_token": "w1", "eos_token": "w2", "pad_token": "w3"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), name_or_path=str(folder), **special
    )
    model.config.architectures = [type(model).__name__]
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    boot = lens.TransformerBridge.boot_transformers
    return boot(str(folder), device="cpu", hf_model=copy.deepcopy(model), tokenizer=tokenizer)


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_a_bridge(name: str, tmp_path: Path) -> None:
    model = built(name)
    bridge = bridge_of(model, tmp_path)
    assert torch.equal(shares(bridge), shares(model))
    # A hook of the user is part of the run and of the explanation.
    bridge.add_hook("blocks.0.hook_out", lambda value, hook: value * 0.5)
    hooked = ula.explain(bridge, IDS, target=-1, logit=3)
    with torch.no_grad():
        torch.testing.assert_close(hooked.extras["logit"].float(), bridge(IDS)[:, -1, 3])
    assert hooked.completeness_gap is not None and hooked.completeness_gap < 1e-4
    assert not torch.allclose(hooked.scores, shares(model))


def test_a_bridge_with_its_own_attention_is_refused(tmp_path: Path) -> None:
    model = built("llama")
    bridge = bridge_of(model, tmp_path)
    with pytest.raises(UnknownArchitectureError, match=r"TransformerLens computes .*before it is bridged.*deepcopy"):
        ula.trace(bridge, IDS)
    assert len(ula.trace(model, IDS).layers) == 2
