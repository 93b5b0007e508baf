"""Norms of the contributions T_ij of tokens to tokens, for all pairs, without storing T."""
