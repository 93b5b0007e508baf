"""Cuts of tokens and edges, and the shares by which edges are ranked."""

import pytest
import torch

import unilinattn as ula
from evidence import edges
from unilinattn.evaluation import Sample
from unilinattn.evaluation.case import Case
from unilinattn.examples import TASKS, load
from unilinattn.testing import TOLERANCES, relative_error

LENGTH = 10


@pytest.fixture(scope="module")
def traced():
    host = load("induction", "mamba")
    sample = Sample(inputs=TASKS["induction"].sample(1, 0).input_ids[:, :LENGTH], target=LENGTH - 2)
    return host, sample, ula.trace(host, sample.inputs, progress=False)


def predicted(host, ids, target):
    with torch.no_grad():
        return float(host(ids).logits[0, target].max())


def falls(trace, sample, cuts):
    sequences = torch.zeros(len(cuts), dtype=torch.long)
    return edges.falls(trace, sequences, torch.tensor([sample.target]), cuts).tolist()


def fall(trace, sample, scores, count):
    return falls(trace, sample, edges.highest_edges(scores, sample.target, count)[None])[0]


def test_the_shares_of_all_edges_are_the_gradient_times_the_output_without_bias(traced) -> None:
    _, sample, trace = traced
    shares = edges.edge_scores(trace, [sample.target])["gradient x contribution"][:, 0].double()
    (gradients,) = trace.gradients([sample.target])
    for layer, gradient, share in zip(trace.layers, gradients, shares, strict=True):
        whole = (gradient * (layer.output - layer.operator.bias)).sum().double()
        torch.testing.assert_close(share.sum(), whole, rtol=1e-4, atol=1e-5)
        assert not share.triu(1).any()


def test_a_fall_is_that_of_the_model_without_the_edges(traced) -> None:
    host, sample, trace = traced
    scores = torch.zeros(2, LENGTH, LENGTH)
    scores[0, 5, 3], scores[1, sample.target, 1] = 2, 1
    with ula.cut(host, [(5, 3)], layers=[0]), ula.cut(host, [(sample.target, 1)], layers=[1]):
        cut = host(sample.inputs).logits[0, sample.target].detach()
    with torch.no_grad():
        whole = host(sample.inputs).logits[0, sample.target]
    expected = float(whole.max() - cut[whole.argmax()])
    assert fall(trace, sample, scores, 2) == pytest.approx(expected, abs=1e-5)
    assert expected != 0


def test_edges_of_a_token_to_itself_or_after_the_target_are_never_cut(traced) -> None:
    _, sample, trace = traced
    scores = torch.zeros(2, LENGTH, LENGTH)
    scores[:, range(LENGTH), range(LENGTH)] = 3
    scores[:, LENGTH - 1] = 3
    scores[1, sample.target, 1] = 1
    one = torch.zeros_like(scores)
    one[1, sample.target, 1] = 1
    assert fall(trace, sample, scores, 1) == fall(trace, sample, one, 1) != 0


def test_the_runs_of_a_batch_are_those_of_single_cuts(traced) -> None:
    host, sample, trace = traced
    torch.manual_seed(0)
    cuts = torch.stack([edges.highest_edges(torch.rand(2, LENGTH, LENGTH), sample.target, k) for k in (1, 5, 12)])
    cuts[0, 0] = False
    assert [int(run.sum()) for run in cuts[1:]] == [5, 12]
    for run, measured in zip(cuts, falls(trace, sample, cuts), strict=True):
        with ula.cut(host, run[0].nonzero(), layers=[0]), ula.cut(host, run[1].nonzero(), layers=[1]):
            logits = host(sample.inputs).logits[0, sample.target].detach()
        with torch.no_grad():
            whole = host(sample.inputs).logits[0, sample.target]
        assert measured == pytest.approx(float(whole.max() - logits[whole.argmax()]), abs=1e-5)


def test_the_fall_of_one_token_is_its_knockout(traced) -> None:
    host, sample, trace = traced
    result = ula.explain(trace, method="knockout", target=sample.target, progress=False)
    best = torch.where(torch.arange(LENGTH) < sample.target, result.scores[0], -torch.inf).max()
    (measured,) = edges.token_falls([Case(host, sample, trace, result)], 1)
    assert measured.value == pytest.approx(float(best), abs=1e-5)


def test_a_batch_has_the_scores_and_falls_of_its_sequences() -> None:
    host, ids, targets = load("induction", "mamba"), TASKS["induction"].sample(3, 1).input_ids[:, :LENGTH], [9, 4, 7]
    trace = ula.trace(host, ids, progress=False)
    by_method = edges.edge_scores(trace, targets)
    highest = [edges.highest_edges(by_method["latim"][:, row], target, 4) for row, target in enumerate(targets)]
    measured = edges.falls(
        trace, torch.tensor([2, 0, 1]), torch.tensor(targets), torch.stack([highest[2], *highest[:2]])
    )
    for row, target in enumerate(targets):
        alone = ula.trace(host, ids[row : row + 1], progress=False)
        for method, scores in edges.edge_scores(alone, [target]).items():
            assert relative_error(by_method[method][:, row], scores[:, 0]) < TOLERANCES["layer", torch.float32]
        sample = Sample(inputs=ids[row : row + 1], target=target)
        assert measured.tolist()[[1, 2, 0][row]] == pytest.approx(falls(alone, sample, highest[row][None])[0], abs=1e-5)
