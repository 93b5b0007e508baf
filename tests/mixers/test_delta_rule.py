"""The delta rule without decay, with one decay per head, and with one per coordinate."""

import pytest
import torch

from tests.mixers import laws
from unilinattn.errors import FactorError
from unilinattn.kernels.scan import recurrences
from unilinattn.mixers.delta_rule import DeltaRule

BATCH, GROUPS, HEADS, STATE = 2, 2, 4, 6
DECAYS = {"none": None, "head": (), "coordinate": (STATE,)}


def build(factors: laws.Factors) -> DeltaRule:
    return DeltaRule(factors["query"], factors["key"], factors["strength"], factors.get("log_decay"))


def define(factors: laws.Factors, value: torch.Tensor) -> torch.Tensor:
    query, key = (factors[name].repeat_interleave(HEADS // GROUPS, dim=2) for name in ("query", "key"))
    decay = factors.get("log_decay", torch.zeros_like(factors["strength"]))
    decay = decay.unsqueeze(-1) if decay.ndim == 3 else decay
    return recurrences.delta_rule(query, key, factors["strength"], decay, value)


def case(kind: str) -> laws.Case:
    def draw(length: int) -> laws.Factors:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(BATCH, length, *shape, dtype=torch.float64)

        factors = {
            "query": normal(GROUPS, STATE),
            "key": torch.nn.functional.normalize(normal(GROUPS, STATE), dim=-1),
            "strength": 2 * normal(HEADS).sigmoid(),
        }
        if DECAYS[kind] is not None:
            factors["log_decay"] = torch.nn.functional.logsigmoid(3 * normal(HEADS, *DECAYS[kind]))
        return factors

    return laws.Case(draw, build, define)


@pytest.fixture(params=DECAYS)
def delta(request) -> laws.Case:
    return case(request.param)


@pytest.mark.parametrize("dtype", laws.PRECISION)
@pytest.mark.parametrize("length", laws.LENGTHS)
def test_apply_is_the_recurrence(delta: laws.Case, length: int, dtype: torch.dtype) -> None:
    laws.check_definition(delta, delta.draw(length), dtype)


@pytest.mark.parametrize("length", laws.LENGTHS)
def test_every_operation_is_one_matrix(delta: laws.Case, length: int) -> None:
    laws.check_forms(build(delta.draw(length)))


@pytest.mark.parametrize("kind", DECAYS)
def test_the_matrix_is_the_closed_form(kind: str) -> None:
    factors = case(kind).draw(130)
    query, key = (factors[name].repeat_interleave(2, dim=2) for name in ("query", "key"))
    strength = factors["strength"].transpose(1, 2)
    decay = factors.get("log_decay", torch.zeros_like(factors["strength"]))
    total = (decay.unsqueeze(-1) if decay.ndim == 3 else decay).cumsum(1)
    future = torch.ones(130, 130, dtype=torch.bool).triu(1)[..., None, None]
    fading = (total.unsqueeze(2) - total.unsqueeze(1)).masked_fill(future, -torch.inf).exp()
    scores, among = ((x.unsqueeze(2) * fading * key.unsqueeze(1)).sum(-1).permute(0, 3, 1, 2) for x in (query, key))
    system = torch.eye(130) + strength.unsqueeze(-1) * among.tril(-1)
    expected = scores @ torch.linalg.solve(system, torch.diag_embed(strength))
    assert laws.error(build(factors).materialize(), expected) <= 1e-12


def test_gradients_are_those_of_the_recurrence(delta: laws.Case) -> None:
    laws.check_gradients(delta, delta.draw(67))


@pytest.mark.parametrize("length", [3, 64, 130])
def test_outputs_are_causal_bit_for_bit(delta: laws.Case, length: int) -> None:
    laws.check_causal(delta, length)


def test_passes_are_linear_in_length(delta: laws.Case, monkeypatch) -> None:
    laws.check_linear(build(delta.draw(130)), monkeypatch)


EXTREMES = {
    "everything forgotten": {"log_decay": -80.0},
    "log-decay of -1000": {"log_decay": -1000.0},
    "nothing forgotten": {"log_decay": 0.0},
    "nothing written": {"strength": 0.0},
    "replaced in full": {"strength": 1.0},
    "reflected": {"strength": 2.0},
    "keys of norm zero": {"key": 0.0},
}


@pytest.mark.parametrize("kind", ["head", "coordinate"])
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_factors(extreme: str, kind: str) -> None:
    delta = case(kind)
    factors = delta.draw(70)
    for name, level in EXTREMES[extreme].items():
        factors[name] = torch.full_like(factors[name], level)
        # One different token, so that a mild decay follows a strong one.
        partly = {**factors, name: delta.draw(70)[name]}
        partly[name][:, ::3] = level
        for inputs in (factors, partly):
            for dtype in laws.PRECISION:
                laws.check_definition(delta, inputs, dtype)
            laws.check_forms(build(inputs))
            laws.check_finite_gradients(delta, inputs)


def test_a_value_written_with_full_strength_is_recalled() -> None:
    factors = case("none").draw(5)
    factors["strength"] = torch.ones_like(factors["strength"])
    factors["query"] = factors["key"]
    value = laws.values(build(factors))
    assert laws.error(build(factors).apply(value), value) <= 1e-12


def test_heads_share_groups_in_order() -> None:
    delta = case("head")
    factors = delta.draw(9)
    wrong = {**factors, **{name: factors[name].repeat(1, 1, 2, 1) for name in ("query", "key")}}
    with pytest.raises(AssertionError, match="apply is not the recurrence"):
        laws.check_definition(laws.Case(delta.draw, lambda _: build(wrong), define), factors, torch.float64)


def test_a_wrong_order_of_decay_and_update_is_rejected() -> None:
    delta = case("head")
    factors = delta.draw(9)
    late = {**factors, "log_decay": factors["log_decay"].roll(-1, dims=1)}
    with pytest.raises(AssertionError, match="apply is not the recurrence"):
        laws.check_definition(laws.Case(delta.draw, lambda _: build(late), define), factors, torch.float64)


def test_a_factor_that_is_not_finite_is_refused() -> None:
    factors = case("head").draw(3)
    factors["strength"][0, 1, 0] = float("nan")
    with pytest.raises(FactorError, match="'strength'"):
        build(factors)
