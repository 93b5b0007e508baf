"""Lets a torchvision that was built for another torch be imported: a `sitecustomize` for the tests on timm.

Beside a CPU build of torch, torchvision's CUDA build finds its own operators missing and fails to import. Their
schemas are enough for timm's models, which call none of them.
"""

import importlib.abc
import sys


class _Schemas(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            from torch import library

            # Kept alive for as long as the process runs: a library that goes takes its schemas with it.
            schemas = library.Library("torchvision", "DEF")
            schemas.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            schemas.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.modules["torch"].__dict__["_torchvision_schemas"] = schemas


sys.meta_path.insert(0, _Schemas())
