"""Tiny hosts of real packages, with random weights, by family."""

from unilinattn.testing.hosts.basic import HOSTS, VOCABULARY, Host, host, randomize, transformers_model

__all__ = ["HOSTS", "VOCABULARY", "Host", "host", "randomize", "transformers_model"]
