"""The head-reduced map: sum over channels of left_ic alpha_ij right_jc, as rows of an (L, L) map."""
