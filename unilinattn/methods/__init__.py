"""Methods: functions from a trace to scores, one file each, registered by name and run by `explain` and `compare`."""

from unilinattn.methods.alti import alti
from unilinattn.methods.attention_grad import attention_grad
from unilinattn.methods.attribution import attribution
from unilinattn.methods.knockout import knockout
from unilinattn.methods.latim import latim
from unilinattn.methods.logit import logit
from unilinattn.methods.lrp import lrp
from unilinattn.methods.raw import raw
from unilinattn.methods.rollout import rollout
from unilinattn.methods.run import compare, estimate, explain
from unilinattn.methods.transformer_attribution import transformer_attribution

__all__ = [
    "alti",
    "attention_grad",
    "attribution",
    "compare",
    "estimate",
    "explain",
    "knockout",
    "latim",
    "logit",
    "lrp",
    "raw",
    "rollout",
    "transformer_attribution",
]
