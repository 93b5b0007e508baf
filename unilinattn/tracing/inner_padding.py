"""Inputs of hosts that pad the tokens by themselves, such as to a whole number of windows of attention."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from unilinattn.call.exactness import layer_tolerance
from unilinattn.call.nested import tensors
from unilinattn.host.inputs import call_host
from unilinattn.host.recorder import main_tensor
from unilinattn.host.run import run
from unilinattn.host.text import Text
from unilinattn.tracing.layer import Layer

MASK = "attention_mask"

TEXTS = ("input_ids", "inputs_embeds")
"""Ends of the names of arguments with the tokens of a text."""


def padded_arguments(
    model: nn.Module, arguments: Mapping[str, Any], output: Any, layers: Sequence[Layer]
) -> dict[str, Any] | None:
    """Return the arguments with padding as long as that which a host adds at their end; None if it adds none.

    Longformer's layers read a whole number of windows. Padding that the host adds is unknown as such: a target counted
    from the end would be one of its tokens, and its scores would be those of a token of the text. The host runs on the
    longer arguments, ids or vectors, and the output for the tokens of the text has to be the same.
    """
    # The ids of a decoder, too, are those of a text, whose layers may be the only ones.
    texts = [value for name, value in arguments.items() if name.endswith(TEXTS) and isinstance(value, Tensor)]
    shapes = {tuple(tensor.shape[:2]) for layer in layers for tensor in (layer.input, layer.output)}
    takes_mask = MASK in inspect.signature(model.forward).parameters
    if len(texts) != 1 or texts[0].ndim < 2 or len(shapes) != 1 or not takes_mask:
        return None
    (batch, length), ((rows, padded),) = texts[0].shape[:2], shapes
    if rows != batch or padded <= length:
        return None
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    longer, mask = dict(arguments), arguments.get(MASK)
    longer[MASK] = torch.ones(batch, length, dtype=torch.long, device=texts[0].device) if mask is None else mask
    for name, value in longer.items():
        if isinstance(value, Tensor) and value.shape[:2] == (batch, length):
            fill = padding if name == "input_ids" and isinstance(padding, int) else 0
            longer[name] = torch.cat([value, value.new_full((batch, padded - length, *value.shape[2:]), fill)], 1)
    entered: list[int] = []

    def call() -> Any:
        # Tokens that a host adds beside those of a text, such as patches, are added to the longer one, too.
        layers[0].module.register_forward_hook(lambda *call: entered.append(_elements(call[2])))
        return call_host(model, longer)

    try:
        values = run(model, call, seed=torch.get_rng_state())
    # A host that adds other tokens may accept no longer inputs.
    except Exception:
        return None
    is_padding = entered[:1] == [layers[0].output.numel()] and _are_same(values, output, length)
    return longer if is_padding else None


def padded_text(text: Text, arguments: Mapping[str, Any]) -> Text:
    """Return a text whose ids have padding at their end, as arguments have."""
    longer = {name: arguments[name] for name in (*text.arguments, MASK)}
    more = longer["input_ids"].shape[1] - text.arguments["input_ids"].shape[1]
    words = None if text.words is None else tuple((*row, *[None] * more) for row in text.words)
    return replace(text, arguments=longer, words=words)


def _elements(output: Any) -> int:
    tensor = main_tensor(output)
    return 0 if tensor is None else tensor.numel()


def _are_same(longer: Any, output: Any, length: int) -> bool:
    """Tell whether the first tensor of an output, the logits or states, is the same for the tokens of a text."""
    first, second = (next((t for t in tensors(x) if t.is_floating_point()), None) for x in (longer, output))
    if first is None or second is None:
        return False
    if first.shape != second.shape and first.ndim > 2:
        first = first[:, :length]
    if first.shape != second.shape:
        return False
    return float((first - second).float().norm()) <= layer_tolerance(second.dtype) * float(second.float().norm())
