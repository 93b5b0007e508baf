"""The benchmarks: checks, timing, memory, and the page of the recorded figures."""

import inspect
import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import card, cases, checks, disk, fused, models, page, sketch, structures, throughput
from benchmarks.__main__ import merged
from benchmarks.cases import Case, Prepared
from benchmarks.growth import grown
from benchmarks.memory import usage
from benchmarks.resident import growth
from benchmarks.rivals import Place
from benchmarks.timing import interleaved
from tools.markers import markers, read_section
from unilinattn.mixers import CoreMixer
from unilinattn.testing.peak import Peak

ROOT = Path(__file__).parents[1]
NARROW = Place(models.NARROW, "cpu")


def test_a_quick_run_on_narrow_layers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--threads", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "cpu.json").read_text()
    figures = json.loads(text)
    assert {row["operation"] for row in figures["rows"]} == set(cases.OPERATIONS)
    checked = {(check["operation"], check["structure"]) for check in figures["checks"]}
    assert checked == {(c.operation, c.structure) for c in cases.all_cases() if c.operation in checks.REFERENCES}
    assert all(len(row["seconds"]) == 5 for row in figures["rows"] if row["rivals"])
    assert all(row["memory"]["counted"] >= 0 for row in figures["rows"])
    assert str(tmp_path) not in text and str(ROOT) not in text
    assert platform.node() not in json.dumps(figures["machine"])
    assert read_section((tmp_path / "performance.md").read_text(), "performance") == page.section([figures])
    assert (tmp_path / "performance.png").read_bytes().startswith(b"\x89PNG")

    subprocess.run([*command, "--only", "next logit"], cwd=ROOT, env=dict(os.environ), capture_output=True, check=True)
    again = json.loads((tmp_path / "cpu.json").read_text())
    assert sorted(row["operation"] for row in again["rows"]) == sorted(row["operation"] for row in figures["rows"])
    other = [row for row in figures["rows"] if row["operation"] != "next logit"]
    assert all(row in again["rows"] for row in other) and again["rows"] != figures["rows"]

    text = text.replace('"cores": ', '"cores": 1')
    (tmp_path / "cpu.json").write_text(text)
    refused = subprocess.run([*command, "--only", "map"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "the recorded figures are of" in refused.stderr
    assert (tmp_path / "cpu.json").read_text() == text


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="the processor has no AVX2"
)
def test_a_quick_run_limited_to_avx2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--avx2", "--threads", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "avx2.json").read_text())
    assert figures["machine"]["cpu"].endswith("avx2")
    assert all(row["rivals"] and row["memory"]["resident"] is None for row in figures["rows"])
    refused = subprocess.run([*command, "--only", "map"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "leave --only and --device out" in refused.stderr


def test_the_page_shows_the_recorded_figures() -> None:
    recorded = page.recorded(ROOT / "benchmarks" / "results")
    text = (ROOT / "docs" / "performance.md").read_text()
    assert recorded
    assert read_section(text, "performance") == page.section(recorded)
    for name in page.NAMES.values():
        assert name.split(",")[0] in text.split(markers("performance")[0])[0], name
    for module, name in ((sketch, "sketch"), (throughput, "throughput"), (fused, "fused")):
        assert read_section(text, name) == module.section(json.loads(module.RECORD.read_text()))
    assert read_section(text, "million") == page.long_runs(ROOT / "benchmarks" / "results")
    assert read_section(text, "avx2") == page.limited(ROOT / "benchmarks" / "results")
    for figures in recorded:
        assert page.stored(figures) == (ROOT / "benchmarks" / "results" / f"{figures['device']}.json").read_text()


def test_the_page_lists_the_implementations_of_every_structure() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    assert read_section(text, "structures") == structures.table()
    for operation, channels in (("map", structures.HEADS), ("weighted map", structures.HEADS * structures.CHANNELS)):
        for structure in structures.STRUCTURES:
            count = structures.counted(operation, structure, structures.LONG)
            if count.plain:
                floor = structures.tiles_floor(operation, structure)
                assert floor <= structures.each_pair(count, channels) <= 2 * floor
    mixers = {type(build(2)) for build in structures.STRUCTURES.values()}
    # One that is a part of a module's graph costs what the module does.
    package = {kind for kind in _concrete(CoreMixer) if kind.__module__.startswith("unilinattn.") and not kind.in_graph}
    assert mixers == package


def _concrete(kind: type[CoreMixer]) -> set[type[CoreMixer]]:
    classes = {kind} if not inspect.isabstract(kind) else set[type[CoreMixer]]()
    return classes.union(*(_concrete(inner) for inner in kind.__subclasses__()))


def test_every_case_names_existing_operations_rivals_and_goals() -> None:
    listed = list(cases.all_cases())
    assert len({(case.operation, case.structure, case.length) for case in listed}) == len(listed)
    assert {case.operation for case in listed} == set(cases.OPERATIONS)
    for case in listed:
        for device in ("cpu", "cuda"):
            assert set(case.goals.get(device, {})) <= set(case.rivals) <= set(page.RIVALS)
        if case.length <= 512:
            assert set(cases.prepared(replace(case, length=16), NARROW).rivals) == set(case.rivals)


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cases.OPERATIONS["map"]

    def wrong(structure: str, length: int, place: Place) -> Prepared:
        value = right(structure, length, place).call()
        return Prepared(lambda: value * (1 + 2 * checks.TOLERANCE))

    monkeypatch.setitem(cases.OPERATIONS, "map", wrong)
    with pytest.raises(ArithmeticError, match="map of s4d is off"):
        list(checks.checked(iter([("map", "s4d")]), NARROW))


def test_calls_are_interleaved_and_stop_early_after_the_least_rounds() -> None:
    calls_made: list[str] = []
    calls = {"floor": lambda: calls_made.append("floor"), "own": lambda: calls_made.append("own")}
    times = interleaved(calls, rounds=5, least=3, seconds=60.0, device="cpu")
    assert calls_made == ["floor", "own"] * 5
    assert {name: len(seconds) for name, seconds in times.items()} == {"floor": 5, "own": 5}
    assert len(interleaved(calls, rounds=5, least=3, seconds=0.0, device="cpu")["own"]) == 3


def test_the_peak_counts_live_tensors() -> None:
    x = torch.ones(1000)

    def in_turn() -> torch.Tensor:
        for _ in range(3):
            y = x * 2
            y += 1
            y = y.view(10, 100).T
        return y + x.view(100, 10)

    # One tensor of 4000 bytes at a time and the next before it is freed; views and writes in place are no tensors.
    with Peak() as counted:
        in_turn()
    assert counted.peak == 8000
    assert counted.live == 0
    used = usage(in_turn, "cpu")
    # Three times a product, a sum, two views; another view and the last sum.
    assert (used.peak, used.kept) == (4000, 0)
    assert used.calls == 3 * 4 + 2


def test_the_peak_counts_tensors_saved_for_the_backward_pass() -> None:
    weight = torch.ones(1000, requires_grad=True)

    def backward() -> torch.Tensor:
        product = weight
        for _ in range(10):
            product = product.exp()
        return torch.autograd.grad(product.sum(), weight)[0]

    counted = usage(backward, "cpu").peak
    assert 10 * 4000 <= counted <= 14 * 4000


def test_the_growth_of_the_process_is_measured() -> None:
    def call() -> torch.Tensor:
        return torch.ones(1 << 24).sum()

    assert usage(call, "cpu").peak == 1 << 26
    bytes_grown = growth(call)
    if bytes_grown is not None:
        assert 0.9 * (1 << 26) <= bytes_grown <= 1.5 * (1 << 26)


def test_growth_is_measured_in_a_separate_process(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="12345\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert grown(Case("map", "mamba", 64), 1) == 12345
    assert commands[0][1:] == ["-m", "benchmarks.growth", "map", "mamba", "64", "1"]


def test_figures_of_a_run_that_was_cut_short_replace_those_of_its_cases() -> None:
    def figures(machine: str, *rows: tuple[str, int]) -> dict[str, Any]:
        checks = [{"operation": "map", "structure": "mamba", "length": 8, "error": machine}]
        each = [{"operation": name, "structure": "mamba", "length": n, "seconds": [machine]} for name, n in rows]
        return {"machine": machine, "checks": checks, "rows": each}

    earlier = figures("then", ("map", 16), ("map", 32), ("alti", 16))
    both = merged(earlier, figures("now", ("map", 32)))
    assert [(row["operation"], row["length"], *row["seconds"]) for row in both["rows"]] == [
        ("map", 16, "then"),
        ("alti", 16, "then"),
        ("map", 32, "now"),
    ]
    assert [check["error"] for check in both["checks"]] == ["now"]


def test_a_model_of_a_published_size_is_measured_by_steps() -> None:
    record = card.run("llama-tiny", 16, "cpu")
    assert [row["step"] for row in record["rows"]] == ["forward", "trace", "explain"]
    assert record["reconstruction_error"] < 0.02
    assert record["method"] == "attn_lrp"
    row = card.section([{**record, "machine": {"gpu": "a GPU", "torch": "2", "transformers": "5"}}]).splitlines()[2]
    assert row.startswith(f"| llama-tiny | {record['weights_mib']} MiB | 16 | +0 MiB, ")


@pytest.mark.parametrize("module", [card, disk], ids=["card", "disk"])
def test_the_page_of_large_models_is_that_of_the_recorded_numbers(module: Any) -> None:
    name = module.__name__.rpartition(".")[2]
    assert read_section(module.PAGE.read_text(), name) == module.section(json.loads(module.RESULTS.read_text()))
