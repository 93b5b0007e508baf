"""Checksums of tensors of 64-bit words."""
