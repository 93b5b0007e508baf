"""Mamba-2 and its relatives: the state-space dual SSD with one decay per head, then a gated norm."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from unilinattn.call import Affine, Call, masks_by_function, package_version, projection_leak, refusing
from unilinattn.errors import HostError
from unilinattn.mixers import ScalarDecay
from unilinattn.operator.flow import Flow, silu
from unilinattn.registry import register_architecture


@register_architecture(
    "transformers.models.mamba2.modeling_mamba2.Mamba2Mixer",
    "transformers.models.bamba.modeling_bamba.BambaMixer",
    "transformers.models.granitemoehybrid.modeling_granitemoehybrid.GraniteMoeHybridMambaLayer",
    name="mamba2",
    kind="Mamba-2 (SSD)",
    padding_leak=projection_leak,
    check=refusing("seq_idx"),
)
def mamba2(call: Call) -> Flow:
    """SSD of Mamba-2 in transformers: groups of heads share query C and key B; the gate, then a grouped RMS norm.

    LaTIM Eq. 13-14 and 24-25. One convolution runs over x, B and C. Only its x slice carries; B and C are frozen.
    """
    return _gated_norm(call, call.host.time_step_limit)


def _check_chunks(call: Call) -> None:
    """Raise `HostError` for several chunks with transformers < 5.17, which passes wrong states between them."""
    call.refuse("seq_idx")
    length = call.input.shape[1]
    if not masks_by_function(call.module) and length > call.host.chunk_size:
        raise HostError(
            f"{call.name} ({type(call.module).__name__} of {package_version(call.module)}) hands the wrong states from "
            f"chunk to chunk: {length} tokens with chunk_size {call.host.chunk_size}. Trace at most chunk_size tokens, "
            "or use a newer version."
        )


@register_architecture(
    "transformers.models.zamba2.modeling_zamba2.Zamba2MambaMixer",
    "transformers.models.nemotron_h.modeling_nemotron_h.NemotronHMamba2Mixer",
    name="mamba2_floor",
    kind="Mamba-2 (SSD)",
    padding_leak=projection_leak,
    check=_check_chunks,
)
def mamba2_floor(call: Call) -> Flow:
    """SSD of Zamba2 and NemotronH: the step has a lower limit only.

    LaTIM Eq. 13-14 and 24-25.
    """
    host = call.host
    later = masks_by_function(call.module)
    return _gated_norm(call, host.time_step_limit if later else (host.time_step_min, torch.inf))


def _check_tokens(call: Call) -> None:
    """Raise `HostError` if the host returns another number of tokens than it was given."""
    call.refuse("seq_idx")
    if call.output is not None and call.output.shape[1] != call.input.shape[1]:
        raise HostError(
            f"{call.name} ({type(call.module).__name__} of {package_version(call.module)}) returns "
            f"{call.output.shape[1]} tokens for {call.input.shape[1]}. Trace several tokens, or use a newer version."
        )


@register_architecture(
    "transformers.models.falcon_h1.modeling_falcon_h1.FalconH1Mixer",
    name="falcon_h1",
    kind="Mamba-2 (SSD), multipliers",
    padding_leak=projection_leak,
    check=_check_tokens,
)
def falcon_h1(call: Call) -> Flow:
    """SSD of FalconH1: multipliers on the input and on each part of its projection; norm and gate in either order.

    LaTIM Eq. 13-14 and 24-25. The multipliers are folded into the projection; the norm is optional.
    """
    host, tensor = call.host, call.tensor
    multipliers, (weight, bias) = tensor(host.mup_vector).flatten(), call.affine(host.in_proj)
    weight = weight.then(lambda rows: rows * host.ssm_in_multiplier * multipliers.to(rows.device)[:, None])
    projection = Affine(weight, None if bias is None else bias * multipliers)
    flow, gate = _mixed(call, projection, host.time_step_limit)
    norm = host.norm if host.mamba_rms_norm else None
    if norm is None or not norm.norm_before_gate:
        flow.gate(gate)
    if norm is not None:
        flow.rms_norm(tensor(norm.weight), norm.variance_epsilon, groups=norm.n_groups)
    if norm is not None and norm.norm_before_gate:
        flow.gate(gate)
    return flow.matrix(*call.affine(host.out_proj), role="output")


def _gated_norm(call: Call, limit: Sequence[float]) -> Flow:
    """Build a layer with the order of most hosts: SSD, gate, RMS norm, output projection."""
    host, tensor = call.host, call.tensor
    flow, gate = _mixed(call, call.affine(host.in_proj), limit)
    # Versions whose norm has no `group_size` normalise over all channels.
    groups = host.intermediate_size // getattr(host.norm, "group_size", host.intermediate_size)
    flow.gate(gate).rms_norm(tensor(host.norm.weight), host.norm.variance_epsilon, groups=groups)
    return flow.matrix(*call.affine(host.out_proj), role="output")


def _mixed(call: Call, projection: Affine, limit: Sequence[float]) -> tuple[Flow, Callable[[], Tensor]]:
    """Return the flow up to the core and its skip, and a function that computes the frozen gate."""
    host, tensor = call.host, call.tensor
    inner, heads, groups, state = host.intermediate_size, host.num_heads, host.n_groups, host.ssm_state_size
    mask = call.padding_scale(call.arguments.get("attention_mask"))
    flow = Flow(call.input).scale(mask, role="input")
    layer_input = flow.value
    frozen, step = projection[2 * inner :](layer_input).split([host.conv_dim - inner, heads], dim=-1)
    conv = call.affine(host.conv1d)

    # B and C pass the same convolution and activation as x, in a separate flow that is frozen.
    side = Flow(frozen).conv(*conv[inner:])
    side.activation(host.activation).scale(mask, role="act")
    key, query = (half.unflatten(-1, (groups, state)) for half in side.value.chunk(2, dim=-1))
    delta = functional.softplus(step + tensor(host.dt_bias)).clamp(*limit)
    decay = -torch.exp(tensor(host.A_log)) * delta

    flow.matrix(*projection[inner : 2 * inner], role="input")
    flow.conv(*conv[:inner]).activation(host.activation)
    flow.scale(mask, role="act")
    flow.core(ScalarDecay(query, key, decay, key_scale=delta), skip=tensor(host.D))
    return flow, lambda: silu(projection[:inner](layer_input))
