"""Page faults of a repeated map: the tiles of its heads reuse the same memory."""

import os
import subprocess
import sys

import pytest

from unilinattn.kernels.reduced_map.tiled import INNER

LENGTH, HEADS, STATE = 512, 1536, 8

PROGRAM = """
import resource
import sys

import torch

from unilinattn.mixers import DiagonalDecay

torch.set_num_threads(1)
length, heads, state = map(int, sys.argv[1:])
query, key = torch.randn(1, length, 1, state), torch.randn(1, length, 1, state)
scale = torch.rand(1, length, heads)
mixer = DiagonalDecay(query, key, -scale.unsqueeze(-1), key_scale=scale, rate=torch.rand(heads, state))
with torch.no_grad():
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _block in mixer.reduced_rows(length):
            pass
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is told when to return memory")
def test_a_repeated_map_allocates_little_more_than_its_factors() -> None:
    # By default glibc keeps a varying number of freed large tensors.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", PROGRAM, *map(str, (LENGTH, HEADS, STATE))]
    asked = int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)
    # Keys and decays of every head, computed for each tile, and one set of buffers for all tiles.
    # Without these buffers it is five times the factors.
    factors, tile = 2 * LENGTH * HEADS * STATE * 4, LENGTH * INNER * 4
    assert factors / 2 < asked < 1.2 * (factors + 6 * tile + 2 * LENGTH**2 * 4)
