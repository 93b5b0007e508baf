"""Loops that Numba compiles.

All of them are in this file, with everything that they inline: Numba compiles a stored loop again when its file changes
and only then. Arrays are contiguous float32.

Arrays of scans are query and key (batch, length, state), rate (state, channel), or (1, channel) for one decay of all
coordinates, reset (batch, length), and everything else (batch, length, channel). A call computes a piece of `PIECE`
channels of one sequence, in blocks of `LANES`; calls are numbered sequence by sequence. The innermost loops run over
the lanes of a block; those after the last channel are zero.
"""

import math
from collections.abc import Callable
from typing import Any, no_type_check

import numpy as np
from numba import njit

PIECE = 128
"""Channels per call, which one thread computes: the result does not depend on the number of threads."""

LANES = 64
"""Channels per block: enough that the compiler uses vector registers for a short loop instead of unrolling it."""

GROUP = 32
"""Tokens whose states are recomputed together for the gradient."""

LOG2E = np.float32(1 / math.log(2))
POWERS = tuple(np.float32(math.log(2) ** k / math.factorial(k)) for k in range(8))
"""Coefficients of the power series of 2^x."""

LEAF_LANES = 256
"""(head, state) pairs whose memory of all columns of a leaf of the reduced map stays in the first cache."""

GROUPS = 8
"""Groups of contribution norms per call."""

OUTS = 256
"""Coordinates of a contribution that are formed and reduced at a time, which stay in the first cache."""

TINY = np.finfo(np.float32).tiny

# Sums may be reordered, which vector registers need. NaN and infinite numbers stay what they are.
_FAST = {"contract", "reassoc", "nsz"}

_inlined: Callable[[Any], Any] = njit(inline="always", fastmath=_FAST)


def _compiled(loop: Callable[..., None]) -> Any:
    """Compile a loop at its first call, and store it if a folder for it can be written."""
    try:
        return njit(nogil=True, cache=True, fastmath=_FAST)(loop)
    except RuntimeError:
        return njit(nogil=True, fastmath=_FAST)(loop)


@_inlined
@no_type_check
def _flushed(x):
    """Return x, zero if it is subnormal; NaN stays NaN."""
    return np.float32(0) if abs(x) < TINY else x


@_inlined
@no_type_check
def _power(x):
    """Return 2^x, zero where it would be subnormal and infinite from 2^127.5 on."""
    bounded = min(max(x, np.float32(-126)), np.float32(128))
    whole = np.floor(bounded + np.float32(0.5))
    fraction = bounded - whole
    power = POWERS[7]
    power = power * fraction + POWERS[6]
    power = power * fraction + POWERS[5]
    power = power * fraction + POWERS[4]
    power = power * fraction + POWERS[3]
    power = power * fraction + POWERS[2]
    power = power * fraction + POWERS[1]
    power = power * fraction + POWERS[0]
    bits = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23))
    scaled = power * bits.view(np.float32)
    return np.float32(0) if x < np.float32(-126) else scaled


@_inlined
@no_type_check
def _position(call, log_decay):
    """Return the sequence and the piece of its channels that a call computes."""
    count = (log_decay.shape[2] + PIECE - 1) // PIECE
    return call // count, call % count


@_inlined
@no_type_check
def _load(to, array, row, first):
    lanes = array[row, first : first + LANES]
    for lane in range(len(lanes)):
        to[lane] = lanes[lane]
    for lane in range(len(lanes), LANES):
        to[lane] = 0


@_inlined
@no_type_check
def _store(array, row, first, values):
    lanes = array[row, first : first + LANES]
    for lane in range(len(lanes)):
        lanes[lane] = values[lane]


@_inlined
@no_type_check
def _rates(rate, first):
    """Return the rates of a block (state, lane) for powers of 2."""
    lanes = np.zeros((rate.shape[0], LANES), np.float32)
    for n in range(rate.shape[0]):
        _load(lanes[n], rate, n, first)
        for lane in range(LANES):
            lanes[n, lane] *= LOG2E
    return lanes


@_inlined
@no_type_check
def _decays(to, step, rates, continues):
    """Write the decay of each row of rates at a token: zero where a segment begins."""
    for m in range(len(rates)):
        for lane in range(LANES):
            to[m, lane] = continues * _power(step[lane] * rates[m, lane])


@_compiled
@no_type_check
def scan(query, key, log_decay, scale, rate, reset, value, out, starts, call):
    """Run S_t = exp(g_t) S_{t-1} + k_t s_t v_t and read y_t = q_t . S_t.

    `starts` (batch, group, state, channel) is filled with the state before each `GROUP` tokens, if it has groups.
    """
    row, piece = _position(call, log_decay)
    query, key, log_decay, scale, reset = query[row], key[row], log_decay[row], scale[row], reset[row]
    value, out, starts = value[row], out[row], starts[row]
    length, size = query.shape
    step, written = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    factor, read = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    for first in range(piece * PIECE, min((piece + 1) * PIECE, log_decay.shape[1]), LANES):
        rates, state = _rates(rate, first), np.zeros((size, LANES), np.float32)
        faded = np.zeros_like(rates)
        for t in range(length):
            if t % GROUP == 0 and t < GROUP * len(starts):
                for n in range(size):
                    _store(starts[t // GROUP], n, first, state[n])
            _load(step, log_decay, t, first)
            _load(written, value, t, first)
            _load(factor, scale, t, first)
            continues = np.float32(0) if reset[t] else np.float32(1)
            for lane in range(LANES):
                written[lane] *= factor[lane]
                read[lane] = 0
            _decays(faded, step, rates, continues)
            for n in range(size):
                q, k, decay = query[t, n], key[t, n], faded[min(n, len(faded) - 1)]
                for lane in range(LANES):
                    state[n, lane] = _flushed(state[n, lane] * decay[lane] + k * written[lane])
                    read[lane] += q * state[n, lane]
            _store(out, t, first, read)


@_compiled
@no_type_check
def scan_adjoint(query, key, log_decay, scale, rate, reset, grad, out, call):
    """Apply the transpose of `scan`: backward in time, queries write and keys read."""
    row, piece = _position(call, log_decay)
    query, key, log_decay, scale, reset = query[row], key[row], log_decay[row], scale[row], reset[row]
    grad, out = grad[row], out[row]
    length, size = query.shape
    step, written = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    factor, read = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    for first in range(piece * PIECE, min((piece + 1) * PIECE, log_decay.shape[1]), LANES):
        rates, state = _rates(rate, first), np.zeros((size, LANES), np.float32)
        faded = np.zeros_like(rates)
        for t in range(length - 1, -1, -1):
            _load(step, log_decay, t, first)
            _load(written, grad, t, first)
            _load(factor, scale, t, first)
            continues = np.float32(0) if reset[t] else np.float32(1)
            for lane in range(LANES):
                read[lane] = 0
            _decays(faded, step, rates, continues)
            for n in range(size):
                q, k, decay = query[t, n], key[t, n], faded[min(n, len(faded) - 1)]
                for lane in range(LANES):
                    entered = state[n, lane] + q * written[lane]
                    read[lane] += k * entered
                    state[n, lane] = _flushed(entered * decay[lane])
            for lane in range(LANES):
                read[lane] *= factor[lane]
            _store(out, t, first, read)


@_compiled
@no_type_check
def scan_gradients(
    query, key, log_decay, scale, rate, reset, value, starts, grad,
    by_query, by_key, by_decay, by_scale, by_rate, by_value, call,
):  # fmt: skip
    """Write the gradients of <grad, y> by the inputs of `scan`; those by query and key are added, for each piece.

    R_t, the gradient by S_t, is `scan_adjoint`'s state; the gradient by g_t is <exp(g_t) S_{t-1}, R_t>. The states of
    `GROUP` tokens at a time are recomputed from `starts`.
    """
    row, piece = _position(call, log_decay)
    query, key, log_decay, scale, reset = query[row], key[row], log_decay[row], scale[row], reset[row]
    value, starts, grad = value[row], starts[row], grad[row]
    by_query, by_key, by_decay, by_scale = by_query[row], by_key[row], by_decay[row], by_scale[row]
    by_rate, by_value = by_rate[row], by_value[row]
    length, size = query.shape
    step, factor = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    raw, upstream = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    written, landed = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    slopes, by_log = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    states = np.zeros((GROUP + 1, size, LANES), np.float32)
    decays = np.zeros((GROUP, len(rate), LANES), np.float32)
    for first in range(piece * PIECE, min((piece + 1) * PIECE, log_decay.shape[1]), LANES):
        rates, rate_slopes = _rates(rate, first), np.zeros((len(rate), LANES), np.float32)
        flow = np.zeros((size, LANES), np.float32)
        for group in range(len(starts) - 1, -1, -1):
            begin, end = group * GROUP, min(length, (group + 1) * GROUP)
            for n in range(size):
                _load(states[0, n], starts[group], n, first)
            for i in range(end - begin):
                _load(step, log_decay, begin + i, first)
                _load(raw, value, begin + i, first)
                _load(factor, scale, begin + i, first)
                continues = np.float32(0) if reset[begin + i] else np.float32(1)
                before, after, faded = states[i], states[i + 1], decays[i]
                for lane in range(LANES):
                    written[lane] = raw[lane] * factor[lane]
                _decays(faded, step, rates, continues)
                for n in range(size):
                    k, decay = key[begin + i, n], faded[min(n, len(faded) - 1)]
                    for lane in range(LANES):
                        after[n, lane] = _flushed(before[n, lane] * decay[lane] + k * written[lane])
            for i in range(end - begin - 1, -1, -1):
                t = begin + i
                _load(step, log_decay, t, first)
                _load(raw, value, t, first)
                _load(factor, scale, t, first)
                _load(upstream, grad, t, first)
                before, after, faded = states[i], states[i + 1], decays[i]
                for lane in range(LANES):
                    written[lane] = raw[lane] * factor[lane]
                    landed[lane] = 0
                    slopes[lane] = 0
                for n in range(size):
                    q, k, m = query[t, n], key[t, n], min(n, len(rates) - 1)
                    to_query, to_key = np.float32(0), np.float32(0)
                    # Short loops over few arrays: the compiler checks each pair of arrays for an overlap.
                    for lane in range(LANES):
                        to_query += upstream[lane] * after[n, lane]
                        flow[n, lane] += q * upstream[lane]
                    for lane in range(LANES):
                        to_key += flow[n, lane] * written[lane]
                        landed[lane] += k * flow[n, lane]
                    for lane in range(LANES):
                        flow[n, lane] = _flushed(flow[n, lane] * faded[m, lane])
                        by_log[lane] = flow[n, lane] * before[n, lane]
                    for lane in range(LANES):
                        slopes[lane] += by_log[lane] * rates[m, lane]
                        rate_slopes[m, lane] += by_log[lane] * step[lane]
                    by_query[piece, t, n] += to_query
                    by_key[piece, t, n] += to_key
                for lane in range(LANES):
                    slopes[lane] /= LOG2E
                    raw[lane] *= landed[lane]
                    landed[lane] *= factor[lane]
                _store(by_decay, t, first, slopes)
                _store(by_scale, t, first, raw)
                _store(by_value, t, first, landed)
        for m in range(len(rate)):
            _store(by_rate, m, first, rate_slopes[m])


@_compiled
@no_type_check
def fill_leaf(steps, query, entering, write, read, passed, leaves, block):
    """Fill one leaf of `fill_leaves` of the reduced map; (head, state) is one axis of every array."""
    tokens, inner = steps.shape[1:]
    reach = entering.shape[2] - 1
    leaf = leaves[block]
    leaf[:] = 0
    write[block] = 0
    for first in range(0, inner, LEAF_LANES):
        last = min(first + LEAF_LANES, inner)
        crossed = passed[block, first:last]
        crossed[:] = 1
        for i in range(tokens):
            step, reader = steps[block, i, first:last], query[block, i, first:last]
            for col in range(i + reach + 1):
                memory = write[block, col, first:last]
                total = np.float32(0)
                if col < i:
                    for lane in range(len(memory)):
                        decayed = _flushed(memory[lane] * step[lane])
                        memory[lane] = decayed
                        total += decayed * reader[lane]
                else:
                    landing = entering[block, i, col - i, first:last]
                    for lane in range(len(memory)):
                        written = _flushed(memory[lane] * step[lane] + landing[lane])
                        memory[lane] = written
                        total += written * reader[lane]
                leaf[i, col] += total
            reading = read[block, i, first:last]
            for lane in range(len(crossed)):
                across = _flushed(crossed[lane] * step[lane])
                crossed[lane] = across
                reading[lane] = _flushed(reader[lane] * across)


@_inlined
@no_type_check
def _four(vectors, group, channel, pair):
    """Return four channels of the vector of a pair."""
    rest = vectors[group, channel + 1, pair], vectors[group, channel + 2, pair], vectors[group, channel + 3, pair]
    return vectors[group, channel, pair], *rest


@_compiled
@no_type_check
def alti_norms(vectors, weight, reference, scores, norms, piece):
    """Add ||y||_1 - ||y - T||_1 and ||T||_1 of the contributions T = W v of some groups to `scores` and `norms`.

    vectors (group, channel, pair), with the pairs of a row together; weight (group or 1, channel, out), with a multiple
    of four channels; reference y (batch, row, out); scores and norms (group, pair).
    """
    groups, channels, pairs = vectors.shape
    outs, cols, end = weight.shape[2], pairs // reference.shape[1], pairs - 1
    formed = np.empty((4, OUTS), np.float32)
    for group in range(piece * GROUPS, min((piece + 1) * GROUPS, groups)):
        matrix, sequence = weight[group % len(weight)], group // (groups // len(reference))
        for first in range(0, outs, OUTS):
            last = min(first + OUTS, outs)
            t0, t1, t2, t3 = formed[0, : last - first], formed[1], formed[2], formed[3]
            for pair in range(0, pairs, 4):
                formed[:] = 0
                # Four pairs read each weight once; after the last pair it is repeated, and not added below.
                for c in range(0, channels, 4):
                    w0, w1 = matrix[c, first:last], matrix[c + 1, first:last]
                    w2, w3 = matrix[c + 2, first:last], matrix[c + 3, first:last]
                    v0 = _four(vectors, group, c, pair)
                    v1 = _four(vectors, group, c, min(pair + 1, end))
                    v2 = _four(vectors, group, c, min(pair + 2, end))
                    v3 = _four(vectors, group, c, min(pair + 3, end))
                    for out in range(len(t0)):
                        x0, x1, x2, x3 = w0[out], w1[out], w2[out], w3[out]
                        t0[out] += v0[0] * x0 + v0[1] * x1 + v0[2] * x2 + v0[3] * x3
                        t1[out] += v1[0] * x0 + v1[1] * x1 + v1[2] * x2 + v1[3] * x3
                        t2[out] += v2[0] * x0 + v2[1] * x1 + v2[2] * x2 + v2[3] * x3
                        t3[out] += v3[0] * x0 + v3[1] * x1 + v3[2] * x2 + v3[3] * x3
                for k in range(min(4, pairs - pair)):
                    vector, facing = formed[k], reference[sequence, (pair + k) // cols, first:last]
                    score, norm = np.float32(0), np.float32(0)
                    for out in range(len(facing)):
                        entry, y = vector[out], facing[out]
                        norm += abs(entry)
                        # |y| - |y - T| is T along y, reflected where it goes beyond; the choice keeps a NaN of y.
                        entry = -entry if y < 0 else entry
                        reflected = abs(y) + abs(y) - entry
                        score += entry if entry < reflected else reflected
                    scores[group, pair + k] += score
                    norms[group, pair + k] += norm
