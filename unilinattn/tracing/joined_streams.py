"""Streams that a model joins to tokens of earlier ones, such as the levels of a pyramid: the new vectors of each."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from unilinattn.call.nested import tensors
from unilinattn.host.inputs import call_host
from unilinattn.host.isolation import runs_in_gradient_mode
from unilinattn.host.observer import Functions
from unilinattn.host.run import run
from unilinattn.tracing.tokens import TokenCall


@runs_in_gradient_mode(False)
def new_vectors(model: nn.Module, arguments: Mapping[str, Any], calls: Sequence[TokenCall]) -> list[TokenCall]:
    """Return the calls that give each stream vectors which no other stream gave: one run of the model.

    A call that adds or joins them to vectors computed from another stream, as where a level of a pyramid meets the one
    above it, is replaced by the call that returned the other tensor, if that depends on the inputs.
    """
    search = _Search(arguments, calls)
    run(model, lambda: call_host(model, arguments), observer=Functions(search.record))
    return search.calls


class _Search:
    """Follows in one run which tensors depend on the inputs, and which on the vectors of a stream."""

    def __init__(self, arguments: Mapping[str, Any], calls: Sequence[TokenCall]) -> None:
        self.calls = list(calls)
        self._finders = [call.finder() for call in calls]
        self._of_inputs, self._of_stream = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        for tensor in tensors(arguments):
            self._of_inputs[tensor] = True
        self._made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._counts: Counter[tuple[Any, ...]] = Counter()

    def record(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Follow the call of a function."""
        read = list(tensors((args, kwargs)))
        of_inputs, of_stream = (any(t in some for t in read) for some in (self._of_inputs, self._of_stream))
        for number, finder in enumerate(self._finders):
            if finder(func, result):
                if of_stream:
                    self._separate(number, [t for t in read if t in self._of_inputs and t not in self._of_stream])
                of_stream = True
        for tensor in tensors(result):
            for is_member, members in ((of_inputs, self._of_inputs), (of_stream, self._of_stream)):
                if is_member:
                    members[tensor] = True
        if isinstance(result, Tensor):
            kind = func, result.shape[1:]
            self._made[result] = func, self._counts[kind]
            self._counts[kind] += 1
        return result

    def _separate(self, number: int, others: Sequence[Tensor]) -> None:
        """Replace a call by the one that returned the only other tensor with a vector for each of its tokens."""
        call = self.calls[number]
        shape = call.tokens(call.vectors).shape[:2]
        fitting = [t for t in others if t.ndim == call.vectors.ndim and call.tokens(t).shape[:2] == shape]
        if len(fitting) == 1 and fitting[0] in self._made and call.sequences is None:
            self.calls[number] = TokenCall(fitting[0].detach().clone(), call.axis, None, *self._made[fitting[0]])
