"""The rule of calls of mixing functions."""

from typing import Any

import torch
from torch import Tensor

from unilinattn.call.functions import meaning_of
from unilinattn.errors import UncoveredError
from unilinattn.mixers import Substep
from unilinattn.operator.stages import Branch, Chain, Matrix, Mix, Scale
from unilinattn.recording.compilation import MIXING, Compilation, rule
from unilinattn.recording.graph import Node
from unilinattn.recording.layout import Carried, whole
from unilinattn.rules.mixing_functions import Frame, MixingFunction, unflattened


@rule(MIXING)
def mixed(run: Compilation, node: Node, *args: Any, **kwargs: Any) -> Carried:
    """Append the stages of a call of a mixing function to its carried argument."""
    function: MixingFunction = meaning_of(node.func)
    arguments = function.arguments(node.func, args, kwargs)
    carried, bounds = run.value(arguments[function.carried]), run.number(arguments.get(function.packed))
    # A gate among the arguments may be in the graph.
    numbers = {name: value.value if isinstance(value, Node) else run.number(value) for name, value in arguments.items()}
    index = function.by_token(carried.index)
    shape, steps = index.shape, _steps(carried, function.tokens[0])
    x = numbers[function.carried].detach()
    # The steps of a token are channels of the layer.
    carried = carried.moved(index.unflatten(1, (-1, steps)).flatten(2))
    carried = carried.arranged() if bounds is None else carried.in_place()
    frame = _frame(carried, None if bounds is None else bounds // (1 if function.steps else steps))
    x = frame.tokens(function.by_token(x), steps)
    # The mode of a run, if there is one, freezes the factors of the core.
    with torch._C._EnableTorchFunction():
        flow = function.flow(frame, steps, x, numbers)
        chain, channels = flow.chain, flow.value.shape[2]
    carried = carried.follow(chain if steps == 1 else _by_step(chain, steps, carried), channels)
    result = unflattened(frame.packed(carried.index), shape)
    if steps > 1 and function.steps is None:
        # Only the last step of a token is read: no stages compute the others.
        others = torch.full_like(result.unsqueeze(2), -1).expand(-1, -1, steps - 1, *result.shape[2:])
        result = torch.cat([others, result.unsqueeze(2)], 2).flatten(1, 2)
    return carried.moved(function.as_result(result))


def _steps(carried: Carried, axis: int) -> int:
    """Return how many consecutive entries of an axis are channels of one token."""
    split = [(size, is_row) for size, is_row in carried.layout.split[axis] if size > 1]
    return split[-1][0] if split and not split[-1][1] else 1


def _by_step(chain: Chain, steps: int, carried: Carried) -> Chain:
    """Return the sum of the stages from each step of a token to its last one."""
    *before, last = chain
    if any(not isinstance(stage, Scale) for stage in before) or not isinstance(last, Mix):
        raise UncoveredError("the steps of a token pass more than one core mixer")
    channels = torch.eye(carried.shape[2], dtype=carried.like.dtype, device=carried.like.device).chunk(steps)
    masks = [Scale(stage.role, stage.scale[:, ::steps]) for stage in before if isinstance(stage, Scale)]
    mixers = [Mix("core", Substep(last.mixer, steps, step)) for step in range(steps)]
    chains = ((*masks, Matrix("input", rows), mixer) for rows, mixer in zip(channels, mixers, strict=True))
    return (Branch("core", tuple(chains)),)


def _frame(carried: Carried, bounds: Tensor | None) -> Frame:
    """Return the frame in which the carried tensor's value lies, in the order of the layer's tokens.

    Raises `UncoveredError` if the sequences of the call are not those of the layer.
    """
    batch, length, channels = carried.shape
    rows = carried.index[..., 0] // channels
    if bounds is None:
        if not torch.equal(carried.index, whole(carried.shape, carried.index)):
            raise UncoveredError("its sequences are not those of the layer")
        return Frame(batch, length, None)
    packed, sizes = rows.flatten(), bounds.diff().tolist()
    sequences = [sequence for sequence in packed.split(sizes) if len(sequence)]
    if any(bool((sequence.diff() != 1).any()) for sequence in sequences):
        raise UncoveredError("padding between real tokens, which it removes; pad on one side only")
    first, last = ([int(sequence[k]) // length for sequence in sequences] for k in (0, -1))
    if first != last or len(set(first)) < len(first):
        raise UncoveredError("its packed sequences are not those of the layer")
    return Frame(batch, length, packed)
