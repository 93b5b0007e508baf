"""Maps of many images at once, and their numbers against the masks and on changed images."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from evidence.digits import GRID, PATCH, SIDE
from evidence.rows import number
from unilinattn.evaluation import PerturbationTest, Sample, segmentation_scores
from unilinattn.evaluation.masking import Masking
from unilinattn.evaluation.segmentation import foreground_of, image_scores, overlaps
from unilinattn.evaluation.table import PARTS
from unilinattn.host.substitution import through_operators
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.gradients import one_gradient
from unilinattn.tracing.trace import Trace

ANOTHER = "another image"
"""The end of the label of a row whose map is that of another image."""

Maps = Mapping[str, Float[Tensor, "image patch"]]
"""Maps by the label of their row."""

Row = Mapping[str, Any]

GRADIENTS = ("gradient", "input_x_gradient", "integrated_gradients")
"""Methods by gradients at the embeddings."""


@dataclass(frozen=True, eq=False)
class Explained:
    """A method with options, which is equal to no other."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def explain(self, trace: Trace, target: int) -> Attribution:
        """Return the scores of a batch of images."""
        # Methods by captum run the model again: the operators take half of the time of the host's loop over tokens.
        runs = through_operators(trace.host) if self.method in GRADIENTS else nullcontext()
        with runs:
            return ula.explain(trace, method=self.method, target=target, progress=False, **self.options)


@dataclass(frozen=True, eq=False)
class Images:
    """Images with their masks, whose maps are computed in one batch; equal to no others."""

    samples: Sequence[Sample]

    @property
    def cls(self) -> int:
        """The position of the CLS token."""
        target = self.samples[0].target
        assert isinstance(target, int)
        return target

    @property
    def patches(self) -> Tensor:
        """True at the tokens of patches."""
        valid = self.samples[0].valid
        assert valid is not None
        return valid

    @property
    def pixels(self) -> Float[Tensor, "image 1 side side"]:
        """The images as one batch."""
        return torch.cat([sample.inputs for sample in self.samples])

    @property
    def masks(self) -> Tensor:
        """True at the foreground, (image, side, side)."""
        return torch.stack([sample.foreground for sample in self.samples if sample.foreground is not None])


@lru_cache(maxsize=2)
def traced(host: nn.Module, images: Images) -> Trace:
    """Return the trace of a model on images, once for all tables."""
    return ula.trace(host, images.pixels, progress=False)


# Several tables have the same methods.
@lru_cache(maxsize=64)
def layer_maps(host: nn.Module, images: Images, explained: Explained) -> Float[Tensor, "layer image patch"]:
    """Return the scores of the patches; those of a method without a layer axis have one layer."""
    result = explained.explain(traced(host, images), images.cls)
    scores = result.scores if "layer" in result.dims else result.scores[None]
    return separating(scores[..., images.patches].double())


def separating(scores: Float[Tensor, "*map patch"]) -> Float[Tensor, "*map patch"]:
    """Return maps with random scores, by a fixed seed, in place of constant ones, which find nothing.

    `attribution` is constant where the gradient at the CLS token is negative in every layer, and a layer of `alti`
    where every other contribution is clipped.
    """
    chance = torch.rand(scores.shape, dtype=scores.dtype, generator=torch.Generator().manual_seed(0))
    return torch.where(scores.amin(-1, keepdim=True) == scores.amax(-1, keepdim=True), chance, scores)


def method_maps(
    host: nn.Module, images: Images, methods: Mapping[str, Explained], selection: Images | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the maps of all images by method, and the layer of each: that of a method that keeps layers, or "all".

    The layer is that which finds most on other images, `selection`, by the average precision of the foreground.
    """
    maps, layers = {}, {}
    with one_gradient(traced(host, images)):
        every = {label: layer_maps(host, images, explained) for label, explained in methods.items()}
    for label, by_layer in every.items():
        maps[label], layers[label] = by_layer[0], "all"
        if len(by_layer) > 1:
            assert selection is not None
            precisions = [_precision(selection, layer) for layer in layer_maps(host, selection, methods[label])]
            best = max(range(len(precisions)), key=precisions.__getitem__)
            maps[label], layers[label] = by_layer[best], str(best)
    return maps, layers


def baselines(images: Images, seed: int) -> dict[str, Tensor]:
    """Return maps that ignore the model: random scores, the nearness to the centre, and the true mask by patch."""
    axes = [torch.arange(size, dtype=torch.float64) - (size - 1) / 2 for size in GRID]
    centre = -torch.hypot(*torch.meshgrid(*axes, indexing="ij")).flatten()
    masks = functional.avg_pool2d(images.masks.double()[:, None], PATCH).flatten(1)
    generator = torch.Generator().manual_seed(seed)
    return {
        "random": torch.rand(masks.shape, dtype=torch.float64, generator=generator),
        "centre": centre.expand_as(masks),
        "mask": masks,
    }


def of_others(maps: Maps) -> dict[str, Tensor]:
    """Return each method's map of the next image, the first one's for the last."""
    return {f"{label}, {ANOTHER}": scores.roll(-1, 0) for label, scores in maps.items()}


def mask_rows(model: str, images: Images, maps: Maps, layers: Mapping[str, str]) -> list[Row]:
    """Return the segmentation metrics of each map and image (HMA ACL 4.2)."""
    rows: list[Row] = []
    for label, scores in maps.items():
        heats, masks = _heat_maps(scores), images.masks
        every = zip(heats, images.samples, masks, image_scores(heats, masks), strict=True)
        for heat, sample, truth, measured in every:
            mask = truth[None]
            regions = [(float(shared), float(either)) for shared, either in overlaps(foreground_of(heat[None]), mask)]
            where: dict[str, Any] = {"model": model, "sample": sample.name}
            of_image = [
                number(label, "pixel_accuracy", measured.pixel_accuracy, float(truth.numel()), **where),
                number(label, "mean_ap", measured.mean_ap, **where),
                {**number(label, "mean_iou", measured.mean_iou, **where), PARTS: regions},
                number(label, "foreground_ap", measured.foreground_ap, **where),
            ]
            rows += [{**row, "layer": layers.get(label, "")} for row in of_image]
    return rows


def background_rows(model: str, images: Images) -> list[Row]:
    """Return rows of the prediction without any foreground, which has no ranking and so no average precision."""
    rows: list[Row] = []
    for sample, truth in zip(images.samples, images.masks, strict=True):
        nothing = torch.zeros_like(truth)
        regions = [(float(shared), float(either)) for shared, either in overlaps(nothing[None], truth[None])]
        iou = sum(shared / either for shared, either in regions) / len(regions)
        where: dict[str, Any] = {"model": model, "sample": sample.name}
        right = float((truth == nothing).double().mean())
        rows.append(number("all background", "pixel_accuracy", right, float(truth.numel()), **where))
        rows.append({**number("all background", "mean_iou", iou, **where), PARTS: regions})
    return rows


# Several tables remove the same patches.
@lru_cache(maxsize=4)
def untested(host: nn.Module, images: Images, masking: Masking) -> PerturbationTest:
    """Return the perturbation test of images whose patches have equal scores."""
    references = [sample.reference for sample in images.samples if sample.reference is not None]
    return PerturbationTest(
        host,
        images.pixels,
        torch.zeros(len(images.samples), *GRID),
        masking=masking,
        reference=torch.cat(references) if masking == "reference" else None,
        labels=torch.tensor([sample.label for sample in images.samples]),
    )


def change_rows(
    model: str, host: nn.Module, images: Images, maps: Maps, curves: Mapping[str, tuple[Masking, str]]
) -> list[Row]:
    """Return the areas of perturbation curves of each map and image.

    `curves`: by metric the masking and the curve of `PerturbationTest`.
    """
    rows: list[Row] = []
    for label, scores in maps.items():
        relevance = scores.view(-1, *GRID)
        for masking in dict.fromkeys(masking for masking, _ in curves.values()):
            with through_operators(host):
                test = untested(host, images, masking).of_scores(relevance)
                for metric, (of_masking, name) in curves.items():
                    if of_masking == masking:
                        areas = _areas(getattr(test, name)).tolist()
                        rows += [
                            number(label, metric, area, model=model, sample=sample.name)
                            for area, sample in zip(areas, images.samples, strict=True)
                        ]
    return rows


def _areas(draw: Callable[[], Any]) -> Float[Tensor, " image"]:
    """Return the area under each image's curve, divided by the range of the fractions."""
    curve = draw()
    fractions = torch.tensor(curve.fractions, dtype=torch.float64)
    return torch.trapezoid(curve.values, fractions) / (fractions[-1] - fractions[0])


def _heat_maps(scores: Float[Tensor, "image patch"]) -> Float[Tensor, "image side side"]:
    return functional.interpolate(scores.view(-1, 1, *GRID), (SIDE, SIDE), mode="bilinear")[:, 0]


def _precision(images: Images, scores: Float[Tensor, "image patch"]) -> float:
    return segmentation_scores(_heat_maps(scores), images.masks).foreground_ap
