"""Products of float32 are not rounded to fewer bits in operators and in runs of a host, whatever torch is set to."""

from collections.abc import Callable, Iterator
from threading import Thread

import pytest
import torch
from torch import backends

from unilinattn import trace
from unilinattn.kernels.precision import OPERATIONS, full_precision
from unilinattn.testing.hosts import host


def precisions() -> list[str]:
    return [operation.fp32_precision for operation in OPERATIONS]


def by_operation() -> None:
    backends.cuda.matmul.fp32_precision = backends.mkldnn.matmul.fp32_precision = "tf32"


SETTINGS: dict[str, Callable[[], None]] = {
    "torch's own": lambda: None,
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "by operation": by_operation,
}


@pytest.fixture(params=SETTINGS)
def before(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    SETTINGS[request.param]()
    yield precisions()
    torch.set_float32_matmul_precision("highest")


def test_products_are_exact_inside_and_as_set_after(before: list[str]) -> None:
    assert {*before} & {"tf32", "bf16"}
    with full_precision(), full_precision():
        assert {*precisions()} <= {"ieee", "none"}
    assert precisions() == before


def test_the_last_of_two_threads_restores_the_settings(before: list[str]) -> None:
    first = full_precision()
    first.__enter__()
    second = full_precision()
    other = Thread(target=second.__enter__)
    other.start()
    other.join()
    first.__exit__(None, None, None)
    assert {*precisions()} <= {"ieee", "none"}
    second.__exit__(None, None, None)
    assert precisions() == before


def test_a_run_of_a_host_rounds_no_factors(before: list[str]) -> None:
    model, inside = host("mamba").model(), []
    model.register_forward_pre_hook(lambda *_: inside.append(precisions()))
    trace(model, host("mamba").inputs())
    assert inside and all({*each} <= {"ieee", "none"} for each in inside)
    assert precisions() == before
