"""Baselines of a language model: frequencies of tokens and of their n-grams."""

import math
from collections.abc import Mapping

import numpy as np

DISCOUNT = 0.75
"""Number that is taken from each count of an n-gram for the shorter ones."""


def baselines(training: np.ndarray, held_out: np.ndarray, vocabulary: int, per_byte: float) -> Mapping[str, float]:
    """Return the held-out perplexity and bits per byte of a unigram and of a trigram model of the training tokens.

    The trigram model takes `DISCOUNT` from each count and gives it to the bigrams, and these to the unigrams
    (absolute discounting, Ney, Essen and Kneser 1994). `per_byte` times a loss in nats per token is in bits per byte.
    """
    probability = (np.bincount(training, minlength=vocabulary) + 1) / (len(training) + vocabulary)
    unigram = probability[held_out[2:]]
    bigram = _discounted(training, held_out, vocabulary, 1, unigram)
    trigram = _discounted(training, held_out, vocabulary, 2, bigram)
    result = {}
    for name, likelihood in (("unigram", unigram), ("trigram", trigram)):
        loss = -float(np.log(likelihood).mean())
        result[f"{name}_perplexity"] = math.exp(loss)
        result[f"{name}_bits_per_byte"] = loss * per_byte
    return result


def _discounted(
    training: np.ndarray, held_out: np.ndarray, vocabulary: int, order: int, shorter: np.ndarray
) -> np.ndarray:
    """Probabilities of the held-out tokens after `order` tokens, from the third token on."""

    def keys(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        context = np.zeros(len(ids) - order, np.int64)
        for lag in range(order):
            context = context * vocabulary + ids[lag : len(ids) - order + lag]
        return context, context * vocabulary + ids[order:]

    contexts, grams = keys(training)
    training_grams, gram_counts = np.unique(grams, return_counts=True)
    training_contexts, context_counts = np.unique(contexts, return_counts=True)
    continuations = np.unique(training_grams // vocabulary, return_counts=True)[1]
    context, gram = (key[2 - order :] for key in keys(held_out))
    count = _lookup(training_grams, gram_counts, gram)
    total = _lookup(training_contexts, context_counts, context)
    kinds = _lookup(training_contexts, continuations, context)
    divisor = np.maximum(total, 1)
    discounted = np.maximum(count - DISCOUNT, 0) / divisor + DISCOUNT * kinds / divisor * shorter
    return np.where(total > 0, discounted, shorter)


def _lookup(keys: np.ndarray, values: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Return the value of each key, zero for an absent one; `keys` is sorted."""
    index = np.minimum(np.searchsorted(keys, queries), len(keys) - 1)
    return np.where(keys[index] == queries, values[index], 0)
