"""`tools.coverage`: records, generated tables, and the detection of stale ones."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.hosts import named
from tools import coverage, coverage_pages, coverage_runs, hybrids
from tools.families import FAMILIES
from tools.markers import read_section
from unilinattn.testing.hosts import Host, transformers_model

ROOT = Path(__file__).parents[2]
MAMBA = named("mamba")
S4D = named("s4d")
TABLES = {"hosts": (MAMBA, S4D)}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.coverage", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_tables_in_the_repository_are_current() -> None:
    # The conformance test runs every configuration; whether the record is stale shows in one of each adapter.
    done = command("--check", "--first")
    assert done.returncode == 0, done.stdout + done.stderr
    environments = json.loads((ROOT / coverage.RECORD).read_text()).values()
    recorded = {name for environment in environments for name in environment["runs"]}
    assert recorded == {f"{table}/{host.name}" for table, hosts in coverage.tables().items() for host in hosts}


@pytest.fixture(scope="module")
def runs() -> coverage_runs.Runs:
    measurements, problems = coverage_runs.run(TABLES)
    assert problems == []
    return measurements


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: coverage_runs.Runs) -> Path:
    """A copy of the documentation, generated for two hosts, which ran once."""
    run = coverage.run
    monkeypatch.setattr(coverage, "run", lambda hosts: (copy.deepcopy(runs), []) if hosts == TABLES else run(hosts))
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    (tmp_path / "docs" / "coverage.json").unlink()
    monkeypatch.setattr(coverage, "tables", lambda: TABLES)
    assert coverage.main(["--root", str(tmp_path)]) == 0
    return tmp_path


def check(repository: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = coverage.main(["--check", "--root", str(repository)])
    return code, capsys.readouterr().out


def test_a_run_records_configuration_structure_and_errors(runs: coverage_runs.Runs) -> None:
    import transformers

    entry = runs["hosts/mamba"]
    layer = entry["layers"]["mamba"]
    assert entry["environment"] == f"transformers {transformers.__version__}"
    assert (entry["table"], entry["batch"], entry["length"]) == ("hosts", 2, 13)
    assert entry["padding"] == ["left", "right"]
    assert layer["hosts"] == ["MambaMixer"]
    assert layer["structure"] == ["diagonal decay"]
    assert layer["scopes"] == ["core", "mixer", "unified", "layer"]
    assert layer["path"]
    assert 0 < layer["float32"] < 1e-5
    assert 0 < layer["float64"] < 1e-10
    assert layer["float32"] < layer["bfloat16"] < 2e-2
    assert runs["hosts/s4d"]["environment"] == "unilinattn"


def test_every_table_of_hosts_is_listed_and_its_names_are_unique() -> None:
    tables = coverage.tables()
    folder = ROOT / "unilinattn" / "testing" / "hosts"
    modules = {path.stem for path in folder.glob("*.py") if re.search(r"^HOSTS\b", path.read_text(), re.M)} - {
        "__init__"
    }
    assert set(tables) == modules
    for hosts in tables.values():
        names = [host.name for host in hosts]
        assert sorted(set(names)) == sorted(names)


def test_a_side_on_which_padding_leaks_is_not_recorded() -> None:
    leaky = named("mamba2, biases")
    measurements, _ = coverage_runs.run({"hosts": (leaky,)})
    assert measurements["hosts/mamba2, biases"]["padding"] == ["right"]


def test_a_hybrid_is_listed_in_order_with_its_steps() -> None:
    parallel = named("falcon h1")
    measurements, problems = coverage_runs.run({"mamba": (parallel, MAMBA)})
    assert problems == []
    layers = measurements["mamba/falcon h1"]["hybrid"]
    assert [(layer["step"], layer["class"]) for layer in layers.values()] == [
        (step, name) for step in (1, 2) for name in ("FalconH1Mixer", "FalconH1Attention")
    ]
    assert all(layer["float32"] <= 1e-5 and layer["float64"] <= 1e-10 for layer in layers.values())
    assert "hybrid" not in measurements["mamba/mamba"]
    page = hybrids.page([("transformers 6.0", measurements), ("transformers 5.0", measurements)])
    assert page.count("## ") == page.count("## FalconH1ForCausalLM\n\nWith transformers 6.0;") == 1
    assert "| 2 | `model.layers.1.self_attn` | FalconH1Attention | softmax attention |" in page


def test_a_configuration_that_cannot_be_traced_is_recorded_with_the_reason() -> None:
    lacking = replace(MAMBA, build=transformers_model("NoSuchForCausalLM", "MambaConfig"))
    measurements, problems = coverage_runs.run({"hosts": (lacking, S4D)})
    version = measurements["hosts/mamba"]["environment"]
    assert measurements["hosts/mamba"] == {
        "table": "hosts",
        "environment": version,
        "left_out": f"{version} has no NoSuchForCausalLM",
    }
    assert problems == []
    assert coverage.differences({}, measurements, run_tables=["hosts"], configurations=measurements) == [
        "hosts/mamba: was never recorded",
        "hosts/s4d: was never recorded",
    ]


def test_a_row_lists_the_oldest_version_and_the_page_lists_left_out_configurations(runs: coverage_runs.Runs) -> None:
    machine = {"machine": "m", "python": "3", "torch": "2"}
    entry = {key: value for key, value in runs["hosts/mamba"].items() if key != "environment"}
    later = copy.deepcopy(entry)
    later["layers"]["mamba"]["hosts"] = ["LaterMixer"]
    left_out = {"table": "hosts", "left_out": "the class is missing"}
    record = {
        "transformers 5.6.2": {"machine": machine, "runs": {"hosts/mamba": entry, "hosts/later": left_out}},
        "transformers 5.23.0": {"machine": machine, "runs": {"hosts/mamba": entry, "hosts/later": later}},
    }
    text = coverage_pages.pages(ROOT, record, {})[0][Path("docs/coverage.md")]
    assert " | left, right | 5.6.2 |\n" in text
    (row,) = re.findall(r"^- \*\*mamba\*\* .*$", text, re.M)
    assert row.endswith(" (2 x 13). Only since 5.23.0: LaterMixer.")
    assert "### Left out with transformers 5.6.2\n\n- later: the class is missing.\n" in text
    assert "### Left out with transformers 5.23.0" not in text


def test_nothing_is_left_out_with_the_newest_version() -> None:
    record = json.loads((ROOT / coverage.RECORD).read_text())
    left_out = {name: [n for n, run in entry["runs"].items() if "left_out" in run] for name, entry in record.items()}
    assert {name for name, configurations in left_out.items() if configurations} == {"transformers 5.6.2"}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ("layers", "mamba", "structure"),
            ["dense"],
            "hosts/mamba: layers mamba structure was ['dense'], is ['diagonal decay']",
        ),
        (("layers", "mamba", "hosts"), ["Other"], "hosts/mamba: layers mamba hosts was ['Other'], is ['MambaMixer']"),
        (("layers", "mamba", "scopes"), ["core"], "hosts/mamba: layers mamba scopes was ['core'], is"),
        (("layers", "mamba", "kind"), ["S6"], "hosts/mamba: layers mamba kind was ['S6'], is ['Mamba-1 (S6)']"),
        (("layers", "mamba", "bfloat16"), None, "hosts/mamba: layers mamba bfloat16 was None, is"),
        (("layers", "more"), {}, "hosts/mamba: layers more was {}, is None"),
        (("length",), 14, "hosts/mamba: length was 14, is 13"),
        (("padding",), ["right"], "hosts/mamba: padding was ['right'], is ['left', 'right']"),
    ],
)
def test_a_changed_entry_is_reported(
    runs: coverage_runs.Runs, path: tuple[str, ...], value: object, message: str
) -> None:
    stored = copy.deepcopy(runs)
    *inner, last = path
    entry = stored["hosts/mamba"]
    for key in inner:
        entry = entry[key]
    entry[last] = value
    (line,) = coverage.differences(stored, runs, run_tables=["hosts"], configurations=runs)
    assert line.startswith(message)


@pytest.mark.parametrize("how", ["float32", "float64", "bfloat16"])
def test_errors_may_differ_only_by_rounding(runs: coverage_runs.Runs, how: str) -> None:
    unit = torch.finfo(getattr(torch, how)).eps
    for was, now, count in ((100, 100, 0), (100, 900, 0), (900, 100, 0), (100, 1100, 1), (1100, 100, 1), (0, 9, 0)):
        stored, fresh = copy.deepcopy(runs), copy.deepcopy(runs)
        stored["hosts/mamba"]["layers"]["mamba"][how] = was * unit
        fresh["hosts/mamba"]["layers"]["mamba"][how] = now * unit
        lines = coverage.differences(stored, fresh, run_tables=["hosts"], configurations=runs)
        assert len(lines) == count
        assert all(re.search(rf"layers mamba (float32 and )?{how}( and float64)? was", line) for line in lines)


def test_one_dtype_may_be_lucky_if_the_other_lost_as_many_digits(runs: coverage_runs.Runs) -> None:
    units = {how: torch.finfo(getattr(torch, how)).eps for how in ("float32", "float64")}
    for was, now, count in (
        ((70, 8), (70, 95), 0),
        ((70, 8), (6, 60), 0),
        ((70, 8), (70, 800), 1),
        ((8, 8), (8, 95), 1),
    ):
        stored, fresh = copy.deepcopy(runs), copy.deepcopy(runs)
        for entry, errors in ((stored, was), (fresh, now)):
            for (how, unit), error in zip(units.items(), errors, strict=True):
                entry["hosts/mamba"]["shares"][how] = error * unit
        lines = coverage.differences(stored, fresh, run_tables=["hosts"], configurations=runs)
        assert len(lines) == count
        assert all("shares float32 and float64 was" in line for line in lines)


def test_added_and_removed_configurations_are_reported(runs: coverage_runs.Runs) -> None:
    less = {name: entry for name, entry in runs.items() if name != "hosts/mamba"}
    assert coverage.differences(less, runs, run_tables=["hosts"], configurations=runs) == [
        "hosts/mamba: was never recorded"
    ]
    messages = coverage.differences(runs, less, run_tables=["hosts"], configurations=less)
    assert messages == ["hosts/mamba: is recorded, but in no table of hosts"]
    assert coverage.differences(runs, less, run_tables=["hosts_other"], configurations=less) == []


def test_freshly_written_pages_are_not_stale(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(repository, capsys) == (0, "2 configurations ran, 0 problems.\n")
    assert "| mamba | Mamba-1 (S6) | diagonal decay |" in (repository / "docs" / "coverage.md").read_text()
    assert "| mamba | Mamba-1 (S6) | diagonal decay |" in (repository / "docs" / "architectures.md").read_text()
    readme = read_section((repository / "README.md").read_text(), "families")
    assert [line.split(" | ")[0] for line in readme.splitlines()[2:]] == [
        "| Mamba-1 (S6)",
        "| state spaces with fixed parameters",
    ]


def test_a_stale_record_page_or_readme_is_reported(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = repository / "docs" / "coverage.json"
    text = record.read_text()
    record.write_text(text.replace('"diagonal decay"', '"dense"'))
    code, shown = check(repository, capsys)
    assert code == 1
    assert "hosts/mamba: layers mamba structure was ['dense'], is ['diagonal decay']" in shown
    assert "Bring the tables up to date: python -m tools.coverage" in shown
    record.write_text(text)

    for name, old, new in (
        ("docs/coverage.md", "Mamba-1 (S6)", "Mamba-2 (SSD)"),
        ("docs/architectures.md", "| s4d |", "| s4 |"),
        ("README.md", "| Mamba-1 (S6) |", "| Mamba-2 (SSD) |"),
        ("README.md", "[`raw`](", "[`row`]("),
        ("docs/methods/raw.md", "`'core'`", "`'mixer'`"),
    ):
        page = repository / name
        before = page.read_text()
        assert old in before
        page.write_text(before.replace(old, new))
        code, shown = check(repository, capsys)
        assert code == 1
        assert f"--- {name}\n+++ {name} (generated)" in shown
        assert any(line.startswith("-") and new in line for line in shown.splitlines())
        assert any(line.startswith("+") and old in line for line in shown.splitlines())
        page.write_text(before)
    assert check(repository, capsys)[0] == 0


def test_a_page_without_markers_is_reported(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = repository / "README.md"
    readme.write_text(readme.read_text().replace("<!-- methods:end -->", ""))
    (repository / "docs" / "methods" / "raw.md").unlink()
    code, shown = check(repository, capsys)
    assert code == 1
    assert "README.md: put <!-- methods:begin --> and <!-- methods:end --> around its section 'methods'" in shown
    assert "docs/methods/raw.md is missing: write it" in shown


def test_every_architecture_belongs_to_one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    members = sorted(name for family in FAMILIES for name in family.adapters)
    assert members == sorted(coverage_pages.package_architectures())
    record = json.loads((ROOT / coverage.RECORD).read_text())
    monkeypatch.setattr(coverage_pages, "FAMILIES", FAMILIES[1:])
    _, problems = coverage_pages.pages(ROOT, record, {})
    assert [problem.rpartition(" ")[2] for problem in problems] == [f"{n!r}" for n in sorted(FAMILIES[0].adapters)]


def test_a_version_without_a_record_is_reported(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = repository / "docs" / "coverage.json"
    content = json.loads(record.read_text())
    (version,) = [name for name in content if name.startswith("transformers")]
    content["transformers 5.0"] = content.pop(version)
    record.write_text(json.dumps(content))
    code, shown = check(repository, capsys)
    assert code == 1
    assert f"{version}: has no recorded run" in shown


def missing() -> nn.Module:
    import a_package_that_nobody_has  # noqa: F401  raises ModuleNotFoundError

    raise AssertionError


def test_a_host_whose_package_is_missing_keeps_its_record(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (repository / "docs" / "coverage.json").read_text()
    absent = {"hosts": (replace(MAMBA, build=missing), S4D)}
    monkeypatch.setattr(coverage, "tables", lambda: absent)
    assert check(repository, capsys) == (0, "1 configurations ran, 0 problems.\n")
    assert coverage.main(["--root", str(repository)]) == 0
    assert json.loads((repository / "docs" / "coverage.json").read_text())["unilinattn"].keys() == {"machine", "runs"}
    stored = [json.loads(text) for text in (before, (repository / "docs" / "coverage.json").read_text())]
    assert all(
        "hosts/mamba" in next(entry for name, entry in each.items() if "trans" in name)["runs"] for each in stored
    )

    unrun = Host("never run", "mamba", missing)
    monkeypatch.setattr(coverage, "tables", lambda: {"hosts": (MAMBA, S4D, unrun)})
    assert coverage.main(["--root", str(repository)]) == 0
    page = (repository / "docs" / "coverage.md").read_text()
    assert "Configurations without a recorded run:\n\n- hosts: never run.\n" in page


def test_a_failing_and_an_inexact_host_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> nn.Module:
        raise RuntimeError("no such option")

    runs, problems = coverage_runs.run({"hosts": (replace(MAMBA, build=broken), S4D)})
    assert list(runs) == ["hosts/s4d"]
    assert problems == ["mamba (hosts) failed with RuntimeError: no such option"]

    monkeypatch.setattr(coverage_runs, "tolerance", lambda comparison, dtype: 1e-17)
    _, problems = coverage_runs.run({"hosts": (S4D,)})
    assert [problem.split(" of ")[0] for problem in problems] == [
        "s4d: s4d has a float32 error",
        "s4d: the sum",
        "s4d: s4d has a float64 error",
        "s4d: the sum",
    ]


def test_an_unknown_table_and_a_folder_that_is_no_checkout_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert coverage.main(["--tables", "flax"]) == 1
    assert "no table of hosts is named 'flax'; did you mean 'fla'?" in capsys.readouterr().err
    assert coverage.main(["--root", str(tmp_path)]) == 1
    assert "is no checkout of the repository" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
