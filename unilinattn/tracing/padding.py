"""Where padding stands in each stream of tokens, and warnings where it reaches real tokens."""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from unilinattn.call.axes import as_tokens
from unilinattn.call.nested import tensors
from unilinattn.call.offloaded import loaded
from unilinattn.discovery.perturbation import Constant, Run, constants_of, special_ids
from unilinattn.host.inputs import ids_name, real_tokens
from unilinattn.host.module_calls import CallRecord, layer_input
from unilinattn.host.observer import Inputs
from unilinattn.registry import UNREGISTERED
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.token_streams import OWN

Masks = Mapping[tuple[int, int], Bool[Tensor, "batch token"]]
"""The real tokens of streams with padding, by their (batch, length)."""


def masks_of_streams(model: nn.Module, arguments: Mapping[str, Any], layers: Sequence[CallRecord]) -> Masks:
    """Return the real tokens of each stream that has the padded tokens, by its (batch, length).

    A stream may have more tokens than the mask, such as those of an image before its text. There padding is where the
    vectors that a layer reads move with the ids of padding: one run of the model without the computation of its
    layers. Warns if it is unknown where padding is.
    """
    mask, name = real_tokens(arguments), ids_name(arguments)
    if mask is None:
        return {}
    masks = {(mask.shape[0], mask.shape[1]): mask}
    shapes = {shape for record in layers if (shape := stream_shape(record)) is not None}
    if shapes & masks.keys():
        return masks
    if name is not None and arguments[name].shape == mask.shape:
        moved = _Moved(model, layers)
        moved.run({**arguments, name: _other_padding(model, arguments[name], mask)})
        padding = (~mask).sum(1)
        for shape, tokens in moved.tokens.items():
            if shape[0] == len(mask) and torch.equal(tokens.sum(1).to(padding), padding):
                masks[shape] = ~tokens
    if len(masks) == 1:
        warnings.warn(
            f"no layer of {type(model).__name__} reads as many tokens as attention_mask has ({mask.shape[1]}), and it "
            "is unknown which of them are padding, so a target counts padding too, and scores do not leave it out; "
            "trace texts of different lengths one by one.",
            stacklevel=3,
        )
    return masks


def stream_shape(record: CallRecord) -> tuple[int, int] | None:
    """Return (batch, length) of a layer's output, None for a call without one."""
    if record.output is None:
        return None
    batch, length = as_tokens(record.output, record.batch, record.axes.output).shape[:2]
    return batch, length


def _other_padding(model: nn.Module, ids: Tensor, mask: Bool[Tensor, "batch length"]) -> Tensor:
    """Return the ids with other ones at padding: those of real tokens, which the model accepts."""
    ordinary = ids[mask][~torch.isin(ids[mask], special_ids(model).to(ids))].unique()
    others = [int(number) for number in ordinary[:2]]
    changed = ids
    for other in others:
        # The second one is for padding that has the first one's id.
        changed = torch.where(~mask & (changed == ids), torch.full_like(ids, other), changed)
    return changed


class _Moved(Run):
    """A run whose layers return constants, which notes the tokens that moved in the vectors of each stream.

    Attributes:
        tokens: by (batch, length), whether each token that the first layer of a stream reads moved.
    """

    def __init__(self, model: nn.Module, layers: Sequence[CallRecord]) -> None:
        self._records: dict[tuple[str, int], CallRecord] = {}
        calls: Counter[str] = Counter()
        for record in layers:
            if record.output is not None:
                calls[record.name] += 1
                self._records[record.name, calls[record.name]] = record
        super().__init__(model, 0, constants_of(layers))
        self.tokens: dict[tuple[int, int], Bool[Tensor, "batch token"]] = {}

    def reading(self, path: str, number: int, constant: Constant, inputs: Inputs) -> None:
        """Compare the vectors that a layer reads with the traced ones."""
        record, read = self._records.get((path, number)), layer_input((*inputs[0], *inputs[1].values()))
        if record is None or record.entered is None or read is None or read.shape != record.entered.shape:
            return
        before, after = (as_tokens(x, record.batch, record.axes.inputs) for x in (record.entered, read))
        batch, length = before.shape[:2]
        self.tokens.setdefault((batch, length), (before != after).any(-1))


def warn_of_leaks(arguments: Mapping[str, Any], layers: Sequence[CallRecord]) -> None:
    """Warn if padding reaches real tokens, on either side."""
    mask = real_tokens(arguments)
    if mask is None:
        return
    after = mask.flip(1).cumsum(1).flip(1) == 0
    for side, other, padded in (("left", "right", mask | after), ("right", "left", ~after)):
        leak = None if bool(padded.all()) else _leak(layers, padded)
        if leak is None:
            continue
        elsewhere = _leak(layers, padded.sort(dim=1, descending=side == "left").values)
        advice = f"pad on the {other}" if elsewhere is None else "trace texts of different lengths one by one"
        warnings.warn(
            f"{side} padding reaches real tokens in this model: {leak}. Its operators reproduce that; {advice}.",
            stacklevel=3,
        )


def warn_of_recorded_leaks(arguments: Mapping[str, Any], layers: Sequence[Layer]) -> None:
    """Warn if padding reaches real tokens in a recorded layer: its operator is applied to vectors of padding only."""
    shapes = {tuple(mask.shape) for mask in _others(arguments)}
    for layer in layers:
        if layer.architecture != UNREGISTERED or layer.prefix_error is not None:
            continue
        # Only the operator knows the ports, and one that reads no padding need not be built yet.
        if layer.mask is None and not any(tuple(t.shape[:2]) in shapes for t in tensors(layer.arguments)):
            continue
        inputs = {port: torch.zeros_like(x) for port, x in layer.operator.inputs.items()}
        for port, x in inputs.items():
            mask = _read_mask(arguments, layer, port)
            if mask is not None:
                noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(x)
                inputs[port] = noise * ~mask.to(x.device)[..., None]
        if not any(bool(x.any()) for x in inputs.values()):
            continue
        moved = layer.operator.apply(inputs, bias=False)
        # Masked weights are exactly zero.
        if bool((moved if layer.mask is None else moved[layer.mask]).any()):
            warnings.warn(
                f"padding reaches real tokens in this model: {layer.name} ({type(layer.module).__name__}) does not "
                "mask it. Its operators reproduce that; trace texts of different lengths one by one.",
                stacklevel=3,
            )
            return


def _read_mask(arguments: Mapping[str, Any], layer: Layer, port: str) -> Bool[Tensor, "batch token"] | None:
    """Return the real tokens that a port of a layer reads, None if all are real.

    Tokens of another stream, such as those of an encoder, are told by the argument with as many.
    """
    shape = layer.ports[port]
    if port == OWN:
        return layer.mask if layer.mask is not None and tuple(layer.mask.shape) == shape else None
    return next((mask for mask in _others(arguments) if tuple(mask.shape) == shape), None)


def _others(arguments: Mapping[str, Any]) -> list[Bool[Tensor, "batch token"]]:
    masks = (real_tokens(arguments, name) for name in ("encoder_attention_mask", "attention_mask"))
    return [mask for mask in masks if mask is not None]


def _leak(layers: Sequence[CallRecord], mask: Bool[Tensor, "batch length"]) -> str | None:
    """Return the `padding_leak` of the first layer that has one for this mask, None if none has."""
    for record in layers:
        if record.architecture and record.architecture.padding_leak:
            with loaded(record.module):
                leak = record.architecture.padding_leak(record.module, mask)
            if leak is not None:
                return leak
    return None
