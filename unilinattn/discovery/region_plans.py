"""The regions of a recorded forward: what it computes between two cuts of its stream.

A tensor is a cut if all that the output needs of the tokens passes through it, as through a residual stream between
its sums. A region is the branch that is added to the first cut, without a norm in front of it, or everything between
the two where there is no such sum.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from unilinattn.call.nested import tensors
from unilinattn.discovery.module_frame import Event, Value
from unilinattn.errors import UncoveredError

SUMS = ("add", "add_", "__add__", "__iadd__", "__radd__")
"""Names of functions by which a forward adds a branch to its stream."""

READS = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "equal", "allclose")
"""Names of functions that give numbers of a tensor to Python, whose decisions no region can repeat."""


@dataclass(frozen=True)
class Plan:
    """A region of a recorded forward.

    Attributes:
        calls: its calls.
        entered: the tensor that enters.
        others: the others that it reads.
        output: the tensor that it computes.
        made: what made the tensor into which it writes its output, None if its last call returns a new one.
    """

    calls: tuple[Event, ...]
    entered: Value
    others: tuple[Value, ...]
    output: Value
    made: Value | None


def planned(events: Sequence[Event], ids: set[Value], vectors: set[Value], ends: Sequence[Value]) -> Iterator[Plan]:
    """Yield the regions of a recorded forward, from its first cut on; it reads `ids`, and `vectors` such as pixels."""
    ids, carried = {*ids}, {*vectors}
    for event in events:
        if carried.intersection(event.read) or (ids.intersection(event.read) and _looks_up(event)):
            carried.update(event.values)
        elif ids.intersection(event.read) and not any(t.is_floating_point() for t in tensors(event.result)):
            ids.update(event.values)
    needed, path = carried.intersection(ends), []
    for event in reversed(events):
        if needed.intersection(event.values):
            path.append(event)
            needed |= carried.intersection(event.read)
    path.reverse()
    start: Value | None = None
    between: list[Event] = []
    for event, cut in zip(path, _cuts(path, ends, carried), strict=True):
        between.append(event)
        if cut is not None:
            if start is not None and (plan := _region(start, between, cut)) is not None:
                _require_repeatable(events, plan)
                yield plan
            start, between = cut, []


def _looks_up(event: Event) -> bool:
    """Tell whether a call makes vectors of ids, by a module or a table."""
    has_table = isinstance(event.target, nn.Module) or any(t.is_floating_point() for t in tensors(event.args))
    return has_table and any(tensor.is_floating_point() for tensor in tensors(event.result))


def _cuts(path: Sequence[Event], ends: Sequence[Value], carried: set[Value]) -> Iterator[Value | None]:
    """Yield for each call of a path its result if nothing else that is needed later was computed before."""
    last = {value: event.number for event in path for value in event.read if value in carried}
    last |= dict.fromkeys(ends, path[-1].number + 1 if path else 0)
    live: set[Value] = set()
    for event in path:
        live = {value for value in (*live, *event.values) if last.get(value, -1) > event.number}
        yield next(iter(live)) if len(live) == 1 and live <= {*event.values} else None


def _region(start: Value, calls: Sequence[Event], end: Value) -> Plan | None:
    """Return the region of the calls from one cut to the next, None if they only call submodules one after another."""
    entered, output = start, end
    if calls[-1].name in SUMS and start in calls[-1].read:
        branches = [value for value in calls[-1].read if value != start]
        if len(branches) != 1:
            return None
        calls, output = calls[:-1], branches[0]
    while calls and _is_norm(calls[0], entered, calls):
        entered, calls = calls[0].values[0], calls[1:]
    if all(isinstance(call.target, nn.Module) for call in calls):
        return None
    inside = {value for call in calls for value in call.values}
    read = dict.fromkeys(value for call in calls for value in call.read)
    others = tuple(value for value in read if value not in inside and value != entered)
    aliases = {value: alias for call in calls for value, alias in zip(call.values, call.aliases, strict=True)}
    made = output
    while (alias := aliases.get(made)) is not None:
        made = alias
    makes = next((call for call in calls if made in call.values), None)
    if makes is None or (made != output and not isinstance(makes.result, Tensor)):
        # It writes into a tensor from outside.
        return None
    return Plan(tuple(calls), entered, others, output, None if made == output else made)


def _is_norm(call: Event, entered: Value, calls: Sequence[Event]) -> bool:
    """Whether a submodule alone reads what enters, and returns one tensor of the size of the branch, as a norm does."""
    is_alone = {*call.read} == {entered} and all(entered not in other.read for other in calls[1:])
    return isinstance(call.target, nn.Module) and is_alone and call.shapes == calls[-1].shapes


def _require_repeatable(events: Sequence[Event], plan: Plan) -> None:
    """Raise `UncoveredError` if Python reads numbers that a region computes, or if a part of a tensor is written."""
    inside = {value for call in plan.calls for value in call.values}
    after = [event for event in events if plan.calls[0].number < event.number < plan.calls[-1].number]
    for event in after:
        if inside.intersection(event.read):
            inside.update(event.values)
    reading = next((event for event in after if event.name in READS and inside.intersection(event.read)), None)
    writing = next((event for event in after if event.writes_view and inside.intersection(event.read)), None)
    if writing is not None:
        raise UncoveredError(
            f"The model's own forward writes into a view of a tensor ({writing.name}), which cannot be followed. Write "
            "into the tensor itself, or make this part a module."
        )
    if reading is not None:
        raise UncoveredError(
            f"The model's own forward decides by numbers of its tokens ({reading.name}), so what it computes for "
            "others is unknown. Make this part a module."
        )
