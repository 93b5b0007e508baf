"""Tensor-only algorithms: one folder per operation, with its definition and its fast implementations."""
