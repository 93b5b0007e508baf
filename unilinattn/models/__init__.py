"""Reference models that no package carries, with the parameter names of published checkpoints."""

from unilinattn.models.s4 import S4D, S4DBlock, S4DConfig, S4DForCausalLM

__all__ = ["S4D", "S4DBlock", "S4DConfig", "S4DForCausalLM"]
