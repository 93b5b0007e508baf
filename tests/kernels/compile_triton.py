"""Compile every Triton kernel for sm_90 without a GPU; run in a separate process, outside the interpreter."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from unilinattn.kernels.launch import Factor

TARGET = GPUTarget("cuda", 90, 32)

FACTOR = Factor("*fp32", "i64", "i64", "i64", "i64")
FACTORS = ("query", "key", "decay", "left", "tap", "read", "write", "rate", "scale", "value", "grad", "kernel")
POINTERS = ("out", "total", "near", "entering", "leaving", "before", "after", "transition", "written")
GRADIENTS = ("query", "key", "decay", "rate", "scale", "value")
ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys((*FACTORS, "row_weight", "row_scale"), FACTOR),
    **dict.fromkeys((*POINTERS, *(f"{name}_grad" for name in GRADIENTS)), "*fp32"),
    "reset": FACTOR._replace(data="*i1"),
}
"""Types of parameters: factors with strides, and pointers; all others are integers."""


def compiled(kernel: Any, types: dict[str, Any], constants: dict[str, Any], integer: str, **options: int) -> int:
    """Compile one kernel for integers of a type and return the bytes of its machine code."""
    function = kernel
    while not isinstance(function, triton.runtime.jit.JITFunction):
        function = function.fn
    names = inspect.signature(function.fn).parameters
    known = ARGUMENTS | types
    signature = {
        name: "constexpr" if name in constants else _with_integer(known.get(name, "i64"), integer) for name in names
    }
    source = triton.compiler.ASTSource(fn=function, signature=signature, constexprs=constants)
    return len(triton.compile(source, target=TARGET, options=options).asm["cubin"])


def _with_integer(types: Any, integer: str) -> Any:
    """Return the type of an argument, or those of a record, with integers of a type."""
    if isinstance(types, tuple):
        return type(types)(*(_with_integer(each, integer) for each in types))
    return integer if types == "i64" else types


def cases() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, Any], dict[str, int]]]:
    """Yield the name of each case, its kernel, the types of further arguments, its constants and its options."""
    from unilinattn.kernels.checksum import triton as checksum
    from unilinattn.kernels.chunk_states import triton_kernels as states
    from unilinattn.kernels.contribution_norms import triton_kernels as norms
    from unilinattn.kernels.reduced_map import triton_kernels as reduced
    from unilinattn.kernels.scan import triton_diagonal, triton_scalar
    from unilinattn.kernels.toeplitz_map import triton_kernels as toeplitz

    def sizes(record: Any) -> dict[str, Any]:
        return {"sizes": record(*["i64"] * len(record._fields))}

    def missing(*names: str) -> dict[str, Any]:
        return dict.fromkeys(names)

    types: dict[str, Any] = {"read": "*fp32"}
    for absent in (missing("left", "read"), {}):
        yield "chunk_factors", reduced.chunk_factors, types, {"CHUNK": 64, "INNER": 64, **absent}, {"num_warps": 8}
    types = {**sizes(reduced.PanelSizes), **dict.fromkeys(("read", "write", "fade"), "*fp32")}
    for kind, sign, planes, precision in (
        ("add", "keep", 1, "ieee"),
        ("add", "keep", 2, "tf32"),
        ("band", "keep", 2, "bf16"),
        ("fold", "clamp", 1, "tf32x3"),
        ("fold", "abs", 2, "bf16"),
    ):
        constants = {"PLANES": planes, "CHUNK": 64, "KIND": kind, "SIGN": sign, "PRECISION": precision}
        constants |= {"ROWS": 64, "COLS": 64, "INNER": 32}
        constants |= {} if kind == "fold" else missing("row_weight", "row_scale")
        yield f"far_tiles {kind} {precision}", reduced.far_tiles, types, constants, {"num_stages": 3}
    partial = {"partial": "*fp32"}
    for weights, precision in ((missing("left", "tap"), "ieee"), ({}, "tf32x3"), ({"rows": 1, "states": 1}, "bf16")):
        constants = {"CHUNK": 64, "PRECISION": precision, "INNER": 32, **weights}
        yield f"diagonal_tiles {precision}", reduced.diagonal_tiles, partial, constants, {}
    for band, single in ((False, {}), (True, {"parts": 1, "rows": 1, "start": 1, "lag": 1})):
        yield "add_parts", reduced.add_parts, partial, {"CHUNK": 64, "BAND": band, **single}, {}
    diagonal, scalar = sizes(triton_diagonal.Sizes), sizes(triton_scalar.Sizes)
    wide = {"num_warps": 8, "num_stages": 1}
    for flag, factors in ((False, missing("rate", "scale", "reset")), (True, {})):
        shared = {"ONE_HEAD": flag, "TOKENS": 16, "ROWS": 8, "STATES": 16, **factors}
        for ends in (missing("entering", "out"), missing("leaving", "total")):
            constants = {**shared, **ends, "REVERSE": flag}
            yield "diagonal_segments", triton_diagonal.diagonal_segments, diagonal, constants, {}
            constants = {"REVERSE": flag, "PRECISION": "tf32" if flag else "ieee", **ends}
            constants |= {"CHUNK": 32, "COLUMNS": 32, "STATES": 128}
            yield "scalar_segments", triton_scalar.scalar_segments, scalar, constants, wide
        absent = {f"{name}_grad": None for name in factors if name != "reset"}
        constants = {**shared, **absent, "NARROW": flag}
        yield "diagonal_gradients", triton_diagonal.diagonal_gradients, diagonal, constants, {}
    carried = {"states": "*fp32"}
    yield "carry", triton_diagonal.carry, carried, {"SIZE": 256}, {}
    constants = {"PRECISION": "ieee", "CHUNK": 32, "COLUMNS": 32, "STATES": 128}
    yield "scalar_decay_gradient", triton_scalar.scalar_decay_gradient, scalar, constants, wide
    for size in (64, 128, 256):
        constants = {"DIAGONAL": False, "STATES": size, "COLUMNS": 32 if size <= 128 else 16, "INNER": 32}
        yield f"carry_chunks {size}", states.carry_chunks, carried, constants, wide
    constants = {"DIAGONAL": True, "STATES": 64, "COLUMNS": 32, "INNER": 32}
    yield "carry_chunks diagonal", states.carry_chunks, carried, constants, wide
    for absent in (missing("query", "key"), {}):
        for config in toeplitz.CONFIGS:
            constants = {**absent, **config}
            options = {"num_warps": constants.pop("num_warps")}
            yield "weighted_tiles", toeplitz.weighted_tiles, {}, constants, options
    words = dict.fromkeys(("words", "sums"), "*i64")
    yield "chunk_sums", checksum.chunk_sums, words, {"CHUNK": 32768, "BLOCK": 1024}, {}
    yield from per_head_cases()
    types = {"p": "fp32", **dict.fromkeys(("vectors", "weight", "reference"), "*fp32")}
    for kind, precision in (("l2", "ieee"), ("alti and l1", "tf32x3"), ("alti", "tf32"), ("lp", "bf16")):
        constants = {"KIND": kind, "PRECISION": precision, "OUT": norms.OUT, "PAIRS": 128, "CHANNELS": 32}
        yield f"pair_norms {kind}", norms.pair_norms, types, constants, {"num_warps": 8, "num_stages": 3}


def per_head_cases() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, Any], dict[str, int]]]:
    """Yield the cases of the weighted map."""
    from unilinattn.kernels.weighted_map import triton_kernels as per_head

    # An argument of one is a constant in the kernel that a launch compiles.
    ones = {"heads": 1, "states": 1}
    for reach, size, precision, single in (
        (3, 16, "tf32x3", {}),
        (0, 64, "ieee", {}),
        (1, 16, "tf32x3", ones),
    ):
        constants = {"REACH": reach, "PRECISION": precision, "STATES": size, **single}
        rows = {"rows": 1} if single else {"left": None} if reach == 0 else {}
        types = {"read": "*fp32", "write": "*fp32", "taps": FACTOR, "crossed": FACTOR}
        yield f"head_squares {precision}", per_head.head_squares, types, {**constants, **rows, "PAIRS": 16}, {}
        columns = {"tokens": 1, "width": 1, "blocks": 1} if single else {}
        yield f"head_writes {precision}", per_head.head_writes, types, {**constants, **columns}, {"num_warps": 1}


if __name__ == "__main__":
    kernels = set()
    for name, kernel, types, constants, options in cases():
        begun = time.perf_counter()
        # A launch passes integers of 32 bits, or of 64 where they need them; one case of a kernel shows that it can.
        integers = ("i32",) if id(kernel) in kernels else ("i32", "i64")
        kernels.add(id(kernel))
        sizes = [compiled(kernel, types, constants, integer, **options) for integer in integers]
        print(f"{name}: {sizes[0]} bytes, {time.perf_counter() - begun:.1f} s", flush=True)
    sys.exit(0)
