"""ViM: the recurrence of its paper, published names and shapes, CLS positions, timm, and precision."""

import copy
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.architectures import reference_recurrences
from tests.models import checks
from unilinattn.errors import InputError, OptionError
from unilinattn.models import vim_timm
from unilinattn.models.vim import BiMamba, VisionMamba
from unilinattn.testing import relative_error

recurrence = checks.of_one_stream(reference_recurrences.vim)


def scrambled(mixer: BiMamba) -> BiMamba:
    """The mixer with random parameters, since both directions are initialised with the same decays and skips."""
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return mixer


def test_the_sum_of_directions_is_halved_by_default_as_in_the_authors_code() -> None:
    halved, whole = BiMamba(d_model=6, d_state=5), BiMamba(d_model=6, d_state=5, divide_out=False)
    whole.load_state_dict(halved.state_dict())
    hidden = torch.randn(2, 7, 6)
    assert torch.equal(halved(hidden) * 2, whole(hidden))
    assert [
        mixer.divide_out for mixer in VisionMamba(8, 4, embed_dim=6, depth=2).modules() if isinstance(mixer, BiMamba)
    ] == [True, True]


@pytest.mark.parametrize("length", [1, 2, 17])
@pytest.mark.parametrize(
    "options",
    [{}, {"divide_out": False}, {"bias": True}, {"conv_bias": False}, {"d_conv": 3, "expand": 1, "dt_rank": 3}],
    ids=str,
)
def test_the_mixer_is_the_recurrence(length: int, options: dict[str, int]) -> None:
    mixer = scrambled(BiMamba(d_model=6, d_state=5, **options).double())
    hidden = torch.randn(2, length, 6, dtype=torch.float64)
    assert relative_error(mixer(hidden), recurrence(mixer, hidden)) < 1e-12


def test_a_perturbed_mixer_differs_from_the_recurrence() -> None:
    mixer = scrambled(BiMamba(d_model=6, d_state=5).double())
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    checks.check_perturbations(mixer, recurrence, x, dict(mixer.named_parameters()), 1e-7)


def test_every_token_sees_every_other() -> None:
    mixer = scrambled(BiMamba(d_model=6, d_state=5).double())
    hidden = torch.randn(1, 9, 6, dtype=torch.float64, requires_grad=True)
    for row in (0, 4, 8):
        (grad,) = torch.autograd.grad(mixer(hidden)[0, row].sum(), hidden)
        assert (grad[0].abs().sum(-1) > 1e-9).all()


def test_steps_start_between_their_bounds() -> None:
    for layer in (BiMamba(32).dt_proj, BiMamba(32).dt_proj_b):
        steps = functional.softplus(layer.bias.double())
        assert steps.min() > 0.00099
        assert steps.max() < 0.101


def published_layout(width: int, depth: int, patches: int, state: int = 16) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a published checkpoint with its CLS token in the middle."""
    inner, rank = 2 * width, math.ceil(width / 16)
    layout: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, patches + 1, width),
        "patch_embed.proj.weight": (width, 3, 16, 16),
        "patch_embed.proj.bias": (width,),
        "head.weight": (1000, width),
        "head.bias": (1000,),
        "norm_f.weight": (width,),
    }
    for layer in range(depth):
        mixer = f"layers.{layer}.mixer."
        layout[f"layers.{layer}.norm.weight"] = (width,)
        layout[f"{mixer}in_proj.weight"] = (2 * inner, width)
        layout[f"{mixer}out_proj.weight"] = (width, inner)
        for b in ("", "_b"):
            layout |= {
                f"{mixer}A{b}_log": (inner, state),
                f"{mixer}D{b}": (inner,),
                f"{mixer}conv1d{b}.weight": (inner, 1, 4),
                f"{mixer}conv1d{b}.bias": (inner,),
                f"{mixer}x_proj{b}.weight": (rank + 2 * state, inner),
                f"{mixer}dt_proj{b}.weight": (inner, rank),
                f"{mixer}dt_proj{b}.bias": (inner,),
            }
    return layout


def test_the_published_tiny_checkpoint_loads() -> None:
    layout = published_layout(width=192, depth=24, patches=196)
    assert len(layout) == 7 + 24 * 17
    # Seven million parameters, as in the authors' table of models.
    assert 7.0e6 < sum(math.prod(shape) for shape in layout.values()) < 7.2e6
    checks.check_state_dict_loads(VisionMamba(), layout)


@pytest.mark.parametrize(
    ("options", "width", "patches", "millions"),
    [
        ({"embed_dim": 384}, 384, 14 * 14, 26),
        ({"embed_dim": 768}, 768, 14 * 14, 98),
        ({"embed_dim": 384, "stride": 8}, 384, 27 * 27, 26),
    ],
)
def test_the_other_published_sizes_have_their_names_and_shapes(
    options: dict[str, int], width: int, patches: int, millions: int
) -> None:
    with torch.device("meta"):
        model = VisionMamba(**options)
    layout = published_layout(width, 24, patches)
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == layout
    assert round(sum(math.prod(shape) for shape in layout.values()) / 1e6) == millions


def tiny(**options: object) -> VisionMamba:
    sizes = {"img_size": 12, "patch_size": 4, "num_classes": 5, "embed_dim": 8, "depth": 2, "d_state": 4}
    return VisionMamba(**{**sizes, **options})


def reference(model: VisionMamba, pixels: Tensor) -> Tensor:
    """The classifier in float64: patches as products, plain pre-norm residual blocks, the CLS tokens' mean."""
    model = copy.deepcopy(model).double()
    state = model.state_dict()
    weight = state["patch_embed.proj.weight"]
    size, stride = weight.shape[-1], model.patch_embed.proj.stride[0]
    rows, columns = model.grid_size
    patches = [
        (pixels.double()[:, None, :, r * stride : r * stride + size, c * stride : c * stride + size] * weight).sum(
            (2, 3, 4)
        )
        + state["patch_embed.proj.bias"]
        for r in range(rows)
        for c in range(columns)
    ]
    if model.cls_position == "double":
        tokens = [state["cls_token_head"][0, 0].expand(len(pixels), -1), *patches]
        tokens.append(state["cls_token_tail"][0, 0].expand(len(pixels), -1))
        read = [0, len(tokens) - 1]
    else:
        read = [{"middle": len(patches) // 2, "first": 0, "last": len(patches)}[model.cls_position]]
        tokens = [*patches]
        tokens.insert(read[0], state["cls_token"][0, 0].expand(len(pixels), -1))
    stream = torch.stack(tokens, dim=1) + state["pos_embed"]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5) * state[name]

    for index, layer in enumerate(model.layers):
        stream = stream + recurrence(layer.mixer, norm(stream, f"layers.{index}.norm.weight"))
    pooled = norm(stream, "norm_f.weight")[:, read].mean(1)
    return pooled @ state["head.weight"].T + state["head.bias"]


@pytest.mark.parametrize("cls_position", ["middle", "first", "last", "double"])
@pytest.mark.parametrize("shape", [{}, {"img_size": (8, 16)}, {"stride": 2}, {"divide_out": False}], ids=str)
def test_the_classifier_is_its_definition(cls_position: str, shape: dict[str, object]) -> None:
    model = tiny(cls_position=cls_position, **shape).double()
    for layer in model.layers:
        scrambled(layer.mixer)
    height, width = model.patch_embed.img_size
    pixels = torch.randn(2, 3, height, width, dtype=torch.float64)
    assert relative_error(model(pixels), reference(model, pixels)) < 1e-11


@pytest.mark.parametrize(
    ("cls_position", "positions"), [("middle", (4,)), ("first", (0,)), ("last", (9,)), ("double", (0, 10))]
)
def test_cls_tokens_are_at_their_configured_positions(cls_position: str, positions: tuple[int, ...]) -> None:
    model = tiny(cls_position=cls_position)
    assert model.cls_positions == positions
    assert model.grid_size == (3, 3)
    with torch.no_grad():
        model.pos_embed.zero_()
        for name, parameter in model.named_parameters():
            if name.startswith("cls_token"):
                parameter.fill_(7.0)
    tokens = model.tokens(torch.randn(2, 3, 12, 12))
    assert torch.equal((tokens == 7).all(-1).all(0).nonzero()[:, 0], torch.tensor(positions))


def test_the_two_cls_tokens_have_separate_names() -> None:
    names = {name for name, _ in tiny(cls_position="double").named_parameters() if name.startswith("cls")}
    assert names == {"cls_token_head", "cls_token_tail"}


def test_the_stream_of_a_half_precision_model_is_float32() -> None:
    model = tiny().bfloat16()
    pixels = torch.randn(2, 3, 12, 12, dtype=torch.bfloat16)
    stream = model.tokens(pixels).float()
    assert model.layers[0].mixer(stream.bfloat16()).dtype == torch.bfloat16
    assert model.layers[0](stream).dtype == torch.float32
    assert model(pixels).dtype == torch.bfloat16
    assert relative_error(model(pixels).double(), reference(model, pixels)) < 5e-2


def test_training_drops_the_loss() -> None:
    torch.manual_seed(0)
    model = tiny(embed_dim=16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        labels = torch.randint(5, (16,))
        pixels = 0.1 * torch.randn(16, 3, 12, 12)
        # The class is the index of the bright patch.
        for image, label in zip(pixels, labels.tolist(), strict=True):
            image[:, 4 * (label // 3) : 4 * (label // 3) + 4, 4 * (label % 3) : 4 * (label % 3) + 4] += 1
        loss = functional.cross_entropy(model(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1.4
    assert losses[-1] < 0.5 * losses[0]


def test_the_head_can_be_replaced_or_omitted() -> None:
    model = tiny()
    pixels = torch.randn(2, 3, 12, 12)
    model.reset_classifier(3)
    assert model.get_classifier().out_features == model.num_classes == 3
    assert model(pixels).shape == (2, 3)
    model.reset_classifier(0)
    features = model.forward_features(pixels)
    assert torch.equal(model(pixels), model.forward_head(features, pre_logits=True))
    with pytest.raises(OptionError, match="global_pool is 'avg'"):
        model.reset_classifier(3, "avg")


def test_decay_parameters_have_no_weight_decay() -> None:
    parameters = tiny(depth=1).no_weight_decay()
    mixer = {f"layers.0.mixer.{name}" for name in ("A_log", "A_b_log", "D", "D_b")}
    assert parameters == {"pos_embed", "cls_token", *mixer}


def test_invalid_inputs_are_refused() -> None:
    with pytest.raises(InputError, match="8x12 pixels; this model takes 12x12"):
        tiny()(torch.randn(1, 3, 8, 12))
    with pytest.raises(OptionError, match="did you mean 'middle'"):
        tiny(cls_position="midle")


def test_timm_builds_every_size() -> None:
    timm = pytest.importorskip("timm", reason="needs timm", exc_type=ImportError)
    vim_timm.register_with_timm()
    vim_timm.register_with_timm()
    assert set(timm.list_models("vim_*")) == set(vim_timm.NAMES)
    with torch.device("meta"):
        widths = {name: timm.create_model(name).embed_dim for name in vim_timm.NAMES}
    assert [widths[name] for name in vim_timm.NAMES] == [192, 384, 768, 192, 384]
    model = timm.create_model("vim_tiny_patch16_224", num_classes=7, img_size=32, depth=2, cls_position="last")
    assert isinstance(model, VisionMamba)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 7)
    assert timm.data.resolve_model_data_config(model)["crop_pct"] == 0.875
    with torch.device("meta"):
        fine = timm.create_model("vim_tiny_patch16_stride8_224")
    assert fine.grid_size == (27, 27)


def test_timm_loads_a_local_checkpoint(tmp_path: object) -> None:
    timm = pytest.importorskip("timm", reason="needs timm", exc_type=ImportError)
    vim_timm.register_with_timm()
    options = {"img_size": 32, "depth": 1}
    saved = VisionMamba(**options)
    torch.save({"model": saved.state_dict()}, f"{tmp_path}/vim.pth")
    loaded = timm.create_model("vim_tiny_patch16_224", checkpoint_path=f"{tmp_path}/vim.pth", **options)
    pixels = torch.randn(1, 3, 32, 32)
    assert torch.equal(loaded(pixels), saved(pixels))
