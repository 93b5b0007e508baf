"""Diagonal plus low rank: the rank-one update reads the state before its decay."""

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize

from tests.mixers import laws
from unilinattn.errors import FactorError
from unilinattn.kernels.scan import recurrences
from unilinattn.mixers.delta_rule import DeltaRule
from unilinattn.mixers.low_rank_update import LowRankUpdate

BATCH, HEADS, STATE = 2, 3, 6


def build(factors: laws.Factors) -> LowRankUpdate:
    return LowRankUpdate(**factors)


def define(factors: laws.Factors, value: torch.Tensor) -> torch.Tensor:
    decay = factors["log_decay"]
    decay = decay.unsqueeze(-1) if decay.ndim == 3 else decay
    bonus = factors.get("bonus", torch.zeros(HEADS, STATE))
    return recurrences.low_rank_update(
        factors["query"], factors["key"], decay, factors["a"], factors["b"], bonus, value
    )


def case(*decay: int) -> laws.Case:
    def draw(length: int) -> laws.Factors:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(BATCH, length, HEADS, *shape, dtype=torch.float64)

        erased = normalize(normal(STATE), dim=-1)
        return {
            "query": normal(STATE),
            "key": normal(STATE),
            "log_decay": logsigmoid(3 * normal(*decay)),
            "a": -erased + 0.1 * normal(STATE) / STATE,
            "b": erased * normal(STATE).sigmoid() + 0.1 * normal(STATE) / STATE,
            "bonus": torch.randn(HEADS, STATE, dtype=torch.float64),
        }

    return laws.Case(draw, build, define)


@pytest.fixture(params=["head", "coordinate"])
def update(request) -> laws.Case:
    return case(*((STATE,) if request.param == "coordinate" else ()))


@pytest.mark.parametrize("dtype", laws.PRECISION)
@pytest.mark.parametrize("length", laws.LENGTHS)
def test_apply_is_the_recurrence(update: laws.Case, length: int, dtype: torch.dtype) -> None:
    laws.check_definition(update, update.draw(length), dtype)


@pytest.mark.parametrize("length", laws.LENGTHS)
def test_every_operation_is_one_matrix(update: laws.Case, length: int) -> None:
    laws.check_forms(build(update.draw(length)))


def test_the_matrix_is_the_closed_form() -> None:
    factors = case(STATE).draw(130)
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
    assert laws.error(build(factors).materialize(), expected) <= 1e-12


def test_gradients_are_those_of_the_recurrence(update: laws.Case) -> None:
    laws.check_gradients(update, update.draw(67))


@pytest.mark.parametrize("length", [3, 64, 130])
def test_outputs_are_causal_bit_for_bit(update: laws.Case, length: int) -> None:
    laws.check_causal(update, length)


def test_passes_are_linear_in_length(update: laws.Case, monkeypatch) -> None:
    laws.check_linear(build(update.draw(130)), monkeypatch)


EXTREMES = {
    "everything forgotten": {"log_decay": -80.0},
    "log-decay of -1000": {"log_decay": -1000.0},
    "nothing forgotten": {"log_decay": 0.0},
    "nothing erased": {"a": 0.0},
    "nothing moved": {"b": 0.0},
    "keys of norm zero": {"key": 0.0},
}


@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_factors(update: laws.Case, extreme: str) -> None:
    factors = update.draw(70)
    for name, level in EXTREMES[extreme].items():
        partly = {**factors, name: factors[name].clone()}
        partly[name][:, ::3] = level
        for inputs in (partly, {**factors, name: torch.full_like(factors[name], level)}):
            for dtype in laws.PRECISION:
                laws.check_definition(update, inputs, dtype)
            laws.check_forms(build(inputs))
            laws.check_finite_gradients(update, inputs)


def test_without_a_bonus() -> None:
    update = case(STATE)
    factors = update.draw(65)
    del factors["bonus"]
    laws.check_definition(update, factors, torch.float64)
    laws.check_forms(build(factors))


def test_the_delta_rule_is_a_special_case() -> None:
    factors = case(STATE).draw(130)
    query, key, decay = factors["query"], normalize(factors["key"], dim=-1), factors["log_decay"]
    strength = 2 * torch.rand(BATCH, 130, HEADS, dtype=torch.float64)
    written = strength.unsqueeze(-1) * key
    general = LowRankUpdate(query, written, decay, decay.exp() * key, -written)
    assert laws.error(general.materialize(), DeltaRule(query, key, strength, decay).materialize()) <= 1e-12


def test_a_separate_erase_key_is_a_special_case() -> None:
    # Comba: the erase key p reads the state before its decay.
    factors = case().draw(70)
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


def test_reading_the_decayed_state_is_rejected(update: laws.Case) -> None:
    def late(factors: laws.Factors) -> LowRankUpdate:
        decay = factors["log_decay"].reshape(*factors["a"].shape[:3], -1)
        return build({**factors, "a": factors["a"] * decay.exp()})

    with pytest.raises(AssertionError, match="apply is not the recurrence"):
        laws.check_definition(laws.Case(update.draw, late, define), update.draw(9), torch.float64)


def test_a_factor_that_is_not_finite_is_refused() -> None:
    factors = case().draw(3)
    factors["a"][0, 1, 0] = float("inf")
    with pytest.raises(FactorError, match="'a'"):
        build(factors)
