"""The two theorems of the Hidden Attention paper, measured (HMA ACL 5, Appendices B and C)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

import unilinattn as ula
from evidence.claims import HERE, Claim, Results
from evidence.comparisons import Comparison, Relation, bounded
from evidence.pictures import COLOURS, figure
from evidence.rows import number
from evidence.study import SEEDS, Size, Study, View
from unilinattn.evaluation import Table
from unilinattn.mixers import DiagonalDecay
from unilinattn.optional import import_extra
from unilinattn.testing.hosts import HOSTS as BASIC
from unilinattn.testing.hosts import Host, delta, recurrent, reference

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIXED = {"S4": "s4", "S4D": "s4d", "DSS": "dss, softmax", "S5": "s5"}
GATED = {"GSS": "gss", "Hyena": "hyenadna"}
CONTROLLED = {
    "S6 (Mamba-1)": "mamba",
    "SSD (Mamba-2)": "mamba2",
    "gated delta rule": "qwen3 next",
    "mLSTM": "xlstm",
    "softmax": "gpt2",
}
"""Hosts of Theorem 1 by the names of their mixers: fixed, fixed with diagonal data control, and data-controlled."""

BITS = 10
"""Length of the sequences of Theorem 2; all 1024 are scored."""

SHOWN = 0b1011101111
"""The sequence of the picture."""

EXACT = "right after rounding"

EQ_26, EQ_28 = "S6 channel, Eq. 26", "S6 channel, Eq. 28"
"""The channel of Lemma 1 by its parameters, and by the recurrence that the proof prints."""

LINEAR, SOFTMAX = "head without softmax", "head with softmax"
"""Heads of Lemma 3."""


def mixing(name: str, seed: int) -> tuple[float, float]:
    """Return the relative change of the token mixers of a host's first layer, and of its gates, between inputs."""
    host = next(h for h in (*BASIC, *reference.HOSTS, *delta.HOSTS, *recurrent.HOSTS) if h.name == name)
    torch.manual_seed(seed)
    trace = ula.trace(host.model(), inputs_of(host, seed), progress=False)
    layer = ula.analysis.taxonomy(trace).layers[0]
    return layer.mixing, layer.gating


def inputs_of(host: Host, seed: int) -> Tensor:
    """Return random token ids of three sequences."""
    return torch.randint(4, 12, (3, 12), generator=torch.Generator().manual_seed(seed))


def all_bits() -> Tensor:
    """Return every binary sequence, (sequence, position)."""
    return torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * BITS)


def count_in_row(bits: Tensor) -> Tensor:
    """Return the number of consecutive ones that end at each position (HMA ACL Appendix B, Definition 1, causal)."""
    counts = [bits[:, 0]]
    for bit in bits.unbind(1)[1:]:
        counts.append(bit * (counts[-1] + 1))
    return torch.stack(counts, 1)


def s6_channel(bits: Tensor, *, printed: bool) -> Tensor:
    """Return the output of one S6 channel that reads the bits, h_t = A_t h_{t-1} + B_t x_t and y_t = C_t h_t.

    With the parameters of the proof of HMA ACL Lemma 1, S_A = S_B = S_C = 1 and A = 0, Eq. 26 has A_t = B_t = C_t =
    x_t: a zero ends a run. `printed`: A_t = B_t = C_t = 1, as Eq. 28 has it.
    """
    factor = (torch.ones_like(bits) if printed else bits)[..., None, None]
    # A decay of zero is a reset; the others are one.
    channel = DiagonalDecay(factor, factor, torch.zeros_like(factor), reset=factor[..., 0, 0] == 0)
    return channel.apply(bits[:, :, None, None])[:, :, 0, 0]


def head_differences(seed: int) -> dict[str, float]:
    """Return the relative difference between a selective state space with A_t = 1 and causal heads (HMA ACL Lemma 3).

    B_t are the keys, C_t the queries, and the input is the values, all random: two sequences of twelve tokens, a head
    of width four.
    """
    generator = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(3, 2, 12, 4, generator=generator, dtype=torch.float64)
    space = DiagonalDecay(query[:, :, None], key[:, :, None], torch.zeros(2, 12, 1, 4, dtype=torch.float64))
    output = space.apply(value[:, :, None])[:, :, 0]
    products = query @ key.mT
    later = torch.ones(12, 12, dtype=torch.bool).triu(1)
    heads = {
        LINEAR: products.masked_fill(later, 0) @ value,
        SOFTMAX: products.masked_fill(later, -torch.inf).softmax(-1) @ value,
    }
    return {name: float((output - head).norm() / head.norm()) for name, head in heads.items()}


def fixed_filter(bits: Tensor, counts: Tensor) -> Tensor:
    """Return the least-squares fit by a causal filter with a constant, which no other one exceeds."""
    lags = torch.stack([torch.cat([torch.zeros(len(bits), k).to(bits), bits[:, : BITS - k]], 1) for k in range(BITS)])
    features = torch.cat([lags, torch.ones_like(bits)[None]]).flatten(1).T
    return (features @ torch.linalg.lstsq(features, counts.flatten()[:, None]).solution).view_as(bits)


def softmax_head(bits: Tensor, counts: Tensor) -> Tensor:
    """Return the best fit found by one causal softmax head on scalar inputs, with biases.

    With binary inputs a head is y_i = v m_i + c, where m_i is the share of ones among the tokens up to i, each weighted
    by exp(s_1) if i is a one and by exp(s_0) if it is a zero. The two logits are searched on a grid from -20 to 20, and
    v and c are least squares.
    """
    ones, total = bits.cumsum(1), torch.arange(1, BITS + 1).to(bits)
    weight = torch.linspace(-20, 20, 161, dtype=torch.float64).exp()[:, None, None]
    shares = weight * ones / (weight * ones + total - ones)
    centred = counts - counts.mean()
    # Sums over tokens of one kind depend on one of the two logits.
    of_ones, of_zeros = (
        torch.stack([(masked * factor).sum((1, 2)) for factor in (torch.ones_like(shares), shares, centred)])
        for masked in (shares * bits, shares * (1 - bits))
    )
    total_share, square, product = of_ones[:, :, None] + of_zeros[:, None]
    variance = square - total_share**2 / bits.numel()
    explained = torch.where(variance > 0, product**2 / variance, 0.0)
    high, low = divmod(int(explained.argmax()), len(shares))
    return _line(torch.where(bits == 1, shares[high], shares[low]), counts)


def linear_head(bits: Tensor, counts: Tensor) -> Tensor:
    """Return the best fit found by one causal linear-attention head on scalar inputs, with biases.

    With binary inputs a head is y_i = (p x_i + q) (r n_i + s i) + c, n_i the ones up to i. The five numbers are fitted
    by least squares from 32 random starts.
    """
    fit = import_extra("scipy.optimize", "evidence").least_squares
    x, ones, goal = bits.numpy(), bits.cumsum(1).numpy(), counts.numpy()
    at = np.broadcast_to(np.arange(1, BITS + 1), x.shape)
    # Tokens with equal features have equal outputs, so their mean goal counts as often as there are such tokens.
    tokens = np.stack([x.ravel(), ones.ravel(), at.ravel()], 1)
    distinct, kinds, frequency = np.unique(tokens, axis=0, return_inverse=True, return_counts=True)
    goals = np.bincount(kinds.ravel(), goal.ravel()) / frequency

    def output(w: np.ndarray, x: np.ndarray, ones: np.ndarray, at: np.ndarray) -> np.ndarray:
        return (w[0] * x + w[1]) * (w[2] * ones + w[3] * at) + w[4]

    def residuals(w: np.ndarray) -> np.ndarray:
        return np.sqrt(frequency) * (output(w, *distinct.T) - goals)

    random = np.random.default_rng(0)
    fits = [fit(residuals, random.normal(size=5)) for _ in range(32)]
    return torch.from_numpy(output(min(fits, key=lambda one: one.cost).x, x, ones, at))


def _line(feature: Tensor, counts: Tensor) -> Tensor:
    """Return the least-squares line v * feature + c."""
    x, y = feature - feature.mean(), counts - counts.mean()
    size = x.square().sum()
    slope = (x * y).sum() / size if size > 0 else torch.zeros_like(size)
    return slope * x + counts.mean()


class TheoremsStudy(Study):
    """Theorems 1 and 2 of HMA ACL."""

    name = "theorems"
    title = "Theorems"
    question = "Do the papers' constructions solve the tasks that their theorems name?"
    source = "HMA ACL Theorems 1 and 2"
    text = f"""
Theorem 1: the first layers of tiny hosts with random weights, on three random sequences. The change is the largest
relative difference between the sequences of the token mixers' products with one random vector; gates before the
output projection are listed apart. No weight is trained.

Theorem 2: count in row, the number of consecutive ones that end at a position, for all {2**BITS} binary sequences of
{BITS} tokens. One S6 channel is constructed; the best fixed filter is a least-squares solution, and the best softmax
and linear heads are searched. The parameters in the proof of Lemma 1, S_A = S_B = S_C = 1 and A = 0, give A_t = B_t =
C_t = x_t by its Eq. 26, and solve the task. Its Eq. 28, h_t = h_{{t-1}} + x_t, drops the factor A_t, and counts
all ones.

Lemma 3 is checked on random sequences: a causal head without softmax, with random queries, keys and values, equals a
selective state space with A_t = 1, B_t its keys and C_t its queries; a head with softmax differs from it.
"""
    caption = (
        "Left: the change of token mixers between inputs, exactly zero for fixed mixers. Right: count in row on one "
        "sequence, by the constructed S6 channel and by the best fits of other mixers."
    )
    size = Size(1, 1)
    quick = Size(1, 1)
    # In float64.
    kernels = None
    views = (
        View(
            "mixing",
            "Theorem 1: largest relative change between inputs",
            [("", "mixers", "token mixers"), ("", "gates", "gates")],
        ),
        View("heads", "Lemma 3: relative difference to a state space", [("", "difference", "difference")]),
        View("count", "Theorem 2: count in row", [("", EXACT, EXACT), ("", "R2", "R²")]),
    )

    def measure(
        self, hosts: Mapping[str, Callable[[], nn.Module]], seed: int, size: Size, out: Path
    ) -> dict[str, Table]:
        """Measure both theorems."""
        rows = []
        for label, name in {**FIXED, **GATED, **CONTROLLED}.items():
            mixers, gates = mixing(name, seed)
            rows += [number(label, "mixers", mixers), number(label, "gates", gates)]
        tables = {
            "mixing": Table(rows),
            "heads": Table([number(name, "difference", value) for name, value in head_differences(seed).items()]),
        }
        if seed != SEEDS[0]:
            return tables
        # The second theorem has no random part.
        bits = all_bits()
        counts = count_in_row(bits)
        outputs = {
            EQ_26: s6_channel(bits, printed=False),
            EQ_28: s6_channel(bits, printed=True),
            "best softmax head": softmax_head(bits, counts),
            "best linear head": linear_head(bits, counts),
            "best fixed filter": fixed_filter(bits, counts),
        }
        spread = (counts - counts.mean()).square().sum()
        scored = []
        for label, output in outputs.items():
            right = (output.round() == counts).double().mean()
            explained = 1 - (output - counts).square().sum() / spread
            scored += [number(label, EXACT, float(right)), number(label, "R2", float(explained))]
        return {**tables, "count": Table(scored)}

    def claims(self, results: Results) -> list[Claim]:
        """Return both theorems, in parts."""

        def changes(metric: str, names: Mapping[str, str], relation: Relation, bound: float) -> list[Comparison]:
            return [one for label in names for one in bounded("mixing", metric, label, [""], relation, bound)]

        def counted(label: str, relation: Relation) -> list[Comparison]:
            return bounded("count", EXACT, label, [""], relation, 1)

        return [
            Claim.of(
                "S4, DSS and S5 have fixed mixing elements",
                "HMA ACL Theorem 1 (i)",
                changes("mixers", FIXED, "≤", 0),
                changes("gates", FIXED, "≤", 0),
            ),
            Claim.of(
                "GSS and Hyena have fixed mixing elements with a diagonal data-control mechanism",
                "HMA ACL Theorem 1 (ii)",
                changes("mixers", GATED, "≤", 0),
                changes("gates", GATED, ">", 0.01),
            ),
            Claim.of(
                "S6 has data-controlled mixers",
                "HMA ACL Theorem 1 (iii)",
                changes("mixers", {"S6 (Mamba-1)": ""}, ">", 0.01),
            ),
            Claim.of(
                "So have SSD, the gated delta rule, mLSTM and softmax attention",
                HERE,
                changes(
                    "mixers",
                    {label: name for label, name in CONTROLLED.items() if name != "mamba"},
                    ">",
                    0.01,
                ),
            ),
            Claim.of(
                "One S6 channel expresses count in row with the parameters of the proof",
                "HMA ACL Lemma 1, Eq. 26",
                counted(EQ_26, "≥"),
            ),
            Claim.of(
                "The recurrence h_t = h_{t-1} + x_t solves count in row",
                "HMA ACL Lemma 1, Eq. 28",
                counted(EQ_28, "≥"),
            ),
            Claim.of(
                "One softmax head cannot express count in row",
                "HMA ACL Lemma 2",
                counted("best softmax head", "<"),
            ),
            Claim.of(
                "Neither can one linear head or a fixed filter",
                HERE,
                counted("best linear head", "<"),
                counted("best fixed filter", "<"),
            ),
            Claim.of(
                "A selective state space with A_t = 1 equals one causal head without softmax",
                "HMA ACL Lemma 3",
                bounded("heads", "difference", LINEAR, [""], "<", 1e-6),
            ),
            Claim.of(
                "The same state space equals the head with softmax",
                "HMA ACL Lemma 3, without its simplification",
                bounded("heads", "difference", SOFTMAX, [""], "<", 1e-6),
            ),
            Claim(
                "One channel of S6 expresses every function of one softmax head",
                "HMA ACL Theorem 2",
                untested="a statement on all functions; no finite measurement shows it",
            ),
        ]

    def picture(self, hosts: Mapping[str, Callable[[], nn.Module]], results: Results) -> "Figure":
        """Draw the changes of Theorem 1, and one sequence of Theorem 2."""
        drawn = figure(11, 3.6)
        left, right = drawn.subplots(1, 2)
        names = [*FIXED, *GATED, *CONTROLLED]
        means = [fmean(results.values("mixing", "", name, "mixers")) for name in names]
        left.barh(names, means, color=COLOURS[0])
        for at, mean in enumerate(means):
            if mean == 0:
                left.text(0.02, at, "exactly 0", va="center", fontsize=9, color=COLOURS[1])
        left.invert_yaxis()
        left.set_xlabel("relative change of the token mixers between inputs", fontsize=9)
        bits = all_bits()
        counts = count_in_row(bits)
        at = int((bits @ 2.0 ** torch.arange(BITS - 1, -1, -1).double() == SHOWN).nonzero())
        fits = {
            "S6 channel": s6_channel(bits, printed=False),
            "softmax head": softmax_head(bits, counts),
            "linear head": linear_head(bits, counts),
            "fixed filter": fixed_filter(bits, counts),
        }
        for colour, (name, fit) in zip(COLOURS, fits.items(), strict=False):
            right.plot(fit[at].tolist(), "o-", color=colour, label=name, linewidth=1.4, markersize=4)
        right.set_xticks(range(BITS), [f"{bit:.0f}" for bit in bits[at].tolist()])
        right.set_xlabel("bits read", fontsize=9)
        right.set_ylabel("ones in a row", fontsize=9)
        right.legend(frameon=False, fontsize=8)
        for ax in (left, right):
            ax.spines[["top", "right"]].set_visible(False)
        return drawn


STUDY = TheoremsStudy()
