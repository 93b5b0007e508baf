"""The chunkwise and recurrent kernels of mlstm-kernels by name; its parallel ones scale `eps` otherwise."""

from torch import Tensor
from torch.nn import functional

from unilinattn.mixers import MLSTM
from unilinattn.rules.mixing_functions import register_mixing_function

CHUNKWISE = "mlstm_kernels.torch.chunkwise"


@register_mixing_function(
    f"{CHUNKWISE}.native.mlstm_chunkwise__native_autograd",
    f"{CHUNKWISE}.native.mlstm_chunkwise__native_custbw",
    f"{CHUNKWISE}.triton_limit_chunk.mlstm_chunkwise__limit_chunk",
    f"{CHUNKWISE}.triton_xl_chunk.mlstm_chunkwise__xl_chunk",
    "mlstm_kernels.torch.recurrent.native_sequence.mlstm_recurrent_sequence__native_fw",
    "mlstm_kernels.torch.recurrent.native_sequence.mlstm_recurrent_sequence__triton_step_fused_fw",
    carried="v",
    tokens=2,
    extra_outputs="return_last_states",
    refused=("c_initial", "n_initial", "m_initial"),
)
def mlstm(q: Tensor, k: Tensor, i: Tensor, f: Tensor, eps: float = 1e-6) -> MLSTM:
    """xLSTM's matrix memory with exponential input gates, heads first (Beck et al., NeurIPS 2024)."""
    query, key, enter, forget = (x.transpose(1, 2) for x in (q, k, i, f))
    return MLSTM(query * query.shape[-1] ** -0.5, key, functional.logsigmoid(forget), enter, eps=eps)
