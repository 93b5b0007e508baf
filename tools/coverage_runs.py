"""Runs of the tiny hosts: the measurements of each configuration, which `tools.coverage` records."""

import copy
import importlib
import inspect
import pkgutil
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from tools.hybrids import listed
from tools.versions import Unavailable, model_of, trace_of
from unilinattn.call import package_version
from unilinattn.call.exactness import relative_error, tolerance
from unilinattn.errors import UncoveredError
from unilinattn.evaluation.checkpoints import quiet_hosts
from unilinattn.frozen.run import frozen
from unilinattn.host.inputs import host_arguments
from unilinattn.operator.operator import MixerOperator
from unilinattn.operator.scopes import SCOPES, has_core
from unilinattn.operator.stages import Mix, walk
from unilinattn.testing import hosts
from unilinattn.testing.conformance import promoted_trace
from unilinattn.testing.hosts import Host
from unilinattn.testing.promote import promoted
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Trace, trace

FLOAT32_KERNELS = ("fla",)
"""Packages whose kernels always compute in float32, so that they are measured in float32 only."""


_WAYS = re.compile(r"(_forward|_rule|_scan|_attention|_attention_cpu|_autograd|_sequence_native|conv1d_fn)$")
"""Functions of a host's file whose calls show its code path for a layer (fused, chunked, plain)."""


_KERNELS = re.compile(r"^(chunk|fused|parallel|naive|recurrent)_(?!.*_(fwd|bwd))")
"""The same for packages of kernels, whose functions are in separate files."""


Runs = dict[str, dict[str, Any]]
"""Measurements by "table/name" of a configuration."""


def tables() -> dict[str, tuple[Host, ...]]:
    """Return every table of hosts in `unilinattn.testing.hosts`, by the name of its module."""
    names = sorted(module.name for module in pkgutil.iter_modules(hosts.__path__))
    modules = {name: importlib.import_module(f"{hosts.__name__}.{name}") for name in names}
    return {name: module.HOSTS for name, module in modules.items() if hasattr(module, "HOSTS")}


def models(hosts: Sequence[Host]) -> list[Host]:
    """Return the first configuration of each model, whose name stands before the first comma."""
    return list({host.name.partition(",")[0]: host for host in reversed(hosts)}.values())[::-1]


def firsts(hosts: Sequence[Host]) -> list[Host]:
    """Return the first configuration of each adapter."""
    return list({host.architecture: host for host in reversed(hosts)}.values())[::-1]


def measure(host: Host) -> dict[str, Any] | None:
    """Run one configuration and return its record, or None if its package is not installed.

    Errors are reconstruction errors, the worst over the layers of each adapter, and for `shares` the completeness gap
    of the frozen run. If the installed version cannot be traced, the record holds the reason.
    """
    try:
        model = model_of(host)
        with _watching(model) as paths:
            traced = trace_of(host, model)
    except Unavailable as reason:
        return {"environment": reason.environment, "left_out": str(reason)}
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("unilinattn"):
            raise
        return None
    inputs = host.inputs()
    package = type(model).__module__.split(".")[0]
    layers = {name: _described(group, paths) for name, group in _by_architecture(traced).items()}
    runs, reference, limit = {"float32": traced}, traced, tolerance("padding", torch.float32)
    if package not in FLOAT32_KERNELS:
        low_model, low_inputs = copy.deepcopy(model).bfloat16(), _cast(inputs, torch.bfloat16)
        if _runs_in_its_dtype(low_model, low_inputs):
            runs["bfloat16"] = trace(low_model, low_inputs)
        model, limit = copy.deepcopy(model).double(), tolerance("padding", torch.float64)
        reference = runs["float64"] = promoted_trace(model, _cast(inputs, torch.float64))
    for how, run in runs.items():
        for name, group in _by_architecture(run).items():
            layers[name][how] = _worst(group)
    exact = {how: run for how, run in runs.items() if how != "bfloat16"}
    hybrid = None if package in FLOAT32_KERNELS else listed(exact)
    return {
        "environment": "unilinattn" if package == "unilinattn" else package_version(model),
        "architecture": host.architecture,
        "batch": host.batch,
        "length": host.length,
        "padding": _sides(model, inputs, reference, limit),
        "layers": layers,
        "shares": {how: _gap(run) for how, run in exact.items()},
        **({} if hybrid is None else {"model": type(model).__name__, "hybrid": hybrid}),
    }


def run(selected: Mapping[str, Sequence[Host]]) -> tuple[Runs, list[str]]:
    """Measure tables of hosts; return their records and the messages of failed or inexact configurations."""
    runs: Runs = {}
    problems: list[str] = []
    hosts = [(table, host) for table, entries in selected.items() for host in entries]
    quiet = quiet_hosts() if find_spec("transformers") else nullcontext()
    with warnings.catch_warnings(), quiet:
        warnings.simplefilter("ignore")
        for table, host in tqdm(hosts, disable=None, leave=False, unit="host"):
            try:
                entry = measure(host)
            except Exception as error:
                first = str(error).strip().split("\n", 1)[0]
                problems.append(f"{host.name} ({table}) failed with {type(error).__name__}: {first}")
                continue
            if entry is not None:
                runs[f"{table}/{host.name}"] = {"table": table, **entry}
                problems += _inexact(host.name, entry)
    return runs, problems


def _by_architecture(run: Trace) -> dict[str, list[Layer]]:
    groups: dict[str, list[Layer]] = {}
    for layer in run.layers:
        groups.setdefault(layer.architecture, []).append(layer)
    return groups


def _described(layers: Sequence[Layer], paths: Mapping[str, set[str]]) -> dict[str, Any]:
    structures: dict[str, None] = {}
    scopes = set(SCOPES)
    for layer in layers:
        with suppress(UncoveredError):
            for chain in layer.operator.chains.values():
                cores = [stage for stage in walk(chain) if isinstance(stage, Mix) and stage.role == "core"]
                structures |= dict.fromkeys(stage.mixer.structure for stage in cores)
        scopes = {scope for scope in scopes if _supports(layer, scope)}
    return {
        "hosts": sorted({type(layer.module).__qualname__ for layer in layers}),
        "kind": sorted({layer.kind for layer in layers}),
        "structure": list(structures),
        "path": sorted(set().union(*(paths[layer.name.split("#")[0]] for layer in layers))),
        "scopes": [scope for scope in SCOPES if scope in scopes],
    }


def _supports(layer: Layer, scope: str) -> bool:
    try:
        op: MixerOperator = layer.operator
        # A port whose tokens are only added, such as a residual stream, has no map.
        for port in (port for port, chain in op.chains.items() if has_core(chain)):
            op.contributions(-1, port=port) if scope == "layer" else op.rows(-1, scope=scope, port=port)
    except UncoveredError:
        return False
    return True


def _worst(layers: Sequence[Layer]) -> float | None:
    """Return the worst error, or None if a layer has no operator."""
    try:
        return float(f"{max(layer.operator.reconstruction_error() for layer in layers):.1e}")
    except UncoveredError:
        return None


def _gap(run: Trace) -> float | None:
    """Return what shares and biases miss of a logit, relative to the size of the parts; None if the host is refused."""
    output = run.output
    has_logits = isinstance(output, Tensor) or hasattr(output, "logits")
    with promoted() if run.layers[0].input.dtype is torch.float64 else nullcontext(), suppress(UncoveredError):
        shares = frozen(run).shares(-1, 1 if has_logits else _states)
        return float(f"{(shares.gap / shares.size).max():.1e}")
    return None


def _states(output: Any) -> Tensor:
    """Return a linear function of the output of a model without logits."""
    states: Tensor = output.last_hidden_state[:, -1, :3].sum(-1)
    return states


def _cast(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


@torch.no_grad()
def _runs_in_its_dtype(model: nn.Module, inputs: Tensor) -> bool:
    """Return whether a host runs in its dtype; some mix dtypes inside and raise."""
    try:
        model(**host_arguments(model, inputs))
    except RuntimeError:
        return False
    return True


def _sides(model: nn.Module, ids: Tensor, unpadded: Trace, limit: float) -> list[str] | None:
    """Return the sides on which the host keeps padding out of real tokens, or None if it takes no mask."""
    if ids.is_floating_point() or "attention_mask" not in inspect.signature(model.forward).parameters:
        return None
    pads = ids[:, :1].expand(-1, 2)
    sides = []
    for side in ("left", "right"):
        order = (pads, ids) if side == "left" else (ids, pads)
        real = torch.cat([torch.full_like(tokens, tokens is ids) for tokens in order], dim=1)
        padded_inputs = {"input_ids": torch.cat(order, dim=1), "attention_mask": real}
        with promoted() if unpadded.layers[0].input.dtype is torch.float64 else nullcontext():
            padded = trace(model, padded_inputs)
        positions = slice(2, None) if side == "left" else slice(None, ids.shape[1])
        pairs = zip(padded.layers, unpadded.layers, strict=True)
        if all(relative_error(layer.output[:, positions], other.output) <= limit for layer, other in pairs):
            sides.append(side)
    return sides


@contextmanager
def _watching(model: nn.Module) -> Iterator[dict[str, set[str]]]:
    """Record, for every module of a model, the functions of its file, or kernels, that run in its forward pass."""
    paths: dict[str, set[str]] = {name: set() for name, _ in model.named_modules()}
    inside: list[tuple[str, str]] = []
    package = type(model).__module__.split(".")[0]
    ways = _KERNELS if package in FLOAT32_KERNELS else _WAYS

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and inside and ways.search(code.co_name):
            for name, file in inside:
                if code.co_filename.startswith(file):
                    paths[name].add(code.co_name)

    def enter(name: str, file: str) -> Any:
        return lambda *_: inside.append((name, file))

    hooks = []
    for name, module in model.named_modules():
        file = sys.modules[package if package in FLOAT32_KERNELS else type(module).__module__].__file__ or ""
        file = file.removesuffix("__init__.py")
        hooks += [
            module.register_forward_pre_hook(enter(name, file)),
            module.register_forward_hook(lambda *_: inside.pop() and None),
        ]
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield paths
    finally:
        sys.setprofile(before)
        for hook in hooks:
            hook.remove()


def _inexact(name: str, entry: Mapping[str, Any]) -> list[str]:
    inexact = []
    for how in ("float32", "float64"):
        limit = tolerance("reconstruction", getattr(torch, how))
        errors = {architecture: layer.get(how) for architecture, layer in entry.get("layers", {}).items()}
        for subject, error in {**errors, "the sum of shares": entry.get("shares", {}).get(how)}.items():
            if (error or 0) > limit:
                inexact.append(f"{name}: {subject} has a {how} error of {error:.1e}, above {limit:.0e}")
    return inexact
