"""Scores of every method on inputs with one target each."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

import unilinattn as ula
from evidence.rankings import PASSES, Scored, half
from evidence.truths import DISTANT, Input
from unilinattn import methods
from unilinattn.errors import SinkWarning, UncoveredError
from unilinattn.options import Options

METHODS: tuple[Options, ...] = (
    methods.AttnLrp(),
    methods.AttnLrp(split="thirds"),
    methods.Logit(),
    methods.Lrp(),
    methods.AttnLrp(measure="log-odds"),
    methods.AttnLrp(measure="log-odds", split="thirds"),
    methods.Logit(measure="log-odds"),
    methods.Lrp(measure="log-odds"),
    methods.AltiLogit(),
    methods.Raw(),
    methods.Rollout(),
    methods.Alti(compose="rollout"),
    methods.Latim(compose="rollout"),
    methods.Contribution(),
    methods.Attribution(),
    methods.AttentionGrad(),
    methods.TransformerAttribution(),
    methods.Gradient(),
    methods.InputXGradient(),
    methods.Smoothgrad(),
    methods.IntegratedGradients(),
    methods.Occlusion(),
    methods.Knockout(),
)
"""Every method but `kernel_shap`, which reads hundreds of sequences; scores of single layers are averaged."""

LEFT_OUT = dict.fromkeys(
    ("smollm2-first", DISTANT),
    ("smoothgrad", "integrated_gradients", "occlusion", "knockout"),
)
"""Methods that are not scored on a checkpoint, because they take minutes and are scored on the same model before."""

REFERENCE = 8
"""Inputs of the reporting half on which methods that read more than `PASSES` sequences are scored."""

BATCH = 8
"""Inputs of one length that are explained together."""


def sequences_read(model: nn.Module, example: Input, candidates: Sequence[Options] = METHODS) -> dict[str, int]:
    """Return the sequences that the model reads for an explanation of an input by each method, that of the trace too.

    A method that refuses the model is left out.
    """
    read: dict[str, int] = {}
    count = [0]

    def add(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        named = [keywords[name] for name in ("input_ids", "inputs_embeds") if keywords.get(name) is not None]
        count[0] += (named or arguments)[0].shape[0]

    trace = ula.trace(model, torch.tensor([example.ids]), progress=False)
    handle = model.register_forward_pre_hook(add, with_kwargs=True)
    try:
        for method in candidates:
            count[0] = 1
            try:
                _explained(trace, method, [example])
            except UncoveredError:
                continue
            read[method.label] = count[0]
    finally:
        handle.remove()
    return read


def _explained(trace: Any, method: Options, examples: Sequence[Input]) -> tuple[Float[Tensor, "batch key"], Any]:
    """Return the scores of the target of each input, averaged over layers that the method keeps, and the sinks."""
    # By default methods explain the prediction of each input; another logit is that of all inputs of the batch.
    if not examples[0].predicted and "logit" in type(method).model_fields:
        method = type(method)(**{**method.keywords, "logit": examples[0].target})
    positions = [0 if example.position is None else example.position for example in examples]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SinkWarning)
        result = ula.explain(trace, method=method, target=positions, progress=False)
    scores = result.scores
    for name in ("layer", "head"):
        if name in result.dims:
            scores = scores.mean(0 if name == "layer" else 1)
    return scores, result.sinks


def _batches(examples: Mapping[int, Input]) -> list[dict[int, Input]]:
    """Return the inputs that are explained together: those of one length, and of one target or all predictions."""
    groups: dict[tuple[int, int | None], list[int]] = {}
    for index, example in examples.items():
        groups.setdefault((len(example.ids), None if example.predicted else example.target), []).append(index)
    return [
        {index: examples[index] for index in group[start : start + BATCH]}
        for group in groups.values()
        for start in range(0, len(group), BATCH)
    ]


def scores_of(
    model: nn.Module, examples: Mapping[int, Input], candidates: Sequence[Options]
) -> dict[int, tuple[dict[str, Tensor], tuple[int, ...]]]:
    """Return the scores of each method, by its label, and the attention sinks, for each input."""
    results: dict[int, tuple[dict[str, Tensor], tuple[int, ...]]] = {}
    for batch in _batches(examples):
        inputs = list(batch.values())
        trace = ula.trace(model, torch.tensor([example.ids for example in inputs]), progress=False)
        scores, sinks = {}, None
        for method in candidates:
            scores[method.label], of_method = _explained(trace, method, inputs)
            sinks = of_method if of_method is not None else sinks
        for row, index in enumerate(batch):
            of_input = {label: values[row].double() for label, values in scores.items()}
            results[index] = of_input, tuple(sinks[row]) if sinks else ()
    return results


def baselines(index: int, length: int) -> dict[str, Float[Tensor, " key"]]:
    """Return the scores of the baselines, which ignore the model."""
    generator = torch.Generator().manual_seed(index)
    return {
        "recency": torch.arange(length, dtype=torch.float64),
        "random": torch.rand(length, generator=generator, dtype=torch.float64),
    }


def scored(
    model: nn.Module, examples: Sequence[Input], candidates: Sequence[Options] = METHODS
) -> tuple[list[Scored], dict[str, int]]:
    """Return the scores and the attention sinks of each input, and the sequences that each method reads.

    Methods that read more than `PASSES` sequences are scored on the first `REFERENCE` inputs of the reporting half.
    """
    read = sequences_read(model, examples[0], candidates)
    covered = [method for method in candidates if method.label in read]
    inputs = dict(enumerate(examples))
    reported = dict([(index, example) for index, example in inputs.items() if half(index) == "report"][:REFERENCE])
    results = scores_of(model, inputs, [method for method in covered if read[method.label] <= PASSES])
    many = [method for method in covered if read[method.label] > PASSES]
    for index, (scores, _) in (scores_of(model, reported, many) if many else {}).items():
        results[index][0].update(scores)
    for index, example in inputs.items():
        results[index][0].update(baselines(index, len(example.ids)))
    return [results[index] for index in inputs], read
