"""Growth of a separate process during one call of an operation.

In a long-running process, memory that the allocator holds from earlier calls would distort the measurement, so each
call runs this program: python -m benchmarks.growth OPERATION STRUCTURE LENGTH THREADS
"""

import logging
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks import cases
from benchmarks.cases import Case
from benchmarks.machine import as_for_large_inputs
from benchmarks.models import NARROW, PUBLISHED
from benchmarks.resident import growth
from benchmarks.rivals import Place


def grown(case: Case, threads: int) -> int | None:
    """Return the bytes by which a case of the published sizes grows a process, None where Linux's /proc is missing."""
    arguments = [case.operation, case.structure, str(case.length), str(threads)]
    command = [sys.executable, "-m", "benchmarks.growth", *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True, check=True)
    return None if done.stdout.strip() == "None" else int(done.stdout)


def main() -> None:
    """Run the case on a narrow layer, so that one-time initialisation is done, then measure it."""
    operation, structure, length, threads = sys.argv[1:]
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(int(threads))
    with torch.no_grad():
        with as_for_large_inputs("cpu"):
            cases.OPERATIONS[operation](structure, 64, Place(NARROW, "cpu")).call()
        print(growth(cases.OPERATIONS[operation](structure, int(length), Place(PUBLISHED, "cpu")).call))


if __name__ == "__main__":
    main()
