"""flash-linear-attention's Triton kernels on a CPU, with Triton's interpreter and a substitute for the GPU driver.

Its softmax attention calls flash-attn, which is compiled only for CUDA: that function is replaced by its documented
formula.

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
    """Import the package with substitutes for a driver, a function of libdevice, and two functions of flash-attn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import fla  # noqa: F401  initialises the package
    import triton

    # At its import the package must find no GPU; its kernels request a driver later.
    triton.runtime.driver.set_active(_driver())
    _complete_libdevice()
    if importlib.util.find_spec("flash_attn") is None:
        from fla.layers import attn

        attn.flash_attn_func, attn.flash_attn_varlen_func = _flash_attention, _flash_attention_of_sequences


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


def _flash_attention(query, key, value, *, causal, window_size):
    """flash-attn's `flash_attn_func`: (batch, length, head, channel), scaled by channel ** -0.5."""
    assert causal and window_size[1] in (-1, 0)
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    scores = torch.einsum("bihn,bjhn->bhij", query, key) * query.shape[-1] ** -0.5
    position = torch.arange(query.shape[1])
    distance = position[:, None] - position
    hidden = (distance < 0) | ((distance > window_size[0]) if window_size[0] >= 0 else False)
    return torch.einsum("bhij,bjhn->bihn", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


def _flash_attention_of_sequences(
    query, key, value, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size
):
    """flash-attn's `flash_attn_varlen_func`: sequences concatenated on the first axis, attended separately."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    sizes = cu_seqlens_q.diff().tolist()
    parts = zip(*(x.split(sizes) for x in (query, key, value)), strict=True)
    results = (_flash_attention(*(x[None] for x in part), causal=causal, window_size=window_size) for part in parts)
    return torch.cat([result[0] for result in results])
