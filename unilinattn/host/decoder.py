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

IDS, DECODER_IDS, LABELS = "input_ids", "decoder_input_ids", "labels"


class _Ids(Observer[None]):
    """A run that notes the ids that modules inside of the model read as their `input_ids`, in order of execution."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.read: list[Tensor] = []

    def frame(self, path: str, module: nn.Module, inputs: Inputs) -> None:
        """Note the ids of a call."""
        if self.stack and IDS in inspect.signature(type(module).forward).parameters:
            ids: Any = bound_arguments(module, *inputs).get(IDS)
            if is_ids(ids):
                self.read.append(ids.detach().clone())


def with_decoder_ids(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model's forward with the ids of its decoder, if it makes them of other ids.

    BART and T5 classify a sequence by the encoder's ids shifted by one, which are another stream of tokens, and shift
    labels. Runs the model once if it is an encoder-decoder without these ids among its arguments. Raises `InputError`
    for labels that no module reads as ids shifted by one.
    """
    parameters = inspect.signature(model.forward).parameters
    encoded, labels = (ids if is_ids(ids := arguments.get(name)) else None for name in (IDS, LABELS))
    if not is_encoder_decoder(model) or DECODER_IDS not in parameters or (encoded is None and labels is None):
        return dict(arguments)
    if any(arguments.get(name) is not None for name in ("decoder_inputs_embeds", DECODER_IDS)):
        return dict(arguments)
    observer = _Ids(model)
    try:
        with checked_indices(model):
            run(model, arguments, observer=observer.attached(), seed=torch.get_rng_state())
    except (UnilinattnError, torch.OutOfMemoryError):
        raise
    # A host may raise any error without a decoder's ids, and does so again where the trace tells the reason.
    except Exception:
        return dict(arguments)
    made = [ids for ids in observer.read if labels is not None and _is_shifted(labels, ids)]
    if encoded is not None:
        made += [ids for ids in observer.read if len(ids) == len(encoded) and not torch.equal(ids, encoded)]
    if made:
        return {**arguments, DECODER_IDS: made[0]}
    if labels is not None:
        raise InputError(
            f"{type(model).__name__} was given {LABELS} and no {DECODER_IDS}, and no module of it reads the ids that "
            f"its decoder makes of them; give {DECODER_IDS}, the labels shifted to the right, instead."
        )
    return dict(arguments)


def _is_shifted(labels: Tensor, ids: Tensor) -> bool:
    """Tell whether ids are labels shifted to the right; the ids of labels that are left out (-100) are others."""
    before = labels[:, :-1]
    return ids.shape == labels.shape and bool(((ids[:, 1:] == before) | (before < 0)).all())
