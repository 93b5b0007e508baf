"""The hosts of these tests are those of the adapters: what cannot be traced is skipped alike."""

from tests.architectures.conftest import hosts_that_can_be_traced

__all__ = ["hosts_that_can_be_traced"]
