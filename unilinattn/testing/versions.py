"""What the installed version of a host's package does otherwise: what cannot be traced in it, which masks it skips."""

import re
import sys
from functools import cache

import torch
from torch import nn

from unilinattn.architectures.call import MASKING, host_function, masks_by_function, package_version
from unilinattn.errors import UncoveredError, UnilinattnError
from unilinattn.registry import architecture_of
from unilinattn.testing.hosts import Host
from unilinattn.trace import Trace, trace

MASKED_LATE = ("mamba", "falcon_mamba", "jamba", "zamba")
"""Adapters whose hosts first masked what the biased projection returns, and mask what goes into it today."""


class Unavailable(UnilinattnError):
    """A configuration cannot be traced with this version of its package; the message says why."""

    def __init__(self, environment: str, reason: str) -> None:
        """Name "package version", and why."""
        super().__init__(reason)
        self.environment = environment


def model_of(host: Host) -> nn.Module:
    """Build a host.

    Raises `Unavailable` if its package has no such class, `ImportError` if the package itself is missing.
    """
    try:
        return host.model()
    except (ImportError, AttributeError) as error:
        environment, lacks = _lacks(error)
        if environment is None:
            raise
        raise Unavailable(environment, f"{environment} has no {lacks}") from None


def trace_of(host: Host, model: nn.Module) -> Trace:
    """Trace a host's model and build its operators.

    Raises `Unavailable` if the trace or an adapter refuses what this version does.
    """
    try:
        found = trace(model, host.inputs())
        for layer in found.layers:
            layer.operator  # noqa: B018  the property builds it
    except UnilinattnError as error:
        raise Unavailable(package_version(model), re.split(r"[;.] ", str(error))[0].rstrip(".")) from None
    return found


@cache
def unavailable(host: Host) -> str | None:
    """Return why a configuration cannot be traced here, None if it can."""
    try:
        trace_of(host, model_of(host))
    except Unavailable as reason:
        return str(reason)
    return None


@cache
def sides(host: Host, batch: int = 1) -> tuple[str, ...] | None:
    """Return on which sides this version of a host keeps padding out of real tokens: not always `host.masks`.

    Older hosts skip the mask of a single sequence, so that one is what tells; others mask at another place.
    """
    if host.masks is None:
        return None
    layers = [m for m in model_of(host).modules() if architecture_of(type(m)) is not None]
    if batch == 1 and any(_skips_one(layer) for layer in layers):
        return tuple(side for side in host.masks if side != "left")
    if host.architecture in MASKED_LATE and not any(masks_by_function(layer) for layer in layers):
        return ("left", "right")
    return host.masks


def _skips_one(layer: nn.Module) -> bool:
    mask = torch.tensor([[0, 1]])
    try:
        masked = host_function(layer, MASKING)(torch.ones(1, 2, 1), mask)
    except UncoveredError:
        return False
    return bool(masked[0, 0, 0] != 0)


def _lacks(error: ImportError | AttributeError) -> tuple[str | None, str]:
    """Return which installed package lacks something, with its version, and what; None for any other error."""
    if isinstance(error, ImportError):
        found = re.match(r"(\w+)\.([\w.]+)$", error.name or "")
    else:
        found = re.match(r"module '?(\w+)[\w.]*'? has no attribute '?(\w+)'?$", str(error))
    version = None if found is None else getattr(sys.modules.get(found[1]), "__version__", None)
    return (None, "") if found is None or version is None else (f"{found[1]} {version}", found[2])
