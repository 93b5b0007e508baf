"""Heads that a module computes one by one are heads of one core, and cores of the same values add up."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.recording.test_recorded import LIMIT, draw, operator, require_complete
from unilinattn.operator.heads import HeadContributions
from unilinattn.testing import relative_error

WIDTH, HEADS, CHANNELS = 12, 3, 4


class Heads(nn.Module):
    """Attention whose heads are modules; `join` makes the layer's channels from the maps and values of all heads."""

    def __init__(self, join: Callable[["Heads", list[Tensor], list[Tensor]], Tensor], widths: tuple[int, ...]) -> None:
        super().__init__()
        self.join = join
        self.query, self.key = (nn.ModuleList(nn.Linear(WIDTH, CHANNELS) for _ in range(HEADS)) for _ in range(2))
        self.value = nn.ModuleList(nn.Linear(WIDTH, width) for width in widths)
        self.out = nn.Linear(sum(widths), WIDTH)

    def maps(self, x: Tensor) -> list[Tensor]:
        """Return the softmax of each head, (batch, query, key)."""
        length = x.shape[1]
        unread = ~torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        scores = (q(x) @ k(x).mT for q, k in zip(self.query, self.key, strict=True))
        return [each.masked_fill(unread, -torch.inf).softmax(-1) for each in scores]

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.join(self, self.maps(x), [value(x) for value in self.value]))


def mixed(module: Heads, maps: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    return [weights @ value for weights, value in zip(maps, values, strict=True)]


def concatenated(module: Heads, maps: list[Tensor], values: list[Tensor]) -> Tensor:
    return torch.cat(mixed(module, maps, values), -1)


def interleaved(module: Heads, maps: list[Tensor], values: list[Tensor]) -> Tensor:
    return torch.stack(mixed(module, maps, values), -1).flatten(-2)


def stacked(module: Heads, maps: list[Tensor], values: list[Tensor]) -> Tensor:
    return torch.stack(mixed(module, maps, values), 2).flatten(2)


def stacked_first(module: Heads, maps: list[Tensor], values: list[Tensor]) -> Tensor:
    return torch.stack(mixed(module, maps, values)).permute(1, 2, 0, 3).flatten(2)


def written(module: Heads, maps: list[Tensor], values: list[Tensor]) -> Tensor:
    output = values[0].new_zeros(*values[0].shape[:2], WIDTH)
    for head, each in reversed(list(enumerate(mixed(module, maps, values)))):
        output[..., CHANNELS * head : CHANNELS * (head + 1)] = each
    return output


def of_one_value(module: Heads, maps: list[Tensor], values: list[Tensor]) -> Tensor:
    return torch.cat([weights @ values[0] for weights in maps], -1)


def activated(module: Heads, maps: list[Tensor], values: list[Tensor]) -> Tensor:
    return concatenated(module, maps, [functional.silu(value) for value in values])


def gated(module: Heads, maps: list[Tensor], values: list[Tensor]) -> Tensor:
    return torch.cat([torch.sigmoid(v) * y for v, y in zip(values, mixed(module, maps, values), strict=True)], -1)


def normed(module: Heads, maps: list[Tensor], values: list[Tensor]) -> Tensor:
    return torch.cat([functional.layer_norm(y, y.shape[-1:]) for y in mixed(module, maps, values)], -1)


def looped(module: Heads, maps: list[Tensor], values: list[Tensor]) -> Tensor:
    """Each head computes its queries one by one."""
    rows = ([weights[:, t : t + 1] @ v for t in range(v.shape[1])] for weights, v in zip(maps, values, strict=True))
    return torch.cat([torch.cat(each, 1) for each in rows], -1)


def around(module: Heads, maps: list[Tensor], values: list[Tensor]) -> Tensor:
    return torch.cat(values, -1) + concatenated(module, maps, values)


JOINS = [
    concatenated,
    interleaved,
    stacked,
    stacked_first,
    written,
    of_one_value,
    activated,
    gated,
    normed,
    looped,
    around,
]


def layer(join: Callable[[Heads, list[Tensor], list[Tensor]], Tensor], widths: tuple[int, ...] = (4, 4, 4)) -> Heads:
    torch.manual_seed(0)
    return Heads(join, widths)


@pytest.mark.parametrize("join", JOINS)
def test_heads_whose_outputs_are_different_channels_are_heads_of_one_core(join: Callable[..., Tensor]) -> None:
    module, x = layer(join), draw(2, 7, WIDTH)
    require_complete(op := operator(module, x))
    with torch.no_grad():
        expected = torch.stack(module.maps(x), 1)
    assert relative_error(op.matrix("core", heads=None), expected) < LIMIT
    assert relative_error(op.matrix("core"), expected.mean(1)) < LIMIT


def test_heads_of_different_widths_count_once_each() -> None:
    module, x = layer(concatenated, (4, 2, 5)), draw(2, 7, WIDTH)
    require_complete(op := operator(module, x))
    with torch.no_grad():
        assert relative_error(op.matrix("core", heads=None), torch.stack(module.maps(x), 1)) < LIMIT


@pytest.mark.parametrize("widths", [(4, 4, 4), (4, 2, 5)])
def test_the_vectors_of_a_head_are_what_the_layer_returns_from_that_head_alone(widths: tuple[int, ...]) -> None:
    module, x = layer(concatenated, widths), draw(2, 7, WIDTH)
    op = operator(module, x)
    for head in range(HEADS):
        silent = [value if n == head else torch.zeros_like(value) for n, value in enumerate(unbiased_values(module, x))]
        with torch.no_grad():
            alone = module.join(module, module.maps(x), silent) @ module.out.weight.T
        assert relative_error(HeadContributions.of(op, [head], joint=False).output("exact"), alone) < LIMIT


def unbiased_values(module: Heads, x: Tensor) -> list[Tensor]:
    """Return the values of each head without their biases, which are no part of its vectors."""
    return [x @ value.weight.T for value in module.value]


def differential(module: Heads, maps: list[Tensor], values: list[Tensor]) -> Tensor:
    first, second, third = maps
    pairs = ((first, second), (second, third), (third, first))
    return torch.cat([a @ v - 0.3 * (b @ v) for (a, b), v in zip(pairs, values, strict=True)], -1)


def test_cores_of_the_same_values_add_up_in_each_head() -> None:
    module, x = layer(differential), draw(2, 7, WIDTH)
    require_complete(op := operator(module, x))
    with torch.no_grad():
        maps = torch.stack(module.maps(x), 1)
    assert relative_error(op.matrix("core", heads=None), maps - 0.3 * maps.roll(-1, 1)) < LIMIT


def summed(module: Heads, maps: list[Tensor], values: list[Tensor]) -> Tensor:
    first, *_ = outputs = mixed(module, maps, values)
    return torch.cat([sum(outputs, torch.zeros_like(first)), *[torch.zeros_like(first)] * 2], -1)


def projected(module: Heads, maps: list[Tensor], values: list[Tensor]) -> Tensor:
    outputs = mixed(module, maps, values)
    return sum(y @ module.value[n].weight for n, y in enumerate(outputs[1:])) + outputs[0] @ module.value[2].weight


@pytest.mark.parametrize("join", [summed, projected])
def test_cores_whose_outputs_are_the_same_channels_add_up(join: Callable[..., Tensor]) -> None:
    module, x = layer(join), draw(2, 7, WIDTH)
    require_complete(op := operator(module, x))
    with torch.no_grad():
        expected = torch.stack(module.maps(x)).sum(0)
    assert relative_error(op.matrix("core"), expected) < LIMIT


class Block(nn.Module):
    """A block of attention alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), layer(concatenated)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class Model(nn.Module):
    """A language model whose heads are modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, WIDTH), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_raw_and_rollout_take_the_mean_over_heads_that_are_modules() -> None:
    torch.manual_seed(0)
    model, ids = Model().double().eval(), torch.arange(9)[None] % 5
    maps: list[Tensor] = []
    hooks = [
        block.mixer.register_forward_pre_hook(
            lambda module, inputs: maps.append(torch.stack(module.maps(inputs[0]), 1))
        )
        for block in model.blocks
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    trace = ula.trace(model, ids)
    assert relative_error(ula.explain(trace, method="raw").scores, torch.stack(maps).mean(2)) < LIMIT
    assert relative_error(ula.explain(trace, method="raw", by_head=True).scores, torch.stack(maps)) < LIMIT
    first, second = (torch.eye(9, dtype=torch.float64, device=ids.device) + each.mean(1) for each in maps)
    assert relative_error(ula.explain(trace, method="rollout").scores, second @ first) < LIMIT
