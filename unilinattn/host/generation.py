"""Generate text with a host model, and leave the model as it was."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from unilinattn.errors import InputError, OptionError, UncoveredError
from unilinattn.host.image import is_image
from unilinattn.host.inputs import host_arguments, is_encoder_decoder, max_positions, pixels
from unilinattn.host.recomputation import captures
from unilinattn.host.run import run
from unilinattn.host.text import NO_TEXT, encoded, is_text

RESERVED = ("inputs", "input_ids", "inputs_embeds", "attention_mask", "max_new_tokens", "max_length")
"""Arguments of a host's `generate` that are set here."""

ONE_PROMPT = "explain one prompt at a time, whose generated tokens are the rows of the result."


@dataclass(frozen=True)
class Generation:
    """A generated text as the inputs of one run of the model.

    Attributes:
        inputs: the arguments of the run.
        ids: the ids whose last ones were generated: the whole text, or those of a decoder.
        first: the position of the first generated token among them.
    """

    inputs: Mapping[str, Any]
    ids: Int[Tensor, "1 length"]
    first: int


def prompt_ids(model: nn.Module, prompt: Any, tokenizer: Any, *, bos: bool = False) -> Int[Tensor, "1 length"]:
    """Return the token ids of a prompt, on the model's device.

    `prompt`: a text, ids (1, length), or a mapping with `input_ids` and an `attention_mask` without padding. `bos`:
    whether the tokenizer's beginning-of-text token goes before a text that does not open with it.

    Raises `InputError` for several prompts, images, padding and ids that the model does not have, and `OptionError` for
    a `bos` that cannot be added.
    """
    if is_image(prompt):
        raise InputError("the prompt is an image; give a text, or the token ids of one.")
    if isinstance(prompt, (list, tuple)):
        raise InputError(f"the prompt is a {type(prompt).__name__}; {ONE_PROMPT}")
    if bos and not is_text(prompt):
        raise OptionError(f"bos=True, and {NO_TEXT}")
    if is_text(prompt):
        prompt = encoded(prompt, tokenizer, bos=bos).arguments_for(model)["input_ids"]
    arguments = dict(prompt) if isinstance(prompt, Mapping) else {"input_ids": prompt}
    if further := sorted(arguments.keys() - {"input_ids", "attention_mask"}):
        images = " An image in the prompt is not covered." if pixels(arguments) is not None else ""
        raise InputError(
            f"the prompt holds {', '.join(further)}; give a text, or its input_ids, whose tokens are explained.{images}"
        )
    ids = host_arguments(model, arguments).get("input_ids")
    if not isinstance(ids, Tensor):
        raise InputError("the prompt has no input_ids; give a text, or its token ids.")
    if len(ids) != 1:
        raise InputError(f"the prompt holds {len(ids)} sequences; {ONE_PROMPT}")
    mask = arguments.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise InputError("the prompt has padding; give its tokens only.")
    return ids


def generated(
    model: nn.Module, ids: Int[Tensor, "1 prompt"], max_new_tokens: int, settings: Mapping[str, Any]
) -> Generation:
    """Return the text that the host's own `generate` makes of a prompt: greedy by default.

    The text continues the prompt; of a model with an encoder, which reads the prompt, it is that of the decoder.

    Raises `UncoveredError` for a model that does not generate, `OptionError` for a number of tokens below 1 and for
    settings that would change the prompt or return several texts, `InputError` for more tokens than the model has
    positions, and `ModelStateError` for active dropout.
    """
    name = type(model).__name__
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise OptionError(f"max_new_tokens={max_new_tokens!r}; give the positive number of tokens to generate.")
    if taken := [setting for setting in settings if setting in RESERVED]:
        raise OptionError(f"generate_kwargs holds {taken[0]!r}, which the prompt and max_new_tokens determine.")
    if settings.get("num_return_sequences", 1) != 1:
        raise OptionError(f"num_return_sequences={settings['num_return_sequences']!r}; one text is explained.")
    generate: Any = getattr(model, "generate", None)
    if not callable(generate) or not getattr(model, "can_generate", lambda: True)():
        raise UncoveredError(
            f"{name} does not generate text; give a model with a language head, such as ...ForCausalLM."
        )
    encoded, most = is_encoder_decoder(model), max_positions(model)
    length = 1 if encoded else ids.shape[1]
    if most is not None and length + max_new_tokens > most:
        raise InputError(
            f"the prompt has {length} tokens and max_new_tokens is {max_new_tokens}, and {name} has positions for "
            f"{most}; give a shorter prompt or generate at most {max(most - length, 0)} tokens."
        )
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": max_new_tokens, "do_sample": False}
    # As in a trace: without captures, RWKV would rescale its weights in place.
    made = run(model, lambda: generate(ids, **{**arguments, **settings}), mixers=captures(model))
    whole: Tensor = made if isinstance(made, Tensor) else made.sequences
    if encoded:
        inputs = {"input_ids": ids, "decoder_input_ids": whole}
        # The first id is that from which the decoder starts.
        return Generation(inputs, whole, 1)
    if whole.shape[1] <= length or not torch.equal(whole[:, :length], ids):
        raise UncoveredError(f"{name}.generate did not continue the prompt; its {whole.shape[1]} ids are another text.")
    return Generation({"input_ids": whole}, whole, length)
