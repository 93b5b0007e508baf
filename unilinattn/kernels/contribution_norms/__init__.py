"""Norms of the vectors that tokens contribute to tokens, for all pairs: only the norms are stored."""
