"""Pretrained checkpoints: a missing wheel, tokens, and a model of the cache."""

from pathlib import Path

import pytest
import torch

from evidence import checkpoints, truths
from unilinattn.optional import MissingExtraError


def test_a_missing_wheel_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(checkpoints.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(MissingExtraError, match=r"pip download --no-deps .*rxnmapper==0\.4\.3"):
        checkpoints.atom_maps(download=False)


def test_tokens_of_a_reaction_join_to_its_text() -> None:
    for text in truths.texts("reactions"):
        assert "".join(checkpoints.smiles_tokens(text)) == text


def test_a_real_model_and_its_scores_are_read_from_the_cache() -> None:
    try:
        model, vocabulary = checkpoints.atom_maps(download=False)
    except MissingExtraError as error:
        pytest.skip(str(error))
    example = truths.CHECKPOINTS["rxnmapper"].inputs(model, vocabulary)[0]
    # The masked atom of an amide can be copied from the reactants: the model is sure of it.
    assert float(truths.log_probability(model, example)(torch.tensor([example.ids]))) > -0.7
