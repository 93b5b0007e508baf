"""Memory of chains, of scopes' maps and of pairwise contributions, from the costs of their mixers.

It sets the sizes of blocks and tiles, and `estimate` reports it.
"""

from collections.abc import Mapping, Sequence
from math import prod

from torch import Tensor

from unilinattn.kernels.backend import implementation
from unilinattn.kernels.exponents import PRODUCT_ELEMENTS
from unilinattn.kernels.reduced_map.tiled import ROWS
from unilinattn.memory import allowed, rows_within
from unilinattn.mixers.chunked import Chunked
from unilinattn.mixers.cost import cost_of
from unilinattn.operator.factored import FactoredTerm, PairwiseForm, factored
from unilinattn.operator.rows import channel_unit
from unilinattn.operator.scopes import ScopedMap
from unilinattn.operator.selection import PRODUCTS, CheckedHeads, checked_heads, head_axis
from unilinattn.operator.stages import Branch, Chain, Matrix, Mix, Stage, Unmapped, walk

TILE = 64
"""Rows of a tile of pairwise contributions."""

TILE_ROWS = {"cuda": 256}
"""Most rows of a tile by device type, else `TILE`: starting kernels takes most of the time of small tiles on a GPU.

Memories that are computed chunk by chunk have `TILE` rows."""

FOLDED_TILE = 512
"""Most rows of a tile where W is applied to the values of each head: a pair costs so little that calls count.

Memories that are computed chunk by chunk have `TILE` rows here too."""

COLUMNS = {"cpu": 32, "cuda": 256}
"""Columns of a tile by device type, else `TILE`: enough for the product with the output projection to run at full rate
on a CPU, and more to occupy a GPU."""

BLOCK_ROWS = 64
"""Rows of a block below which channels are split before rows, because each block computes the keys' factors again."""


def pass_elements(chain: Sequence[Stage], tokens: int, channels: int, columns: int = 1) -> int:
    """Elements of `run` or `run_adjoint` on `tokens` tokens of all sequences with `channels` channels.

    They are the mixer's, or a stage's input and output and one product, whichever stage takes most.
    """
    return _pass(chain, tokens, channels, columns)[0]


def apply_elements(chains: Mapping[str, Chain], inputs: Mapping[str, Tensor]) -> int:
    """Elements of `MixerOperator.apply`, which runs one port after the other."""
    return max(
        pass_elements(chain, prod(inputs[port].shape[:2]), inputs[port].shape[2]) for port, chain in chains.items()
    )


def rows_elements(chain: Sequence[Stage], tokens: int, channels: int, rows: int) -> int:
    """Elements of `rows` rows of a per-channel chain's matrix: rows of its last mixer, passed back through the others.

    They are the largest mixer's, and the rows, their weights and a product.
    """
    mixers = [cost_of(stage.mixer) for stage in walk(chain) if isinstance(stage, Mix)]
    elements = [mixer.rows_elements(rows) for mixer in mixers[-1:]] + [
        mixer.pass_elements(rows) for mixer in mixers[:-1]
    ]
    return max(elements, default=0) + 3 * tokens * channels * rows


def left_multiply_elements(scope: ScopedMap, rows: int) -> int:
    """Elements of `MixerOperator.left_multiply` for `rows` rows."""
    return pass_elements(scope.chain, prod(scope.shape[:2]), scope.groups, rows)


def gradient_elements(chain: Sequence[Stage], tokens: int, channels: int) -> int:
    """Elements of a chain's forward and backward pass on `tokens` tokens of all sequences with `channels` channels.

    For a scale, the vectors that its factor is computed from, the factor and the product are saved.
    """
    elements = 0
    for stage in chain:
        if isinstance(stage, Matrix):
            elements += tokens * (channels + stage.shape[0])
            channels = stage.shape[0]
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
    """Elements of `reduced_blocks` for blocks of `rows` rows: the sum, a term, and the computation of each term."""
    batch, _, keys = shape
    elements = 2 * batch * rows * keys
    for term in terms:
        if term.mixer is not None:
            mixer = cost_of(term.mixer)
            elements += mixer.reduced_elements(rows, term.channels if term.is_weighted else 1)
            elements += _repeated_elements(term)
    return elements


def map_cut(
    scope: ScopedMap, heads: CheckedHeads = "mean", *, extra_elements: int = 0, subject: str | None = None
) -> tuple[int, int, int]:
    """Return the rows and channels per block of `row_blocks` within `max_memory`, and the bytes of a block.

    `extra_elements`: elements that the caller holds for each entry of a block without heads. Raises `MemoryLimitError`,
    which names `subject`, if the smallest block does not fit; returns that block if `subject` is None, for an estimate.
    """
    (batch, queries, keys), width = scope.shape, scope.element_bytes
    max_rows = min(ROWS, queries)
    heads = checked_heads(heads, scope.heads)
    terms = factored(scope.chain) if heads == "mean" else None
    if terms is None:
        # The selection of several heads copies their block.
        axis = head_axis(heads, scope.heads)
        copies = (2 * axis[0] if axis else 1) + product_elements(heads)
        return block_cut(scope, copies + extra_elements, max_rows, subject)

    def size(rows: int) -> int:
        return width * (reduced_elements(terms, scope.shape, rows) + batch * rows * keys * extra_elements)

    rows = rows_within(size, max_rows, subject)
    return rows, scope.groups, size(min(rows, queries))


def product_elements(heads: CheckedHeads) -> int:
    """Return the elements held for each entry of a product over heads, beside the block of heads."""
    return PRODUCT_ELEMENTS if isinstance(heads, str) and heads in PRODUCTS else 0


def heads_cut(scope: ScopedMap, subject: str | None = None) -> tuple[int, int, int]:
    """Return the rows and channels per block of `fill_heads`, and the bytes of a block, as `map_cut` does."""
    return block_cut(scope, 0, min(ROWS, scope.shape[1]), subject)


def block_cut(scope: ScopedMap, extra_elements: int, max_rows: int, subject: str | None) -> tuple[int, int, int]:
    """Return the rows and channels of a block within `max_memory`, at most `max_rows` rows, and its bytes.

    `extra_elements`: elements that the caller holds for each pair of a row and a key. Raises `MemoryLimitError`, which
    names `subject`, if one row of the fewest channels does not fit; returns these if `subject` is None (an estimate).
    """
    chain, groups = scope.chain, scope.groups
    (batch, queries, keys), width = scope.shape, scope.element_bytes
    unit = channel_unit(chain, groups)
    mixers = [stage.mixer for stage in walk(chain) if isinstance(stage, Mix)]
    # A tile and its scaled copy; one more if heads are repeated for their channels, two for stages before the mixer,
    # and two for a sum of branches.
    copies = 2 + any(mixer.heads < groups for mixer in mixers) + 2 * (len(chain) > 1 or not chain[0].mixes)
    copies += 2 * any(isinstance(stage, Branch) for stage in chain)

    def size(rows: int, channels: int) -> int:
        pairs = batch * rows * keys
        tiles = [cost_of(mixer).tile_elements(rows, keys, -(-channels * mixer.heads // groups)) for mixer in mixers]
        # A block of some channels is joined with the earlier ones.
        joined = 2 * pairs if channels < groups else 0
        return width * (max([*tiles, copies * channels * pairs]) + joined + extra_elements * pairs)

    channels, least_rows = groups, min(max_rows, BLOCK_ROWS)
    while channels > unit and size(least_rows, channels) > allowed():
        channels = max(unit, channels // 2 // unit * unit)
    rows = rows_within(lambda count: size(count, channels), max_rows, subject)
    return rows, channels, size(min(rows, queries), channels)


def tile_columns(form: PairwiseForm, columns: int | None = None) -> int:
    """Return the columns of a tile, by default those of `COLUMNS`."""
    return COLUMNS.get(form.values.device.type, TILE) if columns is None else columns


def tile_rows(
    form: PairwiseForm,
    *,
    extra_tiles: int = 0,
    portions: int = 1,
    columns: int | None = None,
    split: tuple[int, int] | None = None,
    subject: str | None = "vectors T_i(x_j)",
) -> int:
    """Return the rows of a tile that fits in one of `portions` equal portions of `max_memory`.

    `extra_tiles`: tiles of vectors that the caller holds. `split`: that of `tile_elements`. Raises `MemoryLimitError`,
    which names `subject`, if one row does not fit; returns 1 if `subject` is None, for an estimate.
    """
    width = portions * form.values.element_size()

    def size(rows: int) -> int:
        return width * tile_elements(form, rows, columns, extra_tiles=extra_tiles, split=split)

    chunked = any(isinstance(term.mixer, Chunked) for term in form.terms)
    most = TILE_ROWS.get(form.values.device.type, TILE) if form.folded is None else FOLDED_TILE
    return rows_within(size, TILE if chunked else most, subject)


def tile_elements(
    form: PairwiseForm,
    rows: int,
    columns: int | None = None,
    *,
    extra_tiles: int = 0,
    split: tuple[int, int] | None = None,
    products: bool = True,
) -> int:
    """Elements of computing and reducing tiles of `rows` rows, including the values.

    `split`: the number of parts of the channels, such as heads, that are reduced apart, and the channels of each.
    `products`: whether their vectors are formed.
    """
    batch, _, keys, out = form.shape
    columns = min(tile_columns(form, columns), keys)
    pairs = batch * rows * columns
    mixers = [(cost_of(term.mixer), len(term.taps or ())) for term in form.terms if term.mixer is not None]
    elements = sum(mixer.carried_elements for mixer, _ in mixers)
    if form.folded is not None:
        heads = form.folded.shape[2]
        inner = (batch * columns, heads, rows, 1)
        elements += form.folded.numel() + 2 * pairs * heads + sum(c.whole_rows_elements(rows) for c, _ in mixers)
        if split is None:
            # Gram matrices are float64, two elements per number.
            elements += 2 * batch * keys * heads * heads
    else:
        channels = form.channels
        inner = (batch, channels, rows, columns)
        elements += sum(_repeated_elements(term) for term in form.terms)
        elements += sum(mixer.weighted_elements(rows, columns, channels, lags) for mixer, lags in mixers)
        # A tile, and the next one, to which terms are added one by one.
        elements += pairs * channels * min(3, 1 + max(1, len(mixers)))
    if split is not None:
        return elements + _split_elements(form, (batch, rows, columns), *split, products=products)
    norms: int = implementation("contribution_norms", form.values).held_elements(inner, out)
    if form.folded is not None:
        # The l2 norm holds v twice in float64 instead.
        norms = max(norms, 4 * pairs * heads)
    # Stages after the projection hold the vectors, their product, and a transposed copy. The norms with and without the
    # addition to T_ii x_i are held with copies in the order of their axes.
    tail = 3 if form.tail else 0
    return elements + norms + pairs * (out * (tail + extra_tiles) + 4)


def split_elements(
    shape: tuple[int, int, int],
    out: int,
    count: int,
    channels: int,
    like: Tensor,
    *,
    by_key: bool = False,
    products: bool = True,
) -> int:
    """Elements of reducing tiles (batch, row, col) in `count` parts of `channels` channels with `out` outputs.

    `by_key`: whether each key has its weight. `products`: whether the products with the weights are formed.
    """
    batch, rows, columns = shape
    pairs, keys = batch * rows * columns, columns if by_key else 1
    inner = (batch * count * keys, channels, rows, columns // keys)
    norms: int = implementation("contribution_norms", like).held_elements(inner, out) if products else 0
    # The parts' channels and weights are copied; two norms of each pair are held with copies in the order of the axes.
    return pairs * count * (channels + 4) + batch * keys * count * channels * out + norms


def _split_elements(
    form: PairwiseForm, shape: tuple[int, int, int], count: int, channels: int, *, products: bool
) -> int:
    folded, out = form.folded, form.shape[3]
    if folded is not None:
        channels = max(1, channels * folded.shape[2] // form.channels)
    if form.weight is not None and not form.tail:
        by_key = folded is not None
        return split_elements(shape, out, count, channels, form.values, by_key=by_key, products=products)
    # One part at a time passes the stages after the projection: its vectors, their product, and a transposed copy.
    widest = max(out, form.channels)
    elements = split_elements(shape, widest, 1, channels, form.values, by_key=folded is not None)
    return elements + shape[0] * shape[1] * shape[2] * 3 * widest


def _repeated_elements(term: FactoredTerm) -> int:
    """Elements of a term's factors, repeated for each channel."""
    return sum(factor.shape[0] * factor.shape[1] * term.channels for factor in term.factors)


def _pass(chain: Sequence[Stage], tokens: int, channels: int, columns: int) -> tuple[int, int]:
    """Return the elements of a pass and the number of output channels."""
    elements = tokens * channels * columns
    for stage in chain:
        before = tokens * channels * columns
        inside = 0
        if isinstance(stage, Matrix):
            channels = stage.shape[0]
        elif isinstance(stage, Unmapped):
            channels = stage.width
        elif isinstance(stage, Mix):
            inside = cost_of(stage.mixer).pass_elements(channels * columns // stage.mixer.heads)
        elif isinstance(stage, Branch):
            branches = [_pass(inner, tokens, channels, columns) for inner in stage.chains]
            inside = max(branch[0] for branch in branches) + before
            channels = branches[0][1]
        after = tokens * channels * columns
        elements = max(elements, before + inside if inside else before + 2 * after)
    return elements, channels
