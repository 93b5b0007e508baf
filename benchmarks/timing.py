"""Interleaved timing of calls, so that other load on the machine affects all of them alike."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


def interleaved(
    calls: Mapping[str, Callable[[], Any]], *, rounds: int, least: int, seconds: float, device: str
) -> dict[str, list[float]]:
    """Return the seconds of each call in each round; once `seconds` are spent, `least` rounds are enough.

    There is no warm-up: run each call before.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    begun = time.perf_counter()
    for done in range(rounds):
        if done >= least and time.perf_counter() - begun > seconds:
            break
        for name, call in calls.items():
            _settle(device)
            start = time.perf_counter()
            call()
            _settle(device)
            times[name].append(time.perf_counter() - start)
    return times


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
