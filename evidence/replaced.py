"""The truth of problems by intervention: the fall of the answer's logit when a token is replaced."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from unilinattn.host.substitution import through_operators

DRAWS = 2
"""Number of tokens that replace each token, all of them different."""


@torch.no_grad()
def effects(
    host: nn.Module,
    ids: Int[Tensor, "1 length"],
    answer: int,
    replacements: Bool[Tensor, "context id"],
    *,
    draws: int = DRAWS,
    seed: int,
) -> Float[Tensor, " length"]:
    """Return the fall of the logit of `answer` at the last position when each token of the context is replaced.

    effect[j] = logit(answer) - mean over `draws` of logit'(answer), where token j of the changed input is drawn with
    `seed`, without repetition, from the ids of `replacements[j]`. Tokens after the context have the effect 0.
    """
    count, length = len(replacements), ids.shape[1]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(replacements.double(), draws, generator=generator)
    changed = ids.repeat(count * draws, 1)
    changed[torch.arange(count * draws), torch.arange(count).repeat_interleave(draws)] = drawn.flatten()
    with through_operators(host):
        after = host(changed).logits[:, -1, answer].double().view(count, draws).mean(1)
        before = host(ids).logits[0, -1, answer].double()
    return torch.cat([before - after, torch.zeros(length - count, dtype=torch.float64)])
