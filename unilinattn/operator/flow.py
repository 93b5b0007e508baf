"""`Flow`: an adapter's forward pass, recorded as a chain of frozen stages."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy

import torch
from torch import Tensor
from torch.nn import functional

from unilinattn.call.stored import Stored
from unilinattn.errors import UncoveredError, nearest
from unilinattn.mixers import CoreMixer, Toeplitz
from unilinattn.operator.deferred import Deferred
from unilinattn.operator.stages import Branch, Center, Chain, Matrix, Mix, Scale, Stage, Unmapped, run, walk

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
"""Frozen slopes (f(p) - f(0)) / p in closed form, without a division by p; all of these have f(0) = 0."""


Evaluate = Callable[[Sequence[Stage], Tensor], Tensor]

# No argument can take its place: the flows of a layer, and the values that it reads from them, are made inside its
# adapter, which other packages write too and which gets a host's call only.
_evaluate: ContextVar[Evaluate] = ContextVar("unilinattn.evaluate", default=run)


@contextmanager
def evaluated_by(evaluate: Evaluate) -> Iterator[None]:
    """Compute the values of flows in this context by `evaluate`, a function of stages and their input."""
    token = _evaluate.set(evaluate)
    try:
        yield
    finally:
        _evaluate.reset(token)


class Flow:
    """A layer's forward pass on the observed input, recorded stage by stage.

    Each method appends a stage that is frozen on the current `value`, and returns the flow. Values, and the factors
    that depend on them, are computed when they are first needed: a map of the core needs no gate or norm after it.
    Nothing is detached: with gradients enabled, `value` is differentiable and has the host's gradient.
    """

    def __init__(self, x: Tensor, *, port: str = "x") -> None:
        """Start from the layer's input `x` at a port, (batch, length, channel)."""
        self.port = port
        self.inputs: dict[str, Tensor] = {port: x}
        self._batch, self._length = x.shape[:2]
        self._begun: Callable[[], Tensor] = lambda: x
        self._stages: dict[str, list[Stage]] = {port: []}
        self._pending: list[Stage] = []
        self.is_recorded = False
        """Whether its factors are constants of a recorded run, through which no gradient passes."""
        self.before_output: Tensor | None = None
        """The input of the output projection, stored if gradients are enabled; attribution differentiates by it."""
        self.mixed: list[Callable[[], Tensor]] = []
        """Functions that return the values after each stage with a core, stored if gradients are enabled.

        A skip is added to a core's output, so gradients with respect to both are equal.
        """

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
        """The output of the stages so far on the observed input, with biases: (batch, length, channel)."""
        return self.deferred()()

    def deferred(self) -> Callable[[], Tensor]:
        """Return a function that computes the current `value`, for factors that depend on it."""
        if self._pending:
            stages, before = self._pending, self._begun
            self._begun, self._pending = Deferred(lambda: _evaluate.get()(stages, before())), []
        return self._begun

    def stage(self, stage: Stage) -> "Flow":
        """Append a stage; after a merge it is appended to every port's chain, with its bias on one of them only."""
        self._append(stage)
        if torch.is_grad_enabled() and any(inner.role == "core" and inner.mixes for inner in walk([stage])):
            self.mixed.append(self.deferred())
        return self

    def _append(self, stage: Stage) -> None:
        for port, stages in self._stages.items():
            stages.append(stage if port == self.port else stage.unbiased())
        self._pending.append(stage)

    def copy(self) -> "Flow":
        """Return a flow with the same stages, which share their values, to try further ones on."""
        self.deferred()
        other = copy(self)
        other._stages = {port: list(stages) for port, stages in self._stages.items()}
        other._pending, other.inputs, other.mixed = [], dict(self.inputs), list(self.mixed)
        return other

    def fork(self) -> "Flow":
        """Return a new flow from the current value, for one chain of a branch."""
        return Flow(self.value)

    def join(self, *forks: "Flow", role: str) -> "Flow":
        """Append a branch that sums the forks; a fork without stages is the identity."""
        self._append(Branch(role, tuple(fork.chain for fork in forks)))
        self.mixed += [value for fork in forks for value in fork.mixed]
        values = [fork.deferred() for fork in forks]
        return self._continue(lambda: torch.stack([value() for value in values]).sum(0))

    def merge(self, other: "Flow") -> "Flow":
        """Add the value of another port's flow; both ports share all later stages."""
        first, second = self.deferred(), other.deferred()
        self.inputs |= other.inputs
        self._stages |= {port: list(chain) for port, chain in other.chains.items()}
        self.mixed += other.mixed
        return self._continue(lambda: first() + second())

    def shift(self, mix: Tensor) -> "Flow":
        """Add `mix` (batch or 1, length or 1, channel) times the previous token minus the current one (RWKV)."""
        kernel = torch.tensor([[0.0, 1.0]], dtype=mix.dtype, device=mix.device)
        previous = self.fork().stage(Mix("shift", Toeplitz(kernel, batch=self._batch, length=self._length)))
        return self.join(self.fork().scale(1 - mix, role="shift"), previous.scale(mix, role="shift"), role="shift")

    def matrix(self, weight: Tensor | Stored, bias: Tensor | None = None, *, role: str) -> "Flow":
        """Multiply each token by a weight (out, in), and add a bias (out)."""
        if role == "output" and self.before_output is None:
            self.mark_output()
        return self.stage(Matrix(role, weight, bias))

    def mark_output(self) -> None:
        """Mark the current value as the input of the output projection, which attribution differentiates by."""
        if torch.is_grad_enabled():
            self.before_output = self.value

    def scale(self, scale: Tensor | Callable[[], Tensor] | None, bias: Tensor | None = None, *, role: str) -> "Flow":
        """Multiply by frozen factors (batch or 1, length or 1, group), or a function of them; None appends no stage."""
        if scale is None:
            return self
        return self.stage(Scale(role, scale if isinstance(scale, Tensor) else Deferred(scale), bias))

    def conv(self, weight: Tensor, bias: Tensor | None = None) -> "Flow":
        """Convolve each channel causally; weight (channel, 1, tap) as in torch, its last tap for the current token."""
        kernel = weight.squeeze(1).flip(-1)
        return self.stage(Mix("conv", Toeplitz(kernel, batch=self._batch, length=self._length), bias))

    def activation(self, name: str) -> "Flow":
        """Multiply by the activation's slope at the current value p: s = (f(p) - f(0)) / p."""
        if name not in _SLOPES:
            raise UncoveredError(f"no frozen slope is known for the activation {name!r}" + nearest(name, _SLOPES))
        before = self.deferred()
        return self.scale(lambda: _SLOPES[name](before()), role="act")

    def core(self, mixer: CoreMixer, *, skip: Tensor | None = None) -> "Flow":
        """Mix tokens by the core mixer, and add the skip D x, with one factor D per head or channel."""
        mix = Mix("core", mixer)
        if skip is None:
            return self.stage(mix)
        return self.stage(Branch("core", ((mix,), (Scale("skip", skip[None, None]),))))

    def gate(self, factor: Tensor | Callable[[], Tensor]) -> "Flow":
        """Multiply by a frozen gate (batch, length, channel), or a function of it that is called when first needed."""
        return self.scale(factor, role="gate")

    def rms_norm(self, weight: Tensor | None, eps: float, *, groups: int = 1) -> "Flow":
        """Divide by the frozen root mean square over each group of channels, then multiply by the weight."""
        self._divide_by_rms(eps, groups)
        return self.scale(None if weight is None else weight[None, None], role="norm")

    def layer_norm(self, weight: Tensor | None, bias: Tensor | None, *, eps: float, groups: int = 1) -> "Flow":
        """Centre each group of channels, divide by its frozen deviation, multiply by the weight, add the bias."""
        self.stage(Center("norm", groups))
        self._divide_by_rms(eps, groups)
        return self.scale(None if weight is None else weight[None, None], bias, role="norm")

    def _divide_by_rms(self, eps: float, groups: int) -> None:
        before = self.deferred()
        self.scale(lambda: torch.rsqrt(before().unflatten(2, (groups, -1)).pow(2).mean(-1) + eps), role="norm")

    def _continue(self, value: Callable[[], Tensor]) -> "Flow":
        """Continue from `value`, a function that computes the output of the stages so far."""
        self._begun, self._pending = Deferred(value), []
        return self

    def unmapped(self, role: str, reason: str, width: int) -> "Flow":
        """Append a part of `width` output channels that cannot be expressed; its use raises `reason`."""
        return self.stage(Unmapped(role, reason, width))


def silu(gate: Tensor) -> Tensor:
    """Return SiLU of a gate's pre-activation, which is frozen as a whole."""
    return functional.silu(gate)
