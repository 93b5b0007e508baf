"""Errors about token mixers without an adapter: the module to name, the reason, and the nearest registered classes."""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from unilinattn.call import package_version
from unilinattn.discovery.completeness import Leak
from unilinattn.discovery.mixing import mixes_tokens
from unilinattn.host.observer import Functions, Inputs, Observer
from unilinattn.host.run import run
from unilinattn.registry import list_architectures, visible_functions

NAMED = 5
"""Largest number of modules that an error names in a list."""

NEAREST = 3
"""Largest number of registered classes that an error names."""

RECURRENT = (nn.RNNBase, nn.RNNCellBase)
"""Recurrences whose state passes a nonlinearity."""

Refused = tuple[str, nn.Module]
"""The path of a module, and the module."""


ADAPTER = (
    "`unilinattn list` shows all. To add one, decorate a function that builds a `Flow` with "
    "`unilinattn.register_architecture('package.module.Class', name=..., kind=...)`; docs/adding_an_architecture.md "
    "shows how."
)
"""The way to an adapter."""


def without_layers(model: nn.Module, arguments: Mapping[str, Any]) -> str:
    """Return the error of a model without layers; it runs once more, to name the modules that probably mix."""
    ran = f"{type(model).__name__} ran no module that is a registered token mixer"
    probable = probable_mixers(model, arguments)
    if not probable:
        return f"{ran}, and no function by which tokens usually mix. {ADAPTER}"
    adapter = "" if is_recurrent(probable[0][1]) else f" {ADAPTER}"
    return f"{ran}. Its tokens probably mix in {_listed(probable)}; {_reason(probable[0][1])}.{adapter}"


def without_adapters(
    model: nn.Module, mixers: Sequence[Refused], leak: Leak | None, *, outside: bool, may_be_left_out: bool
) -> str:
    """Return the error of a model with mixers that have no adapter.

    `outside` says that the first one mixes outside of the registered layers in it, and `leak` between which layers.
    """
    path, module = mixers[0]
    cls = type(module)
    what = f"{path or 'the model'} is a {cls.__module__}.{cls.__qualname__}, which moves information between tokens"
    if leak is not None:
        if leak.function is not None:
            what = what.replace("moves information between tokens", f"attends to tokens ({leak.function})")
        what += f" outside of the registered layers, between {leak.after or 'the inputs'} and "
        what += leak.before or "the output"
    elif outside:
        what += " outside of the registered layers in it"
    elif cls.__module__.startswith("transformers.") and "Attention" in cls.__name__:
        # Softmax attention is recognised by this interface, which some classes use only in later versions.
        what += f" and does not go through the attention interface in {package_version(module)}"
    others = f" So do {_listed(mixers[1:])}." if mixers[1:] else ""
    if any(type(inner).__module__.startswith("transformer_lens.") for inner in model.modules()):
        return (
            f"{what}.{others} TransformerLens computes the token mixing of such modules in its own code, for which no "
            "adapter is registered. Trace the Hugging Face model before it is bridged: boot_transformers changes the "
            "model that it is given, so give it a copy (hf_model=copy.deepcopy(model))."
        )
    adapter = "" if is_recurrent(module) else f" {ADAPTER}"
    if may_be_left_out:
        otherwise = (
            "Or trace with strict=False, which leaves it out, for methods that need no operator, such as 'occlusion' "
            "and 'input_x_gradient'."
        )
    elif leak is not None:
        otherwise = "strict=False cannot leave it out, because its tokens are not those of one registered layer."
    else:
        otherwise = "strict=False cannot leave it out, because registered layers run inside it."
    return f"{what}; {_reason(module)}.{others}{adapter} {otherwise}"


def _listed(modules: Sequence[Refused]) -> str:
    more = f" and {len(modules) - NAMED} more" if len(modules) > NAMED else ""
    named = (f"{path or 'the model'} ({type(module).__name__})" for path, module in modules[:NAMED])
    return f"{', '.join(named)}{more}"


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module is or contains a recurrence whose state passes a nonlinearity."""
    return any(isinstance(inner, RECURRENT) for inner in module.modules())


def _reason(module: nn.Module) -> str:
    """Return the reason for which a mixer has no operator, with the nearest registered classes if it may get one."""
    if is_recurrent(module):
        return "its state passes a nonlinearity at every step, so it is no linear map of its tokens: no operator exists"
    hosts = {host.rpartition(".")[2]: host for entry in list_architectures().values() for host in entry.hosts}
    close = get_close_matches(type(module).__qualname__, sorted(hosts), n=NEAREST, cutoff=0.6)
    like = f" (the nearest that have one: {', '.join(hosts[name] for name in close)})" if close else ""
    return f"no adapter is registered for it{like}"


def holders(model: nn.Module, mixers: Sequence[Refused]) -> list[Refused]:
    """Return the mixers with modules that only rearrange axes replaced by the modules that call them."""
    return list(dict(holder(model, *mixer, rearranges) for mixer in mixers).items())


def probable_mixers(model: nn.Module, arguments: Mapping[str, Any]) -> list[Refused]:
    """Return the first module of each class that calls a function by which tokens usually mix: one run of the model.

    The functions are those of `mixes_tokens`.
    """
    mixing: dict[str, None] = {}

    class Paths(Observer[str]):
        def frame(self, path: str, module: nn.Module, inputs: Inputs) -> str:
            return path

    paths = Paths(model)

    def watch(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        with torch._C.DisableTorchFunction():
            if mixes_tokens(func, args, kwargs):
                mixing[paths.stack[-1] if paths.stack else ""] = None
        return result

    with visible_functions(model):
        run(model, arguments, mixers=paths.attached(), observer=Functions(watch))
    modules = dict(holder(model, path, model.get_submodule(path), is_basic) for path in mixing)
    first = {type(module): (path, module) for path, module in reversed(modules.items())}
    return list(first.values())[::-1]


def holder(model: nn.Module, path: str, module: nn.Module, is_part: Callable[[nn.Module], bool]) -> Refused:
    """Return the nearest module around a path that is no part of another computation."""
    while path and is_part(module):
        path = path.rpartition(".")[0]
        module = model.get_submodule(path)
    return path, module


def rearranges(module: nn.Module) -> bool:
    """Whether a module only gives its input another shape, or contains others."""
    return isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)) or only_moves(module)


def only_moves(module: nn.Module) -> bool:
    """Whether a module only gives its input another shape."""
    return isinstance(module, (nn.Flatten, nn.Unflatten)) or type(module).__module__.startswith("einops.")


def is_basic(module: nn.Module) -> bool:
    """Whether a module is one of torch's own functions, which the module around it uses for its computation."""
    is_whole = isinstance(module, (*RECURRENT, nn.MultiheadAttention))
    # A convolution of every channel by a package's kernel belongs to the module around it, as torch's does.
    is_own = type(module).__module__.startswith("torch.nn.") or isinstance(module, nn.modules.conv._ConvNd)
    return not is_whole and (is_own or rearranges(module))
