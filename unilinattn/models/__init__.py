"""Reference models without a maintained package, with the parameter names of published checkpoints."""

from unilinattn.models.dss import DSS
from unilinattn.models.gss import GSS
from unilinattn.models.h3 import H3
from unilinattn.models.hyena import Hyena, MultiHyena
from unilinattn.models.hyenadna import HyenaDNAForCausalLM
from unilinattn.models.language_model import MixerForCausalLM
from unilinattn.models.s4 import S4D, S4DConfig, S4DForCausalLM
from unilinattn.models.s4_dplr import S4
from unilinattn.models.s5 import S5
from unilinattn.models.vim import BiMamba, VisionMamba
from unilinattn.models.vim_timm import register_with_timm

__all__ = [
    "DSS",
    "GSS",
    "H3",
    "S4",
    "S4D",
    "S5",
    "BiMamba",
    "Hyena",
    "HyenaDNAForCausalLM",
    "MixerForCausalLM",
    "MultiHyena",
    "S4DConfig",
    "S4DForCausalLM",
    "VisionMamba",
    "register_with_timm",
]
