"""Metrics of scores against known relevant keys, a measured truth, a known alignment, or the explained logit."""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import index

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unilinattn.errors import InputError


@dataclass(frozen=True)
class RowScores:
    """Ranking metrics averaged over query rows, and the numbers of counted and of dropped rows."""

    auc: float
    ap: float
    recall_at_k: float
    hit_at_1: float
    rows: int
    dropped: int


@dataclass(frozen=True)
class RankCorrelation:
    """A rank correlation averaged over query rows, and the numbers of counted and of dropped rows."""

    mean: float
    rows: int
    dropped: int


@dataclass(frozen=True, eq=False)
class CompletenessGap:
    """The distance of shares and biases from the logit that they decompose.

    Attributes:
        absolute: |sum of shares + bias - logit|, in logits.
        logit: the explained logit, by which `relative` divides.
    """

    absolute: Float[Tensor, "*batch"]
    logit: Float[Tensor, "*batch"]

    @property
    def relative(self) -> Float[Tensor, "*batch"]:
        """The absolute gap divided by |logit|.

        Raises `InputError` if a logit is 0.
        """
        if bool((self.logit == 0).any()):
            raise InputError(
                f"{int((self.logit == 0).sum())} of {self.logit.numel()} logits are 0, so their relative gap is "
                "undefined; use `absolute`."
            )
        return self.absolute / self.logit.abs()


def earlier_keys(length: int) -> Bool[Tensor, "query key"]:
    """Return the candidate keys of every query in a causal model: those before it, without its own.

    Methods that add the residual stream always rank a query's own token first, so it is no candidate. A model that is
    not causal has the candidates `~torch.eye(length, dtype=torch.bool)`.
    """
    return torch.ones(length, length, dtype=torch.bool, device="cpu").tril(-1)


def row_scores(
    scores: Float[Tensor, "*batch query key"],
    relevant: Bool[Tensor, "..."],
    valid: Bool[Tensor, "..."] | None = None,
) -> RowScores:
    """Rank each query row's keys by score and return metrics of the relevant keys' ranks, averaged over all rows.

    `relevant` and `valid` broadcast to the scores' shape. Only valid keys (allowed by causality, real tokens, not the
    query's own: see `earlier_keys`) are candidates; by default all keys are. A row without a relevant candidate, or
    without an irrelevant one, has no ranking: it is dropped, and `dropped` counts it. Ties are never broken by
    position:

    - AUC is the probability that a relevant key scores above an irrelevant one; a tie counts one half (mid-ranks), so
      constant scores have AUC 0.5;
    - AP is the mean, over relevant keys, of the precision among the keys that score at least as high; tied keys enter
      at once, as in scikit-learn, so constant scores have the share of relevant keys;
    - Recall@K, with K the row's number of relevant candidates, is the expectation over random orders of tied keys;
    - hit@1 is the probability that the best key is relevant, with one of several tied best keys drawn at random.

    Raises `InputError` if shapes do not fit, candidates hold NaN, or no row counts.
    Source: LaTIM 4.1, Table 2.
    """
    candidates = _candidates(scores, valid)
    hits = _broadcast(relevant, scores, "relevant") & candidates
    return _averaged(scores[None], hits[None], candidates[None])[0]


def batch_scores(
    scores: Float[Tensor, "batch query key"],
    relevant: Bool[Tensor, "batch query key"],
    valid: Bool[Tensor, "batch query key"],
) -> list[RowScores]:
    """Return `row_scores` of each sequence of a batch, ranked in one step."""
    candidates = _candidates(scores, valid)
    return _averaged(scores, relevant & candidates, candidates)


def _averaged(
    scores: Float[Tensor, "batch *query key"],
    hits: Bool[Tensor, "batch *query key"],
    candidates: Bool[Tensor, "batch *query key"],
) -> list[RowScores]:
    """Return the ranking metrics of each sequence, averaged over its rows."""
    counted = (hits.any(-1) & (candidates & ~hits).any(-1)).flatten(1)
    counts, total = counted.sum(1).tolist(), counted.shape[1]
    if 0 in counts:
        raise InputError(
            f"None of the {total} rows has both a relevant and an irrelevant candidate, so there is nothing to rank; "
            "check `relevant` and `valid`."
        )
    metrics = _ranked(*(t.flatten(1, -2)[counted] for t in (scores, hits, candidates)))
    rows = zip(*(values.split(counts) for values in metrics.values()), strict=True)
    means = [dict(zip(metrics, (float(values.mean()) for values in row), strict=True)) for row in rows]
    return [RowScores(**mean, rows=rows, dropped=total - rows) for mean, rows in zip(means, counts, strict=True)]


def rank_correlation(
    scores: Float[Tensor, "*batch query key"],
    truth: Float[Tensor, "*batch query key"],
    valid: Bool[Tensor, "..."] | None = None,
) -> RankCorrelation:
    """Return Spearman's rank correlation of each query row's scores with a measured truth, averaged over all rows.

    `valid` broadcasts to the scores' shape; only valid keys are ranked, by default all keys. Tied keys share their
    mid-rank. A row whose truth orders no keys (fewer than two valid keys, or all of them tied) is dropped, and
    `dropped` counts it. A row whose scores are all tied counts as 0, because it orders no pair of keys.

    Raises `InputError` if shapes do not fit, valid keys hold NaN, or no row counts.
    Source: Spearman (1904); ties as in Kendall, Rank Correlation Methods (1948), ch. 3.
    """
    candidates = _candidates(scores, valid)
    if not isinstance(truth, Tensor) or truth.shape != scores.shape:
        raise InputError(
            f"truth must be a tensor of the scores' shape {tuple(scores.shape)}; got {tensor_text(truth)}."
        )
    _candidates(truth, valid, "truth")
    ranks, true_ranks = (_centred_ranks(values.flatten(0, -2), candidates.flatten(0, -2)) for values in (scores, truth))
    counted = true_ranks.any(-1)
    rows = int(counted.sum())
    if rows == 0:
        raise InputError(
            f"None of the {counted.numel()} rows has two valid keys that differ in truth, so there is no order to "
            "compare with; check `truth` and `valid`."
        )
    ranks, true_ranks = ranks[counted], true_ranks[counted]
    spread = ((ranks**2).sum(-1) * (true_ranks**2).sum(-1)).sqrt()
    correlation = (ranks * true_ranks).sum(-1) / spread.masked_fill(spread == 0, 1)
    return RankCorrelation(float(correlation.mean()), rows, counted.numel() - rows)


def alignment_error_rate(
    scores: Float[Tensor, "*batch query key"],
    sure: Bool[Tensor, "..."],
    possible: Bool[Tensor, "..."] | None = None,
    valid: Bool[Tensor, "..."] | None = None,
) -> float:
    """Return 1 - (|A and S| + |A and P|) / (|A| + |S|) for the links A from each row to its best key.

    `sure` (S), `possible` (P, to which S is added) and `valid` broadcast to the scores' shape; `gold_links` makes the
    first two from pairs of positions. A row without a valid key has no link; tied best keys share a link in equal
    parts. Links are counted over all sequences.

    Raises `InputError` if shapes do not fit, valid keys hold NaN, a gold link leads to a key that is not valid, or
    there are no links.
    Source: LaTIM 4.2, Table 3; Och and Ney, "A systematic comparison of various statistical alignment models" (2003).
    """
    candidates = _candidates(scores, valid)
    gold = _gold(sure, scores, candidates, "sure")
    allowed = gold if possible is None else gold | _gold(possible, scores, candidates, "possible")
    ranked = torch.where(candidates, scores.detach().double(), -torch.inf)
    best = candidates & (ranked == ranked.amax(-1, keepdim=True))
    share = best / best.sum(-1, keepdim=True).clamp(min=1).double()
    links, sure_links = share.sum(), gold.sum()
    if links + sure_links == 0:
        raise InputError("There is neither a row with a valid key nor a sure link, so there is no error rate.")
    return float(1 - ((share * gold).sum() + (share * allowed).sum()) / (links + sure_links))


def gold_links(links: Iterable[tuple[int, int]], queries: int, keys: int) -> Bool[Tensor, "query key"]:
    """Return the mask of a sentence's gold links, each a pair (query, key) of positions from 0.

    Raises `InputError` for a link that is no pair of integers, or that lies outside the sentence.
    """
    mask = torch.zeros(queries, keys, dtype=torch.bool, device="cpu")
    for link in links:
        try:
            query, key = (index(position) for position in link)
        except (TypeError, ValueError) as error:
            raise InputError(f"the gold link {link!r} is no pair (query, key) of integers.") from error
        if not (0 <= query < queries and 0 <= key < keys):
            raise InputError(
                f"the gold link {(query, key)} lies outside the sentence, which has queries 0 to {queries - 1} and "
                f"keys 0 to {keys - 1}; positions count from 0."
            )
        mask[query, key] = True
    return mask


def completeness_gap(
    shares: Float[Tensor, "*batch key"], bias: Float[Tensor, "*batch"], logit: Float[Tensor, "*batch"]
) -> CompletenessGap:
    """Return |sum_j shares_j + bias - logit| for each target, summed in float64.

    `shares` are the tokens' shares of the logit, and `bias` the share of all biases.

    Raises `InputError` if the shapes do not fit, or for a number that is not finite.
    """
    for name, value in {"shares": shares, "bias": bias, "logit": logit}.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise InputError(f"{name} must be a floating-point tensor; got {tensor_text(value)}.")
        if not bool(value.isfinite().all()):
            raise InputError(f"{name} holds NaN or infinity, which cannot add up to a logit.")
    if shares.ndim == 0 or not shares.shape[:-1] == bias.shape == logit.shape:
        raise InputError(
            f"shares of shape {tuple(shares.shape)}, bias of shape {tuple(bias.shape)} and logit of shape "
            f"{tuple(logit.shape)} do not fit; give (..., key), (...) and (...)."
        )
    explained = shares.detach().double().sum(-1) + bias.detach().double()
    exact = logit.detach().double()
    return CompletenessGap((explained - exact).abs(), exact)


def tensor_text(value: object) -> str:
    """Return the dtype and shape of a tensor, or the type of anything else, for an error message."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _ranked(
    scores: Float[Tensor, "row key"], relevant: Bool[Tensor, "row key"], candidates: Bool[Tensor, "row key"]
) -> dict[str, Float[Tensor, " row"]]:
    """Return the ranking metrics of each row by name."""
    order, first, final = _tie_groups(scores, candidates)
    candidate, hit = candidates.gather(-1, order).double(), relevant.gather(-1, order).double()
    keys, hits = candidate.cumsum(-1), hit.cumsum(-1)
    # Counts of keys, and of relevant ones, above the ties of each key, and up to their end.
    keys_above, keys_from = (keys - candidate).gather(-1, first), keys.gather(-1, final)
    hits_above, hits_from = (hits - hit).gather(-1, first), hits.gather(-1, final)
    others_above, others_from = keys_above - hits_above, keys_from - hits_from
    below_or_half_tied = others_from[:, -1:] - (others_above + others_from) / 2
    k = hit.sum(-1, keepdim=True)
    above, end, right_above, right_end = (
        count.gather(-1, k.long() - 1) for count in (keys_above, keys_from, hits_above, hits_from)
    )
    drawn = (k - above) / (end - above)
    return {
        "auc": (hit * below_or_half_tied).sum(-1) / (hit.sum(-1) * others_from[:, -1]),
        "ap": (hit * hits_from / keys_from).sum(-1) / hit.sum(-1),
        "recall_at_k": ((right_above + drawn * (right_end - right_above)) / k).squeeze(-1),
        "hit_at_1": hits_from[:, 0] / keys_from[:, 0],
    }


def _tie_groups(
    scores: Float[Tensor, "row key"], candidates: Bool[Tensor, "row key"]
) -> tuple[Int[Tensor, "row key"], Int[Tensor, "row key"], Int[Tensor, "row key"]]:
    """Sort each row by descending score; return the order, and the first and last position of each position's ties.

    Keys that are no candidates come last.
    """
    by_score = scores.detach().argsort(dim=-1, descending=True, stable=True)
    # A second, stable sort moves the other keys last: a candidate may score -inf, so no score can mark them.
    last = candidates.gather(-1, by_score).to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    order = by_score.gather(-1, last)
    ranked, candidate = scores.detach().gather(-1, order), candidates.gather(-1, order)
    differs = (ranked[:, 1:] != ranked[:, :-1]) | (candidate[:, 1:] != candidate[:, :-1])
    edge = torch.ones_like(candidate[:, :1])
    first = _positions(torch.cat([edge, differs], -1)).cummax(-1).values
    final = _positions(torch.cat([differs, edge], -1).flip(-1)).cummax(-1).values.flip(-1)
    return order, first, scores.shape[-1] - 1 - final


def _centred_ranks(scores: Float[Tensor, "row key"], candidates: Bool[Tensor, "row key"]) -> Float[Tensor, "row key"]:
    """Return each candidate's mid-rank, larger for larger scores, minus the mean of its row; 0 at other keys."""
    order, first, final = _tie_groups(scores, candidates)
    rank = torch.zeros_like(order, dtype=torch.float64).scatter_(-1, order, (first + final).double() / 2)
    # The mean position of n candidates is (n - 1) / 2, with or without ties; it is exact, so a row of ties is 0.
    middle = (candidates.sum(-1, keepdim=True) - 1).double() / 2
    return torch.where(candidates, middle - rank, 0.0)


def _positions(marked: Bool[Tensor, "row key"]) -> Int[Tensor, "row key"]:
    return torch.where(marked, torch.arange(marked.shape[-1], device=marked.device), 0)


def _candidates(
    scores: Float[Tensor, "*batch query key"], valid: Tensor | None, name: str = "scores"
) -> Bool[Tensor, "*batch query key"]:
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.ndim < 2 or scores.numel() == 0:
        raise InputError(
            f"{name} must be a floating-point tensor (..., query, key) with entries; got {tensor_text(scores)}."
        )
    candidates = torch.ones_like(scores, dtype=torch.bool) if valid is None else _broadcast(valid, scores, "valid")
    if bool((scores.isnan() & candidates).any()):
        raise InputError(f"{name} holds NaN at valid keys, which cannot be ranked.")
    return candidates


def _broadcast(mask: Tensor, scores: Tensor, name: str) -> Bool[Tensor, "*batch query key"]:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise InputError(f"{name} must be a boolean tensor; got {tensor_text(mask)}.")
    try:
        return mask.to(scores.device).broadcast_to(scores.shape)
    except RuntimeError as error:
        raise InputError(
            f"{name} of shape {tuple(mask.shape)} does not broadcast to the scores' {tuple(scores.shape)}."
        ) from error


def _gold(
    links: Tensor, scores: Float[Tensor, "*batch query key"], candidates: Bool[Tensor, "*batch query key"], name: str
) -> Bool[Tensor, "*batch query key"]:
    gold = _broadcast(links, scores, name)
    outside = gold & ~candidates
    if bool(outside.any()):
        raise InputError(
            f"{int(outside.sum())} {name} links lead to keys that are not valid, the first at "
            f"{tuple(outside.nonzero()[0].tolist())}; a gold link joins two tokens of the sentence. Correct the links, "
            f"or leave these out with `{name} & valid`."
        )
    return gold
