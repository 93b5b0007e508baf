"""`python -m tools.timm_sweep [names]`: trace and explain a small model of every file of timm, at the smallest size.

Prints the outcome of each model: the worst error of its layers, also in float64, and the gap of its shares. Exit code 1
means that a model is wrong or crashes.
"""

import argparse
import inspect
import multiprocessing
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tools.sweep_run import GAP, MESSAGE, OUTPUT, difference
from unilinattn import explain, trace
from unilinattn.errors import UnilinattnError
from unilinattn.testing.hosts import randomize
from unilinattn.testing.promote import promoted

MIXING = [
    "beit_base_patch16_224",
    "botnet26t_256",
    "cait_xxs24_224",
    "coat_lite_tiny",
    "convit_tiny",
    "cpubone_nano",
    "crossvit_tiny_240",
    "csatv2",
    "davit_tiny",
    "deepseek_vit_412m",
    "deit_tiny_patch16_224",
    "edgenext_xx_small",
    "efficientformer_l1",
    "efficientformerv2_s0",
    "efficientvim_m1",
    "efficientvit_b0",
    "efficientvit_m0",
    "eva02_tiny_patch14_224",
    "fastvit_sa12",
    "focalnet_tiny_srf",
    "gcvit_xxtiny",
    "gemma4_vit_167m",
    "hiera_tiny_224",
    "sam2_hiera_tiny",
    "iformer_t",
    "levit_128s",
    "lowformer_b0",
    "coatnet_nano_rw_224",
    "poolformer_s12",
    "mixer_s32_224",
    "mobilenetv4_hybrid_medium",
    "mobilenetv5_base",
    "mobilevit_xxs",
    "mvitv2_tiny",
    "naflexvit_base_patch16_gap",
    "nest_tiny",
    "nextvit_small",
    "pit_ti_224",
    "pvt_v2_b0",
    "qwen3_vit_88m",
    "sequencer2d_s",
    "shvit_s1",
    "swiftformer_xs",
    "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256",
    "swinv2_cr_tiny_224",
    "tiny_vit_5m_224",
    "tnt_s_patch16_224",
    "twins_svt_small",
    "visformer_tiny",
    "vit_tiny_patch16_224",
    "vit_tiny_r_s16_p8_224",
    "test_vit_relpos",
    "samvit_base_patch16_224",
    "vitamin_small_224",
    "volo_d1_224",
    "xcit_nano_12_p16_224",
]
"""Models that mix tokens by attention, by matrices of tokens or by pools; one of each file."""

CONVOLVING = [
    "mobileone_s1",
    "convmixer_768_32",
    "test_convnext",
    "cs3darknet_s",
    "cspnext_tiny",
    "densenet121",
    "dla46x_c",
    "dpn48b",
    "mnasnet_050",
    "fasternet_t0",
    "ghostnet_050",
    "hardcorenas_a",
    "hgnetv2_b0",
    "hrnet_w18_small",
    "inception_next_atto",
    "inception_resnet_v2",
    "inception_v3",
    "inception_v4",
    "lcnetv2_small",
    "mambaout_femto",
    "nasnetalarge",
    "test_nfnet",
    "pnasnet5large",
    "rdnet_tiny",
    "regnetx_002",
    "repghostnet_050",
    "repvit_m0_9",
    "res2net50_26w_4s",
    "resnest14d",
    "test_resnet",
    "resnetv2_18",
    "rexnet_100",
    "selecsls42",
    "legacy_seresnet18",
    "skresnet18",
    "starnet_s1",
    "tresnet_m",
    "vgg11",
    "ese_vovnet19b_slim",
    "legacy_xception",
    "xception41",
]
"""Models that only convolve; one of each other file."""

SIZES = (64, 96, 128, 160, 192, 224, 256)
"""Sides of images, of which the first that a model accepts is taken."""

DEEPEST = 60_000_000
"""Largest number of parameters of a model that keeps its depth."""

ERROR, EXACT = 1e-5, 1e-10
"""Largest errors of a layer in float32, and in float64."""


def measure(name: str) -> dict[str, Any]:
    """Return the outcome of a model, with the worst errors of its layers in both precisions and the gap."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        model, image, reference = prepared(name)
    except Exception as error:
        return _failed("unbuilt", error)
    result: dict[str, Any] = {"outcome": "refused", "size": image.shape[-1]}
    try:
        traced = trace(model, image, progress=False)
        result |= {"outcome": "unexplained", "layers": len(traced.layers)}
        result["float32"] = max(layer.reconstruction_error() for layer in traced.layers)
        scores = explain(traced, target=-1, progress=False)
        result |= {"outcome": "works", "keys": scores.scores.shape[-1], "gap": scores.completeness_gap}
    except UnilinattnError as error:
        result |= _failed(result["outcome"], error)
    except Exception as error:
        return result | _failed("crash", error)
    if "layers" not in result:
        return result
    try:
        with promoted():
            exact = trace(model.double(), image.double(), progress=False)
            result["float64"] = max(layer.reconstruction_error() for layer in exact.layers)
    except UnilinattnError as error:
        return result | _failed("wrong", error)
    if difference(traced.output, reference) > OUTPUT or result["float32"] > ERROR or result["float64"] > EXACT:
        return result | {"outcome": "wrong", "message": "the output or a layer differs from the model's"}
    adds_up = result.get("gap") is None or result["gap"] <= GAP
    if result["outcome"] == "works" and not (bool(scores.scores.isfinite().all()) and adds_up):
        return result | {"outcome": "wrong", "message": "scores that do not add up"}
    return result


def prepared(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model with random weights, an image of the smallest size that it accepts, and its output."""
    import timm

    first: Exception | None = None
    for size in SIZES:
        for settings in ({"img_size": size}, {}):
            try:
                model = timm.create_model(name, num_classes=5, **settings, **_shallow(name))
                model = randomize(model.eval())
                image = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
                with torch.no_grad():
                    output = model(image)
                if bool(output.isfinite().all()):
                    return model, image, output
                raise ArithmeticError("the output is not finite")
            except Exception as error:
                first = first or error
    raise first or ValueError(name)


def _shallow(name: str) -> dict[str, Any]:
    import timm

    with torch.device("meta"):
        parameters = sum(p.numel() for p in timm.create_model(name).parameters())
    return {"depth": 2} if parameters > DEEPEST else {}


def _failed(outcome: str, error: Exception) -> dict[str, Any]:
    return {"outcome": outcome, "error": type(error).__name__, "message": " ".join(str(error).split())[:MESSAGE]}


def _short(value: Any) -> Any:
    return f"{value:.0e}" if isinstance(value, float) else value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a model is wrong or crashes."""
    parser = argparse.ArgumentParser(description=inspect.getdoc(sys.modules[__name__]))
    parser.add_argument("names", nargs="*", help="models of timm; by default one of each file")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    kinds = {"mixing": MIXING, "convolution": CONVOLVING}
    if options.names:
        kinds = {"named": options.names}
    import timm  # noqa: F401  the processes share it

    outcomes: dict[str, Counter[str]] = {}
    # One process for each model: memory is returned, and patches of one host do not reach the next.
    with multiprocessing.get_context("fork").Pool(options.jobs, maxtasksperchild=1) as pool:
        for kind, names in kinds.items():
            for name, row in zip(names, pool.imap(measure, names), strict=True):
                outcomes.setdefault(kind, Counter())[row["outcome"]] += 1
                print(kind, name, *(f"{key}={_short(value)}" for key, value in row.items()), flush=True)
    for kind, count in outcomes.items():
        print(kind, dict(count))
    return int(any(count["wrong"] or count["crash"] for count in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
