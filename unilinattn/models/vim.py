"""Vision Mamba (ViM): images as sequences of patches, mixed by Mamba in both directions."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.errors import InputError, OptionError, nearest
from unilinattn.models.numerics import working_dtype

CLS_POSITIONS = ("middle", "first", "last", "double")


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32 at least."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        """Return the normalised tokens in the dtype of the computation."""
        x = x.to(working_dtype(x))
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight.to(x.dtype)


def selective_scan(
    u: Float[Tensor, "batch length channel"],
    dt: Float[Tensor, "batch length channel"],
    A: Float[Tensor, "channel state"],
    B: Float[Tensor, "batch length state"],
    C: Float[Tensor, "batch length state"],
) -> Float[Tensor, "batch length channel"]:
    """Return y_t = C_t h_t for h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t, token by token."""
    # Unbound once: indexing in the loop would allocate a full-size zero tensor per token in the backward pass.
    decays = torch.exp(dt[..., None] * A).unbind(1)
    writes = ((dt * u)[..., None] * B[:, :, None]).unbind(1)
    state = torch.zeros_like(writes[0])
    states = []
    for decay, write in zip(decays, writes, strict=True):
        state = torch.addcmul(write, decay, state)
        states.append(state)
    # Read at once: the steps of the loop, not their arithmetic, take the time of small models.
    return (torch.stack(states, dim=1) * C[:, :, None]).sum(-1)


class BiMamba(nn.Module):
    """The mixer of ViM: Mamba forwards and, with separate weights, backwards, between shared projections.

    Takes and returns (batch, length, d_model), without residual or norm. x and z are projected once. Each
    direction has a separate convolution, SiLU, selective scan and skip; parameters ending in `_b` belong to the
    backward direction. Both are gated by SiLU(z), and the output projection takes their sum, halved if `divide_out`.
    The block of
    Zhu, Liao, Zhang, Wang, Liu and Wang, "Vision Mamba: Efficient Visual Representation Learning with
    Bidirectional State Space Model" (2024), Algorithm 1, in the form ("v2") of all published checkpoints.

    Omitted from the original: the one-directional form, the form whose directions share all weights except A ("v1"),
    layer scale, and the step-by-step mode with a state. The scan runs in float32 at least.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | None = None,
        conv_bias: bool = True,
        bias: bool = False,
        divide_out: bool = True,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
    ) -> None:
        super().__init__()
        self.d_model = d_model
        self.d_state = d_state
        self.d_conv = d_conv
        self.d_inner = expand * d_model
        self.dt_rank = math.ceil(d_model / 16) if dt_rank is None else dt_rank
        self.divide_out = divide_out
        inner = self.d_inner

        def convolution() -> nn.Conv1d:
            return nn.Conv1d(inner, inner, d_conv, padding=d_conv - 1, groups=inner, bias=conv_bias)

        def selection() -> nn.Linear:
            return nn.Linear(inner, self.dt_rank + 2 * d_state, bias=False)

        def step() -> nn.Linear:
            layer = nn.Linear(self.dt_rank, inner)
            nn.init.uniform_(layer.weight, -(self.dt_rank**-0.5), self.dt_rank**-0.5)
            dt = torch.empty(inner).uniform_(math.log(dt_min), math.log(dt_max)).exp().clamp(min=1e-4)
            # The inverse of softplus, so that the initial steps lie between dt_min and dt_max.
            layer.bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
            return layer

        def decay() -> nn.Parameter:
            return nn.Parameter(torch.arange(1, d_state + 1, dtype=torch.float32).log().repeat(inner, 1))

        self.in_proj = nn.Linear(d_model, 2 * inner, bias=bias)
        self.conv1d, self.conv1d_b = convolution(), convolution()
        self.x_proj, self.x_proj_b = selection(), selection()
        self.dt_proj, self.dt_proj_b = step(), step()
        self.A_log, self.A_b_log = decay(), decay()
        self.D, self.D_b = nn.Parameter(torch.ones(inner)), nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, d_model, bias=bias)

    def forward(self, hidden_states: Float[Tensor, "batch length d_model"]) -> Float[Tensor, "batch length d_model"]:
        """Mix each channel over all tokens."""
        x, z = self.in_proj(hidden_states).chunk(2, dim=-1)
        ahead = self._scan(x, self.conv1d, self.x_proj, self.dt_proj, self.A_log, self.D)
        back = self._scan(x.flip(1), self.conv1d_b, self.x_proj_b, self.dt_proj_b, self.A_b_log, self.D_b).flip(1)
        mixed = (ahead + back) * functional.silu(z.to(ahead.dtype))
        if self.divide_out:
            mixed = mixed / 2
        return self.out_proj(mixed.to(hidden_states.dtype))

    def _scan(
        self, x: Tensor, conv: nn.Conv1d, x_proj: nn.Linear, dt_proj: nn.Linear, A_log: Tensor, D: Tensor
    ) -> Tensor:
        """Return one direction's output before the gate, in float32 at least."""
        x = functional.silu(conv(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        dt, B, C = x_proj(x).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        dtype = working_dtype(x)
        dt = functional.softplus(functional.linear(dt, dt_proj.weight).to(dtype) + dt_proj.bias.to(dtype))
        u, A = x.to(dtype), -A_log.to(dtype).exp()
        return selective_scan(u, dt, A, B.to(dtype), C.to(dtype)) + D.to(dtype) * u


class VimBlock(nn.Module):
    """One residual block: RMSNorm and BiMamba, added to the stream, which stays in float32 at least."""

    def __init__(self, mixer: BiMamba, eps: float) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm = RMSNorm(mixer.d_model, eps)

    def forward(self, stream: Float[Tensor, "batch length d_model"]) -> Float[Tensor, "batch length d_model"]:
        """Return the stream with the mixer's output added."""
        return stream + self.mixer(self.norm(stream).to(self.mixer.in_proj.weight.dtype))


class PatchEmbed(nn.Module):
    """A linear map of each image patch to one token, row by row."""

    def __init__(self, img_size: tuple[int, int], patch_size: int, stride: int, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        self.img_size = img_size
        self.grid_size = ((img_size[0] - patch_size) // stride + 1, (img_size[1] - patch_size) // stride + 1)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, stride=stride)

    def forward(self, pixels: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch patch embed_dim"]:
        """Return the tokens of a batch of images.

        Raises `InputError` if the images do not have the model's size.
        """
        if tuple(pixels.shape[-2:]) != self.img_size:
            came, wanted = "x".join(map(str, pixels.shape[-2:])), "x".join(map(str, self.img_size))
            raise InputError(f"The image is {came} pixels; this model takes {wanted}: resize it, or pass img_size.")
        return self.proj(pixels).flatten(2).transpose(1, 2)


class VisionMamba(nn.Module):
    """The image classifier of ViM: patches, CLS token, positions, BiMamba blocks, norm, head.

    Zhu et al., "Vision Mamba" (2024); the parameter names and shapes are those of the published checkpoints,
    which load with `strict=True`: `patch_embed.proj`, `cls_token`, `pos_embed`, `layers.<i>.mixer` (see
    `BiMamba`), `layers.<i>.norm.weight`, `norm_f.weight`, `head`. The defaults are the tiny one's; small has
    `embed_dim` 384, base 768, and the models finetuned on a finer grid have `stride` 8.

    `cls_position` puts the CLS token in the middle of the patches (as published), first, last, or at both ends
    (`cls_token_head` and `cls_token_tail`, whose outputs are averaged). `cls_positions` are the positions in the
    sequence, `grid_size` the rows and columns of patches. `num_classes=0` omits the head.

    Omitted from the original: dropout and stochastic depth, rotary positions, LayerNorm, pooling without a CLS
    token, random CLS positions and token orders, blocks that alternate between flipped sequences, and resizing of the
    positional embedding.

    Raises `OptionError` if `cls_position` is unknown.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        stride: int | None = None,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 192,
        depth: int = 24,
        d_state: int = 16,
        cls_position: str = "middle",
        divide_out: bool = True,
        norm_epsilon: float = 1e-5,
    ) -> None:
        super().__init__()
        if cls_position not in CLS_POSITIONS:
            raise OptionError(f"cls_position is {cls_position!r}{nearest(cls_position, CLS_POSITIONS)}")
        size = (img_size, img_size) if isinstance(img_size, int) else img_size
        self.num_classes = num_classes
        self.num_features = self.embed_dim = embed_dim
        self.cls_position = cls_position
        self.patch_embed = PatchEmbed(size, patch_size, stride or patch_size, in_chans, embed_dim)
        count = 2 if cls_position == "double" else 1
        if cls_position == "double":
            self.cls_token_head = nn.Parameter(torch.zeros(1, 1, embed_dim))
            self.cls_token_tail = nn.Parameter(torch.zeros(1, 1, embed_dim))
        else:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, self.patch_embed.num_patches + count, embed_dim))
        for token in self.parameters(recurse=False):
            nn.init.trunc_normal_(token, std=0.02)
        mixers = [BiMamba(embed_dim, d_state, divide_out=divide_out) for _ in range(depth)]
        self.layers = nn.ModuleList([VimBlock(mixer, norm_epsilon) for mixer in mixers])
        self.norm_f = RMSNorm(embed_dim, norm_epsilon)
        self.head = self._new_head(num_classes)
        for mixer in mixers:
            # Every layer adds to the stream once, so this scale keeps its variance independent of depth.
            with torch.no_grad():
                mixer.out_proj.weight /= math.sqrt(depth)

    @property
    def grid_size(self) -> tuple[int, int]:
        """Numbers of rows and columns of patches."""
        return self.patch_embed.grid_size

    @property
    def cls_positions(self) -> tuple[int, ...]:
        """Positions of the CLS tokens in the sequence."""
        patches = self.patch_embed.num_patches
        where = {"middle": (patches // 2,), "first": (0,), "last": (patches,), "double": (0, patches + 1)}
        return where[self.cls_position]

    def tokens(self, pixels: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch token embed_dim"]:
        """Return the input of the first block: patches and CLS tokens with their positional embeddings."""
        patches = self.patch_embed(pixels)
        if self.cls_position == "double":
            head, tail = (t.expand(len(patches), -1, -1) for t in (self.cls_token_head, self.cls_token_tail))
            pieces = [head, patches, tail]
        else:
            position = self.cls_positions[0]
            pieces = [patches[:, :position], self.cls_token.expand(len(patches), -1, -1), patches[:, position:]]
        return torch.cat(pieces, dim=1) + self.pos_embed

    def forward_features(
        self, pixels: Float[Tensor, "batch channel height width"]
    ) -> Float[Tensor, "batch token embed_dim"]:
        """Return all tokens after the final norm."""
        tokens = self.tokens(pixels)
        stream = tokens.to(working_dtype(tokens))
        for layer in self.layers:
            stream = layer(stream)
        return self.norm_f(stream).to(tokens.dtype)

    def forward_head(
        self, features: Float[Tensor, "batch token embed_dim"], pre_logits: bool = False
    ) -> Float[Tensor, "batch classes"]:
        """Return the logits from the CLS token, or the head's input if `pre_logits`."""
        pooled = features[:, list(self.cls_positions)].mean(1)
        return pooled if pre_logits else self.head(pooled)

    def forward(self, pixels: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch classes"]:
        """Return the logits of a batch of images."""
        return self.forward_head(self.forward_features(pixels))

    def get_classifier(self) -> nn.Module:
        """Return the head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a fresh one.

        Raises `OptionError` if `global_pool` is not 'token' or None.
        """
        if global_pool not in (None, "token"):
            raise OptionError(f"global_pool is {global_pool!r}; this model reads its CLS token: pass 'token' or None.")
        self.num_classes = num_classes
        self.head = self._new_head(num_classes)

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters to train without weight decay."""
        kinds = {"pos_embed", "cls_token", "cls_token_head", "cls_token_tail", "A_log", "A_b_log", "D", "D_b"}
        return {name for name, _ in self.named_parameters() if name.rpartition(".")[2] in kinds}

    def _new_head(self, num_classes: int) -> nn.Module:
        if num_classes < 1:
            return nn.Identity()
        head = nn.Linear(self.embed_dim, num_classes)
        nn.init.trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        return head
