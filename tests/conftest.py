"""Configuration of the tests: offline, one thread, fixed seeds; options for thorough runs and for margins."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import gc
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch

# Triton reads this variable when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from hypothesis import settings

import tests.signatures
from tests.interpreter import quicken
from tests.margins import Recorder
from tests.quick import mark_combinations


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        action="store_true",
        help="check shapes and types at some calls of each function, and draw more examples, as CI does",
    )
    parser.addoption("--threads", type=int, default=1, help="number of torch's threads (default: %(default)s)")
    parser.addoption(
        "--margins",
        type=Path,
        metavar="FILE",
        help="write the margin of every comparison; `python -m tests.margins` runs variants of the processor",
    )


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(config.getoption("--threads"))
    settings.load_profile("thorough" if config.getoption("--thorough") else "quick")
    if config.getoption("--thorough"):
        # The frames of the checker move the line that a warning names into the package, where warnings are errors.
        config.addinivalue_line("filterwarnings", "default:attention sink")
        loaded = [name for name in sys.modules if name.split(".")[0] == "unilinattn"]
        if loaded:
            raise pytest.UsageError(f"--thorough cannot check modules that are already imported: {loaded[:3]}.")
        tests.signatures.install("unilinattn")
    if config.getoption("--margins"):
        config.pluginmanager.register(Recorder(config.getoption("--margins")))


# The markers decide which tests the option `-m` leaves out.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = mark_combinations(items)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    # Modules of tests that run kernels have imported Triton by now.
    quicken()
    # The garbage collector would look through all imported modules and collected tests, which takes half a second.
    gc.freeze()


for name, examples in (("quick", 6), ("thorough", 12)):
    settings.register_profile(name, derandomize=True, deadline=None, max_examples=examples, print_blob=True)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed all random generators before every test; afterwards shared traces must be what they were."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    tests.signatures.next_test(request.path)
    yield
    # Imported late, because a thorough run checks modules of the package that are imported after its configuration.
    if "tests.shared" in sys.modules:
        sys.modules["tests.shared"].require_unwritten()


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the checks of a thorough run, whose errors would precede those of the library."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
