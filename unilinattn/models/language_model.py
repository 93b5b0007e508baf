"""A small causal language model around any mixer whose output has the shape of its input."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class LanguageModelOutput:
    """The output of a language model: the logits, and the loss if labels were given."""

    logits: Float[Tensor, "batch length vocabulary"]
    loss: Float[Tensor, ""] | None = None


def with_loss(
    logits: Float[Tensor, "batch length vocabulary"], labels: Int[Tensor, "batch length"] | None
) -> LanguageModelOutput:
    """Return the output with the next-token loss; labels are shifted by one here, and -100 is ignored."""
    if labels is None:
        return LanguageModelOutput(logits)
    return LanguageModelOutput(logits, functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:]))


class MixerBlock(nn.Module):
    """One residual block: LayerNorm, then the mixer, added to the stream.

    `attention_mask` sets the mixer's input to zero at padding. Right padding reaches no real token of a causal mixer.
    Left padding reaches none in S4, DSS and S5, which map zero to a zero state, but does in H3 and Hyena, whose
    projections have biases, and in GSS if its inner norm has learned one.
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

    `mixer` builds one mixer, a module from (batch, length, d_model) to the same shape; it is called once per layer, so
    the layers of `functools.partial(H3, d_model, head_dim=4)` have separate weights. The mixers are
    `layers[i].mixer`. There is no positional embedding, and no MLP.
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
        """Return the logits of the next token at every position, and the loss if `labels` are given.

        `attention_mask` is 1 at real tokens and 0 at padding. `labels` are the input tokens, which are shifted by one
        here, with -100 at positions without a loss.
        """
        hidden_states = self.embeddings(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask)
        return with_loss(self.lm_head(self.norm_f(hidden_states)), labels)
