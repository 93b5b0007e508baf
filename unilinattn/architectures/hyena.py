"""H3 and Hyena: long convolutions between gates."""

from torch import Tensor

from unilinattn.architectures.call import Call, padded_left
from unilinattn.flow import Flow
from unilinattn.mixers import Toeplitz, ToeplitzLowRank
from unilinattn.registry import register_architecture


def _leak(module: object, mask: Tensor) -> str | None:
    return "the biases of its projections make keys and values of padded positions" if padded_left(mask) else None


@register_architecture("unilinattn.models.hyena.Hyena", name="hyena", kind="Hyena (long convolutions)", leak=_leak)
def hyena(call: Call) -> Flow:
    """Hyena of this package, of any order: short convolution, then gates and Toeplitz cores in turn.

    Poli et al., "Hyena Hierarchy" (2023), Definition 3.1. The values carry, the gates are frozen; `core` is what
    stands from the first long convolution to the last, the gates between them included, and `unified` adds the short
    convolution, the skips and the outer gates.
    """
    host, weight = call.host, call.weight
    batch, length = call.input.shape[:2]
    *gates, _ = _projected(call).split(host.d_model, dim=-1)
    flow = _values(call)
    for gate, taps, skip in zip(gates[:0:-1], weight(host.filters(length)), weight(host.skips), strict=True):
        flow.gate(gate).core(Toeplitz(taps, batch=batch, length=length), skip=skip)
    return flow.gate(gates[0]).matrix(weight(host.out_proj.weight), weight(host.out_proj.bias), role="output")


@register_architecture(
    "unilinattn.models.hyena.MultiHyena", name="multi-hyena", kind="multi-head Hyena (long convolution)", leak=_leak
)
def multi_hyena(call: Call) -> Flow:
    """Multi-head Hyena of this package: one long convolution a head over keys times values, read by queries.

    Massaroli et al., "Laughing Hyena Distillery" (2023), Section 4.
    """
    host, weight = call.host, call.weight
    query, key, _ = _projected(call).chunk(3, dim=-1)
    taps, skip = weight(host.filter_fn(call.input.shape[1])), weight(host.filter_fn.bias)
    flow = _convolve_products(_values(call), taps, skip, query, key)
    return flow.matrix(weight(host.out_proj.weight), weight(host.out_proj.bias), role="output")


@register_architecture("unilinattn.models.h3.H3", name="h3", kind="H3 (long convolution)", leak=_leak)
def h3(call: Call) -> Flow:
    """H3 of this package: shifted keys times values through one convolution a head, read by queries.

    Fu et al., "Hungry Hungry Hippos" (2023), Algorithm 1. The values carry; the keys, with the shift that they pass,
    and the queries are frozen.
    """
    host, weight = call.host, call.weight
    batch, length = call.input.shape[:2]
    query = Flow(call.input).matrix(weight(host.q_proj.weight), weight(host.q_proj.bias), role="input").value
    keys = Flow(call.input).matrix(weight(host.k_proj.weight), weight(host.k_proj.bias), role="input")
    keys.core(Toeplitz(weight(host.key_kernel(length)), batch=batch, length=length), skip=weight(host.ssm_k_D))

    flow = Flow(call.input).matrix(weight(host.v_proj.weight), weight(host.v_proj.bias), role="input")
    _convolve_products(flow, weight(host.value_kernel(length)), weight(host.D), query, keys.value)
    # The host hands (head, channel) on as (channel, head).
    order = weight(host.output_linear.weight).unflatten(1, (host.head_dim, -1)).transpose(1, 2).flatten(1)
    return flow.matrix(order, weight(host.output_linear.bias), role="output")


def _projected(call: Call) -> Tensor:
    """Return everything that the projection and the short convolution make: gates or queries and keys, then values."""
    host, weight = call.host, call.weight
    flow = Flow(call.input).matrix(weight(host.in_proj.weight), weight(host.in_proj.bias), role="input")
    return flow.conv(weight(host.short_filter.weight), weight(host.short_filter.bias)).value


def _values(call: Call) -> Flow:
    """Start a flow with the projection and the short convolution of the values, the last channels of both."""
    host, width = call.host, call.input.shape[2]
    weight, bias = (call.weight(t)[-width:] for t in (host.in_proj.weight, host.in_proj.bias))
    taps, offset = (call.weight(t)[-width:] for t in (host.short_filter.weight, host.short_filter.bias))
    return Flow(call.input).matrix(weight, bias, role="input").conv(taps, offset)


def _convolve_products(flow: Flow, taps: Tensor, skip: Tensor, query: Tensor, key: Tensor) -> Flow:
    """Append q_i (sum_j K_{i-j} k_j v_j + D k_i v_i), a head at a time; heads of one channel are gates about K."""
    batch, length = query.shape[:2]
    if len(taps) == query.shape[2]:
        return flow.gate(key).core(Toeplitz(taps, batch=batch, length=length), skip=skip).gate(query)
    query, key = (factor.unflatten(2, (len(taps), -1)) for factor in (query, key))
    beside = flow.fork().scale(skip * (query * key).sum(-1), role="skip")
    return flow.join(flow.fork().core(ToeplitzLowRank(taps, query, key)), beside, role="core")
