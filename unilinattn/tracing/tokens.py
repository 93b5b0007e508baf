"""Find the tensor that enters a model's first block: the vectors of its tokens."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unilinattn.errors import UncoveredError
from unilinattn.tracing.inputs import call_host
from unilinattn.tracing.isolation import isolated
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.wrappers import plain_run


def find_tokens(model: nn.Module, given: Mapping[str, Any], blocks: Collection[str]) -> int | str:
    """Return the number of the function call whose result enters the first block, or the argument that does."""
    calls: list[Any] = []

    class Record(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func(*args, **(kwargs or {})))
            return calls[-1]

    class Entered(Exception):
        pass

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The functions that the host calls are counted, not those of this hook.
        with torch._C.DisableTorchFunction():
            stream = first_stream((*args, *kwargs.values()))
        if stream is not None:
            raise Entered(stream)

    def run() -> Tensor:
        for name, module in model.named_modules():
            if name in blocks:
                module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        try:
            with plain_run(model), Record():
                call_host(model, given)
        except Entered as entered:
            return entered.args[0]
        raise UncoveredError("no block of the model received a (batch, length, channel) tensor.")

    stream = isolated(model, run)
    argument = next((name for name, value in given.items() if value is stream), None)
    if argument is not None:
        return argument
    found = [at for at, result in enumerate(calls) if result is stream]
    if not found:
        raise UncoveredError("no function of torch returned the stream that enters the model's first block.")
    return found[-1]


def require_own_tokens(model: nn.Module, given: Mapping[str, Any], ids: Tensor | None, length: int) -> None:
    """Raise `UncoveredError` if the first layer has another number of tokens than the model's input has ids."""
    if ids is None or ids.shape[1] == length:
        return
    other = [name for name, value in given.items() if isinstance(value, Tensor) and value.is_floating_point()]
    if other:
        raise UncoveredError(
            f"{type(model).__name__} reads {' and '.join(other)} and {ids.shape[1]} ids, and its first layer "
            f"has {length} tokens: two inputs reach its output, and shares are those of the tokens of one."
        )
    raise UncoveredError(
        f"the layers of {type(model).__name__} have {length} tokens, and its input has {ids.shape[1]} ids: the model "
        "adds tokens, such as a tuned prompt, and their part in the output is unknown. Give the model inside of it "
        "inputs_embeds with all tokens."
    )


def block_names(model: nn.Module, layers: Sequence[Layer]) -> frozenset[str]:
    """Return the paths of the layers, of the modules that contain them, and of those modules' siblings in a list."""
    names = set()
    for layer in layers:
        parts = layer.name.split("#")[0].split(".")
        names |= {".".join(parts[:count]) for count in range(len(parts) + 1)}
    lists = {name.rpartition(".")[0] for name in names if name.rpartition(".")[2].isdigit()}
    siblings = {name for name, _ in model.named_modules() if name.rpartition(".")[2].isdigit()}
    return frozenset(names | {name for name in siblings if name.rpartition(".")[0] in lists})


def first_stream(values: Sequence[Any]) -> Tensor | None:
    """Return the first (batch, length, channel) tensor of a call's arguments."""
    return next((x for x in values if isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 3), None)
