"""Ground truth by intervention: the drop in the log-probability of the answer when one token is replaced."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unilinattn.errors import InputError, OptionError
from unilinattn.examples import AT_ONCE
from unilinattn.examples.tasks import NO_ANSWER


@torch.no_grad()
def replacement_effects(
    model: nn.Module,
    input_ids: Int[Tensor, "batch length"],
    answers: Int[Tensor, "batch length"],
    *,
    vocabulary: int,
    draws: int = 4,
    seed: int = 0,
) -> Float[Tensor, "batch query key"]:
    """Return the drop in the log-probability of each query's answer when one earlier token is replaced.

    effect[b, i, j] = log p(answers[b, i]) - mean over `draws` of log p'(answers[b, i]), in nats, where p is the
    model's prediction at position i, and p' its prediction there after token j is replaced. The replacements are drawn
    with `seed` from the ids below `vocabulary`; they differ from each other and from the token. Only keys j < i of
    queries with an answer (not `NO_ANSWER`) are measured; the other entries are 0. The model must be causal and return
    `logits`; it runs `length * draws` times per sequence.

    Raises `InputError` if ids lie outside the vocabulary, `answers` has another shape, or no position has an answer,
    and `OptionError` unless 1 <= `draws` < `vocabulary`.
    """
    _check(input_ids, answers, vocabulary, draws)
    count, length = input_ids.shape
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(count, length, vocabulary - 1, generator=generator, device="cpu").argsort(-1)
    replacements = (input_ids[..., None] + 1 + order[..., :draws].to(input_ids.device)) % vocabulary
    replaced = input_ids[:, None, None].repeat(1, length, draws, 1)
    key = torch.arange(length, device=input_ids.device)
    replaced[:, key, :, key] = replacements.transpose(0, 1)
    repeated_answers = answers[:, None, None].expand_as(replaced).flatten(0, 2)
    runs = zip(replaced.flatten(0, 2).split(AT_ONCE), repeated_answers.split(AT_ONCE), strict=True)
    after = torch.cat([_log_probability(model, ids, targets) for ids, targets in runs]).view_as(replaced).mean(2)
    effects = _log_probability(model, input_ids, answers)[:, :, None] - after.transpose(1, 2)
    measured = (answers != NO_ANSWER)[:, :, None] & (key < key[:, None])
    return torch.where(measured, effects, 0.0)


@torch.no_grad()
def target_effects(
    log_probability: Callable[[Int[Tensor, "batch length"]], Float[Tensor, " batch"]],
    input_ids: Int[Tensor, " length"],
    *,
    replacements: Int[Tensor, " replacement"],
    draws: int = 12,
    seed: int = 0,
) -> Float[Tensor, " key"]:
    """Return the drop in the log-probability of one target when each token is replaced, the last token included.

    effect[j] = log p(target) - mean over `draws` of log p'(target), in nats, where token j of p' is one of
    `replacements`, drawn with `seed` without the token and without repetition. `log_probability` returns that of the
    target for each sequence; it runs on `length * draws` sequences, `AT_ONCE` in a call.

    Raises `OptionError` unless 1 <= `draws` < the number of replacements.
    """
    count, length = len(replacements), len(input_ids)
    if not 1 <= draws < count:
        raise OptionError(f"draws={draws}; a token has 1 to {count - 1} of the {count} replacements.")
    generator = torch.Generator().manual_seed(seed)
    replaced = input_ids.repeat(length, draws, 1)
    for key, token in enumerate(input_ids):
        others = replacements[replacements != token]
        replaced[key, :, key] = others[torch.randperm(len(others), generator=generator, device="cpu")[:draws]]
    after = torch.cat([log_probability(ids).double() for ids in replaced.flatten(0, 1).split(AT_ONCE)])
    return log_probability(input_ids[None]).double() - after.view(length, draws).mean(1)


def _log_probability(
    model: nn.Module, ids: Int[Tensor, "batch length"], answers: Int[Tensor, "batch length"]
) -> Float[Tensor, "batch length"]:
    # Positions without an answer gather id 0; their entries are masked later.
    gathered = answers.masked_fill(answers == NO_ANSWER, 0).unsqueeze(-1)
    return model(ids).logits.double().log_softmax(-1).gather(-1, gathered).squeeze(-1)


def _check(input_ids: Tensor, answers: Tensor, vocabulary: int, draws: int) -> None:
    if input_ids.shape != answers.shape:
        raise InputError(
            f"answers of shape {tuple(answers.shape)} do not fit input_ids of shape {tuple(input_ids.shape)}; give one "
            f"token id for each position, or {NO_ANSWER} where nothing is asked."
        )
    if not 0 <= int(input_ids.min()) <= int(input_ids.max()) < vocabulary:
        raise InputError(
            f"input_ids reach from {int(input_ids.min())} to {int(input_ids.max())}; a vocabulary of {vocabulary} has "
            f"ids 0 to {vocabulary - 1}."
        )
    if bool((answers == NO_ANSWER).all()):
        raise InputError(f"every answer is {NO_ANSWER}, so there is no log-probability to measure.")
    if not 1 <= draws < vocabulary:
        raise OptionError(
            f"draws={draws}; a token of a vocabulary of {vocabulary} has 1 to {vocabulary - 1} replacements."
        )
