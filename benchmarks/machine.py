"""Description of the machine of a run, without host names or paths."""

import os
import platform
from contextlib import AbstractContextManager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from unilinattn.analysis import report
from unilinattn.kernels.backend import using

AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "",
}
"""Environment variables that limit torch, its libraries and Numba to the vector instructions of AVX2."""

PACKAGES = ("torch", "numba", "transformers", "unilinattn")


def machine(device: str) -> dict[str, str | int]:
    """Describe the processor, the memory and the versions."""
    common = report.machine()
    description: dict[str, str | int] = {
        "cpu": _processor(),
        "cores": common["cores"],
        "threads": common["threads"],
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        description["gpu"] = properties.name
        description["gpu memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
    versions = {name: version(name) for name in PACKAGES if find_spec(name)}
    return {**description, "python": platform.python_version(), **versions, "torch": torch.__version__}


def versions_of(described: dict[str, str | int]) -> str:
    """Return the versions that a description of `machine` names."""
    return ", ".join(f"{name} {described[name]}" for name in PACKAGES if name in described)


def as_for_large_inputs(device: str) -> AbstractContextManager[None]:
    """Use the kernels of large inputs inside a `with` block for small ones too, which are checked instead of them."""
    return using("numba" if device == "cpu" and find_spec("numba") else None)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name = next(named, "") or platform.processor() or platform.machine()
    wide = next((f for f in ("avx512f", "avx2", "asimd") if any(f in line.split() for line in lines)), "")
    limited = " limited to avx2" if wide == "avx512f" and uses_avx2() else ""
    return f"{name}, {platform.machine()}{f', {wide}' if wide else ''}{limited}"


def uses_avx2() -> bool:
    """Return whether torch uses the vector instructions of AVX2, not those of AVX-512."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"
