"""Sizes of T_ij x_j for all pairs: a tile of vectors is reduced as soon as it is there."""
