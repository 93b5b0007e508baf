"""`Attribution`: the result of a method, with its pictures and its page."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from jaxtyping import Bool
from torch import Tensor

from unilinattn.errors import InputError
from unilinattn.results import pages, plots
from unilinattn.results.check import Check
from unilinattn.results.file import write_text
from unilinattn.results.scores import Scores
from unilinattn.results.summary import described
from unilinattn.results.words import merged_spans, merged_words
from unilinattn.viz import blocks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Attribution(Scores):
    """The scores of one method on one input, immutable, with labels for their axes, layers, tokens and errors.

    Lone surrogates, which UTF-8 does not have, stand in labels as escapes such as `\\ud83d`.

    Attributes:
        scores: floating-point tensor with the axes `dims`.
        dims: some of layer, batch, head, query and key, in this order, key among them. Without a layer axis, `layers`
            names the layers that were composed; without a batch axis, the result is one sequence.
        method: name of the method.
        options: the method's options, as JSON values.
        scope: scope of the operators, None if the method has none.
        tokens: a list of texts for each sequence, one text for each key, padding included.
        query_tokens: a list of texts for each sequence, one text for each query, for queries that are not the keys.
        word_ids: the index of each token's word for each sequence, None outside of words; set for texts.
        offsets: the first character of each token in its text and the one after its last; set for texts.
        sinks: the keys of each sequence's attention sinks, whose scores measure no word: rankings leave them out, and
            pictures show them apart; a merged word with a sink is one. None if they are unknown, empty for a sequence
            of one token, which nothing is compared with.
        streams: of scores over several streams of tokens, such as those of an encoder and a decoder, the number of each
            stream's tokens by its name, in their order along the axes "query" and "key"; empty for one stream (see
            `select`).
        logit_names: the text of the token, or the label of the class, whose logit is explained, for each sequence; two
            for the difference of two. Set where a tokenizer or the model's `config.id2label` names it.
        logit_kind: "class" for a class of a softmax, "label" for one of several labels with a sigmoid each, "output"
            for a number of a regression; None for a token and for results that explain no logit.
        pooled: whether the explained number is one of the whole sequence, such as the logit of its class.
        grid: (rows, columns) of an image's patches.
        patches: the keys of the patches, row by row, for vision models that are registered; an image's heat map is
            `scores[..., result.patches].reshape(*leading, *result.grid)`.
        cls: the keys of the class tokens, for vision models that are registered; empty for a model without one.
        mask: (batch, key), True at real tokens.
        layers: names of the layers.
        kinds: the kind of mixer of each layer.
        heads: the heads of the head axis, by their index in the layer; one without the axis is the selected head.
        head_kind: "channel" if a head of these layers is one channel wide, else "head".
        left_out: names of the opaque layers, which no adapter knows.
        model: name of the model.
        versions: package versions by name.
        reconstruction_error: ||op(x) - y|| / ||y|| against the host's output y, by layer.
        warnings: a message for each layer whose error exceeds the tolerance, and for shares that miss their sum by more
            than it (`explain(trust="warn")`); one that names the attention sinks.
        stream_error: for methods that read the residual stream, the relative error of the stream plus the outputs
            against the host's next stream, by layer.
        completeness_gap: the completeness gap that the method reports, if any.
        extras: further tensors, such as the share of the bias, with the axes `dims` without key, or without head and
            key. "log2_scale" is set for products of maps beyond the range of the scores' dtype: a row of the product is
            the row of scores times 2**log2_scale.
        checks: a `Check` of each sequence, of `explain(check=True)`.
        checker: the function of `check`, set by `explain`; it is not saved, and does not keep the model.

    Raises `InputError` if a label does not fit the scores.
    """

    def __repr__(self) -> str:
        """Show the explained value, the largest scores, their sums, errors, axes and options, of the first sequence."""
        return described(self)

    def words(self, reduce: str = "sum") -> Self:
        """Return the result with the tokens of each word merged: one key, and one query, for each word.

        The score of a word is the sum or the maximum over its tokens ("sum", "max"). Its query is that of its last
        token, which has read the whole word. Tokens outside of words, such as special tokens, are words by themselves.

        Raises `InputError` if the words are unknown: for other inputs than texts, and for a slow tokenizer.
        """
        return merged_words(self, reduce)

    def spans(
        self,
        spans: Sequence[Any],
        reduce: str = "sum",
        *,
        unit: str = "characters",
    ) -> Self:
        """Return the result with the tokens of each span merged, as `words` does for words.

        `spans`: pairs of the first character of a span in the text and the one after its last, in any order and
        disjoint; with unit="tokens" pairs of positions, which count real tokens. For several sequences a list of pairs
        for each. A token belongs to a span if it has a character in it; tokens outside of spans stay as they are.
        `reduce`: "sum" or "max".

        Raises `InputError` for a span without tokens, for overlapping spans, and for characters of other inputs than
        texts; `OptionError` for an unknown `reduce` or `unit`.
        """
        return merged_spans(self, spans, reduce, unit)

    def check(self, top: int = 3, draws: int = 24, seed: int = 0, *, batch: int = 0) -> Check:
        """Return the fall of the explained value with other tokens in place of the `top` highest-ranked ones.

        The ranking is that of the signed scores, largest first, because these tokens are those that raise the value;
        attention sinks, special tokens and padding are left out, and so are tokens behind the target of a decoder. Each
        of `draws` draws replaces the top tokens by random ids, and in another run as many random other tokens; an id is
        never a special one, nor that of the token. `top` is at most half of the ranked tokens. The value is the logit
        that the method explains, or that of the prediction at the target for a method that explains none. `batch`:
        index of the sequence.

        Cost: 2 `draws` + 1 sequences through the model, as many at once as fit, and one trace if it no longer exists.

        Raises `InputError` for a result that was loaded, copied, merged or selected by sequence, whose model is unknown
        or gone, for one with an axis of queries, layers or heads, for inputs without ids (images, vectors,
        encoder-decoders), for a model without logits, and if fewer than two tokens can be replaced; `OptionError` for a
        `top`, `draws` or `seed` out of range; and `ModelStateError` if a weight changed.
        """
        if self.checker is None:
            raise InputError(
                "this result has no model that could run again: only that of `explain` has one, and not after it is "
                "loaded, pickled, merged or selected by sequence or stream. Check the result of `explain` itself, or "
                "explain again with check=True, which stores the check in `checks`."
            )
        return self.checker(self, top=top, draws=draws, seed=seed, batch=batch)

    def plot(
        self,
        *,
        batch: int = 0,
        expected: Bool[Tensor, "..."] | None = None,
        layer: int | str | None = None,
        ax: "Axes | None" = None,
        cmap: "str | Colormap | None" = None,
        vmax: float | None = None,
        image: Any = None,
    ) -> "Figure":
        """Draw one sequence of the result: one heat map per layer, or strips of tokens or patch maps for a target.

        `batch`: index of the sequence. `expected`: a boolean pattern to outline, (batch, query, key), or (batch, key)
        without a query axis. `layer`: position or name of the only layer to draw. `ax`: axes to draw one picture into,
        whose figure is returned. `cmap`: a colour map of matplotlib or its name. `vmax`: score of the strongest colour,
        in every picture; by default each picture's largest. `image`: the picture that the model read, drawn beneath its
        patches: (height, width), (height, width, 3) or (3, height, width), uint8 or floats from 0 to 1, or a PIL image.

        Raises `MissingExtraError` if matplotlib is missing, `InputError` if `batch`, `expected`, `layer`, `ax` or
        `image` does not fit, and `OptionError` for an unknown `layer` or `cmap` or a `vmax` that is not positive.
        """
        return plots.attribution(
            self, batch=batch, expected=expected, layer=layer, ax=ax, cmap=cmap, vmax=vmax, image=image
        )

    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        batch: int | Sequence[int] = 0,
        expected: Bool[Tensor, "..."] | None = None,
        image: Any = None,
    ) -> str:
        """Return the result as one self-contained HTML page, and write it to `path` if given.

        `batch`: index or indices of the sequences. `expected`: a boolean pattern to outline, as in `plot`. `image`: the
        picture that the model read, drawn beneath the scores of its patches, as in `plot`.

        Raises `InputError` if `batch`, `expected` or `image` does not fit, and `ResultFileError` if `path` cannot be
        written.
        """
        title = f"{self.method} of {self.model}" if self.model else self.method
        body = pages.attribution(self, batch=batch, expected=expected, image=image)
        return write_text(path, blocks.page(title, [], first=body))

    def _repr_html_(self) -> str:
        return blocks.fragment(pages.attribution(self))
