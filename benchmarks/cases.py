"""The measured cases: operations on structures and lengths, and the reference calls of each."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import unilinattn as ula
from benchmarks import models, plain
from benchmarks.rivals import (
    Place,
    Rival,
    calls_of,
    exponentials,
    map_floor,
    memory_steps,
    product,
    rollout_steps,
    row_steps,
    vectors_floor,
)
from unilinattn.frozen.run import frozen
from unilinattn.host.substitution import through_operators
from unilinattn.methods.attribution import gradient_weights
from unilinattn.options import weighted
from unilinattn.scoring.maps import Weight, vecmat
from unilinattn.scoring.selection import query_rows
from unilinattn.tracing.trace import Trace


@dataclass(frozen=True)
class Prepared:
    """An operation with its inputs allocated, and its rivals by name."""

    call: Callable[[], Any]
    rivals: Mapping[str, Rival] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One line of the benchmark.

    `goals`: the largest desired ratio to each rival, by device. `rounds`: timed rounds, of which a slow case runs at
    least `least`; 0 for a case that runs once.
    """

    operation: str
    structure: str
    length: int
    goals: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    rivals: tuple[str, ...] = ()
    rounds: int = 5
    least: int = 3


def prepared(case: Case, place: Place) -> Prepared:
    """Return the operation of a case, with only the rivals that it names."""
    operation = OPERATIONS[case.operation](case.structure, case.length, place)
    return Prepared(operation.call, {name: operation.rivals[name] for name in case.rivals})


def channel_mean_map(structure: str, length: int, place: Place) -> Prepared:
    """Fill the mean of all heads' maps, (L, L), from an existing operator."""
    operator = place.operator(structure, length)
    floor = map_floor(structure, length, place, operator)
    rivals = {"floor": floor, "calls": calls_of(operator.matrix, place)}
    if structure == "delta rule":
        rivals["steps"] = memory_steps(length, place)
    return Prepared(operator.matrix, rivals)


def rollout(structure: str, length: int, place: Place) -> Prepared:
    """Multiply the last token's row by one layer, starting from the layer's input: factors included."""
    mixer, x = models.mixer_of(structure, place.sizes, place.device), models.hidden(length, place.sizes, place.device)
    row = functional.one_hot(torch.tensor([[length - 1]], device=place.device), length).to(x)

    output = models.frozen(mixer, x).output

    def call() -> Tensor:
        return row + models.frozen(mixer, x, output).left_multiply(row)

    half: list[Prepared] = []

    def at_half() -> Tensor:
        if not half:
            half.append(rollout(structure, length // 2, place))
        output_row: Tensor = half[0].call()
        return output_row

    rivals = {"host": Rival(lambda: mixer(x)), "half": Rival(at_half)}
    if length <= models.LONGEST_HELD:
        core = plain.core_of(models.frozen(mixer, x))
        heads = core.heads
        value = place.numbers(1, length, heads, place.sizes.inner // heads)
        rivals["forward"] = Rival(lambda: core.apply(value))
        rivals["steps"] = rollout_steps(length, place, lambda: core.apply(value))
    return Prepared(call, rivals)


def adjoint_scan(structure: str, length: int, place: Place) -> Prepared:
    """Multiply the last token's row by the core, from existing factors."""
    core = plain.core_of(
        models.frozen(
            models.mixer_of(structure, place.sizes, place.device), models.hidden(length, place.sizes, place.device)
        )
    )
    row = torch.zeros(1, length, 1, 1, device=place.device)
    row[:, -1] = 1
    probe, whole = row.expand(-1, -1, core.heads, -1), place.numbers(length, place.sizes.inner)
    rivals = {"copy": Rival(whole.clone), "exponentials": exponentials(structure, length, place)}
    return Prepared(lambda: core.adjoint(probe), rivals)


def latim(structure: str, length: int, place: Place) -> Prepared:
    """Compute the l2 norms of T_ij x_j for all pairs, and check that the vectors sum to the output."""
    trace = place.traced(structure, length)
    call = _explained(trace, "latim")
    return Prepared(call, {"floor": vectors_floor(structure, length, place)})


def alti(structure: str, length: int, place: Place) -> Prepared:
    """Compute the ALTI scores of all pairs."""
    trace = place.traced(structure, length)
    return Prepared(_explained(trace, "alti"), {"floor": vectors_floor(structure, length, place)})


def _explained(trace: Trace, method: str) -> Callable[[], Tensor]:
    # Build the operator before the timing, as in the other operations.
    _ = trace.layers[0].operator
    return lambda: ula.explain(trace, method=method, progress=False).scores


def contributions(structure: str, length: int, place: Place) -> Prepared:
    """Compute the contributions of every token to the last output, (L, d)."""
    operator = place.operator(structure, length)
    floor = Rival(product(place, length, place.sizes.inner, place.sizes.width))
    rivals = {"floor": floor, "steps": row_steps(structure, length, place)}
    return Prepared(lambda: operator.contributions(-1), rivals)


def attribution(structure: str, length: int, place: Place) -> Prepared:
    """Multiply the last token's row by one layer's map, weighted by existing gradients and clamped at zero."""
    trace = place.traced(structure, length)
    layer, operator = trace.layers[0], place.operator(structure, length)
    weight = last_weights(trace)
    rows = query_rows(trace, layer, -1)
    row = layer.output.new_zeros(*rows.shape, layer.output.shape[1]).scatter_(2, rows.unsqueeze(-1), 1.0)
    options = weighted.Attribution()

    def call() -> Tensor:
        return row + vecmat(row, trace, layer, options, target=rows, weight=weight)

    return Prepared(call, {"map": Rival(operator.matrix)})


def last_weights(trace: Trace) -> Weight:
    """Return the gradients of the last token that weight the rows of a map in `attribution`."""
    return next(gradient_weights(trace, trace.layers, [-1], weighted.Attribution()))[trace.layers[0].name]


def gradient(structure: str, length: int, place: Place) -> Prepared:
    """Compute the gradient of the last token's logit at the output of the first of two layers.

    Includes the forward pass of the model.
    """
    model, ids = models.build(structure, place.sizes, place.device, 2), models.tokens(length, place.device)
    trace = models.traced(structure, length, place.sizes, place.device, 2)

    def forward() -> Tensor:
        with through_operators(model):
            return model(ids).logits

    return Prepared(lambda: trace.gradient(-1)[0], {"forward": Rival(forward)})


def logit(structure: str, length: int, place: Place) -> Prepared:
    """Compute the shares of the tokens in the last token's logit, from a trace of two layers.

    Returns the sum of the parts, and the logit.
    """
    trace, host = _two_layers(structure, length, place)

    def call() -> Tensor:
        shares = frozen(trace, [-1]).shares(-1)
        return torch.stack([shares.tokens.sum(1) + shares.bias, shares.value])

    return Prepared(call, {"host": Rival(host)})


def next_logit(structure: str, length: int, place: Place) -> Prepared:
    """Compute the shares of one more logit in an existing frozen run; return their sum and the logit."""
    trace, host = _two_layers(structure, length, place)
    run = frozen(trace, [-1])

    def call() -> Tensor:
        shares = run.shares(-1)
        return torch.stack([shares.tokens.sum(1) + shares.bias, shares.value])

    return Prepared(call, {"host": Rival(host)})


def _two_layers(structure: str, length: int, place: Place) -> tuple[Trace, Callable[[], Any]]:
    """Return a trace with its operators built, and the host's forward."""
    model, ids = models.build(structure, place.sizes, place.device, 2), models.tokens(length, place.device)
    trace = models.traced(structure, length, place.sizes, place.device, 2)
    for layer in trace.layers:
        _ = layer.operator
    return trace, lambda: model(ids)


def plain_map(structure: str, length: int, place: Place) -> Prepared:
    """Fill every head's map pair by pair, then take their mean."""
    operator = place.operator(structure, length)
    return Prepared(lambda: plain.mean_map(operator, by_pairs=True))


def plain_latim(structure: str, length: int, place: Place) -> Prepared:
    """Fill every channel's map pair by pair, store all vectors T_ij x_j, take their norms."""
    operator = place.operator(structure, length)
    return Prepared(lambda: plain.vectors(operator, by_pairs=True).norm(dim=-1))


def plain_gradient(structure: str, length: int, place: Place) -> Prepared:
    """Compute the gradient with the host's backward pass."""
    model, ids = models.build(structure, place.sizes, place.device, 2), models.tokens(length, place.device)
    return Prepared(lambda: plain.host_gradient(model, model.backbone.layers[0].mixer, ids))


OPERATIONS: dict[str, Callable[[str, int, Place], Prepared]] = {
    "map": channel_mean_map,
    "rollout": rollout,
    "adjoint": adjoint_scan,
    "attribution": attribution,
    "gradient": gradient,
    "logit": logit,
    "next logit": next_logit,
    "latim": latim,
    "alti": alti,
    "contributions": contributions,
    "plain map": plain_map,
    "plain latim": plain_latim,
    "plain gradient": plain_gradient,
}

MAPS = ("mamba", "mamba2", "softmax", "s4d", "delta rule")
ON_GPU = {"map": {"floor": 2.5}, "latim": {"floor": 2.0}, "alti": {"floor": 2.0}, "adjoint": {"copy": 2.0}}
"""Goals on a GPU: 40 % of the matrix rate for the map, half of it for norms, half of the copy bandwidth for scans."""


def all_cases(lengths: Callable[[int], int | None] = lambda length: length) -> Iterator[Case]:
    """Yield every case, sorted by model and length; `lengths` replaces a length, or returns None to omit it."""
    for case in sorted(_cases(), key=lambda case: (case.structure, case.length)):
        length = lengths(case.length)
        if length is not None:
            yield Case(case.operation, case.structure, length, case.goals, case.rivals, case.rounds, case.least)


def _cases() -> Iterator[Case]:
    gpu = {name: {"cuda": goals} for name, goals in ON_GPU.items()}
    for structure in MAPS:
        mamba = structure == "mamba"
        steps = ("steps",) if structure == "delta rule" else ()
        # Small work is bound by the number of calls.
        rivals = ("floor",) if mamba else ("floor", "calls", *steps)
        small = dict.fromkeys(rivals, 5.0 if mamba else 3.0)
        yield Case("map", structure, 512, {"cpu": small, **(gpu["map"] if mamba else {})}, rivals)
        large = dict.fromkeys(("floor", *steps), 3.0 if mamba else 2.0)
        yield Case("map", structure, 2048, {"cpu": large, **(gpu["map"] if mamba else {})}, ("floor", *steps))
    for length in (512, 2048, 8192):
        yield Case("gradient", "mamba", length, {d: {"forward": 3.0} for d in ("cpu", "cuda")}, ("forward",))
    for structure, goal in (("mamba", 1.5), ("mamba2", 1.5), ("softmax", 3.0)):
        yield Case("logit", structure, 512, {d: {"host": goal} for d in ("cpu", "cuda")}, ("host",))
        yield Case("next logit", structure, 512, {}, ("host",))
    yield Case("attribution", "mamba", 2048, {d: {"map": 1.3} for d in ("cpu", "cuda")}, ("map",))
    goals = {d: {"host": 0.3, "forward": 2.5, "steps": 2.5} for d in ("cpu", "cuda")}
    yield Case("rollout", "mamba", 2048, goals, ("host", "forward", "steps"))
    yield Case("rollout", "mamba2", 2048, {}, ("host", "forward"))
    for length in (2048, 8192):
        yield Case("adjoint", "mamba", length, gpu["adjoint"], ("copy", "exponentials"))
    for structure in ("mamba", "mamba2", "softmax"):
        goals = {"mamba": {**gpu["latim"], "cpu": {"floor": 1.7}}, "softmax": {"cpu": {"floor": 2.5}}}
        yield Case("latim", structure, 512, goals.get(structure, {}), ("floor",))
    yield Case("alti", "mamba", 512, gpu["alti"], ("floor",))
    yield Case("alti", "softmax", 512, {"cpu": {"floor": 2.5}}, ("floor",))
    goals = {"cpu": {"floor": 2.5, "steps": 2.5}}
    yield Case("contributions", "mamba", 2048, goals, ("floor", "steps"))
    yield Case("rollout", "mamba", GROWTH[0])
    for length in GROWTH[1:]:
        yield Case("rollout", "mamba", length, {d: {"half": 2.3} for d in ("cpu", "cuda")}, ("half",))
    for operation, lengths in SHAPE.items():
        for length in lengths:
            yield Case(operation, "mamba", length, rounds=3, least=1)
    for operation, lengths in ONCE.items():
        for length in lengths:
            yield Case(operation, "mamba", length, rounds=0)


GROWTH = (4096, 8192, 16384, 32768, 65536)
"""Lengths of the table of the rollout's growth."""

SHAPE = {
    "map": (64, 128, 256, 1024, 4096),
    "rollout": (64, 128, 256, 512, 1024),
    "attribution": (64, 128, 256, 512, 1024, 4096),
    "gradient": (64, 128, 256, 1024, 4096),
    "latim": (64, 128, 256),
    "contributions": (64, 128, 256, 512, 1024, 4096),
}
"""More lengths for the plot."""

ONCE = {
    "latim": (1024,),
    "plain map": (16, 32, 64, 128),
    "plain latim": (16, 32, 64, 128),
    "plain gradient": (16, 32, 64, 128, 256),
}
"""Lengths for the plot that run once because they are slow; plain definitions take up to about a minute."""
