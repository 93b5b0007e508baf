"""Core mixers: one algebraic structure a class, each an (L x L) matrix per head with linear-time passes."""

from unilinattn.mixers.base import CoreMixer
from unilinattn.mixers.dense import Dense
from unilinattn.mixers.diagonal_decay import DiagonalDecay
from unilinattn.mixers.scalar_decay import ScalarDecay
from unilinattn.mixers.toeplitz import Toeplitz

__all__ = ["CoreMixer", "Dense", "DiagonalDecay", "ScalarDecay", "Toeplitz"]
