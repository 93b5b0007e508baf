"""Times of calls that take turns, so that whatever else the machine does meets all of them alike."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


def interleaved(
    calls: Mapping[str, Callable[[], Any]], *, rounds: int, least: int, seconds: float, device: str
) -> dict[str, list[float]]:
    """Return the seconds of each call in each round; once `seconds` are spent, `least` rounds are enough.

    Each has run before: this is not the place for warm-up.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    begun = time.perf_counter()
    for done in range(rounds):
        if done >= least and time.perf_counter() - begun > seconds:
            break
        for name, call in calls.items():
            _settle(device)
            start = time.perf_counter()
            call()
            _settle(device)
            found[name].append(time.perf_counter() - start)
    return found


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
