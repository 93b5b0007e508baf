"""HyenaDNA: the published genomic language model around Hyena."""

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.models.hyena import Hyena
from unilinattn.models.language_model import LanguageModelOutput, with_loss


class HyenaDNAMLP(nn.Module):
    """Two linear maps with a GELU (tanh form) between them."""

    def __init__(self, d_model: int, d_inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(d_model, d_inner)
        self.fc2 = nn.Linear(d_inner, d_model)

    def forward(self, hidden_states: Float[Tensor, "batch length d_model"]) -> Float[Tensor, "batch length d_model"]:
        """Apply the MLP to each token."""
        return self.fc2(functional.gelu(self.fc1(hidden_states), approximate="tanh"))


class HyenaDNABlock(nn.Module):
    """LayerNorm and Hyena, then LayerNorm and MLP, each added to the stream."""

    def __init__(self, d_model: int, d_inner: int, mixer: Hyena) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm1 = nn.LayerNorm(d_model)
        self.mlp = HyenaDNAMLP(d_model, d_inner)
        self.norm2 = nn.LayerNorm(d_model)

    def forward(self, hidden_states: Float[Tensor, "batch length d_model"]) -> Float[Tensor, "batch length d_model"]:
        """Return the stream with both outputs added."""
        hidden_states = hidden_states + self.mixer(self.norm1(hidden_states))
        return hidden_states + self.mlp(self.norm2(hidden_states))


class HyenaDNABackbone(nn.Module):
    """Embedding, blocks and final LayerNorm."""

    def __init__(self, d_model: int, n_layer: int, d_inner: int, vocab_size: int, l_max: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict({"word_embeddings": nn.Embedding(vocab_size, d_model)})
        self.layers = nn.ModuleList(
            [
                HyenaDNABlock(d_model, d_inner, Hyena(d_model, l_max, emb_dim=5, w=10.0, shift=0.05))
                for _ in range(n_layer)
            ]
        )
        self.ln_f = nn.LayerNorm(d_model)

    def forward(self, input_ids: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length d_model"]:
        """Return the final hidden states."""
        hidden_states = self.embeddings["word_embeddings"](input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.ln_f(hidden_states)


class HyenaDNAForCausalLM(nn.Module):
    """The language model of Nguyen et al., "HyenaDNA: Long-Range Genomic Sequence Modeling at Single Nucleotide
    Resolution" (2023), with the parameter names and shapes of the published checkpoints.

    Their state dicts load after the prefix `model.` is removed from each name and, in checkpoints trained with gradient
    checkpointing, `.layer` after `mixer` and `mlp`. `vocab_size` is the padded one (16 for 12 tokens), `l_max` the
    longest training sequence plus 2; the defaults are those of the smallest published model, for 1024 tokens. The head
    shares the embedding's weight.

    Omitted from the original: dropout, the classification heads, attention layers, and the tokenizer.
    """

    def __init__(
        self, d_model: int = 128, n_layer: int = 2, d_inner: int = 512, vocab_size: int = 16, l_max: int = 1026
    ) -> None:
        super().__init__()
        self.backbone = HyenaDNABackbone(d_model, n_layer, d_inner, vocab_size, l_max)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)
        self.backbone.embeddings["word_embeddings"].weight = self.lm_head.weight

    def forward(
        self, input_ids: Int[Tensor, "batch length"], labels: Int[Tensor, "batch length"] | None = None
    ) -> LanguageModelOutput:
        """Return the logits of the next token at every position, and the loss if `labels` are given."""
        return with_loss(self.lm_head(self.backbone(input_ids)), labels)
