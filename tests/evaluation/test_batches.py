from typing import Any

import pytest

import unilinattn as ula
from tests.evaluation import tiny
from unilinattn.errors import OptionError


def test_a_batch_has_the_numbers_of_its_samples() -> None:
    model, data, selection = tiny.model().double(), tiny.data(), tiny.selection()
    asked: dict[str, Any] = {"methods": ["logit", "raw"], "metrics": ["ap", "hit_at_1"], "selection": selection}
    alone, together = (ula.evaluate({"m": model}, data, **asked, batch_size=size) for size in (1, len(data)))
    assert len(alone) == len(together)
    for one, other in zip(alone, together, strict=True):
        assert {**one, "value": 0, "parts": 0} == {**other, "value": 0, "parts": 0}
        assert one["value"] == pytest.approx(other["value"], abs=1e-9)
    with pytest.raises(OptionError, match="mine is a function, which takes one sample at a time"):
        ula.evaluate({"m": model}, data, {"mine": lambda trace, sample: sample}, ["ap"], batch_size=2)
    with pytest.raises(OptionError, match="batch_size=0; give 1 or more samples"):
        ula.evaluate({"m": model}, data, ["logit"], ["ap"], batch_size=0)
