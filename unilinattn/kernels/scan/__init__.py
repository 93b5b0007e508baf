"""Linear-time passes of decayed outer-product memories: S_t = exp(g_t) S_{t-1} + k_t v_t^T, y_t = S_t^T q_t."""
