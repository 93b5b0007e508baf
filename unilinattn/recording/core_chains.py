"""Stages around a core that is a part of a module's graph (see `inner_core`), where its functions give no map."""

from collections.abc import Mapping

import torch
from torch import Tensor

from unilinattn.call.axes import Axes
from unilinattn.call.exactness import layer_tolerance, relative_error
from unilinattn.errors import UncoveredError
from unilinattn.operator.scopes import has_core, scoped
from unilinattn.operator.stages import Chain, Mix, Scale, channel_groups, run, run_adjoint, walk
from unilinattn.recording.chains import by_token, chains_of
from unilinattn.recording.compilation import NodeCore
from unilinattn.recording.frozen_module import FrozenModule
from unilinattn.recording.inner_core import Cut, InnerCore, Made, inner_core
from unilinattn.recording.keys import Keys
from unilinattn.recording.layout import Carried, added
from unilinattn.recording.nodes import Node, nodes_in


def without_map(chains: Mapping[str, Chain], channels: int) -> str | None:
    """Return why stages have no map, None if they have one or mix no tokens; `channels` are those of the input."""
    cores = [scoped(chain, "core", channels)[0] for chain in chains.values() if has_core(chain)]
    if not cores or any(channel_groups(core) is not None for core in cores):
        return None
    return f"its code has {count(chains)} steps, and they mix channels"


def count(chains: Mapping[str, Chain]) -> int:
    """Return the number of stages."""
    return sum(1 for chain in chains.values() for _ in walk(chain))


def chains_around_core(
    node: Node, like: Tensor, axes: Axes, keys: Keys, single: Mapping[str, Chain], made: Made
) -> Mapping[str, Chain] | None:
    """Return stages with a core that is a part of the module's graph, None if it has no such part.

    Args:
        node, like, axes, keys: those of `chains_of`.
        single: the module as one stage from each input.
        made: the tensors with tokens of its graph.
    """
    if len(single) > 1:
        return None
    ((port, (stage,)),) = single.items()
    assert isinstance(stage, FrozenModule)
    inner = inner_core(stage.result, stage.source, made)
    if inner is None:
        return None
    try:
        with torch._C.DisableTorchFunction():
            chains = chains_of(node, like, axes, keys, _core_at(inner, node))
    except UncoveredError:
        return None
    return chains if chains.keys() == single.keys() and _is_same(chains[port], stage) else None


def _is_same(chain: Chain, whole: FrozenModule) -> bool:
    """Tell whether stages have a module's output and its derivative.

    A tensor that is written over has other values than when it was a part of the graph, and another one may have those
    of a cut.
    """
    x, output = whole.source.detach(), whole.result.detach()
    probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(output)
    with torch.no_grad():
        pairs = (run(chain, x), output), (run_adjoint(chain, probe), whole.adjoint(probe))
    return all(
        actual.shape == expected.shape and relative_error(actual, expected) <= layer_tolerance(output.dtype)
        for actual, expected in pairs
    )


def _core_at(inner: InnerCore, output: Node) -> NodeCore:
    """Return a core with the recorded tensors that enter and leave it, which have the values of its cuts.

    Raises `UncoveredError` for a core whose tensors were not recorded.
    """
    entered, left = (_node_of(cut, output) for cut in (inner.entered, inner.left))
    if entered is None or left is None:
        raise UncoveredError("the tensors around its core were not recorded")

    def after(carried: Carried) -> Carried:
        vectors = carried.moved(inner.entered.vectors(carried.index))
        value = by_token(vectors)
        mixed = value.then(Mix("core", inner.mixer))
        if inner.skip is not None:
            mixed = added(mixed, value.then(Scale("skip", inner.skip)))
        if inner.bias is not None:
            mixed = mixed.then(Scale("skip", inner.bias.new_ones(1, 1, 1), inner.bias))
        return mixed.moved(inner.left.tensor(mixed.index))

    return NodeCore(entered, left, after)


def _node_of(cut: Cut, output: Node) -> Node | None:
    """Return the recorded tensor before an output that has the values of a cut."""
    stack, entered = [output], {id(output)}
    while stack:
        node = stack.pop()
        value = node.value.detach()
        is_alike = value.shape == cut.value.shape and value.dtype == cut.value.dtype
        if is_alike and relative_error(cut.value, value) <= layer_tolerance(value.dtype):
            return node
        for each in nodes_in((node.args, node.kwargs)):
            if id(each) not in entered:
                entered.add(id(each))
                stack.append(each)
    return None
