"""Diagonal plus low rank: its closed form, and the structures that it contains; `test_memories` has its other tests."""

import torch
from torch.nn.functional import normalize

from tests.mixers import laws
from tests.mixers.memories import BATCH, HEADS, STATE, low_rank_update
from unilinattn.mixers.delta_rule import DeltaRule
from unilinattn.mixers.low_rank_update import LowRankUpdate


def test_the_matrix_is_the_closed_form() -> None:
    factors = low_rank_update(STATE).draw(130)
    total = factors["log_decay"].cumsum(1)
    future = torch.ones(130, 130, dtype=torch.bool).triu(1)[..., None, None]

    def among(left: str, right: str, until: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        fading = (until.unsqueeze(2) - total.unsqueeze(1)).masked_fill(mask, -torch.inf).exp()
        return (factors[left].unsqueeze(2) * fading * factors[right].unsqueeze(1)).sum(-1).permute(0, 3, 1, 2)

    before = total - factors["log_decay"]
    strict = future | torch.eye(130, dtype=torch.bool)[..., None, None]
    read = among("query", "key", total, future), among("query", "b", total, future)
    erased = among("a", "b", before, strict), among("a", "key", before, strict)
    bonus = (factors["query"] * factors["bonus"] * factors["key"]).sum(-1).transpose(1, 2)
    expected = read[0] + read[1] @ torch.linalg.solve(torch.eye(130) - erased[0], erased[1]) + torch.diag_embed(bonus)
    assert laws.error(LowRankUpdate(**factors).materialize(), expected) <= 1e-12


def test_without_a_bonus() -> None:
    update = low_rank_update(STATE)
    factors = update.draw(65)
    del factors["bonus"]
    laws.check_definition(update, factors, torch.float64)
    laws.check_forms(LowRankUpdate(**factors))


def test_the_delta_rule_is_a_special_case() -> None:
    factors = low_rank_update(STATE).draw(130)
    query, key, decay = factors["query"], normalize(factors["key"], dim=-1), factors["log_decay"]
    strength = 2 * torch.rand(BATCH, 130, HEADS, dtype=torch.float64)
    written = strength.unsqueeze(-1) * key
    general = LowRankUpdate(query, written, decay, decay.exp() * key, -written)
    assert laws.error(general.materialize(), DeltaRule(query, key, strength, decay).materialize()) <= 1e-12


def test_a_separate_erase_key_is_a_special_case() -> None:
    # Comba: the erase key p reads the state before its decay.
    factors = low_rank_update().draw(70)
    query, key, decay = factors["query"], normalize(factors["key"], dim=-1), factors["log_decay"]
    erase, strength = 0.7 * key, torch.rand(BATCH, 70, HEADS, dtype=torch.float64)
    written = strength.unsqueeze(-1) * key
    comba = LowRankUpdate(query, written, decay, erase, -written)
    value = laws.values(comba)
    memory, expected = value.new_zeros(BATCH, HEADS, STATE, 2), []
    for t in range(70):
        new = value[:, t] - (erase[:, t].unsqueeze(-1) * memory).sum(-2)
        memory = decay[:, t].exp()[..., None, None] * memory + written[:, t].unsqueeze(-1) * new.unsqueeze(-2)
        expected.append((query[:, t].unsqueeze(-1) * memory).sum(-2))
    assert laws.error(comba.apply(value), torch.stack(expected, dim=1)) <= 1e-13
