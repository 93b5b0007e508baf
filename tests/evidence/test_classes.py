"""Activation and pruning of a small BERT against runs with masks put in by hand, and the written reactions."""

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from evidence import classes
from evidence.atom_maps import bonds, element, is_atom
from evidence.checkpoints import smiles_tokens
from evidence.reactions import KINDS, reactions
from unilinattn.evaluation.perturbation import TENTHS

VOCABULARY = [
    "[PAD]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *sorted({token for text in reactions() for token in smiles_tokens(text)}),
]
MASK = VOCABULARY.index("[MASK]")


@pytest.fixture(scope="module")
def model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_hidden_layers=2,
        num_labels=5,
        initializer_range=0.5,
    )
    return BertForSequenceClassification(config).double().eval()


def test_reactions_are_well_formed_and_make_no_carbon() -> None:
    texts = reactions()
    assert len(texts) == len(set(texts)) >= 100
    for text in texts:
        tokens = smiles_tokens(text)
        assert "".join(tokens) == text
        bonds(tokens)
        counts = []
        for side in text.split(">>"):
            counts.append(Counter(element(token) for token in smiles_tokens(side) if is_atom(token)))
        assert counts[1]["c"] <= counts[0]["c"], text


def test_every_kind_of_reaction_changes_its_molecule() -> None:
    for kind in KINDS.values():
        before, after = kind.format("c1ccccc1").split(">>")
        assert after not in before.split(".")


def test_curves_are_those_of_runs_with_masks(model: BertForSequenceClassification) -> None:
    every = classes.samples(reactions()[:2], VOCABULARY)
    table = classes.curves(lambda: model, every, MASK)
    assert {row["method"] for row in table} == {*classes.METHODS, classes.RANDOM}
    for name, sample in enumerate(every):
        ids = sample.inputs
        inner = list(range(1, ids.shape[1] - 1))
        assert sample.valid is not None and sample.valid.nonzero().flatten().tolist() == inner
        with torch.no_grad():
            logits = model(ids).logits[0]
        label = int(logits.argmax())
        hidden = ids.clone()
        hidden[0, inner] = MASK
        # Raw attention of [CLS], the mean over layers and heads, ranks the tokens.
        with torch.no_grad():
            model.set_attn_implementation("eager")
            maps = model(ids, output_attentions=True).attentions
        scores = torch.stack([each[0].mean(0)[0] for each in maps]).mean(0)
        order = sorted(inner, key=lambda at: -float(scores[at]))
        probabilities, changes = [], []
        for fraction in TENTHS:
            count = math.ceil(fraction * len(inner) - 1e-9)
            shown, pruned = hidden.clone(), ids.clone()
            shown[0, order[:count]] = ids[0, order[:count]]
            pruned[0, order[::-1][:count]] = MASK
            with torch.no_grad():
                probabilities.append(float(model(shown).logits[0].softmax(-1)[label]))
                changes.append(float((model(pruned).logits[0] - logits).square().sum()))
        for metric, values in ((classes.AUAC, probabilities), (classes.AU_MSE, changes)):
            (row,) = table.select(method="raw", metric=metric, sample=str(name))
            expected = sum((a + b) / 2 for a, b in pairwise(values)) / (len(values) - 1)
            assert row["value"] == pytest.approx(expected, rel=1e-6)
