"""The conformance kit: laws for every mixer, operator and adapter, and tiny hosts to test adapters on."""

from unilinattn.call.exactness import TOLERANCES, relative_error, tolerance
from unilinattn.testing.checks import LawViolation, left_as_found, require_linear_memory
from unilinattn.testing.conformance import LayerVerdict, Verdict, check_architecture, examine
from unilinattn.testing.hosts import HOSTS, Host, randomize
from unilinattn.testing.laws import HOST_LAWS, OPERATOR_LAWS, check_operator, operator_passes
from unilinattn.testing.margins import Margin, recorded_margins
from unilinattn.testing.mixer_laws import MIXER_LAWS, batch_is_a_loop, check_mixer, gradients_are_finite, mixer_passes
from unilinattn.testing.promote import promoted
from unilinattn.testing.rounding import host_rounding, rounding_limit

__all__ = [
    "HOSTS",
    "HOST_LAWS",
    "MIXER_LAWS",
    "OPERATOR_LAWS",
    "TOLERANCES",
    "Host",
    "LawViolation",
    "LayerVerdict",
    "Margin",
    "Verdict",
    "batch_is_a_loop",
    "check_architecture",
    "check_mixer",
    "check_operator",
    "examine",
    "gradients_are_finite",
    "host_rounding",
    "left_as_found",
    "mixer_passes",
    "operator_passes",
    "promoted",
    "randomize",
    "recorded_margins",
    "relative_error",
    "require_linear_memory",
    "rounding_limit",
    "tolerance",
]
