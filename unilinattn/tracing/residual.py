"""Find the sum of a layer's output and the residual stream, from the tensors that modules exchanged in one run.

A sum is accepted if its parts add up to a later tensor element by element, up to rounding. Sums on the stream that the
layer reads, and those with the fewest parts, come first. The output of one more module (a parallel MLP or mixer) may be
a part only if the layer cannot depend on it: the module ran later, or the layer's inputs were traced back to the
stream without it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from jaxtyping import Num
from torch import Tensor, nn

from unilinattn.architectures.recorded import passed_ports
from unilinattn.call import Call
from unilinattn.errors import UncoveredError
from unilinattn.host.module_calls import CallRecord, Following, ResidualSite, tensors_in

NEARBY = 12
"""Sibling calls searched before and after a layer: a flat model has all of its modules in one block."""

SAMPLE = 1 << 12
"""Approximate number of elements to which factors are fitted."""

FEW = 64
"""Approximate number of elements by which most candidates are ruled out."""

CANDIDATES = 128
"""Candidates that are tried at once on few elements."""

NEGLIGIBLE = 1e-10
"""Factor of a part that a total lacks, as fitted in float64."""

BLOCK = 1 << 20
"""Elements compared in float64 at once."""

Candidate = tuple[Tensor, Tensor, Tensor | None]
"""A tensor that may be the sum of a stream, the layer's output and another output: (total, stream, other)."""


def locate_in_stream(layer: CallRecord, block: CallRecord) -> bool:
    """Set `layer.site` if the tensors that a block's modules exchanged prove the sum of its output and a stream.

    Returns whether the sum was found; that requires modules that received the stream and the sum. Otherwise sets
    `layer.reader`, the module that reads the output itself. No names are used.
    """
    inside = _index(layer, block)
    if layer.output is None or layer.entered is None or inside is None:
        return False
    before, after = block.children[max(0, inside - NEARBY) : inside], block.children[inside + 1 :][:NEARBY]
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
    if ports.keys() != {"x", *names} or not ports[names[0]]:
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
    """Return the sum of a stream and the tensor `added`, None if there is none."""
    received = [t for child in after for t in (*tensors_in(child.arguments), *child.returned)]
    sums = _alike([*received, *block.returned], added)
    zero = not bool(added.any())
    parts = _candidates(layer, added, block, block.children[inside], before, after, zero=zero)
    candidates = ((total, stream, other) for stream, other in parts for total in sums)
    # Most layers need few candidates, and each takes a fit of all elements.
    fits = (_site(candidate, added, zero=zero) for candidate in _possible(candidates, added))
    return _likeliest(site for site in fits if site is not None)


def _possible(candidates: Iterator[Candidate], added: Tensor) -> Iterator[Candidate]:
    """Yield the candidates that may be sums by a few of their elements: those that are none cost no fit of many."""
    # The elements of each tensor once, of which a candidate names some; the last row is that of no other output.
    numbers, samples, bounds = dict[int, int](), list[Any](), list[float]()

    def number(tensor: Tensor) -> int:
        if id(tensor) not in numbers:
            numbers[id(tensor)] = len(samples)
            samples.append(_sample(tensor, FEW).double().cpu().numpy())
            bounds.append(8 * 3 * _epsilon(tensor))
        return numbers[id(tensor)]

    while batch := list(islice(candidates, CANDIDATES)):
        named = [[number(stream), number(added), -1 if x is None else number(x), number(t)] for t, stream, x in batch]
        elements = np.stack([*samples, np.zeros_like(samples[0])])[named]
        may_be = _may_be_sums(elements, np.array(bounds)[[row[3] for row in named]])
        yield from (candidate for candidate, is_possible in zip(batch, may_be, strict=True) if is_possible)


def _may_be_sums(elements: Any, bounds: Any) -> list[bool]:
    """Tell for each candidate whether a few elements of its three summands fit those of its total.

    Numpy has a tenth of torch's cost for a call, and these arrays are small: `elements` is (candidate, 4, element), the
    total last, and `bounds` has the rounding of each total.
    """
    finite = np.isfinite(elements).all((1, 2))
    elements = np.where(finite[:, None, None], elements, 0)
    size = np.abs(elements).sum(1, keepdims=True)
    elements = elements / np.where(size == 0, 1, size)
    basis, total = elements[:, :3], elements[:, 3]
    norms = np.linalg.norm(basis, axis=2)
    unit = basis / np.where(norms == 0, 1, norms)[..., None]
    # A summand of zeros has no direction, and its factor is zero.
    gram = unit @ unit.swapaxes(1, 2) + np.eye(3) * (norms == 0)[:, :, None]
    # Summands that differ by their rounding have no inverse of their products.
    dependent = np.linalg.det(gram) < NEGLIGIBLE
    gram[dependent] = np.eye(3)
    solution = np.linalg.solve(gram, unit @ total[..., None])[..., 0]
    if dependent.any():
        inverse = np.linalg.pinv(unit[dependent].swapaxes(1, 2))
        solution[dependent] = (inverse @ total[dependent][..., None])[..., 0]
    missed = np.sqrt(np.square(total - (solution[:, None] @ unit)[:, 0]).mean(1))
    factors = np.abs(solution) / np.where(norms == 0, 1, norms)
    # The factors of a sum leave at most its rounding on each element, and those fitted here leave less of it.
    agrees = missed <= bounds * factors.max(1).clip(1)
    # Many totals are the stream itself, of which the output is no part.
    needed = ((factors > NEGLIGIBLE) | (np.abs(basis).max(2) < NEGLIGIBLE**0.5)).all(1)
    possible: list[bool] = (~finite | (agrees & needed)).tolist()
    return possible


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


def fit_factors(total: Tensor, summands: Sequence[Tensor]) -> list[float] | None:
    """Return the factors with which parts add up to a total, None if they do not or if a part is not needed.

    Every element has to agree up to the rounding of its sum, since in a norm a few large channels would hide the rest.
    """
    if len(summands) == 2 and _is_plain_sum(total, *summands):
        return [1.0, 1.0]
    basis, wanted = _scaled([_sample(summand, SAMPLE) for summand in summands], _sample(total, SAMPLE))
    if not bool(torch.isfinite(basis).all() and torch.isfinite(wanted).all()):
        return None
    sizes = basis.norm(dim=0)
    if not bool((sizes > 0).all()):
        return None
    bound = len(summands) * _epsilon(total)
    solution = torch.linalg.lstsq((basis / sizes).cpu(), wanted[:, None].cpu()).solution[:, 0].to(sizes) / sizes
    # A factor within rounding of one is set to one.
    solution = torch.where((solution - 1).abs() <= 8 * bound / sizes, torch.ones_like(solution), solution)
    shares = (basis * solution).abs()
    needed = (shares > 4 * bound * (wanted.abs() + shares.sum(1))[:, None]).any(0)
    if not bool(needed.all()) or not _agrees(basis, wanted, solution, bound):
        return None
    columns, sums = [summand.detach().flatten() for summand in summands], total.detach().flatten()
    blocks = (slice(start, start + BLOCK) for start in range(0, sums.numel(), BLOCK))
    if not all(_agrees(*_scaled([c[rows] for c in columns], sums[rows]), solution, bound) for rows in blocks):
        return None
    return [float(factor) for factor in solution]


def _is_plain_sum(total: Tensor, first: Tensor, second: Tensor) -> bool:
    """Tell whether a total is the sum of two tensors to the bit, and neither of them without the other."""
    same = torch.equal(total, first.detach() + second.detach()) if first.dtype == second.dtype == total.dtype else False
    return same and not torch.equal(total, first) and not torch.equal(total, second)


def _epsilon(total: Tensor) -> float:
    """Return the rounding of a sum; some hosts keep the residual in float32 even in a float64 model."""
    return max(torch.finfo(total.dtype).eps, torch.finfo(torch.float32).eps)


def _sample(tensor: Tensor, count: int) -> Num[Tensor, " element"]:
    """Return about `count` elements of a tensor, in its order."""
    # An odd step samples every channel.
    numbers = slice(None, None, tensor.numel() // count | 1)
    if tensor.is_contiguous():
        return tensor.detach().flatten()[numbers]
    # A tensor whose memory has another order would be copied as a whole.
    places = torch.unravel_index(torch.arange(tensor.numel(), device="cpu")[numbers], tensor.shape)
    return tensor.detach()[tuple(place.to(tensor.device) for place in places)]


def _scaled(columns: Sequence[Tensor], sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return columns and their supposed sum in float64, every row divided by the sum of its absolute values."""
    basis, wanted = torch.stack([column.double() for column in columns], dim=1), sums.double()
    size = basis.abs().sum(1) + wanted.abs()
    size = size.masked_fill(size == 0, 1)
    return basis / size[:, None], wanted / size


def _agrees(basis: Tensor, wanted: Tensor, factors: Tensor, bound: float) -> bool:
    rounded = wanted.abs() + basis.abs() @ factors.abs()
    return bool(((wanted - basis @ factors).abs() <= bound * rounded).all())


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
            matching.append(tensor.reshape(like.shape))
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
