"""Compile every Triton kernel for sm_90 without a GPU; run in a separate process, outside the interpreter."""

from __future__ import annotations

import inspect
import sys
import time
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

TARGET = GPUTarget("cuda", 90, 32)

# Parameters of these names are pointers to float32; all others are 64-bit integers.
POINTERS = {
    "reduced_map": {"query", "key", "decay", "left", "tap", "read", "written", "total", "write", "fade", "out"}
    | {"row_weight", "row_scale"},
    "scan": {"read", "write", "query", "key", "decay", "rate", "scale", "value", "grad", "entering", "total", "out"}
    | {"states", "before", "after"}
    | {f"{name}_grad" for name in ("query", "key", "decay", "rate", "scale", "value")},
    "chunk_states": {"transition", "states"},
    "toeplitz_map": {"kernel", "left", "tap", "query", "key", "out"},
    "contribution_norms": {"vectors", "weight", "reference", "out"},
}


def compiled(kernel: Any, pointers: set[str], constants: dict[str, Any], **options: int) -> int:
    """Compile one kernel and return the bytes of its machine code."""
    function = kernel
    while not isinstance(function, triton.runtime.jit.JITFunction):
        function = function.fn
    signature = {}
    for name in inspect.signature(function.fn).parameters:
        if name in constants:
            signature[name] = "constexpr"
        elif name == "p":
            signature[name] = "fp32"
        elif name == "reset":
            signature[name] = "*i1"
        else:
            signature[name] = "*fp32" if name in pointers else "i64"
    source = triton.compiler.ASTSource(fn=function, signature=signature, constexprs=constants)
    return len(triton.compile(source, target=TARGET, options=options).asm["cubin"])


def cases() -> list[tuple[str, Any, set[str], dict[str, Any], dict[str, int]]]:
    from unilinattn.kernels.chunk_states import triton_kernels as states
    from unilinattn.kernels.contribution_norms import triton_kernels as norms
    from unilinattn.kernels.reduced_map import triton_kernels as reduced
    from unilinattn.kernels.scan import triton_diagonal, triton_scalar
    from unilinattn.kernels.toeplitz_map import triton_kernels as toeplitz

    pointers = POINTERS["reduced_map"]
    kernels = []
    for flag in (False, True):
        constants = {"LEFT": flag, "READ": flag, "CHUNK": 64, "INNER": 64}
        kernels.append(("chunk_factors", reduced.chunk_factors, pointers, constants, {"num_warps": 8}))
    for kind, sign, planes, precision in (
        ("add", "keep", 1, "ieee"),
        ("add", "keep", 2, "tf32"),
        ("band", "keep", 2, "bf16"),
        ("fold", "clamp", 1, "tf32x3"),
        ("fold", "abs", 2, "bf16"),
    ):
        constants = {"PLANES": planes, "CHUNK": 64, "KIND": kind, "PHI": sign, "PRECISION": precision}
        constants |= {"ROWS": 64, "COLS": 64, "INNER": 32}
        kernels.append((f"far_tiles {kind} {precision}", reduced.far_tiles, pointers, constants, {"num_stages": 3}))
    for flag, precision in ((False, "ieee"), (True, "bf16")):
        constants = {"LEFT": flag, "TAP": flag, "CHUNK": 64, "BAND": flag, "PRECISION": precision, "INNER": 32}
        kernels.append((f"diagonal_tiles {precision}", reduced.diagonal_tiles, pointers, constants, {}))
    pointers = POINTERS["scan"]
    for flag in (False, True):
        shared = {"RATE": flag, "SCALE": flag, "RESET": flag, "ONE": flag, "TOKENS": 16, "ROWS": 8, "STATES": 16}
        for leaves in (False, True):
            constants = shared | {"ENTERS": not leaves, "LEAVES": leaves, "REVERSE": flag}
            kernels.append(
                ("diagonal_segments", triton_diagonal.diagonal_segments, pointers - {"states"}, constants, {})
            )
            constants = {
                "ENTERS": not leaves,
                "LEAVES": leaves,
                "REVERSE": flag,
                "PRECISION": "tf32" if flag else "ieee",
            }
            constants |= {"CHUNK": 32, "COLUMNS": 32, "STATES": 128}
            wide = {"num_warps": 8, "num_stages": 1}
            kernels.append(("scalar_segments", triton_scalar.scalar_segments, pointers - {"states"}, constants, wide))
        constants = shared | {"NARROW": flag}
        kernels.append(("diagonal_gradients", triton_diagonal.diagonal_gradients, pointers - {"states"}, constants, {}))
    kernels.append(("carry", triton_diagonal.carry, pointers, {"SIZE": 256}, {}))
    constants = {"PRECISION": "ieee", "CHUNK": 32, "COLUMNS": 32, "STATES": 128}
    kernels.append(
        ("scalar_decay_gradient", triton_scalar.scalar_decay_gradient, pointers - {"states"}, constants, wide)
    )
    for size in (64, 128, 256):
        constants = {"DIAGONAL": False, "STATES": size, "COLUMNS": 32 if size <= 128 else 16, "INNER": 32}
        name = f"carry_chunks {size}"
        kernels.append((name, states.carry_chunks, POINTERS["chunk_states"], constants, wide))
    constants = {"DIAGONAL": True, "STATES": 64, "COLUMNS": 32, "INNER": 32}
    kernels.append(("carry_chunks diagonal", states.carry_chunks, POINTERS["chunk_states"], constants, wide))
    for low_rank in (False, True):
        for config in toeplitz.CONFIGS:
            sizes = {name: size for name, size in config.items() if name != "num_warps"}
            constants = {"LOW_RANK": low_rank, **sizes}
            options = {"num_warps": config["num_warps"]}
            kernels.append(("weighted_tiles", toeplitz.weighted_tiles, POINTERS["toeplitz_map"], constants, options))
    for kind, precision in (("l2", "ieee"), ("alti", "tf32"), ("lp", "bf16")):
        constants = {"KIND": kind, "PRECISION": precision, "OUT": norms.OUT, "PAIRS": 128, "CHANNELS": 32}
        pointers = POINTERS["contribution_norms"]
        kernels.append((f"pair_norms {kind}", norms.pair_norms, pointers, constants, {"num_warps": 8, "num_stages": 3}))
    return kernels


if __name__ == "__main__":
    for name, kernel, pointers, constants, options in cases():
        begun = time.perf_counter()
        size = compiled(kernel, pointers, constants, **options)
        print(f"{name}: {size} bytes, {time.perf_counter() - begun:.1f} s", flush=True)
    sys.exit(0)
