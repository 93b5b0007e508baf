"""Run a traced model on other vectors of its tokens, as a function that gradients pass through."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unilinattn.call.nested import tensors
from unilinattn.errors import InputError, OptionError, UncoveredError
from unilinattn.host.inputs import call_host, token_ids, vocabulary_size
from unilinattn.host.isolation import Result, in_gradient_mode
from unilinattn.host.logits import kept_positions, logits_at
from unilinattn.host.recomputation import constant_parameters
from unilinattn.host.run import run
from unilinattn.host.wrappers import require_gradients
from unilinattn.reruns.rerun import Rerun, of_sequences
from unilinattn.tracing.lookups import Lookups
from unilinattn.tracing.token_source import at_call, find_vectors, replaced_at_call
from unilinattn.tracing.trace import Trace


class EmbeddedModel:
    """A traced model as a function of its tokens' vectors; the host's own code runs, not the operators.

    The vectors are the output of the embedding module for the token ids, without positions (see `Lookups`). If the
    model has several such modules, their outputs are concatenated along the channels. For inputs without ids, such as
    images, and for images among the ids, the vectors are those that enter the first block of the last layer's tokens.

    Attributes:
        vectors: the vectors of the traced inputs, in float32 or more.

    Raises `UncoveredError` for models with two streams of tokens and for ids that no module and no table embeds, and
    `ModelStateError` if a weight changed since the trace.
    """

    vectors: Float[Tensor, "batch token channel"]

    def __init__(self, trace: Trace) -> None:
        """Run the model once and record the vectors."""
        self._trace, self._model = trace, trace.host
        self._length = trace.layers[-1].output.shape[1]
        self._ids = token_ids(trace.arguments)
        self._lookups: Lookups | None = None
        if getattr(getattr(self._model, "config", None), "is_encoder_decoder", False):
            raise UncoveredError(f"{trace.model} has two streams of tokens, and the scores are those of one.")
        self._source = find_vectors(self._model, trace.arguments, trace.layers)
        batch = trace.layers[-1].output.shape[0]
        recorded = in_gradient_mode(False, lambda: self.isolated(lambda: self._vectors(batch)))
        if not recorded:
            raise UncoveredError(
                f"{trace.model} has no embedding module, which gives each token id its own vector, and no call of "
                "torch.nn.functional.embedding reads the ids, so the vectors of the tokens are unknown; give the "
                "model inputs_embeds instead of ids."
            )
        joined = torch.cat(recorded, -1)
        if joined.ndim != 3 or tuple(joined.shape[:2]) != (batch, self._length):
            raise UncoveredError(
                f"{trace.model} embeds its inputs as {tuple(joined.shape)}, and its layers have {batch} sequences of "
                f"{self._length} tokens; each token needs one vector."
            )
        ends = list(accumulate(vectors.shape[-1] for vectors in recorded))
        self._channels = [slice(end - vectors.shape[-1], end) for end, vectors in zip(ends, recorded, strict=True)]
        self.vectors = joined.detach().to(torch.promote_types(joined.dtype, torch.float32))

    def isolated(self, compute: Callable[[], Result]) -> Result:
        """Call a function that may run the model, restore the model, and return the result.

        The parameters require no gradient meanwhile. Raises `ModelStateError` for weights made in inference mode, and
        `UncoveredError` if a module with weights, such as a quantised one, passes no gradient.
        """
        self._trace.weights.require_same(self._model, self._trace.model, "its scores would be those of another model")
        require_gradients(self._model)

        def checked() -> Result:
            for name, module in self._model.named_modules():
                if hasattr(module, "weight") and not isinstance(module, nn.Embedding):
                    module.register_forward_hook(partial(_require_gradient, name), with_kwargs=True)
            return compute()

        mixers = constant_parameters(self._model)
        result: Result = run(self._model, checked, gradients=torch.is_grad_enabled(), mixers=mixers)
        return result

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
        return self._call(vectors, sequences, positions)

    def baseline(self, baseline: str | int) -> Float[Tensor, "#channel"]:
        """Return the vector that stands for an absent token: "zero", "mean-embedding", or a token id.

        Raises `OptionError` for the last two on inputs without token ids, and `InputError` for an id out of range.
        """
        if baseline == "zero":
            return self.vectors.new_zeros(1)
        if self._lookups is None or self._ids is None:
            raise OptionError(
                f"baseline={baseline!r} needs an embedding of token ids, and the tokens of these inputs are not ids "
                "alone; use 'zero'."
            )
        lookups, ids = self._lookups.lookups, self._ids
        table_sizes = [lookup.rows for lookup in lookups if lookup.rows is not None]
        rows = min(table_sizes, default=vocabulary_size(self._model))
        if rows is None:
            raise OptionError(
                f"baseline={baseline!r} needs the number of ids, and the embedding module of {self._trace.model} reads "
                "no table and has no num_embeddings; use 'zero'."
            )
        if isinstance(baseline, int) and not 0 <= baseline < rows:
            raise InputError(f"baseline {baseline} is out of range: the model knows ids 0 to {rows - 1}.")
        with torch.no_grad():
            if isinstance(baseline, int):
                absent_id = torch.full_like(ids[:1, :1], baseline)
                absent = [lookup.embed(absent_id)[0, 0] for lookup in lookups]
            else:
                absent = [lookup.mean(ids, rows) for lookup in lookups]
        return torch.cat([vector.to(self.vectors) for vector in absent])

    def _vectors(self, batch: int) -> list[Float[Tensor, "batch token channel"]]:
        """Run the model on the traced inputs and return the vectors of each lookup, or those of the first block."""
        if isinstance(self._source, str):
            return [self._trace.arguments[self._source]]
        arguments = of_sequences(self._trace, torch.arange(batch))
        if self._source is None:
            self._lookups = Lookups(self._model, arguments, [layer.name for layer in self._trace.layers])
            return self._lookups.vectors
        vectors: list[Tensor] = []

        def record(result: Tensor) -> Tensor:
            vectors.append(result.detach().clone())
            return result

        with at_call(self._source, record):
            call_host(self._model, arguments)
        for each in vectors:
            self._source.require_same(each)
        return vectors

    def _call(self, vectors: Tensor, sequences: Int[Tensor, " run"], positions: Int[Tensor, " batch"] | None) -> Rerun:
        arguments = of_sequences(self._trace, sequences)
        if positions is not None:
            arguments = logits_at(self._model, arguments, lambda: [positions[sequences]], above=0)
        replaced: AbstractContextManager[Any] = nullcontext()
        if isinstance(self._source, str):
            arguments[self._source] = vectors.to(arguments[self._source], copy=True)
        elif self._source is not None:
            replaced = replaced_at_call(self._source, vectors)
        elif self._lookups is not None:
            replaced = self._lookups.replaced(arguments, [vectors[..., channels] for channels in self._channels])
        with replaced:
            output = call_host(self._model, arguments)
        return Rerun(output, (len(sequences), self._length), kept_positions(arguments, self._length))


def _require_gradient(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Raise `UncoveredError` if a module's input carries a gradient and its output does not."""
    # `at_call` counts the functions that the host calls.
    with torch._C.DisableTorchFunction():
        carries = any(x.requires_grad for x in tensors((args, kwargs)))
        lost = torch.is_grad_enabled() and carries and not any(x.requires_grad for x in tensors(output))
    if lost:
        raise UncoveredError(
            f"{name} ({type(module).__module__}.{type(module).__qualname__}) passes no gradient, as a module with "
            "quantised weights may, so gradients of the model are incomplete. Load the model without quantisation."
        )
