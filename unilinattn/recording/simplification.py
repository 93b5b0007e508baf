"""Shorter chains of stages for the same map: tokens in another order are read by the matrix of the attention itself."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from unilinattn.mixers import Dense, Gather, Toeplitz
from unilinattn.operator.scopes import has_core
from unilinattn.operator.stages import Branch, Center, Chain, Matrix, Mix, Scale, Stage, walk
from unilinattn.recording.parallel_cores import joined_cores, scaled_core, summed_cores, weighted_core, width


def simplified(chain: Chain, channels: int = 0) -> Chain:
    """Return a chain whose gathers stand beside matrices of tokens, and are part of them where that is possible.

    Windows of tokens are then blocks of one matrix in the order of the model's tokens. `channels` is the number of the
    chain's input channels, 0 if it is unknown.
    """
    stages: list[Stage] = []
    for stage in chain:
        if isinstance(stage, Branch):
            branch = replace(stage, chains=tuple(simplified(inner, width(stages, channels)) for inner in stage.chains))
            for joined in (joined for summed in summed_cores(branch) for joined in _joined_heads(summed)):
                _append(stages, joined, channels)
        else:
            _append(stages, stage, channels)
    return tuple(stages)


def _joined_heads(stage: Stage) -> Chain:
    return joined_cores(stage) if isinstance(stage, Branch) else (stage,)


def _append(stages: list[Stage], stage: Stage, channels: int) -> None:
    """Append a stage; a gather moves before stages that treat all tokens alike."""
    while (weighted := weighted_core(stages, stage, channels)) is not None:
        stage = weighted
        stages.pop()
    if _is_gather(stage):
        place = len(stages)
        # A token that is read from nowhere is zero, and has no bias of an earlier stage.
        pads = _pads(stage)
        while place and _is_uniform(stages[place - 1]) and (not pads or not _has_bias(stages[place - 1])):
            place -= 1
        if place and (joined := _joined(stages[place - 1], stage)) is not None:
            stages[place - 1 : place] = [] if _is_identity(joined) else [joined]
            return
        if place and (first := _cut(stages[place - 1], stage)) is not None:
            # The first tokens of a causal convolution are its convolution of the first tokens.
            later = [first, *stages[place:]]
            del stages[place - 1 :]
            _append(stages, stage, channels)
            stages += later
            return
    elif isinstance(stage, Matrix) and not stage.is_complex and stages and _pads(stages[-1]):
        # A matrix of channels commutes with padding, whose tokens then have its bias: tokens stay beside tokens.
        padding = stages.pop()
        _append(stages, stage, channels)
        stages.append(padding)
        if stage.bias is not None:
            stages.append(_bias_of_padding(padding, stage))
        return
    elif (
        (stages and _is_gather(stages[-1]) and (joined := _joined(stages[-1], stage)) is not None)
        or (isinstance(stage, Matrix) and stages and (joined := _multiplied(stages[-1], stage)) is not None)
        or (isinstance(stage, Scale) and stages and (joined := _shifted(stages[-1], stage)) is not None)
        or (isinstance(stage, Scale) and stages and (joined := scaled_core(stages, stage, channels)) is not None)
    ):
        stages[-1] = joined
        return
    stages.append(stage)


def _is_gather(stage: Stage) -> bool:
    return isinstance(stage, Mix) and isinstance(stage.mixer, Gather) and stage.bias is None


def _pads(stage: Stage) -> bool:
    """Whether a stage reads some tokens from nowhere, and nothing else but tokens."""
    if not (_is_gather(stage) and isinstance(stage, Mix) and isinstance(stage.mixer, Gather)):
        return False
    return bool((stage.mixer.index < 0).any())


def _bias_of_padding(padding: Stage, matrix: Matrix) -> Scale:
    """Return the stage that adds the bias of a matrix to the tokens of padding."""
    assert isinstance(padding, Mix) and isinstance(padding.mixer, Gather) and matrix.bias is not None
    empty = (padding.mixer.index < 0)[..., None].to(matrix.bias)
    return Scale(matrix.role, matrix.bias.new_ones(1, 1, 1), empty * matrix.bias, of_value=False)


def _is_identity(stage: Stage) -> bool:
    if not (_is_gather(stage) and isinstance(stage, Mix) and isinstance(stage.mixer, Gather)):
        return False
    return stage.mixer.shape[2] == stage.mixer.shape[3] and _reads_first(stage.mixer)


def _reads_first(mixer: Gather) -> bool:
    """Whether the queries read the first tokens in their order."""
    index = mixer.index
    return bool((index == torch.arange(index.shape[1], device=index.device)).all())


def _cut(first: Stage, second: Stage) -> Stage | None:
    """Return a convolution of the tokens that a gather reads from its results, None if these are not the first ones."""
    if not (isinstance(first, Mix) and isinstance(first.mixer, Toeplitz) and first.bias is None):
        return None
    if not (isinstance(second, Mix) and isinstance(second.mixer, Gather) and _reads_first(second.mixer)):
        return None
    batch, length = second.mixer.index.shape
    return replace(first, mixer=Toeplitz(first.mixer.taps, batch=batch, length=length))


def _is_uniform(stage: Stage) -> bool:
    """Whether a stage treats all tokens alike."""
    if isinstance(stage, Scale):
        return stage.scale.shape[:2] == (1, 1) and (stage.bias is None or stage.bias.ndim == 1)
    return isinstance(stage, (Matrix, Center))


def _has_bias(stage: Stage) -> bool:
    return isinstance(stage, (Matrix, Scale)) and stage.bias is not None


def _joined(first: Stage, second: Stage) -> Stage | None:
    """Return one token mixer for two, of which one is a gather; None if there is none."""
    if not (isinstance(first, Mix) and isinstance(second, Mix)):
        return None
    a, b = first.mixer, second.mixer
    if isinstance(a, Gather) and isinstance(b, Gather) and first.role == second.role:
        read = a.index.gather(1, b.index.clamp_min(0)).masked_fill(b.index < 0, -1)
        return replace(first, mixer=Gather(read, a.shape[3], like=a.zeros((0,))))
    if isinstance(a, Dense) and isinstance(b, Gather) and first.bias is None and bool((b.index >= 0).all()):
        places = b.index[:, None, :, None].expand(-1, a.heads, -1, a.shape[3])
        return replace(first, mixer=Dense(a.weights.gather(2, places)))
    if isinstance(a, Gather) and isinstance(b, Dense):
        real = a.index >= 0
        weights = b.weights * real[:, None, None]
        places = a.index.clamp_min(0)[:, None, None].expand(weights.shape)
        return replace(
            second, mixer=Dense(weights.new_zeros(*weights.shape[:3], a.shape[3]).scatter_add_(3, places, weights))
        )
    return None


def _multiplied(first: Stage, second: Matrix) -> Stage | None:
    """Return a matrix after an equal selection as one; None if the product would take more numbers than both."""
    if not isinstance(first, Matrix) or first.is_complex or second.is_complex:
        return None
    (out, inner), width = second.shape, first.shape[1]
    if out * width > inner * (out + width):
        return None
    bias = second.bias
    if first.bias is not None:
        level = second.weight @ first.bias
        bias = level if bias is None else bias + level
    return Matrix(second.role, second.weight @ first.weight, bias)


def _shifted(first: Stage, second: Scale) -> Stage | None:
    """Return a stage with the bias of a scale by one after it; None if there is none."""
    ones = second.scale
    if second.bias is None or second.bias.ndim != 1 or ones.numel() != 1 or not bool(ones == 1):
        return None
    if not isinstance(first, (Matrix, Scale)) or (first.bias is not None and first.bias.ndim != 1):
        return None
    if isinstance(first, Matrix) and first.is_complex:
        return None
    return replace(first, bias=second.bias if first.bias is None else first.bias + second.bias)


def with_step_weights(chain: Chain, *, is_term: bool = False, is_read: bool = False) -> Chain:
    """Return a chain in which the weights of the tokens that the steps of a loop read stand in its core.

    A step is a term of a sum and reads tokens by a gather, so the weights of these stand behind it. `is_read`: whether
    another core follows.
    """
    stages: list[Stage] = []
    for number, stage in enumerate(chain):
        followed = is_read or has_core(chain[number + 1 :])
        if isinstance(stage, Branch) and (terms := [inner for inner in stage.chains if not _is_zero(inner)]):
            several = is_term or (len(terms) > 1 and any(map(has_core, terms)))
            terms = [with_step_weights(inner, is_term=several, is_read=followed) for inner in terms]
            stages += terms[0] if len(terms) == 1 else [replace(stage, chains=tuple(terms))]
        elif is_term and _is_gather(stage) and (stage.role == "core" or _is_step(stage)):
            _read_before_weights(stages, stage, followed=followed)
        else:
            stages.append(stage)
    if is_term and not is_read and stages and isinstance(stages[-1], Scale) and stages[-1].weighs:
        # So are the decays of a state that is returned alone.
        stages += _ended(stages)
    return tuple(stages)


def _ended(stages: Sequence[Stage]) -> Chain:
    """Return a gather of all tokens behind stages that mix them by gathers alone, nothing behind others."""
    mixers = [stage.mixer for stage in walk(stages) if isinstance(stage, Mix)]
    gathers = [mixer for mixer in mixers if isinstance(mixer, Gather)]
    if not gathers or len(gathers) < len(mixers):
        return ()
    batch, length = gathers[-1].index.shape
    index = torch.arange(length, device=gathers[-1].index.device).expand(batch, -1)
    return (Mix("core", Gather(index, length, like=gathers[-1].zeros((0,)))),)


def _is_step(gather: Stage) -> bool:
    """Whether a gather reads one token, as the first step of a loop does."""
    assert isinstance(gather, Mix) and isinstance(gather.mixer, Gather)
    return bool(((gather.mixer.index >= 0).sum(1) == 1).all())


def _read_before_weights(stages: list[Stage], gather: Stage, *, followed: bool) -> None:
    """Append a gather before the weights of its tokens, and another one behind them, so that the core has them."""
    assert isinstance(gather, Mix) and isinstance(gather.mixer, Gather)
    index, first = gather.mixer.index, len(stages)
    while first and isinstance(scale := stages[first - 1], Scale) and scale.weighs and scale.bias is None:
        first -= 1
    is_real = index >= 0
    if first == len(stages) or not bool((is_real == is_real[:1]).all()):
        stages.append(gather)
        return
    rows = is_real[0].nonzero()[:, 0]
    read, like = index[:, rows], gather.mixer.zeros((0,))
    weights = [scale.at(read) for scale in stages[first:]]
    stages[first:] = [Mix("core", Gather(read, gather.mixer.shape[3], like=like)), *weights]
    if len(rows) < index.shape[1] or not followed:
        write = torch.full_like(index, -1)
        write[:, rows] = torch.arange(len(rows), device=index.device)
        stages.append(Mix("core", Gather(write, len(rows), like=like)))


def _is_zero(chain: Chain) -> bool:
    """Whether a chain is zero, as a decay of a first state of zeros is."""
    for stage in reversed(chain):
        if stage.has_bias:
            return False
        if isinstance(stage, Scale) and not bool(stage.scale.any()):
            return True
    return False
