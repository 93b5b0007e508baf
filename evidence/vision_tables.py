"""The rows of the vision study, and its tables on the page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

import unilinattn as ula
from evidence.digits import GRID, PATCH
from evidence.rows import number
from evidence.study import View
from unilinattn.evaluation import Sample
from unilinattn.evaluation.segmentation import overlaps
from unilinattn.evaluation.table import PARTS
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.trace import Trace

Rows = Mapping[str, Any]


@dataclass(frozen=True)
class Explained:
    """A method with options, whose maps separate patches: a constant one, which finds nothing, becomes a random one.

    `attribution` is constant where the gradient at the CLS token is negative in every layer, and a layer of `alti`
    where every other contribution is clipped.
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, trace: Trace, sample: Sample) -> Attribution:
        """Return the scores of a sample."""
        result = ula.explain(trace, method=self.method, target=sample.target, progress=False, **self.options)
        patches = result.scores[..., _valid(sample)]
        flat = patches.amin(-1, keepdim=True) == patches.amax(-1, keepdim=True)
        return replace(result, scores=torch.where(flat, torch.rand_like(result.scores), result.scores))


def random(trace: Trace, sample: Sample) -> Float[Tensor, " key"]:
    """Return random scores, by the seed of the sample."""
    return torch.rand(len(_valid(sample)), dtype=torch.float64)


def centre(trace: Trace, sample: Sample) -> Float[Tensor, " key"]:
    """Return the negative distance of each patch from the centre of the image, in patches."""
    places = [torch.arange(size, dtype=torch.float64) - (size - 1) / 2 for size in GRID]
    rows, columns = torch.meshgrid(*places, indexing="ij")
    return _on_keys(sample, -torch.hypot(rows, columns))


def mask(trace: Trace, sample: Sample) -> Float[Tensor, " key"]:
    """Return the share of each patch that the true mask covers."""
    assert sample.foreground is not None
    return _on_keys(sample, functional.avg_pool2d(sample.foreground.double()[None], PATCH)[0])


def all_background(scored: Sequence[Sample], model: str) -> list[Mapping[str, Any]]:
    """Return rows of the prediction without any foreground, which has no ranking and so no average precision."""
    rows: list[Mapping[str, Any]] = []
    for at, sample in enumerate(scored):
        assert sample.foreground is not None
        truth = sample.foreground[None]
        nothing = torch.zeros_like(truth)
        right = float((truth == nothing).double().mean())
        regions = [(float(shared), float(either)) for shared, either in overlaps(nothing, truth)]
        iou = sum(shared / either for shared, either in regions) / len(regions)
        name = sample.name or str(at)
        pixels = float(truth.numel())
        rows.append(number("all background", "pixel_accuracy", right, pixels, model=model, sample=name))
        rows.append({**number("all background", "mean_iou", iou, model=model, sample=name), PARTS: regions})
    return rows


BASELINES: Rows = {"random": random, "centre": centre, "mask": mask}
"""Rows that ignore the model."""

METHODS: Rows = {
    "raw": Explained("raw", {"layers": "mean"}),
    "raw, best layer": Explained("raw"),
    "rollout": Explained("rollout"),
    "attribution": Explained("attribution"),
    "transformer attribution": Explained("transformer_attribution"),
    "attention grad": Explained("attention_grad"),
    "latim, best layer": Explained("latim"),
    "alti, best layer": Explained("alti"),
    "alti rollout": Explained("alti", {"compose": "rollout"}),
    "logit": Explained("logit"),
    "lrp": Explained("lrp"),
    "gradient": Explained("gradient"),
    "input x gradient": Explained("input_x_gradient"),
    "integrated gradients": Explained("integrated_gradients", {"n_steps": 16}),
}
"""Methods on every model."""

PERTURBED: Rows = {name: METHODS[name] for name in ("raw", "rollout", "attribution", "logit")}
"""Methods whose scores order the removed patches: those of HMA Table 1, and the exact shares."""

TABLE_5: Rows = {
    **{heads: Explained("rollout", {"heads": heads}) for heads in ("mean", "max", "min", "product")},
    **{f"mean, discard {share}": Explained("rollout", {"discard": share}) for share in (0.2, 0.4, 0.6, 0.8)},
}
"""Reductions of the heads of `rollout` (HMA Table 5)."""

UNDEFINED = {("vim", "product")}
"""Model and row without a map: the product over the 96 channels of ViM underflows to zero in float32."""

TABLE_6: Rows = {sign: Explained("attribution", {"sign": sign}) for sign in ("clamp", "keep", "abs")}
"""Treatment of negative scores of `attribution` (HMA Table 6)."""


def _paper(numbers: Mapping[str, Sequence[float]], columns: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
    """Return a paper's percentages by heading and method."""
    return {
        heading: {method: f"{values[at] / 100:.3f}" for method, values in numbers.items() if values[at] == values[at]}
        for at, heading in enumerate(columns)
    }


NONE = float("nan")

HMA_2 = {
    # Pixel accuracy, mAP and mIoU of the Transformer, then of Mamba. In the paper's table "Attribution" of the
    # Transformer is `transformer attribution`.
    "raw": (59.69, 77.25, 36.94, 67.64, 74.88, 45.09),
    "rollout": (66.84, 80.34, 47.85, 71.01, 80.78, 51.51),
    "attribution": (NONE, NONE, NONE, 74.72, 81.70, 54.24),
    "transformer attribution": (79.26, 84.85, 60.63, NONE, NONE, NONE),
    "lrp": (NONE, NONE, NONE, 71.19, 77.04, 49.98),
}
HMA_1 = {
    # Positive, then negative perturbation; the Transformer's attribution is `transformer attribution`.
    "raw": (17.27, 20.69, 34.03, 40.77),
    "rollout": (18.81, 20.60, 41.87, 43.53),
    "attribution": (16.62, NONE, 39.63, NONE),
    "transformer attribution": (NONE, 15.35, NONE, 48.09),
}
HMA_5 = {
    "mean": (71.01, 80.78, 51.51),
    "max": (69.96, 79.41, 48.73),
    "min": (63.02, 66.31, 34.71),
    "product": (74.04, 74.16, 50.46),
    "mean, discard 0.2": (70.23, 80.55, 50.86),
    "mean, discard 0.4": (69.59, 80.57, 50.45),
    "mean, discard 0.6": (70.17, 79.22, 50.66),
    "mean, discard 0.8": (70.23, 78.96, 48.95),
}
HMA_6 = {"clamp": (74.72, 81.70, 54.24), "keep": (68.15, 80.95, 48.71), "abs": (69.82, 81.12, 48.16)}
PAPER = ("paper, pixel accuracy", "paper, mAP", "paper, mIoU")
HEADINGS = {
    "pixel_accuracy": "pixel accuracy",
    "mean_ap": "mAP",
    "mean_iou": "mIoU",
    "foreground_ap": "foreground AP",
}


def _masks(table: str, title: str, model: str, paper: Mapping[str, Sequence[float]], note: str = "") -> View:
    columns = [(model, metric, heading) for metric, heading in HEADINGS.items()]
    return View(table, title, columns, _paper(paper, PAPER) if paper else {}, note)


def _half(numbers: Mapping[str, Sequence[float]], start: int) -> Mapping[str, Sequence[float]]:
    return {method: values[start : start + 3] for method, values in numbers.items()}


def _patches(model: str, name: str, at: int) -> View:
    columns = [
        (model, f"{kind} {masking}", f"{kind}, {masking}")
        for kind in ("positive", "negative")
        for masking in ("black", "grey", "background", "blur")
    ]
    paper = {method: (values[at], values[at + 2]) for method, values in HMA_1.items()}
    note = (
        "Area under the accuracy while 10 to 90 % of the patches are replaced, the most relevant first (positive: a "
        "small area is good) or the least relevant first (negative: a large one is good). A constant map, such as all "
        "background, orders the patches at random."
    )
    title = f"{name}: perturbation, on half of the images"
    return View("perturbation", title, columns, _paper(paper, ("paper, positive", "paper, negative")), note)


VIEWS = (
    _masks("methods", "ViM, CLS in the middle, against the masks", "vim", _half(HMA_2, 3)),
    _masks("methods", "ViM, CLS first, against the masks", "vim_first", {}),
    _masks("methods", "ViT against the masks", "vit", _half(HMA_2, 0)),
    _patches("vim", "ViM", 0),
    _patches("vit", "ViT", 1),
    View(
        "activation",
        "Activation and pruning, black patches, on half of the images",
        [
            (model, metric, f"{name}, {heading}")
            for model, name in (("vim", "ViM"), ("vit", "ViT"))
            for metric, heading in (("auac", "AUAC"), ("au_mse", "AU-MSE"))
        ],
        note="A large AUAC and a small AU-MSE are good.",
    ),
    _masks(
        "table5",
        "ViM: reductions of the heads of `rollout`",
        "vim",
        HMA_5,
        "The heads of ViM are its 96 channels; their product underflows, so that all patches have the score 0.",
    ),
    _masks("table5", "ViT: reductions of the heads of `rollout`", "vit", {}),
    _masks("table6", "ViM: negative scores of `attribution`", "vim", HMA_6),
    _masks("table6", "ViT: negative scores of `attribution`", "vit", {}),
    View(
        "cls",
        "Bias of the CLS token",
        [("vim", "nearness", "ViM, CLS in the middle"), ("vim_first", "nearness", "ViM, CLS first")],
        note="Rank correlation of the mean absolute attention to a patch with its nearness to the CLS token in the "
        "sequence; 1 if every nearer patch has more.",
    ),
)


def _on_keys(sample: Sample, scores: Float[Tensor, "row column"]) -> Float[Tensor, " key"]:
    """Return scores of patches as those of all keys, with zero at the CLS token."""
    valid = _valid(sample)
    keys = torch.zeros(len(valid), dtype=torch.float64)
    keys[valid] = scores.flatten()
    return keys


def _valid(sample: Sample) -> Tensor:
    assert sample.valid is not None
    return sample.valid
