"""The oldest and the newest accepted transformers: hosts that cannot be traced, and masks that are skipped."""

import pytest
import torch
import transformers
from torch import nn

from tools.coverage import tables
from tools.versions import Unavailable, model_of, sides, unavailable
from unilinattn import trace
from unilinattn.errors import UncoveredError
from unilinattn.testing import HOSTS, Host, randomize
from unilinattn.testing.hosts import transformers_model
from unilinattn.testing.hosts.delta import HOSTS as DELTA
from unilinattn.testing.hosts.mamba import HOSTS as MAMBA
from unilinattn.testing.hosts.recurrent import HOSTS as RECURRENT

pytestmark = pytest.mark.refused
OLDEST, NEWEST = "5.6.2", "5.23.0"
oldest = pytest.mark.skipif(transformers.__version__ != OLDEST, reason=f"about transformers {OLDEST}")

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
"""The hosts that cannot be traced in a version, by reason; the tests skip only these."""


def named(table: tuple[Host, ...], name: str) -> Host:
    return next(host for host in table if host.name == name)


@pytest.mark.slow
@pytest.mark.skipif(transformers.__version__ not in LEFT_OUT, reason=f"about transformers {OLDEST} and {NEWEST}")
def test_only_listed_hosts_are_skipped() -> None:
    hosts = [host for name, table in tables().items() if name not in ("fla", "timm") for host in table]
    reasons = {host.name: reason for host in hosts if (reason := unavailable(host)) is not None}
    expected = LEFT_OUT[transformers.__version__]
    assert reasons.keys() == expected.keys()
    assert [name for name, reason in reasons.items() if expected[name] not in reason] == []
    assert all(transformers.__version__ in reason for reason in reasons.values())


@oldest
def test_attention_outside_the_interface_is_recorded() -> None:
    for host in (named(HOSTS, "t5, encoder"), named(RECURRENT, "recurrent gemma")):
        layers = trace(host.model(), host.inputs()).layers
        assert "recorded" in {layer.architecture for layer in layers}
        assert all(layer.reconstruction_error() < 1e-5 for layer in layers)


@oldest
@pytest.mark.parametrize("name", ["zamba2", "nemotron h", "falcon h1, one token"])
def test_hosts_that_a_version_computes_wrongly_are_refused(name: str) -> None:
    host = named(MAMBA, name)
    with pytest.raises(UncoveredError, match=r"of transformers 5\.6\.2\) .* or use a newer version"):
        [layer.operator for layer in trace(host.model(), host.inputs()).layers]


@oldest
@pytest.mark.parametrize(
    "host", [named(HOSTS, "mamba2"), named(MAMBA, "bamba"), named(DELTA, "qwen3 next"), named(RECURRENT, "lfm2")]
)
def test_a_mask_skipped_for_a_single_sequence_gives_a_warning(host: Host) -> None:
    assert (sides(host), sides(host, batch=2)) == (("right",), ("left", "right"))
    ids = host.inputs()[:1]
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    with pytest.warns(UserWarning, match=r"of transformers 5\.6\.2 does not mask a batch of 1\. .* pad on the right"):
        trace(host.model(), {"input_ids": ids, "attention_mask": mask})


@oldest
def test_masks_after_the_projection_keep_padding_out_on_both_sides() -> None:
    host = named(HOSTS, "mamba, biases")
    assert (host.masks, sides(host)) == (("right",), ("left", "right"))


def test_attention_that_bypasses_the_interface_is_recorded() -> None:
    build = transformers_model(
        "GPTJForCausalLM", "GPTJConfig", vocab_size=31, n_embd=16, n_layer=1, n_head=2, rotary_dim=4
    )
    (layer,) = trace(randomize(build().eval()), torch.arange(7)[None]).layers
    assert layer.architecture == "recorded" and layer.reconstruction_error() < 1e-5


def test_a_missing_class_is_reported_unlike_a_missing_package() -> None:
    def host(build: object) -> Host:
        return Host("host", "mamba", build)

    lacking = host(transformers_model("NoSuchForCausalLM", "MambaConfig"))
    assert unavailable(lacking) == f"transformers {transformers.__version__} has no NoSuchForCausalLM"

    def module() -> nn.Module:
        import transformers.models.no_such_model

        return transformers.models.no_such_model

    with pytest.raises(Unavailable, match=r"has no models\.no_such_model$") as caught:
        model_of(host(module))
    assert caught.value.environment == f"transformers {transformers.__version__}"

    def package() -> nn.Module:
        import a_package_that_nobody_has

        return a_package_that_nobody_has

    def mistake() -> nn.Module:
        return HOSTS[0].model().no_such_part

    with pytest.raises(ModuleNotFoundError):
        unavailable(host(package))
    with pytest.raises(AttributeError):
        unavailable(host(mistake))
