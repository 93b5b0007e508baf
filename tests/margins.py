"""`python -m tests.margins`: the margin between every numerical comparison and its limit, on processor variants.

A run of pytest with `--margins FILE` writes a line for each comparison of a test: those of the conformance kit,
`torch.allclose` and `torch.testing.assert_close`, and every inline assertion of the form `error <= limit`. This module
runs the numerical tests once for each variant of instruction set, threads and summation order, and lists the tightest
margins. It fails if an error is within a factor of two of its limit.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]

FACTOR = 2.0
"""Smallest accepted ratio of a limit to its error."""

TESTS = (
    "tests/architectures",
    "tests/operator",
    "tests/recording",
    "tests/host",
    "tests/discovery",
    "tests/tracing",
    "tests/frozen",
    "tests/reruns",
    "tests/scoring",
    "tests/testing",
    "tests/kernels",
    "tests/laws",
    "tests/methods",
    "tests/mixers",
    "tests/models",
)
"""The folders with numerical comparisons; other tests compare text, files and images."""

VARIANTS: dict[str, dict[str, str]] = {
    "default, 1 thread": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2, 1 thread, MKL AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2"},
    "avx2, 2 threads, MKL COMPATIBLE": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE", "THREADS": "2"},
    "avx512, 1 thread": {"ATEN_CPU_CAPABILITY": "avx512"},
    "avx512, 2 threads": {"ATEN_CPU_CAPABILITY": "avx512", "THREADS": "2"},
}
"""Environment of each run: every CPU capability, thread count and MKL branch at least once.

`THREADS` is `--threads` of the run. Torch replaces a capability that the processor lacks by the best available one.
"""

_NUMBER = r"(?:tensor\()?([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)(?:, dtype=torch\.\w+)?\)?"
_BELOW = re.compile(rf"^{_NUMBER} <=? {_NUMBER}$")
_BETWEEN = re.compile(rf"^{_NUMBER} <=? {_NUMBER} <=? {_NUMBER}$")
_ABOUT = re.compile(rf"^{_NUMBER} == {_NUMBER} ± {_NUMBER}$")

SMALL = 0.05
"""Largest limit on rounding; larger limits (of an accuracy, a fraction) are choices."""


class Recorder:
    """A pytest plugin that collects the comparisons of each test and appends them to a file, one JSON line each."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, list[tuple[str, str, float, float]]()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        from unilinattn.testing import recorded_margins

        self.rows = []
        with recorded_margins() as margins, self._library_comparisons():
            yield
        rows = self.rows + [(margin.law, margin.what, margin.error, margin.limit) for margin in margins]
        with self.path.open("a") as file:
            file.writelines(json.dumps([item.nodeid, *row]) + "\n" for row in rows)

    def pytest_assertion_pass(self, item: pytest.Item, lineno: int, orig: str, expl: str) -> None:
        for comparison in read(expl):
            self.rows.append((f"line {lineno}", orig, *comparison))

    @contextlib.contextmanager
    def _library_comparisons(self) -> Iterator[None]:
        """Record the worst entry of `torch.allclose` and `torch.testing.assert_close`, error over limit."""
        close, assert_close = torch.allclose, torch.testing.assert_close

        def note(name: str, actual: Any, expected: Any, rtol: float, atol: float) -> None:
            if (
                isinstance(actual, Tensor)
                and isinstance(expected, Tensor)
                and actual.numel()
                and actual.shape == expected.shape
            ):
                actual, expected = actual.detach().double(), expected.detach().double()
                limit = atol + rtol * expected.abs()
                ratio = torch.where(actual == expected, torch.zeros_like(limit), (actual - expected).abs() / limit)
                self.rows.append((name, "worst entry, error over limit", float(ratio.max()), 1.0))

        def allclose(actual: Tensor, expected: Tensor, rtol: float = 1e-5, atol: float = 1e-8, **options: Any) -> bool:
            note("allclose", actual, expected, rtol, atol)
            return close(actual, expected, rtol=rtol, atol=atol, **options)

        def asserted(actual: Any, expected: Any, *, rtol: Any = None, atol: Any = None, **options: Any) -> None:
            if rtol is not None and atol is not None:
                note("assert_close", actual, expected, rtol, atol)
            assert_close(actual, expected, rtol=rtol, atol=atol, **options)

        torch.allclose, torch.testing.assert_close = allclose, asserted
        try:
            yield
        finally:
            torch.allclose, torch.testing.assert_close = close, assert_close


def read(explanation: str) -> list[tuple[float, float]]:
    """Parse (error, limit) pairs of pytest's text on a passed assertion: a bound, an interval, an `approx`."""
    line = explanation.split("\n", 1)[0].strip()
    if match := _BELOW.match(line):
        error, limit = map(float, match.groups())
        return [(error, limit)] if error >= 0 and 0 < limit <= SMALL else []
    if match := _BETWEEN.match(line):
        low, value, high = map(float, match.groups())
        return [(a, b) for a, b in ((low, value), (value, high)) if a > 0 and 0 < b <= SMALL]
    if match := _ABOUT.match(line):
        value, expected, limit = map(float, match.groups())
        return [(abs(value - expected), limit)]
    return []


def tightest(path: Path, count: int) -> list[tuple[float, str]]:
    """Return the worst comparison of every law, line or function, tightest first: error over limit, description."""
    worst: dict[tuple[str, str], tuple[float, str]] = {}
    for line in path.read_text().splitlines():
        test, law, what, error, limit = json.loads(line)
        # An error above its limit in a passing test is a negative control: its margin is the inverse ratio.
        ratio = error / limit if error <= limit else limit / error
        key = (test.split("[")[0], law)
        if key not in worst or ratio > worst[key][0]:
            worst[key] = (ratio, f"{error:.2g} of {limit:.2g}  {test}  {law}: {what[:80]}")
    return sorted(worst.values(), reverse=True)[:count]


def run(name: str, tests: Sequence[str], path: Path, report: Callable[[str], None] = print) -> bool:
    """Run the tests on one variant, write their margins, and return whether all passed."""
    variant = dict(VARIANTS[name])
    threads = variant.pop("THREADS", "1")
    # The hook changes pytest's rewritten bytecode, which must not enter the cache of other runs.
    with tempfile.TemporaryDirectory() as cache:
        options = ["-m", "not slow", "--margins", str(path), "--threads", threads]
        options += ["-o", "enable_assertion_pass_hook=true"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *tests, *options, "-p", "no:cacheprovider"],
            cwd=ROOT,
            env={**os.environ, **variant, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": cache},
            capture_output=True,
            text=True,
            check=False,
        )
    report(f"{name}: {(done.stdout.strip().splitlines() or [done.stderr])[-1]}")
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            report(f"  {line}")
    return done.returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every chosen variant, print the tightest margins, and return 1 if a test failed or a margin is too small."""
    parser = argparse.ArgumentParser(prog="python -m tests.margins", description=__doc__)
    parser.add_argument(
        "tests", nargs="*", default=list(TESTS), help="tests to run (default: all folders with numerical comparisons)"
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--count", type=int, default=10, help="number of margins to list (default: %(default)s)")
    options = parser.parse_args(arguments)
    sound = True
    with tempfile.TemporaryDirectory() as folder:
        every = Path(folder) / "every.jsonl"
        for number, name in enumerate(options.variants):
            path = Path(folder) / f"{number}.jsonl"
            path.touch()
            sound &= run(name, options.tests, path)
            with every.open("a") as file:
                file.write(path.read_text())
        rows = tightest(every, options.count)
    for ratio, what in rows:
        print(f"{ratio:.3f}  {what}")
    return 0 if sound and rows and rows[0][0] * FACTOR <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
