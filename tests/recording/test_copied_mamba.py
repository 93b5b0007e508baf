"""A copy of Mamba's mixer in plain torch, with the weights of transformers' model, has the maps of the adapter."""

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.mamba.modeling_mamba import MambaMixer

import unilinattn as ula
from unilinattn.testing import relative_error
from unilinattn.testing.promote import promoted

IDS = torch.randint(40, (2, 14), generator=torch.Generator().manual_seed(0))


class Copied(nn.Module):
    """The selective scan as a loop over tokens (Mamba, Algorithm 2)."""

    def __init__(self, mixer: MambaMixer) -> None:
        super().__init__()
        self.in_proj, self.conv1d, self.x_proj = mixer.in_proj, mixer.conv1d, mixer.x_proj
        self.dt_proj, self.out_proj, self.A_log, self.D = mixer.dt_proj, mixer.out_proj, mixer.A_log, mixer.D

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:
        x, gate = self.in_proj(hidden_states).chunk(2, -1)
        x = functional.silu(self.conv1d(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        states = self.A_log.shape[1]
        step, b, c = self.x_proj(x).split([self.dt_proj.in_features, states, states], -1)
        step = functional.softplus(self.dt_proj(step))[..., None]
        decay, written = (-self.A_log.exp() * step).exp(), step * b[:, :, None] * x[..., None]
        state, outputs = x.new_zeros(len(x), *self.A_log.shape), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + written[:, t]
            outputs.append((state @ c[:, t, :, None])[..., 0])
        return self.out_proj((torch.stack(outputs, 1) + x * self.D) * functional.silu(gate))


@pytest.mark.long
def test_a_copy_has_the_maps_and_relevances_of_the_adapter() -> None:
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=40, hidden_size=12, num_hidden_layers=2, state_size=4)
    host = transformers.MambaForCausalLM(config).double().eval()
    copied = transformers.MambaForCausalLM(config).double().eval()
    copied.load_state_dict(host.state_dict())
    for layer in copied.backbone.layers:
        layer.mixer = Copied(layer.mixer)
    with promoted():
        traces = ula.trace(host, IDS, progress=False), ula.trace(copied, IDS, progress=False)
        kinds = [[layer.architecture for layer in trace.layers] for trace in traces]
        assert kinds[1] == ["recorded"] * 2 and kinds[0] != kinds[1]
        for layers in zip(*(trace.layers for trace in traces), strict=True):
            for scope in ("core", "mixer", "unified"):
                expected, actual = (layer.operator.matrix(scope, heads=None) for layer in layers)
                assert relative_error(actual, expected) < 1e-12
        for method in ("raw", "rollout", "attribution", "latim", "alti", "logit", "lrp"):
            options = {} if method in ("raw", "rollout", "latim", "alti") else {"target": -1}
            scores = [ula.explain(trace, method=method, progress=False, **options).scores for trace in traces]
            assert relative_error(scores[1], scores[0]) < 1e-10, method
