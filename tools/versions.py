"""Differences of the installed version of a host's package: untraceable configurations and skipped masks."""

import re
import sys
from functools import cache

import torch
from torch import nn

from unilinattn.call import MASKING, host_function, masks_by_function, package_version
from unilinattn.errors import UncoveredError, UnilinattnError
from unilinattn.registry import architecture_of
from unilinattn.testing.hosts import Host
from unilinattn.tracing.trace import Trace, trace

MASKED_LATE = ("mamba", "falcon_mamba", "jamba", "zamba")
"""Adapters whose hosts mask after the biased projection with transformers < 5.17, and before it in later versions."""


class Unavailable(UnilinattnError):
    """Raised if a configuration cannot be traced with the installed version of its package, with the reason."""

    def __init__(self, environment: str, reason: str) -> None:
        """Store `environment`, "package version", and the reason."""
        super().__init__(reason)
        self.environment = environment


def model_of(host: Host) -> nn.Module:
    """Build a host.

    Raises `Unavailable` if its package lacks the class, and `ImportError` if the package is missing.
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

    Raises `Unavailable` if the trace or an adapter refuses this version's computation, or no adapter covers it.
    """
    try:
        traced = trace(model, host.inputs())
        for layer in traced.layers:
            layer.operator  # noqa: B018  the property builds it
    except UnilinattnError as error:
        raise Unavailable(package_version(model), re.split(r"[;.] ", str(error))[0].rstrip(".")) from None
    for layer in traced.layers:
        if layer.architecture == "recorded" != host.architecture:
            version = package_version(model)
            raise Unavailable(version, f"{layer.name} is recorded, without its adapter, in {version}")
    return traced


@cache
def unavailable(host: Host) -> str | None:
    """Return the reason why a configuration cannot be traced in this environment, or None."""
    try:
        trace_of(host, model_of(host))
    except Unavailable as reason:
        return str(reason)
    return None


@cache
def sides(host: Host, batch: int = 1) -> tuple[str, ...] | None:
    """Return the sides on which the installed version of a host keeps padding out of real tokens.

    They differ from `host.masks` in older versions, which ignore the mask of a single sequence or mask elsewhere.
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
    """Return the installed package with its version and the name it lacks, or (None, "") for any other error."""
    if isinstance(error, ImportError):
        match = re.match(r"(\w+)\.([\w.]+)$", error.name or "")
    else:
        match = re.match(r"module '?(\w+)[\w.]*'? has no attribute '?(\w+)'?$", str(error))
    version = None if match is None else getattr(sys.modules.get(match[1]), "__version__", None)
    return (None, "") if match is None or version is None else (f"{match[1]} {version}", match[2])
