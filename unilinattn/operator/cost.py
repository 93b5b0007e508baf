"""Memory and work of chains, of scopes' maps and of pairwise contributions, from the costs of their mixers.

Blocks and tiles are cut by these elements; everything else here is for estimates.
"""

from collections.abc import Mapping, Sequence
from math import prod

from torch import Tensor

from unilinattn.kernels.backend import implementation
from unilinattn.kernels.reduced_map.tiled import ROWS
from unilinattn.memory import allowed, rows_within
from unilinattn.mixers.cost import Cost, cost_of
from unilinattn.operator.factored import FactoredTerm, PairwiseForm, factored
from unilinattn.operator.rows import channel_unit
from unilinattn.operator.scopes import ScopedMap
from unilinattn.operator.selection import Heads, checked_heads, count_heads, is_mean
from unilinattn.operator.stages import Branch, Chain, Matrix, Mix, Scale, Stage, Unmapped, walk

TILE = 64
"""Rows of a tile of pairwise contributions."""

COLUMNS = {"cpu": 32, "cuda": 256}
"""Columns of a tile: on a CPU enough for the product with the output projection to run at its rate, with little memory;
a GPU is filled by more pairs at a time. TILE on other devices."""

BLOCK_ROWS = 64
"""Rows of a block below which channels are cut rather than rows: each block makes the factors of its keys anew."""


def pass_cost(chain: Sequence[Stage], tokens: int, channels: int, columns: int = 1) -> Cost:
    """Cost of `run` or `run_adjoint`: `tokens` of all sequences, `channels` at the chain's beginning.

    Beside what its costliest mixer holds, a pass holds what enters a stage, what leaves it, and one product.
    """
    elements, operations, _ = _walked(chain, tokens, channels, columns)
    return Cost(elements, operations)


def apply_cost(chains: Mapping[str, Chain], inputs: Mapping[str, Tensor]) -> Cost:
    """Cost of `MixerOperator.apply`, whose ports run one after the other."""
    costs = [pass_cost(chain, prod(inputs[port].shape[:2]), inputs[port].shape[2]) for port, chain in chains.items()]
    return Cost(max(cost.elements for cost in costs), sum(cost.operations for cost in costs))


def rows_cost(chain: Sequence[Stage], tokens: int, channels: int, rows: int) -> Cost:
    """Cost of `rows` rows of a per-channel chain's matrix: those of its last mixer, carried back through the rest.

    Beside the costliest mixer, the rows, their weights and a product.
    """
    mixers = [cost_of(stage.mixer) for stage in walk(chain) if isinstance(stage, Mix)]
    costs = [mixer.rows_cost(rows) for mixer in mixers[-1:]] + [mixer.pass_cost(rows) for mixer in mixers[:-1]]
    every = tokens * channels * rows
    largest = max((cost.elements for cost in costs), default=0)
    return Cost(largest + 3 * every, sum(cost.operations for cost in costs) + every * len(chain))


def left_multiply_cost(scope: ScopedMap, rows: int) -> Cost:
    """Cost of `MixerOperator.left_multiply` for `rows` rows."""
    return pass_cost(scope.chain, prod(scope.shape[:2]), scope.groups, rows)


def map_operations(scope: ScopedMap, heads: Heads = "mean") -> int:
    """Multiply-adds of `MixerOperator.row_blocks` for all rows."""
    terms = factored(scope.chain) if is_mean(heads) else None
    if terms is None:
        return sum(cost_of(stage.mixer).map_operations(1) for stage in walk(scope.chain) if isinstance(stage, Mix))
    total = 0
    for term in terms:
        if term.mixer is not None:
            mixer = cost_of(term.mixer)
            lags = len(term.taps or (0,)) if mixer.streams_by_lag else 1
            total += lags * mixer.map_operations(term.channels if term.is_weighted else 1)
    return total


def gradient_elements(chain: Sequence[Stage], tokens: int, channels: int) -> int:
    """Elements that a chain's forward pass keeps for its backward pass, with what the backward pass adds.

    `tokens` of all sequences, `channels` at the chain's beginning. A factor is made from vectors as wide as those that
    it scales: these, the factor and the product are kept.
    """
    elements = 0
    for stage in chain:
        if isinstance(stage, Matrix):
            elements += tokens * (channels + stage.weight.shape[0])
            channels = stage.weight.shape[0]
        elif isinstance(stage, Unmapped):
            channels = stage.width
        elif isinstance(stage, Mix):
            elements += cost_of(stage.mixer).gradient_elements(channels // stage.mixer.heads)
        elif isinstance(stage, Branch):
            elements += sum(gradient_elements(inner, tokens, channels) for inner in stage.chains)
        else:
            elements += 3 * tokens * channels
    return elements


def reduced_elements(terms: Sequence[FactoredTerm], shape: tuple[int, int, int], rows: int) -> int:
    """Elements held while `reduced_blocks` sums blocks of `rows` rows: the sum, a term, and what makes each term."""
    batch, _, keys = shape
    elements = 2 * batch * rows * keys
    for term in terms:
        if term.mixer is not None:
            mixer = cost_of(term.mixer)
            streams = len(term.taps or (0,)) if mixer.streams_by_lag else 1
            elements += streams * mixer.reduced_elements(rows, term.channels if term.is_weighted else 1)
            elements += _repeated_elements(term)
    return elements


def map_cut(
    scope: ScopedMap, heads: Heads = "mean", *, beside: int = 0, what: str | None = None
) -> tuple[int, int, int]:
    """Return the rows and channels that `row_blocks` takes at a time within `max_memory`, and its bytes then.

    `beside`: elements that the caller holds for each entry of a block without heads. Raises `MemoryLimitError` if not
    even the smallest block of `what` fits; without a name it returns that block, to estimate.
    """
    (batch, queries, keys), width = scope.shape, scope.width
    most = min(ROWS, queries)
    terms = factored(scope.chain) if is_mean(heads) else None
    if terms is None:
        wanted = checked_heads(heads, scope.heads)
        # Several heads are returned as a block, which their selection copies.
        selected = 1 if isinstance(wanted, (str, int)) else 2 * count_heads(wanted, scope.heads)
        return block_cut(scope, selected + beside, most, what)

    def size(rows: int) -> int:
        return width * (reduced_elements(terms, scope.shape, rows) + batch * rows * keys * beside)

    rows = rows_within(size, most, what)
    return rows, scope.groups, size(min(rows, queries))


def block_cut(scope: ScopedMap, each: int, most: int, what: str | None) -> tuple[int, int, int]:
    """Return the rows and channels that `reduced_block` takes at a time within `max_memory`, and its bytes then.

    `each`: elements that the caller holds for each pair of a row and a key. Raises `MemoryLimitError` if not even one
    row of the fewest channels of `what` fits; without a name it returns these, to estimate.
    """
    chain, groups = scope.chain, scope.groups
    (batch, queries, keys), width = scope.shape, scope.width
    unit = channel_unit(chain, groups)
    mixers = [stage.mixer for stage in walk(chain) if isinstance(stage, Mix)]
    # A tile and its scaled copy; one more for what is repeated for the channels of a head, two for stages before it,
    # and two for a sum of branches.
    copies = 2 + any(mixer.heads < groups for mixer in mixers) + 2 * (len(chain) > 1 or not chain[0].mixes)
    copies += 2 * any(isinstance(stage, Branch) for stage in chain)

    def size(rows: int, channels: int) -> int:
        pairs = batch * rows * keys
        tiles = [cost_of(mixer).tile_elements(rows, keys, -(-channels * mixer.heads // groups)) for mixer in mixers]
        # Blocks of some channels are joined to those before them.
        joined = 2 * pairs if channels < groups else 0
        return width * (max([*tiles, copies * channels * pairs]) + joined + each * pairs)

    channels, fewest = groups, min(most, BLOCK_ROWS)
    while channels > unit and size(fewest, channels) > allowed():
        channels = max(unit, channels // 2 // unit * unit)
    rows = rows_within(lambda count: size(count, channels), most, what)
    return rows, channels, size(min(rows, queries), channels)


def tile_columns(form: PairwiseForm, columns: int | None = None) -> int:
    """Return the columns of a tile, by default as many as the device needs."""
    return COLUMNS.get(form.values.device.type, TILE) if columns is None else columns


def tile_rows(
    form: PairwiseForm,
    *,
    beside: int = 0,
    parts: int = 1,
    columns: int | None = None,
    what: str | None = "vectors T_i(x_j)",
) -> int:
    """Return the rows of a tile that one of `parts` equal parts of `max_memory` allows.

    `beside`: tiles of vectors that the caller holds. Raises `MemoryLimitError` if not even one row of `what` fits;
    without a name it returns one, to estimate.
    """
    width = parts * form.values.element_size()
    return rows_within(lambda rows: width * tile_elements(form, rows, columns, beside=beside), TILE, what)


def tile_elements(form: PairwiseForm, rows: int, columns: int | None = None, *, beside: int = 0) -> int:
    """Elements held while tiles of `rows` rows are made and reduced, the values that they are made of included."""
    batch, _, keys, out = form.shape
    columns = min(tile_columns(form, columns), keys)
    pairs = batch * rows * columns
    mixers = [(cost_of(term.mixer), len(term.taps or ())) for term in form.terms if term.mixer is not None]
    held = sum(mixer.carried_elements for mixer, _ in mixers)
    if form.folded is not None:
        heads = form.folded.shape[2]
        inner = (batch * columns, heads, rows, 1)
        # Gram matrices are float64: two elements each.
        held += form.folded.numel() + 2 * (pairs + batch * keys * heads) * heads
    else:
        channels = form.channels
        inner = (batch, channels, rows, columns)
        held += sum(_repeated_elements(term) for term in form.terms)
        held += sum(mixer.weighted_elements(rows, columns, channels, lags) for mixer, lags in mixers)
        # A tile, and the next one, which terms are added to one by one.
        held += pairs * channels * min(3, 1 + max(1, len(mixers)))
    # Stages after the projection hold the vectors, their product, and a transposed copy.
    formed = 3 if form.tail else 0
    norms: int = implementation("contribution_norms", form.values).held_elements(inner, out)
    if form.folded is not None:
        # For l2 the vectors twice in float64 instead.
        norms = max(norms, 4 * pairs * heads)
    # The norms with and without what is added to a row's own, each beside the copy that puts its axes in order.
    return held + norms + pairs * (out * (formed + beside) + 4)


def tile_operations(form: PairwiseForm) -> int:
    """Multiply-adds of tiles of all pairs."""
    batch, queries, keys, out = form.shape
    pairs = batch * queries * min(keys, (keys + TILE) // 2 if form.causal else keys)
    if form.folded is not None:
        return pairs * form.folded.shape[2] * out
    mixers = [(cost_of(term.mixer), len(term.taps or ())) for term in form.terms if term.mixer is not None]
    inner = sum(mixer.state + lags for mixer, lags in mixers)
    return pairs * form.channels * (inner + (0 if form.weight is None else out))


def _repeated_elements(term: FactoredTerm) -> int:
    """Elements of a term's factors once each channel has its own: linear in length."""
    return sum(factor.shape[0] * factor.shape[1] * term.channels for factor in term.factors)


def _walked(chain: Sequence[Stage], tokens: int, channels: int, columns: int) -> tuple[int, int, int]:
    """Return the elements held, the multiply-adds, and the channels at the end."""
    elements, operations = tokens * channels * columns, 0
    for stage in chain:
        before = tokens * channels * columns
        within = 0
        if isinstance(stage, Matrix):
            operations += before * stage.weight.shape[0]
            channels = stage.weight.shape[0]
        elif isinstance(stage, Unmapped):
            channels = stage.width
        elif isinstance(stage, Scale):
            operations += before
        elif isinstance(stage, Mix):
            within, more = cost_of(stage.mixer).pass_cost(channels * columns // stage.mixer.heads)
            operations += more
        elif isinstance(stage, Branch):
            parts = [_walked(inner, tokens, channels, columns) for inner in stage.chains]
            within = max(part[0] for part in parts) + before
            operations += sum(part[1] for part in parts)
            channels = parts[0][2]
        after = tokens * channels * columns
        elements = max(elements, before + within if within else before + 2 * after)
    return elements, operations, channels
