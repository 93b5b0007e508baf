"""The released code of HMA on images, against its steps written out in float64, and its refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from unilinattn.errors import InputError, OptionError
from unilinattn.models.vim import BiMamba, VisionMamba
from unilinattn.scoring.published import token_weights
from unilinattn.testing.hosts import randomize
from unilinattn.tracing.trace import Trace

BATCH, SIDE, PATCH = 2, 12, 4
PATCHES = (SIDE // PATCH) ** 2
METHODS = ("raw", "rollout", "attribution")


def vision_mamba(position: str = "middle", depth: int = 5) -> nn.Module:
    torch.manual_seed(0)
    host = VisionMamba(
        SIDE, PATCH, in_chans=1, num_classes=5, embed_dim=8, depth=depth, d_state=3, cls_position=position
    )
    return randomize(host.double().eval())


def vision_transformer() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=SIDE,
        patch_size=PATCH,
        num_channels=1,
        hidden_size=8,
        num_hidden_layers=5,
        num_attention_heads=2,
        intermediate_size=12,
        num_labels=5,
        attn_implementation="eager",
    )
    return randomize(transformers.ViTForImageClassification(config).double().eval())


HOSTS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "vim": (vision_mamba, PATCHES // 2),
    "vim, CLS first": (lambda: vision_mamba("first"), 0),
    "vit": (vision_transformer, 0),
}


def pixels() -> Tensor:
    return torch.randn(BATCH, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def traced(host: nn.Module) -> Trace:
    return ula.trace(host, pixels(), progress=False)


def rescaled(values: Tensor) -> Tensor:
    return (values - values.min()) / (values.max() - values.min())


def stream_gradients(host: nn.Module, at: int) -> list[Tensor]:
    """The gradient of the predicted logit at the sum of each mixer's output and the stream, for one image."""
    sums: list[Tensor] = []
    if isinstance(host, VisionMamba):
        for block in host.layers:
            block.register_forward_hook(lambda _, __, output: sums.append(output))
        logits = host(pixels()[at : at + 1])
    else:
        for block in host.vit.layers if hasattr(host.vit, "layers") else host.vit.encoder.layer:
            block.layernorm_after.register_forward_pre_hook(lambda _, args: sums.append(args[0]))
        logits = host(pixels()[at : at + 1]).logits
    return [gradient[0] for gradient in torch.autograd.grad(logits.max(), sums)]


def released(method: str, build: Callable[[], nn.Module], cls: int, *, sign: str = "", start: int = 3) -> Tensor:
    """Scores of CLS by the steps of `generate_raw_attn`, `generate_rollout` and `generate_mamba_attr`, image by image.

    `start`: 15/24 of five layers is 3.125.
    """
    signs = {"keep": lambda a: a, "clamp": lambda a: a.clamp(min=0), "abs": torch.abs}
    sign = sign or ("clamp" if method == "attribution" else "keep")
    images = []
    for at in range(BATCH):
        maps, count = [], PATCHES + 1
        gradients = stream_gradients(build(), at)
        for layer, gradient in zip(traced(build()).layers, gradients, strict=True):
            heads = layer.operator.matrix(heads=None)[at, :, cls]
            heads = signs[sign](torch.stack([torch.where(torch.arange(count) == cls, 0.0, head) for head in heads]))
            if method != "rollout":
                heads = rescaled(heads)
            row = heads.sum(0) / len(heads)
            if method == "attribution":
                row = row * rescaled(gradient.clamp(min=0).max(1).values)
            maps.append(row)
        if method == "raw":
            images.append(torch.stack(maps[start:]).mean(0).clamp(min=0))
            continue
        # A row that is added to a square matrix is added to each of its rows.
        matrices = [row + torch.eye(count, dtype=torch.float64) for row in maps]
        matrices = [matrix / matrix.sum(1, keepdim=True) for matrix in matrices]
        joint = matrices[start]
        for matrix in matrices[start + 1 :]:
            joint = matrix @ joint
        images.append(joint[cls].clamp(min=0))
    return torch.stack(images)


def explained(host: nn.Module | Trace, method: str, **options: Any) -> Any:
    run = host if isinstance(host, Trace) else traced(host)
    return ula.explain(run, method=method, variant="published-code", progress=False, **options)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", HOSTS)
def test_scores_are_those_of_the_released_steps(name: str, method: str) -> None:
    build, cls = HOSTS[name]
    result = explained(build(), method, target=cls)
    assert result.dims == ("batch", "key")
    assert result.options["start_layer"] == 15 / 24
    expected = released(method, build, cls)
    assert torch.allclose(result.scores, expected, rtol=1e-10, atol=1e-12)
    assert float(expected.max()) > 1e-6
    printed = ula.explain(traced(build()), method=method, target=cls, start_layer=3) if method != "raw" else None
    assert printed is None or not torch.allclose(printed.scores, expected, rtol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("change", [{"sign": "keep"}, {"sign": "abs"}, {"start_layer": 1}], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_signs_and_layers_can_be_chosen(method: str, change: dict[str, Any]) -> None:
    build, cls = HOSTS["vim"]
    expected = released(method, build, cls, sign=change.get("sign", ""), start=change.get("start_layer", 3))
    scores = explained(build(), method, target="cls", **change).scores
    assert torch.allclose(scores, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("heads", "reduced"), [("max", torch.amax), ("min", torch.amin), ([1, 4], None)], ids=["max", "min", "several"]
)
def test_heads_can_be_reduced_otherwise(heads: Any, reduced: Any) -> None:
    build, cls = HOSTS["vim"]
    host_trace = traced(build())
    rows = [layer.operator.rows(cls, heads=None) for layer in host_trace.layers[3:]]
    rows = [torch.where(torch.arange(PATCHES + 1) == cls, 0.0, each) for each in rows]
    values = [each[:, heads].mean(1) if reduced is None else reduced(each, 1) for each in rows]
    expected = torch.eye(PATCHES + 1, dtype=torch.float64)[cls].repeat(BATCH, 1)
    for value in reversed(values):
        expected = (expected + value) / (1 + value.sum(1, keepdim=True))
    scores = explained(host_trace, "rollout", target=cls, heads=heads).scores
    assert torch.allclose(scores, expected.clamp(min=0), rtol=1e-10, atol=1e-12)


def scan_row(mixer: BiMamba, tokens: Tensor, cls: int, *, of_cls: bool) -> Tensor:
    """C_cls prod_k exp(dt_k A) dt_j B_j for each channel and key j, token by token, in both directions.

    The product runs over the tokens between j and CLS, and over CLS only if `of_cls`.
    """
    values = mixer.in_proj(tokens).chunk(2, dim=-1)[0]
    count = tokens.shape[1]
    row = torch.zeros(len(tokens), mixer.d_inner, count, dtype=torch.float64)
    for back in (False, True):
        names = [f"{part}_b" if back else part for part in ("conv1d", "x_proj", "dt_proj")]
        conv, x_proj, dt_proj = (getattr(mixer, name) for name in names)
        x, decay = (values.flip(1) if back else values), -(mixer.A_b_log if back else mixer.A_log).exp()
        x = functional.silu(conv(x.transpose(1, 2))[..., :count]).transpose(1, 2)
        dt, b, c = x_proj(x).split([mixer.dt_rank, mixer.d_state, mixer.d_state], dim=-1)
        dt = functional.softplus(dt_proj(dt))
        place = count - 1 - cls if back else cls
        for j in range(place):
            steps = range(j + 1, place + of_cls)
            along = torch.stack([dt[:, k, :, None] * decay for k in steps] or [torch.zeros_like(decay)[None]]).sum(0)
            weights = (c[:, place, None] * along.exp() * dt[:, j, :, None] * b[:, j, None]).sum(-1)
            row[:, :, count - 1 - j if back else j] = weights
    return row


def test_rows_are_exact_where_the_released_vector_leaves_out_the_decay_of_cls() -> None:
    host, cls = vision_mamba(), PATCHES // 2
    layer = traced(host).layers[0]
    mixer = host.layers[0].mixer
    with torch.no_grad():
        tokens = host.layers[0].norm(host.tokens(pixels()))
        exact, shortened = (scan_row(mixer, tokens, cls, of_cls=of_cls) for of_cls in (True, False))
    rows = layer.operator.rows(cls, heads=None)
    others = torch.arange(PATCHES + 1) != cls
    ratio = (rows[..., others] / exact[..., others]).flatten()
    assert torch.allclose(ratio, ratio[0].expand_as(ratio), rtol=1e-8)
    assert not torch.allclose(shortened, exact, rtol=1e-3)


@pytest.mark.long
def test_weights_are_rescaled_over_real_tokens() -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=12, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
    )
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    host = randomize(transformers.BertForSequenceClassification(config).double().eval())
    text = ula.trace(host, {"input_ids": torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]]), "attention_mask": mask})
    layer, gradient = text.layers[0], torch.randn(2, 5, 8, dtype=torch.float64)
    plain = token_weights(gradient, layer)
    for size in (100, -100):
        gradient[~mask.bool()] = size
        assert torch.equal(token_weights(gradient, layer), plain)
    assert torch.allclose(plain[1, :3], rescaled(gradient[1, :3].clamp(min=0).max(1).values))
    single = ula.trace(host, torch.tensor([[6, 7, 8]]))
    for method in METHODS:
        padded = explained(text, method, target="cls").scores[1]
        assert torch.allclose(padded[:3], explained(single, method, target="cls").scores[0], rtol=1e-6)
        assert not padded[3:].any()


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_models_and_targets_without_cls_are_refused(method: str) -> None:
    causal = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=12, n_embd=8, n_layer=2, n_head=2)).eval()
    with pytest.raises(InputError, match=r"GPT2LMHeadModel has no class logits that read one token; take variant="):
        explained(ula.trace(causal, torch.tensor([[1, 2, 3]])), method, target=-1)
    host_trace = traced(vision_mamba())
    with pytest.raises(InputError, match=r"computes the row of CLS only; give target='cls'"):
        explained(host_trace, method)
    with pytest.raises(InputError, match=r"reads the tokens \[4\] behind its last layer, and the target is 0"):
        explained(host_trace, method, target=0)
    with pytest.raises(InputError, match=r"reads the tokens \[0, 10\] .* Give target='cls', or take variant='formula'"):
        explained(traced(vision_mamba("double")), method, target=0)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("raw", {"layers": [1]}, "variant='published-code' has no layers; leave it out. It takes start_layer"),
        ("raw", {"compose": "rollout"}, "variant='published-code' has no compose"),
        ("rollout", {"normalize": "rows"}, "variant='published-code' has no normalize"),
        ("rollout", {"discard": 0.5}, "variant='published-code' has no discard"),
        ("attribution", {"gradient": "per-head"}, "variant='published-code' has no gradient"),
        ("attribution", {"gradient_axis": "key"}, "variant='published-code' has no gradient_axis"),
        ("rollout", {"start_layer": 1.5}, "start_layer=1.5"),
    ],
)
def test_options_that_the_code_does_not_have_are_refused(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        explained(traced(vision_mamba()), method, target="cls", **options)
    with pytest.raises(OptionError, match="start_layer belongs to variant='published-code'"):
        ula.methods.Raw(start_layer=1)


def test_a_share_of_the_depth_is_rounded_down() -> None:
    host_trace = traced(vision_mamba())
    for share, layer in ((15 / 24, 3), (0.1, 0), (0.99, 4)):
        shared, numbered = (
            ula.explain(host_trace, method="rollout", start_layer=start, target=0) for start in (share, layer)
        )
        assert torch.equal(shared.scores, numbered.scores)
