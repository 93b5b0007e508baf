"""The rows of the vision study, and its tables on the page."""

from collections.abc import Mapping, Sequence

from evidence.study import View
from evidence.vision_maps import Explained
from evidence.vision_models import CONTROLS
from unilinattn.evaluation.masking import Masking

Rows = dict[str, Explained]

CODE = "published code"
"""The end of the label of a row by the code that was released with HMA."""

VIMS = ("vim", "vim_first")
"""The models that the released code is for."""

NAMES = {"vim": "ViM, CLS in the middle", "vim_first": "ViM, CLS first", "vit": "ViT"}


def coded(label: str) -> str:
    """Return the label of a row by the released code."""
    return f"{label}, {CODE}"


def by_code(rows: Rows) -> Rows:
    """Return rows by the released code."""
    return {
        coded(label): Explained(row.method, {**row.options, "variant": "published-code"}) for label, row in rows.items()
    }


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
    "lrp, gamma 0.25": Explained("lrp", {"gamma": 0.25}),
    "gradient": Explained("gradient"),
    "input x gradient": Explained("input_x_gradient"),
    "integrated gradients": Explained("integrated_gradients", {"n_steps": 16}),
}
"""Methods on every model."""

OF_CODE: Rows = by_code({name: Explained(name) for name in ("raw", "rollout", "attribution")})
"""Methods by the code that was released with HMA, on ViM."""

PERTURBED: Rows = {name: METHODS[name] for name in ("raw", "rollout", "attribution", "logit")}
"""Methods whose scores order the removed patches: those of HMA Table 1, and the exact shares."""

CONTROLLED: Rows = {name: METHODS[name] for name in ("raw", "rollout", "attribution", "logit", "lrp")}
"""Methods that explain the controls, models without what the trained ones have learned."""

HEADS: Rows = {heads: Explained("rollout", {"heads": heads}) for heads in ("mean", "max", "min", "geometric-mean")}

TABLE_5: Rows = {
    **HEADS,
    **{f"mean, discard {share}": Explained("rollout", {"discard": share}) for share in (0.2, 0.4, 0.6, 0.8)},
}
"""Reductions of the heads of `rollout` (HMA Table 5)."""

TABLE_6: Rows = {sign: Explained("attribution", {"sign": sign}) for sign in ("clamp", "keep", "abs")}
"""Treatment of negative scores of `attribution` (HMA Table 6)."""

TABLE_9: Rows = {
    "rollout, max": HEADS["max"],
    "rollout, min": HEADS["min"],
    "attribution, keep": TABLE_6["keep"],
}
"""Further rows of HMA Table 9."""


def _paper(numbers: Mapping[str, Sequence[float]], columns: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
    """Return a paper's percentages by heading and method."""
    return {
        heading: {method: f"{values[at] / 100:.3f}" for method, values in numbers.items() if values[at] == values[at]}
        for at, heading in enumerate(columns)
    }


NONE = float("nan")

MASKINGS: Mapping[str, Masking] = {"black": "zero", "background": "reference", "blur": "blur"}
"""Values that replace removed patches, by label: background is the same photograph without the digit."""

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
    "geometric-mean": (74.04, 74.16, 50.46),
    "mean, discard 0.2": (70.23, 80.55, 50.86),
    "mean, discard 0.4": (69.59, 80.57, 50.45),
    "mean, discard 0.6": (70.17, 79.22, 50.66),
    "mean, discard 0.8": (70.23, 78.96, 48.95),
}
HMA_9 = {
    # AUAC and AU-MSE of a language model, times 100.
    "attribution": (91.5, 176.5),
    "rollout": (88.13, 210.2),
    "rollout, max": (84.20, 189.9),
    "rollout, min": (76.11, 234.4),
    "attribution, keep": (75.64, 242.1),
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
        (model, f"{kind} {masking}", f"{kind}, {masking}") for kind in ("positive", "negative") for masking in MASKINGS
    ]
    paper = {method: (values[at], values[at + 2]) for method, values in HMA_1.items()}
    note = (
        "Area under the accuracy while 10 to 90 % of the patches are replaced, the most relevant first (positive: a "
        "small area is good) or the least relevant first (negative: a large one is good). A constant map orders the "
        "patches at random. The paper replaces patches by black ones."
    )
    title = f"{name}: perturbation"
    return View("perturbation", title, columns, _paper(paper, ("paper, positive", "paper, negative")), note)


def _controls(ending: str) -> View:
    columns = [(f"{model}, {ending}", "foreground_ap", f"{NAMES[model]}, foreground AP") for model in ("vim", "vit")]
    return View("controls", f"Models with {ending}", columns)


VIEWS = (
    _masks("methods", "ViM, CLS in the middle, against the masks", "vim", _half(HMA_2, 3)),
    _masks("methods", "ViM, CLS first, against the masks", "vim_first", {}),
    _masks("methods", "ViT against the masks", "vit", _half(HMA_2, 0)),
    _patches("vim", "ViM", 0),
    _patches("vit", "ViT", 1),
    View(
        "activation",
        "Activation and pruning, black patches",
        [
            (model, metric, f"{name}, {heading}")
            for model, name in (("vim", "ViM"), ("vit", "ViT"))
            for metric, heading in (("auac", "AUAC"), ("au_mse", "AU-MSE"))
        ],
        _paper(HMA_9, ("paper, AUAC", "paper, AU-MSE")),
        note="A large AUAC and a small AU-MSE are good. The paper's numbers (Table 9) are those of a Mamba of 1.3 "
        "billion parameters on ARC-Easy.",
    ),
    _masks(
        "table5",
        "ViM: reductions of the heads of `rollout`",
        "vim",
        HMA_5,
        "The heads of ViM are its 96 channels. Their product underflows; here its root, the geometric mean.",
    ),
    _masks("table5", "ViT: reductions of the heads of `rollout`", "vit", {}),
    _masks("table6", "ViM: negative scores of `attribution`", "vim", HMA_6),
    _masks("table6", "ViT: negative scores of `attribution`", "vit", {}),
    *map(_controls, CONTROLS),
    View(
        "smoothing",
        "Cosine similarity of two patches in the residual stream",
        [(model, "cosine", name) for model, name in NAMES.items()],
        note="Mean over all pairs of patches (HMA arXiv Eq. 24).",
    ),
    View(
        "cls",
        "Bias of the CLS token",
        [(model, "nearness", NAMES[model]) for model in VIMS],
        note="Rank correlation of the mean absolute attention to a patch with its nearness to the CLS token in the "
        "sequence; 1 if every nearer patch has more.",
    ),
)
