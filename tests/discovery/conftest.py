"""Skips of hosts that the installed packages cannot build, as in the tests of the adapters."""

from tests.architectures.conftest import hosts_that_can_be_traced

__all__ = ["hosts_that_can_be_traced"]
