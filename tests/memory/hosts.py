"""Hosts of a length of one's choice, one a structure that the methods' costs are tested on."""

from dataclasses import replace
from functools import cache

from unilinattn.testing import HOSTS, hosts_delta
from unilinattn.testing.hosts import transformers_model
from unilinattn.trace import Trace, trace

NAMES = ("mamba", "mamba2", "gpt2", "qwen3 next", "s4d")

_GPT2 = dict(n_embd=16, n_layer=2, n_head=4, n_positions=1024, vocab_size=31, bos_token_id=None, eos_token_id=None)


@cache
def traced(name: str, length: int) -> Trace:
    """Trace a host on one sequence and build its operators, which belong to the trace."""
    (host,) = (entry for entry in (*HOSTS, *hosts_delta.HOSTS) if entry.name == name)
    build = transformers_model("GPT2LMHeadModel", "GPT2Config", **_GPT2) if name == "gpt2" else host.build
    host = replace(host, build=build, length=length, batch=1)
    found = trace(host.model(), host.inputs())
    for layer in found.layers:
        assert layer.operator.chains
    return found


def linear(found: Trace) -> int:
    """The bytes of ten vectors for each token, as wide as the widest layer: what is allowed beside `max_memory`."""
    layers = found.layers
    return 10 * 4 * layers[0].output.shape[1] * max(layer.operator.width for layer in layers)
