"""Parallel cores as one: heads that a module computes one by one are heads of one matrix, and sums of maps one map.

Cores whose outputs are different channels, as where the outputs of heads are concatenated, are heads. Cores whose
values and outputs are the same channels add up, as in differential attention.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unilinattn.mixers import Dense, Gather
from unilinattn.operator.scopes import has_core
from unilinattn.operator.stages import Branch, Chain, Matrix, Mix, Scale, Stage, run


def width(stages: Sequence[Stage], channels: int) -> int:
    """Return the number of channels behind stages on a number of them, 0 if it is unknown."""
    return next((stage.shape[0] for stage in reversed(stages) if isinstance(stage, Matrix)), channels)


def scaled_core(stages: Sequence[Stage], scale: Scale, channels: int) -> Stage | None:
    """Return the last of some stages, a core, with its rows times a scale of one number for each query and head.

    So the weights of a softmax that divides the sum of its values are those of the core. None for other stages and
    scales: a norm or an activation after the core, which depends on the core's output, stays outside of it, as do gates
    that differ by channel.
    """
    if scale.bias is not None or scale.role not in ("gate", "skip") or (scale.role == "gate" and scale.of_value):
        return None
    if not stages:
        return None
    *before, last = stages
    if isinstance(last, Branch):
        inner = width(before, channels)
        ends = [scaled_core(chain, scale, inner) if chain else None for chain in last.chains]
        chains = [(*chain[:-1], end) for chain, end in zip(last.chains, ends, strict=True) if end is not None]
        return replace(last, chains=tuple(chains)) if len(chains) == len(ends) else None
    factors = _by_head(before, last, scale, width(before, channels))
    return None if factors is None else Mix("core", Dense(factors[0] * factors[1][..., None]))


def weighted_core(stages: Sequence[Stage], core: Stage, channels: int) -> Stage | None:
    """Return a core with its columns times the last of the stages before it, a number for each key and head.

    So the weights that multiply the values of a sum are those of the core, as are the strengths of a delta rule. None
    for other stages: an activation is one of the values, and gates that differ by channel stay outside of the core, as
    do the weights of copies of the values, which may be those of each query.
    """
    if not stages or not isinstance(scale := stages[-1], Scale) or scale.bias is not None or not scale.weighs:
        return None
    factors = _by_head(stages, core, scale, width(stages, channels))
    return None if factors is None else Mix("core", Dense(factors[0] * factors[1][..., None, :]))


def _has_copies(stages: Sequence[Stage], groups: int) -> bool:
    """Whether some groups of the channels behind stages have the values of another group."""
    matrix = next((stage for stage in reversed(stages) if isinstance(stage, Matrix)), None)
    if groups == 1 or matrix is None or matrix.shape[0] % groups:
        return False
    return len(torch.unique(matrix.weight.reshape(groups, -1), dim=0)) < groups


def _by_head(
    stages: Sequence[Stage], core: Stage, scale: Scale, channels: int
) -> tuple[Float[Tensor, "_ head query key"], Float[Tensor, "_ head _"]] | None:
    """Return the matrix of a core and the factors of a scale for each of its heads, None if these differ by channel.

    `stages` are those before the core, and `channels` is the number of channels, 0 if it is unknown.
    """
    factor = scale.scale
    if (weights := _weights(core)) is None or factor.requires_grad or not bool(torch.isfinite(factor).all()):
        return None
    heads, groups = weights.shape[1], factor.shape[2]
    every = max(heads, groups)
    # Of heads of one channel the factors differ by channel.
    if every % heads or every % groups or (groups >= channels if channels else groups > 1):
        return None
    # A sum of tokens, such as `cumsum`, is one head until its factors differ. Those of copies are a state's channels.
    if heads == 1 and _has_copies(stages, groups):
        return None
    weights = weights.repeat_interleave(every // heads, 1)
    return weights, factor.repeat_interleave(every // groups, 2).transpose(1, 2)


def summed_cores(branch: Branch) -> Chain:
    """Return the branch with one core for each set of parallel cores with the same values, whose maps add up.

    A core may compute some of the queries, as the steps of a loop do; the others read nothing in it.
    """
    chains = list(branch.chains)
    groups: list[dict[int, _Rows]] = []
    for number, rows in enumerate(map(_Rows.of, chains)):
        if rows is not None:
            group = next((group for group in groups if next(iter(group.values())).has_values_of(rows)), None)
            if group is None:
                groups.append({number: rows})
            else:
                group[number] = rows
    # Of few queries among many, such as global tokens, a matrix of all would be larger.
    groups = [group for group in groups if len(group) > 1 and _are_most(list(group.values()))]
    for group in groups:
        first, rows = next(iter(group.items()))
        chains[first] = (*rows.before, Mix("core", Dense(_sum(rows.shape, group.values()))))
    merged = {number for group in groups for number in list(group)[1:]}
    left = tuple(chain for number, chain in enumerate(chains) if number not in merged)
    return left[0] if len(left) == 1 else (replace(branch, chains=left),)


@dataclass(frozen=True, eq=False)
class _Rows:
    """A chain that ends with a core.

    Attributes:
        before: the stages before the core.
        weights: the core's matrix, of some queries.
        index: the row of each query in it, -1 for one that reads nothing; None for all rows in their order.
    """

    before: Chain
    weights: Float[Tensor, "batch head row key"]
    index: Int[Tensor, "batch query"] | None

    @classmethod
    def of(cls, chain: Chain) -> "_Rows | None":
        """Split a chain, None for one that ends otherwise."""
        if not chain:
            return None
        *before, last = chain
        if before and isinstance(last, Mix) and isinstance(last.mixer, Gather) and last.bias is None:
            weights = _weights(before.pop())
            return None if weights is None else cls(tuple(before), weights, last.mixer.index)
        weights = _weights(last)
        return None if weights is None else cls(tuple(before), weights, None)

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, head, query, key)."""
        batch, heads, rows, keys = self.weights.shape
        return batch, heads, rows if self.index is None else self.index.shape[1], keys

    def has_values_of(self, other: "_Rows") -> bool:
        """Whether another core, of as many queries, mixes the same values."""
        return self.shape == other.shape and _are_equal(self.before, other.before)


def _are_most(terms: Sequence[_Rows]) -> bool:
    """Whether cores compute half of their queries or more."""
    return 2 * sum(term.weights.shape[2] for term in terms) >= terms[0].shape[2]


def _sum(shape: tuple[int, ...], terms: Iterable[_Rows]) -> Float[Tensor, "batch head query key"]:
    total: Tensor | None = None
    for term in terms:
        total = term.weights.new_zeros(shape) if total is None else total
        if term.index is None:
            total += term.weights
            continue
        # Few of the queries are computed: only these rows are written.
        batch, query = (term.index >= 0).nonzero(as_tuple=True)
        total[batch, :, query] += term.weights[batch, :, term.index[batch, query]]
    assert total is not None
    return total


def joined_cores(branch: Branch) -> Chain:
    """Return stages with one core for all parallel cores whose outputs are different channels.

    Its heads are those of the cores in the order of their outputs. Other chains of the branch are parallel to it.
    """
    cores = [core for chain in branch.chains if (core := _Core.of(chain)) is not None]
    cores.sort(key=lambda core: int(core.outputs.int().argmax()))
    if len(cores) < 2 or len({(len(core.weights), core.weights.shape[2:]) for core in cores}) > 1:
        return (branch,)
    if int(torch.stack([core.outputs for core in cores]).int().sum(0).amax()) > 1:
        return (branch,)
    # Heads have equally many channels: of narrow ones the last are zero.
    width = max(core.width // core.heads for core in cores)
    starts = [width * sum(core.heads for core in cores[:n]) for n in range(len(cores))]
    total = width * sum(core.heads for core in cores)
    channels = [start + core.channels(width) for start, core in zip(starts, cores, strict=True)]
    joined = Mix("core", Dense(torch.cat([core.weights for core in cores], 1)))
    chain = (*_before(cores, channels, total), joined, *_after(cores, channels, total))
    others = [inner for inner in branch.chains if _Core.of(inner) is None]
    return (replace(branch, chains=(chain, *others)),) if others else chain


@dataclass(frozen=True, eq=False)
class _Core:
    """A chain with one core.

    Attributes:
        before, after: the stages before the core and after it.
        weights: the core's matrix.
        width: the number of the core's channels.
        outputs: whether each channel of the chain's output may depend on the core.
    """

    before: Chain
    weights: Float[Tensor, "batch head query key"]
    after: Chain
    width: int
    outputs: Bool[Tensor, " out"]

    @classmethod
    def of(cls, chain: Chain) -> "_Core | None":
        """Split a chain at its core, None for one without a matrix after it and for several."""
        position = next((k for k, stage in enumerate(chain) if has_core((stage,))), None)
        if position is None or has_core(chain[position + 1 :]) or (weights := _weights(chain[position])) is None:
            return None
        after = chain[position + 1 :]
        matrices = [k for k, stage in enumerate(after) if isinstance(stage, Matrix)]
        if not matrices or not all(isinstance(stage, Scale) for stage in after[matrices[-1] + 1 :]):
            return None
        # Stages before the first matrix keep the number of channels.
        first, last = after[matrices[0]], after[matrices[-1]]
        assert isinstance(first, Matrix) and isinstance(last, Matrix)
        if first.is_complex or last.is_complex:
            return None
        return cls(chain[:position], weights, after, first.shape[1], last.weight.ne(0).any(1))

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.weights.shape[1]

    def channels(self, width: int) -> Int[Tensor, " channel"]:
        """Return the core's channels where each head has `width` of them."""
        heads = width * torch.arange(self.heads, device=self.weights.device)
        return (heads[:, None] + torch.arange(self.width // self.heads, device=heads.device)).flatten()


def _before(cores: Sequence[_Core], channels: Sequence[Tensor], total: int) -> Chain:
    """Return the stages that compute the values of all cores."""
    if not all(map(_is_matrix, (stage for core in cores for stage in core.before))):
        ones = [_ones(core, index, total).mT for core, index in zip(cores, channels, strict=True)]
        chains = ((*core.before, Matrix("input", each)) for core, each in zip(cores, ones, strict=True))
        return (Branch("input", tuple(chains)),)
    composed = [_composed(core.before, core) for core in cores]
    weight = composed[0][0].new_zeros(total, composed[0][0].shape[1])
    bias = weight.new_zeros(total)
    for (rows, level), index in zip(composed, channels, strict=True):
        weight[index], bias[index] = rows, bias[index] if level is None else level
    return (Matrix("input", weight, None if all(level is None for _, level in composed) else bias),)


def _after(cores: Sequence[_Core], channels: Sequence[Tensor], total: int) -> Chain:
    """Return the stages after all cores."""
    if not all(map(_is_matrix, (stage for core in cores for stage in core.after))):
        ones = [_ones(core, index, total) for core, index in zip(cores, channels, strict=True)]
        chains = ((Matrix("input", each), *core.after) for core, each in zip(cores, ones, strict=True))
        return (Branch("output", tuple(chains)),)
    composed = [_composed(core.after, core) for core in cores]
    weight = composed[0][0].new_zeros(len(cores[0].outputs), total)
    for (columns, _), index in zip(composed, channels, strict=True):
        weight[:, index] = columns
    levels = [level for _, level in composed if level is not None]
    if not levels and len(weight) == total and torch.equal(weight, torch.eye(total, device=weight.device).to(weight)):
        return ()
    return (Matrix("input", weight, reduce(add, levels) if levels else None),)


def _composed(chain: Chain, core: _Core) -> tuple[Float[Tensor, "out in"], Float[Tensor, " out"] | None]:
    """Return the matrix and the bias of stages before or after a core that are a matrix for every token."""
    if len(chain) == 1 and isinstance(chain[0], Matrix):
        return chain[0].weight, chain[0].bias
    # Stages before the first matrix keep the number of channels.
    width = next((stage.shape[1] for stage in chain if isinstance(stage, Matrix)), core.width)
    unit = torch.eye(width, dtype=core.weights.dtype, device=core.weights.device)[None]
    level = run(chain, torch.zeros_like(unit[:, :1]))[0, 0] if any(stage.has_bias for stage in chain) else None
    return run(chain, unit, bias=False)[0].mT, level


def _ones(core: _Core, channels: Tensor, total: int) -> Float[Tensor, "width total"]:
    """Return the matrix that reads the channels of a core among those of all."""
    ones = core.weights.new_zeros(core.width, total)
    ones[torch.arange(core.width, device=ones.device), channels] = 1
    return ones


def _is_matrix(stage: Stage) -> bool:
    """Whether a stage is a real matrix for every token."""
    if isinstance(stage, Scale):
        is_shared = stage.scale.shape[:2] == (1, 1) and (stage.bias is None or stage.bias.ndim == 1)
        return is_shared and not stage.scale.requires_grad
    return isinstance(stage, Matrix) and not stage.is_complex


def _weights(stage: Stage) -> Float[Tensor, "batch head query key"] | None:
    """Return the matrix of a core, None for another stage."""
    if isinstance(stage, Mix) and stage.role == "core" and stage.bias is None and isinstance(stage.mixer, Dense):
        return stage.mixer.weights
    return None


def _are_equal(first: Chain, second: Chain) -> bool:
    """Whether two chains of matrices are one map."""
    return len(first) == len(second) and all(a is b or _is_same(a, b) for a, b in zip(first, second, strict=True))


def _is_same(first: Stage, second: Stage) -> bool:
    if not (isinstance(first, Matrix) and isinstance(second, Matrix) and first.shape == second.shape):
        return False
    biases = first.bias, second.bias
    if (biases[0] is None) != (biases[1] is None) or first.is_complex != second.is_complex:
        return False
    same_bias = biases[0] is None or torch.equal(*biases)  # type: ignore[arg-type]
    return same_bias and torch.equal(first.weight, second.weight)
