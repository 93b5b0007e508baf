"""Skips of hosts that the installed versions of their packages cannot build or trace."""

import pytest
from torch import nn


@pytest.fixture(autouse=True)
def hosts_that_can_be_traced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip a test at the first host that cannot be traced, except for tests of this refusal."""
    if request.node.get_closest_marker("refused") is not None:
        return
    # A conftest is imported before a thorough run can check the signatures of what it imports.
    from tests.architectures.versions import reason_to_skip
    from unilinattn.testing import Host

    build = Host.model

    def model(host: Host, seed: int = 0) -> nn.Module:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Host, "model", build)
            reason = reason_to_skip(host)
        if reason is not None:
            pytest.skip(f"{host.name}: {reason}")
        return build(host, seed)

    monkeypatch.setattr(Host, "model", model)
