"""Decomposition errors against sums of the tapwise contributions, and their table, plot, file and command."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import unilinattn as ula
from tests.methods.hosts import real_tokens, references, traced
from unilinattn.analysis import DecompositionErrors, decomposition, decomposition_errors
from unilinattn.errors import InputError, OptionError, ResultFileError
from unilinattn.operator.contributions import TAP_FUNCTIONS

CASES = [("mamba", "none"), ("mamba2", "left"), ("mamba2", "right"), ("hybrid", "none"), ("delta rule", "none")]
F = {
    "silu": functional.silu,
    "relu": functional.relu,
    "identity": lambda p: p,
    "taylor1": lambda p: 0.5 * p,
    "taylor2": lambda p: 0.5 * p + 0.25 * p.square(),
}


def mean_difference(missed: Tensor, padding: str) -> float:
    return float(missed.abs()[real_tokens(padding)].mean())


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_errors_are_those_of_the_summed_contributions(name: str, padding: str) -> None:
    trace = traced(name, padding)
    found = decomposition_errors(trace)
    assert found.activations == ("exact", *F)
    assert found.layers == tuple(layer.name for layer in trace.layers)
    real = real_tokens(padding)[..., None]
    for at, layer in enumerate(trace.layers):
        op = layer.operator
        assert found.difference[at][0] == pytest.approx(0, abs=1e-12)
        if layer.kind == "softmax attention":
            assert found.difference[at][1:] == found.relative[at][1:] == (None,) * 5
            continue
        for k, activation in enumerate(F, 1):
            vectors = op.contributions(range(layer.output.shape[1]), activation=activation)
            missed = (vectors.sum(2) + op.activation_bias(activation) - layer.output) * real
            assert found.difference[at][k] == pytest.approx(mean_difference(missed, padding), rel=1e-9)
            shown = ula.explain(trace, method="latim", activation=activation, layers=[at])
            assert found.relative[at][k] == pytest.approx(float(shown.extras["decomposition_error"]), rel=1e-9)


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_silu_is_the_split_of_the_paper(name: str) -> None:
    found = decomposition_errors(traced(name), ["silu"])
    for at, r in enumerate(references(name)):
        assert r.split_shares is not None and r.split_bias is not None
        expected = mean_difference(r.split_shares.sum(2) + r.split_bias - r.output, "none")
        assert found.difference[at][0] == pytest.approx(expected, rel=1e-9) and expected > 1e-3
        # The bias without the function is another decomposition.
        wrong = mean_difference(r.split_shares.sum(2) + r.bias - r.output, "none")
        assert found.difference[at][0] != pytest.approx(wrong, rel=1e-6)


def test_the_functions_are_those_of_the_paper() -> None:
    p = torch.linspace(-3, 3, 13, dtype=torch.float64)
    assert list(TAP_FUNCTIONS) == list(F)
    for name, f in F.items():
        assert torch.allclose(TAP_FUNCTIONS[name](p), f(p), rtol=1e-14)


def shown() -> dict[str, DecompositionErrors]:
    return {name: decomposition_errors(traced(name), ["exact", "silu", "relu"]) for name in ("hybrid", "mamba")}


def test_the_table_has_a_line_for_each_layer() -> None:
    errors = shown()
    lines = decomposition.text_table(errors).splitlines()
    assert lines[0].split() == ["model", "layer", "mixer", "exact", "silu", "relu"]
    assert len(lines) == 1 + 4 + 2
    assert lines[1].split()[-1] == f"{errors['hybrid'].difference[0][2]:.2g}"
    assert lines[2].split()[-2:] == ["-", "-"]
    assert repr(errors["mamba"]).splitlines()[1].startswith("MambaForCausalLM  backbone.layers.0.mixer")


def test_the_plot_has_a_line_for_each_activation() -> None:
    errors = shown()
    figure = decomposition.plot(errors)
    figure.canvas.draw()
    first, second = figure.axes
    assert [line.get_label() for line in second.lines] == ["exact", "silu", "relu"]
    assert list(second.lines[1].get_ydata()) == [row[1] for row in errors["mamba"].difference]
    drawn = first.lines[1].get_ydata()
    assert drawn[0] == errors["hybrid"].difference[0][1] and drawn[1] != drawn[1]
    assert first.get_title(loc="left") == "hybrid" and first.get_yscale() == "log"
    assert len(errors["mamba"].plot().axes) == 1
    without = {"llama": decomposition_errors(traced("llama"), ["exact", "silu", "relu"])}
    assert [axes.get_title(loc="left") for axes in decomposition.plot({**errors, **without}).axes] == [
        "hybrid",
        "mamba",
    ]
    assert len(decomposition.plot(without).axes) == 1


def test_numbers_and_picture_are_written(tmp_path: Path) -> None:
    errors, out = shown(), tmp_path / "a" / "b"
    decomposition.write(errors, out)
    assert sorted(path.name for path in out.iterdir()) == ["decomposition.json", "decomposition.png"]
    numbers = json.loads((out / "decomposition.json").read_text())
    assert numbers["format"] == "unilinattn.decomposition"
    layer = numbers["models"]["hybrid"]["layers"][1]
    assert layer["kind"] == "softmax attention" and layer["difference"]["silu"] is None
    first = numbers["models"]["mamba"]["layers"][0]
    assert first["relative"]["silu"] == errors["mamba"].relative[0][1]
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultFileError, match="Name another folder"):
        decomposition.write(errors, tmp_path / "file")


def test_invalid_activations_are_refused() -> None:
    trace = traced("mamba")
    with pytest.raises(OptionError, match=r"unknown activation 'slu'; did you mean 'silu'\?"):
        decomposition_errors(trace, ["slu"])
    for given in ("silu", []):
        with pytest.raises(OptionError, match="give a list of names"):
            decomposition_errors(trace, given)
    mixed = {"a": decomposition_errors(trace, ["silu"]), "b": decomposition_errors(trace, ["relu"])}
    with pytest.raises(InputError, match="same activations"):
        decomposition.text_table(mixed)
