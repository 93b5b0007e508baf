"""The compiled contribution norms against their definition in float64, and the choice of the loops."""

import pytest
import torch
from torch import Tensor

import unilinattn as ula
from unilinattn.kernels.backend import LEAST, using
from unilinattn.kernels.contribution_norms import naive, tiled
from unilinattn.kernels.contribution_norms.naive import Order, Products
from unilinattn.testing import relative_error
from unilinattn.testing.hosts import host

form = pytest.importorskip("unilinattn.kernels.contribution_norms.numba", reason="the extra `cpu` is not installed")

pytestmark = pytest.mark.usefixtures("poisoned")

ORDERS: list[Order] = [1.0, "alti"]
OUTS = (1, form.loops.OUTS - 1, form.loops.OUTS + 3)


def drawn(channels: int, outs: int, *, keyed: bool, cols: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors of two sequences with nine groups each, their weights, and the reference of `alti`."""
    torch.manual_seed(channels * outs)
    vectors, reference = torch.randn(18, channels, 5, cols), torch.randn(2, 5, outs)
    return vectors, torch.randn(18 if keyed else 1, outs, channels), reference


@pytest.fixture
def loops_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where torch reduces."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("torch reduces")

    monkeypatch.setattr(tiled, "norms", refuse)
    monkeypatch.setattr(tiled, "alti_norms", refuse)


@pytest.mark.usefixtures("loops_only")
@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("outs", OUTS)
@pytest.mark.parametrize("channels", [1, 4, 6, 13, form.CHANNELS])
def test_compiled_norms_equal_their_definition(channels: int, outs: int, keyed: bool) -> None:
    vectors, weight, reference = drawn(channels, outs, keyed=keyed)
    expected = naive.alti_norms(Products(vectors, weight), reference)
    for actual, wanted in zip(form.alti_norms(Products(vectors, weight), reference), expected, strict=True):
        assert relative_error(actual.double(), wanted) < 1e-6
    for order, wanted in zip(("alti", 1.0), expected, strict=True):
        given = reference if order == "alti" else None
        assert (
            relative_error(form.norms(Products(vectors, weight), order=order, reference=given).double(), wanted) < 1e-6
        )


@pytest.mark.usefixtures("loops_only")
def test_other_layouts_have_the_same_norms() -> None:
    vectors, weight, reference = drawn(6, 30, keyed=True)
    expected = form.alti_norms(Products(vectors, weight), reference)
    strided = (
        vectors.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0),
        weight.mT.contiguous().mT,
        reference.mT.contiguous().mT,
    )
    assert not any(t.is_contiguous() for t in strided)
    assert all(map(torch.equal, form.alti_norms(Products(*strided[:2]), strided[2]), expected))


@pytest.mark.usefixtures("loops_only")
def test_the_compiled_score_of_a_small_vector_is_accurate() -> None:
    vectors, weight, reference = drawn(3, 40, keyed=False)
    reference[0, 0, :30] = 0
    reference[0, 1, :30] = -0.0
    scores, _ = naive.alti_norms(Products(1e-9 * vectors, weight), reference)
    actual, _ = form.alti_norms(Products(1e-9 * vectors, weight), reference)
    assert torch.equal(actual > 0, scores > 0)
    assert relative_error(actual.double(), scores) < 1e-6


@pytest.mark.parametrize("at", ["vectors", "weight", "reference"])
def test_nan_reaches_the_scores_of_its_pairs(at: str) -> None:
    inputs = dict(zip(("vectors", "weight", "reference"), drawn(5, 20, keyed=True), strict=True))
    inputs[at].flatten()[17] = torch.nan
    compiled, plain = (
        module.alti_norms(Products(inputs["vectors"], inputs["weight"]), inputs["reference"])
        for module in (form, tiled)
    )
    assert not compiled[0].isfinite().all()
    assert all(torch.equal(one.isnan(), other.isnan()) for one, other in zip(compiled, plain, strict=True))


def test_norms_do_not_depend_on_the_number_of_threads() -> None:
    inputs, threads = drawn(12, 40, keyed=True), torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(form.alti_norms(Products(*inputs[:2]), inputs[2]))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("order", [1.0, 2.0, 3.5, float("inf"), "alti", "dot"])
def test_other_norms_are_those_of_torch(order: Order) -> None:
    vectors, weight, reference = drawn(form.CHANNELS + 1, 9, keyed=False)
    given = reference if isinstance(order, str) else None
    for v, w, y in ((vectors, weight, given), (vectors[:, :9], None, given)):
        assert torch.equal(
            form.norms(Products(v, w), order=order, reference=y), tiled.norms(Products(v, w), order=order, reference=y)
        )
    if order not in ORDERS:
        v, w = vectors[:, :4], weight[..., :4]
        assert torch.equal(
            form.norms(Products(v, w), order=order, reference=given),
            tiled.norms(Products(v, w), order=order, reference=given),
        )


@pytest.mark.parametrize("elements", [LEAST["contribution_norms"], LEAST["contribution_norms"] - 1])
def test_tiles_of_many_vectors_are_compiled(elements: int) -> None:
    chosen = ula.kernels.backend.implementation("contribution_norms", torch.zeros(4), elements)
    assert chosen.__name__.endswith(".numba" if elements >= LEAST["contribution_norms"] else ".tiled")


@pytest.mark.parametrize("options", [{}, {"by_head": True}, {"p": 1.0}])
def test_methods_over_softmax_agree_with_the_form_of_torch(options: dict[str, object]) -> None:
    gpt2 = host("gpt2")
    method, scores = ("latim" if "p" in options else "alti"), []
    for kernels in ("numba", "torch"):
        with using(kernels):
            scores.append(ula.explain(gpt2.model(), gpt2.inputs(), method=method, **options).scores)
    assert relative_error(scores[0], scores[1]) < 1e-5
