"""Choose held-out passages and prompts of the text models: python -m evidence.text_prompts

A prompt is the beginning of a held-out text, `<|endoftext|>` first, after which both models expect the same next token.
After most such prompts the last four tokens suffice, so half of the prompts are drawn from those that need more.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evidence.texts import HELD_OUT, MODELS, load
from unilinattn.progress import progress

PROMPTS = 60

FAR = PROMPTS // 2
"""Prompts of which the last four tokens leave both models less than half of the probability of the expected token."""

SHORTEST, LONGEST = 12, 48
"""Tokens of a prompt."""

PROBABILITY = 0.3
"""Smallest probability of the expected token by either model."""

PER_DOCUMENT = 2
"""Largest number of prompts of one document."""

RECENT = 4
"""Number of last tokens after which the probability of the expected token is recorded."""

PASSAGES, PASSAGE = 6, 256
"""Number of passages, and tokens of each."""

SEED = 0


def candidates(text: str, models: Mapping[str, nn.Module], tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yield the prompts that a text begins with."""
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode(text)]])[:, : LONGEST + 1]
    if ids.shape[1] <= SHORTEST:
        return
    after_all = {name: _next(host, ids)[0] for name, host in models.items()}
    after_recent = {name: _next(host, ids[0].unfold(0, RECENT, 1))[:, -1] for name, host in models.items()}
    for length in range(SHORTEST, ids.shape[1]):
        tops = {name: values[length - 1].max(-1) for name, values in after_all.items()}
        tokens = {int(top.indices) for top in tops.values()}
        if len(tokens) > 1 or min(float(top.values) for top in tops.values()) <= PROBABILITY:
            continue
        expected = tokens.pop()
        word = tokenizer.decode([expected])
        if any(character.isalpha() for character in word):
            recent = {name: float(values[length - RECENT, expected]) for name, values in after_recent.items()}
            yield {
                "ids": ids[0, :length].tolist(),
                "text": tokenizer.decode(ids[0, 1:length]),
                "expected": expected,
                "word": word,
                "next": int(ids[0, length]),
                "probability": {name: round(float(top.values), 4) for name, top in tops.items()},
                "probability_after_recent": {name: round(value, 4) for name, value in recent.items()},
            }


def is_far(prompt: Mapping[str, Any]) -> bool:
    """Tell whether the last tokens leave both models less than half of the probability of the expected token."""
    recent = prompt["probability_after_recent"]
    return all(recent[name] < probability / 2 for name, probability in prompt["probability"].items())


def choose(
    sources: Sequence[Mapping[str, Any]], models: Mapping[str, nn.Module], tokenizer: Any
) -> list[dict[str, Any]]:
    """Return the prompts of texts in random order: one of each text, and no two with the same last words."""
    order = random.Random(SEED)
    texts = [(document["source"], text) for document in sources for text in document["texts"]]
    order.shuffle(texts)
    result: list[dict[str, Any]] = []
    documents: Counter[str] = Counter()
    endings: set[tuple[int, ...]] = set()
    for source, text in progress(texts, "prompts"):
        if documents[source] == PER_DOCUMENT or len(result) == PROMPTS:
            continue
        new = [prompt for prompt in candidates(text, models, tokenizer) if _ending(prompt) not in endings]
        far = [prompt for prompt in new if is_far(prompt)]
        near = [prompt for prompt in new if not is_far(prompt)]
        missing = FAR - sum(map(is_far, result))
        accepted = (far if missing else []) or (near if PROMPTS - len(result) > missing else [])
        if accepted:
            prompt = order.choice(accepted)
            result.append({"source": source, **prompt})
            documents[source] += 1
            endings.add(_ending(prompt))
    return result


def _ending(prompt: Mapping[str, Any]) -> tuple[int, ...]:
    return (*prompt["ids"][-RECENT:], prompt["expected"])


def passages(sources: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[dict[str, Any]]:
    """Return the beginnings of long texts of different documents."""
    order = random.Random(SEED)
    result: list[dict[str, Any]] = []
    for document in order.sample(list(sources), len(sources)):
        ids = tokenizer.encode(max(document["texts"], key=len))[: PASSAGE - 1]
        if len(ids) == PASSAGE - 1 and len(result) < PASSAGES:
            result.append({"source": document["source"], "ids": [tokenizer.bos_token_id, *ids]})
    return result


@torch.no_grad()
def _next(host: nn.Module, ids: Tensor) -> Tensor:
    """Probabilities of the token after each token: [batch, length, vocabulary]."""
    return host(ids).logits.softmax(-1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the passages and prompts beside the weights."""
    parser = argparse.ArgumentParser(prog="python -m evidence.text_prompts", description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path("build/text"), help="folder of the training's text")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sources = json.loads((options.cache / "held_out.json").read_text())
    loaded = {name: load(name) for name in MODELS}
    tokenizer = loaded["mamba2"][1]
    models = {name: host for name, (host, _) in loaded.items()}
    prompts = choose(sources, models, tokenizer)
    prompt_lines = [json.dumps(prompt) for prompt in prompts]
    passage_lines = [json.dumps(passage) for passage in passages(sources, tokenizer)]
    HELD_OUT.write_text(
        '{"passages": [\n' + ",\n".join(passage_lines) + '\n],\n"prompts": [\n' + ",\n".join(prompt_lines) + "\n]}\n"
    )
    print(f"{len(prompts)} prompts and {len(passage_lines)} passages in {HELD_OUT.name}")


if __name__ == "__main__":
    main()
