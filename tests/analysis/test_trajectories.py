"""States of recurrent memories against their recurrences, and the projections of the Induction paper."""

import pytest
import torch
from torch import Tensor

from tests.analysis.plain import image, layer_of
from tests.laws.structures import STRUCTURES, Draw
from tests.methods.hosts import close, traced
from unilinattn import analysis
from unilinattn.analysis.cores import core_of
from unilinattn.errors import InputError, MemoryLimitError, OptionError, UncoveredError
from unilinattn.memory import max_memory
from unilinattn.mixers import MLSTM, DeltaRule, ExclusiveBonus, LowRankUpdate, Reversed, Substep, ToeplitzLowRank
from unilinattn.mixers.base import CoreMixer
from unilinattn.operator.flow import Flow

BATCH, LENGTH, HEADS, STATE, CHANNELS = 2, 5, 4, 3, 2


def normal(*shape: int) -> Tensor:
    return torch.randn(BATCH, LENGTH, *shape, dtype=torch.float64)


def layer_with(mixer: CoreMixer):
    x = normal(mixer.heads * CHANNELS)
    return layer_of(Flow(x).core(mixer), x), x.unflatten(2, (mixer.heads, CHANNELS))


WITH_QUERY = [
    structure
    for structure in STRUCTURES
    if isinstance(getattr(structure.mixer(Draw(0, BATCH, LENGTH, torch.float64)), "query", None), Tensor)
]


def test_the_table_has_structures_with_and_without_queries() -> None:
    assert 5 < len(WITH_QUERY) < len(STRUCTURES)


@pytest.mark.parametrize("structure", WITH_QUERY, ids=lambda structure: structure.name)
@pytest.mark.parametrize("backward", [False, True])
def test_the_query_reads_the_state(structure, backward: bool) -> None:
    mixer = structure.mixer(Draw(1, BATCH, LENGTH, torch.float64))
    mixer = Reversed(mixer) if backward else mixer
    layer, value = layer_with(mixer)
    states = analysis.states(layer).states
    query = mixer.query.repeat_interleave(mixer.heads // mixer.query.shape[2], 2)
    assert close(torch.einsum("bthn,bthnp->bthp", query, states), mixer.apply(value))


def other_structures() -> list[CoreMixer]:
    query, key, a, b = (normal(HEADS, STATE) / 2 for _ in range(4))
    decay, gate = -normal(HEADS, STATE).abs(), normal(HEADS)
    return [
        LowRankUpdate(query, key, decay, a, b),
        MLSTM(query, key, -gate.abs(), normal(HEADS), eps=1e-6),
        ToeplitzLowRank(torch.randn(HEADS, LENGTH, dtype=torch.float64), query, key),
    ]


@pytest.mark.parametrize("index", range(3))
def test_the_query_reads_the_state_of_other_memories(index: int) -> None:
    mixer = other_structures()[index]
    layer, value = layer_with(mixer)
    states = analysis.states(layer).states
    assert close(torch.einsum("bthn,bthnp->bthp", mixer.query, states), mixer.apply(value))


def test_states_of_mamba_are_those_of_the_recurrence() -> None:
    for layer in traced("mamba").layers:
        core = core_of(layer, 0)
        mixer, value = core.mixer, core.value[..., 0]
        batch, length, channels = value.shape
        expected = torch.zeros(batch, length, channels, mixer.key.shape[-1], dtype=torch.float64)
        for b in range(batch):
            state = torch.zeros(channels, mixer.key.shape[-1], dtype=torch.float64)
            for t in range(length):
                step = mixer.key_scale[b, t, :, None]
                written = step * mixer.key[b, t] * value[b, t, :, None]
                state = torch.exp(step * mixer.rate) * state + written
                expected[b, t] = state
        assert close(analysis.states(layer).states.squeeze(-1), expected)


def test_states_of_the_delta_rule_are_those_of_the_recurrence() -> None:
    query, key, strength = normal(HEADS, STATE), normal(HEADS, STATE) / 2, normal(HEADS).sigmoid()
    decay = -normal(HEADS, STATE).abs()
    layer, value = layer_with(DeltaRule(query, key, strength, decay))
    expected = torch.zeros(BATCH, LENGTH, HEADS, STATE, CHANNELS, dtype=torch.float64)
    for b in range(BATCH):
        for h in range(HEADS):
            state = torch.zeros(STATE, CHANNELS, dtype=torch.float64)
            for t in range(LENGTH):
                state = decay[b, t, h].exp()[:, None] * state
                missing = value[b, t, h] - state.T @ key[b, t, h]
                state = state + strength[b, t, h] * torch.outer(key[b, t, h], missing)
                expected[b, t, h] = state
    assert close(analysis.states(layer).states, expected)


def test_a_memory_that_is_read_first_shows_the_earlier_tokens_and_the_bonus() -> None:
    query, key, decay = normal(HEADS, STATE), normal(HEADS, STATE), -normal(HEADS, STATE).abs()
    bonus = torch.randn(HEADS, STATE, dtype=torch.float64)
    layer, value = layer_with(ExclusiveBonus(query, key, decay, bonus))
    expected = torch.zeros(BATCH, LENGTH, HEADS, STATE, CHANNELS, dtype=torch.float64)
    for b in range(BATCH):
        for h in range(HEADS):
            state = torch.zeros(STATE, CHANNELS, dtype=torch.float64)
            for t in range(LENGTH):
                written = torch.outer(key[b, t, h], value[b, t, h])
                expected[b, t, h] = state + bonus[h][:, None] * written
                state = decay[b, t, h].exp()[:, None] * state + written
    assert close(analysis.states(layer).states, expected)


def test_substeps_are_read_after_the_last() -> None:
    query, key = (torch.randn(BATCH, 2 * LENGTH, HEADS, STATE, dtype=torch.float64) / 2 for _ in range(2))
    strength = torch.rand(BATCH, 2 * LENGTH, HEADS, dtype=torch.float64)
    mixer = Substep(DeltaRule(query, key, strength), 2, 0)
    layer, value = layer_with(mixer)
    states = analysis.states(layer).states
    assert close(torch.einsum("bthn,bthnp->bthp", query[:, 1::2], states), mixer.apply(value))


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_projections_sum_over_the_heads_that_share_a_query(name: str) -> None:
    layer = traced(name).layers[0]
    states = analysis.states(layer).states
    batch, length, heads, count, channels = states.shape
    groups = core_of(layer, 0).mixer.query.shape[2]
    vectors = torch.randn(3, heads * channels, dtype=torch.float64)
    basis = torch.randn(4, groups, count, dtype=torch.float64)
    projection = analysis.project_states(layer, vectors)
    changed = projection.change_basis(basis)
    t, b, group, token = 4, 1, groups - 1, 2
    for n in range(count):
        total = 0.0
        for h in range(heads):
            if h * groups // heads == group:
                for p in range(channels):
                    total += float(states[b, t, h, n, p] * vectors[token, h * channels + p])
        assert abs(total - float(projection.values[b, t, group, n, token])) < 1e-12
    for i in range(4):
        total = sum(float(basis[i, group, n] * projection.values[b, t, group, n, token]) for n in range(count))
        assert abs(total - float(changed.values[b, t, group, i, token])) < 1e-12
    assert changed.values.shape == (batch, length, groups, 4, 3)


def test_bad_requests_are_named() -> None:
    layer = traced("mamba").layers[0]
    with pytest.raises(UncoveredError, match="'dense' has no factor `query`"):
        analysis.states(traced("llama").layers[0])
    with pytest.raises(OptionError, match="core=-1 is out of range"):
        analysis.states(layer, core=-1)
    with pytest.raises(InputError, match=r"needs \(token, 12 channels\)"):
        analysis.project_states(layer, torch.zeros(3, 5))
    with pytest.raises(InputError, match="1 groups, 3 coordinates"):
        analysis.project_states(layer, torch.zeros(3, 12)).change_basis(torch.zeros(3, 1, 4))
    with max_memory(1000), pytest.raises(MemoryLimitError, match="project them with `project_states`"):
        analysis.states(layer)


def test_the_pictures(tmp_path) -> None:
    layer = traced("mamba").layers[0]
    analysis.states(layer).plot(tmp_path / "states.png")
    analysis.project_states(layer, torch.randn(3, 12)).plot(tmp_path / "projection.png", token=1, labels=list("abcdef"))
    assert image(tmp_path / "states.png") and image(tmp_path / "projection.png")
