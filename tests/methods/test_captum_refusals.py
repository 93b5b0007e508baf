"""Options, models and environments that the methods of captum refuse."""

import sys
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.methods.hosts import HOSTS, inputs
from tests.methods.test_captum import METHODS, hosted
from unilinattn import explain, trace
from unilinattn.errors import InputError, OptionError, UncoveredError
from unilinattn.optional import MissingExtraError
from unilinattn.testing import left_as_found, promoted
from unilinattn.testing.hosts import randomize

BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("gradient", {"sign": "clamp"}, OptionError, r"gradient does not accept sign='clamp'.* Accepted: abs, keep"),
    ("gradient", {"target": 99}, InputError, "target 99 is out of range"),
    ("gradient", {"logit": 99}, InputError, r"logit 99 is out of range: the model has logits 0 to 16"),
    ("gradient", {"logit": lambda out: out.logits.sum()}, InputError, r"returned \(\) for 2 sequences"),
    ("gradient", {"logit": lambda out: torch.ones(2)}, UncoveredError, "does not depend on the tokens' vectors"),
    ("occlusion", {"target": None}, OptionError, r"occlusion runs the model many times.* such as target=-1"),
    ("kernel_shap", {"target": None}, OptionError, "kernel_shap runs the model many times"),
    ("occlusion", {"window": 7}, OptionError, "window=7 is longer than the 6 tokens"),
    ("occlusion", {"baseline": "men"}, OptionError, r"does not accept baseline='men'.* Accepted: mean-embedding, zero"),
    ("occlusion", {"baseline": 17}, InputError, "baseline 17 is out of range: the model knows ids 0 to 16"),
    ("kernel_shap", {"n_samples": 7}, OptionError, "n_samples=7 is too few for 6 tokens.* at least 8"),
    ("integrated_gradients", {"n_steps": 0}, OptionError, "n_steps=0"),
    ("smoothgrad", {"noise": 0.0}, OptionError, "noise=0.0"),
    ("occlusion", {"logit": lambda out: out.logits[:, 0, 0] / 0}, InputError, "NaN or infinite"),
]


@pytest.mark.parametrize(("method", "options", "error", "message"), BAD)
def test_bad_options_say_what_is_accepted(
    method: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        explain(hosted("mamba2")[2], method=method, **{"target": -1, **options})


def test_models_that_are_not_covered() -> None:
    with pytest.raises(InputError, match="returns no logits"):
        explain(HOSTS["mamba2"].model().backbone, inputs(), method="gradient", target=-1)


def test_frames_that_layers_read_as_sequences_have_the_vectors_that_enter_the_first_block() -> None:
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.TimesformerConfig(**sizes, image_size=8, patch_size=4, num_frames=3)
    model = randomize(transformers.TimesformerForVideoClassification(config).eval())
    video = torch.randn(1, 3, 3, 8, 8)
    result = explain(model, video, method="input_x_gradient", logit=1, progress=False)
    with torch.no_grad():
        vectors = model.timesformer.embeddings(video)
    vectors.requires_grad_()
    model.timesformer.embeddings.forward = lambda *_, **__: vectors
    (gradient,) = torch.autograd.grad(model(video).logits[0, 1], vectors)
    torch.testing.assert_close(result.scores, (gradient * vectors).sum(-1), rtol=1e-4, atol=1e-6)


class Rounded(nn.Module):
    """A linear layer with int8 weights, whose kernel has no backward pass."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = float(linear.weight.detach().abs().max()) / 127
        self.register_buffer("weight", (linear.weight.detach() / self.scale).round().to(torch.int8))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x @ self.weight.to(x).mT


@pytest.mark.slow
def test_quantised_weights_pass_no_gradient() -> None:
    model = HOSTS["llama"].model()
    model.model.layers[0].mlp.down_proj = Rounded(model.model.layers[0].mlp.down_proj)
    with promoted():
        found = trace(model, inputs())
        for method in METHODS[:4]:
            message = r"model.layers.0.mlp.down_proj \(.*Rounded\) passes no gradient.*'occlusion'"
            with left_as_found(model), pytest.raises(UncoveredError, match=message):
                explain(found, method=method, target=-1)
        assert bool((explain(found, method="occlusion", target=-1).scores != 0).any())


def test_without_captum_an_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "captum"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "captum", None)
    for method in METHODS:
        with pytest.raises(MissingExtraError, match=r"needs captum.*pip install 'unilinattn\[captum\]'"):
            explain(hosted("mamba2")[2], method=method, target=-1)
