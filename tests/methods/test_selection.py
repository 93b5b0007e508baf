"""Layers on different streams (encoder, decoder, cross-attention), which methods refuse to compose or stack."""

from functools import cache

import pytest
import torch
import transformers

from tests.methods.hosts import VOCABULARY, traced
from unilinattn.errors import InputError, UncoveredError
from unilinattn.methods import alti, attribution, latim, raw, rollout
from unilinattn.testing.hosts import randomize
from unilinattn.tracing.trace import Trace, trace

SELF = "encoder.block.0.layer.0.SelfAttention"
DECODER = "decoder.block.0.layer.0.SelfAttention"
CROSS = "decoder.block.0.layer.1.EncDecAttention"


@cache
def translated(decoded: int) -> Trace:
    """Trace an encoder-decoder on five tokens (four in the second sequence) and `decoded` decoder tokens."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    model = randomize(transformers.T5ForConditionalGeneration(config).eval())
    ids = torch.randint(VOCABULARY, (2, 5))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    return trace(model, {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :decoded]})


@pytest.mark.parametrize("method", [raw, latim, alti])
@pytest.mark.parametrize("decoded", [3, 5])
def test_layer_wise_methods_refuse_to_stack_them(method, decoded: int) -> None:
    # With equally many tokens on both sides the shapes agree, but the keys are different tokens.
    with pytest.raises(UncoveredError, match=rf"{SELF} .* and of {DECODER} .*layers=\[...\] selects"):
        method(translated(decoded))


@pytest.mark.parametrize("method", [raw, latim])
def test_layers_of_one_kind_can_be_selected(method) -> None:
    trace = translated(3)
    assert method(trace, layers=[SELF]).sizes == {"layer": 1, "batch": 2, "query": 5, "key": 5}
    cross = method(trace, layers=[CROSS])
    assert cross.sizes == {"layer": 1, "batch": 2, "query": 3, "key": 5}
    assert (cross.scores[:, 1, :, 4] == 0).all()
    assert (cross.scores[:, 1, :, :4] != 0).all()
    assert cross.mask.tolist() == [[True] * 5, [True] * 4 + [False]]
    assert method(trace, layers=[DECODER], target=-1).sizes == {"layer": 1, "batch": 2, "key": 3}
    assert method(trace, layers=[CROSS], target=-1).sizes == {"layer": 1, "batch": 2, "key": 5}


def test_the_exact_vectors_of_cross_attention_sum_to_its_output() -> None:
    assert latim(translated(3), layers=[CROSS]).completeness_gap <= 1e-5


def test_a_target_is_a_position_of_the_last_layer() -> None:
    with pytest.raises(UncoveredError, match=rf"a target counts the tokens of {CROSS}, and {SELF} has"):
        raw(translated(3), layers=[SELF], target=-1)


def test_the_residual_of_cross_attention_is_a_share_by_itself() -> None:
    result = alti(translated(3), layers=[CROSS])
    assert torch.allclose(result.scores.sum(-1) + result.extras["residual"], torch.ones(1, 2, 3))
    norms = latim(translated(3), layers=[CROSS], residual=True).extras["residual"]
    assert torch.equal(norms[0], translated(3).layers[-1].stream.norm(dim=-1))
    with pytest.raises(UncoveredError, match="none of the keys is the query's own token"):
        latim(translated(3), layers=[CROSS], bias="query")
    with pytest.raises(UncoveredError, match="normalize='min-max' is that of one map"):
        latim(translated(3), layers=[CROSS], residual=True, normalize="min-max")


@pytest.mark.parametrize("method", [raw, rollout, attribution, latim, alti])
@pytest.mark.parametrize("target", [6, -7, [0, 6], [0, 0, 0], True])
def test_a_target_out_of_range_is_refused(method, target) -> None:
    with pytest.raises(InputError, match="target"):
        method(traced("mamba2"), target=target)


def test_a_target_in_the_padding_is_out_of_range() -> None:
    for padding in ("left", "right"):
        rollout(traced("mamba2", padding), target=[5, 3])
        with pytest.raises(InputError, match="sequence 1 has 4 real positions"):
            rollout(traced("mamba2", padding), target=4)
