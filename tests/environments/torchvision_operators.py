"""A `sitecustomize` for the tests on timm that allows importing a torchvision built for another torch.

With a CPU build of torch, a CUDA build of torchvision lacks its operators and fails to import. Their schemas suffice
for timm's models, which call none of them.
"""

import importlib.abc
import sys


class _Schemas(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            from torch import library

            # Referenced for the life of the process, because a deleted library removes its schemas.
            schemas = library.Library("torchvision", "DEF")
            schemas.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            schemas.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.modules["torch"].__dict__["_torchvision_schemas"] = schemas


sys.meta_path.insert(0, _Schemas())
