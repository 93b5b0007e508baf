"""Tables of tiny hosts, and the configurations of a table that the default run takes; the rest is slow."""

import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module

import pytest

from unilinattn.testing import Host
from unilinattn.testing import hosts as folder

ELSEWHERE = {"fla": "tests/fla", "timm": "tests/architectures/test_timm.py"}
"""Tables whose packages are installed in environments of their own, and the tests that run them there."""


def tables() -> Mapping[str, Sequence[Host]]:
    """Return every table of hosts in `unilinattn.testing.hosts` by the name of its module, but those in `ELSEWHERE`."""
    modules = {name: import_module(f"{folder.__name__}.{name}") for _, name, _ in pkgutil.iter_modules(folder.__path__)}
    found = {name: module.HOSTS for name, module in modules.items() if hasattr(module, "HOSTS")}
    assert found.keys() > ELSEWHERE.keys()
    return {name: table for name, table in found.items() if name not in ELSEWHERE}


def cases(hosts: Sequence[Host], usual: Iterable[str] = (), prefix: str = "") -> list[object]:
    """Return a parameter for each host; all are slow but `usual` and the first of each architecture."""
    first = {host.architecture: host.name for host in reversed(hosts)}
    kept = {*first.values(), *usual}
    slow = pytest.mark.slow
    return [pytest.param(host, id=prefix + host.name, marks=() if host.name in kept else slow) for host in hosts]


def every_host(hosts: Sequence[Host], name: str = "host", *, usual: Iterable[str] = ()) -> pytest.MarkDecorator:
    """Parametrize a test by a table of hosts."""
    return pytest.mark.parametrize(name, cases(hosts, usual))
