"""Memory and work of each structure's operations: blocks are cut by these numbers, and `estimate` sums them up.

Elements are held beside the inputs of an operation, its result included; operations are multiply-adds. A structure
registers one class with `cost_of`; what it does not state is taken from `MixerCost`, which assumes no fast form.
"""

from functools import singledispatch
from typing import ClassVar, NamedTuple

from unilinattn.kernels.backend import implementation
from unilinattn.kernels.reduced_map import tiled
from unilinattn.kernels.scan.pairs import LEAF
from unilinattn.kernels.scan.tiled import CHUNK, GROUP, KEPT, STEPS
from unilinattn.mixers import CoreMixer, Dense, DiagonalDecay, Reversed, ScalarDecay, Substep, Toeplitz, ToeplitzLowRank
from unilinattn.mixers.chunked import KEPT as KEPT_MATRICES
from unilinattn.mixers.chunked import WAIT, Chunked
from unilinattn.mixers.diagonal_decay import SQUARES

STATES = 5
"""Arrays over (token, head, state) that a recurrence holds: decay, its running product, key, state and product."""

OVERSHOOT = 64
"""Columns after the diagonal that a row of a causal map shares a square with, on average: a chunk of the map."""


class Cost(NamedTuple):
    """Elements that an operation holds beside its inputs, its result included, and its multiply-adds."""

    elements: int
    operations: int


class MixerCost:
    """Costs of a mixer of any structure: no fast form is assumed, and each product is held beside its operands."""

    streams_by_lag: ClassVar[bool] = False
    """Whether `reduced_rows` holds a block for each lag of the taps."""

    def __init__(self, mixer: CoreMixer, state: int = 1) -> None:
        """Read the mixer's shape; `state` is the inner dimension of its fast form, what a head holds of a channel."""
        self.mixer, self.state = mixer, state
        self.batch, self.heads, self.queries, self.keys = mixer.shape

    @property
    def carried_elements(self) -> int:
        """Elements that `blocks` carries from one block to the next."""
        return 0

    def tile_elements(self, rows: int, cols: int, heads: int) -> int:
        """Elements held while `tile` fills a block of some heads: the block, and a factor of the same size."""
        return 2 * self.batch * heads * rows * cols

    def weighted_elements(self, rows: int, cols: int, channels: int, lags: int) -> int:
        """Elements that `weighted_blocks` holds beside its tiles: a block of each head, and a factor of that size."""
        return 2 * self.batch * self.heads * rows * (cols + lags)

    def reduced_elements(self, rows: int, channels: int) -> int:
        """Elements that `reduced_rows` holds for blocks of `rows` rows, with weights on `channels` channels.

        A block of each head with its factor, its weighted copy, the sum over heads, and that sum moved by a lag.
        """
        return self.batch * (3 * self.heads + 2) * rows * self.keys

    def pass_cost(self, channels: int) -> Cost:
        """Cost of `apply` or `adjoint` for `channels` channels a head: states of one chunk, token by token.

        The values enter and leave; a state decays, is written and is read.
        """
        each, state = self.batch * self.heads * channels, self.state
        held = STATES * min(self.queries, CHUNK) * state
        return Cost(each * (2 * self.queries + held), 3 * each * self.queries * state)

    def rows_cost(self, rows: int) -> Cost:
        """Cost of `rows` for `rows` rows of each sequence: a pass for each."""
        return self.pass_cost(rows)

    def gradient_elements(self, channels: int) -> int:
        """Elements that `apply` and its backward pass hold: a pass, what it keeps, and the gradients of that."""
        return 3 * self.pass_cost(channels).elements

    def map_operations(self, channels: int) -> int:
        """Multiply-adds of `reduced_rows` for the whole map, with weights on `channels` channels."""
        pairs = self.batch * self.queries * self.keys
        weighed = pairs * (channels + self.heads) if channels > 1 else 0
        return pairs * self.heads * self.state // (2 if self.mixer.is_lower_triangular else 1) + weighed


@singledispatch
def cost_of(mixer: CoreMixer) -> MixerCost:
    """Return the costs of a mixer's operations; a structure registers a subclass of `MixerCost`."""
    return MixerCost(mixer)


@cost_of.register(Dense)
class DenseCost(MixerCost):
    """Costs of weights that are held: products with them, and copies of them."""

    def tile_elements(self, rows: int, cols: int, heads: int) -> int:
        """Nothing beside the weights: a view."""
        return 0

    def reduced_elements(self, rows: int, channels: int) -> int:
        """The sum over heads; with weights each head's block twice, the sum, and the sum moved by a lag."""
        return self.batch * rows * self.keys * (1 if channels == 1 else 2 * self.heads + 2)

    def pass_cost(self, channels: int) -> Cost:
        """A product with the weights."""
        outputs = self.batch * self.queries * self.heads * channels
        return Cost(outputs, outputs * self.keys)

    def rows_cost(self, rows: int) -> Cost:
        """A gathered copy of the rows, and its reduction's."""
        return Cost(2 * self.batch * self.heads * rows * self.keys, 0)

    def gradient_elements(self, channels: int) -> int:
        """The host's own attention: scores, weights and a gradient of each pair; values, outputs and gradients."""
        queries, keys = self.queries, self.keys
        return self.batch * self.heads * (3 * queries * keys + 3 * channels * (queries + keys))

    def map_operations(self, channels: int) -> int:
        """Nothing for a sum over heads."""
        return super().map_operations(channels) if channels > 1 else 0


@cost_of.register(Toeplitz)
class ToeplitzCost(MixerCost):
    """Costs of a convolution: shifts or spectra, and look-ups of K[i - j]. Lags are int64: two elements each."""

    mixer: Toeplitz

    def tile_elements(self, rows: int, cols: int, heads: int) -> int:
        """Kernels looked up and masked, for one sequence; the lags, clamped lags, and masks."""
        return rows * cols * (2 * heads + 6)

    def reduced_elements(self, rows: int, channels: int) -> int:
        """Kernels, or their sum, looked up; the sum over heads; lags and clamped lags."""
        heads = 1 if channels == 1 else 3 * self.heads
        return self.batch * rows * self.keys * (heads + 1) + rows * self.keys * 4

    def pass_cost(self, channels: int) -> Cost:
        """Shift by shift; else values padded to twice their length, both spectra, and the padded output."""
        every = self.batch * self.heads * self.keys * channels
        if self.mixer.is_short:
            return Cost(4 * every, every * self.mixer.taps.shape[1])
        return Cost(8 * every, every * (2 + 4 * self.keys.bit_length()))

    def rows_cost(self, rows: int) -> Cost:
        """Kernels looked up, masked and moved; the lags, clamped lags, and a mask."""
        every = self.batch * rows * self.keys
        return Cost(every * (3 * self.heads + 5), every * self.heads)

    def map_operations(self, channels: int) -> int:
        """The look-up, of the kernels' sum where no channel is weighed."""
        every = self.batch * self.keys**2
        return every if channels == 1 else every * (2 * self.heads + channels)


@cost_of.register(ToeplitzLowRank)
class ToeplitzLowRankCost(MixerCost):
    """Costs of a convolution for each coordinate of the rank, and of its block times scores."""

    mixer: ToeplitzLowRank

    def __init__(self, mixer: ToeplitzLowRank) -> None:
        super().__init__(mixer, mixer.query.shape[-1])
        self.convolution = cost_of(mixer.convolution)

    def tile_elements(self, rows: int, cols: int, heads: int) -> int:
        """The convolution's block, the scores and the product, and queries and keys repeated for heads and copied."""
        factors = 2 * heads * (rows + cols) * self.state
        return self.convolution.tile_elements(rows, cols, heads) + self.batch * (2 * heads * rows * cols + factors)

    def pass_cost(self, channels: int) -> Cost:
        """The convolution of every outer product."""
        return self.convolution.pass_cost(channels * self.state)

    def rows_cost(self, rows: int) -> Cost:
        """The convolution's rows, the scores, and their product."""
        elements, operations = self.convolution.rows_cost(rows)
        every = self.batch * rows * self.keys * self.heads
        return Cost(elements + 2 * every, operations + every * self.state)

    def gradient_elements(self, channels: int) -> int:
        """The convolution's, and the outer products that enter and leave it."""
        products = channels * self.state
        return self.convolution.gradient_elements(products) + 2 * self.batch * self.heads * self.keys * products


@cost_of.register(DiagonalDecay)
class DiagonalDecayCost(MixerCost):
    """Costs of a recurrence with a decay a coordinate, and of maps with an inner dimension heads x state."""

    mixer: DiagonalDecay

    def __init__(self, mixer: DiagonalDecay) -> None:
        super().__init__(mixer, mixer.state_size)

    def tile_elements(self, rows: int, cols: int, heads: int) -> int:
        """The block; that of the heads at work, with their decays, keys and queries at each step of its making.

        What lies inside the rows' own square is filled by halves: twice that square.
        """
        pairs = rows * cols
        part = min(heads, self.mixer.heads_at_once(LEAF * rows + cols))
        working = pairs + 2 * rows * min(rows, cols) + self.state * (STATES * cols + 8 * rows)
        return self.batch * (heads * pairs + part * working)

    def weighted_elements(self, rows: int, cols: int, channels: int, lags: int) -> int:
        """A square of each head with its queries, and both sides of the squares that are being filled."""
        if channels != self.heads:
            return super().weighted_elements(rows, cols, channels, lags)
        size, state = tiled.square_rows(rows), self.state
        held = 2 * (size + lags) + (2 + lags) * state
        return self.batch * size * (self.heads * (size + lags + 3 * state) + min(self.heads, SQUARES) * held)

    def reduced_elements(self, rows: int, channels: int) -> int:
        """Elements that the kernel holds for one tile of heads."""
        if channels not in (1, self.heads):
            return super().reduced_elements(rows, channels)
        shape = (self.batch, self.keys, self.heads, self.state)
        return implementation("reduced_map", self.mixer.log_decay).held_elements(rows, shape)

    def pass_cost(self, channels: int) -> Cost:
        """Values that enter and leave, and the states of `STEPS` tokens."""
        each = self.batch * self.heads * channels
        held = STATES * min(self.keys, STEPS) * self.state
        return Cost(each * (2 * self.keys + held), 3 * each * self.keys * self.state)

    def rows_cost(self, rows: int) -> Cost:
        """A pass for each row, as many rows at once as the budget allows."""
        states = self.batch * self.heads * self.state
        each = states * min(self.keys, STEPS)
        held = STATES * max(each, min(rows * each, self.mixer.product_elements))
        return Cost(2 * self.batch * rows * self.heads * self.keys + held, 3 * states * rows * self.keys)

    def gradient_elements(self, channels: int) -> int:
        """Values, outputs and factors with their gradients; states and decays, of one group of tokens at length."""
        kept = self.keys if self.keys <= KEPT else GROUP
        states = (2 * kept + STATES * min(self.keys, STEPS)) * self.state
        return self.batch * self.heads * channels * (8 * self.keys + states)

    def map_operations(self, channels: int) -> int:
        """Half of one product with an inner dimension heads x state, the squares on the diagonal being whole."""
        if channels not in (1, self.heads):
            return super().map_operations(channels)
        return self.batch * self.keys * (self.keys + OVERSHOOT) // 2 * self.heads * self.state


@cost_of.register(ScalarDecay)
class ScalarDecayCost(MixerCost):
    """Costs of chunks of a recurrence with a decay a head, and of maps as scores of groups times decays."""

    mixer: ScalarDecay
    streams_by_lag = True

    def __init__(self, mixer: ScalarDecay) -> None:
        super().__init__(mixer, mixer.query.shape[-1])
        self.groups = mixer.query.shape[2]

    def tile_elements(self, rows: int, cols: int, heads: int) -> int:
        """Scores of the heads' groups with their operands; decays, scores repeated for heads, and their product."""
        groups, pairs = min(heads, self.groups), rows * cols
        scores = groups * (pairs + (rows + cols) * self.state) + 3 * heads * pairs
        return max(cost_of(self.mixer.decay_mixer).tile_elements(rows, cols, heads), self.batch * scores)

    def weighted_elements(self, rows: int, cols: int, channels: int, lags: int) -> int:
        """On the diagonal, squares of each head: scores, decays and their product."""
        return 3 * self.batch * self.heads * rows * (max(rows, cols) + lags)

    def reduced_elements(self, rows: int, channels: int) -> int:
        """Scores of each group, the sum and a product; each group's stream keeps its block, decays and scales."""
        inner = max(channels, self.heads) // self.groups
        held = tiled.held_elements(rows, (self.batch, self.keys, inner, 1)) + 2 * self.batch * self.keys * inner
        return self.groups * held + self.batch * (self.groups + 2) * rows * self.keys

    def pass_cost(self, channels: int) -> Cost:
        """Scaled values, outputs and a copy; of one chunk scores, decays and products, queries and keys, and values."""
        chunk, state = min(CHUNK, self.keys), self.state
        pairs, vectors = self.heads * chunk, self.heads * (2 * state + 3 * channels)
        elements = self.batch * (3 * self.keys * self.heads * channels + chunk * (3 * pairs + vectors))
        each = self.groups * chunk * state + pairs + self.heads * channels * (chunk + 2 * state)
        return Cost(elements, self.batch * self.keys * each)

    def rows_cost(self, rows: int) -> Cost:
        """Scores of groups; for each head the steps, their sums, the decays, scores and products."""
        every = self.batch * rows * self.keys
        return Cost(every * (self.groups + 5 * self.heads), every * (self.groups * self.state + 2 * self.heads))

    def gradient_elements(self, channels: int) -> int:
        """Pairs, vectors and states of every chunk, with their gradients."""
        chunk, state = min(CHUNK, self.keys), self.state
        each = self.heads * (3 * chunk + 3 * state + 4 * channels) + self.groups * chunk
        states = 2 * -(-self.keys // CHUNK) * self.heads * state * channels
        return self.batch * (self.keys * each + states)

    def map_operations(self, channels: int) -> int:
        """A product with an inner dimension of the state a group, and decays with one a channel."""
        inner = self.groups * (self.state + 1) + max(channels, self.heads) // 2
        return self.batch * self.keys * self.keys * inner


@cost_of.register(Chunked)
class ChunkedCost(MixerCost):
    """Costs of a memory whose chunks are a few matrices a head: one chunk is made at a time."""

    mixer: Chunked

    def __init__(self, mixer: Chunked) -> None:
        super().__init__(mixer, mixer.state_size)

    @property
    def carried_elements(self) -> int:
        """States of every column, their successors, and a chunk in the making."""
        states = 2 * self.batch * self.heads * self.keys * self.state
        return states + self.mixer.making_elements(self.heads)

    def tile_elements(self, rows: int, cols: int, heads: int) -> int:
        """A chunk in the making; states of the columns before and after it; the block, its parts and their join."""
        part = min(heads, self.mixer.heads_at_once)
        columns = part * 3 * cols * self.state + 3 * heads * rows * cols
        return self.mixer.making_elements(part) + self.batch * columns

    def reduced_elements(self, rows: int, channels: int) -> int:
        """States, and a chunk in the making or a block of all heads at once, twice, where they are weighed apart."""
        apart = self.heads if channels > 1 else 1
        block = self.batch * self.keys * (2 * apart * min(rows, CHUNK) + 2 * rows)
        # Half of a chunk in the making is released when its block is read.
        return self.carried_elements + max(0, block - self.mixer.making_elements(self.heads) // 2)

    def pass_cost(self, channels: int) -> Cost:
        """Vectors that enter and leave, and a chunk in the making; its solve, its matrices, and what they multiply."""
        chunk, state = min(CHUNK, self.keys), self.state
        solved = chunk * (chunk + state) // 2
        each = solved + 4 * chunk * state + state * state + channels * (chunk + 3 * state)
        part = min(self.heads, self.mixer.heads_at_once)
        tokens = self.batch * self.keys * self.heads
        return Cost(2 * tokens * channels + self.mixer.making_elements(part), tokens * each)

    def gradient_elements(self, channels: int) -> int:
        """Vectors and states with their gradients, and the matrices of every chunk, of one at length."""
        chunks = -(-self.keys // CHUNK)
        states = 2 * self.batch * self.heads * chunks * self.state * channels
        making = self.mixer.making_elements(self.heads) * (chunks if self.keys <= KEPT_MATRICES else 1)
        return 4 * self.batch * self.heads * channels * self.keys + states + making

    def map_operations(self, channels: int) -> int:
        """Every column's state through every chunk after it."""
        chunk, state = min(CHUNK, self.keys), self.state
        carried = state * (state + WAIT * chunk) // (WAIT * chunk) + 1
        weighed = self.keys * (channels + self.heads) if channels > 1 else 0
        pairs = self.keys * self.heads * carried // 2
        return self.batch * self.keys * (pairs + weighed) + self.pass_cost(0).operations


@cost_of.register(Reversed)
class ReversedCost(MixerCost):
    """Costs of the inner mixer, and of copies in the mirrored order."""

    def __init__(self, mixer: Reversed) -> None:
        self.inner = cost_of(mixer.mixer)
        super().__init__(mixer, self.inner.state)

    def tile_elements(self, rows: int, cols: int, heads: int) -> int:
        """The inner block and its mirror image."""
        return self.inner.tile_elements(rows, cols, heads) + self.batch * heads * rows * cols

    def pass_cost(self, channels: int) -> Cost:
        """The inner pass, and its values and outputs reversed."""
        elements, operations = self.inner.pass_cost(channels)
        return Cost(elements + self._turned(channels), operations)

    def rows_cost(self, rows: int) -> Cost:
        """The inner rows and their mirror images."""
        elements, operations = self.inner.rows_cost(rows)
        return Cost(elements + self.batch * rows * self.heads * self.keys, operations)

    def gradient_elements(self, channels: int) -> int:
        """The inner pass, and its values and outputs reversed."""
        return self.inner.gradient_elements(channels) + self._turned(channels)

    def _turned(self, channels: int) -> int:
        return self.batch * self.heads * channels * (self.queries + self.keys)


@cost_of.register(Substep)
class SubstepCost(MixerCost):
    """Costs of the expanded mixer's blocks and gradients."""

    def __init__(self, mixer: Substep) -> None:
        super().__init__(mixer)
        self.inner, self.count = cost_of(mixer.mixer), mixer.count

    def tile_elements(self, rows: int, cols: int, heads: int) -> int:
        """The expanded block."""
        return self.inner.tile_elements(rows * self.count, cols * self.count, heads)

    def gradient_elements(self, channels: int) -> int:
        """The expanded pass, and its values put on their sub-steps with their gradients."""
        return self.inner.gradient_elements(channels) + 2 * self.count * self.heads * self.keys * channels
