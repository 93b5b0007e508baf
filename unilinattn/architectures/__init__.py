"""Adapters: one file a family, each from a host's module to the stages of its operator."""

from unilinattn.architectures import attention, bert, mamba, mamba2, s4
from unilinattn.architectures.call import Call

__all__ = ["Call", "attention", "bert", "mamba", "mamba2", "s4"]
