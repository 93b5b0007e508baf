"""BERT's attention block, whose module ends with the residual connection and LayerNorm: it is recorded."""

from unilinattn.architectures.recorded import recorded
from unilinattn.registry import register_architecture

register_architecture(
    "transformers.models.bert.modeling_bert.BertAttention",
    "transformers.models.roberta.modeling_roberta.RobertaAttention",
    "transformers.models.xlm_roberta.modeling_xlm_roberta.XLMRobertaAttention",
    "transformers.models.camembert.modeling_camembert.CamembertAttention",
    "transformers.models.electra.modeling_electra.ElectraAttention",
    "transformers.models.ernie.modeling_ernie.ErnieAttention",
    name="bert",
    kind="softmax attention (post-norm)",
    needs_capture=True,
)(recorded)
