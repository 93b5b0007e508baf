"""A small causal language model around any mixer that keeps the shape of its input."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class LanguageModelOutput:
    """What a language model returns: the logits, and the loss if labels were passed."""

    logits: Float[Tensor, "batch length vocabulary"]
    loss: Float[Tensor, ""] | None = None


def with_loss(
    logits: Float[Tensor, "batch length vocabulary"], labels: Int[Tensor, "batch length"] | None
) -> LanguageModelOutput:
    """Return the output with the loss of the next token: labels are shifted by one here, -100 asks for no loss."""
    if labels is None:
        return LanguageModelOutput(logits)
    return LanguageModelOutput(logits, functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:]))


class MixerBlock(nn.Module):
    """One residual block: LayerNorm, then the mixer, added to the stream.

    `attention_mask` sets the mixer's input to zero at padding. Right padding never reaches a real token of a causal
    mixer; left padding then reaches none in S4, DSS and S5, which map zero to a zero state, but does in H3 and
    Hyena, whose projections have biases, and in GSS once its inner norm has learned one.
    """

    def __init__(self, d_model: int, mixer: nn.Module, layer_norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model, eps=layer_norm_eps)
        self.mixer = mixer

    def forward(
        self,
        hidden_states: Float[Tensor, "batch length d_model"],
        attention_mask: Int[Tensor, "batch length"] | Bool[Tensor, "batch length"] | None = None,
    ) -> Float[Tensor, "batch length d_model"]:
        """Return the stream with the mixer's output added."""
        mixed = self.norm(hidden_states)
        if attention_mask is not None:
            mixed = mixed * attention_mask[:, :, None].to(mixed.dtype)
        return hidden_states + self.mixer(mixed)


class MixerForCausalLM(nn.Module):
    """A causal language model of mixer blocks: embedding, blocks, final LayerNorm, head.

    `mixer` builds one layer's mixer, a module from (batch, length, d_model) to the same; it is called once a
    layer, so `functools.partial(H3, d_model, head_dim=4)` gives layers of their own weights. The mixers stand at
    `layers[i].mixer`. Positions are left to the mixers: there is no positional embedding, and no MLP.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        n_layers: int,
        mixer: Callable[[], nn.Module],
        layer_norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, d_model)
        self.layers = nn.ModuleList([MixerBlock(d_model, mixer(), layer_norm_eps) for _ in range(n_layers)])
        self.norm_f = nn.LayerNorm(d_model, eps=layer_norm_eps)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)

    def forward(
        self,
        input_ids: Int[Tensor, "batch length"],
        attention_mask: Int[Tensor, "batch length"] | Bool[Tensor, "batch length"] | None = None,
        labels: Int[Tensor, "batch length"] | None = None,
    ) -> LanguageModelOutput:
        """Return the logits of the next token at every position, and the loss of the labels if there are any."""
        hidden_states = self.embeddings(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask)
        return with_loss(self.lm_head(self.norm_f(hidden_states)), labels)
