"""The mean CLS row against rows of dense maps of single images."""

import pytest
import torch

from tests.analysis.plain import image, spearman
from tests.hosts import named
from unilinattn import analysis, trace
from unilinattn.errors import InputError
from unilinattn.testing.promote import promoted

VIM = named("vim")


def images(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.long
def test_the_mean_row_of_vim_with_cls_in_the_middle() -> None:
    with promoted():
        model, pixels = VIM.model().double(), images(3)
        found = analysis.cls_bias((trace(model, part) for part in pixels.split(2)), cls=2, grid=(2, 2))
        singles = [trace(model, pixels[at : at + 1]) for at in range(3)]
        for number, name in enumerate(found.layers):
            rows = [run.layers[number].operator.matrix()[0, 2] for run in singles]
            patches = [[float(row[key]) for row in rows] for key in (0, 1, 3, 4)]
            expected = torch.tensor([sum(values) / 3 for values in patches]).reshape(2, 2)
            assert (found.maps[number] - expected).abs().max() <= 1e-12 * expected.abs().max()
            assert name == singles[0].layers[number].name
    assert (found.images, found.distance.tolist()) == (3, [[2, 1], [1, 2]])
    weights = found.maps[0].abs().flatten().tolist()
    assert abs(float(found.nearness[0]) - spearman(weights, [-2, -1, -1, -2])) < 1e-12
    assert "over 3 images" in repr(found)


def test_options_of_raw_and_softmax_maps() -> None:
    host = named("vit")
    run = trace(host.model(), host.inputs())
    count = run.layers[0].output.shape[1] - 1
    found = analysis.cls_bias([run], cls=0, grid=(1, count), layers="mean")
    mean = sum(layer.operator.matrix()[:, 0, 1:].double().mean(0) for layer in run.layers) / len(run.layers)
    assert (found.maps[0, 0] - mean).abs().max() < 1e-6
    assert found.layers == ("mean over layers",)
    absolute = analysis.cls_bias([trace(VIM.model(), images(2).float())], cls=-3, grid=(2, 2), sign="abs")
    assert bool((absolute.maps >= 0).all())


def test_tokens_that_are_no_patches_are_named() -> None:
    run = trace(VIM.model(), images(2).float())
    with pytest.raises(InputError, match=r"5 tokens without the 1 at \[2\] leave 4 patches"):
        analysis.cls_bias([run], cls=2, grid=(3, 3))
    assert analysis.cls_bias([run], cls=2, grid=(1, 3), special=[-1]).distance.tolist() == [[2, 1, 1]]
    with pytest.raises(InputError, match="no trace"):
        analysis.cls_bias([], cls=0, grid=(2, 2))


@pytest.mark.long
def test_the_picture(tmp_path) -> None:
    analysis.cls_bias([trace(VIM.model(), images(2).float())], cls=2, grid=(2, 2)).plot(tmp_path / "cls.png")
    assert image(tmp_path / "cls.png")
