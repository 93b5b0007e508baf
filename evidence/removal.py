"""Activation and pruning on sequences: add or remove tokens in the order of their scores (HMA ACL 4.3, Table 3)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import unilinattn as ula
from evidence.baselines import token_scorer
from evidence.claims import HERE, Claim, Results
from evidence.comparisons import Comparison
from evidence.comparisons import better as of_models
from evidence.pictures import dots
from evidence.study import Size, Study, View
from evidence.tasks import BATCH, TASKS, UNIT, hosts_by_task, labelled, sizes_text
from evidence.tasks import METHODS as COMMON
from evidence.training import scored_seed, selection_seed
from unilinattn.evaluation import Sample, Table
from unilinattn.evaluation.case import Case
from unilinattn.evaluation.measures import Metric, metric
from unilinattn.evaluation.perturbation import TENTHS
from unilinattn.host.substitution import through_operators
from unilinattn.tracing.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS: Mapping[str, Any] = {**COMMON, "attention grad": "attention_grad"}


def through(name: str) -> Metric:
    """Return a metric that runs a model through its operators: they compute what slow loops of the hosts do."""
    changed = metric(name, {"masking": "mean"})

    def measure(cases: Sequence[Case], **options: Any) -> Any:
        with through_operators(cases[0].model):
            return changed.measure(cases, **options)

    return replace(changed, measure=measure)


METRICS = {"AUAC": through("activation_auac"), "AU-MSE": through("pruning_au_mse")}


def gold(trace: Trace, sample: Sample) -> Tensor:
    """Score the keys that hold the answer by 1, and the keys before them and the query by a half.

    A model that stores pairs of tokens finds the answer by the token before it: without that token the pair is gone.
    """
    assert sample.relevant is not None and sample.target is not None
    answer = sample.relevant if sample.relevant.ndim == 1 else sample.relevant[sample.target]
    scores = answer.double()
    before = torch.cat([scores[1:], torch.zeros(1, dtype=scores.dtype)])
    return torch.maximum(scores, before / 2)


GOLD: Mapping[str, Any] = {"gold": token_scorer("gold", gold)}
"""The row of the known answer."""


class RemovalStudy(Study):
    """Activation and pruning tests on three tasks with known answers."""

    name = "removal"
    title = "Adding and removing tokens"
    question = (
        "Does a model keep its answer when it reads the highest-ranked tokens only, and change it most when they go?"
    )
    source = "HMA ACL Tables 3 and 9"
    unit = UNIT
    size = Size(23, 4)
    quick = Size(2, 2)
    text = f"""
The models of copying, induction and alignment. Activation adds tokens to an input of mean embeddings, most relevant
first, and watches the probability of the true answer (AUAC, larger is better). Pruning removes them, least relevant
first, and watches the squared change of the logits (AU-MSE, smaller is better). The query's own token stays.

`gold` ranks the keys that hold the answer first, then the tokens right before them: in a model that stores pairs of
tokens the answer is found by the token before it. `recency` ranks the nearest tokens first. The paper runs language
models of up to 2.8 billion parameters on ARC-Easy, without known answers and without baselines.
{sizes_text(size.scored)}.
Each method reads {2 * len(TENTHS)} changed inputs for a pair.
"""
    caption = (
        "Probability of the true answer as tokens are added, most relevant first: AUAC by method, mean of three seeds."
    )
    views = tuple(
        View(
            name,
            f"{name.capitalize()}: {metric}",
            [(model, metric, model) for model in task.models],
        )
        for name, task in TASKS.items()
        for metric in METRICS
    )

    def hosts(self, weights: Path, seed: int) -> dict[str, Callable[[], nn.Module]]:
        """Return functions that load the models of the tasks, by "task/model"."""
        return hosts_by_task(weights, seed)

    def measure(
        self, hosts: Mapping[str, Callable[[], nn.Module]], seed: int, size: Size, out: Path
    ) -> dict[str, Table]:
        """Measure activation and pruning on each task."""
        return {
            name: ula.evaluate(
                {model: hosts[f"{name}/{model}"] for model in task.models},
                labelled(task.samples(size.scored, scored_seed(seed))),
                {**METHODS, **GOLD},
                METRICS,
                selection=labelled(task.samples(size.selection, selection_seed(seed))),
                out=out / name,
                progress=False,
                batch_size=BATCH,
            )
            for name, task in TASKS.items()
        }

    def claims(self, results: Results) -> list[Claim]:
        """Return the claims of HMA ACL 4.3 and of this library."""

        def better(metric: str, method: str, than: str, tasks: Sequence[str] = tuple(TASKS)) -> list[Comparison]:
            larger = metric == "AUAC"
            return [
                one
                for name in tasks
                for one in of_models(name, metric, method, than, TASKS[name].models, larger=larger)
            ]

        return [
            Claim.of(
                "Attribution ranks tokens better than raw attention and rollout, by activation and by pruning",
                "HMA ACL 4.3, Table 3",
                *(
                    outcome
                    for metric in METRICS
                    for other in ("raw", "rollout")
                    for outcome in better(metric, "attribution", other)
                ),
            ),
            Claim.of(
                "Every method ranks better than chance by activation",
                HERE,
                *(outcome for method in METHODS for outcome in better("AUAC", method, "random")),
            ),
            Claim.of(
                "`logit` ranks better than `attribution` by activation",
                HERE,
                *better("AUAC", "logit", "attribution"),
            ),
            Claim.of(
                "The known answer, with the token before it, ranks better than every method by activation",
                HERE,
                *(outcome for method in METHODS for outcome in better("AUAC", "gold", method)),
            ),
            Claim(
                "The same on ARC-Easy with Mamba-1 of 1.3 and 2.8 billion parameters",
                "HMA ACL Table 3",
                untested="the checkpoints and the data are not part of this repository",
            ),
        ]

    def picture(self, hosts: Mapping[str, Callable[[], nn.Module]], results: Results) -> "Figure":
        """Draw the AUAC of every method."""
        panels = {name.capitalize(): (name, "AUAC", task.models) for name, task in TASKS.items()}
        return dots(panels, results, across="AUAC")


STUDY = RemovalStudy()
