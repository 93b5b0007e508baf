"""Tensor-only algorithms: one folder an operation, each with its definition and its faster forms."""
