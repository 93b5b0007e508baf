"""The ids that an encoder-decoder gives its decoder where its call names none."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unilinattn.errors import UnilinattnError
from unilinattn.host.indices import checked_indices
from unilinattn.host.inputs import bound_arguments, is_encoder_decoder, is_ids
from unilinattn.host.observer import Inputs, Observer
from unilinattn.host.run import run

IDS, DECODER_IDS = "input_ids", "decoder_input_ids"


class _Ids(Observer[None]):
    """A run that notes the first ids, other than the encoder's, that a module reads as its `input_ids`."""

    def __init__(self, model: nn.Module, encoded: Tensor) -> None:
        super().__init__(model)
        self._encoded = encoded
        self.ids: Tensor | None = None

    def frame(self, path: str, module: nn.Module, inputs: Inputs) -> None:
        """Note the ids of a call."""
        if self.ids is None and self.stack and IDS in inspect.signature(type(module).forward).parameters:
            ids: Any = bound_arguments(module, *inputs).get(IDS)
            if is_ids(ids) and len(ids) == len(self._encoded) and not torch.equal(ids, self._encoded):
                self.ids = ids.detach().clone()


def with_decoder_ids(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model's forward with the ids of its decoder, if it makes them of those of its encoder.

    BART and T5 classify a sequence by the encoder's ids shifted by one, which are another stream of tokens. Runs the
    model once if it is an encoder-decoder without these ids among its arguments.
    """
    others = ("decoder_inputs_embeds", "labels", DECODER_IDS)
    parameters = inspect.signature(model.forward).parameters
    if not is_encoder_decoder(model) or DECODER_IDS not in parameters or not is_ids(arguments.get(IDS)):
        return dict(arguments)
    if any(arguments.get(name) is not None for name in others):
        return dict(arguments)
    observer = _Ids(model, arguments[IDS])
    try:
        with checked_indices(model):
            run(model, arguments, observer=observer.attached(), seed=torch.get_rng_state())
    except (UnilinattnError, torch.OutOfMemoryError):
        raise
    # A host may raise any error without a decoder's ids, and does so again where the trace tells the reason.
    except Exception:
        return dict(arguments)
    return dict(arguments) if observer.ids is None else {**arguments, DECODER_IDS: observer.ids}
