"""Attention written as a loop over queries: its steps are rows of one core, wherever the axis of tokens stands."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.recording.test_recorded import LIMIT, draw, operator, require_complete
from unilinattn.testing import relative_error

WIDTH, HEADS, LENGTH = 12, 3, 6

Loop = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The outputs (batch, token, channel) from queries, keys and values (batch, head, token, channel)."""


class Attention(nn.Module):
    """Causal attention; `loop` makes its outputs."""

    def __init__(self, loop: Loop, around: Callable[[Tensor, Tensor], Tensor] = lambda x, y: y) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.loop, self.around = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), loop, around

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (z.unflatten(2, (HEADS, -1)).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        return q, k, v

    def map(self, x: Tensor) -> Tensor:
        """Return the softmax (batch, head, query, key)."""
        q, k, _ = self.heads(x)
        unread = ~torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        return (q @ k.mT).masked_fill(unread, -torch.inf).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.around(x, self.loop(*self.heads(x))))


def steps(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return the output of each query, (batch, head, channel)."""
    every = []
    for t in range(q.shape[2]):
        weights = torch.einsum("bhd,bhtd->bht", q[:, :, t], k[:, :, : t + 1]).softmax(-1)
        every.append(torch.einsum("bht,bhtd->bhd", weights, v[:, :, : t + 1]))
    return every


def slices(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return the output of each query, (batch, head, 1, channel)."""
    products = ((q[:, :, t : t + 1] @ k[:, :, : t + 1].mT).softmax(-1) @ v[:, :, : t + 1] for t in range(q.shape[2]))
    return list(products)


def stacked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack(steps(q, k, v), 1).flatten(2)


def stacked_flat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([y.flatten(1) for y in steps(q, k, v)], 1)


def stacked_after_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack(steps(q, k, v), 2).transpose(1, 2).flatten(2)


def stacked_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack(steps(q, k, v)).transpose(0, 1).flatten(2)


def stacked_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack(steps(q, k, v), -1).flatten(1, 2).mT


def joined_before_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([y.unsqueeze(1) for y in steps(q, k, v)], 1).flatten(2)


def joined_slices(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat(slices(q, k, v), 2).transpose(1, 2).flatten(2)


def stacked_slices(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack(slices(q, k, v), 2)[:, :, :, 0].transpose(1, 2).flatten(2)


def squeezed_slices(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([y.transpose(1, 2).flatten(2) for y in slices(q, k, v)], 1).squeeze(2)


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    output = torch.zeros_like(q).transpose(1, 2)
    for t, y in enumerate(steps(q, k, v)):
        output[:, t] = y
    return output.flatten(2)


def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    every = enumerate(steps(q, k, v))
    terms = [functional.pad(y.unsqueeze(1), (0, 0, 0, 0, t, q.shape[2] - 1 - t)) for t, y in every]
    return sum(terms[1:], terms[0]).flatten(2)


def head_by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = ([z[:, h : h + 1] for z in (q, k, v)] for h in range(HEADS))
    return torch.cat([torch.stack([y[:, 0] for y in steps(*each)], 1) for each in heads], -1)


def by_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Blocks of queries, stacked (batch, block, query, head, channel)."""
    blocks = []
    for start in range(0, q.shape[2], 2):
        unread = ~torch.ones(2, start + 2, dtype=torch.bool, device=q.device).tril(start)
        scores = q[:, :, start : start + 2] @ k[:, :, : start + 2].mT
        blocks.append((scores.masked_fill(unread, -torch.inf).softmax(-1) @ v[:, :, : start + 2]).transpose(1, 2))
    return torch.stack(blocks, 1).flatten(1, 2).flatten(2)


LOOPS = [
    stacked,
    stacked_flat,
    stacked_after_heads,
    stacked_first,
    stacked_last,
    joined_before_heads,
    joined_slices,
    stacked_slices,
    squeezed_slices,
    written,
    padded,
    head_by_head,
    by_blocks,
]

AROUND: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nothing": lambda x, y: y,
    "a residual": lambda x, y: x + y,
    "a gate": lambda x, y: torch.sigmoid(x) * y,
    "a norm": lambda x, y: functional.layer_norm(y, y.shape[-1:]),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_steps_of_a_loop_over_queries_are_rows_of_one_core(loop: Loop) -> None:
    module, x = Attention(loop), draw(2, LENGTH, WIDTH)
    require_complete(op := operator(module, x))
    with torch.no_grad():
        assert relative_error(op.matrix("core", heads=None), module.map(x)) < LIMIT


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("loop", [stacked, squeezed_slices])
def test_stages_around_the_loop_leave_its_map(loop: Loop, around: str) -> None:
    module, x = Attention(loop, AROUND[around]), draw(2, LENGTH, WIDTH)
    require_complete(op := operator(module, x))
    with torch.no_grad():
        assert relative_error(op.matrix("core"), module.map(x).mean(1)) < LIMIT


@pytest.mark.parametrize("loop", [stacked, by_blocks])
def test_tokens_of_a_layer_that_returns_one_vector_are_tokens(loop: Loop) -> None:
    """The output has one token, the input as many as the loop."""
    module, x = Attention(lambda q, k, v: loop(q, k, v).mean(1, keepdim=True)), draw(2, LENGTH, WIDTH)
    assert (op := operator(module, x)).reconstruction_error() < LIMIT
    with torch.no_grad():
        assert relative_error(op.matrix("core"), module.map(x).mean((1, 2))[:, None]) < LIMIT


class Pool(nn.Module):
    """One learned query that reads all tokens, head by head."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.value, self.axis = nn.Parameter(torch.randn(HEADS, WIDTH)), nn.Linear(WIDTH, WIDTH), axis

    def forward(self, x: Tensor) -> Tensor:
        values = self.value(x).chunk(HEADS, -1)
        heads = [(query @ x.mT).softmax(-1)[:, None] @ v for query, v in zip(self.query, values, strict=True)]
        return torch.stack(heads, self.axis).reshape(len(x), 1, WIDTH)


@pytest.mark.parametrize("axis", [1, 2])
def test_heads_of_one_query_are_heads(axis: int) -> None:
    module, x = Pool(axis), draw(2, LENGTH, WIDTH)
    assert (op := operator(module, x)).reconstruction_error() < LIMIT
    with torch.no_grad():
        expected = (module.query @ x.mT).softmax(-1)
    assert relative_error(op.matrix("core"), expected.mean(1, keepdim=True)) < LIMIT


class Model(nn.Module):
    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.mixer, self.embed, self.head = Attention(loop), nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.mixer(x))


@pytest.mark.parametrize("loop", [stacked, squeezed_slices, stacked_slices])
def test_raw_and_rollout_of_a_loop_read_no_later_token(loop: Loop) -> None:
    model, ids = Model(loop).double().eval(), torch.arange(LENGTH)[None] % 5
    with torch.no_grad():
        expected = model.mixer.map(model.embed(ids)).mean(1)
    trace = ula.trace(model, ids, progress=False)
    assert relative_error(ula.explain(trace, method="raw", progress=False).scores[0], expected) < LIMIT
    scores = ula.explain(trace, method="rollout", progress=False).scores
    assert relative_error(scores, expected + torch.eye(LENGTH, dtype=torch.float64)) < LIMIT
