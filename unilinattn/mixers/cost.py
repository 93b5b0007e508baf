"""Memory of each structure's operations, which sets the sizes of blocks and is what `estimate` reports.

Elements include the result of an operation and not its inputs. A structure registers a subclass of `MixerCost` with
`cost_of`; the methods of `MixerCost` hold for a structure without fast forms.
"""

from functools import singledispatch

from unilinattn.kernels.backend import implementation, uses_numba
from unilinattn.kernels.scan import tiled as scan
from unilinattn.kernels.scan.tiled import CHUNK, STATES, STEPS
from unilinattn.mixers import (
    CoreMixer,
    Dense,
    DiagonalDecay,
    Reversed,
    ScalarDecay,
    Softmax,
    Toeplitz,
    ToeplitzLowRank,
)
from unilinattn.mixers.chunked import KEPT as KEPT_MATRICES
from unilinattn.mixers.chunked import Chunked
from unilinattn.mixers.diagonal_decay import VECTORS
from unilinattn.mixers.softmax import block_rows


class MixerCost:
    """Costs of a mixer of any structure, without fast forms; each product is held in addition to its operands."""

    def __init__(self, mixer: CoreMixer, state: int = 1) -> None:
        """Read the mixer's shape; `state` is the number of coordinates of a head's state."""
        self.mixer, self.state = mixer, state
        self.batch, self.heads, self.queries, self.keys = mixer.shape

    @property
    def carried_elements(self) -> int:
        """Elements that `blocks` holds from one block to the next."""
        return 0

    def whole_rows_elements(self, rows: int) -> int:
        """Elements of rows that `blocks` computes as a whole, whatever columns are asked for."""
        return 0

    def tile_elements(self, rows: int, cols: int, heads: int) -> int:
        """Elements of `tile` for `heads` heads: the block, and a factor of the same size."""
        return 2 * self.batch * heads * rows * cols

    def weighted_elements(self, rows: int, cols: int, channels: int, lags: int) -> int:
        """Elements of `weighted_blocks` in addition to its result: a block per head, and a factor of that size."""
        return 2 * self.batch * self.heads * rows * (cols + lags)

    def reduced_elements(self, rows: int, channels: int) -> int:
        """Elements of `reduced_rows` for blocks of `rows` rows, with weights of `channels` channels (1 for no weights).

        A block per head, its factor and its weighted copy; the sum over heads, and that sum shifted by a lag.
        """
        return self.batch * (3 * self.heads + 2) * rows * self.keys

    def pass_elements(self, channels: int) -> int:
        """Elements of `apply` or `adjoint` with `channels` channels per head, by a recurrence.

        They are the values, the outputs, and the states of one chunk.
        """
        states = STATES * min(self.queries, CHUNK) * self.state
        return self.batch * self.heads * channels * (2 * self.queries + states)

    def rows_elements(self, rows: int) -> int:
        """Elements of `rows` for `rows` rows per sequence: a pass per row."""
        return self.pass_elements(rows)

    def gradient_elements(self, channels: int) -> int:
        """Elements of `apply` and its backward pass: a pass, the saved tensors, and their gradients."""
        return 3 * self.pass_elements(channels)


@singledispatch
def cost_of(mixer: CoreMixer) -> MixerCost:
    """Return the costs of a mixer's operations."""
    return MixerCost(mixer)


@cost_of.register(Dense)
class DenseCost(MixerCost):
    """Costs of products with stored weights, and of copies of them."""

    def tile_elements(self, rows: int, cols: int, heads: int) -> int:
        """None: the block is a view."""
        return 0

    def reduced_elements(self, rows: int, channels: int) -> int:
        """The sum over heads; with weights two blocks per head, the sum, and the sum shifted by a lag."""
        return self.batch * rows * self.keys * (1 if channels == 1 else 2 * self.heads + 2)

    def pass_elements(self, channels: int) -> int:
        """The outputs of one product with the weights."""
        return self.batch * self.queries * self.heads * channels

    def rows_elements(self, rows: int) -> int:
        """A gathered copy of the rows, and a copy for their reduction."""
        return 2 * self.batch * self.heads * rows * self.keys

    def gradient_elements(self, channels: int) -> int:
        """The host's attention: scores, weights and their gradients; values, outputs and their gradients."""
        queries, keys = self.queries, self.keys
        return self.batch * self.heads * (3 * queries * keys + 3 * channels * (queries + keys))


@cost_of.register(Softmax)
class SoftmaxCost(MixerCost):
    """Costs of attention weights that are computed by blocks of queries."""

    def block_rows(self, heads: int) -> int:
        """Queries of a block."""
        like = self.mixer.zeros(())
        return block_rows(like.device.type, self.batch * heads * self.keys * like.element_size())

    def block_elements(self, rows: int, heads: int) -> int:
        """Scores and weights of a block of at most `rows` queries, and of its mask."""
        return (2 * self.batch * heads + 1) * self.keys * min(rows, self.block_rows(heads))

    def tile_elements(self, rows: int, cols: int, heads: int) -> int:
        """A block of all keys, and a copy of its columns if there are several."""
        copied = self.batch * heads * rows * cols if rows > self.block_rows(heads) else 0
        return copied + self.block_elements(rows, heads)

    def whole_rows_elements(self, rows: int) -> int:
        """All keys of the rows; their scores and the rows before, if there are any; a block of several."""
        block = self.block_elements(rows, self.heads) if rows > self.block_rows(self.heads) else 0
        return self.batch * self.heads * rows * self.keys * (3 if rows < self.queries else 1) + block

    def weighted_elements(self, rows: int, cols: int, channels: int, lags: int) -> int:
        """Whole rows, and a factor of a block for each head."""
        return self.whole_rows_elements(rows) + self.batch * self.heads * rows * (cols + lags)

    def reduced_elements(self, rows: int, channels: int) -> int:
        """The block of all heads and the sum over heads; with weights its product, and the sum shifted by a lag."""
        more = 1 if channels == 1 else self.heads + 2
        return self.tile_elements(rows, self.keys, self.heads) + self.batch * rows * self.keys * more

    def pass_elements(self, channels: int) -> int:
        """The values, the outputs and a copy, and a block."""
        vectors = self.batch * self.heads * channels * (2 * self.queries + self.keys)
        return vectors + self.block_elements(self.queries, self.heads)

    def rows_elements(self, rows: int) -> int:
        """The scores and weights of the rows, and a copy for their reduction."""
        return 3 * self.batch * self.heads * rows * self.keys

    def gradient_elements(self, channels: int) -> int:
        """Half of what eager attention takes, which has scores and weights; values, outputs and their gradients."""
        queries, keys = self.queries, self.keys
        return self.batch * self.heads * (queries * keys + 3 * channels * (queries + keys))


@cost_of.register(Toeplitz)
class ToeplitzCost(MixerCost):
    """Costs of a convolution, by shifts or spectra, and of windows of its kernel; an int64 lag counts twice."""

    mixer: Toeplitz

    def tile_elements(self, rows: int, cols: int, heads: int) -> int:
        """For one sequence: the block and a copy, and the kernel's part with a reversed copy."""
        return 2 * heads * (rows * cols + 2 * (rows + cols))

    def reduced_elements(self, rows: int, channels: int) -> int:
        """The block per head or of the sum of the kernels, the sum over heads, and kernels with a reversed copy."""
        blocks = 1 if channels == 1 else 3 * self.heads + 1
        return self.batch * rows * self.keys * blocks + 2 * self.heads * (rows + self.keys)

    def pass_elements(self, channels: int) -> int:
        """Shifts for a short kernel; else values padded to twice their length, both spectra, and the padded output."""
        values = self.batch * self.heads * self.keys * channels
        return (4 if self.mixer.is_short else 8) * values

    def gradient_elements(self, channels: int) -> int:
        """For a short kernel: values, outputs, a shifted product, and their gradients."""
        values = self.batch * self.heads * self.keys * channels
        return 6 * values if self.mixer.is_short else super().gradient_elements(channels)

    def rows_elements(self, rows: int) -> int:
        """The values looked up, masked and transposed; the lags, clamped lags, and a mask."""
        return self.batch * rows * self.keys * (3 * self.heads + 5)


@cost_of.register(ToeplitzLowRank)
class ToeplitzLowRankCost(MixerCost):
    """Costs of one convolution per coordinate of the rank, and of products of its blocks and scores."""

    mixer: ToeplitzLowRank

    def __init__(self, mixer: ToeplitzLowRank) -> None:
        super().__init__(mixer, mixer.query.shape[-1])
        self.convolution = cost_of(mixer.convolution)

    def tile_elements(self, rows: int, cols: int, heads: int) -> int:
        """The convolution's block, the scores, their product, and two copies of queries and keys per head."""
        factors = 2 * heads * (rows + cols) * self.state
        return self.convolution.tile_elements(rows, cols, heads) + self.batch * (2 * heads * rows * cols + factors)

    def pass_elements(self, channels: int) -> int:
        """The convolution of all outer products."""
        return self.convolution.pass_elements(channels * self.state)

    def rows_elements(self, rows: int) -> int:
        """The convolution's rows, the scores, and their product."""
        return self.convolution.rows_elements(rows) + 2 * self.batch * rows * self.keys * self.heads

    def gradient_elements(self, channels: int) -> int:
        """The convolution's, with the outer products before and after it."""
        outer = 2 * self.batch * self.heads * self.keys * channels * self.state
        return self.convolution.gradient_elements(channels * self.state) + outer


@cost_of.register(DiagonalDecay)
class DiagonalDecayCost(MixerCost):
    """Costs of a recurrence with a decay per coordinate, and of maps with inner dimension heads x state."""

    mixer: DiagonalDecay

    def __init__(self, mixer: DiagonalDecay) -> None:
        super().__init__(mixer, mixer.state_size)

    def tile_elements(self, rows: int, cols: int, heads: int) -> int:
        """The block, and for `heads_at_once` heads: their block, the last corner of its square, and the factors."""
        pairs = rows * cols
        at_once = min(heads, self.mixer.heads_at_once(VECTORS * rows + cols))
        working = pairs + min(rows, cols) ** 2 // 4 + 3 * self.state * (rows + cols)
        return self.batch * (heads * pairs + at_once * working)

    def weighted_elements(self, rows: int, cols: int, channels: int, lags: int) -> int:
        """The kernel's count of squares per head and their factors."""
        if channels != self.heads:
            return super().weighted_elements(rows, cols, channels, lags)
        shape = (self.batch, self.keys, self.heads, self.state)
        elements: int = implementation("weighted_map", self.mixer.log_decay).held_elements(rows, cols, shape, lags)
        return elements

    def reduced_elements(self, rows: int, channels: int) -> int:
        """The kernel's count, for one tile of heads."""
        if channels not in (1, self.heads):
            return super().reduced_elements(rows, channels)
        shape = (self.batch, self.keys, self.heads, self.state)
        return implementation("reduced_map", self.mixer.log_decay).held_elements(rows, shape)

    def pass_elements(self, channels: int) -> int:
        """Values, outputs, and the states of `STEPS` tokens, which compiled loops do not store."""
        columns = self.batch * self.heads * channels
        states = 0 if self._is_compiled(channels) else STATES * min(self.keys, STEPS) * self.state
        return columns * (2 * self.keys + states)

    def rows_elements(self, rows: int) -> int:
        """A pass per row, for as many rows at once as `product_elements` allows."""
        per_row = self.batch * self.heads * self.state * min(self.keys, STEPS)
        at_once = STATES * max(per_row, min(rows * per_row, self.mixer.product_elements))
        return 2 * self.batch * rows * self.heads * self.keys + at_once

    def gradient_elements(self, channels: int) -> int:
        """Values, outputs and factors with their gradients, and the states of the kernel."""
        columns = self.batch * self.heads * channels
        form = implementation("scan", self.mixer.log_decay) if self._is_compiled(channels) else scan
        states: int = form.state_elements(self.batch, self.keys, self.heads * channels, self.state)
        return 8 * columns * self.keys + states

    def _is_compiled(self, channels: int) -> bool:
        """Whether the passes of a selective state space run as compiled loops."""
        mixer = self.mixer
        per_head = mixer.rate is not None and mixer.key_scale is not None and channels == mixer.log_decay.shape[3] == 1
        shared = mixer.query.shape[2] == mixer.key.shape[2] == 1
        return per_head and shared and uses_numba("scan", mixer.log_decay)


@cost_of.register(ScalarDecay)
class ScalarDecayCost(MixerCost):
    """Costs of a chunked recurrence with a decay per head, and of maps as scores of groups times decays of heads."""

    mixer: ScalarDecay

    def __init__(self, mixer: ScalarDecay) -> None:
        super().__init__(mixer, mixer.query.shape[-1])
        self.groups = mixer.query.shape[2]

    def tile_elements(self, rows: int, cols: int, heads: int) -> int:
        """Scores of the groups with their factors; decays, scores repeated for heads, and their product."""
        groups, pairs = min(heads, self.groups), rows * cols
        scores = groups * (pairs + (rows + cols) * self.state) + 3 * heads * pairs
        return max(cost_of(self.mixer.decay_mixer).tile_elements(rows, cols, heads), self.batch * scores)

    def weighted_elements(self, rows: int, cols: int, channels: int, lags: int) -> int:
        """Squares on the diagonal, per head: scores, decays and their product."""
        return 3 * self.batch * self.heads * rows * (max(rows, cols) + lags)

    def reduced_elements(self, rows: int, channels: int) -> int:
        """The kernel's count, for one group."""
        shape = (self.batch, self.keys, self.heads // self.groups, self.state)
        return implementation("scalar_map", self.mixer.log_decay).held_elements(rows, shape, channels // self.groups)

    def pass_elements(self, channels: int) -> int:
        """Scaled values, outputs and a copy; of a chunk products of groups, decays, scores, values and decayed keys."""
        chunk, state = min(CHUNK, self.keys), self.state if self.keys > CHUNK else 0
        pairs, vectors = (self.groups + 2 * self.heads) * chunk, self.heads * (2 * state + 3 * channels)
        return self.batch * (3 * self.keys * self.heads * channels + chunk * (pairs + vectors))

    def rows_elements(self, rows: int) -> int:
        """Scores per group; steps, their sums, decays, scores and products per head."""
        return self.batch * rows * self.keys * (self.groups + 5 * self.heads)

    def gradient_elements(self, channels: int) -> int:
        """Pairs, vectors and states of all chunks, with their gradients; a single chunk has no state."""
        chunk, chunks = min(CHUNK, self.keys), -(-self.keys // CHUNK)
        state = self.state if chunks > 1 else 0
        per_token = self.heads * (3 * chunk + 3 * state + 4 * channels) + self.groups * chunk
        return self.batch * (self.keys * per_token + 2 * chunks * self.heads * state * channels)


@cost_of.register(Chunked)
class ChunkedCost(MixerCost):
    """Costs of a memory that is computed chunk by chunk, from a few matrices per head."""

    mixer: Chunked

    def __init__(self, mixer: Chunked) -> None:
        super().__init__(mixer, mixer.state_size)
        self.chunks = mixer.chunks_at_once
        self.others = mixer.side_by_side - 1
        self.other_elements = self.others * mixer.making_elements(self.heads)
        self.making_elements = mixer.making_elements(self.heads, self.chunks) + self.other_elements

    @property
    def carried_elements(self) -> int:
        """The state of every column before and after some chunks, and the computation of these chunks."""
        return 2 * self.batch * self.heads * self.keys * self.state + self.making_elements

    def tile_elements(self, rows: int, cols: int, heads: int) -> int:
        """Some chunks; the states of columns before and after one; the block, its parts and their concatenation."""
        at_once = min(heads, self.mixer.heads_at_once)
        columns = at_once * 3 * cols * self.state + 3 * heads * rows * cols
        return self.mixer.making_elements(at_once) + self.other_elements + self.batch * columns

    def reduced_elements(self, rows: int, channels: int) -> int:
        """States, and some chunks or a block with a copy; the block is per head if there are weights."""
        heads = self.heads if channels > 1 else 1
        block = self.batch * self.keys * (2 * heads * min(rows, self.mixer.tokens * self.chunks) + 2 * rows)
        # Half of the chunks' elements are released before a block is computed.
        return self.carried_elements + max(0, block - self.making_elements // 2)

    def pass_elements(self, channels: int) -> int:
        """Values and outputs, some chunks, and the states of the chunks beside the first."""
        vectors = 2 * self.batch * self.heads * channels
        making = self.mixer.making_elements(min(self.heads, self.mixer.heads_at_once)) + self.other_elements
        return vectors * (self.keys + self.others * self.state) + making

    def gradient_elements(self, channels: int) -> int:
        """Vectors and states with their gradients, and the matrices of all chunks (of one if long)."""
        chunks = -(-self.keys // self.mixer.tokens)
        states = 2 * self.batch * self.heads * chunks * self.state * channels
        making = self.mixer.making_elements(self.heads) * (chunks if self.keys <= KEPT_MATRICES else 1)
        return 4 * self.batch * self.heads * channels * self.keys + states + making


@cost_of.register(Reversed)
class ReversedCost(MixerCost):
    """Costs of the inner mixer and of reversed copies."""

    def __init__(self, mixer: Reversed) -> None:
        self.inner = cost_of(mixer.mixer)
        super().__init__(mixer, self.inner.state)
        self.copies = self.batch * self.heads * (self.queries + self.keys)

    def tile_elements(self, rows: int, cols: int, heads: int) -> int:
        """The inner block and its reversed copy."""
        return self.inner.tile_elements(rows, cols, heads) + self.batch * heads * rows * cols

    def reduced_elements(self, rows: int, channels: int) -> int:
        """The inner blocks, a reversed copy, and the sum over lags."""
        return self.inner.reduced_elements(rows, channels) + 2 * self.batch * rows * self.keys

    def pass_elements(self, channels: int) -> int:
        """The inner pass, and reversed copies of its values and outputs."""
        return self.inner.pass_elements(channels) + channels * self.copies

    def rows_elements(self, rows: int) -> int:
        """The inner rows and their reversed copies."""
        return self.inner.rows_elements(rows) + self.batch * rows * self.heads * self.keys

    def gradient_elements(self, channels: int) -> int:
        """The inner pass, and reversed copies of its values and outputs."""
        return self.inner.gradient_elements(channels) + channels * self.copies
