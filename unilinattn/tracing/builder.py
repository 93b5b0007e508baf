"""`LayerBuilder`: the layers of a run from the records of their calls."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from unilinattn.host.inputs import is_encoder_decoder, real_tokens
from unilinattn.host.module_calls import CallRecord
from unilinattn.host.weights import Checksums, Weights
from unilinattn.operator.operator import MixerOperator
from unilinattn.tracing.layer import Layer, Step
from unilinattn.tracing.padding import Masks, stream_shape
from unilinattn.tracing.residual import group_parallel


class LayerBuilder:
    """Builds the layers of one run from the records of their calls, in order of execution.

    Attributes:
        mask: real tokens (batch, length), None if all are real.
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: Mapping[str, Any],
        dtype: torch.dtype | None,
        masks: Masks | None = None,
        *,
        within_run: bool = False,
    ) -> None:
        """Prepare for a run on `arguments`; the operators compute in `dtype`, by default the host's.

        `masks` are the real tokens of streams that have other tokens beside those of the padding mask. The operators of
        layers that exist `within_run` only are built by then, so no checksum tells later whether weights changed.
        """
        self._model, self._within_run = model, within_run
        self._checksums = Checksums()
        self.mask, self._masks = real_tokens(arguments), masks or {}
        self._inner_mask = real_tokens(arguments, "decoder_attention_mask")
        self._two_streams = is_encoder_decoder(model)
        self._dtype = dtype
        self._latest: dict[str, MixerOperator] = {}
        self._calls: dict[str, int] = {}

    @cached_property
    def weights(self) -> Weights:
        """Checksums of the model's weights at the first access."""
        return Weights(self._model, self._checksums)

    def encodes(self, record: CallRecord) -> bool:
        """Whether a call belongs to the encoder of a model with an encoder and a decoder."""
        return self._two_streams and "encoder" in record.name.split(".")

    def build(self, record: CallRecord) -> Layer:
        """Freeze the next recorded call of a layer."""
        self._calls[record.name] = self._calls.get(record.name, 0) + 1
        name = record.name or type(record.module).__name__
        name = name if self._calls[record.name] == 1 else f"{name}#{self._calls[record.name]}"
        mask = self._inner_mask if self._two_streams and not self.encodes(record) else self.mask
        assert record.output is not None
        computed = torch.promote_types(self._dtype or record.output.dtype, torch.float32)
        shape = stream_shape(record)
        if mask is not None and tuple(mask.shape) != shape:
            mask = self._masks.get(shape) if mask is self.mask and shape is not None else None
        weights = None if self._within_run else Weights(record.module, self._checksums)
        return Layer(record, name, computed, mask, self._latest, weights)

    def build_steps(self, records: Sequence[CallRecord]) -> tuple[tuple[Layer, ...], tuple[Step, ...]]:
        """Freeze all recorded calls of the run; return the layers, and the same layers in steps."""
        # Before the layers are built: a group of parallel layers removes their outputs from each other's streams.
        groups = group_parallel(records)
        layers = tuple(self.build(record) for record in records)
        return layers, tuple(Step(tuple(layers[i] for i in group)) for group in groups)
