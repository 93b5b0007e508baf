"""The adapters of the reference models: padding and scopes."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn

from tests.architectures.reference_recurrences import RECURRENCES
from tests.hosts import named
from unilinattn import explain, trace
from unilinattn.mixers import Reversed, Toeplitz, ToeplitzLowRank
from unilinattn.models import (
    DSS,
    GSS,
    H3,
    S4,
    S4D,
    S5,
    BiMamba,
    Hyena,
    MixerForCausalLM,
    MultiHyena,
    VisionMamba,
)
from unilinattn.operator.operator import MixerOperator
from unilinattn.operator.stages import Mix, walk
from unilinattn.testing import promoted, randomize, relative_error, tolerance
from unilinattn.testing.hosts import VOCABULARY
from unilinattn.testing.hosts.reference import HOSTS

EXACT = tolerance("law", torch.float64)


def _language(mixer: type[nn.Module], **settings: object) -> nn.Module:
    return randomize(MixerForCausalLM(VOCABULARY, 6, 1, lambda: mixer(6, **settings)).eval())


def _cores(op: MixerOperator) -> list[Mix]:
    return [stage for stage in walk(op.chains["x"]) if isinstance(stage, Mix) and stage.role == "core"]


def test_every_adapter_has_a_recurrence_and_three_configurations() -> None:
    for architecture in RECURRENCES:
        assert sum(host.architecture == architecture for host in HOSTS) >= 3


def test_a_model_of_every_mixer_lists_its_layers_in_order() -> None:
    kinds = {
        "S4 (fixed mixer)": partial(S4, 6),
        "H3 (long convolution)": partial(H3, 6, head_dim=2),
        "ViM (bidirectional S6)": partial(BiMamba, 6),
        "S5 (fixed mixer)": partial(S5, 6, d_state=4),
        "Hyena (long convolutions)": partial(Hyena, 6, l_max=9, order=3),
        "GSS (fixed mixer)": partial(GSS, 6),
        "S4D (fixed mixer)": partial(S4D, 6, d_state=4),
        "multi-head Hyena (long convolution)": partial(MultiHyena, 6, l_max=9, num_heads=2),
        "DSS (fixed mixer)": partial(DSS, 6),
    }
    mixers = iter(kinds.values())
    hybrid = randomize(MixerForCausalLM(VOCABULARY, 6, len(kinds), lambda: next(mixers)()).eval())
    host_trace = trace(hybrid, torch.randint(VOCABULARY, (2, 9)))
    assert [layer.kind for layer in host_trace.layers] == list(kinds)
    assert [layer.name for layer in host_trace.layers] == [f"layers.{at}.mixer" for at in range(len(kinds))]
    assert all(layer.operator.reconstruction_error() <= 1e-5 for layer in host_trace.layers)
    assert all(layer.multiplier == 1 and layer.residual is not None for layer in host_trace.layers)


@pytest.mark.parametrize("name", ["vim, biases", "vim, chunk and one", "dss, softmax", "dss, softmax, long kernel"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_that_reaches_real_tokens_is_reconstructed(name: str, side: str) -> None:
    host = named(name)
    for batch in (1, 3):
        ids = torch.randint(VOCABULARY, (batch, host.length))
        mask = torch.ones_like(ids)
        mask[-1, slice(0, 2) if side == "left" else slice(host.length - 2, None)] = 0
        with promoted(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", f"{side} padding reaches real tokens")
            for layer in trace(host.model().double(), {"input_ids": ids, "attention_mask": mask}).layers:
                assert torch.equal(layer.mask, mask.bool())
                assert layer.operator.reconstruction_error() <= tolerance("reconstruction", torch.float64)


@pytest.mark.parametrize("side", ["left", "right"])
def test_vim_with_biases_warns_of_padding_on_either_side(side: str) -> None:
    real = [0, 1, 1, 1, 1, 1] if side == "left" else [1, 1, 1, 1, 1, 0]
    padded = {"input_ids": torch.randint(VOCABULARY, (1, 6)), "attention_mask": torch.tensor([real])}
    with pytest.warns(
        UserWarning, match=f"^{side} padding reaches real tokens .*; trace texts .* one by one"
    ) as caught:
        trace(_language(BiMamba), padded)
    assert len(caught) == 1
    trace(_language(BiMamba, conv_bias=False), padded)


@pytest.mark.parametrize(
    ("real", "warned"), [([0, 1, 1, 1], True), ([1, 0, 1, 1], True), ([1, 1, 1, 0], False), ([1, 1, 1, 1], False)]
)
def test_a_warning_of_left_padding_recommends_right_padding(real: list[int], warned: bool) -> None:
    padded = {"input_ids": torch.randint(VOCABULARY, (1, 4)), "attention_mask": torch.tensor([real])}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace(_language(GSS), padded)
    expected = "left padding reaches real tokens in this model: the bias of the norm"
    assert [str(w.message).startswith(expected) and str(w.message).endswith("pad on the right.") for w in caught] == [
        True
    ] * warned


def test_softmax_dss_warns_that_padding_changes_its_kernel() -> None:
    ids, mask = torch.randint(VOCABULARY, (1, 6)), torch.tensor([[0, 1, 1, 1, 1, 1]])
    padded = {"input_ids": ids, "attention_mask": mask}
    softmax, exponential = (_language(DSS, d_state=2, version=version) for version in ("softmax", "exp"))
    with pytest.warns(UserWarning, match="normalised over the padded length"):
        matrix = trace(softmax, padded).layers[0].operator.matrix()
    alone = trace(softmax, ids[:, 1:]).layers[0].operator.matrix()
    assert relative_error(matrix[:, 1:, 1:], alone) > 1e-3
    matrix, alone = (trace(exponential, inputs).layers[0].operator.matrix() for inputs in (padded, ids[:, 1:]))
    assert relative_error(matrix[:, 1:, 1:], alone) <= 1e-6


@pytest.mark.parametrize("divide_out", [True, False])
def test_vim_core_is_forward_plus_flipped_backward_and_never_halved(divide_out: bool) -> None:
    model = randomize(VisionMamba(8, 4, num_classes=3, embed_dim=6, depth=1, d_state=3, divide_out=divide_out)).double()
    op = trace(model, torch.randn(2, 3, 8, 8, dtype=torch.float64)).layers[0].operator
    ahead, back = (stage.mixer for stage in _cores(op))
    assert isinstance(back, Reversed) and not isinstance(ahead, Reversed)
    assert torch.equal(ahead.materialize(), ahead.materialize().tril())
    assert torch.equal(back.materialize(), back.materialize().triu())
    core = ahead.materialize() + back.materialize()
    assert relative_error(op.matrix("core", heads=None), core) <= EXACT
    skip = (model.layers[0].mixer.D + model.layers[0].mixer.D_b).detach()
    skips = torch.diag_embed(skip[:, None].expand(-1, core.shape[-1]))
    assert relative_error(op.matrix("mixer", heads=None), core + skips) <= EXACT


def test_halving_the_sum_of_directions_halves_unified_and_leaves_core() -> None:
    divided, plain = (randomize(VisionMamba(8, 4, embed_dim=6, depth=1, divide_out=d)).double() for d in (True, False))
    image = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    ops = [trace(model, image).layers[0].operator for model in (divided, plain)]
    assert torch.equal(ops[0].matrix("core"), ops[1].matrix("core"))
    assert relative_error(2 * ops[0].matrix("unified"), ops[1].matrix("unified")) <= EXACT


def test_hyena_core_runs_from_the_first_long_convolution_to_the_last() -> None:
    mixer = _language(Hyena, l_max=9, order=3, filter_order=4).double()
    op = trace(mixer, torch.randint(VOCABULARY, (2, 9))).layers[0].operator
    first, second = (stage.mixer.materialize() for stage in _cores(op))
    _, _, _, _, gate, _, *_ = op.chains["x"]
    between = second @ (gate.scale.transpose(1, 2)[..., None] * first)
    assert relative_error(op.matrix("core", heads=None), between) <= EXACT


@pytest.mark.parametrize(
    ("mixer", "settings", "structure"),
    [
        (H3, {}, Toeplitz),
        (H3, {"head_dim": 2}, ToeplitzLowRank),
        (MultiHyena, {"l_max": 9, "num_heads": 6}, Toeplitz),
        (MultiHyena, {"l_max": 9, "num_heads": 3}, ToeplitzLowRank),
    ],
)
def test_heads_of_one_channel_are_gates_around_a_convolution(mixer: type, settings: dict, structure: type) -> None:
    op = trace(_language(mixer, **settings), torch.randint(VOCABULARY, (2, 9))).layers[0].operator
    assert [type(stage.mixer) for stage in _cores(op)] == [structure]


def test_multi_head_hyena_with_one_head_per_channel_is_hyena() -> None:
    torch.manual_seed(0)
    many = _language(MultiHyena, l_max=9, num_heads=6).double()
    one = _language(Hyena, l_max=9).double()
    one.load_state_dict(many.state_dict())
    ids = torch.randint(VOCABULARY, (2, 9))
    for scope in ("core", "unified"):
        reference, other = (trace(model, ids).layers[0].operator.matrix(scope, heads=None) for model in (many, one))
        assert relative_error(reference, other) <= EXACT


def test_s5_heads_are_its_modes_and_its_adjoint_is_real() -> None:
    model = _language(S5, d_state=8).double()
    op = trace(model, torch.randint(VOCABULARY, (2, 9))).layers[0].operator
    decay = model.layers[0].mixer.seq.modes().decay
    lag = torch.arange(9)[:, None] - torch.arange(9)
    expected = (decay[:, None, None] ** lag.clamp_min(0)).real * (lag >= 0)
    assert op.num_heads("core") == 4
    for scope in ("core", "mixer", "unified"):
        assert relative_error(op.matrix(scope, heads=None)[0], expected) <= EXACT
    assert op.adjoint(torch.randn_like(op.output)).dtype == torch.float64


def test_models_of_images_and_text_are_explained_by_every_method() -> None:
    vision = VisionMamba(8, 4, num_classes=3, embed_dim=6, depth=2).eval()
    for method in ("raw", "rollout", "attribution", "latim"):
        scores = explain(vision, torch.randn(1, 3, 8, 8), method=method, target=2).scores
        assert scores.shape[-1] == 5
    assert explain(_language(H3, head_dim=2), torch.randint(VOCABULARY, (1, 7)), method="alti").scores.shape[-1] == 7
