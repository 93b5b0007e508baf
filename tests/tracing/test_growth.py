"""The work of a trace is linear in the number of layers, for every layout of the residual."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import unilinattn as ula
from unilinattn.tracing import residual, stream_locator

DEPTHS = (8, 12, 16)
"""The first and the last three layers have fewer neighbours."""
SIZES: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=8, vocab_size=50
)


def bert(depth: int) -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=50, num_hidden_layers=depth
        )
    )


def gpt2(depth: int) -> nn.Module:
    sizes: dict[str, Any] = dict(vocab_size=50, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_head=4, n_layer=depth, **sizes))


def parallel(depth: int) -> nn.Module:
    return transformers.CohereForCausalLM(transformers.CohereConfig(**SIZES, num_hidden_layers=depth))


def sandwich(depth: int) -> nn.Module:
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, num_hidden_layers=depth))


def mamba(depth: int) -> nn.Module:
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=depth, vocab_size=50, state_size=4)
    return transformers.MambaForCausalLM(config)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Calls of the functions whose number per layer must not depend on the depth."""
    calls: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counted(stream_locator, "locate_in_stream")
    for name in ("_sum_of", "_site", "fit_factors"):
        counted(residual, name)
    # A walk of a module calls this method once for each module inside.
    counted(nn.Module, "named_modules")
    yield calls


def calls_of(run: Callable[[], object], folder: str = "") -> int:
    """Return the number of functions of Python, of the files of a folder, that a call of `run` calls."""
    count = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(folder)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def traced(build: Callable[[int], nn.Module], depth: int) -> Callable[[], ula.Trace]:
    """Return a function that traces a model whose first trace made the checks of a new model."""
    torch.manual_seed(0)
    model, ids = build(depth).eval(), torch.randint(0, 50, (1, 9), generator=torch.Generator().manual_seed(0))
    ula.trace(model, ids, progress=False)
    return lambda: ula.trace(model, ids, progress=False)


@pytest.mark.long
@pytest.mark.parametrize("build", [bert, gpt2, parallel, sandwich, mamba])
def test_each_layer_adds_the_same_work(build: Callable[[int], nn.Module], work: Counter[str]) -> None:
    counts = []
    for depth in DEPTHS:
        again = traced(build, depth)
        # The searches, which a second trace leaves out, grow with depth too.
        stream_locator._earlier.clear()
        work.clear()
        assert len(again().layers) == depth
        counts.append(Counter(work))
    names = {name for count in counts for name in count}
    assert {"locate_in_stream", "_sum_of", "named_modules"} <= names
    for name in names:
        few, some, many = (count[name] for count in counts)
        assert many - some == some - few, (name, few, some, many)
        assert some > 0


@pytest.mark.parametrize("build", [bert, gpt2])
def test_all_calls_are_linear_in_the_layers(build: Callable[[int], nn.Module], pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--thorough"):
        pytest.skip("counts the calls of the package, and checks of signatures call more")
    few, some, many = (calls_of(traced(build, depth)) for depth in DEPTHS)
    assert many - some <= 1.01 * (some - few), (few, some, many)


@pytest.mark.parametrize("build", [bert, gpt2, parallel, sandwich, mamba])
def test_the_package_calls_few_functions_for_each_module(
    build: Callable[[int], nn.Module], pytestconfig: pytest.Config
) -> None:
    if pytestconfig.getoption("--thorough"):
        pytest.skip("counts the calls of the package, and checks of signatures call more")
    folder, calls, modules = str(Path(ula.__file__).parent), [], []
    for depth in DEPTHS[::2]:
        again = traced(build, depth)
        modules.append(len(list(again().host.modules())))
        calls.append(calls_of(again, folder))
    assert calls[1] - calls[0] <= 100 * (modules[1] - modules[0]), (calls, modules)
