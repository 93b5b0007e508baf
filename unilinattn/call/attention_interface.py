"""Record the inputs of a host's softmax attention through transformers' attention interface."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from unilinattn.call.call import Call, Captured, host_function, package_version
from unilinattn.call.entries import Entries
from unilinattn.errors import UncoveredError

EAGER = "eager_attention_forward"
"""Name of the eager attention function in a file of transformers, or its end: two towers may have one each."""

INTERFACE = "unilinattn"
"""Name under which the attention function and its mask function are registered in transformers."""

CROSS_ARGUMENTS = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
"""Arguments by which transformers' attention modules take the states of the stream that they cross-attend to."""

_INPUTS = ("module", "query", "key", "value", "attention_mask")
"""The inputs of an attention function."""

_FORMULA = frozenset(
    ("torch", "matmul", "transpose", "repeat_kv", "num_key_value_groups", "size", "nn", "functional", "softmax")
) | {"float32", "to", "type", "dtype", "dropout", "training", "contiguous", "tanh", "head_dim"}
"""The names that the code of an eager attention reads which is no more than softmax(q k^T scale + mask) v."""

_handler: ContextVar[Callable[..., Any] | None] = ContextVar("unilinattn.handler", default=None)

chosen: dict[int, str | None] = {}
"""Attention implementation of a configuration before `interface` replaced it, by the configuration's id."""


@dataclass(eq=False)
class Attended:
    """One call of the attention function: its arguments, and the eager attention function of the host's file.

    Attributes:
        returned: what the function returned, if its softmax is plain (see `is_plain`), and how often torch had written
            into it; else None.
        is_causal: whether the softmax is causal without a mask.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: Mapping[str, Any]
    eager: Callable[..., tuple[Tensor, Tensor | None]]
    returned: tuple[Tensor, int] | None = None
    is_causal: bool = False

    @property
    def context(self) -> Tensor | None:
        """The result of a plain softmax, None if a host wrote into it."""
        context, version = self.returned or (None, 0)
        return context if context is not None and _version(context) == version else None

    @property
    def has_keys(self) -> Bool[Tensor, "batch query"]:
        """Queries that attend to a key in some head; padding on the left does not, and its result depends on the dtype.

        In float16 all its scores round to the mask's lowest number, in a wider dtype they differ.
        """
        batch, _, queries = self.query.shape[:3]
        if self.mask is None or self.mask.ndim != 4:
            return self.query.new_ones(batch, queries, dtype=torch.bool)
        # A position bias may have been added to the lowest number.
        allowed = self.mask if self.mask.dtype == torch.bool else self.mask > torch.finfo(self.mask.dtype).min / 2
        return allowed.any(-1).any(1).expand(batch, queries)


@contextmanager
def capture(model: nn.Module, mark: Callable[[nn.Module, Any], None]) -> Iterator[None]:
    """Run every attention of a model by the eager function of its file, and pass an `Attended` of it to `mark`.

    At the end the attention implementation of every configuration and sub-configuration is restored.
    """
    if "transformers" not in sys.modules:
        yield
        return

    chosen = {id(config): config._attn_implementation_internal for config in configurations(model)}
    # The layers of a run share it: of many tokens it is as large as the weights of a head.
    causal = cache(_causal)

    def handle(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Any:
        eager, fused = eager_function(module), chosen.get(id(module.config)) == "sdpa"
        inputs = query.detach(), key.detach(), value.detach()
        is_causal = fused and mask is None and _is_causal(module, query, options)
        if is_plain(eager, query, mask, options, fused=fused):
            # Fused attention takes less time than the weights, which are computed where they are used.
            context, weights = (fused_function() if fused else eager)(module, query, key, value, mask, **options)
            mark(module, Attended(*inputs, mask, options, eager, (context.detach(), _version(context)), is_causal))
            return context, weights
        if mask is not None and mask.dtype == torch.bool and fused:
            eager = _keeping(eager)
        elif is_causal:
            mask = causal(query.shape[2], key.shape[2], query.dtype, query.device)
        mark(module, Attended(*inputs, mask, options, eager))
        return eager(module, query, key, value, mask, **options)

    with interface(model, handle):
        yield


@contextmanager
def interface(model: nn.Module, handle: Callable[..., Any]) -> Iterator[None]:
    """Replace the attention function of a model's modules by `handle`, and restore it at the end.

    Calls from other threads run the attention function that the host has without the replacement.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    configs = _of_interface(model)
    before = Entries(
        [
            *tables(),
            *((chosen, id(config)) for config in configs),
            *((vars(config), "_attn_implementation_internal") for config in configs),
        ]
    )
    token = _handler.set(handle)
    try:
        ALL_ATTENTION_FUNCTIONS["eager"] = partial(_dispatch, ALL_ATTENTION_FUNCTIONS.get("eager"))
        ALL_ATTENTION_FUNCTIONS.register(INTERFACE, partial(_dispatch, None))
        # Without a mask function of this name the mask is None, which drops causality and padding.
        ALL_MASK_ATTENTION_FUNCTIONS.register(INTERFACE, _mask)
        for config in configs:
            chosen.setdefault(id(config), config._attn_implementation_internal)
            # Attention that selects its keys (index_topk) writes the selection into the mask only for implementations
            # that transformers names; other hosts bypass the interface if their implementation is "eager".
            config._attn_implementation_internal = "eager" if hasattr(config, "index_topk") else INTERFACE
        yield
    finally:
        # After an interrupt the garbage collector may run this block, long after everything was restored.
        if _handler.get() is handle:
            _handler.reset(token)
            before.put_back()


def is_hidden(config: Any) -> bool:
    """Tell whether a configuration's attention runs in a kernel that is no function of torch (flex attention)."""
    return getattr(config, "_attn_implementation_internal", None) not in (None, "eager", "sdpa")


def tables() -> list[tuple[dict[str, Any], str]]:
    """Return the entries of transformers' process-wide tables that `interface` replaces, as (dictionary, key) pairs."""
    if "transformers" not in sys.modules:
        return []
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return [
        (ALL_ATTENTION_FUNCTIONS._global_mapping, INTERFACE),
        (ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, INTERFACE),
        (ALL_ATTENTION_FUNCTIONS._local_mapping, "eager"),
    ]


def configurations(model: nn.Module) -> list[Any]:
    """Return the distinct configurations of a model and its modules, sub-configurations included."""
    configs: dict[int, Any] = {}
    waiting = [config for _, config in configured(model)]
    while waiting:
        config = waiting.pop()
        if id(config) in configs or not hasattr(config, "_attn_implementation_internal"):
            continue
        configs[id(config)] = config
        waiting.extend(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
    return list(configs.values())


def configured(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the modules of a model that have an attribute `config`, and its value."""
    for module in model.modules():
        # A module raises an error for an attribute that it lacks, which takes several times as long as this.
        if "config" in vars(module) or hasattr(type(module), "config"):
            yield module, getattr(module, "config", None)


def _of_interface(model: nn.Module) -> list[Any]:
    """Return the configurations of modules whose file calls the interface; others choose by the name by themselves."""
    pairs = {(type(module), id(config)): module for module, config in configured(model)}
    configs = {config for (_, config), module in pairs.items() if calls_interface(module)}
    return [config for config in configurations(model) if id(config) in configs]


def calls_interface(module: nn.Module) -> bool:
    """Tell whether the file of a module's class, or of an ancestor, knows the table of attention functions."""
    # The file of every model's ancestor, `PreTrainedModel`, defines the table.
    files = {ancestor.__module__ for ancestor in type(module).__mro__} - {"transformers.modeling_utils"}
    return any(hasattr(sys.modules.get(file), "ALL_ATTENTION_FUNCTIONS") for file in files)


def only_attention(call: Call) -> Captured:
    """Return the only call of the attention function inside a layer; raise `UncoveredError` for none or several."""
    if len(call.seen) != 1:
        raise UncoveredError(
            f"{call.name} ({type(call.module).__name__}) called transformers' attention interface {len(call.seen)} "
            "times; only modules that call it once are covered. Register an adapter for this class."
        )
    return call.seen[0]


def value_source(call: Call, seen: Captured) -> tuple[str, Tensor]:
    """Return the port that the values come from and its tensor: for cross-attention the other stream.

    Its sequences may be several for each of the queries, such as the tiles of an image, and are read as one.
    """
    for name in CROSS_ARGUMENTS:
        states = seen.arguments.get(name)
        if isinstance(states, Tensor):
            source, batch = call.tensor(states.detach()), len(seen.record.value)
            return "encoder", source if len(source) % batch else source.reshape(batch, -1, source.shape[-1])
    return "x", call.input


def require_same_tokens(call: Call) -> None:
    """Raise `UncoveredError` unless a layer attends once, from the tokens of its output to those of its values' source.

    Keys that are no tokens of the source are those of a cache or of a second stream, or compressed ones.
    """
    seen = only_attention(call)
    port, source = value_source(call, seen)
    queries, keys = (tuple(x.shape[:3:2]) for x in (seen.record.query, seen.record.value))
    host = f"{call.name} ({type(call.module).__name__} of {package_version(call.module)})"
    if keys != tuple(source.shape[:2]):
        raise UncoveredError(
            f"{host}: its attention has {keys[1]} keys in each of {keys[0]} sequences, and its input {port!r} has "
            f"{source.shape[1]} tokens in each of {source.shape[0]}, so a key is not one of these tokens, as with keys "
            "of two streams in one attention, compressed keys or windows. Register an adapter for this class."
        )
    if call.output is not None and queries != tuple(call.output.shape[:2]):
        raise UncoveredError(
            f"{host}: its attention has {queries[1]} queries in each of {queries[0]} sequences, and its output has the "
            f"shape {tuple(call.output.shape)}, so a query is not one token of the output, as with windows. Register "
            "an adapter for this class."
        )


def eager_function(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the eager attention function that the `forward` of a module's class names, such as that of its tower.

    A forward that names none uses the one of the file. Raises `UncoveredError` if there is none.
    """
    for ancestor in type(module).__mro__:
        forward = inspect.unwrap(vars(ancestor).get("forward", eager_function))
        names = (name for name in forward.__code__.co_names if name.endswith(EAGER) and name in forward.__globals__)
        if (name := next(names, None)) is not None:
            return forward.__globals__[name]
    return host_function(module, EAGER)


def is_plain(
    eager: Callable[..., Any], query: Tensor, mask: Tensor | None, options: Mapping[str, Any], *, fused: bool
) -> bool:
    """Tell whether an attention is the softmax of scores with a soft cap, a position bias and a mask.

    So it is if the code of the eager function reads nothing by other names than those of this formula; sinks are such
    names. The weights are compared with the result of the host's function in its dtype (`require_weighted`), and in
    another one with the output of the layer. Fused attention drops soft caps in some versions; eager attention adds a
    boolean mask to the scores, and may round float64 to float32.
    """
    code = getattr(eager, "__code__", None)
    if code is None or not set(code.co_names) <= _FORMULA or (mask is not None and mask.ndim != 4):
        return False
    adds_boolean = mask is not None and mask.dtype == torch.bool
    is_rounded = query.dtype == torch.float64 and "float32" in code.co_names
    is_other = options.get("softcap") is not None if fused else adds_boolean or is_rounded
    if is_other:
        return False
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    others = {*named[len(_INPUTS) :], "s_aux", "cache"} - {"scaling", "softcap", "position_bias", "dropout"}
    return not options.get("dropout") and all(options.get(name) is None for name in others)


def _version(tensor: Tensor) -> int:
    """Return how often torch wrote into a tensor; an inference tensor does not count."""
    return -1 if tensor.is_inference() else tensor._version


def cast(call: Call, value: Any) -> Any:
    """Move an argument, or the tensors nested in it, to the operator's dtype and device, without gradients."""
    if isinstance(value, Tensor):
        return call.tensor(value).detach() if value.is_floating_point() else value.to(call.input.device)
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(cast(call, item) for item in value)
    if type(value) is dict:
        return {name: cast(call, item) for name, item in value.items()}
    return value


def fused_function() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return transformers' function of fused attention."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return function


def _keeping(eager: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Make an eager function, which adds its mask to the scores, read a boolean one as torch's fused attention does.

    True keeps a pair of tokens, as in `scaled_dot_product_attention`; a query without any key returns zeros.
    """

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        # Eager functions compute the softmax in float32, where the lowest number of float64 is infinite, and a query
        # without any key NaN.
        lowest = max(torch.finfo(query.dtype).min, torch.finfo(torch.float32).min)
        dropped = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, lowest)
        context, weights = eager(module, query, key, value, dropped, **options)
        has_keys = mask.any(-1, keepdim=True)
        return context * has_keys.transpose(1, 2), None if weights is None else weights * has_keys

    return attend


def _is_causal(module: nn.Module, query: Tensor, options: Mapping[str, Any]) -> bool:
    """Tell whether transformers' fused attention is causal without a mask."""
    named = options.get("is_causal")
    return query.shape[2] > 1 and bool(getattr(module, "is_causal", True) if named is None else named)


def _causal(queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "1 1 query key"]:
    """Return the mask that adds the most negative number to the score of a later token."""
    later = torch.arange(keys, device=device) > torch.arange(queries, device=device)[:, None]
    mask = torch.zeros(later.shape, dtype=dtype, device=device)
    return mask.masked_fill(later, torch.finfo(dtype).min)[None, None]


def _dispatch(
    own: Callable[..., Any] | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> Any:
    """Call the replacement; for calls from other runs call `own`, or the host's own function if `own` is None."""
    handle = _handler.get() or own
    if handle is None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        implementation = _implementation(getattr(module, "config", None))
        named = None if implementation in (None, "eager") else ALL_ATTENTION_FUNCTIONS.get(implementation)
        handle = named or eager_function(module)
    return handle(module, query, key, value, attention_mask, **options)


def _mask(*, config: Any = None, **given: Any) -> Tensor | None:
    """Return the mask of the configuration's own implementation, which the host's modules may read; else eager's.

    The boolean mask of fused attention stays one, since some hosts combine it with scores of their own; None where
    fused attention needs none, and the module then decides whether it is causal. The implementations that read no
    dense mask, such as flash attention, have the one of eager attention.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    implementation = _implementation(config) or "eager"
    if _handler.get() is not None and implementation != "sdpa":
        implementation = "eager"
    make = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)
    return None if make is None else make(config=config, **given)


def _implementation(config: Any) -> str | None:
    """Return the attention implementation that a configuration has without `interface`."""
    implementation: str | None = chosen.get(id(config), getattr(config, "_attn_implementation", None))
    # A host may make a configuration during the run, as a copy for one layer; it has the name of the interface then.
    return next(iter(chosen.values()), None) if implementation == INTERFACE else implementation
