"""Hosts of any length, one for each structure on which the costs of the methods are tested."""

from dataclasses import replace

from tests.hosts import every, named
from tests.shared import shared
from unilinattn.testing.hosts import transformers_model
from unilinattn.tracing.trace import Trace, trace

NAMES = ("mamba", "mamba2", "gpt2", "qwen3 next", "s4d")

HOSTS = every()

_IDS = dict(vocab_size=31, bos_token_id=None, eos_token_id=None)
WIDE = {
    "wide mamba": transformers_model(
        "MambaForCausalLM", "MambaConfig", hidden_size=64, num_hidden_layers=2, state_size=8, **_IDS
    ),
    "wide mamba2": transformers_model(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        hidden_size=64,
        num_hidden_layers=2,
        state_size=16,
        num_heads=16,
        head_dim=8,
        n_groups=2,
        **_IDS,
    ),
    "wide rwkv": transformers_model(
        "RwkvForCausalLM", "RwkvConfig", hidden_size=64, num_hidden_layers=2, context_length=512, **_IDS
    ),
}
"""Hosts whose maps of all heads exceed the memory limits of the tests many times."""

_GPT2 = dict(n_embd=16, n_layer=2, n_head=4, n_positions=1024, vocab_size=31, bos_token_id=None, eos_token_id=None)


def new_trace(name: str, length: int) -> Trace:
    """Trace a host on one sequence and build its operators, including deferred factors."""
    host = named(name if name not in WIDE else "mamba")
    build = transformers_model("GPT2LMHeadModel", "GPT2Config", **_GPT2) if name == "gpt2" else host.build
    build = WIDE.get(name, build)
    host = replace(host, build=build, length=length, batch=1)
    host_trace = trace(host.model(), host.inputs())
    for layer in host_trace.layers:
        layer.operator.apply(layer.input)
    return host_trace


traced = shared(new_trace)


def linear(host_trace: Trace) -> int:
    """The bytes of ten vectors per token of the largest width, which are allowed in addition to `max_memory`."""
    layers = host_trace.layers
    return 10 * 4 * layers[0].output.shape[1] * max(layer.operator.width for layer in layers)
