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
            import torch

            # Kept alive for as long as the process runs: a library that goes takes its schemas with it.
            self.library = torch.library.Library("torchvision", "DEF")
            self.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.modules["torch"].__dict__["_torchvision_schemas"] = self.library


sys.meta_path.insert(0, _Schemas())
