"""The test run: offline, one thread, the same seeds, and every signature of the package checked."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import random

import numpy as np
import pytest
import torch

# Before anything imports Triton, which decides at its import whether it interprets its kernels on the CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from hypothesis import settings
from jaxtyping import install_import_hook

import tests.signatures

# Before anything imports the package: from here on every call checks the shapes and types of its arguments.
install_import_hook("unilinattn", f"{tests.signatures.__name__}.check")

torch.set_num_threads(1)

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=20, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
