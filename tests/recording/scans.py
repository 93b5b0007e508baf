"""A stand-in for mamba-ssm and causal-conv1d, which need a GPU: their functions by the formulas, token by token."""

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Any = None, seq_idx: Any = None, activation: Any = None
) -> Tensor:
    convolved = functional.conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=len(weight))
    convolved = convolved[..., : x.shape[-1]]
    return convolved if activation is None else functional.silu(convolved)


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    delta = delta if delta_bias is None else delta + delta_bias[:, None]
    delta = functional.softplus(delta) if delta_softplus else delta
    width, length = u.shape[1:]

    def at(factor: Tensor, t: int) -> Tensor:
        """(batch or 1, channel, state) of token t."""
        if factor.ndim == 2:
            return factor[None]
        grouped = factor.unsqueeze(1) if factor.ndim == 3 else factor
        return grouped[..., t].repeat_interleave(width // grouped.shape[1], 1)

    state, outputs = u.new_zeros(len(u), width, A.shape[1]), []
    for t in range(length):
        step = delta[:, :, t, None]
        state = torch.exp(step * A) * state + step * at(B, t) * u[:, :, t, None]
        outputs.append((state * at(C, t)).sum(-1))
    y = torch.stack(outputs, 2)
    y = y if D is None else y + D[:, None] * u
    y = y if z is None else y * functional.silu(z)
    return (y, state) if return_last_state else y


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Any,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Any,
    A: Tensor,
    B: Any = None,
    C: Any = None,
    D: Any = None,
    delta_bias: Any = None,
) -> Tensor:
    x, z = xz.chunk(2, 1)
    x = causal_conv1d_fn(x, conv1d_weight.squeeze(1), conv1d_bias, activation="silu")
    low, key, query = (x_proj_weight @ x).split([delta_proj_weight.shape[1], A.shape[1], A.shape[1]], 1)
    y = selective_scan_fn(x, delta_proj_weight @ low, A, key, query, D, z, delta_bias, delta_softplus=True)
    return functional.linear(y.transpose(1, 2), out_proj_weight, out_proj_bias)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
) -> Any:
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (functional.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    B, C = (side.repeat_interleave(x.shape[2] // side.shape[2], 2) for side in (B, C))
    state, outputs = x.new_zeros(len(x), *x.shape[2:], B.shape[-1]), []
    for t in range(x.shape[1]):
        written = torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], B[:, t])
        state = torch.exp(A * dt[:, t])[..., None, None] * state + written
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]))
    y = torch.stack(outputs, 1)
    y = y if D is None else y + (D if D.ndim == 2 else D[:, None]) * x
    y = y if z is None else y * functional.silu(z)
    return (y, state) if return_final_states else y


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Any,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    activation: str = "silu",
    rmsnorm_weight: Any = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Any = None,
    outproj_bias: Any = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor:
    inner = len(D) * headdim
    state = (zxbcdt.shape[-1] - 2 * inner - len(D)) // ngroups // 2
    z, x, dt = zxbcdt.split([inner, inner + 2 * ngroups * state, len(D)], -1)
    x = causal_conv1d_fn(x.transpose(1, 2), conv1d_weight, conv1d_bias, activation=activation).transpose(1, 2)
    x, key, query = x.split([inner, ngroups * state, ngroups * state], -1)
    sides = (side.unflatten(-1, (ngroups, -1)) for side in (key, query))
    y = mamba_chunk_scan_combined(
        x.unflatten(-1, (len(D), -1)), dt, A, *sides, chunk_size, D, None, dt_bias, dt_softplus=True
    ).flatten(2)
    y = y if norm_before_gate else y * functional.silu(z)
    grouped = y.unflatten(-1, (ngroups, -1))
    y = functional.rms_norm(grouped, grouped.shape[-1:], None, rmsnorm_eps).flatten(2) * rmsnorm_weight
    y = y * functional.silu(z) if norm_before_gate else y
    return functional.linear(y, outproj_weight, outproj_bias)


MODULES = {
    "mamba_ssm.ops.selective_scan_interface": (selective_scan_fn, mamba_inner_fn),
    "mamba_ssm.ops.triton.ssd_combined": (mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined),
    "causal_conv1d": (causal_conv1d_fn,),
}
"""The functions by the module that has them in the packages."""


@contextmanager
def installed() -> Iterator[None]:
    """Let the functions be found under the qualified names of the packages."""
    for name, functions in MODULES.items():
        module = types.ModuleType(name)
        vars(module).update({function.__name__: function for function in functions})
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in MODULES:
            del sys.modules[name]


WIDTH, INNER, STATE, RANK, HEADS = 8, 12, 5, 3, 3


class Selective(nn.Module):
    """Mamba by its parts, with groups of keys."""

    def __init__(self, groups: int = 0) -> None:
        super().__init__()
        self.groups = groups
        self.into, self.out = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)
        self.conv = nn.Conv1d(INNER, INNER, 4, groups=INNER)
        self.low = nn.Linear(INNER, RANK + 2 * STATE * max(groups, 1))
        self.step = nn.Linear(RANK, INNER)
        self.rate, self.skip = nn.Parameter(torch.randn(INNER, STATE)), nn.Parameter(torch.randn(INNER))

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = self.into(x).transpose(1, 2).chunk(2, 1)
        inner = causal_conv1d_fn(inner, self.conv.weight.squeeze(1), self.conv.bias, activation="silu")
        low, key, query = self.low(inner.transpose(1, 2)).split([RANK, *[STATE * max(self.groups, 1)] * 2], -1)
        key, query = (side.transpose(1, 2) for side in (key, query))
        if self.groups:
            key, query = (side.unflatten(1, (self.groups, STATE)) for side in (key, query))
        delta = functional.linear(low, self.step.weight).transpose(1, 2)
        y, _ = selective_scan_fn(
            inner, delta, -self.rate.exp(), key, query, self.skip, gate, self.step.bias, True, return_last_state=True
        )
        return self.out(y.transpose(1, 2))


class Fixed(Selective):
    """The same with keys and queries that no token decides."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query = (nn.Parameter(torch.randn(INNER, STATE)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.into(x).transpose(1, 2)[:, :INNER]
        delta = functional.softplus(self.step(self.low(x.repeat(1, 1, 2)[..., :INNER])[..., :RANK])).transpose(1, 2)
        return self.out(selective_scan_fn(inner, delta, -self.rate.exp(), self.key, self.query).transpose(1, 2))


class Inner(Selective):
    """Mamba by its one fused function."""

    def forward(self, x: Tensor) -> Tensor:
        return mamba_inner_fn(
            self.into(x).transpose(1, 2),
            self.conv.weight,
            self.conv.bias,
            self.low.weight,
            self.step.weight,
            self.out.weight,
            self.out.bias,
            -self.rate.exp(),
            D=self.skip,
            delta_bias=self.step.bias,
        )


class Dual(nn.Module):
    """Mamba-2 by its scan, with a gate and a skip for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 2 * INNER + 2 * STATE + HEADS), nn.Linear(INNER, WIDTH)
        self.rate, self.bias = nn.Parameter(torch.randn(HEADS)), nn.Parameter(torch.randn(HEADS))
        self.skip = nn.Parameter(torch.randn(HEADS, INNER // HEADS))

    def forward(self, x: Tensor) -> Tensor:
        gate, x, key, query, step = self.into(x).split([INNER, INNER, STATE, STATE, HEADS], -1)
        gate, x = (side.unflatten(-1, (HEADS, -1)) for side in (gate, x))
        y = mamba_chunk_scan_combined(
            x,
            step,
            -self.rate.exp(),
            key.unsqueeze(2),
            query.unsqueeze(2),
            4,
            self.skip,
            gate,
            self.bias,
            dt_softplus=True,
            dt_limit=(0.2, 2.0),
        )
        return self.out(y.flatten(2))


class Split(nn.Module):
    """Mamba-2 by its one fused function."""

    def __init__(self, *, before: bool = True, groups: int = 1) -> None:
        super().__init__()
        side = 2 * groups * STATE
        self.before, self.groups = before, groups
        self.into, self.out = nn.Linear(WIDTH, 2 * INNER + side + HEADS), nn.Linear(INNER, WIDTH)
        self.conv = nn.Conv1d(INNER + side, INNER + side, 4, groups=INNER + side)
        self.rate, self.bias, self.skip = (nn.Parameter(torch.randn(HEADS)) for _ in range(3))
        self.norm = nn.Parameter(torch.randn(INNER))

    def forward(self, x: Tensor) -> Tensor:
        return mamba_split_conv1d_scan_combined(
            self.into(x),
            self.conv.weight.squeeze(1),
            self.conv.bias,
            self.bias,
            -self.rate.exp(),
            self.skip,
            4,
            rmsnorm_weight=self.norm,
            outproj_weight=self.out.weight,
            outproj_bias=self.out.bias,
            headdim=INNER // HEADS,
            ngroups=self.groups,
            norm_before_gate=self.before,
        )


LAYERS = {
    "S6": Selective,
    "S6, groups of keys": lambda: Selective(groups=3),
    "S6, fixed keys and queries": Fixed,
    "fused S6": Inner,
    "SSD": Dual,
    "fused SSD": Split,
    "fused SSD, the gate first, groups": lambda: Split(before=False, groups=3),
}
