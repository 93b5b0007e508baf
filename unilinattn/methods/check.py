"""Checks of results: the model runs again with other tokens in place of those that a result ranks highest."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unilinattn.errors import InputError, OptionError
from unilinattn.host.logits import Logit, chosen_ids, picked, relative
from unilinattn.host.probabilities import LogitKind, log_probabilities, logit_kind
from unilinattn.host.scalars import OutputScalar, values_of
from unilinattn.host.vectors import example
from unilinattn.kernels.precision import full_precision
from unilinattn.methods.doubts import is_decoder
from unilinattn.options.bases import Relative
from unilinattn.reruns.replacements import ids_of, ordinary_ids, other_ids, real_tokens
from unilinattn.reruns.rerun import Rerun, rerun
from unilinattn.results.attribution import Attribution
from unilinattn.results.check import Check, Falls
from unilinattn.results.intervals import mean_interval
from unilinattn.scoring.numbers import run_bytes, runs_at_once
from unilinattn.tracing.trace import Target, Trace, trace

CHANGED = "a check would be that of another model"
"""Why a check is refused if the weights changed since the trace."""

FEWEST_DRAWS = 2
"""Draws below which there is no spread, and so no interval."""


@dataclass(frozen=True, eq=False)
class Explained:
    """The explained value of one sequence of a trace.

    Attributes:
        trace: the trace.
        sequence: the index of the sequence.
        target: the position whose logit is explained, None for class logits and for a function.
        logit: the id of a token or class, a pair, a function of the output, or None for the prediction.
        tokenizer: the tokenizer, whose special tokens are neither replaced nor drawn.
    """

    trace: Trace
    sequence: int
    target: Target | None
    logit: Logit
    tokenizer: Any = None


class Checker:
    """Measures the checks of a result of `explain`, which it refers to weakly, as long as the model exists."""

    def __init__(self, traced: Trace, target: Target | None, logit: Logit, tokenizer: Any) -> None:
        """Store the inputs of the trace and its explained value, but neither the trace nor the model."""
        self._trace, self._host = weakref.ref(traced), weakref.ref(traced.host)
        self._arguments, self._weights, self._model = traced.arguments, traced.weights, traced.model
        self._target, self._logit, self._tokenizer = target, logit, tokenizer

    def __call__(self, result: Attribution, *, top: int, draws: int, seed: int, batch: int) -> Check:
        """Return the check of one sequence; see `Attribution.check`."""
        count = result.sizes.get("batch", 1)
        if isinstance(batch, bool) or not isinstance(batch, int) or not -count <= batch < count:
            raise InputError(f"batch={batch!r}: the result has {count} sequences; give 0 to {count - 1}.")
        if axes := [axis for axis in result.dims if axis not in ("batch", "key")]:
            raise InputError(f"a check needs one score for each token, and the result has {_remedy(axes)}.")
        traced, sequence = self._traced(), batch % count
        scores = result.scores[sequence] if "batch" in result.dims else result.scores
        sinks = () if result.sinks is None else result.sinks[sequence]
        return check_of(
            Explained(traced, sequence, self._target, self._logit, self._tokenizer),
            scores,
            without(scores, sinks),
            top=top,
            draws=draws,
            seed=seed,
        )

    def _traced(self) -> Trace:
        """Return the trace, or one of the model on the same inputs."""
        if (traced := self._trace()) is not None:
            self._weights.require_same(traced.host, self._model, CHANGED)
            return traced
        if (host := self._host()) is None:
            raise InputError(
                f"the {self._model} of this result exists no longer, and a check runs it; keep the model or its trace, "
                "or explain again with check=True."
            )
        self._weights.require_same(host, self._model, CHANGED)
        return trace(host, self._arguments, strict=False, progress=False)


def _remedy(axes: list[str]) -> str:
    """Return the axes by name, with the argument that gives a result without them."""
    if "query" in axes:
        return "a query axis; explain one position, such as target=-1"
    if "layer" in axes:
        return "a layer axis; compose the layers, or take one: result.select(layer=0)"
    return f"a {axes[0]} axis; take one: result.select({axes[0]}=0)"


def without(scores: Float[Tensor, " key"], keys: Any) -> Bool[Tensor, " key"]:
    """Return True at all keys but some."""
    mask = torch.ones(scores.shape, dtype=torch.bool, device="cpu")
    mask[list(keys)] = False
    return mask


def check_of(
    explained: Explained,
    scores: Float[Tensor, " key"],
    allowed_keys: Bool[Tensor, " key"],
    *,
    top: int = 3,
    draws: int = 24,
    seed: int = 0,
) -> Check:
    """Replace the `top` tokens with the largest scores, and as often as many random ones, and run the model.

    Both are among the `allowed_keys` that are real and no special tokens and, in a decoder, that stand at the target or
    before it; `top` is at most half of them. Each draw replaces each token by a random id, which is neither that of the
    token nor a special one.

    Raises `InputError` for inputs without ids, for an output without logits, and for fewer than two such tokens, and
    `OptionError` for a `top`, `draws` or `seed` out of range.
    """
    for option, number, least in (("top", top, 1), ("draws", draws, FEWEST_DRAWS), ("seed", seed, 0)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise OptionError(f"{option}={number!r}; give a whole number of at least {least}.")
    traced = explained.trace
    ids = ids_of(traced)[explained.sequence].cpu()
    _require_value(explained)
    ranking = _ranking(explained, scores, allowed_keys, ids)
    if len(ranking) < 2:
        raise InputError(
            f"a check compares tokens with others, and {len(ranking)} of {len(ids)} tokens can be replaced: special "
            "tokens, padding, attention sinks and those behind the target cannot. Give a longer input."
        )
    top = min(top, len(ranking) // 2)
    keys, others = ranking[:top], ranking[top:]
    generator = torch.Generator().manual_seed(seed)
    ordinary = ordinary_ids(traced, explained.tokenizer)
    random = others[torch.rand(draws, len(others), generator=generator, device="cpu").argsort(1)[:, :top]]
    changed = ids.repeat(1 + 2 * draws, 1)
    replaced = torch.cat([keys.expand(draws, top), random])
    changed[1:].scatter_(1, replaced, other_ids(ordinary, ids[replaced], generator))
    name, value, log_p = _values(explained, changed)
    return Check(
        name,
        tuple(keys.tolist()),
        draws,
        seed,
        _falls(value, draws, seed),
        None if log_p is None else _falls(log_p, draws, seed),
    )


def _require_value(explained: Explained) -> None:
    """Raise `InputError` for a model whose output has no value to compare."""
    traced = explained.trace
    if callable(explained.logit):
        return
    if not traced.explained_logit.exists:
        raise InputError(
            f"{traced.model} returns no logits, so there is no value whose fall a check could measure; explain a "
            f'function of its output: method="logit", logit={example(traced.output)}.'
        )
    if explained.target is None and traced.explained_logit.logits.ndim == 3:
        raise InputError("a check needs the logit of one position; explain with a target, such as target=-1.")


def _ranking(
    explained: Explained, scores: Float[Tensor, " key"], allowed_keys: Bool[Tensor, " key"], ids: Int[Tensor, " token"]
) -> Int[Tensor, " ranked"]:
    """Return the tokens that can be replaced, that with the largest score first."""
    traced = explained.trace
    if scores.shape != ids.shape:
        raise InputError(
            f"the result has {len(scores)} scores, and the sequence {len(ids)} ids; check the result of `explain`."
        )
    keys = allowed_keys & real_tokens(traced)[explained.sequence].cpu()
    keys &= torch.isin(ids, ordinary_ids(traced, explained.tokenizer))
    if explained.target is not None and traced.explained_logit.by_token and is_decoder(traced):
        keys &= torch.arange(len(ids), device="cpu") <= traced.positions(explained.target)[explained.sequence]
    order = scores.detach().cpu().argsort(descending=True, stable=True)
    return order[keys[order]]


def _values(
    explained: Explained, ids: Int[Tensor, "run token"]
) -> tuple[str, Float[Tensor, " run"], Float[Tensor, " run"] | None]:
    """Return the name of the explained value, the value of each run, and the log probability if there is one."""
    traced, length = explained.trace, ids.shape[1]
    at_once = runs_at_once(traced, length, run_bytes(traced, explained.logit), explained.logit)
    positions = None if callable(explained.logit) or explained.target is None else traced.positions(explained.target)
    values, log_ps = [], []
    with full_precision():
        for piece in ids.split(at_once):
            sequences = torch.full((len(piece),), explained.sequence, device="cpu")
            targets = None if positions is None else positions[sequences]
            value, log_p = _of_run(explained, rerun(traced, sequences, positions=targets, ids=piece), targets)
            values.append(value.cpu())
            log_ps.append(None if log_p is None else log_p.cpu())
    pair = isinstance(explained.logit, tuple | list) and len(explained.logit) == 2
    log_odds = isinstance(explained.logit, Relative) and explained.logit.measure == "log-odds"
    kind = _kind(traced)
    single = "the log-odds" if log_odds else "the output" if kind == "output" else "the logit"
    name = f"the difference of two {'outputs' if kind == 'output' else 'logits'}" if pair else single
    name = "the function of the output" if callable(explained.logit) else name
    name = repr(explained.logit) if isinstance(explained.logit, OutputScalar) else name
    present = [log_p for log_p in log_ps if log_p is not None]
    return name, torch.cat(values), torch.cat(present) if present else None


def _of_run(
    explained: Explained, run: Rerun, targets: Int[Tensor, " run"] | None
) -> tuple[Float[Tensor, " run"], Float[Tensor, " run"] | None]:
    """Return the explained value and the log probability, if there is one, of each sequence of a run."""
    logit, count = explained.logit, run.tokens[0]
    if callable(logit):
        return values_of(logit, run.output, torch.full((count,), explained.sequence, device="cpu")).double(), None
    logits = run.logits(targets).reshape(count, -1).double()
    token = logit.logit if isinstance(logit, Relative) else logit
    if token is None:
        prediction = explained.trace.explained_logit.prediction(explained.target)
        token = int(logits[0].argmax() if prediction is None else prediction[explained.sequence])
    ids = chosen_ids(logits, token)
    value = relative(logits, ids, logit.measure) if isinstance(logit, Relative) else picked(logits, ids)
    log_p = log_probabilities(logits, _kind(explained.trace)) if ids.shape[-1] == 1 else None
    return value, None if log_p is None else picked(log_p, ids)


def _kind(traced: Trace) -> LogitKind:
    """Return the kind of the logits, that of tokens for an output without logits."""
    explained = traced.explained_logit
    return logit_kind(traced.host, explained.logits) if explained.exists else "class"


def _falls(values: Float[Tensor, " run"], draws: int, seed: int) -> Falls:
    """Return the falls of a value from the first run to those with top tokens replaced, and with random ones."""
    top, random = (values[0] - values[1:]).split(draws)
    return Falls(float(top.mean()), float(random.mean()), mean_interval((top - random).tolist(), seed=seed))
