"""flash-linear-attention's Triton kernels on a CPU, with Triton's interpreter and a substitute for the GPU driver.

Functions that are compiled only for CUDA, flash-attn's among them, are replaced by their formulas (see `stand_ins`).

Run in a separate process, `python -m pytest tests/fla`, because Triton selects its interpreter when it is imported. In
other processes, and if the package is missing or hidden, these tests are skipped.
"""

import importlib.util
import os
import sys
import types
import warnings

import pytest
import torch

from tests.fla.stand_ins import replace_kernels


def _reason_to_skip() -> str | None:
    try:
        spec = importlib.util.find_spec("fla")
    except ModuleNotFoundError:
        return "flash-linear-attention is hidden from this process"
    if spec is None:
        return "flash-linear-attention is not installed"
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton was imported without its interpreter; run these tests in a separate process"
    return None


REASON = _reason_to_skip()
if REASON is None:
    os.environ["TRITON_INTERPRET"] = "1"
    # torch.compile of some functions would take longer than all tests.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    """Let the package's kernels run in Triton's interpreter, or skip."""
    if REASON is not None:
        pytest.skip(REASON)
    stand_in()


def stand_in() -> None:
    """Import the package with substitutes for a driver, a function of libdevice, and functions that need a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import fla  # noqa: F401  initialises the package
    import triton

    # At its import the package must find no GPU; its kernels request a driver later.
    triton.runtime.driver.set_active(_driver())
    _complete_libdevice()
    replace_kernels()


def _driver():
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class StandIn(DriverBase):
        """The driver queries of kernels before they are interpreted."""

        utils = types.SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448, "multiprocessor_count": 1}
        )

        @classmethod
        def is_active(cls):
            return True

        def map_python_to_cpp_type(self, ty):
            raise NotImplementedError("nothing is compiled here")

        def get_current_device(self):
            return 0

        def get_current_target(self):
            return GPUTarget("cuda", 80, 32)

        def get_active_torch_device(self):
            return torch.device("cpu")

        def get_benchmarker(self):
            # All configurations are equally fast here, so the autotuner takes the first.
            return lambda call, *, quantiles, **options: [0.0] * len(quantiles)

    return StandIn()


def _complete_libdevice() -> None:
    """Add the function of CUDA's libdevice that LightNet's gate calls and Triton's interpreter lacks."""
    import triton.language as tl
    from triton.language.extra import libdevice

    libdevice.log1p = lambda x: tl.log(1.0 + x)
