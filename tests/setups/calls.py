"""Arguments of the library's functions, as in notebooks and scripts."""

import contextlib
import tempfile
from pathlib import Path

import numpy as np
import torch

from tests.setups.harness import HOSTS, require_same, setup
from tests.tracing.models import Block, Model, added, ids
from unilinattn import explain, register_architecture, trace
from unilinattn.errors import InputError, OptionError, ResultFileError, UncoveredError
from unilinattn.registry import overridden
from unilinattn.tracing.trace import Trace


def tokenizer():
    """Return a tokenizer with one letter per token, padding on the right."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    letters = {chr(97 + k) if k < 26 else f"<{k}>": k for k in range(31)}
    backend = Tokenizer(WordLevel(letters, unk_token="<30>"))
    backend.pre_tokenizer = WhitespaceSplit()
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<29>", unk_token="<30>", model_input_names=names
    )


def traced() -> Trace:
    return trace(HOSTS["Mamba-2"].model(), HOSTS["Mamba-2"].inputs())


def error_of(host_trace: Trace) -> float:
    return max(layer.operator.reconstruction_error() for layer in host_trace.layers)


@setup(
    "tokens= a tokenizer",
    "`explain(trace, tokens=tokenizer)`: the decoded tokens label the result",
)
def tokens_of_tokenizer() -> float:
    host_trace = traced()
    result = explain(host_trace, tokens=tokenizer())
    texts = [tokenizer().decode(row) for row in HOSTS["Mamba-2"].inputs().tolist()]
    # The space beside a token outside of the vocabulary belongs to neither.
    assert ["".join(row).replace(" ", "") for row in result.tokens] == [text.replace(" ", "") for text in texts]
    return error_of(host_trace)


@setup("tokens= a tokenizer, no ids", "the same for a trace of `inputs_embeds`", refused=InputError)
def tokens_without_ids() -> float:
    model = HOSTS["Llama"].model()
    states = model.get_input_embeddings()(HOSTS["Llama"].inputs()).detach()
    explain(model, {"inputs_embeds": states}, tokens=tokenizer())
    return 0.0


@setup("tokens= a string", '`explain(trace, tokens="a text")`', refused=InputError)
def tokens_of_string() -> float:
    explain(traced(), tokens="abcdefghijklm")
    return 0.0


@setup("tokens= ids", "`explain(trace, tokens=input_ids)`", refused=InputError)
def tokens_of_ids() -> float:
    explain(traced(), tokens=HOSTS["Mamba-2"].inputs())
    return 0.0


@setup('target="a"', '`explain(trace, target="a")`', refused=InputError)
def target_of_text() -> float:
    explain(traced(), target="a")
    return 0.0


@setup("target=True", "`explain(trace, target=True)`", refused=InputError)
def target_of_bool() -> float:
    explain(traced(), target=True)
    return 0.0


@setup("target=np.int64(3)", "numbers of NumPy and torch as targets, against `target=3`")
def target_of_numpy() -> float:
    host_trace = traced()
    expected = explain(host_trace, target=3).scores
    for target in (np.int64(3), np.array([3, 3]), torch.tensor(3), [np.int64(3), 3]):
        assert torch.equal(explain(host_trace, target=target).scores, expected)
    return error_of(host_trace)


@setup("heads=np.int64(1)", "numbers of NumPy and torch as heads, of an operator and of a method, against `heads=1`")
def heads_of_numpy() -> float:
    host_trace = traced()
    operator = host_trace.layers[0].operator
    for head in (np.int64(1), torch.tensor(1), np.uint8(1)):
        assert torch.equal(operator.matrix(heads=head), operator.matrix(heads=1))
        assert torch.equal(operator.rows(-1, heads=head), operator.rows(-1, heads=1))
        assert torch.equal(
            explain(host_trace, method="raw", heads=head).scores, explain(host_trace, method="raw", heads=1).scores
        )
    for several in ([np.int64(0), 2], np.array([0, 2]), torch.tensor([0, 2])):
        assert torch.equal(operator.matrix(heads=several), operator.matrix(heads=[0, 2]))
    return error_of(host_trace)


@setup("heads=True", "`operator.matrix(heads=True)`", refused=OptionError)
def heads_of_bool() -> float:
    traced().layers[0].operator.matrix(heads=True)
    return 0.0


@setup("heads=1.0", "`operator.matrix(heads=1.0)`", refused=OptionError)
def heads_of_float() -> float:
    traced().layers[0].operator.matrix(heads=1.0)
    return 0.0


@setup('rows("a")', '`operator.rows("a")`', refused=InputError)
def rows_of_text() -> float:
    traced().layers[0].operator.rows("a")
    return 0.0


@setup("apply to an array", "`operator.apply(x.numpy())`", refused=InputError)
def applied_to_array() -> float:
    operator = traced().layers[0].operator
    operator.apply(operator.inputs["x"].numpy())
    return 0.0


@setup("logit=np.int64(3)", "`trace.gradient(logit=np.int64(3))`, against `logit=3`")
def logit_of_numpy() -> float:
    host_trace = traced()
    for actual, expected in zip(host_trace.gradient(logit=np.int64(3)), host_trace.gradient(logit=3), strict=True):
        require_same("gradient", actual, expected)
    return error_of(host_trace)


@setup('logit="a"', '`trace.gradient(logit="a")`', refused=InputError)
def logit_of_text() -> float:
    traced().gradient(logit="a")
    return 0.0


@setup('dtype="float64"', '`trace(model, ids, dtype="float64")`', refused=OptionError)
def dtype_of_text() -> float:
    trace(HOSTS["Mamba"].model(), HOSTS["Mamba"].inputs(), dtype="float64")
    return 0.0


@setup("np.asarray(result)", "`np.asarray(result)` and `np.asarray(result, dtype=np.float64)`: the scores")
def as_array() -> float:
    host_trace = traced()
    result = explain(host_trace)
    assert np.array_equal(np.asarray(result), result.scores.numpy())
    assert np.asarray(result, dtype=np.float64).dtype == np.float64
    return error_of(host_trace)


@setup("save to a folder", "`result.save(folder)`", refused=ResultFileError)
def saved_to_folder() -> float:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "results").mkdir()
        with contextlib.chdir(folder):
            explain(traced()).save("results")
    return 0.0


@setup("a page into a folder", "`result.to_html(folder)`", refused=ResultFileError)
def page_to_folder() -> float:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "results").mkdir()
        with contextlib.chdir(folder):
            explain(traced()).to_html("results")
    return 0.0


@setup("save where no folder is", '`result.save("missing/result.safetensors")`', refused=ResultFileError)
def saved_nowhere() -> float:
    explain(traced()).save("missing/result.safetensors")
    return 0.0


class Nameless(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.projection(x).cumsum(1)


@setup("an adapter without return", "an adapter function that ends without `return flow`", refused=UncoveredError)
def adapter_without_return() -> float:
    with overridden():

        @register_architecture(f"{__name__}.Nameless", name="forgetful", kind="sums")
        def forgetful(call) -> None:
            """Sums of a projection."""

        model = Model(Block(added, Nameless()))
        return trace(model, ids()).layers[0].operator.reconstruction_error()
