"""Invented token mixers without an adapter, and a Mamba that contains them."""

from collections.abc import Callable

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.testing.hosts import randomize

WIDTH = 8


class Projected(nn.Module):
    """A mixer between two projections; subclasses define `mix`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, **options: object) -> Tensor:
        return self.second(self.mix(self.first(x)))

    def mix(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class TwoTime(Projected):
    def mix(self, x: Tensor) -> Tensor:
        return x + functional.pad(x, (0, 0, 2, 0))[:, :-2]


class CumMean(Projected):
    def mix(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class SDPA(Projected):
    def mix(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


class LRU(Projected):
    def mix(self, x: Tensor) -> Tensor:
        states = [x[:, 0]]
        for token in x[:, 1:].unbind(1):
            states.append(0.9 * states[-1] + token)
        return torch.stack(states, dim=1)


class SelectiveScan(Projected):
    def mix(self, x: Tensor) -> Tensor:
        keep, state, states = torch.sigmoid(x), torch.zeros_like(x[:, 0]), []
        for k, token in zip(keep.unbind(1), x.unbind(1), strict=True):
            state = k * state + (1 - k) * token
            states.append(state)
        return torch.stack(states, dim=1)


class TimeMix(Projected):
    """A linear layer over the tokens, as in an MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.over_tokens = nn.Linear(16, 16)

    def mix(self, x: Tensor) -> Tensor:
        return self.over_tokens(x.transpose(1, 2)).transpose(1, 2)


class Pooling(Projected):
    """The mean over blocks of two tokens."""

    def mix(self, x: Tensor) -> Tensor:
        return functional.avg_pool1d(x.transpose(1, 2), 2).repeat_interleave(2, dim=-1).transpose(1, 2)


class TokenShift(Projected):
    """Each token receives the next one."""

    def mix(self, x: Tensor) -> Tensor:
        return x.roll(-1, dims=1)


class Fourier(Projected):
    def mix(self, x: Tensor) -> Tensor:
        return torch.fft.fft2(x).real


class FirstTokenAdded(Projected):
    """Every token reads the first one."""

    def mix(self, x: Tensor) -> Tensor:
        return x + x[:, :1]


class Summary(Projected):
    """Only the last token reads other tokens."""

    def mix(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :-1], x.mean(1, keepdim=True)], dim=1)


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.cell = cell(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, **options: object) -> Tensor:
        return self.cell(x)[0]


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor, **options: object) -> Tensor:
        return self.filters(x.transpose(1, 2)).transpose(1, 2)


class OverTokens(nn.Module):
    """A norm over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        # Mamba casts to the dtype of the weights of its norms.
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, **options: object) -> Tensor:
        return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)


def hybrid(mixer: nn.Module | None = None) -> nn.Module:
    """A Mamba of three blocks, whose second mixer is replaced."""
    config = transformers.MambaConfig(
        vocab_size=30, hidden_size=WIDTH, state_size=3, num_hidden_layers=3, pad_token_id=None, bos_token_id=None
    )
    torch.manual_seed(0)
    model = transformers.MambaForCausalLM(config).eval()
    if mixer is not None:
        model.backbone.layers[1].mixer = mixer
    return randomize(model).eval()


_CLASSES = (
    *(TwoTime, CumMean, SDPA, LRU, SelectiveScan, TimeMix, Pooling, TokenShift),
    *(Fourier, FirstTokenAdded, Summary, Convolved, OverTokens),
)
INVENTED: dict[str, Callable[[], nn.Module]] = {
    **{cls.__name__: cls for cls in _CLASSES},
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
}
"""Constructor of each mixer."""

RECURRENT = ("LSTM", "GRU")
"""Invented mixers without an operator."""
