"""The errors of LaTIM's split by a loop over tokens, and the verdicts on activations."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import unilinattn as ula
from evidence import bootstrap
from evidence.activations import (
    ACCURACY,
    AER,
    ERRORS,
    EXACT_AER,
    HOSTS,
    IDENTITY,
    RELATIVE,
    RELU,
    SENTENCES,
    SILU,
    TABLE,
    claims,
    measure,
    retrained,
    split_errors,
)
from evidence.alignment import RECIPES, STUDY, samples
from evidence.hosts import builder
from evidence.translation import VOCABULARY
from tests.evidence.tables import made
from tests.evidence.tables import verdicts as of_claims

F = {SILU: functional.silu, RELU: functional.relu, IDENTITY: lambda p: p}
"""The activations, as functions."""


def outputs(mixer: torch.nn.Module, x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return the output of a Mamba-2 mixer (LaTIM Eq. 13-14), and the one with LaTIM's split in Eq. 19, by tokens."""
    inner, state, heads = mixer.intermediate_size, mixer.ssm_state_size, mixer.num_heads
    gate, mixed, step = (x @ mixer.in_proj.weight.T).split([inner, mixer.conv_dim, heads], -1)
    weight = mixer.conv1d.weight[:, 0]
    size = weight.shape[1]
    padded = functional.pad(mixed, (0, 0, size - 1, 0))
    taps = torch.stack([padded[k : k + len(x)] * weight[:, k] for k in range(size)])
    function = F[activation]
    carried = function(taps.sum(0) + mixer.conv1d.bias)
    split = function(taps).sum(0) + function(mixer.conv1d.bias)
    keys, queries = carried[:, inner:].split(state, -1)
    delta = functional.softplus(step + mixer.dt_bias)
    decay = torch.exp(-torch.exp(mixer.A_log) * delta)

    def scanned(values: Tensor) -> Tensor:
        memory, rows = x.new_zeros(heads, inner // heads, state), []
        by_head = values[:, :inner].unflatten(1, (heads, -1))
        for at, value in enumerate(by_head):
            memory = decay[at][:, None, None] * memory
            memory = memory + delta[at][:, None, None] * value[:, :, None] * keys[at]
            rows.append((memory @ queries[at] + mixer.D[:, None] * value).flatten())
        return torch.stack(rows) * functional.silu(gate)

    gated = scanned(carried)
    scale = torch.rsqrt(gated.square().mean(-1, keepdim=True) + mixer.norm.variance_epsilon) * mixer.norm.weight
    return gated * scale @ mixer.out_proj.weight.T, scanned(split) * scale @ mixer.out_proj.weight.T


@torch.no_grad()
@pytest.mark.parametrize("activation", HOSTS)
def test_the_errors_are_those_of_the_split(activation: str) -> None:
    others = {name: model.build for name, model in retrained(RECIPES["mamba2"]).items()}
    torch.manual_seed(1)
    host = {"mamba2": builder("mamba2", VOCABULARY), **others}[HOSTS[activation]]().double().eval()
    mixers = [layer.mixer for layer in host.backbone.layers]
    for mixer in mixers:
        torch.nn.init.normal_(mixer.conv1d.bias)
    sentence = samples(1, 5)[0]
    rows = {row["metric"]: row["value"] for row in split_errors(activation, host, [sentence])}
    trace = ula.trace(host, sentence.inputs, progress=False)
    for at, mixer in enumerate(mixers):
        x = trace.layers[at].input
        output, decomposed = outputs(mixer, x[0], activation)
        # The host computes in single precision at some steps.
        torch.testing.assert_close(output, mixer(x)[0], rtol=1e-5, atol=1e-5)
        missed = output - decomposed
        assert rows[ERRORS[at]] == pytest.approx(float(missed.abs().mean()), rel=1e-5, abs=1e-6)
        assert rows[RELATIVE[at]] == pytest.approx(float(missed.norm() / output.norm()), rel=1e-5, abs=1e-6)
        assert (rows[RELATIVE[at]] > 0.01) == (activation != IDENTITY)


def test_every_activation_has_a_row_of_each_metric(tmp_path: Path) -> None:
    hosts = {name: model.build for name, model in STUDY.models.items() if name in HOSTS.values()}
    hosts = {name: lambda build=build: build().eval() for name, build in hosts.items()}
    table = measure(hosts, 0, samples(2, 5), samples(2, 6), tmp_path)
    counts = {(row["method"], row["metric"]): row["samples"] for row in table.summary()}
    metrics = {**dict.fromkeys((*ERRORS, *RELATIVE, AER, EXACT_AER), 2), ACCURACY: 2 * SENTENCES}
    assert counts == {(activation, metric): count for activation in HOSTS for metric, count in metrics.items()}


PAPER = {ERRORS[0]: (0.2, 0.3, 0.0), ERRORS[1]: (0.5, 0.9, 0.0), RELATIVE[0]: (0.2, 0.3, 0.0),
         RELATIVE[1]: (0.2, 0.3, 0.0), AER: (0.47, 0.55, 0.44), EXACT_AER: (0.4, 0.4, 0.44),
         ACCURACY: (0.9, 0.9, 0.9)}  # fmt: skip
"""Numbers like the paper's, by activation."""


def verdicts(numbers: dict[str, tuple[float, float, float]]) -> dict[str, str]:
    def value(method: str, metric: str) -> float:
        number = numbers[metric][list(HOSTS).index(method)]
        # The made samples differ by up to 0.019, and an error of zero has no spread.
        return number if number else -1.0

    results = made({TABLE: ([""], HOSTS, numbers)}, value)
    return of_claims(claims(), results)


def test_verdicts_follow_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "RESAMPLES", 50)
    assert set(verdicts(PAPER).values()) == {"holds"}
    turned = {metric: (row[1], row[0], 0.6) for metric, row in PAPER.items()}
    turned[EXACT_AER], turned[ACCURACY] = (0.9, 0.9, 0.9), (0.9, 0.9, 0.8)
    assert set(verdicts(turned).values()) == {"contradicted"}
