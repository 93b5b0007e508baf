"""Local checkpoints of Hugging Face models with their tokenizers or image processors."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from unilinattn.errors import CheckpointError, OptionError, nearest
from unilinattn.optional import import_extra

SETTINGS = {"local_files_only": True, "trust_remote_code": False}
PROCESSOR = "preprocessor_config.json"
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_checkpoint(path: Path, dtype: str | None = None) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer from a local folder that `save_pretrained` wrote.

    `dtype` is a name of `DTYPES`, by default that of the stored weights. Nothing is downloaded, and no code from the
    folder is run.

    Raises `OptionError` for an unknown dtype, and `CheckpointError` if the folder has no checkpoint or no tokenizer, or
    if the checkpoint cannot be loaded or lacks weights.
    """
    host = _load(path, dtype, "AutoModelForCausalLM", "a causal language model")
    tokenizer = _load_reader(path, "AutoTokenizer", "tokenizer")
    # Without files some tokenizers load empty instead of raising an error.
    files = ("tokenizer.json", "tokenizer_config.json", *tokenizer.vocab_files_names.values())
    if not any((path / file).is_file() for file in files):
        raise CheckpointError(f"{path} has no tokenizer; save one there with `tokenizer.save_pretrained`.")
    return host, tokenizer


def load_image_checkpoint(path: Path, dtype: str | None = None) -> tuple[Any, Any]:
    """Load an image classifier and its image processor from a local folder, as `load_checkpoint` does a language model.

    Raises `OptionError` for an unknown dtype, and `CheckpointError` if the folder has no checkpoint or no image
    processor, or if the checkpoint cannot be loaded or lacks weights.
    """
    host = _load(path, dtype, "AutoModelForImageClassification", "an image classifier", "image processor")
    return host, _load_reader(path, "AutoImageProcessor", "image processor", file=PROCESSOR)


def _load(path: Path, dtype: str | None, auto: str, what: str, reader: str = "tokenizer") -> Any:
    """Return the model in a folder, loaded by a class of transformers for models of the kind `what`."""
    transformers = import_extra("transformers", "hf")
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"unknown dtype {dtype!r}{nearest(dtype, DTYPES)}")
    if not (path / "config.json").is_file():
        problem = "is not a folder" if not path.is_dir() else "holds no config.json"
        raise CheckpointError(
            f"{path} {problem}; give a local folder with a checkpoint (config.json, weights and {reader}, as "
            "`save_pretrained` writes them). Nothing is downloaded."
        )
    kind = "auto" if dtype is None else DTYPES[dtype]
    # transformers, tokenizers and safetensors share no error class for a damaged folder.
    try:
        host, loading = getattr(transformers, auto).from_pretrained(
            path, dtype=kind, output_loading_info=True, **SETTINGS
        )
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded as {what}: {_first_line(error)}") from error
    if absent := sorted(loading["missing_keys"]) or sorted(map(str, loading["mismatched_keys"])):
        raise CheckpointError(
            f"{path} lacks {len(absent)} weights of {type(host).__name__} ({', '.join(absent[:3])}); they would be "
            "random numbers, and their explanation meaningless."
        )
    return host.eval()


def _load_reader(path: Path, auto: str, what: str, file: str = "") -> Any:
    """Return the tokenizer or image processor in a folder, which must hold `file`."""
    try:
        # Without its file some versions of transformers make the default processor of the model's class.
        if not (path / file).exists():
            raise FileNotFoundError(f"it holds no {file}")
        return getattr(import_extra("transformers", "hf"), auto).from_pretrained(path, **SETTINGS)
    except Exception as error:
        raise CheckpointError(
            f"{path} has no {what} that can be loaded ({_first_line(error)}); save one there with "
            f"`{what.split()[-1]}.save_pretrained`."
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(": ") or type(error).__name__


@contextmanager
def quiet_hosts() -> Iterator[None]:
    """Silence transformers' warnings about missing CUDA kernels and its loading bars inside the block."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread, which is faster for tensors this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
