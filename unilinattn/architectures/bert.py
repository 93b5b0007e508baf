"""BERT's attention block, whose module ends with the residual connection and LayerNorm."""

from unilinattn.architectures.probe import add_values, probe
from unilinattn.call import Call, linear_layer
from unilinattn.call.attention_interface import attention_weights, only_attention, require_same_tokens, value_source
from unilinattn.errors import UncoveredError
from unilinattn.mixers import Dense
from unilinattn.operator.flow import Flow
from unilinattn.registry import register_architecture


def _check(call: Call) -> None:
    if call.host.is_cross_attention:
        raise UncoveredError(
            f"{call.name}: cross-attention whose residual and LayerNorm stand inside the module is not covered; "
            "trace only the encoder."
        )
    require_same_tokens(call)


@register_architecture(
    "transformers.models.bert.modeling_bert.BertAttention",
    "transformers.models.roberta.modeling_roberta.RobertaAttention",
    "transformers.models.xlm_roberta.modeling_xlm_roberta.XLMRobertaAttention",
    "transformers.models.camembert.modeling_camembert.CamembertAttention",
    "transformers.models.electra.modeling_electra.ElectraAttention",
    "transformers.models.ernie.modeling_ernie.ErnieAttention",
    name="bert",
    kind="softmax attention (post-norm)",
    needs_capture=True,
    check=_check,
)
def bert(call: Call) -> Flow:
    """BERT's layout: attention, output projection, residual and LayerNorm in one module."""
    host, seen = call.host, only_attention(call)
    weights, repeats, _ = attention_weights(call, seen)
    _, source = value_source(call, seen)
    value, _ = probe(call, seen, source)
    flow = Flow(call.input)
    add_values(flow, call, seen, value, repeats)
    flow.core(Dense(weights))
    dense = linear_layer(host.output.dense, host.output)
    flow.matrix(*call.affine(dense), role="output")
    norm = host.output.LayerNorm
    return flow.residual(call.input).layer_norm(*call.affine(norm), eps=norm.eps)
