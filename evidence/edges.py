"""Faithfulness by causal edges: cut the highest-ranked tokens or edges in the running model, and read the logit."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

import unilinattn as ula
from evidence.claims import HERE, Claim, Results
from evidence.comparisons import Comparison
from evidence.comparisons import better as of_models
from evidence.pictures import dots
from evidence.rows import number
from evidence.study import Size, Study, View
from evidence.tasks import METHODS as COMMON
from evidence.tasks import TASKS, hosts_by_task, words
from evidence.training import HELD_OUT_SEED, SELECTION_SEED
from unilinattn.evaluation import Sample, Table
from unilinattn.evaluation.measures import Case
from unilinattn.evaluation.processes import Processes
from unilinattn.tracing.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS: Mapping[str, Any] = {**COMMON, "knockout": "knockout"}

TOKENS = (1, 4)
"""Numbers of tokens whose edges to other tokens are cut in all layers."""

EDGES = (4, 16)
"""Numbers of single edges that are cut, each in its layer."""

RUNS = 256
"""Number of runs of a model whose results are kept."""

Cuts = tuple[tuple[int | None, tuple[tuple[int, int], ...]], ...]
"""Pairs (query, key) of layers, None for all layers together."""


def token_fall(case: Case, count: int) -> float:
    """Return the fall of the predicted logit when the edges of the `count` highest keys to other tokens are cut."""
    position = case.position
    assert position is not None
    keys = torch.where(case.valid, case.scores.double(), -torch.inf).topk(count).indices
    length = len(case.scores)
    pairs = [(query, key) for key in sorted(keys.tolist()) for query in range(key + 1, length)]
    return _fall(case.model, case.sample, position, ((None, tuple(pairs)),))


def edge_scores(trace: Trace, target: int) -> dict[str, Float[Tensor, "layer query key"]]:
    """Return scores of every edge of every layer, by method.

    `gradient x contribution` is dy_i . T_ij x_j, the first-order part of the logit that an edge carries.
    """
    scores = {
        method: ula.explain(trace, method=method, progress=False).scores[:, 0] for method in ("raw", "latim", "alti")
    }
    (gradients,) = trace.gradients([target])
    shares = []
    for layer, gradient in zip(trace.layers, gradients, strict=True):
        vectors = layer.operator.contributions(torch.arange(layer.output.shape[1]))
        shares.append(torch.einsum("io,ijo->ij", gradient[0], vectors[0]))
    scores["gradient x contribution"] = torch.stack(shares)
    generator = torch.Generator().manual_seed(target)
    scores["random"] = torch.rand(scores["raw"].shape, generator=generator)
    return scores


def edge_fall(
    model: nn.Module, sample: Sample, trace: Trace, scores: Float[Tensor, "layer query key"], count: int
) -> float:
    """Return the fall of the predicted logit when the `count` highest edges between different tokens are cut."""
    assert sample.target is not None
    layers, length, _ = scores.shape
    other = torch.ones(length, length, dtype=torch.bool).tril(-1)
    # Edges that reach no token before the target's, nor the target, cannot matter.
    other[sample.target + 1 :] = False
    chosen = torch.where(other, scores.double(), -torch.inf).flatten().topk(count).indices
    by_layer: dict[int, list[tuple[int, int]]] = {}
    for flat in sorted(chosen.tolist()):
        layer, rest = divmod(flat, length * length)
        by_layer.setdefault(layer, []).append(divmod(rest, length))
    assert layers == len(trace.layers)
    return _fall(model, sample, sample.target, tuple((layer, tuple(pairs)) for layer, pairs in by_layer.items()))


# Many methods choose the same edges, and the model without cuts is the same for all.
@lru_cache(maxsize=RUNS)
@torch.no_grad()
def _logits(model: nn.Module, sample: Sample, position: int) -> Float[Tensor, " vocabulary"]:
    logits: Tensor = model(sample.inputs).logits[0, position]
    return logits


@lru_cache(maxsize=RUNS)
@torch.no_grad()
def _fall(model: nn.Module, sample: Sample, position: int, cuts: Cuts) -> float:
    """Return the predicted logit less that of a run without some edges."""
    logits = _logits(model, sample, position)
    predicted = logits.argmax()
    with ExitStack() as stack:
        for layer, pairs in cuts:
            stack.enter_context(ula.cut(model, pairs, layers=None if layer is None else [layer]))
        without = model(sample.inputs).logits[0, position]
    return float(logits[predicted] - without[predicted])


def _single_edges(models: Mapping[str, Callable[[], nn.Module]], samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return the falls for single edges: a row for each model, sample, method and number of edges."""

    def run(keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
        rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for model, at in keys:
            host, sample = models[model](), samples[at]
            assert sample.target is not None
            trace = ula.trace(host, sample.inputs, progress=False)
            rows[model, at] = [
                number(method, f"{k} cut", edge_fall(host, sample, trace, scores, k), model=model, sample=str(at))
                for method, scores in edge_scores(trace, sample.target).items()
                for k in EDGES
            ]
        return rows

    keys = [(model, at) for model in models for at in range(len(samples))]
    found = Processes().spread(keys, lambda key: None, run)
    return [row for rows in found.values() for row in rows]


class EdgesStudy(Study):
    """Cuts of tokens and edges on three tasks."""

    name = "edges"
    title = "Causal edges"
    question = "Does the output change most when the edges between tokens with the highest scores are cut?"
    source = "knockout (Geva et al., 2023) as a test of the methods"
    text = """
The models of copying, induction and alignment. Tokens: the edges of the highest-ranked keys to all other tokens are
cut in every layer, together, and the predicted logit is read again: a larger fall means that the model used these
tokens more. `knockout` cuts one token at a time and ranks by the fall itself. Edges: single pairs (query, key)
of single layers are ranked over the whole model and cut; `gradient x contribution` is the first-order share of an edge
in the logit. Numbers are falls of the logit, averaged over sequences.
"""
    caption = (
        "Fall of the predicted logit when the edges of the four highest-ranked tokens are cut: mean of three seeds, by "
        "method. A larger fall means that the model used these tokens more."
    )
    size = Size(5, 3)
    quick = Size(2, 2)
    views = (
        *(
            View(
                f"tokens of {name}",
                f"{name.capitalize()}: fall of the logit without the edges of tokens",
                [(model, f"{k} cut", f"{model}, {k}") for model in task.models for k in TOKENS],
            )
            for name, task in TASKS.items()
        ),
        *(
            View(
                f"edges of {name}",
                f"{name.capitalize()}: fall of the logit without single edges",
                [(model, f"{k} cut", f"{model}, {k}") for model in task.models for k in EDGES],
            )
            for name, task in TASKS.items()
        ),
    )

    def hosts(self, weights: Path, seed: int) -> dict[str, Callable[[], nn.Module]]:
        """Return functions that load the models of the tasks, by "task/model"."""
        return hosts_by_task(weights, seed)

    def measure(
        self, hosts: Mapping[str, Callable[[], nn.Module]], seed: int, size: Size, out: Path
    ) -> dict[str, Table]:
        """Measure the falls on each task."""
        tables = {}
        for name, task in TASKS.items():
            models = {model: hosts[f"{name}/{model}"] for model in task.models}
            draw = partial(words, each=2) if name == "alignment" else task.samples
            samples = draw(size.scored, HELD_OUT_SEED)
            tables[f"tokens of {name}"] = ula.evaluate(
                models,
                samples,
                METHODS,
                {"ap": "ap", **{f"{k} cut": partial(token_fall, count=k) for k in TOKENS}},
                selection=draw(size.selection, SELECTION_SEED),
                select_by="ap",
                out=out / name,
                progress=False,
            )
            tables[f"edges of {name}"] = Table(_single_edges(models, samples))
        return tables

    def claims(self, results: Results) -> list[Claim]:
        """Return the claims of this library."""

        def better(kind: str, k: int, method: str, than: str) -> list[Comparison]:
            return [
                one
                for name, task in TASKS.items()
                for one in of_models(f"{kind} of {name}", f"{k} cut", method, than, task.models)
            ]

        return [
            Claim.of(
                "Every method finds tokens that matter more than random ones",
                HERE,
                *(outcome for method in METHODS for outcome in better("tokens", 4, method, "random")),
            ),
            Claim.of(
                "The exact shares of `logit` find tokens that matter more than `rollout` and `attribution` do",
                HERE,
                *(outcome for other in ("rollout", "attribution") for outcome in better("tokens", 4, "logit", other)),
            ),
            Claim.of(
                "Edges ranked by gradient x contribution matter more than those ranked by `raw`, `latim` and `alti`",
                HERE,
                *(
                    outcome
                    for other in ("raw", "latim", "alti")
                    for outcome in better("edges", 16, "gradient x contribution", other)
                ),
            ),
            Claim.of(
                "Edges ranked by `alti` matter more than random ones",
                HERE,
                *better("edges", 16, "alti", "random"),
            ),
        ]

    def picture(self, hosts: Mapping[str, Callable[[], nn.Module]], results: Results) -> "Figure":
        """Draw the fall of the logit by method."""
        panels = {name.capitalize(): (f"tokens of {name}", "4 cut", task.models) for name, task in TASKS.items()}
        return dots(panels, results, across="fall of the logit")


STUDY = EdgesStudy()
