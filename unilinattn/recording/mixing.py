"""The rule of calls of mixing functions."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from unilinattn.call.functions import meaning_of
from unilinattn.errors import UncoveredError
from unilinattn.mixers import Substep
from unilinattn.operator.stages import Branch, Chain, Matrix, Mix, Scale
from unilinattn.recording.compilation import MIXING, Compilation, rule
from unilinattn.recording.layout import Carried, whole
from unilinattn.recording.nodes import Node
from unilinattn.rules.mixing_functions import Frame, MixingFunction, unflattened


@rule(MIXING)
def mixed(run: Compilation, node: Node, *args: Any, **kwargs: Any) -> Carried:
    """Append the stages of a call of a mixing function to its carried argument."""
    function: MixingFunction = meaning_of(node.func)
    arguments = function.arguments(node.func, args, kwargs)
    carried, bounds = run.value(arguments[function.carried]), run.number(arguments.get(function.packed))
    # A gate among the arguments may be in the graph.
    numbers = {name: value.value if isinstance(value, Node) else run.number(value) for name, value in arguments.items()}
    if function.channelwise and (heads := Heads.of(carried)) is not None:
        return _by_head(function, carried, heads, numbers)
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


@dataclass(frozen=True)
class Heads:
    """Heads that a tensor (sequence and head, token, channel) has in its first axis.

    Attributes:
        sequences, count: numbers of sequences, and of heads.
        first: whether the heads are the outer ones.
    """

    sequences: int
    count: int
    first: bool

    @classmethod
    def of(cls, carried: Carried) -> "Heads | None":
        """Return the heads in the first axis of a carried tensor, None if it has none."""
        split = [(size, is_row) for size, is_row in carried.layout.split[0] if size > 1]
        if carried.index.ndim != 3 or len(split) > 2 or all(is_row for _, is_row in split):
            return None
        count = next(size for size, is_row in split if not is_row)
        return cls(len(carried.index) // count, count, not split[0][1])

    def as_channels(self, tensor: Tensor) -> Shaped[Tensor, "batch token channel"]:
        """Return a tensor with the channels of all heads as those of the sequence."""
        apart = tensor.unflatten(0, (self.count, self.sequences) if self.first else (self.sequences, self.count))
        return apart.movedim(0 if self.first else 1, 2).flatten(2)

    def as_sequences(self, tensor: Shaped[Tensor, "batch token channel"]) -> Tensor:
        """Return the tensor with the heads in its first axis."""
        return tensor.unflatten(2, (self.count, -1)).movedim(2, 0 if self.first else 1).flatten(0, 1)


def _by_head(function: MixingFunction, carried: Carried, heads: Heads, numbers: dict[str, Any]) -> Carried:
    """Append the stages of a function whose sequences are heads of the layer's."""
    shape = carried.index.shape
    carried = carried.moved(heads.as_channels(carried.index)).arranged()
    is_factor = {name: isinstance(value, Tensor) and value.shape == shape for name, value in numbers.items()}
    numbers = {name: heads.as_channels(value) if is_factor[name] else value for name, value in numbers.items()}
    with torch._C._EnableTorchFunction():
        flow = function.flow(_frame(carried, None), 1, numbers[function.carried].detach(), numbers)
        carried = carried.follow(flow.chain, flow.value.shape[2])
    return carried.moved(heads.as_sequences(carried.index))


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
