"""Traces in pieces of the tokens (`stream_to`): equal to whole ones, compared with the host, in constant memory."""

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unilinattn as ula
from unilinattn.errors import InputError, OptionError, UncoveredError
from unilinattn.host import substitution
from unilinattn.mixers import DiagonalDecay, ScalarDecay, Toeplitz
from unilinattn.operator.carry import Carry, carried_by
from unilinattn.operator.piecewise import PiecewiseOperator
from unilinattn.testing import TOLERANCES, left_as_found, relative_error
from unilinattn.testing.hosts import host
from unilinattn.tracing import streaming

EXACT = 1e-12
LENGTH = 23


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first piece has 4 tokens, inside a prefix of 8, and later ones have 5."""
    monkeypatch.setattr(substitution, "PREFIX", 8)
    monkeypatch.setattr(streaming, "PIECE", 5)


def both(name: str, folder: Path, length: int = LENGTH) -> tuple[ula.Trace, ula.Trace]:
    """Return a whole trace through the operators and one in pieces, in float64."""
    model, x = host(name).model().double(), torch.randint(7, (2, length))
    return ula.trace(model, x, substitute_above=1), ula.trace(model, x, stream_to=folder)


@pytest.mark.parametrize("name", ["mamba", "mamba, biases", "mamba2"])
@pytest.mark.parametrize("length", [2, 5, 9, 15, LENGTH])
def test_pieces_give_the_whole_trace(name: str, length: int, tmp_path: Path) -> None:
    whole, pieces = both(name, tmp_path, length)
    for one, two in zip(whole.layers, pieces.layers, strict=True):
        for part in ("input", "output", "stream", "stream_norms"):
            assert relative_error(getattr(two, part), getattr(one, part)) <= EXACT
        assert two.name == one.name and two.multiplier == one.multiplier
        assert two.prefix_error is not None and two.prefix_error <= 1e-6
        assert two.in_pieces and not one.in_pieces
    assert [len(step.layers) for step in pieces.steps] == [len(step.layers) for step in whole.steps]
    assert relative_error(pieces.output.logits[:, -1], whole.output.logits[:, -1]) <= EXACT
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
@pytest.mark.parametrize("repeated", [0, 8])
@pytest.mark.parametrize("lengths", [(3, 10), pytest.param(range(1, 4 + 2 * 5 + 3), marks=pytest.mark.slow)])
def test_every_length_can_be_cut_where_a_norm_rescales_a_token(
    name: str, repeated: int, lengths: Sequence[int], tmp_path: Path
) -> None:
    """Where norms have equal weights, the normed vector of one token, or of a repeated one, is a multiple of it."""
    model = host(name).model()
    for parameter in (p for n, p in model.named_parameters() if n.endswith("norm.weight")):
        parameter.data.fill_(1)
    for length in lengths:
        x = torch.randint(7, (1, length))
        x[:, :repeated] = x[:, :1]
        first, second = ula.trace(model, x, stream_to=tmp_path).layers
        assert torch.equal(first.stream, model.get_input_embeddings()(x))
        assert torch.equal(second.stream, first.stream + first.output) and first.multiplier == second.multiplier == 1


@pytest.mark.parametrize("name", ["mamba", "mamba, biases", "mamba2"])
@pytest.mark.parametrize("scope", ["core", "mixer", "unified"])
@pytest.mark.parametrize("target", [-1, 3, [22, 11]])
def test_rollouts_of_a_target_are_equal(name: str, scope: str, target: Any, tmp_path: Path) -> None:
    one, two = (ula.explain(t, method="rollout", target=target, scope=scope) for t in both(name, tmp_path))
    assert relative_error(two.scores, one.scores) <= EXACT
    assert bool((two.scores[0, 4:] == 0).all()) == (target == 3)


def test_without_the_states_the_row_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = both("mamba2", tmp_path)
    exact = ula.explain(whole, method="rollout", target=-1).scores
    monkeypatch.setattr(Carry, "_state", lambda carry: None)
    assert relative_error(ula.explain(pieces, method="rollout", target=-1).scores, exact) > 1e-3


def test_without_the_states_the_trace_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Carry, "_state", lambda carry: None)
    with pytest.raises(UncoveredError, match="in pieces its output differs from the host's on the first 8 tokens"):
        both("mamba2", tmp_path)


def mixers(tokens: slice) -> dict[str, Any]:
    """Return mixers on some tokens of the same factors."""
    torch.manual_seed(0)
    query, key = (torch.randn(2, 11, 2, 3, dtype=torch.float64)[:, tokens] for _ in range(2))
    decay, scale = (-torch.rand(2, 11, 4, dtype=torch.float64)[:, tokens] for _ in range(2))
    rate, reset = torch.rand(4, 3, dtype=torch.float64), (torch.arange(11) % 4 == 3).expand(2, -1)[:, tokens]
    every = decay.unsqueeze(-1) * torch.arange(1, 4)
    kernel = torch.randn(4, 6, dtype=torch.float64)
    return {
        "scalar": ScalarDecay(query, key, decay, key_scale=scale),
        "scalar, no scale": ScalarDecay(query, key, decay),
        "diagonal": DiagonalDecay(query, key, every),
        "rates": DiagonalDecay(query, key, decay.unsqueeze(-1), key_scale=scale, rate=rate),
        "resets": DiagonalDecay(query, key, every, reset=reset),
        "convolution": Toeplitz(kernel, batch=2, length=decay.shape[1]),
        "one tap": Toeplitz(kernel[:, :1], batch=2, length=decay.shape[1]),
    }


@pytest.mark.parametrize("name", list(mixers(slice(None))))
@pytest.mark.parametrize("cuts", [(0, 11), (0, 1, 11), (0, 4, 5, 11), (0, 2, 4, 6, 8, 10, 11)])
def test_mixers_continue_from_their_states(name: str, cuts: tuple[int, ...]) -> None:
    vectors = torch.randn(2, 11, 4, 3, dtype=torch.float64)
    whole, parts = mixers(slice(None))[name], [slice(a, b) for a, b in itertools.pairwise(cuts)]

    def run(operation: str, order: int) -> Tensor:
        carry, outputs = Carry(), []
        for part in parts[::order]:
            with carried_by(carry):
                outputs.append(getattr(carry, operation)(mixers(part)[name], vectors[:, part]))
            # A state that is a slice would keep the outputs of its piece.
            for state in carry.states:
                assert state.untyped_storage().nbytes() == state.numel() * state.element_size()
        return torch.cat(outputs[::order], dim=1)

    assert relative_error(run("apply", 1), whole.apply(vectors)) <= EXACT
    assert relative_error(run("adjoint", -1), whole.adjoint(vectors)) <= EXACT


def test_structures_without_a_state_are_refused() -> None:
    vectors = torch.randn(1, 40, 1, 1)
    with pytest.raises(UncoveredError, match="a convolution with 40 taps carries no state"):
        Carry().apply(Toeplitz(torch.randn(1, 40), batch=1, length=40), vectors)
    with pytest.raises(UncoveredError, match="a convolution with 40 taps carries no state"):
        Carry().adjoint(Toeplitz(torch.randn(1, 40), batch=1, length=40), vectors)


@pytest.mark.parametrize(
    ("name", "reason"), [("gpt2", "carries no state"), ("s4d", "carries no state of constant size")]
)
def test_layers_that_cannot_be_cut_are_refused(name: str, reason: str, tmp_path: Path) -> None:
    entry = host(name)
    model, x = entry.model(), entry.inputs()
    with left_as_found(model), pytest.raises(UncoveredError, match=reason):
        ula.trace(model, x, stream_to=tmp_path)


def test_arguments_that_cannot_be_cut_are_refused(tmp_path: Path) -> None:
    model, x = host("mamba2").model(), torch.randint(7, (2, LENGTH))
    mask = torch.ones_like(x)
    assert ula.trace(model, {"input_ids": x, "attention_mask": mask}, stream_to=tmp_path).mask is None
    mask[0, 0] = 0
    with pytest.raises(InputError, match="stream_to= has no padding"):
        ula.trace(model, {"input_ids": x, "attention_mask": mask}, stream_to=tmp_path)
    with pytest.raises(InputError, match="'labels' cannot be cut"):
        ula.trace(model, {"input_ids": x, "labels": x}, stream_to=tmp_path)
    with pytest.raises(OptionError, match="give an existing folder"):
        ula.trace(model, x, stream_to=tmp_path / "missing")


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InputError, match=r"the folder cannot hold it .No space left on device."):
        both("mamba2", tmp_path)


@pytest.mark.parametrize("method", ["raw", "latim", "logit", "attribution"])
def test_other_methods_name_the_option(method: str, tmp_path: Path) -> None:
    _, pieces = both("mamba2", tmp_path)
    with pytest.raises(UncoveredError, match="stream_to="):
        ula.explain(pieces, method=method, target=-1)


def test_the_operator_shows_its_pieces(tmp_path: Path) -> None:
    _, pieces = both("mamba2", tmp_path)
    operator = pieces.layers[0].operator
    assert isinstance(operator, PiecewiseOperator)
    assert "5 pieces" in repr(operator)
    with pytest.raises(UncoveredError, match="it multiplies rows"):
        operator.matrix()


class Positions(nn.Module):
    """A Mamba-2 model that adds positions, which begin anew in every piece."""

    def __init__(self) -> None:
        super().__init__()
        self.model = host("mamba2").model()
        self.embedding = nn.Embedding(64, self.model.config.hidden_size)

    def forward(self, ids: Tensor) -> Any:
        x = self.model.get_input_embeddings()(ids)
        return self.model(inputs_embeds=x + self.embedding(torch.arange(ids.shape[1])))


def test_positions_are_found_by_the_comparison_with_the_host(tmp_path: Path) -> None:
    with pytest.raises(UncoveredError, match="from positions that its layers' states do not carry"):
        ula.trace(Positions(), torch.randint(7, (1, LENGTH)), stream_to=tmp_path)


PROGRAM = """
import sys
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM
import unilinattn as ula
from unilinattn.tracing import streaming

torch.set_num_threads(1)
streaming.PIECE = 4096
shape = dict(vocab_size=16, hidden_size=64, num_hidden_layers=2, head_dim=16, num_heads=8, n_groups=1, state_size=8)
model = Mamba2ForCausalLM(Mamba2Config(**shape)).eval()


def used():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])


def run(length):
    trace = ula.trace(model, torch.randint(16, (1, length)), stream_to=sys.argv[1])
    ula.explain(trace, method="rollout", target=-1)


run(3 * 4096)
before = used()
run(int(sys.argv[2]))
print(1024 * (used() - before))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc/self/status")
def test_memory_is_that_of_a_piece(tmp_path: Path) -> None:
    length = 60 * 4096
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(length)]
    # glibc then returns every tensor's memory at once; by default it keeps up to 200 MB of a run's fragments.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    # The streams of 57 more pieces have 2 x 3 x 64 numbers per token; ids and rows have a few.
    assert int(done.stdout) < length * 2 * 3 * 64 * 4 / 10


@pytest.mark.parametrize("length", [1, LENGTH])
def test_float32_is_within_its_tolerance(length: int, tmp_path: Path) -> None:
    model, x = host("mamba").model(), torch.randint(7, (1, length))
    one, two = ula.trace(model, x, substitute_above=1), ula.trace(model, x, stream_to=str(tmp_path))
    for before, after in zip(one.layers, two.layers, strict=True):
        assert relative_error(after.output, before.output) <= TOLERANCES["layer", torch.float32]
