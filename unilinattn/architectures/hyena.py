"""H3 and Hyena: long convolutions between gates."""

from torch import Tensor

from unilinattn.call import Call, padded_left
from unilinattn.mixers import Toeplitz, ToeplitzLowRank
from unilinattn.operator.flow import Flow
from unilinattn.registry import register_architecture


def _leak(module: object, mask: Tensor) -> str | None:
    return "the biases of its projections make keys and values of padded positions" if padded_left(mask) else None


@register_architecture(
    "unilinattn.models.hyena.Hyena", name="hyena", kind="Hyena (long convolutions)", padding_leak=_leak
)
def hyena(call: Call) -> Flow:
    """Hyena of `unilinattn.models`, of any order: a short convolution, then alternating gates and Toeplitz cores.

    Poli et al., "Hyena Hierarchy" (2023), Definition 3.1. The values carry, the gates are frozen. `core` spans the
    first long convolution to the last, the gates between them included; `unified` adds the short convolution, the
    skips and the outer gates.
    """
    host, tensor = call.host, call.tensor
    batch, length = call.input.shape[:2]
    *gates, _ = _projected(call).split(host.d_model, dim=-1)
    flow = _values(call)
    for gate, taps, skip in zip(gates[:0:-1], tensor(host.filters(length)), tensor(host.skips), strict=True):
        flow.gate(gate).core(Toeplitz(taps, batch=batch, length=length), skip=skip)
    return flow.gate(gates[0]).matrix(*call.affine(host.out_proj), role="output")


@register_architecture(
    "unilinattn.models.hyena.MultiHyena",
    name="multi-hyena",
    kind="multi-head Hyena (long convolution)",
    padding_leak=_leak,
)
def multi_hyena(call: Call) -> Flow:
    """Multi-head Hyena of `unilinattn.models`: one long convolution per head over keys times values, read by queries.

    Massaroli et al., "Laughing Hyena Distillery" (2023), Section 4.
    """
    host, tensor = call.host, call.tensor
    query, key, _ = _projected(call).chunk(3, dim=-1)
    taps, skip = tensor(host.filter_fn(call.input.shape[1])), tensor(host.filter_fn.bias)
    flow = _convolve_products(_values(call), taps, skip, query, key)
    return flow.matrix(*call.affine(host.out_proj), role="output")


@register_architecture("unilinattn.models.h3.H3", name="h3", kind="H3 (long convolution)", padding_leak=_leak)
def h3(call: Call) -> Flow:
    """H3 of `unilinattn.models`: one long convolution per head over shifted keys times values, read by queries.

    Fu et al., "Hungry Hungry Hippos" (2023), Algorithm 1. The values carry; the shifted keys and the queries are
    frozen.
    """
    host, tensor = call.host, call.tensor
    batch, length = call.input.shape[:2]
    query = Flow(call.input).matrix(*call.affine(host.q_proj), role="input").value
    keys = Flow(call.input).matrix(*call.affine(host.k_proj), role="input")
    keys.core(Toeplitz(tensor(host.key_kernel(length)), batch=batch, length=length), skip=tensor(host.ssm_k_D))

    flow = Flow(call.input).matrix(*call.affine(host.v_proj), role="input")
    _convolve_products(flow, tensor(host.value_kernel(length)), tensor(host.D), query, keys.value)
    # The host flattens the core's output as (channel, head); the flow's order is (head, channel).
    by_channel = host.output_linear.weight.unflatten(1, (host.head_dim, -1)).transpose(1, 2)
    order = call.stored(by_channel).then(lambda weight: weight.flatten(1))
    return flow.matrix(order, tensor(host.output_linear.bias), role="output")


def _projected(call: Call) -> Tensor:
    """Return the projected and convolved input: gates, or queries and keys, then values, along the channel axis."""
    host = call.host
    flow = Flow(call.input).matrix(*call.affine(host.in_proj), role="input")
    return flow.conv(*call.affine(host.short_filter)).value


def _values(call: Call) -> Flow:
    """Start a flow with the values: the last channels of the projection and of the short convolution."""
    host, width = call.host, call.input.shape[2]
    values = call.affine(host.in_proj)[-width:]
    taps, offset = (call.tensor(t)[-width:] for t in (host.short_filter.weight, host.short_filter.bias))
    return Flow(call.input).matrix(*values, role="input").conv(taps, offset)


def _convolve_products(flow: Flow, taps: Tensor, skip: Tensor, query: Tensor, key: Tensor) -> Flow:
    """Append q_i (sum_j K_{i-j} k_j v_j + D k_i v_i) per head; with one channel per head, q and k are gates."""
    batch, length = query.shape[:2]
    if len(taps) == query.shape[2]:
        return flow.gate(key).core(Toeplitz(taps, batch=batch, length=length), skip=skip).gate(query)
    query, key = (factor.unflatten(2, (len(taps), -1)) for factor in (query, key))
    direct = flow.fork().scale(skip * (query * key).sum(-1), role="skip")
    return flow.join(flow.fork().core(ToeplitzLowRank(taps, query, key)), direct, role="core")
