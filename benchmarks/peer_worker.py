"""One of the two processes of `benchmarks.peers`: the hidden attention of a Mamba-1 model, and its rollout.

python -m benchmarks.peer_worker TOOL CHECKPOINT LENGTH ROUNDS THREADS RESULTS

Runs in the environment of the tool, and therefore imports nothing of unilinattn before it is chosen. Prints the figures
of each stage as JSON, and saves the map and the row of the rollout in the file RESULTS.
"""

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.resident import growth

WARM_UP = 16
"""Tokens of the first run, which is not measured."""

ONCE = 10.0
"""Seconds of a round after which there is no other."""


class Unilinattn:
    """This library."""

    package = "unilinattn"

    def __init__(self, checkpoint: str) -> None:
        """Load the model."""
        import unilinattn

        self._library = unilinattn
        self._model = transformers.MambaForCausalLM.from_pretrained(checkpoint).eval()

    def run(self, ids: Tensor) -> Any:
        """Run the model and record its layers."""
        return self._library.trace(self._model, ids, progress=False)

    def map(self, run: Any) -> Tensor:
        """Return the mean over channels of the first layer's hidden attention, (1, query, key)."""
        attention: Tensor = run.layers[0].operator.matrix()
        return attention

    def rollout(self, run: Any) -> Tensor:
        """Return the rollout of the last token, (1, key)."""
        scores: Tensor = self._library.explain(run, method="rollout", target=-1, progress=False).scores
        return scores


class TransformerLens:
    """TransformerLens, which materialises the maps of all channels and has no rollout."""

    package = "transformer_lens"

    def __init__(self, checkpoint: str) -> None:
        """Load the model and its hooks."""
        from transformer_lens.model_bridge import TransformerBridge

        self._bridge = TransformerBridge.boot_transformers(checkpoint, device="cpu")
        for block in self._bridge.blocks:
            # The mixer of transformers 5.23 reads dt_proj's weight without calling the module, so that the hook from
            # which the maps are computed runs only in the bridge's own scan.
            block.mixer.eager_scan = True

    def run(self, ids: Tensor) -> Any:
        """Run the model and cache its activations."""
        return self._bridge.run_with_cache(ids, use_cache=False)[1]

    def map(self, run: Any, layer: int = 0) -> Tensor:
        """Return the mean over channels of a layer's hidden attention, (1, query, key)."""
        attention: Tensor = run.compute_ssm_effective_attention(layer=layer, include_dt_scaling=True)
        return attention.mean(1)

    def rollout(self, run: Any) -> Tensor:
        """Multiply the last token's row by I + A of every layer, (1, key)."""
        layers = len(self._bridge.blocks)
        row: Tensor | None = None
        for layer in reversed(range(layers)):
            attention = self.map(run, layer)[0]
            if row is None:
                row = torch.zeros(attention.shape[-1])
                row[-1] = 1
            row = row + row @ attention
        assert row is not None
        return row[None]


TOOLS = {"unilinattn": Unilinattn, "transformer_lens": TransformerLens}


def measured(tool: Any, ids: Tensor, rounds: int) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """Return seconds and growth of each stage in each round, and the results of the last round."""
    stages: dict[str, dict[str, Any]] = {name: {"seconds": [], "bytes": []} for name in ("run", "map", "rollout")}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        results = []

        def call_once() -> Any:
            start = time.perf_counter()
            results.append(call())
            stages[name]["seconds"].append(float(f"{time.perf_counter() - start:.4g}"))
            return results[0]

        stages[name]["bytes"].append(growth(call_once))
        return results[0]

    results: dict[str, Tensor] = {}
    begun = time.perf_counter()
    for _ in range(rounds):
        record = timed("run", lambda: tool.run(ids))
        results["map"] = timed("map", lambda record=record: tool.map(record))
        # Another record: the first one may have cached a part of the rollout.
        record = tool.run(ids)
        results["rollout"] = timed("rollout", lambda record=record: tool.rollout(record))
        if time.perf_counter() - begun > ONCE:
            break
    return stages, results


@torch.no_grad()
def main() -> None:
    """Measure one tool."""
    name, checkpoint, length, rounds, threads, path = sys.argv[1:]
    torch.set_num_threads(int(threads))
    tool = TOOLS[name](checkpoint)
    ids = torch.randint(64, (1, int(length)), generator=torch.Generator().manual_seed(0))
    measured(tool, ids[:, :WARM_UP], 1)
    stages, results = measured(tool, ids, int(rounds))
    torch.save(results, path)
    versions = {package: version(package) for package in ("torch", "transformers", tool.package)}
    print(json.dumps({"versions": versions, "stages": stages}))


if __name__ == "__main__":
    main()
