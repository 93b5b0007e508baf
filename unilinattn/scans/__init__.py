"""Functions of other packages by name: scans as core mixers, and plain code for kernels that mix no tokens."""

from unilinattn.scans import associative, fla, fla_delta, fla_matrices, fla_plain, mamba, mlstm

__all__ = ["associative", "fla", "fla_delta", "fla_matrices", "fla_plain", "mamba", "mlstm"]
