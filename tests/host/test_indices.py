"""Indices that are checked before a GPU reads them."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import BartConfig, BartModel, GPT2Config, GPT2LMHeadModel

import unilinattn as ula
from tests.methods.refused import HOSTS
from unilinattn.discovery import search
from unilinattn.errors import InputError
from unilinattn.host import indices
from unilinattn.host.indices import CheckedIndices

TABLE = torch.arange(12.0).view(3, 4)


def gpt2_of(positions: int) -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20, n_positions=positions)).eval()


def bart_of(positions: int) -> nn.Module:
    sizes = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = BartConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=20, max_position_embeddings=positions, **sizes
    )
    return BartModel(config).eval()


def at(*index: int) -> Tensor:
    return torch.tensor(index)


CALLS: dict[str, Callable[[int], Any]] = {
    "embedding": lambda k: functional.embedding(at(0, k), TABLE),
    "torch.embedding": lambda k: torch.embedding(TABLE, at(0, k)),
    "module": lambda k: torch.nn.Embedding(3, 2)(at(0, k)),
    "index_select": lambda k: TABLE.index_select(0, at(k)),
    "gather": lambda k: torch.gather(TABLE, 0, at(k, 0)[None]),
    "scatter": lambda k: TABLE.clone().scatter_(0, at(k)[None], 1.0),
    "index_add": lambda k: torch.index_add(TABLE, dim=0, index=at(k), source=TABLE[:1]),
    "take": lambda k: TABLE.take(at(4 * k)),
    "one_hot": lambda k: functional.one_hot(at(0, k), 3),
    "brackets": lambda k: TABLE[at(k)],
    "brackets of two axes": lambda k: TABLE[at(k), at(3)],
    "brackets after others": lambda k: TABLE[None, :, 1][:, at(k)],
    "brackets after an ellipsis": lambda k: TABLE.T[..., at(k)],
    "brackets after a mask": lambda k: TABLE.T[None][torch.ones(1, 4, dtype=torch.bool), at(k)],
    "assignment": lambda k: TABLE.clone().__setitem__(at(k), 0.0),
    "masked_scatter": lambda k: TABLE.masked_scatter(k > TABLE, torch.ones(2)),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_index_out_of_range_is_refused_before_it_is_read(name: str) -> None:
    call = CALLS[name]
    expected = call(2)
    with CheckedIndices():
        actual = call(2)
        with pytest.raises(IndexError, match=r"there are|values"):
            call(3)
    if expected is not None and name != "module":
        assert torch.equal(actual, expected)


def test_negative_indices_count_from_the_end() -> None:
    with CheckedIndices():
        assert torch.equal(TABLE[at(-3)], TABLE[:1])
        assert torch.equal(TABLE.take(at(-12)), TABLE.flatten()[:1])
        with pytest.raises(IndexError, match="from -4 to 0; there are 3"):
            TABLE[at(0, -4)]


def test_indices_of_other_kinds_pass() -> None:
    with CheckedIndices():
        assert TABLE[True].shape == (1, 3, 4)
        assert TABLE[[0, 2]].shape == (2, 4)
        assert TABLE[TABLE > 5].shape == (6,)
        assert TABLE[at().long()].shape == (0, 4)
        assert TABLE[1, ..., None].shape == (4, 1)
        assert functional.embedding(at(0, 2), TABLE.long()).shape == (2, 4)


@pytest.mark.parametrize("model", [gpt2_of(4), bart_of(4)], ids=["GPT-2", "BART"])
def test_ids_beyond_a_table_are_refused_in_the_words_of_a_cpu(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The ids are beyond the table of positions, which BART's class reads at other numbers.
    ids = torch.arange(15, 19).unsqueeze(0)
    monkeypatch.setattr(indices, "_on_gpu", lambda tensor: True)
    ula.trace(model, ids, progress=False)
    with pytest.raises(InputError, match=r"the inputs have 9 tokens, and .* has positions for 4; give a shorter text"):
        ula.trace(model, torch.arange(9).unsqueeze(0), progress=False)


@pytest.mark.long
def test_a_trial_of_repeated_tokens_ends_before_it_fills_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """BLIP-2 has as many vectors of an image as tokens for them, and a search repeats the tokens of a short text."""
    scores, reached = [], list[list[bool]]()
    for checks in (False, True):
        torch.manual_seed(0)
        model, inputs = HOSTS["BLIP-2"]()
        if checks:
            monkeypatch.setattr(search, "checked_indices", lambda model: CheckedIndices())
        with warnings.catch_warnings(), Fills() as fills:
            warnings.simplefilter("ignore")
            scores.append(ula.explain(model.eval(), inputs, method="lrp", target=-1).scores)
        reached.append(fills.fit)
    assert not all(reached[0])
    assert reached[1]
    assert all(reached[1])
    assert torch.equal(*scores)


class Fills(TorchFunctionMode):
    """Notes whether the values of each mask that torch fills are enough."""

    def __init__(self) -> None:
        super().__init__()
        self.fit: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "masked_scatter":
            tensor, mask, source = args
            self.fit.append(int(mask.expand_as(tensor).sum()) <= source.numel())
        return func(*args, **(kwargs or {}))
