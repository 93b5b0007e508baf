"""Find the sum of a layer's output and the residual stream, from the tensors that modules exchanged in one run.

A sum is accepted if its parts add up to a later tensor element by element, up to rounding. Sums on the stream that the
layer reads, and those with the fewest parts, come first. The output of one more module (a parallel MLP or mixer) may be
a part only if the layer cannot depend on it: the module ran later, or the layer's inputs were traced back to the
stream without it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, tee

from torch import Tensor, nn

from unilinattn.architectures.recorded import passed_ports
from unilinattn.call import Call
from unilinattn.errors import UncoveredError
from unilinattn.host.module_calls import NO_SUM, CallRecord, Following, ResidualSite, tensors_in
from unilinattn.tracing.sums import Candidate, fit_factors, possible_sums

NEARBY = 12
"""Sibling calls searched before and after a layer: a flat model has all of its modules in one block."""

LAYERS = 3
"""Siblings with layers among them: those of one sum are neighbours, and a stack of blocks has nothing but layers."""


def locate_in_stream(layer: CallRecord, block: CallRecord) -> bool:
    """Set `layer.site` if the tensors that a block's modules exchanged prove the sum of its output and a stream.

    Returns whether the sum was found; that requires modules that received the stream and the sum. Otherwise sets
    `layer.reader`, the module that reads the output itself. No names are used.
    """
    inside = _index(layer, block)
    if layer.output is None or layer.entered is None or inside is None:
        return False
    before = _nearby(reversed(block.children[max(0, inside - NEARBY) : inside]))[::-1]
    after = _nearby(block.children[inside + 1 :][:NEARBY])
    layer.site = _sum_of(layer, layer.output, block, inside, before, after)
    if layer.site is not None:
        return True
    if (scaled := _scaled_inline(layer, block, inside, before, after)) is not None:
        layer.site, layer.following = scaled
        return True
    output = layer.returned[0] if layer.returned else None
    following: list[Following] = []
    while output is not None and (child := _reader(output, after)) is not None:
        layer.reader = layer.reader or child.name
        after = after[after.index(child) + 1 :]
        if child.architecture is not None or child.holds_layer or child.output is None:
            break
        if child.output.numel() != output.numel() or _same_memory(child.output, output):
            output = child.output if child.output.numel() == output.numel() else None
            continue
        if (pair := _added_inside(child, output)) is not None:
            stream, part = pair
            following.append(Following(child.module, child.name, child.arguments, output.detach(), part))
            layer.site = ResidualSite(child.output, stream, 1.0, 1.0, None, 0.0)
            layer.following = tuple(following)
            return True
        # A norm or a scale of the output: the stream is the sum with what it returns.
        following.append(Following(child.module, child.name, child.arguments, output.detach(), child.output.detach()))
        output = child.output
        layer.site = _sum_of(layer, output, block, inside, before, after)
        if layer.site is not None:
            layer.following = tuple(following)
            return True
    return False


def _nearby(siblings: Iterable[CallRecord]) -> list[CallRecord]:
    """Return sibling calls, the nearest first, up to the last one of `LAYERS` that hold layers."""
    nearby: list[CallRecord] = []
    layers = 0
    for sibling in siblings:
        nearby.append(sibling)
        layers += sibling.holds_layer or sibling.architecture is not None
        if layers == LAYERS:
            break
    return nearby


class _Scaled(nn.Module):
    """A scale of each channel that a block applies by itself, with its own parameter."""

    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def _scaled_inline(
    layer: CallRecord, block: CallRecord, inside: int, before: Sequence[CallRecord], after: Sequence[CallRecord]
) -> tuple[ResidualSite, tuple[Following, ...]] | None:
    """Return the sum of a stream and the layer's output times a parameter of the block, and that product; or None."""
    output = layer.output
    assert output is not None
    for name, scale in block.module.named_parameters(recurse=False):
        if scale.shape == output.shape[-1:] and scale.device == output.device:
            added = output.detach() * scale.detach()
            site = _sum_of(layer, added, block, inside, before, after)
            if site is not None:
                module = _Scaled(scale)
                path = f"{block.name}.{name}"
                return site, (Following(module, path, {"x": output.detach()}, output.detach(), added),)
    return None


def _added_inside(child: CallRecord, output: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the stream that a module adds to its map of a layer's output, and that map's value; None if it adds none.

    As in `dense(output) + stream` of a module that takes both.
    """
    others = [t for t in tensors_in(child.arguments) if t.shape == output.shape and not _same_memory(t, output)]
    names = [name for name, value in child.arguments.items() if any(value is other for other in others)]
    is_single = len(others) == len(names) == 1
    if not is_single or child.output is None or child.output.shape != output.shape or output.ndim != 3:
        return None
    call = Call(child.module, child.name, child.arguments, output.detach(), child.output)
    try:
        ports = passed_ports(call)
    except UncoveredError:
        return None
    if "x" not in ports or [passes for port, passes in ports.items() if port != "x"] != [True]:
        return None
    return others[0].detach(), (child.output - others[0]).detach()


def _reader(output: Tensor, after: Sequence[CallRecord]) -> CallRecord | None:
    """Return the first module that takes a tensor."""
    return next((child for child in after if _among(output, tensors_in(child.arguments))), None)


def _sum_of(
    layer: CallRecord,
    added: Tensor,
    block: CallRecord,
    inside: int,
    before: Sequence[CallRecord],
    after: Sequence[CallRecord],
) -> ResidualSite | None:
    """Return the sum of a stream and the tensor `added`, None if there is none; append to `layer.candidates`.

    The candidate of an earlier trace is tried first.
    """
    earlier = next(iter(layer.earlier_candidates[len(layer.candidates) :]), None)
    layer.candidates.append(earlier)
    if earlier == NO_SUM:
        return None
    received = [t for child in after for t in (*tensors_in(child.arguments), *child.returned)]
    sums = _alike([*received, *block.returned], added)

    def candidates(*, zero: bool) -> Iterator[Candidate]:
        parts = _candidates(layer, added, block, block.children[inside], before, after, zero=zero)
        return ((total, stream, other) for stream, other in parts for total in sums)

    if earlier is not None:
        for candidate in islice(candidates(zero=False), earlier, earlier + 1):
            if (site := _site(candidate, added, zero=False)) is not None:
                return site
    zero = not bool(added.any())
    numbered, searched = tee(candidates(zero=zero))
    # Most layers need few candidates, and each takes a fit of all elements.
    fits = (_site(candidate, added, zero=zero) for candidate in possible_sums(searched, added))
    site = _likeliest(site for site in fits if site is not None)
    layer.candidates[-1] = None if zero else NO_SUM if site is None else _number(site, numbered)
    return site


def _number(site: ResidualSite, candidates: Iterable[Candidate]) -> int:
    """Return the number of the candidate that a site is made of."""
    total, stream, other = site.total, site.stream, site.other
    return next(n for n, (t, x, y) in enumerate(candidates) if t is total and x is stream and y is other)


def group_parallel(layers: Sequence[CallRecord]) -> list[list[int]]:
    """Return the layers' indices in groups that are added to one stream in one sum.

    Within a group the `other` part of a site is removed, which was another layer of the group.
    """
    groups: list[list[int]] = []
    for index, layer in enumerate(layers):
        first = layers[groups[-1][0]] if groups else None
        if first is not None and _one_sum(first.site, layer.site):
            groups[-1].append(index)
        else:
            groups.append([index])
    for layer in (layers[index] for group in groups if len(group) > 1 for index in group):
        assert layer.site is not None
        layer.site = replace(layer.site, other=None)
    return groups


def _candidates(
    layer: CallRecord,
    added: Tensor,
    block: CallRecord,
    child: CallRecord,
    before: Sequence[CallRecord],
    after: Sequence[CallRecord],
    *,
    zero: bool,
) -> list[tuple[Tensor, Tensor | None]]:
    """Return (stream, other) candidates for the sum with a layer's output, the likely ones first."""
    assert layer.entered is not None
    followed, behind = followed_back(child, block, before)
    read = _alike([layer.entered, *followed], added)
    earlier = [t for made in reversed(before) for t in (*made.returned, *tensors_in(made.arguments))]
    earlier = [t for t in _alike([*earlier, *tensors_in(block.arguments)], added) if not _among(t, read)]
    later = _outputs(after, added)
    parallel = [*_outputs([made for made in before if made not in behind], added), *later]
    origins: list[tuple[Tensor, Tensor | None]] = []
    if zero:
        # With an output of zeros any tensor passed on looks like a sum; the stream is the origin of the others.
        origins = [(stream, other) for stream in reversed(read) for other in (None, *parallel)]
    return [
        *origins,
        *((stream, None) for stream in (*read, *earlier)),
        *((stream, other) for stream in read for other in parallel),
        # An earlier output is no candidate here: the layer may depend on it.
        *((stream, other) for stream in earlier for other in later),
    ]


def followed_back(
    child: CallRecord, block: CallRecord, before: Sequence[CallRecord]
) -> tuple[list[Tensor], list[CallRecord]]:
    """Return the tensors that a call depends on, nearest first, and the calls that returned them.

    Dependencies are traced through modules and scalar factors, back to the preceding token-mixing layers.
    """
    tensors, behind = list(tensors_in(child.arguments)), []
    for tensor in tensors:
        for made in reversed(before):
            if made in behind or not any(_is_multiple(tensor, value) for value in made.returned):
                continue
            behind.append(made)
            if made.architecture is None and not made.holds_layer:
                tensors += [t for t in tensors_in(made.arguments) if not _among(t, tensors)]
            break
        else:
            inputs = (t for t in tensors_in(block.arguments) if not _among(t, tensors))
            tensors += [t for t in inputs if _is_multiple(tensor, t)]
    return tensors, behind


def _likeliest(sites: Iterable[ResidualSite]) -> ResidualSite | None:
    """Return the first site, or a later one with as many parts whose stream has the factor 1; None without sites.

    Of one token, or of a repeated one, a norm whose weights are equal returns a multiple of the stream.
    """
    first = None
    for site in sites:
        first = first or site
        if (site.other is None) != (first.other is None):
            break
        if site.skip == 1:
            return site
    return first


def _site(candidate: Candidate, added: Tensor, *, zero: bool) -> ResidualSite | None:
    """Return the site if a candidate's total is the sum of its stream, a layer's output and its other output, or None.

    The factor of an output that is `zero` is undetermined and set to 1.
    """
    total, stream, other = candidate
    if zero and other is None and _same_memory(total, stream):
        return None
    summands = [stream, *([] if zero else [added]), *([] if other is None else [other])]
    factors = fit_factors(total, summands)
    if factors is None:
        return None
    multiplier = 1.0 if zero else factors[1]
    return ResidualSite(total, stream, factors[0], multiplier, other, 0.0 if other is None else factors[-1])


def _one_sum(site: ResidualSite | None, other: ResidualSite | None) -> bool:
    if site is None or other is None:
        return False
    return _same_memory(site.stream, other.stream) and _same_memory(site.total, other.total)


def _index(layer: CallRecord, block: CallRecord) -> int | None:
    """Return the index of the block's child that contains a layer, None if none does."""
    frame = layer
    while frame.parent is not None and frame.parent is not block:
        frame = frame.parent
    return next((index for index, child in enumerate(block.children) if child is frame), None)


def _outputs(frames: Iterable[CallRecord], like: Tensor) -> list[Tensor]:
    return _alike([frame.output for frame in frames if frame.output is not None], like)


def _alike(tensors: Iterable[Tensor], like: Tensor) -> list[Tensor]:
    """Return the distinct tensors with as many elements on the same device as `like`, in its shape."""
    matching: list[Tensor] = []
    for tensor in tensors:
        fits = tensor.numel() == like.numel() and tensor.device == like.device
        if fits and not _among(tensor, matching):
            matching.append(tensor if tensor.shape == like.shape else tensor.reshape(like.shape))
    return matching


def _among(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    return any(_same_memory(tensor, other) for other in others)


def _same_memory(tensor: Tensor, other: Tensor) -> bool:
    return tensor.data_ptr() == other.data_ptr() and tensor.numel() == other.numel()


def _is_multiple(tensor: Tensor, other: Tensor) -> bool:
    if _same_memory(tensor, other):
        return True
    fits = tensor.numel() == other.numel() and tensor.device == other.device
    return fits and fit_factors(tensor, [other]) is not None
