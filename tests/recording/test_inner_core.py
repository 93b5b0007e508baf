"""Loops over tokens: the map between the vectors that enter the loop and those that leave it is the core."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.recording.test_recorded import LIMIT, draw, operator
from unilinattn.operator.stages import WHOLE, Mix, walk
from unilinattn.recording import core_chains, inner_core
from unilinattn.recording.nodes import Node, nodes_in
from unilinattn.testing import relative_error

LENGTH, WIDTH, STATES, HEADS = 40, 6, 3, 2


class Selective(nn.Module):
    """Mamba's block with a loop (Mamba, Algorithm 2), and a convolution that is padded on both sides and cut."""

    def __init__(self, level: float = 0.0, forgets: float = 0.0) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)
        self.x_proj, self.dt_proj = nn.Linear(WIDTH, 1 + 2 * STATES, bias=False), nn.Linear(1, WIDTH)
        self.A_log, self.D = nn.Parameter(torch.randn(WIDTH, STATES)), nn.Parameter(torch.randn(WIDTH))
        self.level = level
        # A rate that is added to those of some channels.
        self.register_buffer("forgets", forgets * (torch.arange(WIDTH) % 3 == 0))

    def factors(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The values, and the logarithms of decays, the keys and the queries of each state."""
        u, _ = self.in_proj(x).chunk(2, -1)
        u = functional.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        dt, b, c = self.x_proj(u).split([1, STATES, STATES], -1)
        dt = functional.softplus(self.dt_proj(dt))
        rate = self.A_log.exp() + self.forgets[:, None]
        return u, -dt[..., None] * rate, dt[..., None] * b[:, :, None], c

    def forward(self, x: Tensor) -> Tensor:
        u, rate, key, query = self.factors(x)
        state = x.new_zeros(len(x), WIDTH, STATES)
        outputs = []
        for t in range(x.shape[1]):
            state = rate[:, t].exp() * state + key[:, t] * u[:, t, :, None]
            outputs.append((state * query[:, t, None]).sum(-1) + self.level)
        y = torch.stack(outputs, 1) + u * self.D
        return self.out_proj(y * functional.silu(self.in_proj(x).chunk(2, -1)[1]))

    def map(self, x: Tensor) -> Tensor:
        """The matrix of each channel, C_i A_i ... A_(j+1) B_j (HMA ACL Eq. 11)."""
        _, rate, key, query = self.factors(x)
        level = rate.cumsum(1)
        between = (level[:, :, None] - level[:, None]).clamp(max=0).exp()
        entries = torch.einsum("bijcn,bjcn,bin->bcij", between, key, query)
        return entries.tril()


class Delta(nn.Module):
    """The delta rule with decays as a loop (Gated DeltaNet, Eq. 10), whose state is written into."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.beta, self.decay, self.gate = nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, WIDTH)
        self.mixes = mixes

    def factors(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (layer(x).unflatten(2, (HEADS, -1)) for layer in (self.q, self.k, self.v))
        return q, functional.normalize(k, dim=-1), v, self.beta(x).sigmoid(), self.decay(x).sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, beta, decay = self.factors(x)
        state = x.new_zeros(*v[:, 0].shape, v.shape[-1])
        y = torch.zeros_like(v)
        for t in range(x.shape[1]):
            state = state * decay[:, t, :, None, None]
            read = torch.einsum("bhvk,bhk->bhv", state, k[:, t])
            step = beta[:, t, :, None] * (v[:, t] - read)
            step = step.flip(-1) + step if self.mixes else step
            state = state + step[..., None] * k[:, t, :, None]
            y[:, t] = torch.einsum("bhvk,bhk->bhv", state, q[:, t])
        gate = functional.silu(self.gate(x)).unflatten(2, (HEADS, -1))
        return self.out((y * gate).flatten(2))

    def map(self, x: Tensor) -> Tensor:
        """The matrix of each channel, equal in a head: the queries read the products of transitions and keys."""
        q, k, _, beta, decay = self.factors(x)
        total = x.new_zeros(len(x), HEADS, x.shape[1], x.shape[1])
        keys = x.new_zeros(len(x), x.shape[1], *k.shape[2:])
        for t in range(x.shape[1]):
            keys = keys * decay[:, t, None, :, None]
            read = torch.einsum("bjhk,bhk->bjh", keys, k[:, t])
            keys = keys - (beta[:, t, None] * read)[..., None] * k[:, t, None]
            keys[:, t] = keys[:, t] + beta[:, t, :, None] * k[:, t]
            total[:, :, t] = torch.einsum("bhk,bjhk->bhj", q[:, t], keys)
        return total.repeat_interleave(WIDTH // HEADS, 1)


class Twice(nn.Module):
    """A gated loop over a multiple of projected values."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.decay, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        decay, value = self.decay(x).sigmoid(), 3 * self.value(x)
        state, outputs = torch.zeros_like(value[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + value[:, t]
            outputs.append(state)
        return self.out(torch.stack(outputs, 1))


LOOPS: dict[str, Callable[[], "Selective | Delta"]] = {"selective": Selective, "delta rule": Delta}


@pytest.mark.parametrize("is_small", [True, False], ids=["in memory", "by rows"])
@pytest.mark.parametrize("name", LOOPS)
def test_the_map_of_a_loop_is_that_of_its_formula(name: str, is_small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner_core, "SMALL", 10**9 * is_small)
    module, x = LOOPS[name](), draw(2, LENGTH, WIDTH)
    op = operator(module, x)
    with torch.no_grad():
        expected = module.map(x)
    assert relative_error(op.matrix(heads=None), expected) < LIMIT
    assert relative_error(op.matrix(), expected.mean(1)) < LIMIT
    rows = torch.tensor([[3, 39], [0, 20]])
    mixer = next(stage.mixer for stage in walk(op.chains["x"]) if isinstance(stage, Mix) and stage.role == "core")
    assert relative_error(mixer.rows(rows)[1, :, 1], expected[1, :, 20]) < LIMIT
    assert relative_error(mixer.diagonal(), expected.diagonal(dim1=-2, dim2=-1)) < LIMIT
    assert relative_error(mixer.tile(slice(2, 9, 3), slice(1, 5), slice(1, 3)), expected[:, 1:3, 2:9:3, 1:5]) < LIMIT


@pytest.mark.parametrize("name", LOOPS)
def test_the_stages_around_a_loop_are_those_of_its_functions(name: str) -> None:
    """They are the derivative of the module with frozen factors, forward and backward."""
    module, x, other = LOOPS[name](), draw(2, LENGTH, WIDTH), draw(2, LENGTH, WIDTH, seed=1)
    op = operator(module, x)
    assert op.reconstruction_error() < LIMIT
    assert relative_error(op.contributions(7).sum(1) + op.bias[:, 7], op.output[:, 7]) < LIMIT
    image, pulled = op.apply(other, bias=False), op.adjoint(x)
    assert float(((image * x).sum() - (other * pulled).sum()).abs()) < LIMIT * float(pulled.norm())
    roles = [stage.role for stage in walk(op.chains["x"])]
    assert WHOLE not in roles and roles.count("core") == 1
    assert ("conv" in roles) == (name == "selective") and ("skip" in roles) == (name == "selective")


def test_constants_in_a_loop_are_a_bias() -> None:
    module, x = Selective(level=0.3), draw(1, LENGTH, WIDTH)
    op = operator(module, x)
    assert op.reconstruction_error() < LIMIT
    with torch.no_grad():
        assert relative_error(op.matrix(heads=None), module.map(x)) < LIMIT
        gate = functional.silu(module.in_proj(x).chunk(2, -1)[1])
        expected = module.out_proj(0.3 * gate)
    bias = op.bias
    module.level = 0.0
    assert relative_error(bias - operator(copy.deepcopy(module), x).bias, expected) < 1e-10


def test_channels_that_forget_all_but_their_last_tokens_have_maps() -> None:
    """Their decays underflow, so that they come from fewer tokens than others, and yet are no tokens."""
    module, x = Selective(forgets=500.0), draw(1, LENGTH, WIDTH)
    op = operator(module, x)
    with torch.no_grad():
        assert relative_error(op.matrix(heads=None), module.map(x)) < LIMIT


def test_a_loop_that_mixes_channels_is_one_stage() -> None:
    op = operator(Delta(mixes=True), draw(2, LENGTH, WIDTH))
    assert [stage.role for stage in op.chains["x"]] == [WHOLE]


def test_stages_with_another_derivative_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong tensor before a core gives another map, and the module is one stage."""
    find = core_chains._node_of

    def other(cut: inner_core.Cut, output: Node) -> Node | None:
        node = find(cut, output)
        while node is not None and node.name not in ("linear", "stack"):
            node = next(nodes_in(node.args), None)
        return node

    monkeypatch.setattr(core_chains, "_node_of", other)
    op = operator(Twice(), draw(2, LENGTH, WIDTH))
    assert [stage.role for stage in op.chains["x"]] == [WHOLE] and op.reconstruction_error() < LIMIT


@pytest.mark.parametrize("mixes", [False, True], ids=["core", "one stage"])
def test_a_copy_of_an_operator_shares_its_graph(mixes: bool) -> None:
    op = operator(Delta(mixes), draw(1, LENGTH, WIDTH))
    copied = copy.deepcopy(op)
    assert torch.equal(copied.output, op.output) and copied.reconstruction_error() < LIMIT


class Model(nn.Module):
    """A stack of two layers."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 9)
        self.blocks = nn.ModuleList(Block(layer()) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), mixer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


@pytest.mark.long
@pytest.mark.parametrize("name", LOOPS)
def test_methods_read_the_map_of_a_loop(name: str) -> None:
    ids = torch.randint(9, (1, 24), generator=torch.Generator().manual_seed(0))
    trace = ula.trace(Model(LOOPS[name]).double().eval(), ids)
    maps = torch.stack([layer.operator.matrix() for layer in trace.layers])
    assert relative_error(ula.explain(trace, method="raw", progress=False).scores, maps) < LIMIT
    for method in ("rollout", "attribution", "latim", "alti", "contribution", "knockout"):
        options = {"target": -1} if method in ("attribution", "knockout") else {}
        assert bool(ula.explain(trace, method=method, progress=False, **options).scores.isfinite().all())
