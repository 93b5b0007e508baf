"""Skips what the installed versions of the hosts' packages cannot do, naming the reason."""

import pytest
from torch import nn

from unilinattn.testing import Host
from unilinattn.testing.versions import unavailable

BUILD = Host.model


@pytest.fixture(autouse=True)
def hosts_that_can_be_traced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip a test at the first host that cannot be traced, unless it is marked to be about that."""
    if request.node.get_closest_marker("refused") is not None:
        return

    def model(host: Host, seed: int = 0) -> nn.Module:
        with pytest.MonkeyPatch.context() as own:
            own.setattr(Host, "model", BUILD)
            reason = unavailable(host)
        if reason is not None:
            pytest.skip(f"{host.name}: {reason}")
        return BUILD(host, seed)

    monkeypatch.setattr(Host, "model", model)
