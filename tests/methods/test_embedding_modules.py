"""Methods on embeddings take the output of the embedding module, whatever computes it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.methods.hosts import HOSTS, VOCABULARY, inputs
from unilinattn import explain
from unilinattn.errors import InputError, OptionError
from unilinattn.results.attribution import Attribution
from unilinattn.testing import left_as_found, promoted, relative_error

LIMIT = 1e-8


class Scaled(nn.Embedding):
    """Rows of a table, scaled as in Gemma."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.0


class Adapted(nn.Module):
    """A table with an adapter of rank 2 beside it, as PEFT's LoRA replaces an embedding."""

    def __init__(self, base: nn.Embedding) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Parameter(torch.randn(2, base.num_embeddings).to(base.weight))
        self.up = nn.Parameter(torch.randn(base.embedding_dim, 2).to(base.weight))

    def forward(self, ids: Tensor) -> Tensor:
        return self.base_layer(ids) + functional.embedding(ids, self.down.T) @ self.up.T


class OneHot(nn.Module):
    """A table that is multiplied by one-hot vectors, so that no function looks a row up."""

    def __init__(self, base: nn.Embedding) -> None:
        super().__init__()
        self.weight, self.num_embeddings = base.weight, base.num_embeddings

    def forward(self, ids: Tensor) -> Tensor:
        return functional.one_hot(ids, self.num_embeddings).to(self.weight) @ self.weight


class Unsized(OneHot):
    """One-hot vectors of a module that does not tell the size of its vocabulary."""

    def __init__(self, base: nn.Embedding) -> None:
        super().__init__(base)
        self.size = self.num_embeddings
        del self.num_embeddings

    def forward(self, ids: Tensor) -> Tensor:
        return functional.one_hot(ids, self.size).to(self.weight) @ self.weight


class Placed(nn.Module):
    """A table inside a module that adds positions: the vectors of the tokens are those before them."""

    def __init__(self, base: nn.Embedding) -> None:
        super().__init__()
        self.tokens = base
        self.positions = nn.Parameter(torch.randn(32, base.embedding_dim).to(base.weight))

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions[: ids.shape[1]]


def scaled(base: nn.Embedding) -> nn.Module:
    module = Scaled(base.num_embeddings, base.embedding_dim)
    module.weight = base.weight
    return module


def factored(base: nn.Embedding) -> nn.Module:
    width = base.embedding_dim
    return nn.Sequential(base, nn.Tanh(), nn.Linear(width, width)).to(base.weight.dtype)


def hooked(base: nn.Embedding) -> nn.Module:
    base.register_forward_hook(lambda module, args, output: output * 2 + 1)
    return base


OWN_VECTORS: dict[str, Callable[[nn.Embedding], nn.Module]] = {
    "scaled": scaled,
    "adapted": Adapted,
    "one-hot": OneHot,
    "factored": factored,
    "hooked": hooked,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "gradient": {},
    "input_x_gradient": {},
    "integrated_gradients": {"n_steps": 5, "baseline": "mean-embedding"},
    "smoothgrad": {"n_samples": 3},
    "occlusion": {"baseline": 3, "window": 2},
    "kernel_shap": {"n_samples": 20},
}


def with_embedding(name: str) -> tuple[nn.Module, nn.Module]:
    """Return a host whose embedding module was replaced, and that module."""
    torch.manual_seed(0)
    model = HOSTS["llama"].model()
    module = {**OWN_VECTORS, "placed": Placed, "unsized": Unsized}[name](model.get_input_embeddings())
    model.set_input_embeddings(module)
    return model, module


def explained(model: nn.Module, method: str, **options: Any) -> Attribution:
    with promoted():
        return explain(model, inputs("left"), method=method, target=-1, **OPTIONS[method], **options)


def of_vectors(model: nn.Module, vectors: Callable[[Tensor], Tensor], method: str) -> Attribution:
    """The result of the same model with a plain table, whose rows are the vectors."""
    ids = torch.arange(VOCABULARY)[None]
    with torch.no_grad():
        model.set_input_embeddings(nn.Embedding.from_pretrained(vectors(ids)[0].clone()))
    return explained(model, method)


@pytest.mark.long
@pytest.mark.parametrize("method", OPTIONS)
@pytest.mark.parametrize("name", OWN_VECTORS)
def test_the_vectors_are_the_output_of_the_module(name: str, method: str) -> None:
    model, module = with_embedding(name)
    with left_as_found(model):
        result = explained(model, method)
    expected = of_vectors(model, module, method)
    assert relative_error(result.scores, expected.scores) <= LIMIT
    for extra in expected.extras.keys() - {"delta"}:
        assert relative_error(result.extras[extra][:, None], expected.extras[extra][:, None]) <= LIMIT


def test_positions_are_not_part_of_a_vector() -> None:
    model, _ = with_embedding("placed")
    with promoted(), torch.no_grad():
        given = inputs()
        result = explain(model, given, method="occlusion", target=-1, baseline=3)
        before = model(**given).logits[:, -1]
        drops = []
        for token in range(result.scores.shape[1]):
            ids = given["input_ids"].clone()
            ids[:, token] = 3
            drops.append((before - model(input_ids=ids).logits[:, -1]).gather(1, before.argmax(-1, keepdim=True)))
    assert relative_error(result.scores, torch.cat(drops, 1)) <= LIMIT


def test_a_baseline_of_ids_needs_their_number() -> None:
    model, _ = with_embedding("unsized")
    assert bool(explained(model, "input_x_gradient").scores.isfinite().all())
    with pytest.raises(OptionError, match=r"needs the number of ids.* use 'zero'"):
        explained(model, "occlusion")
    adapted, _ = with_embedding("adapted")
    with pytest.raises(
        InputError, match=f"baseline {VOCABULARY} is out of range: the model knows ids 0 to {VOCABULARY - 1}"
    ):
        explain(adapted, inputs(), method="occlusion", target=-1, baseline=VOCABULARY)


def test_a_module_with_layers_is_no_embedding_module() -> None:
    """Attention that projects to zero leaves a whole model a function of each id."""
    torch.manual_seed(0)
    model = HOSTS["llama"].model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    model.register_forward_hook(lambda module, args, output: output.logits)
    with promoted():
        given = {"input_ids": inputs()["input_ids"]}
        result = explain(model, given, method="input_x_gradient", logit=lambda out: out[:, -1, 3])
        x = model.get_input_embeddings()(given["input_ids"]).detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs_embeds=x)[:, -1, 3].sum(), x)
    assert relative_error(result.scores, (x * slope).sum(-1)) <= LIMIT


@pytest.mark.parametrize("copied", [lambda ids: ids.clamp(min=0), lambda ids: ids.to(torch.int32)])
def test_copied_ids_are_the_ids(copied: Callable[[Tensor], Tensor]) -> None:
    model, module = with_embedding("scaled")
    module.register_forward_pre_hook(lambda module, args: copied(args[0]))
    assert relative_error(explained(model, "occlusion").scores, of_vectors(model, module, "occlusion").scores) <= LIMIT


def test_inference_mode_changes_nothing() -> None:
    model, _ = with_embedding("scaled")
    with torch.inference_mode():
        result = explained(model, "smoothgrad")
    assert relative_error(result.scores, explained(model, "smoothgrad").scores) <= LIMIT
