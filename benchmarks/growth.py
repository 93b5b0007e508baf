"""How much a process of its own grows by one call of an operation.

What a long process holds in pieces would count in its own growth, so each call has a process, which is this program:
python -m benchmarks.growth OPERATION STRUCTURE LENGTH THREADS
"""

import logging
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks import cases
from benchmarks.cases import Case, Place
from benchmarks.memory import growth
from benchmarks.models import NARROW, PUBLISHED


def grown(case: Case, threads: int) -> int | None:
    """Return how many bytes a process grows by a case of the published sizes, None where no system tells."""
    arguments = [case.operation, case.structure, str(case.length), str(threads)]
    command = [sys.executable, "-m", "benchmarks.growth", *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True, check=True)
    return None if done.stdout.strip() == "None" else int(done.stdout)


def main() -> None:
    """Set up the case, run it once on a narrow layer for what is set up once, then measure."""
    operation, structure, length, threads = sys.argv[1:]
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(int(threads))
    with torch.no_grad():
        cases.OPERATIONS[operation](structure, 64, Place(NARROW, "cpu")).call()
        print(growth(cases.OPERATIONS[operation](structure, int(length), Place(PUBLISHED, "cpu")).call))


if __name__ == "__main__":
    main()
