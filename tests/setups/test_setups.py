"""Every set-up works or is refused with an error of the library, as the page states."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.docs.pages import ERROR_FIGURE, same
from tests.setups import arguments, calls, page, states, weights, wrappers
from tests.setups.harness import HOSTS, SETUPS, Outcome, SetUp, first_sentence, outcome, works
from unilinattn import errors
from unilinattn.errors import InputError, UnilinattnError

ERROR = re.compile(r"works: error ([^\s;]+)(.*)")
ROOT = Path(__file__).parents[2]
GROUPS = (wrappers, weights, states, arguments, calls)


def ran() -> dict[str, Outcome]:
    """Run every set-up in a separate process, where no type check precedes the errors of the library."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.setups"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: Outcome(*values) for name, values in json.loads(done.stdout.splitlines()[-1]).items()}


def wrong(entry: SetUp, actual: Outcome) -> str | None:
    """Return a message on an unexpected outcome, or None."""
    if entry.refused is None:
        return None if actual.kind == "works" else f"must work, and is {actual}"
    if actual.kind != "refused":
        return f"must be refused, and {actual}"
    raised = getattr(errors, actual.words.split("`")[1], None)
    fits = isinstance(raised, type) and issubclass(raised, entry.refused)
    return None if fits else f"must raise {entry.refused.__name__}, and is {actual}"


def agree(shown: str, actual: str) -> bool:
    """Whether two outcomes agree; all errors that are rounding agree, including 0, since small hosts can be exact."""
    worked = [error for text in (shown, actual) if (error := ERROR.fullmatch(text))]
    rounding = len(worked) == 2 and all(float(error[1]) <= ERROR_FIGURE for error in worked)
    return (rounding and worked[0][2] == worked[1][2]) or same(shown, actual)


def test_every_set_up_works_or_is_refused_as_on_the_page(subtests: pytest.Subtests) -> None:
    outcomes, shown = ran(), page.outcomes(page.PAGE.read_text())
    for entry in SETUPS:
        with subtests.test(entry.name):
            actual = outcomes[entry.name]
            if actual.kind == "not run":
                pytest.skip(actual.words)
            assert (complaint := wrong(entry, actual)) is None, f"{entry.name} {complaint}"
            assert agree(shown[entry.name], str(actual)), f"the page says {shown[entry.name]!r}, and it is {actual}"


def test_outcomes_agree_up_to_rounding() -> None:
    assert agree("works: error 2e-07", "works: error 0e+00")
    assert agree("works: error 1e-02", "works: error 1e-02")
    assert not agree("works: error 2e-07", "works: error 3e-02")
    assert not agree("works: error 1e-02", "works: error 3e-02")
    assert not agree("works: error 2e-07", "works: error 2e-07; refused: no")
    assert agree("works: error 2e-07; refused: no", "works: error 1e-07; refused: no")
    assert not agree("works: error 2e-07", "refused: `InputError`: no")
    assert not agree("refused: `InputError`: no", "refused: `InputError`: yes")


def test_the_page_has_every_set_up_once() -> None:
    names = [entry.name for entry in SETUPS]
    assert len(names) == len(set(names)) >= 30
    assert set(page.outcomes(page.PAGE.read_text())) == set(names)
    assert {entry.group for entry in SETUPS} == set(page.GROUPS)
    assert {group.__name__.rpartition(".")[2] for group in GROUPS} == set(page.GROUPS)


def test_a_written_page_can_be_read() -> None:
    outcomes = {entry.name: Outcome("works", f"error 3e-07 | of *{entry.group}*") for entry in SETUPS}
    assert page.outcomes(page.text(outcomes)) == {name: str(outcome) for name, outcome in outcomes.items()}


@pytest.mark.parametrize(
    ("refused", "actual", "complaint"),
    [
        (None, Outcome("works", "error 3e-07"), None),
        (None, Outcome("refused", "`InputError`: no"), "must work"),
        (None, Outcome("broken", "TypeError: no"), "must work"),
        (InputError, Outcome("refused", "`InputError`: no"), None),
        (InputError, Outcome("refused", "`OptionError`: no"), "must raise InputError"),
        (InputError, Outcome("works", "error 3e-07"), "must be refused"),
        (InputError, Outcome("broken", "TypeError: no"), "must be refused"),
        (UnilinattnError, Outcome("refused", "`OptionError`: no"), None),
    ],
)
def test_an_unexpected_outcome_is_reported(
    refused: type[UnilinattnError] | None, actual: Outcome, complaint: str | None
) -> None:
    message = wrong(SetUp("a", "calls", "", (), refused, lambda: 0.0), actual)
    assert message is None if complaint is None else complaint in str(message)


def test_outcomes_of_results_and_errors() -> None:
    def raises(error: Exception):
        def run() -> float:
            raise error

        return run

    def of(run, *needs: str) -> str:
        return str(outcome(SetUp("a", "calls", "", needs, None, run)))

    assert of(lambda: 3.4e-7) == "works: error 3e-07"
    assert (
        of(raises(InputError("ids are text; give numbers. Or not.")))
        == "refused: `InputError`: ids are text; give numbers"
    )
    assert of(raises(TypeError("no"))) == "broken: TypeError: no"
    assert of(raises(StopIteration())) == "broken: StopIteration: "
    assert of(lambda: 0.0, "a_package_that_nobody_wrote") == "not run: a_package_that_nobody_wrote is not installed"
    assert first_sentence("layers.0.mixer: shape (2, 3)\n was 1.5. Then") == "layers.0.mixer: shape (2, 3) was 1.5"


class Shifted(nn.Module):
    """A wrapper with an output other than that of the wrapped model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids).logits + 1e-2


def test_a_trace_that_differs_from_a_direct_call_is_reported() -> None:
    host = HOSTS["Mamba"]
    ids, model = host.inputs(), host.model()
    assert works(model, ids, lambda: model(ids), like=(host.model(), ids)) <= 1e-5
    with pytest.raises(AssertionError, match="output differs by"):
        works(model, ids, lambda: Shifted(model)(ids))
    with pytest.raises(AssertionError, match=r"map of backbone.layers.0.mixer differs by"):
        works(model, ids, lambda: model(ids), like=(host.model(seed=1), ids))
    with pytest.raises(AssertionError, match="layers differ"):
        works(model, ids, lambda: model(ids), like=(HOSTS["Jamba"].model(), ids))
