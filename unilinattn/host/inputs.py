"""The arguments of a host model, completed and checked before it runs."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from unilinattn.call import is_cache
from unilinattn.call.nested import tensors
from unilinattn.errors import InputError, UncoveredError, UnilinattnError, nearest
from unilinattn.host.draws import same_draws
from unilinattn.host.fields import SEPARATOR, as_called, by_field
from unilinattn.host.wrappers import OPTIMIZED

CACHE = "past_key_values"
"""Name of the argument with the states of earlier tokens in transformers' models."""


def host_arguments(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Turn a tensor of ids or pixels, or a mapping of keyword arguments, into the arguments of the host's forward.

    The host runs without a cache: `use_cache` is False if the host accepts it, and an empty cache, which the run would
    fill, is left out. If a host accepts `position_ids` and does not derive them itself, they are computed from a
    left-padded mask.

    Raises `InputError` for inputs of another type, for arguments that the host does not accept, and for tensors that
    do not fit.
    """
    parameters = inspect.signature(model.forward).parameters
    if isinstance(inputs, Mapping):
        arguments = by_field(inputs)
    elif isinstance(inputs, Tensor):
        arguments = {_main_input(model): inputs}
    else:
        raise InputError(
            f"inputs are a {type(inputs).__name__}; give a tensor of token ids or pixels, or a mapping of the "
            "model's keyword arguments (as a tokenizer returns it)."
        )
    _check_names(model, arguments)
    refuse_states(arguments)
    arguments = {name: _ordinary(value) for name, value in arguments.items() if not is_cache(name, value)}
    _check_tensors(model, arguments)
    _check_ids(model, arguments)
    _check_masks(arguments)
    passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "use_cache" in parameters or (CACHE in parameters and passes_on):
        arguments["use_cache"] = False
    mask = arguments.get("attention_mask")
    if (
        ("position_ids" in parameters and isinstance(mask, Tensor) and mask.ndim == 2)
        and not bool(mask[:, 0].all())
        and not any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules())
    ):
        arguments.setdefault("position_ids", (mask.long().cumsum(-1) - 1).clamp_min(0))
    return arguments


def refuse_states(arguments: Mapping[str, Any]) -> None:
    """Raise `InputError` for a cache that holds states: an operator maps only the tokens of the call."""
    for name, value in arguments.items():
        if is_cache(name, value) and _holds_tensors(value, depth=4):
            raise InputError(
                f"the model was given {name} with the states of earlier tokens, which are not part of this call, so no "
                "operator could account for them. Leave it out and pass the whole text."
            )


def refuse_states_between(module: nn.Module, path: str, arguments: Mapping[str, Any], caches: Sequence[str]) -> None:
    """Raise `UncoveredError` for a module that a model gives the states of tokens that another module has read.

    A model may make a cache in its call; while its layers fill it, each has the states of the earlier layers.
    """
    for cache in caches:
        value = arguments.get(cache)
        if value is None:
            continue
        numbers = {number for each in module.modules() if (number := getattr(each, "layer_idx", None)) is not None}
        slots = getattr(value, "layers", None)
        if isinstance(slots, list) and numbers:
            value = [slots[number] for number in numbers if number < len(slots)]
        if _holds_tensors(value, depth=4):
            raise UncoveredError(
                f"{path} ({type(module).__name__}) was given {cache} with the states of tokens that another module of "
                "the model has read, or an earlier call, and its operators map only the tokens of its input. Trace the "
                "modules of the model by themselves, without a cache."
            )


def call_host(model: nn.Module, arguments: Mapping[str, Any]) -> Any:
    """Call a model with its arguments: by name, or by position where its forward takes only `*args`.

    Inside of `drawing` the model draws the random numbers of a trace. Raises `UncoveredError` for nested tensors, and
    `InputError` for more tokens than the model has positions, other sizes of images, and arguments that are missing.
    """
    try:
        with same_draws():
            call = as_called(arguments)
            return model(*call.values()) if _only_positional(model) else model(**call)
    except (UnilinattnError, torch.OutOfMemoryError):
        raise
    except (TypeError, KeyError) as error:
        # A host whose forward passes its keyword arguments on may set this one itself. Python raises `KeyError`
        # where a mode sees the module's name, which the message of the `TypeError` needs.
        is_twice = str(error) == "'use_cache'" or "multiple values for keyword argument 'use_cache'" in str(error)
        if (missing := _missing(model, arguments)) and not is_twice:
            raise InputError(
                f"{type(model).__name__}.forward needs {' and '.join(map(repr, missing))}, and the inputs have "
                f"{', '.join(arguments) or 'nothing'}; give a mapping with all of its arguments by name."
            ) from error
        if "use_cache" not in arguments or not is_twice:
            raise
        return call_host(model, {name: value for name, value in arguments.items() if name != "use_cache"})
    except (IndexError, RuntimeError, ValueError, AssertionError) as error:
        if "NestedTensor" in str(error):
            raise UncoveredError("the model computes with nested tensors: give it padded ones and a mask.") from error
        if (reason := _misfit(model, arguments)) is None:
            raise
        raise InputError(reason) from error


def max_positions(model: nn.Module) -> int | None:
    """Return the number of positions in a model's configuration, None if it has none."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None


def input_embedding(model: nn.Module) -> nn.Module | None:
    """Return the module of `get_input_embeddings`, None for a model that does not define it.

    transformers defines it for every model and raises an error where it finds no such module, as for two towers.
    """
    try:
        embedding: nn.Module | None = getattr(model, "get_input_embeddings", lambda: None)()
    except (NotImplementedError, AttributeError):
        return None
    return embedding


def vocabulary_size(model: nn.Module) -> int | None:
    """Return the number of ids that a model embeds, None if it is unknown."""
    size = getattr(input_embedding(model), "num_embeddings", None)
    return size if isinstance(size, int) else None


def pixels(arguments: Mapping[str, Any]) -> Float[Tensor, "batch channel height width"] | None:
    """Return the images among a host's arguments, None if there are none or several tensors of them."""
    images = [x for x in arguments.values() if isinstance(x, Tensor) and x.ndim == 4 and x.is_floating_point()]
    return images[0] if len(images) == 1 else None


def _misfit(model: nn.Module, arguments: Mapping[str, Any]) -> str | None:
    """Return why a model failed on these inputs, None if they fit its positions, its decoder and its image size."""
    ids, most = token_ids(arguments), max_positions(model)
    name = type(model).__name__
    if ids is not None and most is not None and ids.shape[1] > most:
        return f"the inputs have {ids.shape[1]} tokens, and {name} has positions for {most}; give a shorter text."
    if is_encoder_decoder(model) and not any("decoder_input" in each or each == "labels" for each in arguments):
        start = decoder_start(model, 1).get("decoder_input_ids")
        first = "" if start is None else f"; the first one of a text is {int(start)}"
        return (
            f"{name} has a decoder and was given no decoder_input_ids: give the ids whose logits are explained{first}. "
            "A text is given them."
        )
    images = pixels(arguments)
    embedding = getattr(model, "patch_embed", None)
    size = getattr(getattr(model, "config", None), "image_size", getattr(embedding, "img_size", None))
    if images is None or size is None:
        return None
    wanted = (size, size) if isinstance(size, int) else tuple(size)
    if tuple(images.shape[2:]) == wanted:
        return None
    return (
        f"the image has {images.shape[2]} x {images.shape[3]} pixels, and {name} takes {wanted[0]} x {wanted[1]}; "
        "give the processor or transform of this model, which resizes images."
    )


def token_ids(arguments: Mapping[str, Any]) -> Tensor | None:
    """Return the (batch, length) ids among a host's arguments, None if there are none or those of two streams."""
    name = ids_name(arguments)
    return None if name is None else arguments[name]


def ids_name(arguments: Mapping[str, Any]) -> str | None:
    """Return the name of the argument with the (batch, length) ids, None if there is none or there are several.

    It ends in `input_ids`, or the ids are the only tensor but for masks and positions.
    """
    named = [name for name in arguments if name.endswith("input_ids")]
    if not named:
        arrays = [name for name, value in arguments.items() if isinstance(value, Tensor) and value.ndim > 1]
        named = [name for name in arrays if "mask" not in name and "position" not in name]
    return named[0] if len(named) == 1 and is_ids(arguments[named[0]]) else None


def is_ids(value: Any, *, axes: Collection[int] = (2,)) -> bool:
    """Tell whether a value may be the ids of tokens, (batch, length) or with other numbers of `axes`."""
    whole = isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()
    return whole and value.dtype != torch.bool and value.ndim in axes


def is_encoder_decoder(model: nn.Module) -> bool:
    """Tell whether a model's configuration says that it has an encoder and a decoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def decoder_start(model: nn.Module, batch: int) -> dict[str, Tensor]:
    """Return the id from which the decoder of a model generates, as its argument; none for a model without one."""
    settings = (getattr(model, "generation_config", None), getattr(model, "config", None))
    ids = (getattr(each, name, None) for each in settings for name in ("decoder_start_token_id", "bos_token_id"))
    start = next((each for each in ids if isinstance(each, int)), None)
    takes = is_encoder_decoder(model) and "decoder_input_ids" in inspect.signature(model.forward).parameters
    return {"decoder_input_ids": torch.full((batch, 1), start, device="cpu")} if takes and start is not None else {}


def sequences_in(arguments: Mapping[str, Any]) -> int | None:
    """Return the number of sequences of a host's arguments: that of its ids, by default that of its first tensor."""
    named = (value for name, value in arguments.items() if name.endswith("input_ids") and isinstance(value, Tensor))
    return next((t.shape[0] for t in (*named, *tensors(list(arguments.values()))) if t.ndim), None)


def real_tokens(arguments: Mapping[str, Any], name: str = "attention_mask") -> Bool[Tensor, "batch length"] | None:
    """Return the real tokens of a padding mask among a host's arguments, None if all are real."""
    fields = [value for key, value in arguments.items() if key.endswith(f"{SEPARATOR}{name}")]
    mask = arguments.get(name, fields[0] if len(fields) == 1 else None)
    return mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all()) else None


def last_real(mask: Bool[Tensor, "batch length"] | None) -> Int[Tensor, " batch"]:
    """Return the position of each sequence's last real token; a single -1 without a mask."""
    if mask is None:
        return torch.tensor([-1], device="cpu")
    return (torch.arange(mask.shape[1], device="cpu") * mask.cpu()).amax(1)


def bound_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name the arguments of a call by the parameters of the module's `forward`."""
    # A compiled module has the arguments of its original module.
    source = getattr(module, OPTIMIZED) if OPTIMIZED in module._modules else module
    signature, single, positional, named = _signature(type(source).forward)
    if single is not None and len(args) == 1 and not kwargs:
        # Most modules take one tensor, and many of them compute less than `bind`.
        return {single: args[0]}
    arguments = dict(list(signature.bind(source, *args, **kwargs).arguments.items())[1:])
    if positional is not None:
        arguments.update({str(k): v for k, v in enumerate(arguments.pop(positional, ()))})
    if named is not None:
        arguments.update(arguments.pop(named, {}))
    return arguments


@lru_cache(maxsize=1024)
def _signature(forward: Callable[..., Any]) -> tuple[inspect.Signature, str | None, str | None, str | None]:
    """Return a method's signature, and the names of three of its parameters, None for each that it lacks.

    These are the parameter of an only argument, and those of other positional and of other named arguments.
    """
    signature = inspect.signature(forward)
    names = {parameter.kind: parameter.name for parameter in signature.parameters.values()}
    positional, named = names.get(inspect.Parameter.VAR_POSITIONAL), names.get(inspect.Parameter.VAR_KEYWORD)
    ordinary = [p for p in list(signature.parameters.values())[1:] if p.name not in (positional, named)]
    is_single = all(p.default is not p.empty for p in ordinary[1:])
    single = next((p.name for p in ordinary[:1] if is_single and p.kind is p.POSITIONAL_OR_KEYWORD), None)
    return signature, single, positional, named


def _main_input(model: nn.Module) -> str:
    """Return the name of a model's first input; for a wrapper with *args or **kwargs that of the model inside."""
    firsts = ((m, next(iter(inspect.signature(m.forward).parameters.values()), None)) for m in model.modules())
    ordinary = ((m, f.name) for m, f in firsts if f is not None and f.kind not in (f.VAR_POSITIONAL, f.VAR_KEYWORD))
    inside, first = next(ordinary, (None, "input"))
    modules = (model,) if inside is model else model.modules()
    return next((name for m in modules if (name := getattr(m, "main_input_name", None))), first)


def _only_positional(model: nn.Module) -> bool:
    kinds = {parameter.kind for parameter in inspect.signature(model.forward).parameters.values()}
    return kinds == {inspect.Parameter.VAR_POSITIONAL}


def _missing(model: nn.Module, arguments: Mapping[str, Any]) -> list[str]:
    """Return the arguments without a default that a model's forward was not given."""
    parameters = inspect.signature(model.forward).parameters.values()
    named = (p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.default is p.empty)
    return [] if _only_positional(model) else [p.name for p in named if p.name not in as_called(arguments)]


def _check_names(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Raise `InputError` for arguments that a model's forward does not accept, and for several if it has only *args."""
    parameters, arguments = inspect.signature(model.forward).parameters, as_called(arguments)
    if _only_positional(model):
        if len(arguments) > 1:
            raise InputError(
                f"{type(model).__name__}.forward takes only *args, so it cannot be given {', '.join(arguments)} by "
                "name; trace the model that it wraps, or give one tensor."
            )
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    unknown = [name for name in arguments if name not in parameters]
    if unknown:
        raise InputError(
            f"{type(model).__name__}.forward takes no argument {unknown[0]!r}"
            + nearest(unknown[0], parameters)
            + (" It wraps other modules: trace the model inside." if type(model) is nn.Sequential else "")
        )


def _check_ids(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    ids = arguments.get("input_ids")
    if ids is None:
        return
    # The vectors of several codebooks, (batch, length, codebook), are added before the first block.
    if not is_ids(ids, axes=(2, 3)):
        what = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(f"input_ids are {what}; integer token ids of shape (batch, length) are needed.")
    if ids.shape[0] == 0 or ids.shape[1] == 0:
        raise InputError(f"input_ids have shape {tuple(ids.shape)}; at least one sequence of one token is needed.")
    # Each codebook has its own numbers.
    size = vocabulary_size(model) if ids.ndim == 2 else None
    if size is not None and (int(ids.min()) < 0 or int(ids.max()) >= size):
        raise InputError(
            f"input_ids reach from {int(ids.min())} to {int(ids.max())}; the model knows ids 0 to {size - 1}."
        )


def _check_tensors(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Raise `InputError` for tensors without elements, with NaN, or on another device than that of the whole model."""
    devices = {parameter.device for parameter in model.parameters() if not parameter.is_meta}
    for name, value in arguments.items():
        if not isinstance(value, Tensor) or not value.ndim:
            continue
        # Tokens may have no features, such as those of their times; images have pixels.
        if not value.numel() and (value.ndim != 3 or 0 in value.shape[:2]):
            raise InputError(
                f"{name} has shape {tuple(value.shape)}; at least one sequence of one token is needed. Leave the "
                "argument out if the model does not need it."
            )
        # accelerate, which distributes a model over devices, also moves its inputs.
        moves = len(devices) != 1 or value.device in devices or any("_hf_hook" in vars(x) for x in model.modules())
        if not moves:
            (device,) = devices
            raise InputError(
                f"{name} is on {value.device}, and {type(model).__name__} is on {device}; move one of them with "
                f".to({str(device)!r})."
            )
        # A mask that is added to scores may hold infinity.
        wrong = value.isnan() if "mask" in name else ~value.isfinite()
        if bool(wrong.any()):
            raise InputError(
                f"{name} holds {int(wrong.sum())} NaN or infinite numbers, the first at "
                f"{tuple(wrong.nonzero()[0].tolist())}; finite numbers are needed."
            )


def _check_masks(arguments: Mapping[str, Any]) -> None:
    """Raise `InputError` for a mask without one entry for each token or for each pair of tokens."""
    for name, streams in {
        "attention_mask": ("input_ids", "inputs_embeds"),
        "decoder_attention_mask": ("decoder_input_ids", "decoder_inputs_embeds"),
    }.items():
        mask = arguments.get(name)
        tokens = next((arguments[s] for s in streams if isinstance(arguments.get(s), Tensor)), None)
        # With a cache the mask also covers its earlier tokens.
        if mask is None or tokens is None or arguments.get(CACHE) is not None:
            continue
        batch, length = tokens.shape[:2]
        if not isinstance(mask, Tensor):
            raise InputError(f"{name} is a {type(mask).__name__}; give a tensor of shape {(batch, length)}.")
        pairs = mask.ndim in (3, 4) and mask.shape[0] in (1, batch) and tuple(mask.shape[-2:]) == (length, length)
        if tuple(mask.shape) != (batch, length) and not pairs:
            raise InputError(
                f"{name} has shape {tuple(mask.shape)}, and the inputs have {batch} sequences of {length} tokens; give "
                f"one entry a token, {(batch, length)}, or one a pair of tokens, {(batch, 1, length, length)}."
            )


def _holds_tensors(value: Any, depth: int = 3) -> bool:
    """Tell whether a cache of any class holds a tensor with elements."""
    if isinstance(value, Tensor):
        return value.numel() > 0
    # A layer of transformers' caches stores the size of its window as a tensor before it has states.
    if getattr(value, "is_initialized", True) is False and not hasattr(value, "layers"):
        return False
    if isinstance(value, Mapping):
        values: Iterable[Any] = value.values()
    elif isinstance(value, (tuple, list)):
        values = value
    else:
        values = getattr(value, "__dict__", {}).values()
    return depth > 0 and any(_holds_tensors(content, depth - 1) for content in values)


def _ordinary(value: Any) -> Any:
    """Return a copy of a tensor made in inference mode, which passes no gradients; other values unchanged."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value
