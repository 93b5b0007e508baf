"""Faithfulness by causal edges: cut the highest-ranked tokens or edges in the running model, and read the logit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import one_hot

import unilinattn as ula
from evidence.claims import HERE, Claim, Results
from evidence.comparisons import Comparison
from evidence.comparisons import better as of_models
from evidence.operators import by_operators
from evidence.pictures import dots
from evidence.rows import number
from evidence.study import Size, Study, View
from evidence.tasks import BATCH, TASKS, UNIT, hosts_by_task, sizes_text
from evidence.tasks import METHODS as COMMON
from evidence.training import scored_seed, selection_seed
from unilinattn.evaluation import Sample, Table
from unilinattn.evaluation.case import Case
from unilinattn.evaluation.measures import Measurement, Metric
from unilinattn.evaluation.plan import batches
from unilinattn.evaluation.processes import Processes
from unilinattn.host.substitution import through_operators
from unilinattn.operator.edges import Edges, Groups
from unilinattn.operator.operator import MixerOperator
from unilinattn.reruns.cut import Cut
from unilinattn.reruns.rerun import rerun
from unilinattn.tracing.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS: Mapping[str, Any] = {**COMMON, **by_operators({"knockout": "knockout"})}

TOKENS = (1, 4)
"""Numbers of tokens whose edges to other tokens are cut in all layers."""

EDGES = (4, 16)
"""Numbers of single edges that are cut, each in its layer."""


@dataclass(frozen=True, eq=False)
class Masked(Edges):
    """The edges of each sequence, as a boolean map."""

    cut: Bool[Tensor, "batch query key"]

    def groups(self, operator: MixerOperator) -> Groups:
        """Return a group for each key of a sequence with a cut edge; a sequence with fewer keys has empty groups."""
        cut = self.cut.any(1)
        keys = cut.int().argsort(dim=1, descending=True, stable=True)[:, : int(cut.sum(1).max())]
        queries = self.cut.mT.gather(1, keys[:, :, None].expand(-1, -1, self.cut.shape[1]))
        return Groups(queries, one_hot(keys, self.cut.shape[2]).bool())


@torch.no_grad()
def logits_without(
    trace: Trace,
    sequences: Int[Tensor, " run"],
    positions: Int[Tensor, " batch"],
    cuts: Bool[Tensor, "run layer query key"],
) -> Float[Tensor, "run class"]:
    """Return the logits at the position of each traced sequence, in runs of some sequences without edges of layers."""
    without = [Cut(Masked(edges), layers=[layer]) for layer, edges in enumerate(cuts.unbind(1)) if edges.any()]
    with through_operators(trace.host):
        return rerun(trace, sequences, without, positions=positions[sequences]).logits(positions[sequences])[:, 0]


def falls(
    trace: Trace,
    sequences: Int[Tensor, " run"],
    positions: Int[Tensor, " batch"],
    cuts: Bool[Tensor, "run layer query key"],
) -> Float[Tensor, " run"]:
    """Return the predicted logit at the position of each traced sequence, less that of runs without some edges.

    `sequences`: the index of the traced sequence of each run.
    """
    every = torch.arange(len(positions))
    # The whole sequences are runs without cuts, of the same batch.
    uncut = cuts.new_zeros(len(every), *cuts.shape[1:])
    logits = logits_without(trace, torch.cat([every, sequences]), positions, torch.cat([uncut, cuts]))
    whole, without = logits[: len(every)], logits[len(every) :]
    predicted = whole.argmax(1, keepdim=True)[sequences]
    return (whole[sequences].gather(1, predicted) - without.gather(1, predicted)).squeeze(1)


def token_falls(cases: Sequence[Case], count: int) -> list[Measurement]:
    """Measure the fall of the predicted logit when the edges of the `count` highest keys to other tokens are cut."""
    pairs = zip(_without(cases, 0), _without(cases, count), strict=True)
    return [Measurement.mean(float(whole.max() - without[whole.argmax()])) for whole, without in pairs]


def _without(cases: Sequence[Case], count: int) -> list[Float[Tensor, " class"]]:
    """Return the logits at the target of each case without the edges of its `count` highest keys to other tokens."""
    # Many methods choose the same tokens.
    logits: dict[tuple[int, ...], Tensor] = cases[0].shared.setdefault(logits_without, {})
    highest = [(case.row, *_highest(case)[:count]) for case in cases]
    keys = {key: case for key, case in zip(map(_sorted, highest), cases, strict=True) if key not in logits}
    if keys:
        trace = cases[0].trace
        batch, length = trace.layers[-1].output.shape[:2]
        rows, positions = torch.tensor([row for row, *_ in keys]), torch.zeros(batch, dtype=torch.long)
        for case in keys.values():
            assert case.position is not None
            positions[case.row] = case.position
        cuts = torch.zeros(len(keys), len(trace.layers), length, length, dtype=torch.bool)
        for run, (_, *tokens) in zip(cuts, keys, strict=True):
            run[:, :, tokens] = True
        cuts &= torch.ones(length, length, dtype=torch.bool).tril(-1)
        logits.update(zip(keys, logits_without(trace, rows, positions, cuts), strict=True))
    return [logits[key] for key in map(_sorted, highest)]


def _highest(case: Case) -> list[int]:
    order = torch.where(case.valid, case.scores.double(), -torch.inf)
    return order.topk(max(TOKENS)).indices.tolist()


def _sorted(key: tuple[int, ...]) -> tuple[int, ...]:
    row, *tokens = key
    return (row, *sorted(tokens))


METRICS = {f"{k} cut": Metric("fall", partial(token_falls, count=k), of_batch=True) for k in TOKENS}


def edge_scores(trace: Trace, targets: Sequence[int]) -> dict[str, Float[Tensor, "layer batch query key"]]:
    """Return scores of every edge of every layer, by method, for the target of each sequence.

    `gradient x contribution` is dy_i . T_ij x_j, the first-order part of the logit that an edge carries.
    """
    scores = {method: ula.explain(trace, method=method, progress=False).scores for method in ("raw", "latim", "alti")}
    (gradients,) = trace.gradients([list(targets)])
    shares = []
    for layer, gradient in zip(trace.layers, gradients, strict=True):
        vectors = layer.operator.contributions(torch.arange(layer.output.shape[1]))
        shares.append(torch.einsum("bio,bijo->bij", gradient, vectors))
    scores["gradient x contribution"] = torch.stack(shares)
    generators = [torch.Generator().manual_seed(target) for target in targets]
    shape = (len(trace.layers), *scores["raw"].shape[2:])
    scores["random"] = torch.stack([torch.rand(shape, generator=generator) for generator in generators], 1)
    return scores


def highest_edges(scores: Float[Tensor, "layer query key"], target: int, count: int) -> Bool[Tensor, "layer query key"]:
    """Return the `count` highest edges between different tokens that can reach the target."""
    other = torch.ones(scores.shape[1:], dtype=torch.bool).tril(-1)
    # Edges into a later token than the target do not matter.
    other[target + 1 :] = False
    chosen = torch.where(other, scores.double(), -torch.inf).flatten().topk(count).indices
    return torch.zeros(scores.numel(), dtype=torch.bool).index_fill(0, chosen, True).view(scores.shape)


def _single_edges(models: Mapping[str, Callable[[], nn.Module]], samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return the falls for single edges: a row for each model, sample, method and number of edges."""

    units = batches(samples, BATCH)

    def run(keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
        rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
        hosts = {model: models[model]() for model in dict(keys)}
        for model, unit in keys:
            of_unit = [samples[at] for at in units[unit]]
            targets = [sample.target for sample in of_unit if sample.target is not None]
            trace = ula.trace(hosts[model], torch.cat([sample.inputs for sample in of_unit]), progress=False)
            by_method = edge_scores(trace, targets)
            sequences = torch.arange(len(targets)).repeat(len(by_method))
            by_count = {}
            for k in EDGES:
                # A run takes a pass of an operator for each key of the sequence with most of them.
                cuts = [
                    highest_edges(scores[:, sequence], target, k)
                    for scores in by_method.values()
                    for sequence, target in enumerate(targets)
                ]
                measured = falls(trace, sequences, torch.tensor(targets), torch.stack(cuts))
                by_count[k] = dict(zip(by_method, measured.view(len(by_method), -1).tolist(), strict=True))
            rows[model, unit] = [
                number(method, f"{k} cut", by_count[k][method][sequence], model=model, sample=str(at))
                for sequence, at in enumerate(units[unit])
                for method in by_method
                for k in EDGES
            ]
        return rows

    keys = [(model, unit) for model in models for unit in range(len(units))]
    measured = Processes().spread(keys, lambda key: None, run)
    names = list(models)
    every = [row for rows in measured.values() for row in rows]
    return sorted(every, key=lambda row: (names.index(row["model"]), int(row["sample"])))


class EdgesStudy(Study):
    """Cuts of tokens and edges on three tasks."""

    name = "edges"
    title = "Causal edges"
    question = "Does the output change most when the edges between tokens with the highest scores are cut?"
    source = "knockout (Geva et al., 2023) as a test of the methods"
    unit = UNIT
    size = Size(23, 4)
    quick = Size(2, 2)
    text = f"""
The models of copying, induction and alignment. Tokens: the edges of the highest-ranked keys to all other tokens are
cut in every layer, together, and the predicted logit is read again: a larger fall means that the model used these
tokens more. `knockout` cuts one token at a time and ranks by the fall itself. Edges: single pairs (query, key)
of single layers are ranked over the whole model and cut; `gradient x contribution` is the first-order share of an edge
in the logit. Numbers are falls of the logit, averaged over sequences.
{sizes_text(size.scored)}. `knockout` and the falls run the model anew for each choice of tokens.
"""
    caption = (
        "Fall of the predicted logit when the edges of the four highest-ranked tokens are cut: mean of three seeds, by "
        "method. A larger fall means that the model used these tokens more."
    )
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
            samples = task.samples(size.scored, scored_seed(seed))
            tables[f"tokens of {name}"] = ula.evaluate(
                models,
                samples,
                METHODS,
                {
                    "ap": "ap",
                    **{f"{k} cut": Metric("fall", partial(token_falls, count=k), of_batch=True) for k in TOKENS},
                },
                selection=task.samples(size.selection, selection_seed(seed)),
                select_by="ap",
                out=out / name,
                progress=False,
                batch_size=BATCH,
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
