"""Substitutes for functions that need a GPU: flash-attn's by their formula, others by the package's own references.

Each is put where the kernel is, under its qualified name, so that what is registered for the name is tested.
"""

import importlib.util
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import Tensor


def replace_kernels() -> None:
    """Put the substitutes in the place of the kernels, in every module of the package."""
    if importlib.util.find_spec("flash_attn") is None:
        _stand_in_for_flash_attention()
    _loops_over_tensors()
    _references()
    from fla import layers

    # Its rounding to 16 bits would hide what is tested.
    sys.modules["fla.layers.rodimus"].autocast_to_fp16 = lambda x: x
    run_on_cpu(layers.LogLinearMamba2)
    run_on_cpu(layers.StickBreakingAttention)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """flash-attn's `flash_attn_func`: (batch, length, head, channel), scaled by channel ** -0.5."""
    assert causal and window_size[1] in (-1, 0) and not dropout_p
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bihn,bjhn->bhij", q, k) * scale
    position = torch.arange(q.shape[1])
    distance = position[:, None] - position
    hidden = (distance < 0) | ((distance > window_size[0]) if window_size[0] >= 0 else False)
    return torch.einsum("bhij,bjhn->bihn", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def flash_attention_of_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """flash-attn's `flash_attn_varlen_func`: sequences concatenated on the first axis, attended separately."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    parts = zip(*(x.split(cu_seqlens_q.diff().tolist()) for x in (q, k, v)), strict=True)
    options = dict(softmax_scale=softmax_scale, causal=causal, window_size=window_size)
    return torch.cat([flash_attention(*(x[None] for x in part), **options)[0] for part in parts])


def _stand_in_for_flash_attention() -> None:
    module = types.ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)
    functions = {"flash_attn_func": flash_attention, "flash_attn_varlen_func": flash_attention_of_sequences}
    vars(module).update(functions)
    sys.modules["flash_attn"] = module
    for name, loaded in list(sys.modules.items()):
        if name.startswith(("fla.layers.", "fla.ops.")):
            # Without the package, most modules define only the first name.
            vars(loaded).update(functions if "flash_attn_func" in vars(loaded) else {})
            vars(loaded).update({key: value for key, value in functions.items() if key in vars(loaded)})


def _loops_over_tensors() -> None:
    """Let the loops of some kernels count in tensors, as they do on a GPU; the interpreter counts in integers."""
    from triton.runtime.interpreter import _implicit_cvt

    def count(*bounds: Any) -> Any:
        return map(_implicit_cvt, range(*(int(bound) for bound in bounds)))

    for name in ("fla.ops.common.chunk_h",):
        vars(sys.modules[name])["range"] = count


def _references() -> None:
    from fla.ops.abc.naive import naive_recurrent_abc
    from fla.ops.cyfa.naive import naive_recurrent_cyfa
    from fla.ops.deltaformer.naive import naive_deltaformer_attn
    from fla.ops.log_linear_attn.naive import naive_log_linear_attn
    from fla.ops.mesa_net.naive import naive_mesa_net_CG
    from fla.ops.parallax.naive import naive_parallax
    from fla.ops.stickbreaking_attn.naive import naive_stickbreaking_attn

    def cyfa(*args: Any, cu_seqlens_cpu: Any = None, checkpoint_level: int = 0, **kwargs: Any) -> Any:
        return naive_recurrent_cyfa(*args, **kwargs)

    def parallax(*args: Any, cu_seqlens: Any = None, **kwargs: Any) -> Any:
        return naive_parallax(*args, **kwargs)

    def stickbreaking(*args: Any, cu_seqlens: Any = None, **kwargs: Any) -> Any:
        return naive_stickbreaking_attn(*args, **kwargs)

    def abc(q: Tensor, k: Tensor, v: Tensor, s: Tensor, **kwargs: Any) -> Any:
        output, state = naive_recurrent_abc(*(x.transpose(1, 2) for x in (q, k, v, s)))
        return output.transpose(1, 2), state

    def deltaformer(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **kwargs: Any) -> Tensor:
        return naive_deltaformer_attn(q, k, v, beta)

    def mesa_net(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lamb: Tensor, **kwargs: Any) -> Any:
        assert kwargs["use_qk_l2norm_in_kernel"]
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        return naive_mesa_net_CG(q, k, v, g, lamb, beta, q.shape[1])

    def log_linear(*args: Any, **kwargs: Any) -> Any:
        names = ("q", "k", "v", "g", "level_scales", "scale")
        return naive_log_linear_attn(*args, **{name: kwargs[name] for name in names if name in kwargs}), None

    _put("fla.ops.log_linear_attn.chunk", "chunk_log_linear_attn", log_linear)
    _put("fla.ops.mesa_net", "chunk_mesa_net", mesa_net)
    _put("fla.ops.abc.chunk", "chunk_abc", abc)
    _put("fla.ops.deltaformer", "deltaformer_attn", deltaformer)
    _put("fla.ops.cyfa.chunk", "chunk_cyfa", cyfa)
    _put("fla.ops.cyfa.fused_recurrent", "fused_recurrent_cyfa", cyfa)
    _put("fla.ops.parallax", "parallel_parallax", parallax)
    _put("fla.ops.stickbreaking_attn", "parallel_stickbreaking_attn", stickbreaking)
    _put("fla.ops.moba", "parallel_moba", moba)


def run_on_cpu(cls: type) -> None:
    """Let a layer's checks for a GPU accept a CPU."""
    code = cls.forward.__code__

    def accepted(constant: Any) -> Any:
        if isinstance(constant, tuple):
            return tuple(map(accepted, constant))
        return "cpu" if constant == "cuda" else constant

    cls.forward.__code__ = code.replace(co_consts=tuple(map(accepted, code.co_consts)))


def _put(module: str, name: str, function: Callable[..., Any]) -> None:
    """Replace a function in every module of the package, under the signature of the kernel."""
    import inspect

    kernel = getattr(sys.modules[module], name)

    def substitute(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    substitute.__name__, substitute.__signature__ = name, inspect.signature(kernel)
    for loaded in list(sys.modules.values()):
        if getattr(loaded, "__name__", "").startswith("fla.") and vars(loaded).get(name) is kernel:
            vars(loaded)[name] = substitute


def moba(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, chunk_size: int, topk: int) -> Tensor:
    """Lu et al., 2025, query by query: the own chunk, and those of the best mean keys among full earlier ones."""
    result = torch.zeros_like(v)
    for start, stop in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False):
        for i in range(start, stop):
            own = (i - start) // chunk_size
            for h in range(q.shape[2]):
                chunks = [slice(start + c * chunk_size, start + (c + 1) * chunk_size) for c in range(own)]
                gate = [float(q[0, i, h] @ k[0, chunk, h].mean(0)) for chunk in chunks]
                best = sorted(range(own), key=lambda c: -gate[c])[: topk - 1]
                keys = [t for c in best for t in range(chunks[c].start, chunks[c].stop)]
                keys += range(start + own * chunk_size, i + 1)
                weights = (k[0, keys, h] @ q[0, i, h] * q.shape[-1] ** -0.5).softmax(0)
                result[0, i, h] = weights @ v[0, keys, h]
    return result
