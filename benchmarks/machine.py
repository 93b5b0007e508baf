"""Description of the machine of a run, without host names or paths."""

import os
import platform
from pathlib import Path

import torch
import transformers

import unilinattn
from unilinattn.evaluation import report


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
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "unilinattn": unilinattn.__version__,
    }
    return {**description, **versions}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name = next(named, "") or platform.processor() or platform.machine()
    wide = next((f for f in ("avx512f", "avx2", "asimd") if any(f in line.split() for line in lines)), "")
    return f"{name}, {platform.machine()}{f', {wide}' if wide else ''}"
