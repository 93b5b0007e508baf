"""Vision: which method finds a digit on a photograph, for Vision Mamba and ViT (HMA ACL Tables 1, 2, 5, 6, Fig. 2)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from evidence.claims import Claim, Results
from evidence.digits import DIM, GRID, digits, samples
from evidence.rows import number
from evidence.study import Model, Size, Study, View
from evidence.training import HELD_OUT_SEED, SELECTION_SEED, Recipe
from evidence.vision_claims import claims
from evidence.vision_models import logits, patches_of, vision_mamba, vision_transformer
from evidence.vision_picture import picture
from evidence.vision_tables import BASELINES, METHODS, PERTURBED, TABLE_5, TABLE_6, UNDEFINED, VIEWS, all_background
from unilinattn.analysis import ClsBias, cls_bias
from unilinattn.evaluation import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HELD_OUT = 1024
"""Number of held-out images on which the accuracy is measured."""

SEGMENTATION = ("pixel_accuracy", "mean_ap", "mean_iou", "foreground_ap")

MASKINGS = {"black": "zero", "grey": "mean", "background": "reference", "blur": "blur"}
"""Values that replace removed patches, by label: background is the same photograph without the digit."""


class Vision(Study):
    """Digits on photographs."""

    name = "vision"
    title = "Digits on photographs"
    question = "Do maps of image classifiers cover the digit that is classified?"
    source = "HMA (ACL) Tables 1, 2, 5 and 6 and Figure 2"
    text = """
A scan of a digit (scikit-learn, 8 x 8 pixels, enlarged to 40 to 70 % of the side, slightly rotated and sheared) at a
random place on a piece of a photograph (scikit-image: grass, gravel, brick, camera), in grey images of 32 x 32 pixels
and patches of 4 x 4. The mask is True where ink covers more than half of a pixel, so it is known exactly; it holds 9 %
of the pixels. Test images have other scans (the last 397) and the other halves of the photographs.

ViM has width 48, four blocks and four states, with the CLS token in the middle of the patches (`vim`, as published) or
before them (`vim_first`); ViT has width 64 and four layers. The papers' models have 7 to 86 million parameters and
learned from ImageNet. In the first half of the training the photographs grow from black to their brightness. Methods
explain the predicted class at the CLS token. `raw` is the mean over layers, as in the paper; methods "at the best
layer" are scored at the layer that finds most on other images, by the average precision of the foreground.

Rows that ignore the model: `random`; `centre`, the nearness of a patch to the centre of the image; `mask`, the true
mask averaged over each patch, which no map of patches can be expected to beat; and `all background`, which marks
nothing. A map that gives all patches the same score finds nothing, and is replaced by random scores. Perturbations are
measured on half of the images.
"""
    unit = "images"
    caption = (
        "Scores of the patches over the first held-out images, scaled to the largest absolute one of each panel "
        "(negative ones blue), with the outline of the mask. The number is the CLS token's share of the absolute "
        "scores, which the panel leaves out. Below: the absolute mean attention of the CLS token over the scored "
        "images, with a star at the patch beside it in the sequence."
    )
    models: ClassVar[Mapping[str, Model]] = {
        "vim": Model(partial(vision_mamba, "middle"), Recipe(1800, 3e-3, batch=48, through_operators=True)),
        "vim_first": Model(partial(vision_mamba, "first"), Recipe(1800, 3e-3, batch=48, through_operators=True)),
        "vit": Model(vision_transformer, Recipe(4000, 1e-3, batch=48)),
    }
    size = Size(12, 6)
    quick = Size(2, 1)
    views: ClassVar[Sequence[View]] = VIEWS

    def loss(self, host: nn.Module, model: str, seed: int, batch: int) -> Tensor:
        """Return the cross-entropy of the digits."""
        # Models learn to read digits on black, and then to tell them from photographs.
        brightness = DIM * min(1.0, 2 * self.models[model].recipe.progress(seed))
        drawn = digits(batch, seed, "train", brightness=brightness)
        return functional.cross_entropy(logits(host, drawn.pixels), drawn.labels)

    def accuracy(self, host: nn.Module, model: str) -> float:
        """Return the share of right digits."""
        drawn = digits(HELD_OUT, HELD_OUT_SEED, "test")
        with torch.no_grad():
            return float((logits(host, drawn.pixels).argmax(-1) == drawn.labels).double().mean())

    def measure(
        self, hosts: Mapping[str, Callable[[], nn.Module]], seed: int, size: Size, out: Path
    ) -> dict[str, Table]:
        """Score maps of patches by the masks of the digits, and by the model's reaction to removed patches.

        Perturbations are measured on half of the images.
        """
        fewer = Size(max(1, size.scored // 2), size.selection)
        compared = {name: hosts[name] for name in ("vim", "vit")}
        maskings = {
            f"{kind} {label}": (f"{kind}_perturbation", {"masking": masking})
            for kind in ("positive", "negative")
            for label, masking in MASKINGS.items()
        }
        curves = {"auac": "activation_auac", "au_mse": "pruning_au_mse"}
        measured = partial(self._measured, out=out)
        return {
            "methods": measured("methods", hosts, METHODS, SEGMENTATION, size),
            "perturbation": measured("perturbation", compared, PERTURBED, maskings, fewer),
            "activation": measured("activation", compared, PERTURBED, curves, fewer),
            "table5": measured("table5", compared, TABLE_5, SEGMENTATION, size),
            "table6": measured("table6", compared, TABLE_6, SEGMENTATION, size),
            "cls": self._nearness({name: hosts[name] for name in ("vim", "vim_first")}, size),
        }

    def _measured(
        self,
        table: str,
        hosts: Mapping[str, Callable[[], nn.Module]],
        methods: Mapping[str, Any],
        metrics: Any,
        size: Size,
        *,
        out: Path,
    ) -> Table:
        """Evaluate models one by one: the place of the CLS token is part of their samples."""
        rows: list[Mapping[str, Any]] = []
        of_masks = metrics is SEGMENTATION
        for model, load in hosts.items():
            patches = patches_of(model)
            scored = samples(size.scored, HELD_OUT_SEED, patches)
            rows += ula.evaluate(
                {model: load},
                scored,
                {**BASELINES, **{label: of for label, of in methods.items() if (model, label) not in UNDEFINED}},
                metrics,
                selection=samples(size.selection, SELECTION_SEED, patches) if of_masks else None,
                select_by="foreground_ap" if of_masks else None,
                baselines=(),
                out=out / table / model,
                progress=False,
            )
            if of_masks:
                rows += all_background(scored, model)
        return Table(rows)

    def _nearness(self, hosts: Mapping[str, Callable[[], nn.Module]], size: Size) -> Table:
        """Return the rank correlation of the CLS token's mean attention to a patch with the patch's nearness to it."""
        rows = []
        for model, load in hosts.items():
            found = bias(load(), model, size.scored)
            for at, near in enumerate(found.nearness.tolist(), 1):
                rows.append(number(f"layer {at}", "nearness", near, model=model))
        return Table(rows)

    def claims(self, results: Results) -> list[Claim]:
        """Return the claims of HMA on images, and of this library."""
        return claims()

    def picture(self, hosts: Mapping[str, Callable[[], nn.Module]], results: Results) -> "Figure":
        """Draw heat maps of both architectures, and the bias of the CLS token."""
        biases = {name: bias(hosts[name](), name, self.size.scored) for name in ("vim", "vim_first")}
        return picture({name: hosts[name] for name in ("vim", "vit")}, biases)


def bias(host: nn.Module, model: str, count: int) -> ClsBias:
    """Return the mean attention of the CLS token over held-out images."""
    (cls,) = (~patches_of(model)).nonzero().flatten().tolist()
    pixels = digits(count, HELD_OUT_SEED, "test").pixels
    return cls_bias([ula.trace(host, pixels, progress=False)], cls=cls, grid=GRID)


STUDY = Vision()
