"""Every law of operators, over layouts, structures, dtypes, ragged lengths and extreme factors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.laws.operators import INNER, LAYOUTS, WIDTH, Parts, around, operator
from tests.laws.structures import EXTREMES, HEADS, STRUCTURES, Draw, Structure
from unilinattn.mixers import Dense
from unilinattn.operator.contributions import split_taps
from unilinattn.operator.stages import Branch, Matrix, Mix, Scale, run
from unilinattn.testing import check_operator, operator_passes, relative_error, require_linear_memory

BY_NAME = {structure.name: structure for structure in STRUCTURES}


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@given(
    structure=st.sampled_from(STRUCTURES),
    seed=st.integers(0, 2**20),
    batch=st.integers(1, 2),
    length=st.sampled_from([1, 3, 17, 40]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    extreme=st.sampled_from(EXTREMES),
)
def test_every_law_holds(
    layout: str, structure: Structure, seed: int, batch: int, length: int, dtype: torch.dtype, extreme: str
) -> None:
    check_operator(operator(layout, structure, Draw(seed, batch, length, dtype, extreme)))


@pytest.mark.parametrize("layout", ["mamba", "centred", "bare"])
@pytest.mark.parametrize("name", ["diagonal decay, S6", "scalar decay, groups", "Toeplitz, all tokens"])
def test_passes_allocate_linearly(layout: str, name: str) -> None:
    require_linear_memory(lambda n: operator_passes(operator(layout, BY_NAME[name], Draw(0, 1, n, torch.float32))), 256)


def test_several_ports_of_several_lengths() -> None:
    draw, other = Draw(1, 2, 7, torch.float64), Draw(2, 2, 5, torch.float64)
    across = Dense(torch.randn(2, HEADS, 7, 5, dtype=torch.float64).softmax(-1))
    parts = Parts(draw, BY_NAME["dense"].mixer(draw))
    cross = (parts.matrix("input", INNER, 3), Mix("core", across), parts.matrix("output", 5, INNER))
    op = around(
        {"x": LAYOUTS["attention"](parts), "encoder": cross}, {"x": draw.normal(WIDTH), "encoder": other.normal(3)}
    )
    check_operator(op)
    total = op.contributions(3).sum(1) + op.contributions(3, port="encoder").sum(1) + op.bias[:, 3]
    assert relative_error(total, op.output[:, 3]) < 1e-12


def test_a_branch_of_scales_after_the_last_mixer_keeps_its_tokens() -> None:
    draw = Draw(3, 2, 9, torch.float64)
    parts = Parts(draw, BY_NAME["dense"].mixer(draw))
    added = Branch("gate", ((parts.scale("gate"),), (parts.scale("gate", 2), parts.matrix("gate", INNER, INNER))))
    chain = (parts.matrix("input", INNER, WIDTH), parts.mix(), added, parts.matrix("output", WIDTH, INNER))
    check_operator(around({"x": chain}, {"x": draw.normal(WIDTH)}))


def test_two_cores_with_a_gate_between_are_one_core() -> None:
    draw = Draw(4, 2, 9, torch.float64)
    parts = Parts(draw, BY_NAME["Toeplitz, all tokens"].mixer(draw))
    chain = (parts.matrix("input", INNER, WIDTH), parts.mix(), parts.scale("gate"), parts.mix())
    op = around({"x": (*chain, parts.matrix("output", WIDTH, INNER))}, {"x": draw.normal(WIDTH)})
    check_operator(op)
    whole = parts.core.materialize().repeat_interleave(2, dim=1)
    gate = chain[2].scale.transpose(1, 2).unsqueeze(-1)
    assert relative_error(op.matrix("core", heads=None), whole @ (gate * whole)) < 1e-12


def test_core_mixer_and_unified_are_one_matrix_for_plain_attention() -> None:
    op = operator("attention", BY_NAME["dense"], Draw(5, 2, 9, torch.float64))
    core = op.matrix("core")
    for scope in ("mixer", "unified"):
        assert relative_error(op.matrix(scope), core) < 1e-14
    assert (op.num_heads("core"), op.num_heads("unified")) == (HEADS, INNER)


def test_a_gate_and_a_skip_distinguish_the_scopes() -> None:
    op = operator("mamba", BY_NAME["dense"], Draw(6, 2, 9, torch.float64))
    core, mixer, unified = (op.matrix(scope, heads=None) for scope in ("core", "mixer", "unified"))
    skip = op.chains["x"][4].chains[1][0].scale[0, 0]
    diagonal = skip[None, :, None].expand(2, -1, 9)
    assert relative_error((mixer - core).diagonal(dim1=-2, dim2=-1), diagonal) < 1e-12
    assert relative_error(unified, mixer.repeat_interleave(2, dim=1)) > 0.1


def test_taps_through_the_identity_add_up_to_the_layer_without_its_activation() -> None:
    op = operator("mamba", BY_NAME["dense"], Draw(9, 2, 9, torch.float64))
    before, conv, after = split_taps(op.chains["x"], "layer")
    assert before[-1].bias is not None and conv.bias is not None
    expected = run(after, conv.apply(run(before, op.inputs["x"])))
    assert relative_error(op.decomposed_output("identity"), expected) < 1e-12


def test_contributions_through_two_long_mixers_with_a_matrix_between_add_up() -> None:
    draw = Draw(7, 2, 9, torch.float64)
    parts = Parts(draw, BY_NAME["dense"].mixer(draw))
    chain = (parts.matrix("input", INNER, WIDTH), parts.mix(), parts.matrix("input", INNER, INNER), parts.mix())
    op = around({"x": chain}, {"x": draw.normal(WIDTH)})
    assert relative_error(op.contributions(5).sum(1) + op.bias[:, 5], op.output[:, 5]) < 1e-12
    # One token's vector is the output for that token and zeros.
    alone = torch.zeros_like(op.inputs["x"])
    alone[:, 3] = op.inputs["x"][:, 3]
    assert relative_error(op.contributions(5)[:, 3], op.apply(alone, bias=False)[:, 5]) < 1e-12


def test_padded_rows_obey_the_laws() -> None:
    draw = Draw(8, 2, 9, torch.float64)
    op = operator("mamba", BY_NAME["dense"], draw)
    first = op.chains["x"][0]
    assert isinstance(first, Scale)
    assert isinstance(op.chains["x"][1], Matrix)
    op.mask = torch.arange(9) < torch.tensor([[9], [5]])
    check_operator(op)
    assert op.contributions([7, 8]).shape == (2, 2, 9, WIDTH)
