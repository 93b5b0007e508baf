"""Results do not depend on torch's default device, which is often a GPU while some tensors live on the CPU."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import unilinattn as ula
from tests.methods.refused import HOSTS
from unilinattn.errors import UnilinattnError
from unilinattn.examples import TASKS, load
from unilinattn.registry import list_methods

PACKAGE = Path(ula.__file__).parent
CREATED = {
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
}
FOLLOWING = ("models", "examples")
"""Rooms of models, whose parameters are created on the default device as those of any module."""


def placed_by_default(source: str) -> Iterator[int]:
    """Yield the lines that create a tensor without a device."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CREATED:
            named = any(keyword.arg in ("device", None) for keyword in node.keywords)
            if ast.unparse(node.func.value) == "torch" and not named:
                yield node.lineno


@pytest.mark.long
def test_every_created_tensor_names_its_device() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in FOLLOWING]
    lines = [f"{path}:{line}" for path in files for line in placed_by_default(path.read_text())]
    assert files and not lines


def test_a_tensor_without_a_device_is_reported() -> None:
    source = (
        "torch.zeros(3)\ntorch.zeros(3, device=x.device)\nx.new_zeros(3)\ntorch.ones(2, **options)\ntorch.arange(4)"
    )
    assert list(placed_by_default(source)) == [1, 5]


@pytest.mark.parametrize("kind", ["mamba", "transformer"])
# captum creates tensors on the default device.
@pytest.mark.parametrize(
    "method", sorted(list_methods().keys() - {"integrated_gradients", "kernel_shap", "smoothgrad"})
)
def test_scores_of_a_trained_model(method: str, kind: str) -> None:
    model, ids = load("induction", kind), TASKS["induction"].sample(1, 0).input_ids
    expected = ula.explain(model, ids, method=method, target=-1).scores
    # A tensor without values fails wherever it meets one with values.
    with torch.device("meta"):
        assert torch.equal(ula.explain(model, ids, method=method, target=-1).scores, expected)


@pytest.mark.long
@pytest.mark.parametrize("name", ["T5", "LLaVA", "BLOOM", "ViT"])
@pytest.mark.parametrize("method", ["logit", "latim", "alti", "attention_grad"])
def test_scores_of_recorded_layers_and_streams(name: str, method: str) -> None:
    model, inputs = HOSTS[name]()

    def outcome() -> torch.Tensor | type:
        try:
            return ula.explain(model.eval(), inputs, method=method, target=-1).scores
        except UnilinattnError as refusal:
            return type(refusal)

    expected = outcome()
    with torch.device("meta"):
        actual = outcome()
    assert torch.equal(actual, expected) if isinstance(expected, torch.Tensor) else actual is expected
