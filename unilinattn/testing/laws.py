"""Laws of every operator, for any architecture; each raises `LawViolation` with its name."""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unilinattn.call.exactness import relative_error, tolerance
from unilinattn.errors import UncoveredError
from unilinattn.operator.operator import MixerOperator
from unilinattn.operator.scopes import has_core, scoped
from unilinattn.operator.selection import PRODUCTS, REDUCTIONS
from unilinattn.operator.stages import Chain, Mix, Scale, channel_groups, run, walk
from unilinattn.testing.checks import (
    fresh,
    real_tokens,
    require,
    require_close,
    require_identity,
    require_unmoved,
    variant,
    without_matrices,
)
from unilinattn.testing.dense import dense_sum
from unilinattn.testing.peak import peak_of

MATRIX_SCOPES = ("core", "mixer", "unified")


def reconstruction(op: MixerOperator, limit: float) -> None:
    """Check op(x) = y over real tokens, with the host's input x and output y."""
    law = "reconstruction"
    got, expected = real_tokens(op.mask, op.apply(op.inputs)), real_tokens(op.mask, op.output)
    what = "the operator on the host's input against the host's output" + _whereabouts(op, got, expected, limit)
    require_close(law, got, expected, limit, what)
    error, reported = relative_error(got, expected), op.reconstruction_error()
    agrees = abs(reported - error) <= 0.1 * error + torch.finfo(op.output.dtype).eps
    require(law, agrees, f"reconstruction_error() says {reported:.1e}, the error is {error:.1e}.")


def completeness(op: MixerOperator, limit: float) -> None:
    """Check that the contributions and the bias sum to y at sampled rows."""
    rows = _sampled(op)
    shares = sum(op.contributions(rows, port=port).sum(2) for port in op.ports)
    total, expected = real_tokens(op.mask, op.bias + _placed(op, shares, rows)), real_tokens(op.mask, op.output)
    what = f"contributions and bias at rows {rows} against the host's output"
    require_close("completeness", total[:, rows], expected[:, rows], limit, what)


def adjoint(op: MixerOperator, limit: float) -> None:
    """Check <A x, g> = <x, A* g> at every port."""
    grad = fresh(op.output, 20)
    for port, x in op.inputs.items():
        inputs = {name: torch.zeros_like(other) for name, other in op.inputs.items()} | {port: fresh(x, 21)}
        passed = op.adjoint(grad, port=port)
        require("adjoint", passed.shape == x.shape, f"adjoint(g) has shape {tuple(passed.shape)}.")
        mixed = op.apply(inputs, bias=False)
        require_identity(mixed, grad, inputs[port], passed, limit, f"<A x, g> against <x, A* g> at port {port!r}")


def linearity(op: MixerOperator, limit: float) -> None:
    """Check that the operator is affine: linear without the bias, and shifted by exactly `bias`."""
    first = {port: fresh(x, 22) for port, x in op.inputs.items()}
    second = {port: fresh(x, 23) for port, x in op.inputs.items()}
    both = {port: 2 * first[port] - 3 * second[port] for port in op.ports}
    linear = 2 * op.apply(first, bias=False) - 3 * op.apply(second, bias=False)
    require_close("linearity", op.apply(both, bias=False), linear, limit, "A(2x - 3y) against 2 Ax - 3 Ay")
    affine = op.apply(first, bias=False) + op.bias
    require_close("linearity", op.apply(first), affine, limit, "A x + b with the bias against without it plus `bias`")


def dense_composition(op: MixerOperator, limit: float) -> None:
    """Check the operator, on a fresh input, against the product of its stages as dense matrices."""
    inputs = {port: fresh(x, 24) for port, x in op.inputs.items()}
    expected = dense_sum(op.chains, inputs)
    require_close("dense", op.apply(inputs), expected, limit, "a fresh input against the product of dense stages")


def contributions(op: MixerOperator, limit: float) -> None:
    """Check contributions(i)[j], on a fresh input, against the operator applied to token j only, at output i."""
    rows = _sampled(op)
    new = variant(op, inputs={port: fresh(x, 25) for port, x in op.inputs.items()})
    for port, x in new.inputs.items():
        shares = new.contributions(rows, port=port)
        others = {name: torch.zeros_like(other) for name, other in new.inputs.items()}
        scale = new.apply({**others, port: x}, bias=False)[:, rows].flatten(1).norm(dim=1)
        for token in sorted({0, x.shape[1] // 2, x.shape[1] - 1}):
            alone = torch.zeros_like(x)
            alone[:, token] = x[:, token]
            sent = op.apply({**others, port: alone}, bias=False)[:, rows]
            what = f"contributions({rows})[:, :, {token}] against the operator on token {token} alone"
            require_close("contributions", shares[:, :, token], sent, limit, what, scale=scale)
        row = new.contributions(rows[-1], port=port)
        require_close("contributions", row, shares[:, -1], limit, "one row against several", scale=scale)


def scopes(op: MixerOperator, limit: float) -> None:
    """Check each scope's matrix against its stages run on one-hot tokens, and its rows and heads against the matrix.

    If only the core stands between the projections, as in plain softmax attention, core, mixer and unified must be the
    same matrix; a skip may change only the diagonal.
    """
    for port in (port for port, chain in op.chains.items() if has_core(chain)):
        matrices: dict[str, Tensor] = {}
        cuts: dict[str, Chain] = {}
        for scope in MATRIX_SCOPES:
            cuts[scope], channels = scoped(op.chains[port], scope, op.inputs[port].shape[2])
            groups = channel_groups(cuts[scope])
            if groups is None:
                require("scopes", _refuses(op, scope, port), f"{scope} mixes channels, yet a matrix is returned.")
                continue
            whole = op.matrix(scope, heads=None, port=port)
            columns = _columns_of(op, cuts[scope], groups, port)
            repeat = channels // groups if scope == "unified" else 1
            expected = columns.repeat_interleave(repeat, dim=1)
            require_close("scopes", whole, expected, limit, f"{scope}: the matrix against one-hot tokens run forward")
            _require_views(op, scope, port, whole, limit)
            matrices[scope] = whole
        _require_agreement(matrices, cuts, limit)


def bias(op: MixerOperator, limit: float) -> None:
    """Check the bias against the stages' output for a zero input, and its independence of the recorded x and y.

    A bias y - T x would make every operator look exact; another y and another x expose it.
    """
    recorded = op.bias
    for name, other in {
        "output": variant(op, output=op.output + fresh(op.output, 26)),
        "input": variant(op, inputs={port: x + fresh(x, 27) for port, x in op.inputs.items()}),
    }.items():
        require("bias", torch.equal(other.bias, recorded), f"it changes with the recorded {name} of the host.")
    zeros = {port: torch.zeros_like(x) for port, x in op.inputs.items()}
    expected = dense_sum(op.chains, zeros)
    scale = op.output.flatten(1).norm(dim=1)
    require_close("bias", recorded, expected, limit, "the bias against the stages on a zero input", scale=scale)


def causality(op: MixerOperator, limit: float) -> None:
    """Check that an operator of causal mixers is causal: bit for bit, or up to rounding by a Fourier transform."""
    mixing = [stage for chain in op.chains.values() for stage in walk(chain) if isinstance(stage, Mix)]
    if not all(stage.mixer.causal for stage in mixing):
        return
    rows = _sampled(op)
    for port, x in op.inputs.items():
        shares = op.contributions(rows, port=port)
        future = torch.arange(x.shape[1], device=x.device) > torch.tensor(rows, device=x.device)[:, None]
        ran = peak_of(lambda: op.contributions(rows, port=port))  # noqa: B023  called at once
        allowed = limit * float(shares.abs().max()) if ran.through_frequencies else 0.0
        leak = float(shares[:, future].abs().max()) if bool(future.any()) else 0.0
        require("causality", leak <= allowed, f"contributions at rows {rows} of future tokens reach {leak:.1e}.")
        for cut in {1, x.shape[1] // 2} - {x.shape[1]}:
            changed = torch.cat([x[:, :cut], fresh(x, 28)[:, cut:]], dim=1)

            def earlier(v: Tensor, port: str = port, cut: int = cut) -> Tensor:
                return op.apply({**op.inputs, port: v})[:, :cut]

            require_unmoved(earlier, x, changed, limit, "apply: tokens later")


def matrix_free_passes(op: MixerOperator, limit: float) -> None:
    """Check that `apply`, `adjoint`, `rows` and `contributions` fill no mixer's matrix."""
    for call in operator_passes(without_matrices(op, "matrix-free")).values():
        call()


def repeatability(op: MixerOperator, limit: float) -> None:
    """Check that two calls of the operator return the same bits."""
    for name, call in {**operator_passes(op), "bias": lambda: op.bias}.items():
        require("repeatability", torch.equal(call(), call()), f"{name} differs from one call to the next.")


def precision(op: MixerOperator, limit: float) -> None:
    """Check that all tensors of an operator have one dtype, float32 or float64, for any dtype of the host.

    Inside a mixer the logarithms of weights may be float64, because their differences cancel; its matrix may not.
    """
    dtype = op.output.dtype
    require("precision", dtype in (torch.float32, torch.float64), f"the operator computes in {dtype}.")

    def require_dtype(what: str, got: torch.dtype, *others: torch.dtype) -> None:
        require("precision", got in (dtype, *others), f"{what} is {got}, not {dtype}.")

    for port, chain in op.chains.items():
        require_dtype(f"port {port!r}", op.inputs[port].dtype)
        for stage in walk(chain):
            mixer = stage.mixer if isinstance(stage, Mix) else None
            if mixer is not None:
                require_dtype(f"{type(mixer).__name__}'s matrix", mixer.diagonal().dtype.to_real())
            if isinstance(stage, Scale):
                require_dtype(f"{stage.role}: Scale.scale", stage.scale.dtype.to_real())
            for holder in (stage,) if mixer is None else (stage, mixer):
                for name, value in vars(holder).items():
                    if isinstance(value, Tensor) and value.is_floating_point():
                        where = f"{stage.role}: {type(holder).__name__}.{name.lstrip('_')}"
                        require_dtype(where, value.dtype, *([torch.float64] if holder is mixer else []))


OPERATOR_LAWS: Mapping[str, Callable[[MixerOperator, float], None]] = {
    "adjoint": adjoint,
    "linearity": linearity,
    "dense": dense_composition,
    "contributions": contributions,
    "scopes": scopes,
    "bias": bias,
    "causality": causality,
    "matrix-free": matrix_free_passes,
    "repeatability": repeatability,
    "precision": precision,
}
"""Laws of an operator without its host, by name, checked to the tolerance `law`."""

HOST_LAWS: Mapping[str, Callable[[MixerOperator, float], None]] = {
    "reconstruction": reconstruction,
    "completeness": completeness,
}
"""Laws of an operator and the host's output, by name, checked to the tolerance `reconstruction`."""


def check_operator(op: MixerOperator) -> None:
    """Check an operator against every law, to the tolerances of its dtype.

    Raises `LawViolation` at the first law that does not hold.
    """
    for law in HOST_LAWS.values():
        law(op, tolerance("reconstruction", op.output.dtype))
    for law in OPERATOR_LAWS.values():
        law(op, tolerance("law", op.output.dtype))


def padding(op: MixerOperator, real: Bool[Tensor, "batch key"], limit: float) -> None:
    """Check that padded tokens contribute nothing to real ones, for a host that masks them."""
    for port, x in op.inputs.items():
        if x.shape[:2] != real.shape:
            continue
        shares = op.contributions(range(op.output.shape[1]), port=port)
        leaked = shares * (real[:, :, None] & ~real[:, None, :])[..., None]
        scale = shares.flatten(1).norm(dim=1)
        what = "contributions of padded tokens to real ones, which are kept out by the host"
        require_close("padding", leaked, torch.zeros_like(leaked), limit, what, scale=scale)


def recurrence(op: MixerOperator, frozen: Callable[[Tensor], Tensor], limit: float) -> None:
    """Check the operator, on a fresh input, against a recurrence frozen on the recorded input."""
    x = fresh(op.inputs[op.ports[0]], 29)
    what = "a fresh input against the frozen recurrence, token by token"
    require_close("recurrence", real_tokens(op.mask, op.apply(x)), real_tokens(op.mask, frozen(x)), limit, what)


def operator_passes(op: MixerOperator) -> dict[str, Callable[[], Tensor]]:
    """Return the passes that are linear in time if the mixers are, as calls on fresh inputs, by name."""
    inputs, grad, port = {p: fresh(x, 30) for p, x in op.inputs.items()}, fresh(op.output, 31), op.ports[0]
    last = op.output.shape[1] - 1
    return {
        "apply": lambda: op.apply(inputs),
        "adjoint": lambda: op.adjoint(grad, port=port),
        "rows": lambda: op.rows(last, scope="core", port=port),
        "contributions": lambda: op.contributions(last, port=port),
    }


def _require_views(op: MixerOperator, scope: str, port: str, whole: Tensor, limit: float) -> None:
    """Check rows, head selections and reductions of a scope against its matrix with all heads."""
    total, rows = whole.shape[1], _sampled(op)
    scale = whole.flatten(1).norm(dim=1) * whole.shape[2] ** 0.5
    require("scopes", op.num_heads(scope, port=port) == total, f"{scope}: num_heads is not the matrix's axis.")
    views: dict[str, tuple[Tensor, Tensor]] = {
        "rows": (op.rows(rows, scope=scope, heads=None, port=port), whole[:, :, rows]),
        "a row": (op.rows(-1, scope=scope, heads=None, port=port), whole[:, :, -1]),
        "the last head": (op.matrix(scope, heads=-1, port=port), whole[:, -1]),
        "a slice of heads": (op.matrix(scope, heads=slice(0, 1), port=port), whole[:, :1]),
        "chosen heads": (op.matrix(scope, heads=[total - 1, 0], port=port), whole[:, [total - 1, 0]]),
    }
    weights = fresh(whole[:, 0, :, :2].mT, 32)
    views["left_multiply"] = (op.left_multiply(weights, scope=scope, port=port), weights @ whole.mean(1))
    for name, reduce in REDUCTIONS.items():
        if name not in PRODUCTS:
            # The type checker does not know that `name` is an accepted reduction.
            views[name] = (op.matrix(scope, heads=name, port=port), reduce(whole))  # type: ignore[arg-type]
    for name, (got, expected) in views.items():
        require_close("scopes", got, expected, limit, f"{scope}: {name} against the matrix", scale=scale)
    for name in PRODUCTS:
        # The type checker does not know that `name` is an accepted reduction.
        got, product = op.matrix(scope, heads=name, port=port), REDUCTIONS[name](whole)  # type: ignore[arg-type]
        # A product over many channels spans hundreds of orders of magnitude, so each entry has a separate limit.
        far = (got - product).abs() > 1e3 * total * limit * product.abs() + torch.finfo(product.dtype).tiny
        require("scopes", not bool(far.any()), f"{scope}: the {name} over heads differs from the matrix's.")


def _require_agreement(matrices: Mapping[str, Tensor], cuts: Mapping[str, Chain], limit: float) -> None:
    if "core" not in matrices:
        return
    core, lone = matrices["core"], len(cuts["core"]) == 1 and isinstance(cuts["core"][0], Mix)
    if lone:
        stage = cuts["core"][0]
        assert isinstance(stage, Mix)
        what = "core against the mixer's own matrix"
        require_close("scopes", core, stage.mixer.materialize().real, limit, what)
    for scope in ("mixer", "unified"):
        if scope in matrices and lone and len(cuts[scope]) == 1 and isinstance(cuts[scope][0], Mix):
            expected = core.repeat_interleave(matrices[scope].shape[1] // core.shape[1], dim=1)
            require_close(
                "scopes", matrices[scope], expected, limit, f"{scope} against core, with nothing else between"
            )
    if "mixer" in matrices and lone:
        extra = matrices["mixer"] - core.repeat_interleave(matrices["mixer"].shape[1] // core.shape[1], dim=1)
        off = extra.triu(1) + extra.tril(-1)
        scale = core.flatten(1).norm(dim=1)
        require_close("scopes", off, torch.zeros_like(off), limit, "mixer minus core beside the diagonal", scale=scale)


def _refuses(op: MixerOperator, scope: str, port: str) -> bool:
    try:
        op.matrix(scope, port=port)
    except UncoveredError:
        return True
    return False


def _columns_of(op: MixerOperator, chain: Chain, groups: int, port: str) -> Float[Tensor, "batch head query key"]:
    """Return a scope's matrix by running its stages on the unit vector of every token, without the adjoint.

    The matrix of complex modes is the real part.
    """
    x = op.inputs[port]
    batch, keys = x.shape[:2]
    ones = torch.eye(keys, dtype=op.output.dtype, device=x.device)[None, :, None, :].expand(batch, -1, groups, -1)
    return run(chain, ones, bias=False).real.permute(0, 2, 1, 3)


def _whereabouts(op: MixerOperator, got: Tensor, expected: Tensor, limit: float) -> str:
    """Describe the first token with an error in a causal layer; no other token reaches token 0."""
    mixers = [stage.mixer for chain in op.chains.values() for stage in walk(chain) if isinstance(stage, Mix)]
    if op.mask is not None or got.shape != expected.shape or not all(mixer.causal for mixer in mixers):
        return ""
    # The output of a single token may be small, so the factor 100 excludes its rounding.
    off = ((got - expected).norm(dim=2) > 100 * limit * expected.norm(dim=2)).any(0).nonzero()
    if not len(off):
        return ""
    if off[0] == 0:
        return (
            ", off at the first token already (look at projections, biases, gates, norms, and what a token weighs in "
            "its own output)"
        )
    return (
        f", right up to token {int(off[0]) - 1} and off from token {int(off[0])} on (look at what a token sends to "
        "later ones: decay, state, convolution)"
    )


def _sampled(op: MixerOperator) -> list[int]:
    length = op.output.shape[1]
    return sorted({0, min(1, length - 1), length // 3, length // 2, length - 1})


def _placed(op: MixerOperator, shares: Tensor | int, rows: list[int]) -> Tensor:
    placed = torch.zeros_like(op.output)
    placed[:, rows] = placed[:, rows] + shares
    return placed
