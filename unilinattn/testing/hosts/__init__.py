"""Tiny hosts of real packages, with random weights, by family."""

from unilinattn.testing.hosts.basic import (
    HOSTS,
    IDS,
    VOCABULARY,
    Host,
    causal_model,
    family,
    host,
    plain_experts,
    randomize,
    transformers_model,
)

__all__ = [
    "HOSTS",
    "IDS",
    "VOCABULARY",
    "Host",
    "causal_model",
    "family",
    "host",
    "plain_experts",
    "randomize",
    "transformers_model",
]
