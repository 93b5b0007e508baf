"""The oldest and the newest accepted transformers: hosts that cannot be traced, and masks that are skipped."""

from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from tests import hosts
from tests.architectures.versions import LEFT_OUT, OLDEST
from tools.versions import Unavailable, model_of, sides, unavailable
from unilinattn import registry, trace
from unilinattn.call import Call
from unilinattn.errors import HostError, UncoveredError
from unilinattn.testing import HOSTS, Host, randomize
from unilinattn.testing.hosts import transformers_model
from unilinattn.testing.hosts.delta import HOSTS as DELTA
from unilinattn.testing.hosts.mamba import HOSTS as MAMBA
from unilinattn.testing.hosts.recurrent import HOSTS as RECURRENT

pytestmark = pytest.mark.refused
oldest = pytest.mark.skipif(transformers.__version__ != OLDEST, reason=f"about transformers {OLDEST}")


def named(table: tuple[Host, ...], name: str) -> Host:
    return next(host for host in table if host.name == name)


@oldest
def test_listed_hosts_are_refused() -> None:
    for name, reason in LEFT_OUT[OLDEST].items():
        refusal = unavailable(hosts.named(name))
        assert refusal is not None and reason in refusal and OLDEST in refusal


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


@pytest.mark.parametrize("error", [UncoveredError, HostError])
def test_a_call_that_its_adapter_refuses_is_recorded_unless_the_host_is_wrong(error: type[UncoveredError]) -> None:
    def refused(call: Call) -> None:
        raise error(f"{call.name} is refused.")

    host = named(HOSTS, "mamba")
    with registry.overridden(replace(registry.list_architectures()[host.architecture], check=refused)):
        if error is UncoveredError:
            assert {layer.architecture for layer in trace(host.model(), host.inputs()).layers} == {"recorded"}
        else:
            with pytest.raises(HostError, match=r"is refused\. Or trace with strict=False"):
                trace(host.model(), host.inputs())


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
