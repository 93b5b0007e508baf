"""`attn_lrp`: the relevance of the tokens for a logit along values and along all that the tokens decided."""

import torch

from unilinattn.frozen.live import live
from unilinattn.methods.logit import padding_read, relevance_estimate, with_grid, write_rows
from unilinattn.options import AttnLrp
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.scoring.base import Scoring
from unilinattn.scoring.joint import Axes
from unilinattn.scoring.selection import every_position, layers_from, only_target
from unilinattn.tracing.trace import Target, Trace


def cost(trace: Trace, options: AttnLrp, *, target: Target | None = None) -> Estimate:
    """Return the cost of `attn_lrp`: a run of the model whose graph is kept, and three backward passes a target."""
    return relevance_estimate(trace, options, target, rule="live", maps=2, numbers=1)


@register_method(AttnLrp, cost=cost)
def attn_lrp(trace: Trace, options: AttnLrp, *, target: Target | None = None) -> Attribution:
    """Run `AttnLrp`."""
    layers = layers_from(trace, options.name, 0)
    target = only_target(trace, target, options.scalar)
    targets = every_position(trace) if target is None else [target]
    run = live(trace, None if callable(options.scalar) else targets)
    axes = Axes(trace, (trace.target_stream,), run.streams)
    scoring = Scoring(trace=trace, options=options, target=target, layers=layers, axes=axes)
    scores = scoring.allocate()
    extras = {name: scores.new_zeros(scores.shape, dtype=torch.float64) for name in ("content", "control")}
    extras["logit"] = scores.new_zeros(scores.shape[:-1], dtype=torch.float64)
    for position in progress(targets, options.name):
        relevances = run.relevances(position, options.scalar, options.split)
        rows = torch.zeros(scores.shape[-3], dtype=torch.long, device=scores.device)
        if target is None:
            rows = trace.positions(position).to(scores.device)
        values = {"content": relevances.content, "control": relevances.control, "logit": relevances.value}
        write_rows(scores, rows, relevances.tokens)
        for name, part in values.items():
            write_rows(extras[name], rows, part)
    padding = None if target is None else padding_read(scores, axes.mask())
    warnings = () if padding is None else (padding,)
    return with_grid(scoring.result(scores, scope=None, extras=extras, warnings=warnings), run.grid)
