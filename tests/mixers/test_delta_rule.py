"""The delta rule: its closed form, and recall; `test_memories` has its other tests."""

import pytest
import torch

from tests.mixers import laws
from tests.mixers.memories import delta_rule

DECAYS = {"none": None, "head": (), "coordinate": (6,)}


@pytest.mark.parametrize("kind", DECAYS)
def test_the_matrix_is_the_closed_form(kind: str) -> None:
    memory = delta_rule(DECAYS[kind])
    factors = memory.draw(130)
    query, key = (factors[name].repeat_interleave(2, dim=2) for name in ("query", "key"))
    strength = factors["strength"].transpose(1, 2)
    decay = factors.get("log_decay", torch.zeros_like(factors["strength"]))
    total = (decay.unsqueeze(-1) if decay.ndim == 3 else decay).cumsum(1)
    future = torch.ones(130, 130, dtype=torch.bool).triu(1)[..., None, None]
    fading = (total.unsqueeze(2) - total.unsqueeze(1)).masked_fill(future, -torch.inf).exp()
    scores, among = ((x.unsqueeze(2) * fading * key.unsqueeze(1)).sum(-1).permute(0, 3, 1, 2) for x in (query, key))
    system = torch.eye(130) + strength.unsqueeze(-1) * among.tril(-1)
    expected = scores @ torch.linalg.solve(system, torch.diag_embed(strength))
    assert laws.error(memory.build(factors).materialize(), expected) <= 1e-12


def test_a_value_written_with_full_strength_is_recalled() -> None:
    memory = delta_rule(None)
    factors = memory.draw(5)
    factors["strength"] = torch.ones_like(factors["strength"])
    factors["query"] = factors["key"]
    mixer = memory.build(factors)
    value = laws.values(mixer)
    assert laws.error(mixer.apply(value), value) <= 1e-12
