"""Run a traced model on other vectors of its tokens, as a function that gradients pass through."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from unilinattn.errors import InputError, OptionError, UncoveredError
from unilinattn.tracing.inputs import call_host, token_ids
from unilinattn.tracing.isolation import Result, in_gradient_mode, isolated
from unilinattn.tracing.logits import kept_positions, logits_at
from unilinattn.tracing.nested import tensors
from unilinattn.tracing.recomputation import constant_parameters
from unilinattn.tracing.recorder import refuse_dropout
from unilinattn.tracing.rerun import Rerun, of_sequences
from unilinattn.tracing.tokens import TokenCall, find_tokens
from unilinattn.tracing.trace import Trace
from unilinattn.tracing.wrappers import plain_run, require_gradients


class EmbeddedModel:
    """A traced model as a function of its tokens' vectors; the host's own code runs, not the operators.

    The vectors are the rows of the embedding table that belong to the token ids, without positions. If the model looks
    up several tables, their rows are concatenated along the channels. For inputs without ids, such as images, the
    vectors are those that enter the first block.

    Attributes:
        vectors: the vectors of the traced inputs, in float32 or more.

    Raises `UncoveredError` for models with two streams of tokens and for ids that are not looked up by
    `torch.nn.functional.embedding`, and `ModelStateError` if a weight changed since the trace.
    """

    vectors: Float[Tensor, "batch token channel"]

    def __init__(self, found: Trace) -> None:
        """Run the model once and record the vectors."""
        self._found, self._model = found, found.host
        self._length = found.layers[-1].output.shape[1]
        self._ids = token_ids(found.arguments)
        self._place: TokenCall | str | None = None
        if getattr(getattr(self._model, "config", None), "is_encoder_decoder", False):
            raise UncoveredError(f"{found.model} has two streams of tokens, and the scores are those of one.")
        if self._ids is None:
            self._place = in_gradient_mode(False, lambda: find_tokens(self._model, found.arguments, found.layers))
        batch = found.layers[-1].output.shape[0]
        record = _Lookups(None, self._place)
        everything, first = torch.arange(batch), torch.zeros(batch, dtype=torch.long)
        in_gradient_mode(False, lambda: self.isolated(lambda: self._call(record, None, everything, first)))
        if isinstance(self._place, TokenCall) and record.vectors:
            self._place.require_same(record.vectors[0])
        recorded = [found.arguments[self._place]] if isinstance(self._place, str) else record.vectors
        if not recorded:
            raise UncoveredError(
                f"{found.model} does not look up its token ids by torch.nn.functional.embedding, so the vectors of "
                "the tokens are unknown; give the model inputs_embeds instead of ids."
            )
        joined = torch.cat(recorded, -1)
        if joined.ndim != 3 or tuple(joined.shape[:2]) != (batch, self._length):
            raise UncoveredError(
                f"{found.model} embeds its inputs as {tuple(joined.shape)}, and its layers have {batch} sequences of "
                f"{self._length} tokens; each token needs one vector."
            )
        self._parts, self._tables = record.parts, record.tables
        self.vectors = joined.detach().to(torch.promote_types(joined.dtype, torch.float32))

    def isolated(self, compute: Callable[[], Result]) -> Result:
        """Call a function that may run the model, restore the model, and return the result.

        The parameters require no gradient meanwhile. Raises `ModelStateError` for weights made in inference mode, and
        `UncoveredError` if a module with weights, such as a quantised one, passes no gradient.
        """
        self._found._weights.require_same(self._model, self._found.model, "its scores would be those of another model")
        require_gradients(self._model)

        def run() -> Result:
            refuse_dropout(self._model)
            for name, module in self._model.named_modules():
                if hasattr(module, "weight") and not isinstance(module, nn.Embedding):
                    module.register_forward_hook(partial(_require_gradient, name), with_kwargs=True)
            with plain_run(self._model), constant_parameters(self._model):
                return compute()

        return isolated(self._model, run)

    def run(
        self,
        vectors: Float[Tensor, "run token channel"],
        sequences: Int[Tensor, " run"],
        positions: Int[Tensor, " batch"] | None,
    ) -> Rerun:
        """Run the model on other vectors, inside `isolated`.

        `sequences` are indices of the traced sequences, whose other inputs, such as a mask, belong to the vectors. A
        host that accepts `logits_to_keep` computes only the logits at `positions`, one for each traced sequence.
        """
        parts = [vectors[..., part] for part in self._parts] if self._parts else [vectors]
        return self._call(_Lookups(parts, self._place), vectors, sequences, positions)

    def baseline(self, baseline: str | int) -> Float[Tensor, "#channel"]:
        """Return the vector that stands for an absent token: "zero", "mean-embedding", or a token id.

        Raises `OptionError` for the last two on inputs without token ids, and `InputError` for an id out of range.
        """
        if baseline == "zero":
            return self.vectors.new_zeros(1)
        if not self._tables:
            raise OptionError(
                f"baseline={baseline!r} needs a table of embeddings, and the inputs have no token ids; use 'zero'."
            )
        size = min(len(table) for table in self._tables)
        if isinstance(baseline, int) and not 0 <= baseline < size:
            raise InputError(f"baseline {baseline} is out of range: the model knows ids 0 to {size - 1}.")
        rows = [table.detach().to(self.vectors) for table in self._tables]
        return torch.cat([row[baseline] if isinstance(baseline, int) else row.mean(0) for row in rows])

    def _call(
        self,
        lookups: "_Lookups",
        vectors: Tensor | None,
        sequences: Int[Tensor, " run"],
        positions: Int[Tensor, " batch"] | None,
    ) -> Rerun:
        given = of_sequences(self._found, sequences)
        if positions is not None:
            given = logits_at(self._model, given, lambda: [positions[sequences]], above=0)
        if isinstance(self._place, str) and vectors is not None:
            given[self._place] = vectors.to(given[self._place], copy=True)
        lookups.ids = token_ids(given) if self._ids is not None else None
        with lookups:
            output = call_host(self._model, given)
        return Rerun(output, (len(sequences), self._length), kept_positions(given, self._length))


class _Lookups(TorchFunctionMode):
    """Records the results of the calls that return the tokens' vectors, or replaces them.

    Attributes:
        ids: the ids of the run, None for inputs without ids.
        vectors: recorded results, one for each table.
        tables: the tables of embeddings.
        parts: for each call its slice of the concatenated channels.
    """

    def __init__(self, replacements: list[Tensor] | None, place: TokenCall | str | None) -> None:
        super().__init__()
        self._replacements = replacements
        self._is_place = place.finder() if isinstance(place, TokenCall) else lambda func, result: False
        self.ids: Tensor | None = None
        self.vectors: list[Tensor] = []
        self.tables: list[Tensor] = []
        self.parts: list[slice] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.ids is None:
            found = self._is_place(func, result)
        else:
            # A part of the ids, such as one codebook, may begin at the same place.
            found = func is functional.embedding and bool(args) and args[0].data_ptr() == self.ids.data_ptr()
            found = found and args[0].numel() == self.ids.numel()
        if not found:
            return result
        if self._replacements is None:
            self._record(result, args[1] if self.ids is not None else None)
            return result
        # The host may write into the copy.
        return self._replacements.pop(0).reshape(result.shape).to(result, copy=True)

    def _record(self, result: Tensor, table: Tensor | None) -> None:
        pointer = None if table is None else table.data_ptr()
        same = [at for at, other in enumerate(self.tables) if other.data_ptr() == pointer]
        if not same:
            self.vectors.append(result.detach().clone())
            if table is not None:
                self.tables.append(table)
        at = same[0] if same else len(self.vectors) - 1
        start = sum(each.shape[-1] for each in self.vectors[:at])
        self.parts.append(slice(start, start + self.vectors[at].shape[-1]))


def _require_gradient(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Raise `UncoveredError` if a module's input carries a gradient and its output does not."""
    # `_Lookups` counts the functions that the host calls.
    with torch._C.DisableTorchFunction():
        given = any(x.requires_grad for x in tensors((args, kwargs)))
        lost = torch.is_grad_enabled() and given and not any(x.requires_grad for x in tensors(output))
    if lost:
        raise UncoveredError(
            f"{name} ({type(module).__module__}.{type(module).__qualname__}) passes no gradient, as a module with "
            "quantised weights may, so gradients of the model are incomplete. Load the model without quantisation."
        )
