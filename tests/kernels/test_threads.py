"""Threads of compiled loops."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from unilinattn.kernels import threads
from unilinattn.kernels.threads import in_pieces


@pytest.fixture(params=["openmp", "pool"])
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test on the threads of torch, and on those of a pool."""
    if request.param == "pool":
        monkeypatch.setattr(threads, "_openmp", lambda: None)
    elif threads._openmp() is None:
        pytest.skip("torch's OpenMP runtime has no GOMP_parallel here")
    return request.param


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def called(count: int) -> list[int]:
    pieces = list[int]()
    in_pieces(pieces.append, count)
    return sorted(pieces)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 100])
@pytest.mark.parametrize("available", [1, 2, 3])
def test_every_piece_is_computed_once(runtime: str, count: int, available: int) -> None:
    torch.set_num_threads(available)
    assert called(count) == list(range(count))


def in_two_threads(act: Callable[[int], None]) -> None:
    """Call `act` with both of two numbers, each in a thread that waits for the other."""
    barrier = threading.Barrier(2, timeout=30)

    def piece(number: int) -> None:
        barrier.wait()
        act(number)

    in_pieces(piece, 2)


def test_two_pieces_run_at_the_same_time(runtime: str) -> None:
    idents = set[int]()
    in_two_threads(lambda _: idents.add(threading.get_ident()))
    assert len(idents) == 2


def test_an_error_in_either_thread_is_raised(runtime: str) -> None:
    main = threading.get_ident()

    def fail(here: bool) -> Callable[[int], None]:
        def act(number: int) -> None:
            if (threading.get_ident() == main) == here:
                raise ArithmeticError(f"piece {number}")

        return act

    with pytest.raises(ArithmeticError, match="piece"):
        in_two_threads(fail(False))
    if runtime == "openmp":
        with pytest.raises(ArithmeticError, match="piece"):
            in_two_threads(fail(True))


def test_no_piece_begins_after_an_error(runtime: str) -> None:
    begun = list[int]()

    def fail(piece: int) -> None:
        begun.append(piece)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_pieces(fail, 1000)
    assert len(begun) <= 2


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not list the threads of a process")
def test_pieces_run_in_the_threads_of_torch() -> None:
    # A thread that is added would share the cores with those of torch, which spin between operations.
    if threads._openmp() is None:
        pytest.skip("torch's OpenMP runtime has no GOMP_parallel here")
    large = torch.ones(1 << 22)
    large.exp().sum()
    before = {path.name for path in Path("/proc/self/task").iterdir()}
    natives = set[int]()
    in_two_threads(lambda _: natives.add(threading.get_native_id()))
    assert len(natives) == 2 and {str(native) for native in natives} <= before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked on this system")
def test_a_forked_process_starts_other_threads(runtime: str) -> None:
    assert called(5) == [0, 1, 2, 3, 4]
    child = os.fork()
    if child == 0:
        # Threads that exist only in the parent would never return.
        os._exit(0 if called(5) == [0, 1, 2, 3, 4] else 1)
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
