"""Methods: objects such as `Latim(p=1)`, which `explain`, `estimate`, `compare` and `evaluate` take.

The function of each, from a trace to scores, is in a file of its name.
"""

from inspect import cleandoc

from unilinattn.methods.alti import alti
from unilinattn.methods.alti_logit import alti_logit
from unilinattn.methods.attention_grad import attention_grad
from unilinattn.methods.attn_lrp import attn_lrp
from unilinattn.methods.attribution import attribution
from unilinattn.methods.contribution import contribution
from unilinattn.methods.gradient import gradient
from unilinattn.methods.input_x_gradient import input_x_gradient
from unilinattn.methods.integrated_gradients import integrated_gradients
from unilinattn.methods.kernel_shap import kernel_shap
from unilinattn.methods.knockout import knockout
from unilinattn.methods.latim import latim
from unilinattn.methods.logit import logit
from unilinattn.methods.lrp import lrp
from unilinattn.methods.occlusion import occlusion
from unilinattn.methods.raw import raw
from unilinattn.methods.rollout import rollout
from unilinattn.methods.run import compare, estimate, explain
from unilinattn.methods.smoothgrad import smoothgrad
from unilinattn.methods.transformer_attribution import transformer_attribution
from unilinattn.options import (
    Alti,
    AltiLogit,
    AttentionGrad,
    AttnLrp,
    Attribution,
    Contribution,
    Gradient,
    InputXGradient,
    IntegratedGradients,
    KernelShap,
    Knockout,
    Latim,
    Logit,
    Lrp,
    Occlusion,
    Options,
    Raw,
    Rollout,
    Smoothgrad,
    TransformerAttribution,
)
from unilinattn.options.described import signature_text
from unilinattn.registry import registered_methods

__all__ = [
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
    "Occlusion",
    "Options",
    "Raw",
    "Rollout",
    "Smoothgrad",
    "TransformerAttribution",
    "alti",
    "alti_logit",
    "attention_grad",
    "attn_lrp",
    "attribution",
    "compare",
    "contribution",
    "estimate",
    "explain",
    "gradient",
    "input_x_gradient",
    "integrated_gradients",
    "kernel_shap",
    "knockout",
    "latim",
    "logit",
    "lrp",
    "occlusion",
    "raw",
    "rollout",
    "smoothgrad",
    "transformer_attribution",
]

# Python run with -OO has no docstrings.
if explain.__doc__ is not None:
    explain.__doc__ = (
        f"{cleandoc(explain.__doc__)}\n\nMethods and their options, whose meanings `unilinattn list NAME` prints:\n\n"
        + "\n".join(signature_text(each.name, each.summary, each.options) for each in registered_methods().values())
        + "\n"
    )
