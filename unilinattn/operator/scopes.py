"""Scopes: the stages of a chain that count as the attention matrix."""

from dataclasses import replace
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from unilinattn.errors import OptionError, UncoveredError, nearest
from unilinattn.operator.stages import Branch, Center, Chain, Matrix, Mix, Scale, Stage, Unmapped, walk

SCOPES = {
    "core": "from the first core stage to the last, with the stages between them (HMA ACL Eq. 13-16)",
    "mixer": "core plus the skip on the diagonal (LaTIM Eq. 18)",
    "unified": "every per-channel stage strictly between the input and the output matrix; centring is dropped "
    "(Zimerman, Ali and Wolf, ICLR 2025)",
    "layer": "everything: a vector for each pair of tokens (LaTIM Eq. 22-25)",
}
"""The stages of each scope; all other stages are replaced by the identity."""


class ScopedMap(NamedTuple):
    """The matrix of a scope: one map per channel with separate coefficients.

    Attributes:
        chain: per-channel stages.
        groups: number of channels with separate coefficients.
        repeat: number of equal heads per such channel.
        width: number of the layer's channels that share one head.
        shape: (batch, queries, keys).
        layer: all chains of the layer.
        like: the layer's output.
    """

    chain: Chain
    groups: int
    repeat: int
    width: int
    shape: tuple[int, int, int]
    layer: tuple[Chain, ...]
    like: Tensor

    @property
    def element_bytes(self) -> int:
        """Bytes per element while rows are computed; complex modes double it."""
        stages = (stage for chain in self.layer for stage in walk(chain))
        is_complex = any(isinstance(stage, Mix) and stage.mixer.is_complex for stage in stages)
        return self.like.element_size() * (2 if is_complex else 1)

    @property
    def heads(self) -> int:
        """Length of the head axis."""
        return self.groups * self.repeat


def check_scope(scope: str) -> None:
    """Raise `OptionError` for an unknown scope, and for `layer`, which has a matrix per pair of tokens."""
    if scope not in SCOPES:
        raise OptionError(f"unknown scope {scope!r}" + nearest(scope, SCOPES))
    if scope == "layer":
        raise OptionError(
            "scope 'layer' has a matrix for every pair of tokens, not a number; "
            "call `contributions(i)` for the vectors T_ij x_j, or the methods 'latim' and 'alti' for their norms."
        )


def scoped(chain: Chain, scope: str, channels: int) -> tuple[Chain, int]:
    """Return the stages of `core`, `mixer` or `unified` in a chain, and their number of channels.

    `channels` is the number of channels of the chain's input.
    """
    if not has_core(chain):
        raise UncoveredError("no token mixer acts on this port: its tokens are added to the output one by one.")
    first, last = _core_span(chain)
    for stage in chain[:first]:
        if isinstance(stage, Matrix):
            channels = stage.shape[0]
        elif isinstance(stage, Unmapped):
            channels = stage.width
    lead = chain[first]
    if first == last and isinstance(lead, Branch) and _holds_projections(lead):
        cuts = [scoped(inner, scope, channels) for inner in lead.chains if has_core(inner)]
        if len(cuts) == 1:
            return cuts[0]
        return (Branch(lead.role, tuple(cut for cut, _ in cuts)),), cuts[0][1]
    if scope == "unified":
        return _uncentred(_between_matrices(chain, first, last)), channels
    return _span(chain, scope), channels


def restricted(chain: Chain, channels: Float[Tensor, " channel"]) -> Chain | None:
    """Return a chain whose core's channels are multiplied by factors, skips beside the core included; None without one.

    The channels are those that run through `scoped(chain, "core", ...)`. With factors that add up to one, the chains
    add up to `through_core`.
    """
    return _after_core(chain, (Scale("core", channels[None, None]),))


def through_core(chain: Chain) -> Chain | None:
    """Return a chain without its parallel paths around the core, such as a residual; None if it has no core.

    A skip that is added to the core's output, channel by channel, stays.
    """
    return _after_core(chain, ())


def sums_cores(chain: Chain) -> bool:
    """Whether several cores with projections of their own are summed, so that their heads are different channels."""
    return any(isinstance(stage, Branch) and _holds_projections(stage) for stage in chain)


def _after_core(chain: Chain, stages: Chain) -> Chain | None:
    """Insert stages after a chain's core, in each branch with projections that has one; drop the other branches."""
    if not has_core(chain):
        return None
    first, last = _core_span(chain)
    lead = chain[first]
    if first == last and isinstance(lead, Branch) and _holds_projections(lead):
        pieces = [piece for inner in lead.chains if (piece := _after_core(inner, stages)) is not None]
        middle = pieces[0] if len(pieces) == 1 else (Branch(lead.role, tuple(pieces)),)
        return (*chain[:first], *middle, *chain[last + 1 :])
    return (*chain[: last + 1], *stages, *chain[last + 1 :])


def _holds_projections(branch: Branch) -> bool:
    """Whether the projections stand inside this branch, so what stands around it (a residual) is outside the core."""
    carrying = (inner for inner in branch.chains if has_core(inner))
    return any(isinstance(stage, (Matrix, Unmapped)) for inner in carrying for stage in walk(inner))


def has_core(chain: Chain) -> bool:
    """Tell whether a stage of a chain is a core mixer."""
    return any(stage.role == "core" and stage.mixes for stage in walk(chain))


def _core_span(chain: Chain) -> tuple[int, int]:
    positions = [k for k, stage in enumerate(chain) if has_core((stage,))]
    return positions[0], positions[-1]


def _span(chain: Chain, scope: str, *, before: bool = False, after: bool = False) -> Chain:
    """Return the stages from the first core to the last; from the start and to the end if there are cores around.

    `before` and `after` tell whether other cores precede and follow the chain: a projection of such a chain may stand
    between two cores.
    """
    first, last = _core_span(chain)
    span = range(0 if before else first, len(chain) if after else last + 1)
    cuts = (_cut(chain[k], scope, before=before or k > first, after=after or k < last) for k in span)
    return tuple(piece for cut in cuts for piece in cut)


def _cut(stage: Stage, scope: str, *, before: bool, after: bool) -> Chain:
    """Reduce a branch to its chains with a core, for `mixer` also its skips; a single chain replaces the branch.

    A branch without a core stands between two of them.
    """
    if not isinstance(stage, Branch) or not has_core((stage,)):
        return (stage,)
    chains = []
    for inner in stage.chains:
        if has_core(inner):
            chains.append(_span(inner, scope, before=before, after=after))
        elif scope == "mixer" and inner and all(s.role == "skip" and isinstance(s, Scale) for s in inner):
            chains.append(inner)
    return chains[0] if len(chains) == 1 else (Branch(stage.role, tuple(chains)),)


def _uncentred(chain: Chain) -> Chain:
    """Drop the centring of norms, which mixes channels, also inside branches."""
    return tuple(
        replace(stage, chains=tuple(_uncentred(inner) for inner in stage.chains))
        if isinstance(stage, Branch)
        else stage
        for stage in chain
        if not isinstance(stage, Center)
    )


def _between_matrices(chain: Chain, first: int, last: int) -> Chain:
    bounds = [k for k, stage in enumerate(chain) if isinstance(stage, (Matrix, Unmapped))]
    start = max((k + 1 for k in bounds if k < first), default=0)
    stop = min((k for k in bounds if k > last), default=len(chain))
    return chain[start:stop]
