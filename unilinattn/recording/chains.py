"""From the recorded output of a module to its chain of stages from each input."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from unilinattn.call.axes import Axes
from unilinattn.call.stored import Stored
from unilinattn.errors import UncoveredError
from unilinattn.mixers import Gather
from unilinattn.operator.stages import Branch, Chain, Matrix, Mix, Scale, Stage, walk
from unilinattn.recording import convolutions, elementwise, joins, linear, mixing, norms, spectral
from unilinattn.recording.compilation import Compilation, Joins, LongError, NodeCore
from unilinattn.recording.keys import Keys, keys_of
from unilinattn.recording.layout import Carried, whole
from unilinattn.recording.nodes import Node, Position
from unilinattn.recording.regrouping import by_row
from unilinattn.recording.simplification import simplified, with_step_weights

DEEPEST = 100_000
"""Calls of Python inside each other while a module is compiled."""

RULES = (convolutions, elementwise, joins, linear, mixing, norms, spectral)
"""The modules that register the rules of functions."""


def chains_of(
    node: Node, like: Tensor, axes: Axes, keys: Keys, core: NodeCore | None = None, *, transposed: bool = False
) -> Mapping[str, Chain]:
    """Return the stages from each input to a module's output.

    Args:
        node: the output of a recorded run.
        like: a tensor of the operator's dtype and device.
        axes: the axes of channels.
        keys: those of outer products, by the position of their calls.
        core: a part of the module that is one core.
        transposed: whether inputs are (token, batch, channel).

    Raises `UncoveredError` with the function that is no stage.
    """
    carried, _ = _compiled(node, like, axes, keys, core, transposed=transposed)
    if not transposed and not torch.equal(carried.index.flatten(), whole(carried.shape, carried.index).flatten()):
        raise UncoveredError("values of a sequence are written into another sequence")
    chains = {port: with_step_weights(simplified(chain)) for port, chain in carried.chains.items()}
    mixers = [stage for chain in chains.values() for stage in walk(chain) if isinstance(stage, Mix)]
    if core is not None:
        # What mixes outside of it are convolutions, whose padded tokens are others than those of the input.
        chains = {port: _as_convolutions(chain) for port, chain in chains.items()}
    has_core = any(stage.role == "core" and not isinstance(stage.mixer, Gather) for stage in mixers)
    return {port: _with_roles(chain, has_core=has_core)[0] for port, chain in chains.items()}


def choices_of(node: Node, like: Tensor, axes: Axes, *, transposed: bool = False) -> Mapping[Position, list[int]]:
    """Return which operands of the products behind an output of a recorded run are values, by the products' calls.

    Raises the errors of `chains_of`, whose arguments these are, unless the output is no value (batch, token, channel).
    """
    keys = keys_of(node)
    try:
        return _compiled(node, like, axes, keys, None, transposed=transposed)[1]
    except UncoveredError:
        with _deep_recursion():
            joins = Joins(set(), by_count=False)
            build = partial(Compilation, like, axes.inputs, transposed=transposed, keys=keys, joins=joins)
            return _decided(node, build)[2]


def _compiled(
    node: Node, like: Tensor, axes: Axes, keys: Keys, core: NodeCore | None, *, transposed: bool
) -> tuple[Carried, dict[Position, list[int]]]:
    """Return the stages of a module's output with the values of the products behind it.

    Of two readings of the joins it is the one with fewer stages: where the steps of a loop over queries are read as
    channels, more stages make tokens of them. A long loop is read once.
    """
    build = partial(Compilation, like, axes.inputs, transposed=transposed, keys=keys, core=core)
    readings: list[tuple[int, Carried, dict[Position, list[int]]]] = []
    refusals: list[UncoveredError] = []
    with _deep_recursion():
        for by_count in (True, False):
            joins = Joins({node.value.numel() // node.value.shape[axes.output]}, by_count)
            try:
                readings.append(_reading(node, axes, partial(build, joins=joins)))
            except LongError:
                raise
            except UncoveredError as error:
                refusals.append(error)
            if not joins.are_doubtful:
                break
    if not readings:
        raise refusals[-1]
    return min(readings, key=itemgetter(0))[1:]


def _reading(
    node: Node, axes: Axes, build: Callable[..., Compilation]
) -> tuple[int, Carried, dict[Position, list[int]]]:
    """Return the number of stages of a module's output, its stages, and the values of products."""
    run, carried, values = _decided(node, build)
    carried = by_token(carried.moved(carried.index.reshape(node.value.shape).movedim(axes.output, -1)))
    return run.stages(carried), carried, values


def _decided(node: Node, build: Callable[..., Compilation]) -> tuple[Compilation, Carried, dict[Position, list[int]]]:
    """Return a tensor's stages and the values of the products behind it, with the run that found them."""
    run = build(decided={})
    carried = run.value(node)
    last = {at: numbers for at, (_, numbers) in run.choices.items()}
    # The first step of a loop has no state yet, and its products are those of the last one.
    if changed := {at: last[at] for at, (first, _) in run.choices.items() if first != last[at]}:
        run = build(decided=changed)
        carried = run.value(node)
    return run, carried, last


def stored(chain: Chain, weights: Mapping[int, tuple[Tensor, Tensor]], like: Tensor) -> Chain:
    """Return a chain that holds no views of a model's weights but in matrices, which are stored.

    `weights` are those that were recorded, which may be casts, with the model's, by the storages of the former.
    """

    def at(stage: Stage) -> Stage:
        if isinstance(stage, Branch):
            return replace(stage, chains=tuple(stored(inner, weights, like) for inner in stage.chains))
        if isinstance(stage, Matrix) and (pair := weights.get(_storage(stage.weight))) is not None:
            view, (recorded, weight) = stage.weight, pair
            offset = view.storage_offset() - recorded.storage_offset() + weight.storage_offset()
            return replace(stage, matrix=Stored(weight.as_strided(view.size(), view.stride(), offset), like))
        if isinstance(stage, Scale) and isinstance(stage.factor, Tensor) and _storage(stage.factor) in weights:
            return replace(stage, factor=stage.factor.clone())
        return stage

    return tuple(at(stage) for stage in chain)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """Allow a call for each function between a module's output and its input, of which large modules have thousands."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, DEEPEST))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def by_token(carried: Carried) -> Carried:
    """Return the value of an output whose last axis has the channels."""
    rows = carried.index.ndim - 1
    with suppress(UncoveredError):
        arranged = carried.arranged(frozenset(range(rows)))
        if arranged.index.shape[-1] == arranged.shape[2]:
            return arranged
    return by_row(carried, rows)


def _as_convolutions(chain: Chain) -> Chain:
    """Return stages in which all token mixers but a part of a module's graph are convolutions."""

    def at(stage: Stage) -> Stage:
        if isinstance(stage, Branch):
            return replace(stage, chains=tuple(map(_as_convolutions, stage.chains)))
        return replace(stage, role="conv") if isinstance(stage, Mix) and not stage.mixer.in_graph else stage

    return tuple(map(at, chain))


def _with_roles(chain: Chain, *, has_core: bool, behind: bool = False) -> tuple[Chain, bool]:
    """Return stages whose matrices behind the core are output matrices, and whether the core was passed.

    Without a core, the convolutions and gathers are one.
    """
    stages: list[Stage] = []
    for stage in chain:
        if isinstance(stage, Branch):
            pairs = [_with_roles(inner, has_core=has_core, behind=behind) for inner in stage.chains]
            stages.append(replace(stage, chains=tuple(inner for inner, _ in pairs)))
            behind = behind or any(passed for _, passed in pairs)
            continue
        if isinstance(stage, Mix) and not has_core:
            stage = replace(stage, role="core")
        elif isinstance(stage, Matrix) and behind:
            stage = replace(stage, role="output")
        behind = behind or stage.role == "core"
        stages.append(stage)
    return tuple(stages), behind
