"""Remove wrappers, compiled code, checkpoints and caches between a user's model and its computing modules."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from unilinattn.call.attention_interface import configured
from unilinattn.call.functions import plain_functions
from unilinattn.call.offloaded import offloaded
from unilinattn.errors import InputError, ModelStateError

OPTIMIZED = "_orig_mod"
"""Name of the original module inside a module that `torch.compile` returned."""


def unwrapped(model: Any) -> nn.Module:
    """Return the model inside the wrappers that compute the same.

    These are `torch.compile`, `DataParallel`, `DistributedDataParallel`, nnsight's `NNsight` and `LanguageModel`, and
    TransformerLens's `TransformerBridge`.

    Raises `InputError` for anything but a module, and `ModelStateError` for a module whose calls or weights cannot be
    read: TorchScript, weights that are sharded or were never loaded, and edits that run only in nnsight's own traces.
    """
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif isinstance(model, nn.Module) and OPTIMIZED in model._modules:
            model = getattr(model, OPTIMIZED)
        elif isinstance(model, _imported("nnsight", "Envoy")):
            if getattr(model, "_edits", None):
                raise ModelStateError(
                    "model has edits of nnsight, which run only in nnsight's own traces; call model.clear_edits(), or "
                    "give its module if the model without edits is meant."
                )
            model = model._module
        elif isinstance(model, _imported("transformer_lens.model_bridge", "TransformerBridge")):
            model = model.original_model
        else:
            break
    if not isinstance(model, nn.Module):
        inner = " (its .model is one)" if isinstance(getattr(model, "model", None), nn.Module) else ""
        raise InputError(
            f"model is a {type(model).__name__}; give a torch.nn.Module{inner}, such as "
            "AutoModelForCausalLM.from_pretrained returns."
        )
    _check_readable(model)
    return model


@contextmanager
def plain_run(model: nn.Module) -> Iterator[None]:
    """Disable a model's compiled code, checkpoints and caches in this context; the results are the same.

    Compiled code may skip hooks, functions of TorchScript hide those that they call, a checkpoint runs its function
    again in the backward pass, and a run would fill the caches. All settings are restored at the end.
    """
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(plain_functions(model))
        for module in model.modules():
            if vars(module).get("gradient_checkpointing") is True:
                stack.callback(setattr, module, "gradient_checkpointing", True)
                setattr(module, "gradient_checkpointing", False)  # noqa: B010  a Module's attributes have no type
        # The argument `use_cache` does not reach a model inside a wrapper.
        for config in {id(config): config for _, config in configured(model)}.values():
            if getattr(config, "use_cache", None):
                stack.callback(setattr, config, "use_cache", config.use_cache)
                config.use_cache = False
        yield


def require_gradients(model: nn.Module) -> None:
    """Raise `ModelStateError` for weights made in inference mode, which pass no gradients."""
    made = [name for name, parameter in model.named_parameters() if parameter.is_inference()]
    if made:
        raise ModelStateError(
            f"{len(made)} weights of {type(model).__name__}, {made[0]} among them, were made in torch.inference_mode, "
            "so no gradient passes through them; build or load the model outside of it."
        )


def _imported(package: str, name: str) -> Any:
    """Return a class of a package if the package was imported, else no class: the second argument of `isinstance`."""
    return getattr(sys.modules.get(package), name, ())


def _check_readable(model: nn.Module) -> None:
    title, modules = type(model).__name__, dict(model.named_modules())
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules.values()):
        raise ModelStateError(
            f"{title} holds TorchScript, whose modules run without being called; trace the model that it was made of."
        )
    distributed = sys.modules.get("torch.distributed.tensor")
    sharded = () if distributed is None else (distributed.DTensor,)
    weights = [(path, *weight) for path, module in modules.items() for weight in module._parameters.items()]
    is_sharded = any(isinstance(tensor, sharded) for _, _, tensor in weights)
    if is_sharded or any(type(module).__name__ == "FullyShardedDataParallel" for module in modules.values()):
        raise ModelStateError(
            f"the weights of {title} are sharded over processes (FSDP, tensor parallelism), so none of them holds a "
            "whole layer; gather the full state dict, load it into a model that is not sharded, and trace that."
        )
    # A subclass of Parameter may store its data elsewhere.
    stored = offloaded(model)
    away = [
        f"{path}.{name}".lstrip(".")
        for path, name, tensor in weights
        if type(tensor) is nn.Parameter and tensor.is_meta and id(modules[path]) not in stored
    ]
    if away:
        raise ModelStateError(
            f"{len(away)} weights of {title}, {away[0]} among them, are on the meta device, and no hook of accelerate "
            "loads them: they were never loaded. Load the model's weights, or offload the loaded model by accelerate's "
            "cpu_offload, disk_offload or device_map."
        )
