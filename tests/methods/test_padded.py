"""Every method with every option scores a padded batch like its texts one by one.

Values are generated from the declared types of the options (see `tests.methods.values`), so a new method or option is
compared without a change here, and one whose values are unknown fails by its name.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from tests.methods.values import Chosen, option_values
from tests.quick import covering
from tests.shared import shared
from unilinattn import Attribution, list_methods, trace
from unilinattn.errors import UncoveredError, UnilinattnError
from unilinattn.methods.run import run_method
from unilinattn.registry import Method
from unilinattn.testing import TOLERANCES, promoted, relative_error
from unilinattn.testing.hosts import host
from unilinattn.tracing.trace import Trace

HOSTS = ("mamba", "llama, grouped queries", "bert")
SIDES = ("left", "right")
LENGTHS = (5, 3)
TARGETS = (-1, None)
LIMIT = TOLERANCES["padding", torch.float64]

FUNCTIONS: Mapping[str, Callable[[str], Callable[[Any], Any]]] = {
    # A function of the output does not know where a text ends: the last token with padding on the left, and with
    # padding on the right the last one that every text has.
    "logit": lambda side: _last_logit if side == "left" else _shared_logit,
    "heads": lambda side: _first,
    "channels": lambda side: _first,
}
"""A function for each option that takes one, by the side of the padding."""

PLACES = {("knockout", "edges"): "positions count padding"}
"""Options whose numbers are positions in the padded sequence, with the reason."""

LEFT_OUT: Mapping[tuple[str, str], str] = {
    ("raw", "start_layer"): "belongs to variant='published-code'",
    **dict.fromkeys(
        [("raw", "variant"), ("rollout", "variant"), ("attribution", "variant")],
        "the released code scores images, which are not padded: see test_published",
    ),
}
"""Options that are not compared, with the reason."""

VANISHING = dict.fromkeys(
    [("bert", "gradient"), ("bert", "smoothgrad")],
    "a layer norm after the embeddings: the signed sum of a gradient over channels is zero up to rounding",
)
"""Hosts and methods whose scores may vanish, with the reason; errors are relative to the default scores there."""


def _last_logit(output: Any) -> Tensor:
    return output.logits[:, -1, 3]


def _shared_logit(output: Any) -> Tensor:
    return output.logits[:, min(LENGTHS) - 1, 3]


def _first(operator: Any) -> list[int]:
    return [0]


@cache
def model_of(name: str) -> torch.nn.Module:
    return host(name).model().double()


@shared
def traced(name: str, side: str, text: int | None = None, *, seed: int = 0) -> Trace:
    """Trace the padded batch, or one text by itself; `seed` draws the words."""
    longest = max(LENGTHS)
    words = torch.randint(31, (len(LENGTHS), longest), generator=torch.Generator().manual_seed(seed))
    if text is not None:
        with promoted():
            return trace(model_of(name), words[text : text + 1, : LENGTHS[text]])
    ids, mask = torch.full((len(LENGTHS), longest), 9), torch.zeros(len(LENGTHS), longest, dtype=torch.long)
    for at, length in enumerate(LENGTHS):
        ids[at, real(side, at)], mask[at, real(side, at)] = words[at, :length], 1
    with promoted():
        return trace(model_of(name), {"input_ids": ids, "attention_mask": mask})


def real(side: str, text: int) -> slice:
    """Return the real tokens of a text in the padded batch."""
    start = max(LENGTHS) - LENGTHS[text] if side == "left" else 0
    return slice(start, start + LENGTHS[text])


def resolved(method: str, option: str, value: Any, name: str, side: str, text: int | None) -> Any:
    """Return the value of an option for one run: of the padded batch, or of one text."""
    if (method, option) in PLACES and isinstance(value, list):
        # Positions among the real tokens of the shortest text, which every text has.
        shortest = LENGTHS.index(min(LENGTHS))
        shift = real(side, shortest).start - (0 if text is None else real(side, text).start)
        return [tuple(place % min(LENGTHS) + shift for place in edge) for edge in value]
    if isinstance(value, list):
        return [resolved(method, option, each, name, side, text) for each in value]
    if not isinstance(value, Chosen):
        return value
    if value.kind is str:
        return traced(name, side, text).layers[value.index].name
    if value.kind is Callable:
        assert option in FUNCTIONS, f"{method}: give a function for the option {option!r} in FUNCTIONS"
        return FUNCTIONS[option](side)
    other = traced(name, side, text, seed=1)
    assert isinstance(other, value.kind), f"{method}: no value is known for {option!r}, a {value.kind}"
    return other


Outcome = Attribution | UnilinattnError
Options = Mapping[str, Any]


class Runs:
    """Runs of one method on one host; each is run once, those of single texts for both sides."""

    def __init__(self, method: Method, name: str) -> None:
        self.method, self.name = method, name
        self._outcomes: dict[str, Outcome] = {}

    def __call__(self, options: Options, target: int | None, side: str, text: int | None = None) -> Outcome:
        given = {
            option: resolved(self.method.name, option, value, self.name, side, text)
            for option, value in options.items()
        }
        key = repr((given, target, side if text is None else text))
        if key not in self._outcomes:
            self._outcomes[key] = self._outcome(traced(self.name, side, text), target, given)
        return self._outcomes[key]

    def _outcome(self, run: Trace, target: int | None, options: Options) -> Outcome:
        with promoted(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return run_method(self.method, run, target, options)
            except UnilinattnError as error:
                return error

    def faults(self, options: Options, target: int | None, side: str) -> list[str]:
        """Return where a padded batch differs from its texts by themselves."""
        padded = self(options, target, side)
        alone = [self(options, target, side, text) for text in range(len(LENGTHS))]
        singles = [one for one in alone if isinstance(one, Attribution)]
        if isinstance(padded, UnilinattnError) or len(singles) < len(alone):
            refusals = {type(one) for one in alone if one not in singles}
            return [] if type(padded) in refusals else [f"padded {_short(padded)}, alone {list(map(_short, alone))}"]
        sizes = torch.zeros(len(LENGTHS), dtype=torch.float64)
        if (self.name, self.method.name) in VANISHING:
            defaults = [self({}, target, side, text) for text in range(len(LENGTHS))]
            sizes = torch.stack([one.scores.norm() for one in defaults if isinstance(one, Attribution)])
        errors = _errors(padded, singles, side, sizes)
        return [f"{where}: {error:.1e}" for error, where in errors if not error <= LIMIT]


def _short(outcome: Outcome) -> str:
    return "accepted" if isinstance(outcome, Attribution) else repr(outcome)


def _errors(padded: Attribution, alone: Sequence[Attribution], side: str, sizes: Tensor) -> Iterator[tuple[float, str]]:
    """Yield the errors of all numbers of a result; `sizes` are the least norms of scores that count for each text."""
    for one in alone:
        assert (one.dims, one.layers, one.heads) == (padded.dims, padded.layers, padded.heads)
        assert one.extras.keys() == padded.extras.keys()
    for name, got in {"scores": padded.scores, **padded.extras}.items():
        expected = [one.scores if name == "scores" else one.extras[name] for one in alone]
        # Extras may be what is left of a sum of the scores, which is as exact as they are.
        least = sizes if name == "scores" else torch.stack([one.scores.double().norm() for one in alone])
        yield from ((error, f"{name} {where}") for error, where in _tensor_errors(got, expected, side, least))
    worst = {"completeness gap": (padded.completeness_gap, [one.completeness_gap for one in alone])}
    for field in ("reconstruction_error", "stream_error"):
        for layer, number in getattr(padded, field).items():
            worst[f"{field} of {layer}"] = number, [getattr(one, field)[layer] for one in alone]
    for name, (number, singles) in worst.items():
        # Relative errors of the worst text.
        numbers = [single for single in singles if single is not None]
        yield abs((number or 0.0) - max(numbers, default=0.0)), name
    for name, got in padded.extras.items():
        axes, _ = _axes(got, [one.extras[name] for one in alone])
        for text in range(len(LENGTHS)):
            selected = padded.select(batch=text).extras.get(name)
            right = selected is None or (axes != [] and torch.equal(selected, got.select(axes[0], text)))
            yield float(not right), f"{name} selected for text {text}"
    for text, one in enumerate(alone):
        if one.sinks is not None and padded.sinks is not None:
            moved = [place + real(side, text).start for place in one.sinks[0]]
            yield float(moved != list(padded.sinks[text])), f"sinks of text {text}"


def _tensor_errors(got: Tensor, expected: Sequence[Tensor], side: str, least: Tensor) -> Iterator[tuple[float, str]]:
    texts, sizes = _axes(got, expected)
    if not texts:
        yield float((got - torch.stack(list(expected)).amax(0)).abs().amax()), "of the worst text"
        return
    for text, single in enumerate(expected):
        mine, one = got.select(texts[0], text), single.select(texts[0], 0)
        at = tuple(
            real(side, text) if pair == (max(LENGTHS), min(LENGTHS)) else slice(None)
            for axis, pair in enumerate(sizes)
            if axis != texts[0]
        )
        size = torch.maximum(one.double().norm(), least[text])
        yield relative_error(mine[at].reshape(1, -1), one.reshape(1, -1), scale=size[None]), f"of text {text}"
        rest = mine.clone()
        rest[at] = 0
        yield float(bool(rest.any())), f"at padding of text {text}"


def _axes(got: Tensor, expected: Sequence[Tensor]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the axes of texts, and the sizes of every axis in the batch and for the shortest text by itself."""
    sizes = list(zip(got.shape, expected[LENGTHS.index(min(LENGTHS))].shape, strict=True))
    return [axis for axis, pair in enumerate(sizes) if pair == (len(LENGTHS), 1)], sizes


@cache
def runs_of(method: str, name: str) -> Runs:
    return Runs(list_methods()[method], name)


def values_of(method: Method, option: str) -> list[Any]:
    """Return the generated values of an option."""
    assert method.options is not None
    try:
        return option_values(method.options.model_fields[option])
    except NotImplementedError as error:
        pytest.fail(f"{method.name}, option {option}: {error}")


@cache
def effective(method: str, option: str) -> tuple[str, Options, int | None]:
    """Return a host, options and a target with which the option changes the scores of a padded batch.

    An option without an effect by itself gets a value of another option as its companion.
    """
    for name in HOSTS:
        runs = runs_of(method, name)
        for companion, target in product(({}, *companions(runs.method, option)), TARGETS):
            before = runs(companion, target, "left")
            if companion and isinstance(before, UnilinattnError):
                continue
            for value in values_of(runs.method, option):
                after = runs({**companion, option: value}, target, "left")
                if isinstance(after, Attribution) and not alike(before, after):
                    return name, {**companion, option: value}, target
    pytest.fail(f"{method}: no generated value of the option {option} changes a score")


def companions(method: Method, option: str) -> Iterator[dict[str, Any]]:
    """Yield each value of each other option; a method's own are declared last."""
    for other in reversed(option_names(method)):
        if other != option:
            yield from ({other: value} for value in values_of(method, other))


def option_names(method: Method) -> list[str]:
    """Return the options of a method that are compared."""
    names = method.options.model_fields if method.options is not None else ()
    return [name for name in names if (method.name, name) not in LEFT_OUT]


def alike(before: Outcome, after: Attribution) -> bool:
    if isinstance(before, UnilinattnError) or before.dims != after.dims or before.scores.shape != after.scores.shape:
        return False
    return torch.allclose(before.scores, after.scores, rtol=1e-6, atol=0)


OPTIONS = [
    pytest.param(name, option, id=f"{name}-{option}")
    for name, method in list_methods().items()
    for option in option_names(method)
]


@pytest.mark.parametrize(("side", "target"), [("left", -1), ("right", -1), ("left", None)])
@pytest.mark.parametrize("name", [HOSTS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in HOSTS[1:])])
@pytest.mark.parametrize("method", list_methods())
def test_default_options(method: str, name: str, side: str, target: int | None) -> None:
    runs = runs_of(method, name)
    assert isinstance(runs({}, -1, side), Attribution) or name != HOSTS[0]
    assert runs.faults({}, target, side) == []


@pytest.mark.slow
@pytest.mark.parametrize(("method", "option"), OPTIONS)
def test_a_value_that_changes_the_scores(method: str, option: str) -> None:
    name, options, target = effective(method, option)
    assert runs_of(method, name).faults(options, target, "left") == []


class Unknown(BaseModel):
    """Options with a type without known values."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    weight: complex = 1j
    trace: type[Trace] | None = None


def by_length(run: Trace, *, target: int, **options: Any) -> Attribution:
    """Count the tokens at padding."""
    result = list_methods()["raw"].function(run, target=target)
    return replace(result, scores=result.scores * result.scores.shape[-1])


def shifted(run: Trace, *, target: int, **options: Any) -> Attribution:
    """Give scores to padding."""
    result = list_methods()["raw"].function(run, target=target)
    return replace(result, scores=result.scores + 1)


def of_whole_texts(run: Trace, *, target: int, **options: Any) -> Attribution:
    """Refuse padding."""
    if run.mask is not None:
        raise UncoveredError("padding")
    return list_methods()["raw"].function(run, target=target)


def of_one_key(run: Trace, *, target: int, **options: Any) -> Attribution:
    """Report the mean over all keys."""
    result = list_methods()["raw"].function(run, target=target)
    return replace(result, extras={"mean": result.scores.mean(-1)})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (by_length, "scores of text 1: "),
        (shifted, "scores at padding of text 1: "),
        (of_whole_texts, r"padded UncoveredError\('padding'\), alone \['accepted', 'accepted'\]"),
        (of_one_key, "mean of text 1: "),
    ],
)
def test_a_method_that_reads_padding_fails(function: Callable[..., Attribution], message: str) -> None:
    runs = Runs(Method(function.__name__, "", function), HOSTS[0])
    for side in SIDES:
        (fault,) = runs.faults({}, -1, side)
        assert re.match(message, fault)


def test_an_option_without_known_values_fails_by_its_name() -> None:
    method = Method("one", "", by_length, options=Unknown)
    with pytest.raises(pytest.fail.Exception, match=r"one, option trace: no values are known for type\["):
        values_of(method, "trace")
    with pytest.raises(AssertionError, match="one: no value is known for 'weight', a <class 'complex'>"):
        Runs(method, HOSTS[0])({"weight": values_of(method, "weight")[0]}, -1, "left")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "option"), OPTIONS)
def test_every_value(method: str, option: str) -> None:
    _, given, _ = effective(method, option)
    companion = {other: value for other, value in given.items() if other != option}
    values, parts = values_of(list_methods()[method], option), [{}, companion] if companion else [{}]
    cases = list(product(values, parts, HOSTS, TARGETS, SIDES))
    # Every value, host, target and side, and not each pair of these, which are tested with default options.
    chosen = covering({at: [repr(each) for each in case] for at, case in enumerate(cases)})
    faults = {}
    for at in sorted(chosen):
        value, part, name, target, side = cases[at]
        faults[repr(cases[at])] = runs_of(method, name).faults({**part, option: value}, target, side)
    assert {case: each for case, each in faults.items() if each} == {}
