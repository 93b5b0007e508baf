"""Measure the outcome of one model of the sweep, in a separate process with limits on time and memory."""

import math
import multiprocessing
import os
import re
import resource
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tools.sweep_configs import RULES, Rules, tiny_config
from tools.sweep_inputs import draw_weights, input_choices
from unilinattn import explain, trace
from unilinattn.errors import UnilinattnError

MOST_PARAMETERS = 5_000_000
"""Largest number of parameters of a model that is run."""

OUTPUT, GAP = 1e-4, 1e-3
"""Largest relative difference of the output and largest completeness gap of a model that works."""

SECONDS, MEMORY = 60, 8 << 30
"""Limits of a process: seconds of CPU time (five times that by the clock), and bytes of address space."""

MESSAGE = 200
"""Characters of an error message that are recorded."""


@dataclass(frozen=True)
class Case:
    """One model class of the sweep, with the task of its table and the configuration class."""

    task: str
    model_type: str
    name: str


Measure = Callable[..., dict[str, Any]]
"""Returns the outcome of a model in this process: `measure(case, built=...)`, which calls `built` when it has run."""


def measure(case: Case, built: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Return the outcome of a model in this process, with its layers, gap and error; call `built` when it has run."""
    try:
        model, inputs, reference, least = prepared(case)
        noise = difference(_output(model, inputs), reference)
    except Exception as error:
        return failed("unbuilt", error)
    built()
    try:
        torch.manual_seed(0)
        traced = trace(model, inputs, progress=False)
    except UnilinattnError as error:
        return failed("refused", error)
    except Exception as error:
        return failed("crash", error)
    result: dict[str, Any] = {"layers": len(traced.layers)}
    changed = difference(traced.output, reference)
    if changed > OUTPUT + 10 * noise:
        return _wrong("output", f"the traced output differs by {changed:.0e}") | result
    if len(traced.layers) < least:
        return _wrong("layers", f"{len(traced.layers)} layers, but {least} calls of modules attend") | result
    try:
        torch.manual_seed(0)
        scores = explain(model, inputs, target=-1, progress=False)
    except UnilinattnError as error:
        return failed("unexplained", error) | result
    except Exception as error:
        return failed("crash", error) | result
    gap = scores.completeness_gap
    result["gap"] = None if gap is None else float(f"{gap:.0e}")
    if not bool(scores.scores.isfinite().all()):
        return _wrong("scores", "scores are not finite") | result
    if gap is not None and not gap <= GAP:
        return _wrong("gap", "scores do not add up to the target") | result
    return {"outcome": "works"} | result


def difference(output: Any, reference: Any) -> float:
    """Return the largest relative difference of the tensors that two outputs share; caches and losses are left out."""
    values, worst = dict(_tensors(output)), 0.0
    for path, expected in _tensors(reference):
        value = values.get(path)
        if value is None or value.shape != expected.shape:
            continue
        finite = expected.isfinite()
        if not torch.equal(value.isfinite(), finite):
            return math.inf
        if finite.any():
            scale = expected[finite].norm().clamp_min(1e-30)
            worst = max(worst, float((value - expected)[finite].norm() / scale))
    return worst


def attending_calls(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Any, int]:
    """Run a model; return its output and the number of calls of modules that attend from tokens to tokens.

    These are the innermost calls of modules in which scaled dot product attention runs with several queries and keys,
    or a softmax of scores with axes of batch, heads, queries and keys, both as long as a text. Other mixing is not
    counted, so that the number is a lower bound of the layers of a trace.
    """
    with _Attending(model, inputs) as attending:
        output = _output(model, inputs)
    return output, len(attending.calls)


class _Attending(TorchFunctionMode):
    """Collects the module calls in which attention runs."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        super().__init__()
        self.calls: set[int] = set()
        self._lengths = {value.shape[-1] for name, value in inputs.items() if name.endswith("input_ids")}
        self._stack: list[int] = []
        self._count = 0
        self._hooks: list[Any] = []
        for module in model.modules():
            self._hooks.append(module.register_forward_pre_hook(self._enter))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        self._count += 1
        self._stack.append(self._count)

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._stack.pop()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            arguments = dict(zip(("query", "key"), args, strict=False)) | kwargs
            if arguments["query"].shape[-2] > 1 and arguments["key"].shape[-2] > 1:
                self._note()
        elif func in (F.softmax, torch.softmax, Tensor.softmax):
            arguments = dict(zip(("input", "dim"), args, strict=False)) | kwargs
            scores = arguments["input"]
            if scores.ndim == 4 and arguments.get("dim") in (-1, 3) and self._lengths.issuperset(scores.shape[-2:]):
                self._note()
        return func(*args, **kwargs)

    def _note(self) -> None:
        if self._stack:
            self.calls.add(self._stack[-1])


def run(
    cases: Sequence[Any], jobs: int, outcome_of: Measure | None = None, seconds: int | None = None
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Measure each model in a separate process, `jobs` at a time; yield the outcomes in order of completion.

    `outcome_of` measures one, by default `measure`. `seconds` is its limit in CPU time, by default `SECONDS`.
    """
    queue = deque(cases)
    active: dict[Connection, _Process] = {}
    while queue or active:
        while queue and len(active) < jobs:
            process = _Process(queue.popleft(), outcome_of, seconds or SECONDS)
            active[process.receiver] = process
        ready = wait(list(active), timeout=0.5)
        for receiver, process in list(active.items()):
            result = process.received() if receiver in ready else process.late()
            if result is not None:
                process.end()
                del active[receiver]
                yield process.case, result


class _Process:
    """The process of one model, which says when the model is built and then sends the outcome."""

    def __init__(self, case: Any, outcome_of: Measure | None, seconds: int) -> None:
        context = multiprocessing.get_context("fork")
        if isinstance(case, Case):
            _imported(case)
        self.case, self._seconds = case, seconds
        self.receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_child, args=(case, sender, outcome_of, seconds))
        self._process.start()
        self._start = time.monotonic()
        self._built = False
        sender.close()

    def received(self) -> dict[str, Any] | None:
        """Return the outcome that was sent, None for the message that the model is built."""
        try:
            message = self.receiver.recv()
        except EOFError:
            self._process.join()
            if self._process.exitcode == -signal.SIGXCPU:
                return self._ended("Timeout", f"no result after {self._seconds} s")
            return self._ended("Killed", "the process ended without a result")
        if message is None:
            self._built = True
        return message

    def late(self) -> dict[str, Any] | None:
        """Return the outcome of a process that takes too long by the clock, None for another."""
        if time.monotonic() - self._start <= 5 * self._seconds:
            return None
        return self._ended("Timeout", f"no result after {self._seconds} s")

    def end(self) -> None:
        """Stop the process."""
        self._process.kill()
        self._process.join()
        self.receiver.close()

    def _ended(self, error: str, message: str) -> dict[str, Any]:
        return {"outcome": "crash" if self._built else "unbuilt", "error": error, "message": message}


def _imported(case: Case) -> None:
    """Import a model's file in this process, so that its children share it."""
    import transformers

    try:
        getattr(transformers, case.name)
    except Exception:
        return


def _child(case: Any, sender: Connection, outcome_of: Measure | None, seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    warnings.simplefilter("ignore")
    sender.send((outcome_of or measure)(case, built=lambda: sender.send(None)))


def prepared(case: Case) -> tuple[nn.Module, dict[str, Any], Any, int]:
    """Return a model that runs, its inputs, its output and a lower bound of its layers."""
    first: Exception | None = None
    for rules in RULES:
        try:
            model = build(case, rules)
            for inputs in input_choices(model):
                try:
                    output, least = attending_calls(model, inputs)
                    if not all(bool(x.isfinite().any()) for _, x in _tensors(output)):
                        raise ArithmeticError("the output is not finite")
                    return model, inputs, output, least
                except Exception as error:
                    first = first or error
        except ImportError:
            raise
        except Exception as error:
            first = first or error
    raise first or ValueError("forward has no argument whose input is known")


def build(case: Case, rules: Rules = RULES[0]) -> nn.Module:
    """Return a tiny model with random weights.

    Raises an error of transformers for a configuration that it refuses, and `ValueError` for a model that is too large.
    """
    import transformers

    config_class = _config_class(case)
    config = tiny_config(config_class, rules, case.name)
    model_class = getattr(transformers, case.name)
    with torch.device("meta"):
        size = 0
        try:
            size = sum(parameter.numel() for parameter in model_class(config).parameters())
        except Exception:
            config = tiny_config(config_class, rules, case.name)
    if size > MOST_PARAMETERS:
        raise ValueError(f"the tiny model has more than {MOST_PARAMETERS:,} parameters")
    torch.manual_seed(0)
    with _initialised():
        model = model_class(config).float()
    draw_weights(model)
    return model.eval()


def _config_class(case: Case) -> type:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    declared = getattr(getattr(transformers, case.name), "config_class", None)
    return declared or CONFIG_MAPPING[case.model_type]


@contextmanager
def _initialised() -> Iterator[None]:
    """Fill memory that no rule initialises with NaN, so that weights do not depend on what it held before."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _output(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        return model(**inputs)


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield path, value.detach().double()
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if "hidden" in name or not re.search("past_key|cache|state|attentions|loss", name):
                yield from _tensors(inner, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _tensors(inner, f"{path}[{index}]")


def _wrong(error: str, message: str) -> dict[str, Any]:
    return {"outcome": "wrong", "error": error, "message": message}


def failed(outcome: str, error: Exception) -> dict[str, Any]:
    """Return the outcome of a model that ends in an error."""
    text = " ".join(str(error).split())
    text = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", text)
    text = re.sub(r"0x[0-9a-f]{6,}", "0x", text)
    return {"outcome": outcome, "error": type(error).__name__, "message": text[:MESSAGE]}
