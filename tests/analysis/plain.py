"""Plain definitions for the tests of the analyses: loops over rows and keys, in float64."""

import math

import torch
from torch import Tensor

from unilinattn.operator.flow import Flow
from unilinattn.operator.operator import MixerOperator
from unilinattn.tracing.layer import Layer


def layer_of(flow: Flow, x: Tensor, name: str = "a layer") -> Layer:
    """A layer with the operator of a flow, without a host."""
    layer = object.__new__(Layer)
    operator = MixerOperator(flow.chains, inputs=flow.inputs, output=x, name=name)
    vars(layer).update(name=name, operator=operator, output=x, mask=None, _latest=None, _prefix=None)
    return layer


def softplus_inverse(step: float) -> float:
    """s with log(1 + exp(s)) = step."""
    return math.log(math.exp(step) - 1)


def spearman(a: list[float], b: list[float]) -> float:
    """Pearson's correlation of mid-ranks."""

    def ranks(values: list[float]) -> list[float]:
        return [
            sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
            for value in values
        ]

    x, y = ranks(a), ranks(b)
    mx, my = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((p - mx) * (q - my) for p, q in zip(x, y, strict=True))
    return covariance / math.sqrt(sum((p - mx) ** 2 for p in x) * sum((q - my) ** 2 for q in y))


def shares(row: list[float]) -> list[float]:
    """|a_j| / sum |a_j|."""
    total = sum(map(abs, row))
    return [abs(value) / total for value in row]


def entropy(share: list[float]) -> float:
    """-sum p log p in nats."""
    return -sum(p * math.log(p) for p in share if p)


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of the angle of two vectors."""
    return float((a.double() @ b.double()) / (a.double().norm() * b.double().norm()))


def image(path: object) -> tuple[int, ...]:
    """Width, height and depth of a picture that is not blank."""
    from matplotlib.image import imread

    pixels = torch.from_numpy(imread(str(path)).copy())
    assert pixels[..., :3].std() > 0.01
    return tuple(pixels.shape)
