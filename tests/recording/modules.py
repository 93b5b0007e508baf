"""Modules that mix tokens by functions of torch, in every layout of the tokens."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS = 16, 4


class First(nn.Module):
    """Returns the first of a module's results."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)[0]


class Batched(nn.Module):
    """torch's attention on (batch, token, channel)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class TokensFirst(nn.Module):
    """torch's attention on (token, batch, channel)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.attention(x, x, x, need_weights=False)[0].transpose(0, 1)


class Projected(nn.Module):
    """An attention between its projections; subclasses define `mix` of queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(*self.qkv(x).chunk(3, -1)))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError


class HeadsInTheBatch(Projected):
    """Attention by `bmm` on (batch * head, token, channel)."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, length, _ = q.shape
        q, k, v = (
            x.view(batch, length, HEADS, -1).transpose(1, 2).reshape(batch * HEADS, length, -1) for x in (q, k, v)
        )
        mixed = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
        return mixed.view(batch, HEADS, length, -1).transpose(1, 2).reshape(batch, length, -1)


class Angles(Projected):
    """Weights by the angle between a query and a key, as YOSO's, of which no share is linear in the tokens."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cosine = functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).mT
        return (1 - torch.acos(0.9 * cosine) / torch.pi) ** 8 @ v


class GroupedQueries(Projected):
    """Fused attention of repeated value heads, normed queries and a gate, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.mix(*self.qkv(x).chunk(3, -1)) * torch.sigmoid(x))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(2, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
        k, v = (x[:, :2].repeat_interleave(2, 1) for x in (k, v))
        return functional.scaled_dot_product_attention(self.norm(q), k, v, is_causal=True).transpose(1, 2).flatten(2)


class ActivatedValues(HeadsInTheBatch):
    """Attention over activated values, then a norm with a bias by hand, and an activated gate."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        mixed = functional.normalize(self.mix(q, k, functional.silu(v)), dim=-1) + self.out.bias
        return self.out(mixed * functional.silu(x))


class LinearAttention(Projected):
    """Attention without a softmax, in linear time: keys and values are summed first."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(2, (HEADS, -1)) for x in (q, k, v))
        q, k = functional.elu(q) + 1, functional.elu(k) + 1
        memory = torch.einsum("blhd,blhe->bhde", k, v)
        size = 1 / torch.einsum("blhd,bhd->blh", q, k.sum(1))
        return (torch.einsum("blhd,bhde->blhe", q, memory) * size[..., None]).flatten(2)


class Difference(Projected):
    """The difference of two softmaxes."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first, second = ((a @ b.mT).softmax(-1) for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True))
        return (first - 0.3 * second) @ v


class Windows(Projected):
    """Attention in shifted windows of a grid of tokens, which are rows of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        rows = x.view(batch, 4, 4, width).roll((-1, -1), (1, 2)).view(batch, 2, 2, 2, 2, width)
        windows = rows.permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, width)
        q, k, v = (x.unflatten(2, (HEADS, -1)).transpose(1, 2) for x in self.qkv(windows).chunk(3, -1))
        mixed = self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        mixed = mixed.view(batch, 2, 2, 2, 2, width).permute(0, 1, 3, 2, 4, 5).reshape(batch, 4, 4, width)
        return mixed.roll((1, 1), (1, 2)).view(batch, length, width)


class Channels(Projected):
    """Attention over channels, whose factors depend on all tokens and whose values do not."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q.mT @ k).softmax(-1) @ v.mT).mT


class ReducedKeys(nn.Module):
    """Keys and values of merged patches (PVT)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.merge, self.norm = nn.Conv2d(WIDTH, WIDTH, 2, 2), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        merged = self.norm(self.merge(x.mT.unflatten(2, (4, 4))).flatten(2).mT)
        k, v = (y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in self.kv(merged).chunk(2, -1))
        q = self.q(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        return self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


class MLPMixer(nn.Module):
    """A network over the tokens of each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), nn.Linear(7, 9), nn.Linear(9, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(functional.gelu(self.first(self.norm(x).mT))).mT


class Fourier(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fftn(x, dim=(1, 2)).real


class Conformer(nn.Module):
    """A convolution module with a gate and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 1)
        self.depthwise, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(functional.silu(self.norm(self.depthwise(functional.glu(self.first(x.mT), 1))))).mT


class Images(nn.Module):
    """Convolutions, a pool and a group norm over a grid of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.full, self.norm, self.out = nn.Conv2d(WIDTH, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Linear(8, WIDTH)
        self.pool = nn.AvgPool2d(3, 1, 1, count_include_pad=False)

    def forward(self, x: Tensor) -> Tensor:
        image = self.depthwise(x.mT.unflatten(2, (4, 4)))
        return self.out(self.norm(self.full(self.pool(image) - image)).flatten(2).mT)


class MergedPatches(nn.Module):
    """Neighbours joined, normed and projected (Swin)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(4 * WIDTH), nn.Linear(4 * WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        grid = x.unflatten(1, (4, 4))
        parts = [grid[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return self.out(self.norm(torch.cat(parts, -1))).flatten(1, 2)


class MeanAdded(nn.Module):
    """Every token reads the mean of all."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


class NormedByHand(Batched):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt())


class Scan(nn.Module):
    """A gated recurrence in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, states = torch.zeros_like(x[:, 0]), []
        for keep, token in zip(torch.sigmoid(self.gate(x)).unbind(1), x.unbind(1), strict=True):
            state = keep * state + (1 - keep) * token
            states.append(state)
        return torch.stack(states, 1)


class Packed(Projected):
    """Attention of packed sequences, (token, channel), each of which has one call of an attention function."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        super().__init__()
        self.lengths = list(lengths)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (x.unflatten(1, (HEADS, -1)).transpose(0, 1)[None].split(self.lengths, 2) for x in (q, k, v))
        mixed = [((a @ b.mT).softmax(-1) @ c).transpose(1, 2) for a, b, c in zip(*heads, strict=True)]
        return torch.cat(mixed, 1).reshape(len(q), -1).contiguous()


class GlobalToken(Projected):
    """A token of each sequence attends to all, the others to it and to a neighbour; numbers and a mask say where."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(len(v)), 2 + 3 * torch.arange(len(v))
        read = v[places][:, None]
        mixed = v.roll(1, 1) + (q @ read.mT).sigmoid() @ read
        mixed[places] = ((q[places][:, None] @ k.mT).softmax(-1) @ v)[:, 0]
        inner = torch.ones(v.shape[:2], dtype=torch.bool)
        inner[:, 0] = False
        written = torch.zeros_like(v)
        written[inner] = mixed[inner]
        return written


class ComplexStates(nn.Module):
    """A diagonal state space with complex numbers (S5, LRU), as a loop over tokens or by the matrix of its powers."""

    def __init__(self, *, loops: bool) -> None:
        super().__init__()
        self.loops, self.rates = loops, nn.Parameter(torch.randn(4, 2))
        self.into, self.out = (nn.Parameter(torch.randn(*size, 2)) for size in ((4, WIDTH), (WIDTH, 4)))

    def forward(self, x: Tensor) -> Tensor:
        into, out = torch.view_as_complex(self.into), torch.view_as_complex(self.out)
        decay = torch.exp(torch.complex(-self.rates[:, 0].exp(), self.rates[:, 1]))
        u = x.to(into.dtype) @ into.T
        if self.loops:
            state, states = torch.zeros_like(u[:, 0]), []
            for token in u.unbind(1):
                state = decay * state + token
                states.append(state)
            return (torch.stack(states, 1) @ out.T).real
        steps = torch.arange(x.shape[1])
        power = (steps[:, None] - steps)[..., None]
        kernel = torch.where(power >= 0, decay ** power.clamp(min=0), 0)
        return torch.view_as_real(torch.einsum("tsn,bsn->btn", kernel, u) @ out.T).sum(-1)


class ComplexGates(nn.Module):
    """Pairs of channels as complex numbers that gates turn, written in place; a sum is divided by a complex number."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.unflatten(-1, (WIDTH // 2, 2)).contiguous())
        size, angle = self.gate(x).chunk(2, -1)
        turn, y, state = torch.polar(torch.sigmoid(size), angle), torch.zeros_like(z), torch.zeros_like(z[:, 0])
        for step in range(x.shape[1]):
            state = state * turn[:, step]
            state += z[:, step].conj()
            y[:, step] = state
        return torch.view_as_real((y - 1j) / (1 + 2j)).flatten(-2)


class Shuffled(nn.Module):
    """Turns channels into tokens, 2 x 2 for each token of a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.widen(x.mean(1, keepdim=True) + x).view(len(x), 4, 4, 2, 2, WIDTH).transpose(2, 3)
        return self.out(rows.reshape(len(x), -1, WIDTH))


class Unfolded(nn.Module):
    """A convolution whose kernel is a softmax of each token (ConvBERT), and merged patches, by windows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.kernel, self.merge = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        windows = functional.unfold(self.value(x).mT[..., None], [3, 1], padding=[1, 0]).mT
        mixed = (windows.reshape(-1, WIDTH, 3) @ self.kernel(x).softmax(-1).reshape(-1, 3, 1)).view(x.shape)
        return self.merge(functional.unfold(mixed.mT.unflatten(2, (4, 4)), 2, stride=2).mT)


class Cross(nn.Module):
    """Attention to a second stream, with a residual and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.norm(x + self.attention(x, memory, memory)[0])


def _layer(**options: bool) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True, activation="gelu", **options)


TOKENS, GRID = (2, 7, WIDTH), (2, 16, WIDTH)


class Powers(Projected):
    """Squared activations and a cube."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (torch.relu(v).square() + v.pow(3)).cumsum(1) * torch.sigmoid(q)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "multi-head attention": (Batched, TOKENS),
    "multi-head attention, tokens first": (TokensFirst, TOKENS),
    "heads in the batch": (HeadsInTheBatch, TOKENS),
    "angles": (Angles, TOKENS),
    "grouped queries, gate, residual": (GroupedQueries, TOKENS),
    "activated values, biased norm, gate": (ActivatedValues, TOKENS),
    "linear attention": (LinearAttention, TOKENS),
    "difference of softmaxes": (Difference, TOKENS),
    "shifted windows": (Windows, GRID),
    "channel attention": (Channels, TOKENS),
    "reduced keys": (ReducedKeys, GRID),
    "encoder layer": (_layer(), TOKENS),
    "encoder layer, norm first": (_layer(norm_first=True), TOKENS),
    "mlp-mixer": (MLPMixer, TOKENS),
    "powers": (Powers, TOKENS),
    "fourier": (Fourier, TOKENS),
    "conformer": (Conformer, TOKENS),
    "convolutions of a grid": (Images, GRID),
    "merged patches": (MergedPatches, GRID),
    "mean added": (MeanAdded, TOKENS),
    "norm by hand": (NormedByHand, TOKENS),
    "gated recurrence": (Scan, TOKENS),
    "packed sequences": (lambda: Packed((2, 4, 1)), TOKENS[1:]),
    "packed sequences of one token": (lambda: Packed((1, 1)), (2, WIDTH)),
    "a global token": (GlobalToken, TOKENS),
    "complex states, a loop": (lambda: ComplexStates(loops=True), TOKENS),
    "complex states, powers": (lambda: ComplexStates(loops=False), TOKENS),
    "complex gates": (ComplexGates, TOKENS),
    "channels to tokens": (Shuffled, GRID),
    "windows of an image": (Unfolded, GRID),
}
"""Constructors by name, with the shape of an input."""

ATTENTION = (
    *("multi-head attention", "multi-head attention, tokens first", "heads in the batch", "shifted windows"),
    "activated values, biased norm, gate",
)
"""Modules whose core is a softmax, so that its rows add up to one."""
