"""Vision: which method finds a digit on a photograph, for Vision Mamba and ViT (HMA ACL Tables 1, 2, 5, 6, 9)."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from evidence.claims import Claim, Results
from evidence.digits import DIM, GRID, digits, samples
from evidence.rows import number
from evidence.study import SEEDS, Model, Size, Study, View
from evidence.training import HELD_OUT_SEED, Recipe
from evidence.vision_claims import claims
from evidence.vision_maps import (
    Images,
    Row,
    background_rows,
    baselines,
    change_rows,
    mask_rows,
    method_maps,
    of_others,
    traced,
)
from evidence.vision_models import controls, logits, patches_of, vision_mamba, vision_transformer
from evidence.vision_picture import picture
from evidence.vision_tables import (
    CONTROLLED,
    HEADS,
    MASKINGS,
    METHODS,
    OF_CODE,
    PERTURBED,
    TABLE_5,
    TABLE_6,
    TABLE_9,
    VIEWS,
    VIMS,
    by_code,
)
from unilinattn.analysis import ClsBias, cls_bias, oversmoothing
from unilinattn.evaluation import Table
from unilinattn.evaluation.masking import Masking
from unilinattn.evaluation.processes import Processes
from unilinattn.evaluation.store import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HELD_OUT = 1024
"""Number of held-out images on which the accuracy is measured."""

SEEDS_OF_IMAGES = 1000
"""Distance of the seeds of the images of two seeds of models."""

CHANGES: Mapping[str, tuple[Masking, str]] = {
    f"{kind} {label}": (masking, kind) for label, masking in MASKINGS.items() for kind in ("positive", "negative")
}
"""The masking and the curve of each metric of perturbation."""

BLACK: Mapping[str, tuple[Masking, str]] = {metric: of for metric, of in CHANGES.items() if metric.endswith("black")}
"""The metrics of the paper."""

CURVES: Mapping[str, tuple[Masking, str]] = {"auac": ("zero", "activation"), "au_mse": ("zero", "pruning")}
"""The masking and the curve of each metric of activation and pruning."""


class Vision(Study):
    """Digits on photographs."""

    name = "vision"
    title = "Digits on photographs"
    question = "Do maps of image classifiers cover the digit that is classified?"
    source = "HMA (ACL) Tables 1, 2, 5, 6 and 9 and Figure 2, and HMA (arXiv) Figure 6"
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

Each seed has its test images, and others on which layers are chosen. Rows that ignore the model: `random`; `centre`,
the nearness of a patch to the centre of the image; `mask`, the true mask averaged over each patch, which no map of
patches can be expected to beat; and `all background`, which marks nothing. A map that gives all patches the same score
finds nothing, and is replaced by random scores. In rows "another image" a method explains the next image, and its map
is scored on this one: a method that does as well by it has found where digits are, or how the model is wired, and not
this digit. Controls are models with random weights, and trained ones whose last mixer has random weights.

Rows "published code" are `variant="published-code"`: the code that was released with HMA, which differs from the
printed equations in ways that [the pages](methods/attribution.md#the-released-code) of the methods list. It starts at
15/24 of the depth, here at the third of four layers.
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
    size = Size(67, 24)
    quick = Size(4, 2)
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

        The parts of the work are spread over the processes, and stored in `out`.
        """
        parts = (self._masks, self._changes, self._curves, self._ablations, self._controls)
        # Maps of one model and its images are computed once.
        work = {
            f"{model}{part.__name__}": partial(part, model, load if part == self._controls else cached, seed, size)
            for model, load in hosts.items()
            for cached in (cache(load),)
            for part in (parts[:1] if model == "vim_first" else parts)
        }
        store = Store(out, configuration(size, seed))

        def run(keys: Sequence[str]) -> dict[str, Any]:
            done = {}
            for key in keys:
                # In the form that the store returns, so that a stored number equals a computed one.
                done[key] = json.loads(json.dumps(work[key]()))
                store.write(key, done[key])
            return done

        tables: dict[str, list[Row]] = {}
        for rows_by_table in Processes().spread(list(work), store.read, run).values():
            for name, rows in rows_by_table.items():
                tables.setdefault(name, []).extend(rows)
        return {name: Table(rows) for name, rows in tables.items()}

    def _masks(self, model: str, load: Callable[[], nn.Module], seed: int, size: Size) -> dict[str, list[Row]]:
        """Return all methods against the masks, the similarity of patches and the bias of the CLS token."""
        host, (images, selection) = load(), drawn(model, seed, size)
        maps, layers = method_maps(host, images, METHODS | (OF_CODE if model in VIMS else {}), selection)
        every = {**baselines(images, seed), **maps, **of_others(maps)}
        rows = {
            "methods": [*mask_rows(model, images, every, layers), *background_rows(model, images)],
            "smoothing": smoothing_rows(model, host, images),
        }
        if model in VIMS:
            nearness = bias(host, images).nearness.tolist()
            rows["cls"] = [number(f"layer {at}", "nearness", near, model=model) for at, near in enumerate(nearness, 1)]
        return rows

    def _changes(self, model: str, load: Callable[[], nn.Module], seed: int, size: Size) -> dict[str, list[Row]]:
        """Return the areas of perturbation curves; maps of other images, and the released code, on black patches."""
        host, (images, _) = load(), drawn(model, seed, size)
        maps = {**baselines(images, seed), **method_maps(host, images, PERTURBED)[0]}
        more = method_maps(host, images, OF_CODE)[0] if model == "vim" else {}
        others = of_others({**{label: maps[label] for label in PERTURBED}, **more})
        return {
            "perturbation": [
                *change_rows(model, host, images, maps, CHANGES),
                *change_rows(model, host, images, {**more, **others}, BLACK),
            ]
        }

    def _curves(self, model: str, load: Callable[[], nn.Module], seed: int, size: Size) -> dict[str, list[Row]]:
        """Return the areas of activation and pruning curves."""
        host, (images, _) = load(), drawn(model, seed, size)
        maps = method_maps(host, images, PERTURBED)[0]
        more = method_maps(host, images, TABLE_9 | (OF_CODE if model == "vim" else {}))[0]
        every = {**baselines(images, seed), **maps, **more, **of_others(maps)}
        return {"activation": change_rows(model, host, images, every, CURVES)}

    def _ablations(self, model: str, load: Callable[[], nn.Module], seed: int, size: Size) -> dict[str, list[Row]]:
        """Return the reductions of heads and the treatments of signs against the masks."""
        host, (images, _) = load(), drawn(model, seed, size)
        rows = {}
        for table, methods, reduced in (("table5", TABLE_5, HEADS), ("table6", TABLE_6, TABLE_6)):
            maps, layers = method_maps(host, images, methods | (by_code(reduced) if model == "vim" else {}))
            rows[table] = mask_rows(model, images, {**baselines(images, seed), **maps}, layers)
        return rows

    def _controls(self, model: str, load: Callable[[], nn.Module], seed: int, size: Size) -> dict[str, list[Row]]:
        """Return methods on models with random weights against the masks."""
        images, _ = drawn(model, seed, size)
        methods = CONTROLLED | (OF_CODE if model == "vim" else {})
        rows: list[Row] = []
        for name, host in controls(self.models[model].build, load, images.pixels[:1], seed).items():
            rows += mask_rows(f"{model}, {name}", images, *method_maps(host, images, methods))
        return {"controls": rows}

    def claims(self, results: Results) -> list[Claim]:
        """Return the claims of HMA on images, and of this library."""
        return claims()

    def picture(self, hosts: Mapping[str, Callable[[], nn.Module]], results: Results) -> "Figure":
        """Draw heat maps of both architectures, and the bias of the CLS token."""
        biases = {name: bias(hosts[name](), drawn(name, SEEDS[0], self.size)[0]) for name in VIMS}
        return picture({name: hosts[name] for name in ("vim", "vit")}, biases)


def configuration(size: Size, seed: int) -> dict[str, Any]:
    """Return the description of a measurement: stored numbers of another one are not read."""
    rows = [METHODS, OF_CODE, PERTURBED, CONTROLLED, TABLE_5, TABLE_6, TABLE_9]
    methods = [{label: [row.method, dict(row.options)] for label, row in of.items()} for of in rows]
    versions = {"unilinattn": version("unilinattn"), "torch": torch.__version__}
    return {"size": asdict(size), "seed": seed, "methods": methods, "curves": [CHANGES, CURVES], "versions": versions}


@lru_cache(maxsize=4)
def drawn(model: str, seed: int, size: Size) -> tuple[Images, Images]:
    """Return the scored images of a seed, and those on which its layers are chosen; no model is trained on them."""
    first, patches = HELD_OUT_SEED + SEEDS_OF_IMAGES * (1 + seed), patches_of(model)
    scored, selection = (samples(count, first + at, patches) for at, count in enumerate((size.scored, size.selection)))
    return Images(scored), Images(selection)


def bias(host: nn.Module, images: Images) -> ClsBias:
    """Return the mean attention of the CLS token over images."""
    return cls_bias([traced(host, images)], cls=images.cls, grid=GRID)


def smoothing_rows(model: str, host: nn.Module, images: Images) -> list[Row]:
    """Return the mean cosine similarity of two patches of an image, after each layer (HMA arXiv Eq. 24)."""
    (similarity,) = oversmoothing(traced(host, images), exclude=[images.cls]).similarity.values()
    return [
        number(f"layer {depth}" if depth else "embedding", "cosine", value, model=model, sample=sample.name)
        for depth, values in enumerate(similarity.tolist())
        for value, sample in zip(values, images.samples, strict=True)
    ]


STUDY = Vision()
