"""Fixtures for the tests of the evaluation."""

import jaxtyping
import pytest


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the checks of a thorough run, whose errors would precede those of the library."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
