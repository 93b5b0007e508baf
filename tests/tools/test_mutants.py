"""The seeded faults: texts that occur once in the package, tests that exist, and a verdict on each."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tools.mutants import LIVED, RECORD, ROOT, SUITES, Mutant, main, module_of, mutants, sources, verdict


def test_every_text_occurs_once_and_every_test_exists() -> None:
    texts = sources()
    listed = mutants()
    for mutant in listed:
        module_of(mutant, texts)
        assert mutant.new != mutant.text
        assert all((ROOT / path).exists() for path in mutant.tests), mutant.name
    assert len({mutant.name for mutant in listed}) == len(listed) >= 60


def test_the_record_holds_verdicts_on_mutants() -> None:
    record = json.loads(RECORD.read_text())
    assert record.keys() <= {mutant.name for mutant in mutants()}
    assert set(record.values()) <= {*SUITES, LIVED}


@pytest.mark.parametrize(("text", "count"), [("nowhere in the package", 0), ("import torch", "[0-9]{2,}")])
def test_a_text_that_does_not_occur_once_is_refused(text: str, count: object) -> None:
    with pytest.raises(LookupError, match=f"occurs {count} times"):
        module_of(replace(mutants()[0], text=text), sources())


def test_a_fault_is_noticed_and_undone(tmp_path: Path) -> None:
    (tmp_path / "unilinattn").mkdir()
    (tmp_path / "unilinattn" / "__init__.py").touch()
    module, tests = tmp_path / "unilinattn" / "sums.py", tmp_path / "test_sums.py"
    module.write_text("def total(a, b):\n    return a + b\n\n\ndef unused():\n    return 1\n")
    tests.write_text("from unilinattn.sums import total\n\n\ndef test_total():\n    assert total(2, 3) == 5\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\npythonpath = .\n")
    before = module.read_text()
    for text, new, found in (("a + b", "a - b", "test"), ("return 1", "return 2", LIVED)):
        assert verdict(Mutant(text, text, new, ("test_sums.py",)), tmp_path, suites=["test"]) == found
    assert module.read_text() == before
    assert not list(tmp_path.rglob("*.pyc")), "of two faults in one second, the second would run the first one's code"


def test_unknown_words_select_no_mutant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "no such mutant"]) == 0
    assert capsys.readouterr().out == ""
