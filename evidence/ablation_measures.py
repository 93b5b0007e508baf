"""Cuts of edges in windows of layers, and replacements of ranked tokens, on prompts with measured effects."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import unilinattn as ula
from evidence import truths
from evidence.rows import number
from evidence.text_prompts import RECENT
from evidence.texts import VOCABULARY
from evidence.truths import Input
from unilinattn import methods
from unilinattn.evaluation import Case, PerturbationTest, Sample, Table, rank_correlation
from unilinattn.evaluation.processes import Processes
from unilinattn.tracing.trace import Trace

LAYERS: Mapping[str, int] = {"mamba2": 5, "gated_deltanet": 4}
"""Layers of each model."""

WINDOW = 2
"""Consecutive layers of a window."""

IMPORTANT, DISTANT, OTHER = "important", "distant", "other"
"""The token whose edges are cut: that with the largest effect, that of those before the last four, or a random one."""

SOURCES: Mapping[str, int] = {IMPORTANT: 1, DISTANT: RECENT}
"""Last tokens that are not the source, by its name."""

ALL, OUTGOING, REPLACED = "all layers", "all layers, to every later token", "replaced"
"""Rows beside those of the windows."""

EFFECT = "effect"
"""The row that ranks tokens by their measured effects."""

DEFAULT = "lrp"
"""The label of the default of `explain` for these models."""

METHODS: Mapping[str, Any] = {
    "raw": ("raw", {"layers": "mean"}),
    "latim": ("latim", {"layers": "mean"}),
    "rollout": "rollout",
    "attribution": "attribution",
    "logit": "logit",
    DEFAULT: methods.Lrp(measure="log-odds"),
    "attn_lrp": "attn_lrp",
}

MASKINGS: Mapping[str, str] = {"reference": "random tokens", "mean": "the mean embedding"}
"""Values in place of removed tokens, by the library's name of the masking."""

ORDERS = ("highest first", "lowest first")

FRACTIONS = (0.1, 0.3)
"""Fractions of the tokens before the last one that are removed."""

OTHERS = 3
"""Other tokens whose edges are cut, one after the other, drawn with replacement."""

DRAWS = 2
"""Random tokens in place of each removed one."""

DRAWS_SEED, SCORES_SEED = 1000, 2000
"""Added to the position of a prompt for the seeds of its replacements and of its random scores: no truth has them."""

BATCH = 16
"""Most prompts of one length that a model runs on together."""


def windows(model: str) -> dict[str, list[int]]:
    """Return the layers of each window of a model by name, from the first to the last."""
    starts = range(LAYERS[model] - WINDOW + 1)
    return {f"layers {start + 1} to {start + WINDOW}": list(range(start, start + WINDOW)) for start in starts}


def metric(masking: str, order: str, fraction: float | None = None) -> str:
    """Return the name of a metric of deletion."""
    return f"{MASKINGS[masking]}, {order}" + ("" if fraction is None else f", {fraction:.0%}")


class Prompt(NamedTuple):
    """A prompt with the measured effect of replacing each token."""

    example: Input
    effects: Sequence[float]


def prompts(model: str, count: int | None = None) -> list[Prompt]:
    """Return the first prompts of a model, by default all."""
    rows = truths.read()[f"text-{model}"]["inputs"][:count]
    return [
        Prompt(Input(tuple(row["ids"]), row["position"], row["target"], row["predicted"]), row["effects"])
        for row in rows
    ]


def source_of(effects: Float[Tensor, "batch length"], last: int) -> Int[Tensor, " batch"]:
    """Return the token with the largest effect before the `last` ones of each prompt."""
    return effects[:, :-last].argmax(1)


def others(
    length: int, important: Int[Tensor, " batch"], generators: Sequence[torch.Generator]
) -> Int[Tensor, "batch other"]:
    """Return `OTHERS` random tokens of each prompt, neither the important one nor the last one."""
    drawn = [torch.randint(length - 2, (OTHERS,), generator=generator) for generator in generators]
    tokens = torch.stack(drawn)
    return tokens + (tokens >= important[:, None])


def to_last(keys: Int[Tensor, " batch"], length: int) -> Int[Tensor, "batch 1 2"]:
    """Return the edge from a token of each prompt to the last one."""
    return torch.stack([torch.full_like(keys, length - 1), keys], -1)[:, None]


def to_later(keys: Int[Tensor, " batch"], length: int) -> Int[Tensor, "batch edge 2"]:
    """Return the edges from a token of each prompt to every later one; some are there twice, which changes nothing."""
    queries = torch.maximum(torch.arange(length), keys[:, None] + 1)
    return torch.stack([queries, keys[:, None].expand_as(queries)], -1)


@torch.no_grad()
def log_probabilities(
    model: nn.Module,
    ids: Int[Tensor, "batch length"],
    targets: Int[Tensor, " batch"],
    edges: Int[Tensor, "batch edge 2"],
    layers: Sequence[int] | None = None,
) -> Float[Tensor, " batch"]:
    """Return the log-probability of each target at the last position in a run without some edges."""
    with ula.cut(model, edges, layers=layers):
        logits = model(ids).logits[:, -1]
    return logits.double().log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


def cut_falls(
    model: nn.Module, name: str, batch: Mapping[int, Prompt], layer_windows: Mapping[str, Sequence[int]]
) -> list[dict[str, Any]]:
    """Return rows of the falls of the targets' log-probability, of prompts of one length by their positions."""
    ids = torch.tensor([prompt.example.ids for prompt in batch.values()])
    targets = torch.tensor([prompt.example.target for prompt in batch.values()])
    effects = torch.tensor([prompt.effects for prompt in batch.values()], dtype=torch.float64)
    length = ids.shape[1]

    def log_p(edges: Tensor, layers: Sequence[int] | None = None) -> Float[Tensor, "copy batch"]:
        """Return log p of every copy of the batch, which differ by their edges."""
        copies = len(edges) // len(ids)
        return log_probabilities(model, ids.repeat(copies, 1), targets.repeat(copies), edges, layers).view(copies, -1)

    with torch.no_grad():
        logits = model(ids).logits[:, -1].double()
    before = logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    tokens = torch.stack([source_of(effects, last) for last in SOURCES.values()])
    generators = [torch.Generator().manual_seed(position) for position in batch]
    drawn = others(length, source_of(effects, SOURCES[IMPORTANT]), generators)
    edges = to_last(tokens.flatten(), length)
    by_row = {label: before - log_p(edges, layers) for label, layers in layer_windows.items()}
    everywhere = before - log_p(torch.cat([edges, to_last(drawn.T.flatten(), length)]))
    by_row[ALL] = everywhere[: len(SOURCES)]
    by_row[OUTGOING] = before - log_p(to_later(tokens.flatten(), length))
    by_row[REPLACED] = effects.gather(1, tokens.T).T
    falls = {(label, source): row for label, rows in by_row.items() for source, row in zip(SOURCES, rows, strict=True)}
    falls[ALL, OTHER] = everywhere[len(SOURCES) :].mean(0)
    return [
        number(method, column, value, model=name, sample=str(position))
        for (method, column), values in falls.items()
        for position, value in zip(batch, values.tolist(), strict=True)
    ]


def by_length(every: Sequence[Prompt]) -> list[dict[int, Prompt]]:
    """Return the prompts by position, in batches of one length."""
    groups: dict[int, list[int]] = {}
    for position, prompt in enumerate(every):
        groups.setdefault(len(prompt.example.ids), []).append(position)
    return [
        {position: every[position] for position in group[start : start + BATCH]}
        for group in groups.values()
        for start in range(0, len(group), BATCH)
    ]


def cut_rows(
    models: Mapping[str, Callable[[], nn.Module]], every: Mapping[str, Sequence[Prompt]]
) -> list[dict[str, Any]]:
    """Return the rows of the cuts of all models, in the order of their prompts."""
    batches = {(name, at): batch for name in models for at, batch in enumerate(by_length(every[name]))}
    loaded = {name: lru_cache(load) for name, load in models.items()}

    def run(keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
        rows = {}
        for name, at in keys:
            host = loaded[name]()
            rows[name, at] = cut_falls(host, name, batches[name, at], windows(name))
        return rows

    computed = Processes().spread(list(batches), lambda key: None, run)
    rows = [row for of_batch in computed.values() for row in of_batch]
    return sorted(rows, key=lambda row: int(row["sample"]))


def pseudo_values(x: Float[Tensor, " prompt"], y: Float[Tensor, " prompt"]) -> Float[Tensor, " prompt"]:
    """Return the jackknife's pseudo-values of Spearman's correlation: n r - (n - 1) r without a prompt.

    Their mean is the correlation without its bias of order 1 / n, and their spread that of the correlation.
    Source: Tukey, "Bias and confidence in not quite large samples" (1958).
    """
    every = torch.ones(len(x), len(x), dtype=torch.bool).fill_diagonal_(False)
    whole = rank_correlation(x[None], y[None]).mean
    without = torch.tensor([rank_correlation(x[None, rest], y[None, rest]).mean for rest in every])
    return len(x) * whole - (len(x) - 1) * without.double()


def rank_rows(cuts: Table) -> list[dict[str, Any]]:
    """Return rows whose means are the rank correlations, over prompts, of the falls by cuts and by replacements."""
    rows = []
    for name in dict.fromkeys(row["model"] for row in cuts):
        for source in SOURCES:
            of_source = cuts.select(model=name, metric=source)
            samples = [row["sample"] for row in of_source.select(method=REPLACED)]
            falls = {
                method: torch.tensor([row["value"] for row in of_source.select(method=method)], dtype=torch.float64)
                for method in (ALL, OUTGOING, REPLACED)
            }
            for method in (ALL, OUTGOING):
                values = pseudo_values(falls[method], falls[REPLACED]).tolist()
                rows += [
                    number(method, source, value, model=name, sample=sample)
                    for sample, value in zip(samples, values, strict=True)
                ]
    return rows


@lru_cache(maxsize=2)
def deletion(case: Case, masking: str) -> Float[Tensor, "order fraction"]:
    """Return the falls of the label's log-probability as the first tokens of both orders are removed.

    The orders are those of `ORDERS`: highest scores first, and lowest scores first. "mean" removes a token by the mean
    embedding; "reference" puts random tokens there, and the falls are the mean of `DRAWS` draws, which every method
    meets.
    """
    ids, scores, label = case.sample.inputs, case.one_row(), case.sample.label
    assert label is not None
    random = masking == "reference"
    draws = DRAWS if random else 1
    count = len(ORDERS) * draws
    relevance = torch.stack([sign * scores for sign in (1, -1) for _ in range(draws)])
    # The runs of the unchanged prompt are the same for every method.
    if (key := (deletion, masking)) not in case.shared:
        generator = torch.Generator().manual_seed(DRAWS_SEED + int(case.sample.name))
        reference = torch.randint(1, VOCABULARY, (draws, ids.shape[1]), generator=generator)
        case.shared[key] = PerturbationTest(
            case.model,
            ids.expand(count, -1),
            relevance,
            masking="reference" if random else "mean",
            reference=reference.repeat(len(ORDERS), 1) if random else None,
            labels=torch.full((count,), label),
            valid=case.valid.expand(count, -1),
            seed=case.seed,
        )
    test: PerturbationTest = case.shared[key].of_scores(relevance)
    before = test.logits.log_softmax(-1).gather(-1, test.labels[:, None])
    falls = before - test.deletion(FRACTIONS).values.log()
    return falls.view(len(ORDERS), draws, len(FRACTIONS)).mean(1)


def deletion_fall(case: Case, masking: str, order: int, fraction: int | None = None) -> float:
    """Return one number of `deletion`: at a fraction by its position, or the mean over fractions."""
    falls = deletion(case, masking)[order]
    return float(falls.mean() if fraction is None else falls[fraction])


def measured_effects(trace: Trace, sample: Sample, *, model: str) -> Float[Tensor, " key"]:
    """Score tokens by the effect of replacing them, whose draws are others than those of the deletion."""
    return torch.tensor(prompts(model)[int(sample.name)].effects, dtype=torch.float64)


def random_scores(trace: Trace, sample: Sample) -> Float[Tensor, " key"]:
    """Score tokens by chance."""
    generator = torch.Generator().manual_seed(SCORES_SEED + int(sample.name))
    return torch.rand(sample.inputs.shape[1], generator=generator, dtype=torch.float64)


def deletion_rows(
    name: str, load: Callable[[], nn.Module], every: Sequence[Prompt], out: Path
) -> list[Mapping[str, Any]]:
    """Return the rows of every ranking of a model's prompts."""
    metrics = {
        metric(masking, order): partial(deletion_fall, masking=masking, order=at)
        for masking in MASKINGS
        for at, order in enumerate(ORDERS)
    } | {
        metric("reference", order, fraction): partial(deletion_fall, masking="reference", order=at, fraction=number)
        for at, order in enumerate(ORDERS)
        for number, fraction in enumerate(FRACTIONS)
    }
    samples = [
        Sample(inputs=torch.tensor([prompt.example.ids]), target=-1, label=prompt.example.target, name=str(position))
        for position, prompt in enumerate(every)
    ]
    return list(
        ula.evaluate(
            {name: load},
            samples,
            {"random": random_scores, EFFECT: partial(measured_effects, model=name), **METHODS},
            metrics,
            baselines=("recency",),
            out=out / name,
            progress=False,
        )
    )
