"""Tables of tiny hosts as parameters of tests; most configurations are marked slow."""

import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from zlib import crc32

import pytest

from tools.coverage_runs import models
from unilinattn.testing import Host
from unilinattn.testing import hosts as folder

ELSEWHERE = {"fla": "tests/fla", "timm": "tests/architectures/test_timm.py"}
"""Tables whose packages have separate environments, and the tests that run them there."""

LARGE = (
    *("zamba", "zamba2", "falcon h1", "jamba", "deepseek 2", "afmoe, gated, sliding window"),
    *("kimi linear", "olmo hybrid", "qwen3.5", "glm 5 next"),
)
"""Hosts whose runs take several times that of the others, and whose structures other hosts have too."""


STRUCTURES = ("bert", "gpt neox, parallel", "vit", "deepseek 3.2, selected keys", "glm 5 next")
"""Hosts with a structure that the first of their architecture lack, such as a residual inside of the layer."""


def tables() -> Mapping[str, Sequence[Host]]:
    """Return the tables of hosts in `unilinattn.testing.hosts` by module name, except those in `ELSEWHERE`."""
    modules = {name: import_module(f"{folder.__name__}.{name}") for _, name, _ in pkgutil.iter_modules(folder.__path__)}
    tables_by_name = {name: module.HOSTS for name, module in modules.items() if hasattr(module, "HOSTS")}
    assert tables_by_name.keys() > ELSEWHERE.keys()
    return {name: table for name, table in tables_by_name.items() if name not in ELSEWHERE}


def every() -> list[Host]:
    """Return the hosts of all these tables."""
    return [host for table in tables().values() for host in table]


def named(name: str) -> Host:
    """Return the host with this name."""
    return next(host for host in every() if host.name == name)


def cases(
    hosts: Sequence[Host],
    usual: Iterable[str] = (),
    prefix: str = "",
    *,
    large: Iterable[str] = (),
    turn: int | None = None,
) -> list[object]:
    """Return a parameter for each host; slow except for `usual` and the first of each architecture without `large`.

    With a `turn` only one configuration of each model that has it, `STRUCTURES` and the first of each architecture are
    left, and the latter are slow without the turn: tests that ask different questions about one run of a host share the
    hosts, while `check_architecture` runs on all configurations.
    """
    first = set({host.architecture: host.name for host in reversed(hosts)}.values())
    takes_turn = {host.name for host in hosts} if turn is None else of_turn(hosts, turn)
    quick = ((first & takes_turn) | {*usual}) - {*large}
    slow = pytest.mark.slow
    chosen = [host for host in hosts if host.name in first | takes_turn | quick or host.name in STRUCTURES]
    return [pytest.param(host, id=prefix + host.name, marks=() if host.name in quick else slow) for host in chosen]


def of_turn(hosts: Sequence[Host], turn: int) -> set[str]:
    """Return the names of the models that the first, second or third of three tests runs, for a turn of 0, 1 or 2."""
    return {host.name for host in models(hosts) if crc32(host.name.encode()) % 3 == turn}


def every_host(
    hosts: Sequence[Host],
    name: str = "host",
    *,
    usual: Iterable[str] = (),
    large: Iterable[str] = (),
    turn: int | None = None,
) -> pytest.MarkDecorator:
    """Parametrise a test with a table of hosts (see `cases`)."""
    return pytest.mark.parametrize(name, cases(hosts, usual, large=large, turn=turn))
