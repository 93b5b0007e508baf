"""Text of installed Python packages: documentation, split into documents, and a byte-level tokenizer of it."""

import ast
import hashlib
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from unilinattn.errors import CheckpointError
from unilinattn.optional import import_extra

PACKAGES = {
    "accelerate": "Apache-2.0",
    "beartype": "MIT",
    "captum": "BSD-3-Clause",
    "click": "BSD-3-Clause",
    "fonttools": "MIT",
    "huggingface_hub": "Apache-2.0",
    "imageio": "BSD-2-Clause",
    "jinja2": "BSD-3-Clause",
    "joblib": "BSD-3-Clause",
    "matplotlib": "PSF-based",
    "mpmath": "BSD-3-Clause",
    "narwhals": "MIT",
    "networkx": "BSD-3-Clause",
    "numba": "BSD-2-Clause",
    "numpy": "BSD-3-Clause",
    "packaging": "Apache-2.0 or BSD-2-Clause",
    "pandas": "BSD-3-Clause",
    "peft": "Apache-2.0",
    "pillow": "MIT-CMU",
    "playwright": "Apache-2.0",
    "pydantic": "MIT",
    "pygments": "BSD-2-Clause",
    "pyparsing": "MIT",
    "pytest": "MIT",
    "rich": "MIT",
    "scikit-image": "BSD-3-Clause",
    "scikit-learn": "BSD-3-Clause",
    "scipy": "BSD-3-Clause",
    "setuptools": "MIT",
    "sympy": "BSD-3-Clause",
    "torch": "BSD-3-Clause",
    "transformers": "Apache-2.0",
    "xarray": "Apache-2.0",
}
"""The packages whose docstrings are read, with their licences; all are installed for the tests."""

PYTHON = "PSF-2.0"
"""The licence of the language reference and of the standard library, which are read too."""

SHORTEST = 200
"""Characters below which a docstring is left out."""

HELD_OUT_PERCENT = 2
"""Percentage of the documents that no model is trained on."""

END = "<|endoftext|>"
"""Token before each text."""


@dataclass(frozen=True)
class Document:
    """The texts of one module, or of one topic of the language reference.

    Attributes:
        source: package and path of the module.
        texts: one for each docstring, with the qualified name before it.
    """

    source: str
    texts: tuple[str, ...]

    @property
    def held_out(self) -> bool:
        """Whether the document is in the held-out part, by a hash of its source."""
        digest = hashlib.sha256(self.source.encode()).digest()
        return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def documents() -> list[Document]:
    """Return all documents in a fixed order: no paragraph occurs twice, so none is in both parts of the split.

    Raises `CheckpointError` if a package is not installed.
    """
    paragraphs: set[bytes] = set()
    sources = [*_modules(), *_standard_library()]
    result = []
    for source, path in sources:
        texts = [text for name, doc in _docstrings(path) if (text := _prose(name, doc, paragraphs))]
        if texts:
            result.append(Document(source, tuple(texts)))
    for name, text in sorted(topics.items()):
        if prose := _prose(name, text, paragraphs):
            result.append(Document(f"python/topics/{name}", (prose,)))
    return result


def versions() -> Mapping[str, str]:
    """Return the version of each package and of Python."""
    return {"python": sys.version.split()[0], **{name: _distribution(name).version for name in PACKAGES}}


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Return a byte-level BPE tokenizer (of the package tokenizers) with `vocabulary` entries, the first is `END`."""
    package: Any = import_extra("tokenizers", "hf")
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Any, corpus: Iterable[Document]) -> np.ndarray:
    """Return the ids of all texts as one array of uint16, with the id of `END` before each."""
    texts = [f"{END}{text}" for document in corpus for text in document.texts]
    return np.concatenate([np.asarray(encoding.ids, np.uint16) for encoding in tokenizer.encode_batch_fast(texts)])


def _modules() -> Iterator[tuple[str, Path]]:
    for name in PACKAGES:
        files = _distribution(name).files or []
        for file in sorted(files, key=str):
            if file.suffix == ".py" and not _is_test(file.parts):
                yield f"{name}/{file}", Path(str(file.locate()))


def _standard_library() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if "site-packages" not in parts and not _is_test(parts):
            yield f"python/{'/'.join(parts)}", path


def _is_test(parts: tuple[str, ...]) -> bool:
    return any(part in {"test", "tests", "testing", "_vendor", "externals", "idlelib", "lib2to3"} for part in parts)


def _distribution(name: str) -> Any:
    try:
        return distribution(name)
    except PackageNotFoundError:
        raise CheckpointError(f"{name} is not installed; the text needs all of {', '.join(PACKAGES)}.") from None


def _docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring of a module, its classes and its functions, in their order."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    yield from _documented(tree, path.stem if path.stem != "__init__" else path.parent.name)


def _documented(node: Any, name: str) -> Iterator[tuple[str, str]]:
    if doc := ast.get_docstring(node):
        yield name, doc
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            prefix = f"{name}." if isinstance(node, ast.ClassDef) else ""
            yield from _documented(child, f"{prefix}{child.name}")


def _prose(name: str, doc: str, paragraphs: set[bytes]) -> str:
    """Return the paragraphs of words that are not in `paragraphs`, and add them; an empty string for little text."""
    lines = []
    for paragraph in re.split(r"\n\s*\n", doc):
        digest = hashlib.sha256(" ".join(paragraph.split()).encode()).digest()
        if ">>>" in paragraph or "```" in paragraph or not _is_words(paragraph):
            continue
        # Headings and other short paragraphs may repeat.
        if len(paragraph) > 60 and digest in paragraphs:
            continue
        paragraphs.add(digest)
        lines.append(paragraph.strip("\n"))
    text = "\n\n".join(lines)
    return f"{name}\n\n{text}" if len(text) >= SHORTEST else ""


def _is_words(paragraph: str) -> bool:
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return paragraph.isascii() and letters >= 0.8 * len(paragraph)
