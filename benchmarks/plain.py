"""The plain definitions of the papers, against which the timed operations are checked.

Float64, token by token or pair by pair, with all maps and vectors in memory at once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unilinattn.kernels.scan.naive import decay_map, decay_scan
from unilinattn.kernels.scan.recurrences import delta_rule
from unilinattn.mixers import CoreMixer, DeltaRule, Dense, DiagonalDecay, ScalarDecay, Softmax, Toeplitz
from unilinattn.operator.operator import MixerOperator
from unilinattn.operator.stages import Branch, Chain, Matrix, Mix, Scale, Stage, run, walk


def core_of(operator: MixerOperator) -> CoreMixer:
    """Return the core mixer of an operator."""
    stages = (stage for chain in operator.chains.values() for stage in walk(chain))
    return next(stage.mixer for stage in stages if isinstance(stage, Mix) and stage.role == "core")


def head_maps(mixer: CoreMixer, *, by_pairs: bool = False) -> Tensor:
    """Fill the maps (head, query, key) of a mixer, by its recurrence or pair by pair."""
    _, heads, length, _ = mixer.shape
    if isinstance(mixer, (Dense, Softmax)):
        return mixer.tile()[0].double()
    if isinstance(mixer, Toeplitz):
        maps = mixer.taps.new_zeros(heads, length, length, dtype=torch.float64)
        for lag, tap in enumerate(mixer.taps.unbind(1)):
            maps.diagonal(-lag, 1, 2).copy_(tap.double()[:, None].expand(-1, length - lag))
        return maps
    # With unit vectors as values, the outputs are the columns of the map.
    if isinstance(mixer, DeltaRule):
        query, key, strength, decay = mixer.query, mixer.key, mixer.strength, mixer.log_decay
        return delta_rule(query, key, strength, decay, _units(query, length, heads))[0].transpose(0, 1)
    if isinstance(mixer, ScalarDecay):
        query, key, decay = mixer.query, mixer.key, mixer.log_decay.unsqueeze(-1)
        query, key = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (query, key))
        key = key * mixer.key_scale.unsqueeze(-1)
    else:
        assert isinstance(mixer, DiagonalDecay)
        query, key, decay = mixer.factors()
    shape = torch.broadcast_shapes(query.shape, key.shape, decay.shape)
    query, key, decay = (t.expand(shape) for t in (query, key, decay))
    if by_pairs:
        return decay_map(query, key, decay)[0]
    return decay_scan(query, key, decay, _units(query, length, heads))[0].transpose(0, 1)


def mean_map(operator: MixerOperator, *, by_pairs: bool = False) -> Tensor:
    """Fill mean_h alpha_h, (batch, query, key), from the maps of all heads."""
    return head_maps(core_of(operator), by_pairs=by_pairs).mean(0)[None]


def softmax_map(module: nn.Module, x: Tensor, heads: int) -> Tensor:
    """Compute the mean attention map of a GPT-2 layer from its weights."""
    x = x.double()
    projected = x @ module.c_attn.weight.double() + module.c_attn.bias.double()
    query, key, _ = (t.unflatten(2, (heads, -1)).transpose(1, 2) for t in projected.chunk(3, dim=2))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1).mean(1)


def vectors(operator: MixerOperator, *, by_pairs: bool = False) -> Tensor:
    """Return T_ij x_j of all pairs, (query, key, out): maps of all channels, times values, times the projection."""
    chain: Chain = next(iter(operator.chains.values()))
    mixing = [at for at, stage in enumerate(chain) if stage.mixes]
    last = next(at for at, stage in enumerate(chain) if at > mixing[-1] and isinstance(stage, Matrix))
    values = run(chain[: mixing[0]], next(iter(operator.inputs.values())), bias=False)[0].double()
    length, channels = values.shape
    maps = torch.eye(length, dtype=values.dtype, device=values.device).expand(channels, -1, -1)
    maps = _product(chain[mixing[0] : last], maps, by_pairs)
    projection = chain[last]
    assert isinstance(projection, Matrix)
    contributions = torch.einsum("eij,je,oe->ijo", maps, values, projection.weight.double())
    for stage in chain[last + 1 :]:
        assert isinstance(stage, Scale)
        factor = stage.scale[0].double()
        contributions = (
            contributions * factor.repeat_interleave(contributions.shape[2] // factor.shape[1], dim=1)[:, None]
        )
    return contributions


def host_gradient(model: nn.Module, mixer: nn.Module, ids: Tensor) -> Tensor:
    """Compute the gradient of the last token's largest logit at a mixer's output, with the host's backward pass."""
    return host_gradients(model, [mixer], ids)[0]


def host_gradients(model: nn.Module, mixers: Sequence[nn.Module], ids: Tensor) -> tuple[Tensor, ...]:
    """Compute `host_gradient` at the output of each of several mixers."""
    outputs: list[Tensor] = []

    def record(_: nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])

    handles = [mixer.register_forward_hook(record) for mixer in mixers]
    try:
        with torch.enable_grad():
            logits = model(ids).logits[:, -1]
            return torch.autograd.grad(logits.max(-1).values.sum(), outputs)
    finally:
        for handle in handles:
            handle.remove()


def _product(chain: Sequence[Stage], maps: Tensor, by_pairs: bool) -> Tensor:
    """Multiply the maps of all channels (channel, query, key) from the left by the maps of a chain."""
    channels = maps.shape[0]
    for stage in chain:
        if isinstance(stage, Branch):
            maps = torch.stack([_product(inner, maps, by_pairs) for inner in stage.chains]).sum(0)
        elif isinstance(stage, Mix):
            head_map = head_maps(stage.mixer, by_pairs=by_pairs)
            maps = head_map.repeat_interleave(channels // head_map.shape[0], dim=0) @ maps
        else:
            assert isinstance(stage, Scale)
            factor = stage.scale[0].double()
            maps = factor.repeat_interleave(channels // factor.shape[1], dim=1).T.unsqueeze(-1) * maps
    return maps


def _units(like: Tensor, length: int, heads: int) -> Tensor:
    units = torch.eye(length, dtype=torch.float64, device=like.device)
    return units[None, :, None].expand(1, length, heads, length)
