"""How much a process of its own grows by each operation: what no count of tensors sees is in this."""

import os
import subprocess
import sys

import pytest

MIB = 1 << 20

PROGRAM = """
import sys

import torch

from unilinattn.mixers import DiagonalDecay
from unilinattn.operator import MixerOperator
from unilinattn.stages import Matrix, Mix

torch.set_num_threads(1)


def layer(length, heads, state):
    query, key = torch.randn(1, length, 1, state), torch.randn(1, length, 1, state)
    mixer = DiagonalDecay(query, key, -torch.rand(1, length, heads, 1), rate=torch.rand(heads, state))
    x = torch.randn(1, length, heads)
    chain = Mix("core", mixer), Matrix("output", torch.randn(heads, heads))
    return MixerOperator({"x": chain}, inputs={"x": x}, output=torch.zeros_like(x))


def run(operation, length, heads, state):
    op = layer(length, heads, state)
    row = torch.randn(1, length)
    yield
    if operation == "reduced map":
        op.matrix()
    elif operation == "scan":
        op.left_multiply(row[:, None])
        op.rows(-1)
        op.apply(op.inputs)
    elif operation == "streamed":
        op.streamed(row, row, "clamp")
    elif operation == "contribution norms":
        for tile in op.shares().tiles(True):
            tile.norms(1.0)


def used():
    # Not ru_maxrss: that begins with what the process that started this one had.
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])


with torch.no_grad():
    operation, *sizes = sys.argv[1], *map(int, sys.argv[2:])
    # What is set up once is not the operation's.
    list(run(operation, 130, 8, 4))
    steps = run(operation, *sizes)
    next(steps)
    before = used()
    list(steps)
    print(1024 * (used() - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status, which Linux has")
@pytest.mark.parametrize(
    ("operation", "sizes", "held_otherwise", "most"),
    [
        # Beside its result, (L, L), of 4 MiB; the map of every head would be held otherwise.
        ("reduced map", (1024, 256, 8), 256 * 1024**2, 56),
        # The states of every token, or a map.
        ("scan", (16384, 128, 16), 16384 * 128 * 16, 48),
        ("streamed", (8192, 16, 8), 8192**2, 128),
        # The vectors of all pairs.
        ("contribution norms", (512, 256, 8), 512**2 * 256, 32),
    ],
)
def test_an_operation_makes_its_process_grow_by_far_less(
    operation: str, sizes: tuple[int, ...], held_otherwise: int, most: int
) -> None:
    # Else glibc keeps large tensors after they are freed, more or fewer of them from run to run.
    own = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", PROGRAM, operation, *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=own)
    grown = int(done.stdout)
    assert 0 < grown < most * MIB < 4 * held_otherwise
