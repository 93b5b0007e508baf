"""Growth of a separate process during each operation, including memory outside of tensors."""

import json
import os
import platform
import subprocess
import sys

import pytest

MIB = 1 << 20

PROGRAM = """
import json
import sys
from importlib.util import find_spec

import torch

from unilinattn.kernels.backend import using
from unilinattn.memory import max_memory
from unilinattn.mixers import DiagonalDecay
from unilinattn.operator.operator import MixerOperator
from unilinattn.operator.stages import Matrix, Mix

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
    elif operation == "row maxima":
        with max_memory(8 << 20):
            op.matrix(heads="max")
    elif operation == "scan":
        op.left_multiply(row[:, None])
        op.rows(-1)
        op.apply(op.inputs)
    elif operation == "row product":
        op.row_product(row, row, "clamp")
    elif operation == "contribution norms":
        for tile in op.pairwise().tiles(True):
            tile.norms(1.0)


def used(field):
    # Not ru_maxrss: that begins with what the process that started this one had.
    return int(next(line for line in open("/proc/self/status") if line.startswith(field)).split()[1])


with torch.no_grad():
    for operation, sizes in json.loads(sys.argv[1]).items():
        # What is set up once is not the operation's: the large inputs use Numba.
        with using("numba" if find_spec("numba") else None):
            list(run(operation, 130, 8, 4))
        steps = run(operation, *sizes)
        next(steps)
        open("/proc/self/clear_refs", "w").write("5")  # the highest use so far is forgotten
        before = used("VmRSS")
        list(steps)
        print(1024 * (used("VmHWM") - before))
        del steps
"""

OPERATIONS = {
    # A result (L, L) of 4 MiB; the alternative is the map of every head.
    "reduced map": ((1024, 256, 8), 256 * 1024**2, 56),
    # Blocks of rows and channels, and a result of 1 MiB; the alternative is the map of every channel.
    "row maxima": ((512, 512, 16), 512 * 512**2, 24),
    # The alternatives: the states of every token, and a map.
    "scan": ((16384, 128, 16), 16384 * 128 * 16, 48),
    "row product": ((8192, 16, 8), 8192**2, 128),
    # The alternative: the vectors of all pairs.
    "contribution norms": ((512, 256, 8), 512**2 * 256, 32),
}
"""Sizes of each operation, the elements of its alternative, and the largest growth in MiB."""


def growths_of(program: str, *arguments: str) -> list[int]:
    """Bytes that `program` prints when freed tensors go back to the system at once.

    By default glibc keeps a varying number of freed large tensors: one program grew by 495 to 546 MB in four runs,
    and by 370 MB in this way.
    """
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc/self/status")
def test_the_growth_of_the_process_is_bounded() -> None:
    growths = growths_of(PROGRAM, json.dumps({operation: sizes for operation, (sizes, _, _) in OPERATIONS.items()}))
    for (operation, (_, alternative, most)), grown in zip(OPERATIONS.items(), growths, strict=True):
        assert 0 < grown < most * MIB < 4 * alternative, operation


GRADIENT = """
import ctypes
import sys
from importlib.util import find_spec

import torch
from transformers import MambaConfig, MambaForCausalLM

import unilinattn as ula
from unilinattn import memory
from unilinattn.kernels.backend import using
from unilinattn.host import recomputation

torch.set_num_threads(1)
memory.SLACK = 0  # this model is small
if sys.argv[1] == "kept":
    recomputation.return_free_pages = lambda: None


def used(field):
    return int(next(line for line in open("/proc/self/status") if line.startswith(field)).split()[1])


torch.manual_seed(0)
model = MambaForCausalLM(MambaConfig(num_hidden_layers=20, hidden_size=256, vocab_size=50)).eval()
with using("numba" if find_spec("numba") else None):  # which long inputs use: loaded before the measurement
    ula.trace(model, torch.randint(50, (1, 8)), progress=False).gradient(-1)
found = ula.trace(model, torch.randint(50, (1, 512)), progress=False)
for layer in found.layers:
    layer.operator
# Free pages of the trace are returned, so that none of them serves the gradient.
ctypes.CDLL(None).malloc_trim(0)
open("/proc/self/clear_refs", "w").write("5")  # the highest use so far is forgotten
before = used("VmRSS")
found.gradient(-1)
print(1024 * (used("VmHWM") - before))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's malloc_trim")
def test_gradients_return_the_free_pages_of_earlier_layers() -> None:
    def grown(pages: str) -> int:
        command = [sys.executable, "-c", GRADIENT, pages]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert 0 < grown("returned") < 0.6 * grown("kept")


FROZEN = """
import torch
import transformers

import unilinattn as ula

torch.set_num_threads(1)


def used(field):
    return int(next(line for line in open("/proc/self/status") if line.startswith(field)).split()[1])


torch.manual_seed(0)
shape = dict(num_hidden_layers=2, hidden_size=64, vocab_size=256, state_size=16)
for model in (
    transformers.MambaForCausalLM(transformers.MambaConfig(**shape)),
    transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**shape, head_dim=16, num_heads=8, n_groups=1)),
):
    found = ula.trace(model.eval(), torch.randint(256, (1, 32768)), progress=False)
    open("/proc/self/clear_refs", "w").write("5")  # the highest use so far is forgotten
    before = used("VmRSS")
    ula.explain(found, method="logit", target=-1)
    print(1024 * (used("VmHWM") - before))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's malloc_trim")
def test_exact_shares_of_32768_tokens_take_a_quarter_of_a_gibibyte() -> None:
    growths = growths_of(FROZEN)
    assert [0 < grown < 256 * MIB for grown in growths] == [True, True], growths
