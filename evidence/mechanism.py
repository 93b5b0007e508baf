"""The mechanism of induction: the model that the Induction paper constructs, and measurements of trained ones."""

import torch
from jaxtyping import Int
from torch import Tensor, nn

import unilinattn as ula
from evidence.conv_ssm import ConvSSMForCausalLM
from unilinattn.examples.tasks import TaskBatch
from unilinattn.host.substitution import through_operators

VOCABULARY = 16
"""Number of tokens, as in Induction Table 2."""


def constructed(decay: float) -> nn.Module:
    """Return the model that solves the task by construction, with one decay for each step (Induction Eq. 12-17).

    Embeddings are two copies of a one-hot vector; the previous token's tap keeps the first half and the current token's
    the second; keys read the first half and queries the second; step sizes are 1. The unembedding reads the second
    half.
    """
    host = ConvSSMForCausalLM(VOCABULARY, 2 * VOCABULARY, VOCABULARY)
    one, zero = torch.eye(VOCABULARY), torch.zeros(VOCABULARY, VOCABULARY)
    conv, ssm = host.mixer.conv, host.mixer.ssm
    assert conv is not None and ssm is not None
    with torch.no_grad():
        host.embedding.weight.copy_(torch.cat([one, one], 1))
        taps = torch.zeros(2 * VOCABULARY, 1, 2)
        taps[:VOCABULARY, 0, 0], taps[VOCABULARY:, 0, 1] = 1, 1
        conv.weight.copy_(taps)
        ssm.to_key.weight.copy_(torch.cat([one, zero], 1))
        ssm.to_query.weight.copy_(torch.cat([zero, one], 1))
        ssm.to_step.weight.zero_()
        # softplus(log(e - 1)) = 1.
        ssm.to_step.bias.fill_(torch.tensor(torch.e - 1).log())
        # The logarithm of zero is that of a rate without decay.
        ssm.log_rate.copy_(torch.tensor(-torch.tensor(decay).log().item()).log().expand(VOCABULARY))
        host.head.weight.copy_(torch.cat([zero, one], 1))
        host.head.bias.zero_()
    return host.eval()


def mechanism(host: ConvSSMForCausalLM, ids: Int[Tensor, "batch length"]) -> dict[str, tuple[float, float]]:
    """Measure the mechanism of a convolution and an SSM (Induction 4.2 and 5): a value and its cases by metric.

    `ids`: sequences whose last token has occurred before.
    """
    trace = ula.trace(host, ids, progress=False)
    analysis = ula.analysis
    embeddings = analysis.embeddings(host.embedding.weight)
    similar = analysis.token_similarity(embeddings, embeddings)
    taps = analysis.convolution_taps(trace.layers[0])
    sizes = taps.taps.abs()
    match = analysis.token_similarity(analysis.token_keys(trace, 0, lag=1), analysis.token_queries(trace, 0))
    keys, values = analysis.token_keys(trace, 0, lag=1), analysis.token_values(trace, 0)
    memory = analysis.project_states(trace.layers[0], values.centred.vectors).change_basis(keys.centred.basis)
    board = memory.values[:, :, 0]
    written = (board[:, 1:] - board[:, :-1]).gather(3, ids[:, 1:, None, None].expand(-1, -1, VOCABULARY, 1))
    predecessor = written.squeeze(-1).argmax(-1) == ids[:, :-1]
    # Is the largest entry of the last query's hidden attention at a token after an occurrence of the query's token?
    row = trace.layers[0].operator.rows(-1, scope="core", heads=0).squeeze(1)
    best = row[:, 1:-1].abs().argmax(-1)
    after = ids.gather(1, best[:, None])[:, 0] == ids[:, -1]
    absolute = similar.similarity.abs()
    count = VOCABULARY * (VOCABULARY - 1)
    return {
        "embedding similarity": (float(absolute.sum() - absolute.trace()) / count, count),
        "tap correlation": (float(taps.correlation[0, 1]), 1),
        "tap Pearson": (float(torch.corrcoef(sizes.T)[0, 1]), 1),
        "match of the same token": (float(match.similarity.diagonal().abs().mean()), VOCABULARY),
        "match of other tokens": (match.different, count),
        "written to the predecessor": (float(predecessor.double().mean()), predecessor.numel()),
        "attends after an occurrence": (float(after.double().mean()), len(after)),
    }


@torch.no_grad()
def last_answers(host: nn.Module, batch: TaskBatch) -> Tensor:
    """Return whether the answer at the last position is right, for each sequence, as in Induction 3.1."""
    # The operators compute what the host's loop over tokens does, in a third of its time.
    with through_operators(host):
        return host(batch.input_ids).logits[:, -1].argmax(-1) == batch.labels[:, -1]
