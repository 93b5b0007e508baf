"""Sections of the page of pretrained checkpoints: their records, tables and verdicts."""

import json
from pathlib import Path
from typing import Any

import pytest

from evidence import page, real, real_page, record, section
from evidence.claims import HERE, Claim
from evidence.comparisons import better
from evidence.rows import number
from evidence.section import Section
from evidence.study import View
from unilinattn.evaluation import Table, mean_interval
from unilinattn.optional import MissingExtraError

NEAR, FAR = [0.1 * at for at in range(20)], [1 + 0.1 * at for at in range(20)]


class Distances(Section):
    """A section of two methods, the second of which is larger by one for every sample."""

    name, title, text, unit = "distances", "Distances", "A text.", "stars"
    views = (View("t", "By method", [("m", "far", "how far"), ("m", "absent", "nothing")], note="A note."),)

    def measure(self) -> tuple[dict[str, Table], dict[str, Any]]:
        rows = [
            number(method, "far", value, model="m", sample=str(at))
            for method, values in (("near", NEAR), ("distant", FAR))
            for at, value in enumerate(values)
        ]
        return {"t": Table(rows)}, {"chosen": 3}

    def claims(self) -> list[Claim]:
        return [Claim.of("Distant is farther", HERE, better("t", "far", "distant", "near", ["m"]))]

    def remark(self, numbers: record.Numbers) -> str:
        return f"Chosen: {numbers['chosen']}."


class Missing(Distances):
    """A section whose wheel is missing."""

    name = "missing"

    def measure(self) -> tuple[dict[str, Table], dict[str, Any]]:
        raise MissingExtraError("no wheel")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return tmp_path


def test_a_section_is_measured_recorded_and_written(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    one = Distances()
    monkeypatch.setattr(real, "SECTIONS", {each.name: each for each in (one, Missing())})
    assert section.read(one) is None
    real.run(names=["distances", "missing"])
    assert section.read(one) is None
    assert "missing is skipped: no wheel" in capsys.readouterr().out
    real.run(names=["distances"], write=True)
    numbers = section.read(one)
    assert numbers is not None
    expected = mean_interval(FAR)
    assert [row for row in numbers["numbers"] if row["method"] == "distant"] == [
        {
            "table": "t",
            "model": "m",
            "method": "distant",
            "metric": "far",
            "mean": round(expected.mean, 4),
            "low": round(expected.low, 4),
            "high": round(expected.high, 4),
            "count": 20,
        }
    ]
    text = section.text_of(one, numbers)
    assert text.startswith("## Distances\n\nA text.")
    assert "| method | how far, n = 20 |" in text
    assert f"| distant | {expected.mean:.3g} [{expected.low:.3g}, {expected.high:.3g}] |" in text
    assert "A note." in text and "Chosen: 3." in text
    assert "**Claims of this library; intervals of 95 %**" in text
    assert "| Distant is farther | here | **holds** |" in text
    (line,) = page.counted(one.title, "x.md", one.size_text(numbers), numbers)
    assert line == "| [Distances](evidence/x.md) | 20 stars | this library | 1 | 0 | 0 | 0 |"


def test_names_of_sections_are_those_of_no_checkpoint() -> None:
    assert not real_page.SECTIONS.keys() & real.CHECKPOINTS.keys()
    assert all(name == each.name for name, each in real_page.SECTIONS.items())


@pytest.mark.parametrize("name", real_page.SECTIONS)
def test_a_recorded_section_has_the_claims_of_its_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    one = real_page.SECTIONS[name]
    if (numbers := section.read(one)) is None:
        pytest.skip("not measured")
    claims = one.claims()
    assert [(claim["text"], claim["source"]) for claim in numbers["claims"]] == [
        (one.text, one.source) for one in claims
    ]
    quantities = [(at, each.quantity) for at, claim in enumerate(claims) for each in claim.comparisons]
    assert [(row["claim"], row["quantity"]) for row in numbers["outcomes"]] == quantities
    assert json.loads(one.path.read_text()) == numbers
    assert one.path.stat().st_size < 1_050_000
