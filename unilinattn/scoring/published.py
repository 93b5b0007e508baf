"""`variant="published-code"`: the scores of CLS by the code that was released with HMA for Vision Mamba.

The code is vim/xai_utils.py of github.com/AmeenAli/HiddenMambaAttn, with the rows of CLS from `Mamba.forward`
(mamba_ssm/modules/mamba_simple.py) and `compute_middle_attn_vector` (mamba_ssm/ops/selective_scan_interface.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unilinattn.errors import InputError, UncoveredError
from unilinattn.host.logits import Logit
from unilinattn.kernels.row_product.naive import apply_sign
from unilinattn.operator.cost import rows_elements
from unilinattn.operator.selection import REDUCTIONS
from unilinattn.options.bases import PublishedOptions
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate, LayerCost
from unilinattn.scoring.composition import Composition, composition_from
from unilinattn.scoring.maps import map_shape
from unilinattn.scoring.selection import mixing_operator, one_scalar, reads_own_tokens
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

COPIES = 4
"""Tensors of the size of a layer's rows of all heads that `CodeRun.row` holds at once."""


@dataclass(frozen=True)
class CodeRun:
    """A call of a method by the released code.

    Attributes:
        scoring: the call; its layers are those from `start_layer` on.
        cls: the position of CLS in each sequence.
    """

    scoring: Composition[PublishedOptions]
    cls: Int[Tensor, "batch 1"]

    @classmethod
    def of(cls, trace: Trace, options: PublishedOptions, target: Target | None, scalar: Logit = None) -> "CodeRun":
        """Check a call: one target, class logits or another scalar of the whole input, and layers of one stream.

        Raises `InputError` and `UncoveredError` where the code has no meaning.
        """
        method = f"{options.name}: variant='published-code'"
        if not one_scalar(trace, scalar):
            raise InputError(
                f"{method} scores the tokens for CLS, and {trace.model} has no class logits that read one token; take "
                "variant='formula'."
            )
        if target is None:
            raise InputError(f"{method} computes the row of CLS only; give target='cls'.")
        scoring = composition_from(trace, options, target)
        for layer in scoring.layers:
            if not reads_own_tokens(trace, layer):
                raise UncoveredError(
                    f"{method} gives every token the row of CLS, and {layer.name} reads other tokens than it writes; "
                    "take variant='formula', or start_layer= for later layers."
                )
        return cls(scoring, scoring.joint.rows(target))

    def require_cls(self, gradient: Float[Tensor, "batch token out"]) -> None:
        """Raise `InputError` unless the target is the only token that the logit reads after the last layer.

        `gradient`: that of the logit at the output of the last layer.
        """
        read = (gradient != 0).any(-1).to(self.cls.device)
        if bool(read.scatter(1, self.cls, False).any()):
            tokens = [row.nonzero().flatten().tolist() for row in read]
            raise InputError(
                f"{self.scoring.options.name}: variant='published-code' takes the row of CLS, the only token that the "
                f"logit reads. {self.scoring.trace.model} reads the tokens {tokens[0][:4]}"
                f"{' and more' if len(tokens[0]) > 4 else ''} behind its last layer, and the target is "
                f"{self.cls[0].item()}. Give target='cls', or take variant='formula' for a model that pools its tokens."
            )

    def row(self, layer: Layer, *, rescaled: bool) -> Float[Tensor, "batch key"]:
        """Return the row of CLS of a layer's map, reduced over heads, with zero for CLS itself.

        `rescaled`: whether the rows of all heads are rescaled to 0..1 together, before they are reduced.
        """
        options, heads = self.scoring.options, self.scoring.options.heads
        several = None if isinstance(heads, str) else [heads] if isinstance(heads, int) else heads
        rows = mixing_operator(layer).rows(self.cls, scope=options.scope, heads=several).squeeze(-2)
        rows = apply_sign(options.sign, rows.masked_fill(self._is_cls(rows), 0))
        real = _real(layer).unsqueeze(1)
        if rescaled:
            rows = min_max(rows, real, (1, 2))
        return REDUCTIONS[heads if isinstance(heads, str) else "mean"](rows.masked_fill(~real, 0))

    def composed(self, row: Callable[[Layer], Float[Tensor, "batch key"]]) -> Float[Tensor, "batch key"]:
        """Return row CLS of A_n ... A_1 with A = (I + 1 r^T) / (1 + sum_j r_j); r is the sum of the rows of a step.

        A row of the product whose sum is 1 becomes (v + r) / (1 + sum_j r_j) by the next factor, and has the sum 1
        again.
        """
        product = self.scoring.joint.unit_rows(self.cls).squeeze(1)
        for step in reversed(self.scoring.joint.steps):
            added = sum(row(layer).to(product) for layer in step)
            assert isinstance(added, Tensor)
            product = (product + added) / (1 + added.sum(-1, keepdim=True))
        return product

    def result(self, scores: Float[Tensor, "batch key"]) -> Attribution:
        """Return scores as a result; negative ones are set to zero."""
        return self.scoring.result(scores.clamp_min(0).unsqueeze(1), scope=self.scoring.options.scope)

    def _is_cls(self, rows: Float[Tensor, "batch head key"]) -> Bool[Tensor, "batch 1 key"]:
        return (torch.arange(rows.shape[-1], device=rows.device) == self.cls.to(rows.device)).unsqueeze(1)


def token_weights(gradient: Float[Tensor, "batch token out"], layer: Layer) -> Float[Tensor, "batch token"]:
    """Return the maximum over channels of the positive gradient, rescaled to 0..1 over the real tokens."""
    return min_max(gradient.clamp_min(0).amax(-1), _real(layer), (1,))


def min_max(
    values: Float[Tensor, "batch *axes"], real: Bool[Tensor, "batch *#axes"], axes: tuple[int, ...]
) -> Float[Tensor, "batch *axes"]:
    """Return values rescaled to 0..1 over `axes`, of the real tokens only; those that are all equal become 0."""
    low = values.masked_fill(~real, torch.inf).amin(axes, keepdim=True)
    span = values.masked_fill(~real, -torch.inf).amax(axes, keepdim=True) - low
    return ((values - low) / span.masked_fill(span == 0, 1)).masked_fill(~real, 0)


def code_cost(trace: Trace, options: PublishedOptions, target: Target | None, scalar: Logit = None) -> Estimate:
    """Return the cost of the released code: gradients, and a row of all heads of each layer."""
    scoring = CodeRun.of(trace, options, target, scalar).scoring

    def of(layer: Layer) -> int:
        batch, _, keys = map_shape(layer)
        scope = mixing_operator(layer).scoped_map(options.scope)
        rows = rows_elements(scope.chain, batch * keys, scope.groups, 1) + COPIES * batch * scope.heads * keys
        return rows * layer.output.element_size()

    passes = trace.gradient_cost(scalar)
    resident = sum(prod(layer.output.shape) * layer.output.element_size() for layer in trace.layers)
    return scoring.estimate(of, resident=resident, before=[LayerCost("gradients", "forward and backward pass", passes)])


def _real(layer: Layer) -> Bool[Tensor, "batch token"]:
    if layer.mask is None:
        return torch.ones(layer.output.shape[:2], dtype=torch.bool, device=layer.output.device)
    return layer.mask.to(layer.output.device)
