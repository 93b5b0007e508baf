"""Recorded operators by function: products of several operands, convolutions by Fourier transforms, windows, joins."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.recording.modules import GlobalToken
from tests.recording.test_recorded import LIMIT, draw, operator, require_complete
from unilinattn.architectures.recorded import recorded
from unilinattn.call import Call
from unilinattn.errors import UncoveredError
from unilinattn.host.inputs import bound_arguments
from unilinattn.mixers import Toeplitz
from unilinattn.operator.stages import WHOLE, Mix, walk
from unilinattn.testing import relative_error

WIDTH, LENGTH = 16, 7

Step = Callable[[Tensor], Tensor]


class Stepped(nn.Module):
    """A module of one function of tokens, with a linear layer before and after it."""

    def __init__(self, step: Step, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.last, self.step = nn.Linear(WIDTH, WIDTH), nn.Linear(width, WIDTH), step

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.step(self.first(x)))


def three_operands(x: Tensor) -> Tensor:
    heads = x.unflatten(2, (4, -1)).transpose(1, 2)
    memory = torch.einsum("bhnd,bhne->bhnde", heads.exp(), heads).cumsum(2)
    size = 1 / heads.exp().cumsum(2).sum(-1)
    return torch.einsum("bhnd,bhnde,bhn->bhne", heads.softmax(-1), memory, size).transpose(1, 2).flatten(2)


def implicit_result(x: Tensor) -> Tensor:
    return torch.einsum("nbc,nm", x.transpose(0, 1), draw(LENGTH, LENGTH)).permute(0, 2, 1)


def one_operand(x: Tensor) -> Tensor:
    return x + torch.einsum("bnc->bc", x)[:, None]


def fourier(kernel: Tensor) -> Step:
    """Return a causal convolution of each channel with a kernel (channel, tap)."""

    def step(x: Tensor) -> Tensor:
        n = 2 * x.shape[1]
        spectrum = torch.fft.rfft(x.mT, n=n) * torch.fft.rfft(kernel, n=n)
        return torch.fft.irfft(spectrum, n=n)[..., : x.shape[1]].mT

    return step


def normed(x: Tensor) -> Tensor:
    """The same with the norms of safari's, along the tokens' own axis."""
    n = 2 * x.shape[1]
    spectrum = torch.fft.rfft(draw(x.shape[1], WIDTH), n=n, dim=0) / n
    return torch.fft.irfft(torch.fft.rfft(x, n=n, dim=1) * spectrum, n=n, dim=1, norm="forward")[:, : x.shape[1]]


def of_two_sides(x: Tensor) -> Tensor:
    """A kernel that reaches both ways round."""
    return torch.fft.irfft(torch.fft.rfft(x.mT) * torch.fft.rfft(draw(WIDTH, x.shape[1])), n=x.shape[1]).mT


def by_einsum(x: Tensor) -> Tensor:
    """Two kernels for each channel, as state spaces of several channels have."""
    n = 2 * x.shape[1]
    kernels = torch.fft.rfft(draw(2, WIDTH, x.shape[1]), n=n)
    spectrum = torch.einsum("bhl,chl->bchl", torch.fft.rfft(x.mT, n=n), kernels)
    return torch.fft.irfft(spectrum, n=n)[..., : x.shape[1]].flatten(1, 2).mT


def complex_inverse(x: Tensor) -> Tensor:
    n = 2 * x.shape[1]
    spectrum = torch.fft.fft(x.mT, n=n) * torch.fft.fft(draw(WIDTH, x.shape[1]), n=n)
    return torch.fft.ifft(spectrum, n=n).real[..., : x.shape[1]].mT


def windows(x: Tensor) -> Tensor:
    image = functional.pad(x, (0, 0, 0, 9)).mT.unflatten(2, (4, 4))
    return functional.unfold(image, 2, dilation=2, padding=1)[..., :LENGTH].mT


def scanned_in_pairs(x: Tensor) -> Tensor:
    """A recurrence as the associative scans of packages compute it, with the channels in the batch."""

    def scan(gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if value.shape[1] < 2:
            return gate, value
        later = gate[:, 1::2]
        odd = scan(gate[:, :-1:2] * later, later * value[:, :-1:2] + value[:, 1::2])
        gates, values = (x[:, : x.shape[1] - 1 + value.shape[1] % 2] for x in odd)
        even = gates * gate[:, 2::2], gate[:, 2::2] * values + value[:, 2::2]
        both = zip((gate, value), even, odd, strict=True)
        return tuple(interleaved(torch.cat([x[:, :1], y], 1), z) for x, y, z in both)  # type: ignore[return-value]

    def interleaved(even: Tensor, odd: Tensor) -> Tensor:
        length = even.shape[1] + odd.shape[1]
        padded = functional.pad(odd, (0, 0, 0, 0, 0, even.shape[1] - odd.shape[1]))
        return torch.stack([even, padded], 2).flatten(1, 2)[:, :length]

    rows = x.mT.reshape(-1, x.shape[1], 1, 1)
    return scan(torch.sigmoid(rows), rows)[1].view(x.mT.shape).mT


def divided_spectrum(number: float | complex | Tensor) -> Step:
    """Return a convolution whose spectra are divided by a number, in the norm that multiplies by it."""

    def step(x: Tensor) -> Tensor:
        n = 2 * x.shape[1]
        spectrum = torch.fft.rfft(x.mT, n=n) * torch.fft.rfft(draw(WIDTH, LENGTH), n=n) / number
        return torch.fft.irfft(spectrum, n=n, norm="forward")[..., : x.shape[1]].mT

    return step


def written(x: Tensor) -> Tensor:
    y = x.cumsum(1)
    y[:, 2] = 0.1
    return y


FUNCTIONS: dict[str, tuple[Step, int]] = {
    "einsum of three operands": (three_operands, WIDTH),
    "einsum without a result": (implicit_result, WIDTH),
    "einsum of one operand": (one_operand, WIDTH),
    "convolution by a Fourier transform": (fourier(draw(WIDTH, LENGTH)), WIDTH),
    "norms of a Fourier transform": (normed, WIDTH),
    "convolution of two sides": (of_two_sides, WIDTH),
    "several kernels for a channel": (by_einsum, 2 * WIDTH),
    "complex Fourier transforms": (complex_inverse, WIDTH),
    "windows of an image": (windows, 4 * WIDTH),
    "a scan in pairs": (scanned_in_pairs, WIDTH),
    "a spectrum divided by an integer": (divided_spectrum(2 * LENGTH - 1), WIDTH),
    "a spectrum divided by a number": (divided_spectrum(0.3), WIDTH),
    "a spectrum divided by a complex number": (divided_spectrum(0.3 + 0.1j), WIDTH),
    "a spectrum divided by an integer tensor": (divided_spectrum(torch.tensor(7, device="cpu")), WIDTH),
    "a number written into tokens": (written, WIDTH),
    "numbers between tokens": (lambda x: torch.lerp(x, x.cumsum(1), 0.1), WIDTH),
    "a number in place of tokens": (lambda x: x.cumsum(1).masked_fill(draw(LENGTH, 1) > 0, 0.1), WIDTH),
    "a number beside tokens": (lambda x: torch.where(draw(LENGTH, 1) > 0, x.cumsum(1), 0.1), WIDTH),
    "a number behind tokens": (lambda x: functional.pad(x.cumsum(1), (0, 0, 0, 2), value=0.1)[:, 2:], WIDTH),
    "a number times a product": (lambda x: torch.addcmul(x.cumsum(1), x, draw(WIDTH), value=0.1), WIDTH),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_operator_is_the_module_on_its_input(name: str) -> None:
    require_complete(operator(Stepped(*FUNCTIONS[name]), draw(2, LENGTH, WIDTH)))


def test_a_causal_kernel_is_a_toeplitz_matrix() -> None:
    op = operator(Stepped(fourier(draw(WIDTH, LENGTH))), draw(2, LENGTH, WIDTH))
    assert any(isinstance(stage, Mix) and isinstance(stage.mixer, Toeplitz) for stage in walk(op.chains["x"]))
    later = torch.ones(LENGTH, LENGTH).triu(1).bool()
    assert not bool(op.matrix("core")[..., later].any())


def test_another_length_of_the_inverse_is_refused() -> None:
    def step(x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x.mT, n=20), n=16)[..., : x.shape[1]].mT

    with pytest.raises(UncoveredError, match="another length than its inverse"):
        operator(Stepped(step), draw(2, LENGTH, WIDTH))


@torch.jit.script
def faded(x: Tensor, gate: Tensor) -> Tensor:
    return torch.addcmul(x, gate, x.cumsum(1))


def test_functions_of_torchscript_are_seen_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Stepped(lambda x: faded(x, torch.sigmoid(x)), WIDTH), draw(2, LENGTH, WIDTH)
    script, later = faded, torch.jit.script(vars(faded)["_torchdynamo_inline"])
    # The first call may load modules, after which they are searched again.
    for _ in range(2):
        assert operator(module, x).reconstruction_error() < LIMIT and faded is script
    # A name that is bound after the first search, as in a notebook.
    monkeypatch.setitem(globals(), "later", later)
    module = Stepped(lambda x: globals()["later"](x, torch.sigmoid(x)), WIDTH)
    assert operator(module, x).reconstruction_error() < LIMIT


def test_one_token_that_hundreds_read_is_mixed_by_one_matrix() -> None:
    op = operator(GlobalToken(), draw(2, 300, WIDTH))
    assert op.reconstruction_error() < LIMIT


def twice(x: Tensor) -> Tensor:
    written = torch.zeros_like(x)
    written[torch.tensor([0, 0]), torch.tensor([1, 1])] = x.cumsum(1)[0, :2]
    return written


def into_another_sequence(x: Tensor) -> Tensor:
    written = torch.zeros_like(x)
    written[torch.tensor([1, 0]), torch.tensor([1, 1])] = x.cumsum(1)[:, 1]
    return written


def at_slices_and_numbers(x: Tensor) -> Tensor:
    written = torch.zeros_like(x)
    written[:, torch.tensor([3])] = x.cumsum(1)[:, :1]
    return written


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (twice, "written twice at one place"),
        (into_another_sequence, "of a sequence are written into another sequence"),
    ],
)
def test_writes_that_are_no_gather_of_a_sequence_are_refused(step: Step, message: str) -> None:
    with pytest.raises(UncoveredError, match=message):
        operator(Stepped(step, WIDTH), draw(2, LENGTH, WIDTH))


def test_a_write_without_a_rule_makes_one_stage() -> None:
    op = operator(Stepped(at_slices_and_numbers, WIDTH), draw(2, LENGTH, WIDTH))
    assert [stage.role for stage in op.chains["x"]] == [WHOLE] and op.reconstruction_error() < LIMIT


class Joined(nn.Module):
    """A first token by a linear layer, joined to tokens that a convolution merges."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.merge = nn.Linear(WIDTH, 2 * WIDTH), nn.Conv2d(WIDTH, 2 * WIDTH, 3, 2, 1, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        merged = self.merge(x[:, 1:].mT.unflatten(2, (4, 4))).flatten(2).mT
        return torch.cat((self.first(x[:, :1]), merged, merged[:, :0]), 1)


def test_a_bias_of_some_tokens_stays_with_these() -> None:
    assert operator(Joined(), draw(2, 17, WIDTH)).reconstruction_error() < LIMIT


class Context(nn.Module):
    """Class attention: keys of the token itself and of a context."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        context = torch.cat((x, context), 1)
        return (self.query(x) @ self.key(context).mT).softmax(-1) @ self.value(context)


def test_a_bias_of_a_sum_of_two_streams_counts_once() -> None:
    op = operator(Context(), draw(2, 1, WIDTH), draw(2, 5, WIDTH, seed=1))
    assert set(op.ports) == {"x", "context"} and op.reconstruction_error() < LIMIT


class Given(nn.Module):
    """Calls a function that it is given, which has parameters of another module, with arguments by position."""

    def forward(self, *args: Tensor, function: Step) -> Tensor:
        return args[0] + function(args[0]).cumsum(1)


def test_parameters_of_a_given_function_are_constants_and_positions_are_kept() -> None:
    module, other, x = Given().double(), nn.Linear(WIDTH, WIDTH).double(), draw(2, LENGTH, WIDTH)
    with torch.no_grad():
        output = module(x, function=other)
    arguments = bound_arguments(module, (x,), {"function": other.forward})
    flow = recorded(Call(module, "module", arguments, x, output))
    assert relative_error(flow.value, output) < LIMIT


def test_one_tensor_as_queries_keys_and_values_has_one_port() -> None:
    attention, x = nn.MultiheadAttention(WIDTH, 4, batch_first=True).double().eval(), draw(2, LENGTH, WIDTH)
    with torch.no_grad():
        output = attention(x, x, x)[0]
    flow = recorded(Call(attention, "module", {"query": x, "key": x, "value": x}, x, output))
    assert tuple(flow.chains) == ("x",)
    memory = draw(2, 5, WIDTH, seed=1)
    with torch.no_grad():
        output = attention(x, memory, memory)[0]
    flow = recorded(Call(attention, "module", {"query": x, "key": memory, "value": memory}, x, output))
    assert tuple(flow.chains) == ("key",)


class Rotated(nn.Module):
    """Mixes tokens by random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.randn(x.shape[1], x.shape[1]).to(x) @ x


class Learning(nn.Module):
    """A memory whose weights are the gradient of a loss on the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            weight = self.memory.weight.detach().requires_grad_()
            (gradient,) = torch.autograd.grad((functional.linear(x, weight) - x).square().sum(), weight)
        return functional.linear(x, weight.detach() - gradient)


@pytest.mark.parametrize(("build", "reason"), [(Rotated, "draws random numbers"), (Learning, "computes gradients")])
def test_what_runs_differently_or_learns_is_refused_by_its_reason(build: type[nn.Module], reason: str) -> None:
    with pytest.raises(UncoveredError, match=reason):
        operator(build(), draw(2, LENGTH, WIDTH))
