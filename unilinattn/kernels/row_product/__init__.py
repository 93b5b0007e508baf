"""Sums over rows of a function of the reduced map: out_j = sum_i row_i sign(weight_i m_ij), no map stored."""
