"""Run a traced model on other vectors of its tokens, as a function that gradients pass through."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unilinattn.call.nested import tensors
from unilinattn.call.parameters import constant_parameters
from unilinattn.errors import InputError, OptionError, UncoveredError
from unilinattn.host.draws import drawing
from unilinattn.host.inputs import call_host, vocabulary_size
from unilinattn.host.isolation import Result, in_gradient_mode
from unilinattn.host.logits import kept_positions
from unilinattn.host.run import run
from unilinattn.host.wrappers import require_gradients
from unilinattn.reruns.rerun import Rerun, of_sequences
from unilinattn.tracing.lookups import Lookups
from unilinattn.tracing.reaching import Source
from unilinattn.tracing.token_source import find_vectors, without_lookups
from unilinattn.tracing.token_streams import TokenStream
from unilinattn.tracing.tokens import OTHER_VECTORS, TokenArgument, TokenCall, at_call, replaced_at_call
from unilinattn.tracing.trace import Trace

Recorded = list[list[Float[Tensor, "batch token channel"]]]
"""The vectors of each source, a tensor for each lookup."""


class EmbeddedModel:
    """A traced model as a function of its tokens' vectors; the host's own code runs, not the operators.

    The vectors are the output of the embedding module for the token ids, without positions (see `Lookups`). If the
    model has several such modules, their outputs are concatenated along the channels. For inputs without ids, such as
    images, and for images among the ids, the vectors are those that enter the first block of the last layer's tokens.
    With several streams, such as those of an encoder and a decoder, the tokens of one come after those of the other.

    Attributes:
        vectors: the vectors of the traced inputs, in float32 or more.
        streams: the streams of the tokens.

    Raises `UncoveredError` for ids that no module and no table embeds and for streams of different widths, and
    `ModelStateError` if a weight changed since the trace.
    """

    vectors: Float[Tensor, "batch token channel"]

    def __init__(self, trace: Trace) -> None:
        """Run the model once and record the vectors."""
        self._trace, self._model = trace, trace.host
        with drawing(trace.draws):
            self._sources = find_vectors(self._model, trace.arguments, trace.layers)
        self.streams = tuple(source.stream for source in self._sources)
        self._lookups: dict[str, Lookups] = {}
        recorded = in_gradient_mode(False, lambda: self.isolated(self._vectors))
        if not all(recorded):
            recorded = self._recorded_at_blocks(recorded)
        joined = [torch.cat(vectors, -1) if vectors else None for vectors in recorded]
        for stream, vectors in zip(self.streams, joined, strict=True):
            self._require_one_each(stream, vectors)
        widths = {vectors.shape[-1] for vectors in joined if vectors is not None}
        if len(widths) > 1:
            raise UncoveredError(
                f"the streams of {trace.model} have vectors of different widths ({', '.join(map(str, widths))}), which "
                "are not those of one sequence."
            )
        ends = [list(accumulate(vectors.shape[-1] for vectors in each)) for each in recorded]
        self._channels = [[slice(a, b) for a, b in pairwise([0, *each])] for each in ends]
        whole = torch.cat([vectors for vectors in joined if vectors is not None], 1).detach()
        if len(whole) != trace.token_shape[0]:
            raise UncoveredError(
                f"the vectors that enter the layers of {trace.model} are those of {len(whole)} sequences, such as "
                f"frames or windows, of its {trace.token_shape[0]}, and scores are those of the tokens of one."
            )
        self.vectors = whole.to(torch.promote_types(whole.dtype, torch.float32))

    def _recorded_at_blocks(self, recorded: Recorded) -> Recorded:
        """Return the vectors that enter the first blocks, for ids which no module embeds; else those recorded."""
        trace = self._trace
        with suppress(UncoveredError), drawing(trace.draws):
            self._sources = without_lookups(self._model, trace.arguments, trace.layers, self._sources)
            self._lookups.clear()
            return in_gradient_mode(False, lambda: self.isolated(self._vectors))
        return recorded

    def _require_one_each(self, stream: TokenStream, vectors: Tensor | None) -> None:
        """Raise `UncoveredError` unless there is a vector for each token of a stream."""
        if vectors is None:
            raise UncoveredError(
                f"{self._trace.model} has no embedding module, which gives each token id its own vector, and no call "
                "of torch.nn.functional.embedding reads the ids, so the vectors of the tokens are unknown; give the "
                "model inputs_embeds instead of ids."
            )
        if vectors.ndim != 3 or tuple(vectors.shape[:2]) != stream.shape:
            raise UncoveredError(
                f"{self._trace.model} embeds its inputs as {tuple(vectors.shape)}, and its layers have "
                f"{stream.shape[0]} sequences of {stream.shape[1]} tokens; each token needs one vector."
            )

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
        with drawing(self._trace.draws):
            result: Result = run(self._model, checked, gradients=torch.is_grad_enabled(), mixers=mixers)
        return result

    def run(
        self,
        vectors: Float[Tensor, "run token channel"],
        sequences: Int[Tensor, " run"],
        positions: Int[Tensor, " run"] | None,
    ) -> Rerun:
        """Run the model on other vectors, inside `isolated`.

        `sequences` are indices of the traced sequences, whose other inputs, such as a mask, belong to the vectors. A
        host that accepts `logits_to_keep` computes only the logits at `positions`, one for each of these sequences.
        """
        return self._call(vectors, sequences, positions)

    def baseline(self, baseline: str | int) -> Float[Tensor, "#token #channel"]:
        """Return the vector that stands for an absent token: "zero", "mean-embedding", or a token id.

        Raises `OptionError` for the last two on inputs without token ids, and `InputError` for an id out of range.
        """
        if baseline == "zero":
            return self.vectors.new_zeros(1, 1)
        if len(self._lookups) < len(self._sources):
            raise OptionError(
                f"baseline={baseline!r} needs an embedding of token ids, and the tokens of these inputs are not ids "
                "alone; use 'zero'."
            )
        absent = [self._absent(name, baseline) for name in self._lookups]
        if len(absent) == 1:
            return absent[0][None]
        lengths = torch.tensor([stream.shape[1] for stream in self.streams], device=self.vectors.device)
        return torch.stack(absent).repeat_interleave(lengths, 0)

    def _absent(self, name: str, baseline: str | int) -> Float[Tensor, " channel"]:
        """Return the vector of an absent token among the ids of one argument."""
        lookups, ids = self._lookups[name].lookups, self._trace.arguments[name]
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

    def _vectors(self) -> Recorded:
        """Run the model on the traced inputs and return the vectors of each source: one tensor for each lookup."""
        return [self._vectors_of(source) for source in self._sources]

    def _vectors_of(self, source: Source) -> list[Float[Tensor, "batch token channel"]]:
        origin, ids = source.origin, source.ids
        if isinstance(origin, TokenArgument):
            return [origin.tokens(origin.vectors)]
        arguments = of_sequences(self._trace, torch.arange(source.stream.shape[0], device="cpu"))
        if ids is not None:
            self._lookups[ids] = Lookups(self._model, arguments, [layer.name for layer in self._trace.layers], ids)
            return self._lookups[ids].vectors
        assert origin is not None
        vectors: list[Tensor] = []

        def record(result: Tensor) -> Tensor:
            origin.require_same(result)
            vectors.append(origin.tokens(result).detach().clone())
            return result

        with at_call(origin, record):
            call_host(self._model, arguments)
        return vectors

    def _call(self, vectors: Tensor, sequences: Int[Tensor, " run"], positions: Int[Tensor, " run"] | None) -> Rerun:
        arguments = of_sequences(self._trace, sequences)
        length = self._trace.target_stream.shape[1]
        if positions is not None:
            arguments = self._trace.explained_logit.kept_at(self._model, arguments, lambda: [positions])
        of_source = vectors.split([stream.shape[1] for stream in self.streams], 1)
        calls = sum(isinstance(source.origin, TokenCall) for source in self._sources)
        reached: list[TokenCall] = []
        with ExitStack() as replaced:
            for source, vectors_of_source, channels in zip(self._sources, of_source, self._channels, strict=True):
                if source.ids is not None:
                    by_lookup = [vectors_of_source[..., each] for each in channels]
                    replaced.enter_context(self._lookups[source.ids].replaced(arguments, by_lookup))
                elif isinstance(source.origin, TokenArgument):
                    value = source.origin.in_host(vectors_of_source)
                    arguments[source.origin.name] = value.to(source.origin.vectors, copy=True)
                elif source.origin is not None:
                    other = source.origin.in_host(vectors_of_source)
                    replaced.enter_context(replaced_at_call(source.origin, other, reached))
            output = call_host(self._model, arguments)
        if len(reached) < calls:
            raise UncoveredError(OTHER_VECTORS)
        return Rerun(
            output, (len(sequences), length), kept_positions(arguments, length), self._trace.explained_logit.sizes
        )


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
