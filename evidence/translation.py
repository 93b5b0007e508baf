"""Sentences with translations whose alignment is known exactly."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from unilinattn.errors import InputError
from unilinattn.examples.tasks import NO_ANSWER

NOUN, MODIFIER, VERB, PARTICLE = range(4)
"""Classes of source words."""

CLASSES = (18, 6, 5, 3)
"""Number of words of each class: a lexicon of 32."""

ARTICLES = 13
"""Number of nouns, the first ones, whose translation is an article and a stem: 40 % of the lexicon."""

WORDS = 8
"""Number of words of a source sentence."""

FIRST = (0, *torch.tensor(CLASSES).cumsum(0).tolist())
"""Id of the first word of each class, and the number of source words."""

SEPARATOR = FIRST[4]
STEM = SEPARATOR + 1
ARTICLE = STEM + CLASSES[NOUN]
MODIFIER_FORM = ARTICLE + 2
VERB_FORM = MODIFIER_FORM + 2 * CLASSES[MODIFIER]
END = VERB_FORM + CLASSES[VERB] * (1 + CLASSES[PARTICLE])
VOCABULARY = END + 1
LENGTH = WORDS + 1 + 2 * WORDS
"""Number of input tokens: source, separator and the longest translation, padded with `END`."""

_NAMES = """
sun moon river house book table dog door boat street bread rose train Ana Luis Eva Juan Sara
red old small new white good take put give set call up out off |
sol luna río casa libro mesa perro puerta barco calle pan rosa tren Ana Luis Eva Juan Sara el la
rojo roja viejo vieja pequeño pequeña nuevo nueva blanco blanca bueno buena
toma empieza saca quita pone monta apaga aplaza da cede reparte emite fija instala expone activa
llama convoca grita cancela .
"""
NAMES = _NAMES.split()
"""The tokens as words, for pictures."""


@dataclass(frozen=True)
class Sentences:
    """Sentences with their translations and alignments.

    Attributes:
        input_ids: source words, separator, translation, and `END` up to the common length.
        labels: `labels[b, i]` is the token that query i predicts, or `NO_ANSWER`: query `WORDS + t` predicts target
            word t, and reads the one before it; the last one predicts `END`, which no source word explains.
        sure, possible: `sure[b, i, j]` is true if source word j is linked to the target word that query i predicts.
            The possible links contain the sure ones.
        lengths: number of input tokens without padding.
    """

    input_ids: Int[Tensor, "batch length"]
    labels: Int[Tensor, "batch length"]
    sure: Bool[Tensor, "batch length length"]
    possible: Bool[Tensor, "batch length length"]
    lengths: Int[Tensor, " batch"]


def sentences(count: int, seed: int) -> Sentences:
    """Draw sentences, which depend only on the seed.

    A source sentence is a sequence of phrases: a noun, a modifier and its noun, a verb, or a verb and its particle. A
    word repeats only after all of its class.

    | source | target | sure links | possible links |
    | --- | --- | --- | --- |
    | noun | stem; for 13 of 18 an article of the noun's gender before it | noun | |
    | modifier, noun | the noun, then the modifier in the noun's gender | modifier | noun |
    | verb | verb | verb | |
    | verb, particle | one word for each pair | verb, particle | |

    The modifier's link to the noun is possible only: the gender also stands in the target words before it.

    Raises `InputError` if `count` is below one.
    """
    if count < 1:
        raise InputError(f"count is {count}; a batch needs at least one sentence: pass count >= 1.")
    generator = torch.Generator().manual_seed(seed)
    kinds = _kinds(count, generator)
    words = torch.zeros(count, WORDS, dtype=torch.long)
    for kind, size in enumerate(CLASSES):
        order = torch.rand(count, size, generator=generator).argsort(-1)
        of_kind = kinds == kind
        words = torch.where(of_kind, order.gather(1, (of_kind.cumsum(1) - 1).clamp(0) % size), words)
    source = words + torch.tensor(FIRST)[kinds]

    # Up to three target words leave from each source position: an article, a stem or verb, and a modifier.
    gender = words % 2
    before = torch.cat([torch.full((count, 1), -1), kinds[:, :-1]], 1)
    previous = words.roll(1, 1)
    joined = torch.cat([kinds[:, 1:] == PARTICLE, torch.zeros(count, 1, dtype=torch.bool)], 1)
    noun, particle = kinds == NOUN, kinds == PARTICLE
    verb_form = VERB_FORM + (1 + CLASSES[PARTICLE]) * torch.where(particle, previous, words)
    second = torch.where(noun, STEM + words, verb_form + torch.where(particle, 1 + words, 0))
    targets = torch.stack([ARTICLE + gender, second, MODIFIER_FORM + 2 * previous + gender], -1)
    modified = noun & (before == MODIFIER)
    present = torch.stack([noun & (words < ARTICLES), noun | particle | (kinds == VERB) & ~joined, modified], -1)

    key = torch.arange(WORDS)
    own, left = key[:, None] == key, key[:, None] - 1 == key
    sure = torch.stack([own, own, left]).transpose(0, 1).repeat(count, 1, 1, 1)
    sure[:, :, 1] |= left & particle[:, :, None]
    possible = sure | own[:, None]

    order = (~present.flatten(1)).to(torch.int8).argsort(stable=True, dim=1)[:, : 2 * WORDS]
    written = present.flatten(1).gather(1, order)
    target = torch.where(written, targets.flatten(1).gather(1, order), END)
    links = [torch.zeros(count, LENGTH, LENGTH, dtype=torch.bool) for _ in range(2)]
    for mask, link in zip(links, (sure, possible), strict=True):
        rows = link.flatten(1, 2).gather(1, order[:, :, None].expand(-1, -1, WORDS)) & written[:, :, None]
        mask[:, WORDS:-1, :WORDS] = rows
    lengths = written.sum(1, keepdim=True)
    labels = torch.full((count, LENGTH), NO_ANSWER)
    ends = torch.cat([target, torch.full((count, 1), END)], 1)
    labels[:, WORDS:] = torch.where(torch.arange(2 * WORDS + 1) <= lengths, ends, NO_ANSWER)
    return Sentences(
        input_ids=torch.cat([source, torch.full((count, 1), SEPARATOR), target], 1),
        labels=labels,
        sure=links[0],
        possible=links[1],
        lengths=WORDS + 1 + lengths[:, 0],
    )


def _kinds(count: int, generator: torch.Generator) -> Int[Tensor, "batch word"]:
    """Draw the class of each word: a noun follows each modifier, and a particle only a verb."""
    chances = torch.tensor(
        [
            [0.45, 0.25, 0.30, 0.0],  # after a noun
            [1.0, 0.0, 0.0, 0.0],  # after a modifier
            [0.25, 0.15, 0.15, 0.45],  # after a verb
            [0.45, 0.25, 0.30, 0.0],  # after a particle, and at the start
        ]
    )
    kinds = torch.empty(count, WORDS, dtype=torch.long)
    last = torch.full((count,), PARTICLE)
    for at in range(WORDS):
        chance = chances[last].clone()
        if at == WORDS - 1:
            chance[:, MODIFIER] = 0
        kinds[:, at] = last = torch.multinomial(chance, 1, generator=generator)[:, 0]
    return kinds
