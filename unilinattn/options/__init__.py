"""Every method as a class: its options are the fields, and its name, question and needs are data.

Nothing here imports torch, so that the command line lists methods at once; `unilinattn.methods` implements them.
"""

from unilinattn.options.base import Need, Options
from unilinattn.options.gradients import Gradient, InputXGradient, IntegratedGradients, Smoothgrad
from unilinattn.options.maps import Raw, Rollout
from unilinattn.options.removal import KernelShap, Knockout, Occlusion
from unilinattn.options.shares import AltiLogit, AttnLrp, Logit, Lrp
from unilinattn.options.vectors import Alti, Latim
from unilinattn.options.weighted import AttentionGrad, Attribution, Contribution, TransformerAttribution

METHODS: tuple[type[Options], ...] = (
    Logit,
    AttnLrp,
    Lrp,
    AltiLogit,
    Knockout,
    Occlusion,
    KernelShap,
    Alti,
    Latim,
    Raw,
    Rollout,
    Contribution,
    Attribution,
    AttentionGrad,
    TransformerAttribution,
    Gradient,
    InputXGradient,
    IntegratedGradients,
    Smoothgrad,
)
"""The methods of this package, those of one family side by side."""

__all__ = [
    "METHODS",
    "Alti",
    "AltiLogit",
    "AttentionGrad",
    "AttnLrp",
    "Attribution",
    "Contribution",
    "Gradient",
    "InputXGradient",
    "IntegratedGradients",
    "KernelShap",
    "Knockout",
    "Latim",
    "Logit",
    "Lrp",
    "Need",
    "Occlusion",
    "Options",
    "Raw",
    "Rollout",
    "Smoothgrad",
    "TransformerAttribution",
]
