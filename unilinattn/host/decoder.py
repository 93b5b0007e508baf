"""The ids that an encoder-decoder gives its decoder where its call names none."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unilinattn.errors import InputError, UnilinattnError
from unilinattn.host.indices import checked_indices
from unilinattn.host.inputs import bound_arguments, is_encoder_decoder, is_ids
from unilinattn.host.observer import Inputs, Observer
from unilinattn.host.run import run

IDS, DECODER_IDS = "input_ids", "decoder_input_ids"


class _Ids(Observer[None]):
    """A run that notes the first ids, other than the encoder's, that a module reads as its `input_ids`."""

    def __init__(self, model: nn.Module, encoded: Tensor | None) -> None:
        super().__init__(model)
        self._encoded = encoded
        self.ids: Tensor | None = None

    def frame(self, path: str, module: nn.Module, inputs: Inputs) -> None:
        """Note the ids of a call."""
        if self.ids is None and self.stack and IDS in inspect.signature(type(module).forward).parameters:
            ids: Any = bound_arguments(module, *inputs).get(IDS)
            encoded = self._encoded
            if is_ids(ids) and (encoded is None or (len(ids) == len(encoded) and not torch.equal(ids, encoded))):
                self.ids = ids.detach().clone()


def with_decoder_ids(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model's forward with the ids of its decoder, if it makes them of other ids.

    BART and T5 classify a sequence by the encoder's ids shifted by one, which are another stream of tokens; of labels
    a decoder reads all but the last. Runs the model once if it is an encoder-decoder without these ids among its
    arguments. Raises `InputError` for labels whose ids no module reads.
    """
    parameters = inspect.signature(model.forward).parameters
    encoded, is_trained = arguments.get(IDS), arguments.get("labels") is not None
    if not is_encoder_decoder(model) or DECODER_IDS not in parameters or not (is_ids(encoded) or is_trained):
        return dict(arguments)
    if any(arguments.get(name) is not None for name in ("decoder_inputs_embeds", DECODER_IDS)):
        return dict(arguments)
    observer = _Ids(model, encoded)
    try:
        with checked_indices(model):
            run(model, arguments, observer=observer.attached(), seed=torch.get_rng_state())
    except (UnilinattnError, torch.OutOfMemoryError):
        raise
    # A host may raise any error without a decoder's ids, and does so again where the trace tells the reason.
    except Exception:
        return dict(arguments)
    if observer.ids is not None:
        return {**arguments, DECODER_IDS: observer.ids}
    if is_trained:
        raise InputError(
            f"{type(model).__name__} was given labels and no {DECODER_IDS}, and no module of it reads the ids that its "
            f"decoder makes of them; give {DECODER_IDS}, the labels shifted to the right, instead."
        )
    return dict(arguments)
