"""Weights that another package replaces, merges or quantises, or computes in each call."""

import copy

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from tests.setups.harness import HOSTS, each, setup, works
from unilinattn import explain, trace
from unilinattn.errors import ModelStateError, UncoveredError, UnilinattnError
from unilinattn.testing.hosts import Host

TARGETS = {
    "Mamba": ["in_proj", "x_proj"],
    "Llama": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "Jamba": ["in_proj", "x_proj", "q_proj", "v_proj", "o_proj"],
}


def adapted(host: Host) -> nn.Module:
    """Return a host with LoRA on its projections, with weights that change its output."""
    from peft import LoraConfig, get_peft_model

    name = next(name for name, entry in HOSTS.items() if entry is host)
    config = LoraConfig(r=3, target_modules=TARGETS[name], init_lora_weights=False)
    model = get_peft_model(host.model(), config).eval()
    with torch.no_grad():
        ids = host.inputs()
        assert not torch.allclose(model(ids).logits, host.model()(ids).logits, rtol=0.05)
    return model


@setup("PEFT LoRA", "`get_peft_model(model, LoraConfig(...))`, against the merged model", needs=("peft",))
def lora() -> float:
    def one(host: Host) -> float:
        ids, model = host.inputs(), adapted(host)
        merged = copy.deepcopy(model).merge_and_unload()
        return works(model, ids, lambda: model(ids), like=(merged, ids))

    return each(one, tuple(TARGETS))


@setup("PEFT LoRA, merged in place", "`model.merge_adapter()`, against `merge_and_unload`", needs=("peft",))
def lora_merged_in_place() -> float:
    def one(host: Host) -> float:
        ids, model = host.inputs(), adapted(host)
        plain = copy.deepcopy(model).merge_and_unload()
        model.merge_adapter()
        return works(model, ids, lambda: model(ids), like=(plain, ids))

    return each(one, tuple(TARGETS))


@setup("PEFT LoRA, merged", "`model.merge_and_unload()`", needs=("peft",))
def lora_merged() -> float:
    def one(host: Host) -> float:
        ids, model = host.inputs(), adapted(host).merge_and_unload()
        return works(model, ids, lambda: model(ids))

    return each(one, tuple(TARGETS))


@setup("PEFT LoRA, disabled", "inside `model.disable_adapter()`, against the model without LoRA", needs=("peft",))
def lora_disabled() -> float:
    def one(host: Host) -> float:
        ids, model = host.inputs(), adapted(host)
        with model.disable_adapter():
            return works(model, ids, lambda: model(ids), like=(host.model(), ids))

    return each(one, tuple(TARGETS))


@setup(
    "PEFT prompt tuning",
    "`PromptTuningConfig(num_virtual_tokens=3)`: three more tokens in the layers",
    needs=("peft",),
)
def prompt_tuning() -> float:
    from peft import PromptTuningConfig, get_peft_model

    def one(host: Host) -> float:
        config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        ids, model = host.inputs(), get_peft_model(host.model(), config).eval()
        return works(model, {"input_ids": ids}, lambda: model(input_ids=ids))

    return each(one, ("Llama",))


@setup(
    "PEFT prefix tuning",
    "`PrefixTuningConfig(num_virtual_tokens=3)`: keys and values before the text",
    needs=("peft",),
    refused=UncoveredError,
)
def prefix_tuning() -> float:
    from peft import PrefixTuningConfig, get_peft_model

    host = HOSTS["Llama"]
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ids, model = host.inputs(), get_peft_model(host.model(), config).eval()
    return works(model, {"input_ids": ids}, lambda: model(input_ids=ids))


@setup("weight_norm", "`weight_norm` on every linear layer except the head, against the plain model")
def parametrized() -> float:
    def one(host: Host) -> float:
        ids, model = host.inputs(), host.model()
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and "lm_head" not in name:
                weight_norm(module)
        return works(model, ids, lambda: model(ids), like=(host.model(), ids))

    return each(one, ("Mamba", "Mamba-2", "Llama"))


def projection(module: nn.Module, name: str) -> bool:
    """Whether a module is a linear layer that a host calls; Mamba reads the weights of `dt_proj` and `lm_head`."""
    return type(module) is nn.Linear and not name.endswith(("dt_proj", "lm_head"))


@setup("torchao int8 weights", "`quantize_(model, Int8WeightOnlyConfig())` on projections", needs=("torchao",))
def torchao_weights() -> float:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def one(host: Host) -> float:
        ids, model = host.inputs(), host.model()
        quantize_(model, Int8WeightOnlyConfig(), filter_fn=projection)
        return works(model, ids, lambda: model(ids))

    return each(one, ("Mamba", "Llama"))


@setup(
    "torchao dynamic int8",
    "`quantize_(model, Int8DynamicActivationInt8WeightConfig())` on projections",
    needs=("torchao",),
    refused=UnilinattnError,
)
def torchao_dynamic() -> float:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    def one(host: Host) -> float:
        ids, model = host.inputs(), host.model()
        quantize_(model, Int8DynamicActivationInt8WeightConfig(), filter_fn=projection)
        return works(model, ids, lambda: model(ids))

    return each(one, ("Mamba", "Llama"))


@setup("torch dynamic int8", "`quantize_dynamic(model, projections)`", refused=UnilinattnError)
def torch_dynamic() -> float:
    from torch.ao.quantization import quantize_dynamic

    host = HOSTS["Mamba"]
    names = {name for name, module in host.model().named_modules() if projection(module, name)}
    ids, model = host.inputs(), quantize_dynamic(host.model(), names, dtype=torch.qint8)
    return works(model, ids, lambda: model(ids))


@setup("bitsandbytes 4-bit", "`Linear4bit` in place of the projections of the blocks", needs=("bitsandbytes",))
def four_bit() -> float:
    import bitsandbytes

    def one(host: Host) -> float:
        ids, model = host.inputs(), host.model()
        replace_linear(
            model,
            lambda old: bitsandbytes.nn.Linear4bit(
                old.in_features, old.out_features, bias=old.bias is not None, compute_dtype=torch.float32
            ),
        )
        return works(model.to("cpu"), ids, lambda: model(ids))

    return each(one, ("Mamba", "Llama"))


@setup(
    "bitsandbytes 8-bit",
    "`Linear8bitLt` in place of the projections of the blocks",
    needs=("bitsandbytes",),
    refused=UnilinattnError,
)
def eight_bit() -> float:
    import bitsandbytes

    def one(host: Host) -> float:
        ids, model = host.inputs(), host.model()
        replace_linear(
            model,
            lambda old: bitsandbytes.nn.Linear8bitLt(
                old.in_features, old.out_features, bias=old.bias is not None, has_fp16_weights=False
            ),
        )
        return works(model.to("cpu"), ids, lambda: model(ids))

    return each(one, ("Mamba", "Llama"))


def replace_linear(model: nn.Module, make) -> None:
    """Replace each linear layer of the blocks by another class with the same weights."""
    for module in list((model.backbone if hasattr(model, "backbone") else model.model).layers.modules()):
        for name, child in list(module.named_children()):
            if projection(child, name):
                other = make(child)
                other.load_state_dict(child.state_dict())
                setattr(module, name, other)


@setup(
    "weights written through .data",
    "`mixer.out_proj.weight.data.mul_(2)` between the trace and its operator",
    refused=ModelStateError,
)
def written_through_data() -> float:
    host = HOSTS["Mamba"]
    model = host.model()
    host_trace = trace(model, host.inputs())
    model.backbone.layers[0].mixer.out_proj.weight.data.mul_(2)
    explain(host_trace)
    return 0.0


@setup("bfloat16", "`model.bfloat16()`")
def bfloat16() -> float:
    def one(host: Host) -> float:
        ids, model = host.inputs(), host.model().bfloat16()
        return works(model, ids, lambda: model(ids))

    return each(one)


@setup(
    "a module called twice",
    "one block in two places, without a cache (both calls would share it): the second call is `#2`",
)
def called_twice() -> float:
    def one(host: Host) -> float:
        ids, model = host.inputs(), host.model()
        layers = (model.backbone if hasattr(model, "backbone") else model.model).layers
        layers[1] = layers[0]
        first, second = trace(model, ids).layers[:2]
        assert second.name == f"{first.name}#2"
        return works(model, ids, lambda: model(ids, use_cache=False))

    return each(one, ("Mamba", "Mamba-2", "Llama"))
