"""Measured memory of every method, reduction and scope: within `max_memory`, or refused before allocation."""

from importlib import import_module
from typing import Any

import pytest

import unilinattn as ula
from tests.memory.hosts import HOSTS, WIDE, linear, traced
from unilinattn.errors import MemoryLimitError, NonFiniteError, OptionError, UncoveredError
from unilinattn.memory import in_words
from unilinattn.operator.stages import Mix, walk
from unilinattn.testing.peak import peak_of
from unilinattn.tracing.trace import Trace

LENGTH = 96
LIMIT = 1 << 19
NARROW = 1 << 17
"""Limit for the narrow hosts of the tables."""
SLACK = 1.1
"""Factor on the limit for the rounding of block sizes."""

REDUCED = [{"heads": heads} for heads in ("mean", "max", "min", "abs-mean", "product", "geometric-mean", 0, [0, -1])]
SCOPED = [{"scope": scope, "heads": heads} for scope in ("mixer", "unified") for heads in ("mean", "max", [0, 1])]
CASES: list[tuple[str, dict[str, Any]]] = [
    *[("raw", options) for options in (*REDUCED, *SCOPED)],
    ("raw", {"heads": "max", "target": -1}),
    ("raw", {"heads": "abs-mean", "normalize": "rows", "discard": 0.2}),
    ("rollout", {"heads": "max"}),
    ("rollout", {"heads": "min", "target": -1}),
    ("rollout", {"scope": "unified", "sign": "abs", "target": -1}),
    ("latim", {}),
    ("latim", {"target": -1}),
    ("latim", {"p": 1, "bias": "query"}),
    ("alti", {}),
    ("alti", {"compose": "rollout", "target": -1}),
    ("latim", {"compose": "rollout"}),
    *[(method, {"by_head": True}) for method in ("raw", "latim", "alti")],
    *[(method, {"by_head": True, "target": -1}) for method in ("raw", "latim", "alti")],
    ("alti", {"by_head": True, "heads": [1, 0]}),
    ("latim", {"heads": [0, 1]}),
]
COMMON = [
    ("raw", {"heads": "max"}),
    ("raw", {"heads": "max", "target": -1}),
    ("raw", {"heads": "max", "scope": "unified"}),
    ("raw", {"heads": [0, 1], "scope": "mixer"}),
    ("latim", {}),
]


def taken(trace: Trace, method: str, options: dict[str, Any], limit: int) -> tuple[int, bool]:
    """Return the peak bytes without the result, and whether the request was refused."""
    sizes: list[int] = []
    refused = False

    def run() -> None:
        nonlocal refused
        try:
            result = ula.explain(trace, method=method, max_memory=limit, progress=False, **options)
            sizes.append(result.scores.nbytes)
        except NonFiniteError:
            # The product of all heads of a wide layer can overflow; its scores were computed and are refused.
            sizes.append(ula.estimate(trace, method=method, **options).result)
        except MemoryLimitError as error:
            refused = True
            assert f"max_memory allows {in_words(limit)}" in str(error)

    peak = peak_of(run).peak
    # A partially filled result counts towards the bytes of a refused request.
    return peak - sum(sizes), refused


def mixers(trace: Trace) -> int:
    """Return the largest number of token mixers in a layer, convolutions included."""
    chains = [chain for layer in trace.layers for chain in layer.operator.chains.values()]
    return max(sum(isinstance(stage, Mix) for stage in walk(chain)) for chain in chains)


def check(trace: Trace, method: str, options: dict[str, Any], limit: int = LIMIT) -> None:
    for layer in trace.layers:
        # Deferred gates and norms belong to the operator: compute them before the measurement.
        layer.operator.apply(layer.operator.inputs)
    bytes_, refused = taken(trace, method, options, limit)
    begun = 0 if not refused else ula.estimate(trace, method=method, **options).result
    # Vectors through a layer need the values of every tap of a convolution, which are also linear in the length.
    through = method in ("latim", "alti") or options.get("scope") == "unified"
    vectors = (3 + mixers(trace) if through else 1) * linear(trace)
    most = SLACK * limit + vectors + begun
    assert bytes_ <= most, f"{bytes_ / 2**20:.1f} MiB taken, {most / 2**20:.1f} MiB are allowed; refused: {refused}"


STEP = 38
"""A host of the last group runs every `STEP`-th case, from an offset of its own."""

SHORT = ("bert", "hyena", "multi-head hyena", "opt")
"""Hosts that accept only about 40 tokens."""
NAMES = list({host.architecture: host.name for host in reversed(HOSTS)}.values())
SOME_CASES = ("llama, grouped queries", "wide mamba2", "wide rwkv", "qwen3 next", "s4d")
SAMPLED = [
    *(("wide mamba", *case) for case in CASES),
    *((name, *case) for at, name in enumerate(SOME_CASES) for case in CASES[at % 4 :: 4]),
    *((name, *case) for name in ("wide mamba2", "wide rwkv") for case in COMMON),
    *((name, *case) for at, name in enumerate(NAMES) for case in CASES[at % STEP :: STEP]),
]
"""The bytes depend on the structure and on the cut: every case on a decayed memory, some cases on attention and on the
other structures of the mixers, and one on a host of each architecture."""


@pytest.mark.parametrize(("name", "method", "options"), SAMPLED, ids=str)
def test_every_host_stays_within_the_limit_or_is_refused(name: str, method: str, options: dict[str, Any]) -> None:
    try:
        trace = traced(name, 40 if name.startswith(SHORT) else LENGTH)
        ula.estimate(trace, method=method, **options)
    except (OptionError, UncoveredError) as error:
        pytest.skip(f"not covered: {error}")
    check(trace, method, options, LIMIT if name in WIDE else NARROW)


@pytest.mark.parametrize("options", [{"heads": "max"}, {"heads": "max", "scope": "unified"}], ids=str)
def test_blocks_of_all_channels_would_exceed_the_limit(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = traced("wide mamba", LENGTH)
    cost = import_module("unilinattn.operator.cost")
    monkeypatch.setattr(cost, "block_cut", lambda scope, *_: (64, scope.groups, 0))
    with pytest.raises(AssertionError, match="MiB taken"):
        check(trace, "raw", options)


def test_a_reduction_needs_the_memory_of_a_few_channels() -> None:
    trace = traced("wide mamba", LENGTH)
    check(trace, "raw", {"heads": "max"})
    every = 128 * LENGTH**2 * 4
    bytes_, refused = taken(trace, "raw", {"heads": "max"}, LIMIT)
    assert not refused
    assert bytes_ <= SLACK * LIMIT + linear(trace) < every / 4
