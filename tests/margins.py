"""`python -m tests.margins`: how far every comparison of numbers is from its limit, on variants of this processor.

A run of pytest with `--margins FILE` writes a line for each comparison that a test makes: those of the conformance kit,
`torch.allclose` and `torch.testing.assert_close`, and every inline assertion of the form `error <= limit`. This module
runs the tests that compare numbers once for each variant, with a limit on what one processor may use and in which
order sums run, and lists the tightest. A comparison within a factor of two of its limit is refused.
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
"""How far at least every error is below its limit."""

TESTS = (
    "tests/architectures",
    "tests/operator",
    "tests/tracing",
    "tests/testing",
    "tests/kernels",
    "tests/laws",
    "tests/methods",
    "tests/mixers",
    "tests/models",
)
"""The folders whose tests compare numbers that a processor computes; the others compare words, files and pictures."""

VARIANTS: dict[str, dict[str, str]] = {
    "default, 1 thread": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2, 1 thread, MKL AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2"},
    "avx2, 2 threads, MKL COMPATIBLE": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE", "THREADS": "2"},
    "avx512, 1 thread": {"ATEN_CPU_CAPABILITY": "avx512"},
    "avx512, 2 threads": {"ATEN_CPU_CAPABILITY": "avx512", "THREADS": "2"},
}
"""Environment of each run: every capability, both numbers of threads and every branch of MKL at least once.

`THREADS` is `--threads` of the run. A capability that the processor lacks falls back to the best that it has.
"""

_NUMBER = r"(?:tensor\()?([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)(?:, dtype=torch\.\w+)?\)?"
_BELOW = re.compile(rf"^{_NUMBER} <=? {_NUMBER}$")
_BETWEEN = re.compile(rf"^{_NUMBER} <=? {_NUMBER} <=? {_NUMBER}$")
_ABOUT = re.compile(rf"^{_NUMBER} == {_NUMBER} ± {_NUMBER}$")

SMALL = 0.05
"""Limits above this stand for a choice (an accuracy, a share), not for rounding."""


class Recorder:
    """Pytest's side: collects the comparisons of each test and appends them to a file, a line of JSON each."""

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
        for found in read(expl):
            self.rows.append((f"line {lineno}", orig, *found))

    @contextlib.contextmanager
    def _library_comparisons(self) -> Iterator[None]:
        """Note the worst entry of `torch.allclose` and `torch.testing.assert_close`, error over limit."""
        close, assert_close = torch.allclose, torch.testing.assert_close

        def note(name: str, got: Any, expected: Any, rtol: float, atol: float) -> None:
            if isinstance(got, Tensor) and isinstance(expected, Tensor) and got.numel() and got.shape == expected.shape:
                got, expected = got.detach().double(), expected.detach().double()
                limit = atol + rtol * expected.abs()
                ratio = torch.where(got == expected, torch.zeros_like(limit), (got - expected).abs() / limit)
                self.rows.append((name, "worst entry, error over limit", float(ratio.max()), 1.0))

        def allclose(got: Tensor, expected: Tensor, rtol: float = 1e-5, atol: float = 1e-8, **options: Any) -> bool:
            note("allclose", got, expected, rtol, atol)
            return close(got, expected, rtol=rtol, atol=atol, **options)

        def asserted(got: Any, expected: Any, *, rtol: Any = None, atol: Any = None, **options: Any) -> None:
            if rtol is not None and atol is not None:
                note("assert_close", got, expected, rtol, atol)
            assert_close(got, expected, rtol=rtol, atol=atol, **options)

        torch.allclose, torch.testing.assert_close = allclose, asserted
        try:
            yield
        finally:
            torch.allclose, torch.testing.assert_close = close, assert_close


def read(explanation: str) -> list[tuple[float, float]]:
    """Read (error, limit) pairs from what pytest says of an assertion that held: a bound, a span, an `approx`."""
    line = explanation.split("\n", 1)[0].strip()
    if found := _BELOW.match(line):
        error, limit = map(float, found.groups())
        return [(error, limit)] if error >= 0 and 0 < limit <= SMALL else []
    if found := _BETWEEN.match(line):
        low, value, high = map(float, found.groups())
        return [(a, b) for a, b in ((low, value), (value, high)) if a > 0 and 0 < b <= SMALL]
    if found := _ABOUT.match(line):
        value, expected, limit = map(float, found.groups())
        return [(abs(value - expected), limit)]
    return []


def tightest(path: Path, count: int) -> list[tuple[float, str]]:
    """Return the worst comparison of every law, line or function, the tightest first: error over limit, and what."""
    worst: dict[tuple[str, str], tuple[float, str]] = {}
    for line in path.read_text().splitlines():
        test, law, what, error, limit = json.loads(line)
        # A comparison that a passing test sees refused is a control, and counts from the other side.
        ratio = error / limit if error <= limit else limit / error
        key = (test.split("[")[0], law)
        if key not in worst or ratio > worst[key][0]:
            worst[key] = (ratio, f"{error:.2g} of {limit:.2g}  {test}  {law}: {what[:80]}")
    return sorted(worst.values(), reverse=True)[:count]


def run(name: str, tests: Sequence[str], path: Path, report: Callable[[str], None] = print) -> bool:
    """Run the tests on one variant, write their margins, and return whether all passed."""
    variant = dict(VARIANTS[name])
    threads = variant.pop("THREADS", "1")
    # Assertions are rewritten in another way where they are reported, and must not be mixed with those of other runs.
    with tempfile.TemporaryDirectory() as cache:
        options = ["--margins", str(path), "--threads", threads, "-o", "enable_assertion_pass_hook=true"]
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
        "tests", nargs="*", default=list(TESTS), help="what to run (default: all that compares numbers)"
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--count", type=int, default=10, help="how many of the tightest to list (default: %(default)s)")
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
