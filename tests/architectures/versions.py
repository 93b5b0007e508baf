"""The accepted versions of transformers, and the hosts that tests skip with them."""

import transformers

from tools.versions import unavailable
from unilinattn.testing import Host

OLDEST, NEWEST = "5.6.2", "5.23.0"

NO_CLASS, RECORDED_ONLY = "has no", "is recorded, without its adapter, in"
CHUNKS, TOKENS = "hands the wrong states from chunk to chunk", "returns 2 tokens for 1"

LEFT_OUT = {
    OLDEST: {
        "vit": RECORDED_ONLY,
        "t5, encoder": RECORDED_ONLY,
        "recurrent gemma": RECORDED_ONLY,
        "recurrent gemma, wide inside, wide kernel": RECORDED_ONLY,
        "recurrent gemma, no convolution": RECORDED_ONLY,
        "zamba2": CHUNKS,
        "zamba2, adapters, rotary, one group": CHUNKS,
        "nemotron h": CHUNKS,
        "falcon h1, one token": TOKENS,
        "kimi linear": NO_CLASS,
        "kimi linear, latent queries, biases": NO_CLASS,
        "kimi linear, long": NO_CLASS,
        "kimi linear, one token": NO_CLASS,
        "bailing hybrid": NO_CLASS,
        "bailing hybrid, unbounded decay, biases": NO_CLASS,
        "glm 5 next": NO_CLASS,
        "glm 5 next, unbounded decay, shared index": NO_CLASS,
        "lfm3": NO_CLASS,
        "deepseek 3.2, selected keys": NO_CLASS,
        "minicpm 3": NO_CLASS,
        "a.x k1": NO_CLASS,
        "a.x k2, gated, selected keys": NO_CLASS,
        "hy 4, gated, sinks, selected keys": NO_CLASS,
        "dots 3, gated, scaled latent, selected keys": NO_CLASS,
        "mistral large 4, selected keys": NO_CLASS,
        "laguna, a gate a head": NO_CLASS,
        "beam, gate with a bias": NO_CLASS,
    },
    NEWEST: {},
}
"""The hosts that cannot be traced in a version, by reason; the tests skip these and no others."""


def reason_to_skip(host: Host) -> str | None:
    """Return the reason why a host cannot be traced; other versions than the listed ones trace it to find out."""
    listed = LEFT_OUT.get(transformers.__version__)
    return unavailable(host) if listed is None else listed.get(host.name)
