"""`Flow`: write an adapter as a forward pass, get the chain of frozen stages."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from unilinattn.errors import UncoveredError, nearest
from unilinattn.mixers import CoreMixer, Toeplitz
from unilinattn.operator.deferred import Deferred
from unilinattn.operator.stages import Branch, Center, Chain, Matrix, Mix, Scale, Stage, Unmapped, run

_SLOPES = {
    "silu": lambda p: torch.sigmoid(p),
    "swish": lambda p: torch.sigmoid(p),
    "relu": lambda p: (p > 0).to(p.dtype),
    "relu2": lambda p: torch.relu(p),
    "gelu": lambda p: 0.5 * (1 + torch.erf(p * 2**-0.5)),
    "gelu_new": lambda p: 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (p + 0.044715 * p**3))),
    "gelu_pytorch_tanh": lambda p: 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (p + 0.044715 * p**3))),
    "linear": lambda p: torch.ones_like(p),
}
"""Frozen slopes (f(p) - f(0)) / p in closed form: no division by p. All of these have f(0) = 0."""


class Flow:
    """A layer's forward pass on the observed input, recorded stage by stage.

    Each method appends one stage, frozen on the current `value`. Values, and factors that are frozen on them, are
    computed only when something asks for them: a map of the core needs no norm of what the core returns. Nothing is
    detached: built with gradients on, the same pass is differentiable, and exactly the host's.
    """

    def __init__(self, x: Tensor, *, port: str = "x") -> None:
        """Start from what enters the layer at a port: (batch, length, channel)."""
        self.port = port
        self.inputs: dict[str, Tensor] = {port: x}
        self._sizes = x.shape[:2]
        self._begun: Callable[[], Tensor] = lambda: x
        self._stages: dict[str, list[Stage]] = {port: []}
        self._pending: list[Stage] = []
        self.before_output: Tensor | None = None
        """The input of the output projection, kept where gradients are on: what attribution differentiates by."""

    @property
    def chains(self) -> dict[str, Chain]:
        """The stages so far, from each port."""
        return {port: tuple(stages) for port, stages in self._stages.items()}

    @property
    def chain(self) -> Chain:
        """The stages so far from the port that the flow started at."""
        return tuple(self._stages[self.port])

    @property
    def value(self) -> Tensor:
        """What the stages so far make of the observed input, biases included: (batch, length, channel)."""
        return self.deferred()()

    def deferred(self) -> Callable[[], Tensor]:
        """Return a function that computes `value` as it is at this stage: for factors that are frozen on it."""
        if self._pending:
            stages, before = self._pending, self._begun
            self._begun, self._pending = Deferred(lambda: run(stages, before())), []
        return self._begun

    def stage(self, stage: Stage) -> "Flow":
        """Append any stage; where ports were merged it stands on each of their chains, its bias on one."""
        for port, stages in self._stages.items():
            stages.append(stage if port == self.port else stage.unbiased())
        self._pending.append(stage)
        return self

    def fork(self) -> "Flow":
        """Start a flow of its own from the current value: one chain of a branch."""
        return Flow(self.value)

    def join(self, *forks: "Flow", role: str) -> "Flow":
        """Append the sum of forks as a branch; a fork without stages is the identity."""
        self.stage(Branch(role, tuple(fork.chain for fork in forks)))
        values = [fork.deferred() for fork in forks]
        return self._go_on(lambda: torch.stack([value() for value in values]).sum(0))

    def merge(self, other: "Flow") -> "Flow":
        """Add what another port's flow carries; the stages from here on are shared by both ports."""
        one, two = self.deferred(), other.deferred()
        self.inputs |= other.inputs
        self._stages |= {port: list(chain) for port, chain in other.chains.items()}
        return self._go_on(lambda: one() + two())

    def shift(self, mix: Tensor) -> "Flow":
        """Add `mix` (batch|1, length|1, channel) times the previous token minus the current one: RWKV's token shift."""
        batch, length = self._sizes
        last = torch.tensor([[0.0, 1.0]], dtype=mix.dtype, device=mix.device)
        previous = self.fork().stage(Mix("shift", Toeplitz(last, batch=batch, length=length)))
        return self.join(self.fork().scale(1 - mix, role="shift"), previous.scale(mix, role="shift"), role="shift")

    def matrix(self, weight: Tensor, bias: Tensor | None = None, *, role: str) -> "Flow":
        """Multiply each token by a weight (out, in)."""
        if role == "output" and self.before_output is None:
            self.mark_output()
        return self.stage(Matrix(role, weight, bias))

    def mark_output(self) -> None:
        """Note that what follows is the output projection, so that gradients can be taken before it."""
        if torch.is_grad_enabled():
            self.before_output = self.value

    def scale(self, scale: Tensor | Callable[[], Tensor] | None, bias: Tensor | None = None, *, role: str) -> "Flow":
        """Multiply by frozen factors (batch|1, length|1, group); None, as hosts give for no mask, changes nothing."""
        if scale is None:
            return self
        return self.stage(Scale(role, scale if isinstance(scale, Tensor) else Deferred(scale), bias))

    def conv(self, weight: Tensor, bias: Tensor | None = None) -> "Flow":
        """Convolve each channel causally; weight (channel, 1, tap) as in torch, the last tap on the current token."""
        batch, length = self._sizes
        kernel = weight.squeeze(1).flip(-1)
        return self.stage(Mix("conv", Toeplitz(kernel, batch=batch, length=length), bias))

    def activation(self, name: str) -> "Flow":
        """Scale by the activation's slope on the current value: s = (f(p) - f(0)) / p."""
        if name not in _SLOPES:
            raise UncoveredError(f"no frozen slope is known for the activation {name!r}" + nearest(name, _SLOPES))
        before = self.deferred()
        return self.scale(lambda: _SLOPES[name](before()), role="act")

    def core(self, mixer: CoreMixer, *, skip: Tensor | None = None) -> "Flow":
        """Mix tokens by a core mixer, with a skip D of one factor a head or channel beside it."""
        mix = Mix("core", mixer)
        if skip is None:
            return self.stage(mix)
        return self.stage(Branch("core", ((mix,), (Scale("skip", skip[None, None]),))))

    def gate(self, factor: Tensor | Callable[[], Tensor]) -> "Flow":
        """Multiply by a frozen gate (batch, length, channel), or by what a function returns when it is first needed."""
        return self.scale(factor, role="gate")

    def rms_norm(self, weight: Tensor | None, eps: float, *, groups: int = 1) -> "Flow":
        """Divide by the frozen root mean square over each group of channels, then multiply by the weight."""
        self._size(eps, groups)
        return self.scale(None if weight is None else weight[None, None], role="norm")

    def layer_norm(self, weight: Tensor | None, bias: Tensor | None, *, eps: float, groups: int = 1) -> "Flow":
        """Centre each group of channels, divide by its frozen deviation, multiply by the weight, add the bias."""
        self.stage(Center("norm", groups))
        self._size(eps, groups)
        return self.scale(None if weight is None else weight[None, None], bias, role="norm")

    def residual(self, x: Tensor) -> "Flow":
        """Add the layer's own observed input to everything so far: the residual becomes a branch."""
        before = self.deferred()
        self._stages[self.port] = [Branch("output", (self.chain, ()))]
        return self._go_on(lambda: before() + x)

    def _size(self, eps: float, groups: int) -> None:
        """Divide by the frozen root mean square of each group of channels."""
        before = self.deferred()
        self.scale(lambda: torch.rsqrt(before().unflatten(2, (groups, -1)).pow(2).mean(-1) + eps), role="norm")

    def _go_on(self, value: Callable[[], Tensor]) -> "Flow":
        """Go on from a value that the stages so far make, computed otherwise."""
        self._begun, self._pending = Deferred(value), []
        return self

    def unmapped(self, role: str, reason: str, width: int) -> "Flow":
        """Append a part that cannot be expressed; only a use of it raises the reason."""
        return self.stage(Unmapped(role, reason, width))


def silu(gate: Tensor) -> Tensor:
    """SiLU of a gate's pre-activation, the whole of it frozen."""
    return functional.silu(gate)
