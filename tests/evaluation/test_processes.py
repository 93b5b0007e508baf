import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.test_evaluate import rows_of, stored_evaluation
from unilinattn.errors import InputError, UnilinattnError
from unilinattn.evaluation import Table
from unilinattn.evaluation.processes import Processes, apart

ROOT = Path(__file__).parents[2]


class Threads(Processes):
    """Threads in place of processes."""

    def __init__(self, rank: int, count: int, barrier: threading.Barrier, board: dict[int, Any]) -> None:
        self.rank, self.count, self._barrier, self._board = rank, count, barrier, board

    def gather(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait()
        values = [self._board[rank] for rank in range(self.count)]
        self._barrier.wait()
        return values


def spread(count: int, stored: dict[int, dict[int, str]], compute: Callable[[int], str]) -> tuple[list[Any], list[Any]]:
    """Spread ten keys; return the values or the error of each process, and the keys that it computed."""
    barrier, board = threading.Barrier(count), dict[int, Any]()
    results: list[Any] = [None] * count
    computed: list[list[int]] = [[] for _ in range(count)]

    def run(rank: int) -> None:
        def values(keys: Sequence[int]) -> dict[int, str]:
            computed[rank] = list(keys)
            return {key: compute(key) for key in keys}

        try:
            results[rank] = Threads(rank, count, barrier, board).spread(range(10), stored[rank].get, values)
        except UnilinattnError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return results, computed


def test_a_process_apart_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the processes connect")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr("unilinattn.evaluation.processes.distributed.init_process_group", refuse)
    with apart():
        processes = Processes()
        assert (processes.rank, processes.count) == (0, 1)
        assert processes.spread([1, 2], lambda key: None, lambda keys: {key: -key for key in keys}) == {1: -1, 2: -2}
    with pytest.raises(AssertionError, match="the processes connect"):
        Processes()


def test_every_key_is_computed_once_and_known_to_all() -> None:
    # Process 1 has results that process 0 lacks, as on machines without a common folder.
    results, computed = spread(3, {0: {}, 1: {4: "four"}, 2: {0: "zero"}}, str)
    expected = {key: {4: "four", 0: "zero"}.get(key, str(key)) for key in range(10)}
    assert results == [expected] * 3 and [list(one) for one in results] == [list(range(10))] * 3
    assert sorted(chain(*computed)) == [1, 2, 3, 5, 6, 7, 8, 9]
    assert max(map(len, computed)) - min(map(len, computed)) <= 1


def test_an_error_in_one_process_is_raised_in_all() -> None:
    def compute(key: int) -> str:
        if key == 3:
            raise InputError("sample 3 is empty")
        return str(key)

    (first, second), _ = spread(2, {0: {}, 1: {}}, compute)
    assert type(second) is InputError and str(second) == "sample 3 is empty"
    assert type(first) is UnilinattnError and str(first) == "process 1 of 2: sample 3 is empty"


def test_a_program_by_itself_is_one_process() -> None:
    alone = Processes()
    assert (alone.rank, alone.count, alone.gather(3)) == (0, 1, [3])


WORKER = """
import atexit, json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
exited = Path(sys.argv[1], "exited")
def threads():
    return [path.read_text() for path in Path("/proc/self/task").glob("*/comm")].count("pt_gloo_runloop\\n")
def left():
    if not torch.distributed.is_initialized():
        exited.open("a").write(f"{gathering - threads()} ")
# Runs after the exit functions that are registered later.
atexit.register(left)
from tests.evaluation.test_evaluate import DRAWN, rows_of, stored_evaluation
if sys.argv[2] == "accelerate":
    from accelerate import PartialState
    assert PartialState(cpu=True).num_processes == 2
table = stored_evaluation(Path(sys.argv[1], "out"))
rank = torch.distributed.get_rank()
# The threads of the default group do not end, since this module refers to it, as those of torch do.
everyone, gathering = torch.distributed.group.WORLD, threads()
Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps([rows_of(table), DRAWN]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("connected", ["accelerate", "launcher"])
def test_two_processes_give_the_numbers_of_one_to_the_bit(tmp_path: Path, connected: str) -> None:
    expected = stored_evaluation(tmp_path / "one")
    (tmp_path / "worker.py").write_text(WORKER)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launch, str(tmp_path / "worker.py"), str(tmp_path), connected],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # The two threads that gathered have ended; only Linux lists threads.
    ended = "2" if Path("/proc/self/task").is_dir() else "0"
    assert (tmp_path / "exited").read_text().split() == [ended] * 2
    drawn = []
    for rank in range(2):
        rows, drawn_here = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert rows == rows_of(expected)
        drawn.append(len(drawn_here))
    # Each has one of the two selection samples and its share of the three scored ones.
    assert drawn == [3, 2]
    for name in ("table.json", "table.csv", "samples/0-000002.json", "selection/0-000001.json", "configuration.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    assert rows_of(Table.load(tmp_path / "out" / "table.json")) == rows_of(expected)
