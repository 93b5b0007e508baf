"""Hyena of several orders: the sums of its paper, state dicts, the layout of HyenaDNA, and precision."""

import math

import pytest
import torch
from torch import Tensor

from tests.architectures import reference_recurrences
from tests.models import checks
from unilinattn.errors import InputError, OptionError
from unilinattn.models.hyena import Hyena, MultiHyena
from unilinattn.models.hyenadna import HyenaDNAForCausalLM
from unilinattn.testing import relative_error

definition = checks.of_one_stream(reference_recurrences.hyena)
definition_of_heads = checks.of_one_stream(reference_recurrences.multi_hyena)


def filter_values(layer: Hyena, length: int) -> Tensor:
    """FFN(features) times the window, (channels, length), layer by layer; the definitions take it from the layer."""
    state = layer.state_dict()
    values = state["filter_fn.pos_emb.z"][0, :length]
    position = 0
    while f"filter_fn.implicit_filter.{position}.bias" in state:
        name = f"filter_fn.implicit_filter.{position}"
        values = values @ state[f"{name}.weight"].T + state[f"{name}.bias"]
        values = torch.sin(state[f"filter_fn.implicit_filter.{position + 1}.freq"] * values)
        position += 2
    values = values @ state[f"filter_fn.implicit_filter.{position}.weight"].T
    window = torch.exp(-state["filter_fn.pos_emb.t"][0, :length] * state["filter_fn.modulation.deltas"][0].abs())
    return (values * (window + layer.filter_fn.shift)).mT


@pytest.mark.parametrize("length", [1, 2, 23])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"order": 3},
        {"order": 4, "short_filter_order": 5},
        {"emb_dim": 5, "w": 10.0, "shift": 0.05},
        {"num_inner_mlps": 0},
    ],
    ids=str,
)
def test_the_layer_is_its_definition(length: int, options: dict[str, float]) -> None:
    layer = Hyena(d_model=5, l_max=30, filter_order=8, **options).double()
    x = torch.randn(2, length, 5, dtype=torch.float64)
    assert relative_error(layer(x), definition(layer, x)) < 1e-11
    assert relative_error(layer.filter_fn(length)[None], filter_values(layer, length)[None]) < 1e-11


def test_a_perturbed_layer_differs_from_its_definition() -> None:
    layer = Hyena(d_model=4, l_max=20, order=3, filter_order=8).double()
    # The frequencies of the later sines are those of the first.
    names = [name for name in layer.state_dict() if not name.endswith("freq") or ".1." in name]
    x = torch.randn(2, 20, 4, dtype=torch.float64)
    checks.check_perturbations(layer, definition, x, names, 1e-8)


def test_positional_features_are_time_and_sinusoids() -> None:
    features = Hyena(4, l_max=10, emb_dim=5).double().filter_fn.pos_emb
    time = torch.arange(10).double()
    torch.testing.assert_close(features.t[0, :, 0], time / 9, rtol=1e-6, atol=1e-6)
    for column, frequency in ((1, 1e-4), (2, 1.0)):
        angle = frequency * 2 * math.pi * time / 10
        torch.testing.assert_close(features.z[0, :, column], angle.cos(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(features.z[0, :, column + 2], -angle.sin(), rtol=1e-5, atol=1e-5)


def test_without_modulation_there_is_no_window() -> None:
    plain = Hyena(4, l_max=20, modulate=False, filter_order=8).double()
    windowed = Hyena(4, l_max=20, filter_order=8).double()
    windowed.load_state_dict(plain.state_dict())
    window = torch.exp(-windowed.filter_fn.pos_emb.t[0] * windowed.filter_fn.modulation.deltas[0].abs()).mT
    torch.testing.assert_close(windowed.filters(20)[0], plain.filters(20)[0] * window)


def mixer_layout(prefix: str, width: int, l_max: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an order-2 operator in a published HyenaDNA checkpoint."""
    filters = "filter_fn.implicit_filter"
    names: dict[str, tuple[int, ...]] = {
        "in_proj.weight": (3 * width, width),
        "in_proj.bias": (3 * width,),
        "out_proj.weight": (width, width),
        "out_proj.bias": (width,),
        "short_filter.weight": (3 * width, 1, 3),
        "short_filter.bias": (3 * width,),
        "filter_fn.bias": (width,),
        "filter_fn.pos_emb.z": (1, l_max, 5),
        "filter_fn.pos_emb.t": (1, l_max, 1),
        f"{filters}.0.weight": (hidden, 5),
        f"{filters}.0.bias": (hidden,),
        f"{filters}.1.freq": (1, hidden),
        f"{filters}.2.weight": (hidden, hidden),
        f"{filters}.2.bias": (hidden,),
        f"{filters}.3.freq": (1, hidden),
        f"{filters}.4.weight": (hidden, hidden),
        f"{filters}.4.bias": (hidden,),
        f"{filters}.5.freq": (1, hidden),
        f"{filters}.6.weight": (width, hidden),
        "filter_fn.modulation.deltas": (1, 1, width),
    }
    return {prefix + name: shape for name, shape in names.items()}


def test_a_state_dict_of_the_published_layout_loads() -> None:
    checks.check_state_dict_loads(Hyena(8, 20, emb_dim=5), mixer_layout("", 8, 20, 64))


def hyenadna_layout() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the smallest published HyenaDNA checkpoint."""
    width, inner = 128, 512
    layout: dict[str, tuple[int, ...]] = {
        "backbone.embeddings.word_embeddings.weight": (16, width),
        "backbone.ln_f.weight": (width,),
        "backbone.ln_f.bias": (width,),
        "lm_head.weight": (16, width),
    }
    for layer in range(2):
        prefix = f"backbone.layers.{layer}."
        layout |= mixer_layout(f"{prefix}mixer.", width, 1026, 64)
        layout |= {f"{prefix}{norm}.{kind}": (width,) for norm in ("norm1", "norm2") for kind in ("weight", "bias")}
        layout |= {
            f"{prefix}mlp.fc1.weight": (inner, width),
            f"{prefix}mlp.fc1.bias": (inner,),
            f"{prefix}mlp.fc2.weight": (width, inner),
            f"{prefix}mlp.fc2.bias": (width,),
        }
    return layout


def test_the_smallest_published_hyenadna_loads_and_is_causal() -> None:
    model = HyenaDNAForCausalLM()
    checks.check_state_dict_loads(model, hyenadna_layout())
    model = HyenaDNAForCausalLM().double()
    assert model.lm_head.weight is model.backbone.embeddings["word_embeddings"].weight
    ids = torch.randint(7, 11, (1, 20))
    changed = ids.clone()
    changed[:, 12:] = 6
    difference = (model(ids).logits - model(changed).logits).abs()
    assert difference[:, :12].max() < 1e-11
    assert difference[:, 12:].max() > 1e-3


@pytest.mark.parametrize("length", [1, 2, 23])
@pytest.mark.parametrize("num_heads", [1, 2, 6])
def test_several_heads_are_toeplitz_times_low_rank(length: int, num_heads: int) -> None:
    layer = MultiHyena(d_model=6, l_max=30, num_heads=num_heads, filter_order=8, shift=0.05).double()
    x = torch.randn(2, length, 6, dtype=torch.float64)
    assert relative_error(layer(x), definition_of_heads(layer, x)) < 1e-11


def test_as_many_heads_as_channels_are_hyena_of_order_two() -> None:
    single, several = Hyena(6, 30).double(), MultiHyena(6, 30, num_heads=6).double()
    several.load_state_dict(single.state_dict(), strict=True)
    x = torch.randn(2, 25, 6, dtype=torch.float64)
    assert relative_error(several(x), single(x)) < 1e-12


def test_a_sequence_longer_than_the_filter_is_refused() -> None:
    with pytest.raises(InputError, match="21 tokens; this filter has l_max=20"):
        Hyena(4, l_max=20)(torch.randn(1, 21, 4))


def test_invalid_sizes_are_refused() -> None:
    with pytest.raises(OptionError, match="order is 1"):
        Hyena(4, 20, order=1)
    with pytest.raises(OptionError, match="emb_dim is 4"):
        Hyena(4, 20, emb_dim=4)
    with pytest.raises(OptionError, match="num_heads is 3"):
        MultiHyena(4, 20, num_heads=3)
