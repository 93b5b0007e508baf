"""How well scores find the keys that are known to be relevant, and the links of a known alignment."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unilinattn.errors import InputError


@dataclass(frozen=True)
class RowScores:
    """Ranking metrics averaged over query rows, with the number of rows that count and that were dropped."""

    auc: float
    ap: float
    recall_at_k: float
    rows: int
    dropped: int


def row_scores(
    scores: Float[Tensor, "*batch query key"],
    relevant: Bool[Tensor, "..."],
    valid: Bool[Tensor, "..."] | None = None,
) -> RowScores:
    """Rank each query row's keys by score and measure how the relevant ones rank, averaged over all rows.

    `relevant` and `valid` broadcast to the scores' shape. Only valid keys (allowed by causality, real tokens)
    are candidates; without `valid` all keys are. A row with no relevant candidate, or with no other, ranks
    nothing: it is dropped and counted. Ties are never broken by position:

    - AUC is the probability that a relevant key scores above an irrelevant one, a tie counting one half
      (mid-ranks), so that constant scores have 0.5;
    - AP is the mean, over relevant keys, of the precision among the keys that score at least as high, so that
      tied keys enter together, as in scikit-learn, and constant scores have the share of relevant keys;
    - Recall@K, K the row's number of relevant candidates, is the expectation over random orders of tied keys.

    Errors: `InputError` for shapes that do not fit, NaN among the candidates, or no row that counts.
    Source: LaTIM 4.1, Table 2.
    """
    wanted, candidates = _masks(scores, {"relevant": relevant, "valid": valid})
    wanted = wanted & candidates
    counted = wanted.any(-1) & (candidates & ~wanted).any(-1)
    rows = int(counted.sum())
    if rows == 0:
        raise InputError(
            f"None of the {counted.numel()} rows has both a relevant and an irrelevant candidate, so "
            "there is nothing to rank; check `relevant` and `valid`."
        )
    ranking = _Ranking.of(scores[counted], wanted[counted], candidates[counted])
    return RowScores(
        auc=float(ranking.auc().mean()),
        ap=float(ranking.average_precision().mean()),
        recall_at_k=float(ranking.recall_at_k().mean()),
        rows=rows,
        dropped=counted.numel() - rows,
    )


def alignment_error_rate(
    scores: Float[Tensor, "*batch query key"],
    sure: Bool[Tensor, "..."],
    possible: Bool[Tensor, "..."] | None = None,
    valid: Bool[Tensor, "..."] | None = None,
) -> float:
    """Return 1 - (|A and S| + |A and P|) / (|A| + |S|) for the links A from each row to its best key.

    `sure` (S), `possible` (P, always made to contain S) and `valid` broadcast to the scores' shape. A row
    with no valid key has no link; a link shared by tied best keys is divided evenly among them. Links are
    counted over all sequences together.

    Errors: `InputError` for shapes that do not fit, NaN among the valid keys, or no links at all.
    Source: LaTIM 4.2, Table 3.
    """
    gold, candidates = _masks(scores, {"sure": sure, "valid": valid})
    gold = gold & candidates
    allowed = gold if possible is None else gold | (_broadcast(possible, scores, "possible") & candidates)
    ranked = torch.where(candidates, scores.detach().double(), -torch.inf)
    best = candidates & (ranked == ranked.amax(-1, keepdim=True))
    share = best / best.sum(-1, keepdim=True).clamp(min=1).double()
    links, known = share.sum(), gold.sum()
    if links + known == 0:
        raise InputError("There is neither a row with a valid key nor a sure link, so there is no error rate.")
    return float(1 - ((share * gold).sum() + (share * allowed).sum()) / (links + known))


@dataclass(frozen=True)
class _Ranking:
    """Rows sorted from the best candidate down: counts above each key's group of ties and through its end."""

    relevant: Float[Tensor, "row key"]
    keys_above: Float[Tensor, "row key"]
    keys_from: Float[Tensor, "row key"]
    relevant_above: Float[Tensor, "row key"]
    relevant_from: Float[Tensor, "row key"]

    @classmethod
    def of(
        cls,
        scores: Float[Tensor, "row key"],
        relevant: Bool[Tensor, "row key"],
        candidates: Bool[Tensor, "row key"],
    ) -> "_Ranking":
        by_score = scores.detach().argsort(dim=-1, descending=True, stable=True)
        # Sorted by candidacy last: a candidate may score -inf, so no score can stand for "not a candidate".
        last = candidates.gather(-1, by_score).to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
        order = by_score.gather(-1, last)
        ranked, candidate = scores.detach().gather(-1, order), candidates.gather(-1, order)
        hit = relevant.gather(-1, order).double()
        differs = (ranked[:, 1:] != ranked[:, :-1]) | (candidate[:, 1:] != candidate[:, :-1])
        edge = torch.ones_like(candidate[:, :1])
        first = _positions(torch.cat([edge, differs], -1)).cummax(-1).values
        final = _positions(torch.cat([differs, edge], -1).flip(-1)).cummax(-1).values.flip(-1)
        final = hit.shape[-1] - 1 - final
        keys, hits = candidate.double().cumsum(-1), hit.cumsum(-1)
        return cls(
            relevant=hit,
            keys_above=(keys - candidate.double()).gather(-1, first),
            keys_from=keys.gather(-1, final),
            relevant_above=(hits - hit).gather(-1, first),
            relevant_from=hits.gather(-1, final),
        )

    def auc(self) -> Float[Tensor, " row"]:
        others_above = self.keys_above - self.relevant_above
        others_from = self.keys_from - self.relevant_from
        below_or_half_tied = others_from[:, -1:] - (others_above + others_from) / 2
        return (self.relevant * below_or_half_tied).sum(-1) / (self.relevant.sum(-1) * others_from[:, -1])

    def average_precision(self) -> Float[Tensor, " row"]:
        return (self.relevant * self.relevant_from / self.keys_from).sum(-1) / self.relevant.sum(-1)

    def recall_at_k(self) -> Float[Tensor, " row"]:
        k = self.relevant.sum(-1, keepdim=True)
        at_k = k.long() - 1
        above, tied_from = self.keys_above.gather(-1, at_k), self.keys_from.gather(-1, at_k)
        hits_above, hits_from = self.relevant_above.gather(-1, at_k), self.relevant_from.gather(-1, at_k)
        drawn = (k - above) / (tied_from - above)
        return ((hits_above + drawn * (hits_from - hits_above)) / k).squeeze(-1)


def _positions(marked: Bool[Tensor, "row key"]) -> Int[Tensor, "row key"]:
    return torch.where(marked, torch.arange(marked.shape[-1], device=marked.device), 0)


def _masks(
    scores: Float[Tensor, "*batch query key"], masks: dict[str, Tensor | None]
) -> tuple[Bool[Tensor, "*batch query key"], Bool[Tensor, "*batch query key"]]:
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.ndim < 2 or scores.numel() == 0:
        found = f"{scores.dtype} {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise InputError(f"scores must be a floating-point tensor (..., query, key) with entries; got {found}.")
    first, candidates = (
        torch.ones_like(scores, dtype=torch.bool) if mask is None else _broadcast(mask, scores, name)
        for name, mask in masks.items()
    )
    if bool((scores.isnan() & candidates).any()):
        raise InputError("scores hold NaN at valid keys, which cannot be ranked.")
    return first, candidates


def _broadcast(mask: Tensor, scores: Tensor, name: str) -> Bool[Tensor, "*batch query key"]:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"{name} must be a boolean tensor, not {found}.")
    try:
        return mask.to(scores.device).broadcast_to(scores.shape)
    except RuntimeError as error:
        raise InputError(
            f"{name} of shape {tuple(mask.shape)} does not broadcast to the scores' {tuple(scores.shape)}."
        ) from error
