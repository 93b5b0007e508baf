"""SmolLM2-135M: the edge from a token to the last one is cut in windows of layers (Geva et al., Endy et al.)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from evidence import truths
from evidence.ablation_measures import (
    ALL,
    DISTANT,
    IMPORTANT,
    OTHER,
    OUTGOING,
    REPLACED,
    Prompt,
    by_length,
    log_probabilities,
    others,
    source_of,
    to_last,
    to_later,
)
from evidence.claims import HERE, Claim
from evidence.comparisons import Comparison, Term, better
from evidence.rows import number
from evidence.section import Section
from evidence.study import View
from evidence.text_prompts import RECENT
from evidence.truths import CHECKPOINTS, Input
from unilinattn.evaluation import Table

CUTS = "cuts"
"""The table."""

GIVEN, FAR = "smollm2", truths.DISTANT
"""The two lists of prompts."""

LISTS: Mapping[str, str] = {GIVEN: "as given", FAR: "distant words"}

LAYERS, WINDOW = 30, 5
"""Layers of the model and of a window."""

WINDOWS: Mapping[str, range] = {
    f"layers {start + 1} to {start + WINDOW}": range(start, start + WINDOW) for start in range(0, LAYERS, WINDOW)
}

THIRDS = ("early", "middle", "late")
"""Two windows each."""

SOURCES = (IMPORTANT, DISTANT, OTHER)

DRAWN = 2
"""Random tokens whose edges are cut, one after the other."""

GEVA = "Geva et al. (EMNLP 2023)"
BOTH = f"{GEVA}; Endy et al. (ACL 2025)"


def prompts(name: str) -> list[Prompt]:
    """Return the prompts of a list with the stored effect of each token."""
    return [
        Prompt(Input(tuple(row["ids"]), row["position"], row["target"], row["predicted"]), row["effects"])
        for row in truths.read()[name]["inputs"]
    ]


def keys_of(batch: Mapping[int, Prompt]) -> dict[str, Int[Tensor, "batch key"]]:
    """Return the tokens whose edges are cut, by source, in prompts of one length by their positions.

    The distant token is one of two at least: shorter prompts have none.
    """
    effects = torch.tensor([prompt.effects for prompt in batch.values()], dtype=torch.float64)
    length = effects.shape[1]
    important = source_of(effects, 1)
    generators = [torch.Generator().manual_seed(position) for position in batch]
    keys = {IMPORTANT: important[:, None], OTHER: others(length, important, generators)[:, :DRAWN]}
    return keys | ({DISTANT: source_of(effects, RECENT)[:, None]} if length >= RECENT + 2 else {})


def falls(
    model: nn.Module, batch: Mapping[int, Prompt], windows: Mapping[str, Sequence[int]] = WINDOWS
) -> dict[tuple[str, str], Float[Tensor, " batch"]]:
    """Return the falls of the targets' log-probability by cut and source, in prompts of one length by their positions.

    A source of several tokens has the mean over them.
    """
    ids = torch.tensor([prompt.example.ids for prompt in batch.values()])
    targets = torch.tensor([prompt.example.target for prompt in batch.values()])
    effects = torch.tensor([prompt.effects for prompt in batch.values()], dtype=torch.float64)
    length = ids.shape[1]
    keys = keys_of(batch)
    with torch.no_grad():
        logits = model(ids).logits[:, -1].double()
    before = logits.log_softmax(-1).gather(-1, targets[:, None])

    def fall(
        sources: Sequence[str],
        edges_of: Callable[[Int[Tensor, " run"], int], Int[Tensor, "run edge 2"]],
        layers: Sequence[int] | None,
    ) -> dict[str, Float[Tensor, " batch"]]:
        tokens = torch.cat([keys[source] for source in sources], 1)
        copies = tokens.shape[1]
        after = log_probabilities(
            model,
            ids.repeat_interleave(copies, 0),
            targets.repeat_interleave(copies),
            edges_of(tokens.flatten(), length),
            layers,
        )
        of_tokens = before - after.view(-1, copies)
        widths = [keys[source].shape[1] for source in sources]
        parts = of_tokens.split(widths, 1)
        return {source: part.mean(1) for source, part in zip(sources, parts, strict=True)}

    ranked = [source for source in keys if source != OTHER]
    rows = {label: fall(list(keys), to_last, list(layers)) for label, layers in windows.items()}
    rows[ALL] = fall(list(keys), to_last, None)
    rows[OUTGOING] = fall(ranked, to_later, None)
    rows[REPLACED] = {source: effects.gather(1, tokens).mean(1) for source, tokens in keys.items()}
    return {(label, source): values for label, of_sources in rows.items() for source, values in of_sources.items()}


def cut_rows(
    model: nn.Module, name: str, every: Sequence[Prompt], windows: Mapping[str, Sequence[int]] = WINDOWS
) -> list[dict[str, Any]]:
    """Return the rows of a list of prompts, in their order."""
    rows = [
        number(label, source, value, model=name, sample=str(position))
        for batch in by_length(every)
        for (label, source), values in falls(model, batch, windows).items()
        for position, value in zip(batch, values.tolist(), strict=True)
    ]
    return sorted(rows, key=lambda row: int(row["sample"]))


class Knockout(Section):
    """Cuts of edges of SmolLM2-135M."""

    name = "knockout"
    title = "SmolLM2-135M: cuts in windows of layers"
    unit = "prompts"
    text = f"""
Which layers carry a token to the last one? The edge between them is cut in {WINDOW} consecutive layers of {LAYERS}, or
in all, in the prompts of the lists "as given" and "distant words", all of them, since nothing is chosen. Numbers are
falls of the log-probability of the target, in nats, with 95 % bootstrap intervals over prompts. *Important* is the
token with the largest measured effect before the last one, *distant* that before the last {RECENT} tokens (in prompts
of at least {RECENT + 2}), *other* the mean over {DRAWN} random ones. "{REPLACED}" is the effect itself, the token
replaced by random ones.

Geva et al. cut attention from the last position to the subject of a fact, by scores of minus infinity, and Endy et al.
set entries of Mamba's matrices to zero. Here entries are zero too, so that the attention weights of the other tokens
stay as they were. That the distant token of the list "distant words" stands for a subject, and that early, middle and
late are the mean of two windows each, was decided before any number was known.
"""
    views = (
        View(
            CUTS,
            "Fall of the log-probability without the edge, by layers",
            [(name, source, f"{label}, {source}") for name, label in LISTS.items() for source in SOURCES],
        ),
    )

    def measure(self) -> tuple[dict[str, Table], dict[str, Any]]:
        """Measure the cuts on both lists."""
        model, _ = CHECKPOINTS[GIVEN].load()
        rows = [row for name in LISTS for row in cut_rows(model, name, prompts(name))]
        return {CUTS: Table(rows)}, {}

    def claims(self) -> list[Claim]:
        """Return the claims of both papers, and of this library."""
        return [
            Claim.of("From a distant token, late windows matter more than early ones", BOTH, third(DISTANT, "late")),
            Claim.of(
                "From a distant token, middle windows matter more than early ones", BOTH, third(DISTANT, "middle")
            ),
            Claim.of(
                "From random other tokens, early windows matter more than late ones",
                f"{GEVA}, for the positions that are not the subject's",
                third(OTHER, "early", "late"),
            ),
            Claim.of(
                "From a distant token, late windows matter more than middle ones",
                HERE,
                third(DISTANT, "late", "middle"),
            ),
            Claim.of(
                "From the most important token, late windows matter more than early ones, on both lists",
                HERE,
                *(third(IMPORTANT, "late", name=name) for name in LISTS),
            ),
            Claim.of(
                "Cutting the edge from the most important token in all layers lowers log p more than from other tokens",
                HERE,
                *(_sources(IMPORTANT, OTHER, name) for name in LISTS),
            ),
            Claim.of(
                "Cutting the edge from a distant token in all layers lowers log p more than from other tokens",
                HERE,
                _sources(DISTANT, OTHER, FAR),
            ),
            Claim.of(
                "Cutting the edges from a distant token to every later one lowers log p more than the edge to the last",
                HERE,
                better(CUTS, DISTANT, OUTGOING, ALL, (FAR,)),
            ),
            Claim.of(
                "Replacing the important or distant token lowers log p more than cutting its edges to every later one",
                HERE,
                *(better(CUTS, source, REPLACED, OUTGOING, (FAR,)) for source in (IMPORTANT, DISTANT)),
            ),
        ]


def third(source: str, more: str, less: str = "early", name: str = FAR) -> Comparison:
    """Return that the fall by cuts from a source is larger in the windows of one third of the layers than of another.

    The fall of a third is the mean of those of its windows.
    """
    labels = list(WINDOWS)
    width = len(labels) // len(THIRDS)
    terms = [
        (sign / width, Term(CUTS, name, label, source))
        for sign, chosen in ((1.0, more), (-1.0, less))
        for label in labels[width * THIRDS.index(chosen) :][:width]
    ]
    return Comparison(f"{source}, {more} less {less} windows, {LISTS[name]}", tuple(terms), ">")


def _sources(source: str, other: str, name: str) -> Comparison:
    terms = ((1.0, Term(CUTS, name, ALL, source)), (-1.0, Term(CUTS, name, ALL, other)))
    return Comparison(f"fall, {source} less {other}, {LISTS[name]}", terms, ">")


KNOCKOUT = Knockout()
