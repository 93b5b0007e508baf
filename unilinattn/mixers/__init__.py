"""Core mixers: one algebraic structure a class, each an (L x L) matrix per head with linear-time passes."""

from unilinattn.mixers.base import CoreMixer
from unilinattn.mixers.delta_rule import DeltaRule
from unilinattn.mixers.dense import Dense
from unilinattn.mixers.diagonal_decay import DiagonalDecay
from unilinattn.mixers.exclusive_bonus import ExclusiveBonus
from unilinattn.mixers.gather import Gather
from unilinattn.mixers.low_rank_update import LowRankUpdate
from unilinattn.mixers.mlstm import MLSTM
from unilinattn.mixers.normalized_exponential import NormalizedExponential
from unilinattn.mixers.reversed import Reversed
from unilinattn.mixers.scalar_decay import ScalarDecay
from unilinattn.mixers.softmax import Softmax
from unilinattn.mixers.substep import Substep
from unilinattn.mixers.toeplitz import Toeplitz
from unilinattn.mixers.toeplitz_low_rank import ToeplitzLowRank

__all__ = [
    "MLSTM",
    "CoreMixer",
    "DeltaRule",
    "Dense",
    "DiagonalDecay",
    "ExclusiveBonus",
    "Gather",
    "LowRankUpdate",
    "NormalizedExponential",
    "Reversed",
    "ScalarDecay",
    "Softmax",
    "Substep",
    "Toeplitz",
    "ToeplitzLowRank",
]
