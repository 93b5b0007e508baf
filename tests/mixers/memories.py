"""Linear memories with their definitions, extreme factors and typical mistakes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from tests.mixers.laws import Case, Factors
from unilinattn.kernels.scan import naive, recurrences
from unilinattn.mixers import CoreMixer, DiagonalDecay, Reversed, ToeplitzLowRank
from unilinattn.mixers.delta_rule import DeltaRule
from unilinattn.mixers.exclusive_bonus import ExclusiveBonus
from unilinattn.mixers.low_rank_update import LowRankUpdate
from unilinattn.mixers.mlstm import MLSTM
from unilinattn.mixers.normalized_exponential import NormalizedExponential
from unilinattn.mixers.substep import Substep
from unilinattn.mixers.toeplitz import DIRECT_TAPS

BATCH, HEADS, STATE = 2, 3, 6
GROUPS, COUNT, EPS = 2, 3, 1e-6
"""Groups of heads, sub-steps of a token, and the addition to mLSTM's normaliser."""


@dataclass(frozen=True)
class Memory(Case):
    """A case with the levels of its factors at which digits are lost, and builders with a typical mistake."""

    extremes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    mistakes: Mapping[str, Callable[[Factors], CoreMixer]] = field(default_factory=dict)


def normal(length: int, *shape: int) -> Tensor:
    return torch.randn(BATCH, length, *shape, dtype=torch.float64)


def per_head(*shape: int) -> Tensor:
    return torch.randn(HEADS, *shape, dtype=torch.float64)


def by_coordinate(length: int) -> Factors:
    """Queries, keys, and a decay of each coordinate."""
    query, key, decay = (normal(length, HEADS, STATE) for _ in range(3))
    return {"query": query, "key": key, "log_decay": logsigmoid(3 * decay)}


def with_axis(decay: Tensor) -> Tensor:
    return decay.unsqueeze(-1) if decay.ndim == 3 else decay


def delta_rule(decay: tuple[int, ...] | None) -> Memory:
    """Heads in two groups; no decay, or one of each head or coordinate."""

    def draw(length: int) -> Factors:
        factors = {
            "query": normal(length, GROUPS, STATE),
            "key": normalize(normal(length, GROUPS, STATE), dim=-1),
            "strength": 2 * normal(length, 4).sigmoid(),
        }
        return factors if decay is None else {**factors, "log_decay": logsigmoid(3 * normal(length, 4, *decay))}

    def define(factors: Factors, value: Tensor) -> Tensor:
        query, key = (factors[name].repeat_interleave(4 // GROUPS, dim=2) for name in ("query", "key"))
        log_decay = with_axis(factors.get("log_decay", torch.zeros_like(factors["strength"])))
        return recurrences.delta_rule(query, key, factors["strength"], log_decay, value)

    def out_of_order(factors: Factors) -> DeltaRule:
        """Give the groups to the heads in turn."""
        mixed = {name: factors[name].repeat(1, 1, 2, 1) for name in ("query", "key")}
        return DeltaRule(**{**factors, **mixed})

    extremes: dict[str, tuple[float, ...]] = {}
    mistakes: dict[str, Callable[[Factors], CoreMixer]] = {"groups out of order": out_of_order}
    if decay is not None:
        extremes = {"log_decay": (-80.0, -1000.0, 0.0), "strength": (0.0, 1.0, 2.0), "key": (0.0,)}
        mistakes["decay late"] = lambda f: DeltaRule(**{**f, "log_decay": f["log_decay"].roll(-1, dims=1)})
    return Memory(draw, lambda f: DeltaRule(**f), define, extremes, mistakes)


def low_rank_update(*decay: int) -> Memory:
    def draw(length: int) -> Factors:
        erased = normalize(normal(length, HEADS, STATE), dim=-1)
        return {
            **by_coordinate(length),
            "log_decay": logsigmoid(3 * normal(length, HEADS, *decay)),
            "a": -erased + 0.1 * normal(length, HEADS, STATE) / STATE,
            "b": erased * normal(length, HEADS, STATE).sigmoid() + 0.1 * normal(length, HEADS, STATE) / STATE,
            "bonus": per_head(STATE),
        }

    def define(factors: Factors, value: Tensor) -> Tensor:
        given = {"bonus": torch.zeros(HEADS, STATE), **factors, "log_decay": with_axis(factors["log_decay"])}
        return recurrences.low_rank_update(**given, value=value)

    def decayed(factors: Factors) -> LowRankUpdate:
        return LowRankUpdate(**{**factors, "a": factors["a"] * with_axis(factors["log_decay"]).exp()})

    extremes = {"log_decay": (-80.0, -1000.0, 0.0), "a": (0.0,), "b": (0.0,), "key": (0.0,)}
    return Memory(draw, lambda f: LowRankUpdate(**f), define, extremes, {"the decayed state": decayed})


def exclusive_bonus() -> Memory:
    def draw(length: int) -> Factors:
        return {**by_coordinate(length), "bonus": per_head(STATE)}

    def inclusive(factors: Factors) -> DiagonalDecay:
        return DiagonalDecay(factors["query"], factors["key"], factors["log_decay"])

    extremes = {"log_decay": (-80.0, -1000.0, 0.0), "key": (0.0,), "bonus": (0.0,), "query": (1e18,)}
    return Memory(
        draw,
        lambda f: ExclusiveBonus(**f),
        lambda f, value: recurrences.exclusive_bonus(**f, value=value),
        extremes,
        {"an inclusive read": inclusive},
    )


def mlstm() -> Memory:
    def draw(length: int) -> Factors:
        return {
            "query": normal(length, HEADS, STATE) * STATE**-0.5,
            "key": normal(length, HEADS, STATE),
            "log_forget": logsigmoid(3 + 2 * normal(length, HEADS)),
            "log_input": 2 * normal(length, HEADS) - 2,
        }

    def off(name: str, by: float) -> Callable[[Factors], MLSTM]:
        return lambda factors: MLSTM(**{**factors, name: factors[name] + by}, eps=EPS)

    return Memory(
        draw,
        lambda f: MLSTM(**f, eps=EPS),
        lambda f, value: recurrences.mlstm(**f, eps=EPS, value=value),
        {"log_input": (80.0, -80.0), "log_forget": (0.0, -80.0), "key": (0.0,), "query": (0.0,)},
        {name: off(name, by) for name, by in {"log_input": -1.0, "log_forget": -0.1, "query": 0.1}.items()},
    )


def normalized_exponential() -> Memory:
    def draw(length: int) -> Factors:
        return {"key": normal(length, HEADS), "log_decay": -per_head().exp(), "bonus": per_head()}

    def early(factors: Factors) -> NormalizedExponential:
        return NormalizedExponential(**{**factors, "bonus": factors["bonus"] - factors["log_decay"]})

    return Memory(
        draw,
        lambda f: NormalizedExponential(**f),
        lambda f, value: recurrences.normalized_exponential(**f, value=value),
        {"key": (80.0, -80.0), "log_decay": (-80.0, -1e4, 0.0, -1e-6), "bonus": (80.0, -80.0)},
        {"a decay before the read": early},
    )


def expanded(factors: Factors) -> DeltaRule:
    """The delta rule of all sub-steps: a token's decay applies at its first one, its query at its last."""
    query, decay = (torch.zeros_like(factors[name]) for name in ("key", "strength"))
    query[:, :, -1], decay[:, :, 0] = factors["query"], factors["log_decay"]
    return DeltaRule(*(t.flatten(1, 2) for t in (query, factors["key"], factors["strength"], decay)))


def substep(index: int) -> Memory:
    def draw(length: int) -> Factors:
        return {
            "query": normal(length, HEADS, STATE),
            "key": normalize(normal(length, COUNT, HEADS, STATE), dim=-1),
            "strength": 2 * normal(length, COUNT, HEADS).sigmoid(),
            "log_decay": logsigmoid(3 * normal(length, HEADS)),
        }

    def define(factors: Factors, value: Tensor) -> Tensor:
        values = torch.stack([value if s == index else torch.zeros_like(value) for s in range(COUNT)], dim=2)
        return recurrences.delta_product(**factors, value=values)

    return Memory(
        draw,
        lambda f: Substep(expanded(f), COUNT, index),
        define,
        {"log_decay": (-80.0,), "strength": (0.0, 2.0), "key": (0.0,)},
        {"another sub-step": lambda f: Substep(expanded(f), COUNT, (index + 1) % COUNT)},
    )


def reversed_decay() -> Memory:
    return Memory(
        by_coordinate,
        lambda f: Reversed(DiagonalDecay(**f)),
        lambda f, value: naive.decay_scan(**f, value=value.flip(1)).flip(1),
        {"log_decay": (-80.0, 0.0)},
        {"the forward direction": lambda f: DiagonalDecay(**f)},
    )


def toeplitz_low_rank(taps: int) -> Memory:
    """Four heads in two groups."""

    def draw(length: int) -> Factors:
        query, key = (normal(length, GROUPS, STATE) for _ in range(2))
        return {"kernel": torch.randn(4, taps, dtype=torch.float64), "query": query, "key": key}

    def define(factors: Factors, value: Tensor) -> Tensor:
        """Weight each past outer product by its distance, token by token."""
        kernel, query, key, value = (t.double() for t in (*factors.values(), value))
        query, key = (t.repeat_interleave(4 // GROUPS, dim=2) for t in (query, key))
        outputs = []
        for i in range(value.shape[1]):
            state = value.new_zeros(BATCH, 4, STATE, value.shape[-1])
            for j in range(max(0, i + 1 - kernel.shape[1]), i + 1):
                state = state + kernel[:, i - j, None, None] * key[:, j].unsqueeze(-1) * value[:, j].unsqueeze(-2)
            outputs.append((query[:, i].unsqueeze(-1) * state).sum(-2))
        return torch.stack(outputs, dim=1)

    def swapped(factors: Factors) -> ToeplitzLowRank:
        return ToeplitzLowRank(factors["kernel"], factors["key"], factors["query"])

    extremes = {"kernel": (0.0, 1e12), "key": (0.0,), "query": (1e12,)}
    return Memory(draw, lambda f: ToeplitzLowRank(**f), define, extremes, {"swapped queries and keys": swapped})


MEMORIES = {
    "delta rule": delta_rule(None),
    "delta rule, decay by head": delta_rule(()),
    "delta rule, decay by coordinate": delta_rule((STATE,)),
    "low-rank update, decay by head": low_rank_update(),
    "low-rank update": low_rank_update(STATE),
    "exclusive bonus": exclusive_bonus(),
    "mLSTM": mlstm(),
    "normalised exponential": normalized_exponential(),
    **{f"sub-step {index}": substep(index) for index in range(COUNT)},
    "reversed diagonal decay": reversed_decay(),
    "Toeplitz x low rank": toeplitz_low_rank(DIRECT_TAPS),
    "Toeplitz x low rank, by FFT": toeplitz_low_rank(200),
}


def well_conditioned(name: str, factors: Factors) -> Factors:
    """Return factors whose rows keep their digits: mLSTM's normaliser may change sign near zero."""
    return {**factors, "query": factors["query"].abs(), "key": factors["key"].abs()} if name == "mLSTM" else factors


def wrong(memory: Memory, mistake: str) -> Memory:
    return replace(memory, build=memory.mistakes[mistake])
