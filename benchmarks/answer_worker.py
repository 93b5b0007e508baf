"""One of the processes of `benchmarks.answers`: the scores of a tool, in turns with the host's forward pass.

python -m benchmarks.answer_worker TOOL LENGTH ROUNDS FOLDER

Imports nothing of a tool before it is named. Prints the seconds of each round as JSON, and saves the scores of the
tokens in the folder.
"""

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn

from benchmarks.timing import interleaved

VOCABULARY = 8192
PROMPT, GENERATED = 24, 20
"""Tokens of the prompt, and generated tokens."""

SECONDS = 20.0
"""Seconds of the rounds after which three are enough."""

Answer = Callable[[nn.Module, Tensor], Any]
"""Scores of the tokens for the prediction at the last position, from a model and its token ids."""


def llama() -> nn.Module:
    """Return a Llama of 8 layers and width 576 (grouped queries, SwiGLU) with random weights."""
    torch.manual_seed(0)
    ids = dict(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    heads = dict(num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=8)
    config = transformers.LlamaConfig(hidden_size=576, intermediate_size=1536, **heads, **ids)
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def tokens(length: int) -> Tensor:
    """Return random token ids, (1, length)."""
    return torch.randint(2, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))


def explained(method: str, **options: Any) -> Answer:
    """Return the answer of `explain`."""

    def answer(model: nn.Module, ids: Tensor) -> Tensor:
        import unilinattn as ula

        result: Tensor = ula.explain(model, ids, method=method, target=-1, progress=False, **options).scores
        return result

    return answer


def lxt(rules: str) -> Answer:
    """Return the answer of LXT, whose rules change the classes of the model for the rest of the process."""
    from lxt.efficient import monkey_patch
    from lxt.efficient.models import llama as patches

    monkey_patch(transformers.models.llama.modeling_llama, getattr(patches, rules))

    def answer(model: nn.Module, ids: Tensor) -> Tensor:
        return _products(model, ids)

    return answer


def captum(model: nn.Module, ids: Tensor) -> Tensor:
    """Return captum's products of the embeddings and the logit's gradient."""
    from captum.attr import InputXGradient

    def logit(vectors: Tensor) -> Tensor:
        return model(inputs_embeds=vectors).logits[:, -1].amax(-1)

    vectors = model.get_input_embeddings()(ids).requires_grad_()
    return InputXGradient(logit).attribute(vectors).sum(-1)


def _products(model: nn.Module, ids: Tensor) -> Tensor:
    vectors = model.get_input_embeddings()(ids).requires_grad_()
    (slopes,) = torch.autograd.grad(model(inputs_embeds=vectors, use_cache=False).logits[:, -1].amax(-1).sum(), vectors)
    return (vectors * slopes).sum(-1)


TOOLS: Mapping[str, Callable[[], Answer]] = {
    "unilinattn `attn_lrp`": lambda: explained("attn_lrp", split="halves", measure="logit"),
    "LXT AttnLRP": lambda: lxt("attnLRP"),
    "unilinattn `logit`": lambda: explained("logit"),
    "LXT CP-LRP": lambda: lxt("cp_LRP"),
    "unilinattn `input_x_gradient`": lambda: explained("input_x_gradient"),
    "captum InputXGradient": lambda: captum,
}
"""The tools, in pairs of this package and another that compute the same scores."""


def texts(tool: str, model: nn.Module, folder: str) -> Callable[[], Any]:
    """Return the explanation of every generated token, input x gradient, by a tool."""
    words = {"<pad>": 0, "<s>": 1, **{f"w{k}": k for k in range(2, VOCABULARY)}}
    backend = Tokenizer(WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = WhitespaceSplit()
    special = dict(unk_token="<pad>", pad_token="<pad>", bos_token="<s>", eos_token="<s>")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.save_pretrained(folder)
    prompt = " ".join(f"w{k}" for k in tokens(PROMPT)[0].tolist())
    if tool == "inseq":
        import inseq

        attributor = inseq.load_model(model, "input_x_gradient", tokenizer=tokenizer)
        settings = {"max_new_tokens": GENERATED, "do_sample": False}
        return lambda: attributor.attribute(
            prompt, generation_args=settings, attributed_fn="logit", show_progress=False
        )
    import unilinattn as ula

    options: dict[str, Any] = dict(method="input_x_gradient", max_new_tokens=GENERATED, progress=False)
    return lambda: ula.explain_generation(model, prompt, tokenizer=tokenizer, **options)


def work(tool: str, length: int, rounds: int, folder: str) -> dict[str, Any]:
    """Return the seconds of a tool and of the host's forward pass in each round; length 0 is generated text."""
    model = llama()
    if length:
        ids, answer = tokens(length), TOOLS[tool]()
        torch.save(answer(model, ids), Path(folder) / "scores.pt")
        call: Callable[[], Any] = partial(answer, model, ids)
    else:
        ids, call = tokens(PROMPT + GENERATED), texts(tool, model, folder)
        call()

    @torch.no_grad()
    def forward() -> Any:
        return model(ids, use_cache=False)

    forward()
    calls = {"forward": forward, "answer": call}
    seconds = interleaved(calls, rounds=rounds, least=3, seconds=SECONDS, device="cpu")
    rounded = {name: [float(f"{each:.4g}") for each in times] for name, times in seconds.items()}
    packages = ("captum", "inseq", "lxt", "transformers")
    return {"seconds": rounded, "versions": {name: version(name) for name in packages if find_spec(name)}}


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    print(json.dumps(work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
