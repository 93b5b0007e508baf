"""Files and threads of compiled loops."""

import os
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba", reason="the extra `cpu` (numba) is not installed")

from unilinattn.kernels.loops import in_pieces

ROOT = Path(__file__).parents[2] / "unilinattn"


def test_compiled_code_is_in_one_file() -> None:
    # Numba compiles a stored loop again when its own file changes, but not when a function that it inlines does.
    assert [path.name for path in ROOT.rglob("*.py") if "njit" in path.read_text()] == ["loops.py"]


def called(count: int, threads: int) -> list[int]:
    pieces, before = list[int](), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        in_pieces(pieces.append, count)
    finally:
        torch.set_num_threads(before)
    return sorted(pieces)


@pytest.mark.parametrize("threads", [1, 2])
def test_every_piece_is_computed_once(threads: int) -> None:
    assert called(5, threads) == [0, 1, 2, 3, 4]


def test_an_error_in_a_thread_is_raised() -> None:
    def fail(piece: int) -> None:
        raise ArithmeticError(f"piece {piece}")

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(ArithmeticError, match="piece 0"):
            in_pieces(fail, 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked on this system")
def test_a_forked_process_starts_threads_of_its_own() -> None:
    assert called(5, 2) == [0, 1, 2, 3, 4]
    child = os.fork()
    if child == 0:
        # A pool without threads would never return.
        os._exit(0 if called(5, 2) == [0, 1, 2, 3, 4] else 1)
    for _ in range(100):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the forked process did not finish within ten seconds")
    assert os.waitstatus_to_exitcode(status) == 0
