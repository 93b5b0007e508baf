"""rxnfp's 50 classes of reactions: tokens are revealed or removed in the order of their scores (HMA ACL, Table 3)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import unilinattn as ula
from evidence import checkpoints
from evidence.claims import HERE, Claim
from evidence.comparisons import Comparison, better
from evidence.reactions import ARYLS, KINDS, reactions
from evidence.section import Section
from evidence.study import View
from unilinattn import methods
from unilinattn.evaluation import Sample, Table
from unilinattn.methods.default import OTHER as DEFAULT

CURVES = "curves"
"""The table."""

MODEL = "rxnfp"

AUAC, AU_MSE = "AUAC", "AU-MSE"

METHODS: Mapping[str, Any] = {
    DEFAULT.label: DEFAULT,
    "attribution": methods.Attribution(),
    "transformer_attribution": methods.TransformerAttribution(),
    "rollout": methods.Rollout(),
    "raw": methods.Raw(layers="mean"),
    "input_x_gradient": methods.InputXGradient(),
}

RANDOM = "random"

BATCH = 8
"""Most reactions of one length that are explained together."""

HMA = "HMA ACL 4.3, on other models and text"


def samples(texts: Sequence[str], vocabulary: Sequence[str]) -> list[Sample]:
    """Return a sample for each reaction, whose tokens but [CLS] and [SEP] are revealed or removed."""
    every = []
    for position, text in enumerate(texts):
        tokens = ["[CLS]", *checkpoints.smiles_tokens(text), "[SEP]"]
        inner = torch.tensor([False, *[True] * (len(tokens) - 2), False])
        ids = torch.tensor([checkpoints.ids_of(tokens, vocabulary)])
        every.append(Sample(inputs=ids, target=0, valid=inner, name=str(position)))
    return every


def curves(load: Callable[[], nn.Module], every: Sequence[Sample], mask: int) -> Table:
    """Return the areas of the curves of activation and pruning for each method and sample; `mask` is the id of [MASK].

    The class is the model's prediction for the whole reaction.
    """
    options = {"masking": "token", "mask_token_id": mask}
    metrics = {AUAC: ("activation_auac", options), AU_MSE: ("pruning_au_mse", options)}
    return ula.evaluate({MODEL: load}, every, METHODS, metrics, baselines=(RANDOM,), progress=False, batch_size=BATCH)


class Classes(Section):
    """Activation and pruning with rxnfp's classes."""

    name = "classes"
    title = "rxnfp, 50 classes: activation and pruning"
    unit = "reactions"
    text = f"""
Do methods rank first the tokens from which a classifier recognises its class? Activation reveals the tokens of a
reaction from an input of [MASK] only, those of the highest scores first, and follows the probability of the class that
the model predicts for the whole reaction: its area is the {AUAC}, larger is better. Pruning removes tokens by [MASK],
those of the lowest absolute scores first, and follows the squared change of all logits: the {AU_MSE}, smaller is
better. [CLS] and [SEP] stay. Source: HMA ACL 4.3, Fig. 5 and Tables 3 and 8, with "<UNK>" in place of tokens, a BERT on
reviews, and language models on questions.

The reactions are those of the other sections and {len(KINDS)} kinds with {len(ARYLS)} aryl groups each, all of them,
since nothing is chosen. Reactions of one kind are alike, so that the intervals, 95 % bootstrap over reactions, are
about these kinds. `raw` is the mean over layers, `{RANDOM}` the mean of four draws. A BERT has no gates: its `lrp` is
`logit`.
"""
    views = (
        View(
            CURVES,
            "Areas of both curves",
            [(MODEL, AUAC, AUAC), (MODEL, AU_MSE, AU_MSE)],
            note=f"{AUAC}: larger is better. {AU_MSE}: smaller is better.",
        ),
    )

    def measure(self) -> tuple[dict[str, Table], dict[str, Any]]:
        """Measure both curves on all reactions."""
        model, vocabulary = checkpoints.reaction_classes()
        table = curves(lambda: model, samples(reactions(), vocabulary), vocabulary.index("[MASK]"))
        return {CURVES: table}, {}

    def claims(self) -> list[Claim]:
        """Return the claim of HMA ACL, and those of this library."""
        return [
            Claim.of(
                "Attribution ranks tokens better than raw attention and rollout, by activation and by pruning",
                HMA,
                *(_ranked("attribution", other) for other in ("raw", "rollout")),
            ),
            Claim.of(
                "Every method ranks tokens better than chance, by activation and by pruning",
                HERE,
                *(_ranked(method, RANDOM) for method in METHODS),
            ),
            Claim.of(
                "The default ranks tokens better than chance, by activation and by pruning",
                HERE,
                _ranked(DEFAULT.label, RANDOM),
            ),
            Claim.of(
                "The default ranks tokens better than every other method, by activation and by pruning",
                HERE,
                *(_ranked(DEFAULT.label, other) for other in METHODS if other != DEFAULT.label),
            ),
        ]


def _ranked(method: str, than: str) -> list[Comparison]:
    return [
        one
        for metric in (AUAC, AU_MSE)
        for one in better(CURVES, metric, method, than, (MODEL,), larger=metric == AUAC)
    ]


CLASSES = Classes()
