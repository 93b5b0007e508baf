"""Train a model on the documentation of Python packages: python -m evidence.train_text mamba2 --minutes 42

The first run reads the text and trains the tokenizer. Weights in half precision, tokenizer and record go to `--out`;
text and checkpoints to `--cache`, from which an interrupted training goes on. `--size large` writes to the cache only.
"""

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.machine import machine
from evidence import text_data
from evidence.text_baselines import baselines
from evidence.text_scans import fast_scans
from evidence.texts import MODELS, MULTIPLES, VOCABULARY, WEIGHTS, build, configuration, nats, untied, with_tied
from unilinattn.progress import progress

LENGTH = 256
"""Tokens of a training sequence."""

BATCH = 16
"""Sequences of a batch."""

LEARNING_RATE = 4e-3

WARM_UP = 0.03
"""Share of the time in which the learning rate rises."""

SAVE_EVERY = 120
"""Seconds between checkpoints."""

SEED = 0


def prepare(cache: Path) -> dict[str, Any]:
    """Write the tokenizer, the tokens of both parts and the held-out texts to the cache; return their description."""
    description = cache / "text.json"
    if description.exists():
        return json.loads(description.read_text())
    cache.mkdir(parents=True, exist_ok=True)
    corpus = text_data.documents()
    training = [document for document in corpus if not document.held_out]
    held_out = [document for document in corpus if document.held_out]
    tokenizer = text_data.train_tokenizer((text for document in training for text in document.texts), VOCABULARY)
    tokenizer.save(str(cache / "tokenizer.json"), pretty=False)
    counts = {}
    for part, group in (("training", training), ("held_out", held_out)):
        ids = text_data.encode(tokenizer, group)
        np.save(cache / f"{part}.npy", ids)
        size = sum(len(text) for document in group for text in document.texts)
        counts[part] = {"documents": len(group), "bytes": size, "tokens": len(ids)}
    sources = [{"source": document.source, "texts": document.texts} for document in held_out]
    (cache / "held_out.json").write_text(json.dumps(sources))
    licences = {"python": text_data.PYTHON, **text_data.PACKAGES}
    result = {"licences": licences, "versions": text_data.versions(), "vocabulary": VOCABULARY, **counts}
    description.write_text(json.dumps(result, indent=2))
    return result


def batches(tokens: np.ndarray, step: int) -> Iterator[Tensor]:
    """Yield the batches from a step on: each epoch cuts the tokens from another offset and shuffles the pieces."""
    per_epoch = (len(tokens) - LENGTH) // LENGTH // BATCH
    while True:
        epoch, first = divmod(step, per_epoch)
        generator = np.random.default_rng((SEED, epoch))
        offset = generator.integers(LENGTH)
        order = generator.permutation(per_epoch * BATCH).reshape(per_epoch, BATCH)
        for rows in order[first:]:
            starts = offset + rows[:, None] * LENGTH
            yield torch.from_numpy(tokens[starts + np.arange(LENGTH)].astype(np.int64))
            step += 1


def schedule(share: float) -> float:
    """Return the learning-rate factor at a share of the time: a linear rise, then a cosine to zero."""
    return min(share / WARM_UP, 0.5 * (1 + math.cos(math.pi * min(share, 1.0))))


def optimizer_of(host: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on the matrices only."""
    parameters = list(host.parameters())
    groups = [
        {"params": [weight for weight in parameters if weight.ndim > 1], "weight_decay": 0.1},
        {"params": [weight for weight in parameters if weight.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98))


def train(host: nn.Module, tokens: np.ndarray, minutes: float, checkpoint: Path) -> dict[str, Any]:
    """Train a model in place until its minutes are over; continue from `checkpoint` if it exists."""
    optimizer, step, before = optimizer_of(host), 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        host.load_state_dict(with_tied(state["weights"]))
        optimizer.load_state_dict(state["optimizer"])
        step, before = state["step"], state["seconds"]
    host.train()
    compile_layers(host)
    start = saved = time.monotonic()
    losses: list[float] = []
    with fast_scans():
        for ids in batches(tokens, step):
            seconds = before + time.monotonic() - start
            if seconds >= 60 * minutes:
                break
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * schedule(seconds / (60 * minutes))
            with torch.autocast("cpu", torch.bfloat16):
                logits = host(ids).logits[:, :-1]
                loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(host.parameters(), 1.0)
            optimizer.step()
            step += 1
            losses.append(loss.item())
            if time.monotonic() - saved > SAVE_EVERY:
                saved = time.monotonic()
                state = {"weights": untied(host), "optimizer": optimizer.state_dict(), "step": step}
                torch.save({**state, "seconds": before + saved - start}, checkpoint.with_suffix(".partial"))
                checkpoint.with_suffix(".partial").replace(checkpoint)
                mean = sum(losses[-100:]) / len(losses[-100:])
                print(f"{seconds / 60:.1f} min, step {step}, loss {mean:.3f}", flush=True)
    host.eval()
    return {"steps": step, "tokens_seen": step * BATCH * LENGTH, "last_losses": sum(losses[-100:]) / len(losses[-100:])}


def compile_layers(host: nn.Module) -> None:
    """Compile each layer in place, which makes a step faster."""
    for module in host.modules():
        if isinstance(module, nn.ModuleList) and module[0].__class__.__name__.endswith(("Block", "DecoderLayer")):
            for layer in module:
                layer.forward = torch.compile(layer.forward)


def perplexity(host: nn.Module, tokens: np.ndarray) -> float:
    """Return the perplexity per token of the host's own forward pass, in windows of `LENGTH` tokens."""
    rows = torch.from_numpy(tokens[: len(tokens) // LENGTH * LENGTH].astype(np.int64)).view(-1, LENGTH)
    chunks = rows.split(32)
    total = sum(nats(host, chunk) * len(chunk) for chunk in progress(chunks, "held-out text"))
    return math.exp(total / len(rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train a model, measure it on the held-out documents, and write weights and record."""
    parser = argparse.ArgumentParser(prog="python -m evidence.train_text", description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--minutes", type=float, default=42.0, help="time in which the learning rate falls to 0")
    parser.add_argument("--size", choices=MULTIPLES, default="small", help="small is the shipped size")
    parser.add_argument("--out", type=Path, default=WEIGHTS, help="folder of the shipped files")
    parser.add_argument("--cache", type=Path, default=Path("build/text"), help="folder of the text and the checkpoints")
    options = parser.parse_args(arguments)
    out = options.out if options.size == "small" else options.cache
    out.mkdir(parents=True, exist_ok=True)
    # Recorded figures are those of one core.
    torch.set_num_threads(1)
    text = prepare(options.cache)
    shutil.copy(options.cache / "tokenizer.json", out / "text-tokenizer.json")
    tokens, held_out = (np.load(options.cache / f"{part}.npy") for part in ("training", "held_out"))
    torch.manual_seed(SEED)
    host = build(options.model, options.size)
    checkpoint = options.cache / f"{options.model}-{options.size}.pt"
    training = train(host, tokens, options.minutes, checkpoint)

    weights = {name: tensor.half().contiguous() for name, tensor in untied(host).items()}
    save_file(weights, out / f"text-{options.model}.safetensors")
    host = build(options.model, options.size).eval()
    host.load_state_dict(with_tied({name: tensor.float() for name, tensor in weights.items()}))
    measured = perplexity(host, held_out)
    per_byte = text["held_out"]["tokens"] / text["held_out"]["bytes"] / math.log(2)
    record = {
        "class": type(host).__name__,
        "config": configuration(options.model, options.size),
        "parameters": sum(parameter.numel() for parameter in host.parameters()),
        **training,
        "minutes": options.minutes,
        "seed": SEED,
        "learning_rate": LEARNING_RATE,
        "batch": [BATCH, LENGTH],
        "held_out_perplexity": measured,
        "held_out_bits_per_byte": math.log(measured) * per_byte,
        "machine": machine("cpu"),
        "versions": {package: version(package) for package in ("torch", "transformers", "tokenizers")},
    }
    # A finished training is not continued.
    checkpoint.unlink(missing_ok=True)
    path = out / "text.json"
    records = json.loads(path.read_text()) if path.exists() else {}
    if "baselines" not in records:
        records = {"text": text, "baselines": baselines(tokens, held_out, VOCABULARY, per_byte), "models": {}}
    records["models"][options.model] = record
    path.write_text(json.dumps(records, indent=2) + "\n")
    print(f"{options.model}: perplexity {measured:.2f}, {record['held_out_bits_per_byte']:.3f} bits per byte")


if __name__ == "__main__":
    main()
