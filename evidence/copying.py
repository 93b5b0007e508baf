"""Copying: repeat a source after a separator (LaTIM 4.1, Table 2)."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from evidence.baselines import (
    NEW_MIXER,
    RANDOM,
    SAME_TOKEN,
    SAME_TOKEN_ROW,
    controlled_view,
    controls,
    of_default,
    of_training,
    remark,
)
from evidence.claims import HERE, Claim, Results
from evidence.comparisons import better, within
from evidence.operators import by_operators
from evidence.pictures import figure
from evidence.remembered import remembered
from evidence.study import BATCH, Model, Size, Study, View
from evidence.training import HELD_OUT_SEED, SELECTION_SEED, Recipe, scored_seed, selection_seed
from unilinattn.evaluation import Sample, Table
from unilinattn.examples import accuracy, build
from unilinattn.examples.tasks import NO_ANSWER, Copying
from unilinattn.methods.default import CAUSAL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TASK = Copying(source_length=50, source_vocabulary=32)
ACCURACY_SEQUENCES = 128

BY_LAYER: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "raw": ("raw", {}),
    "latim l1": ("latim", {"p": 1}),
    "latim l2": ("latim", {}),
    "alti": ("alti", {}),
}
"""Methods that score one layer, chosen on other sequences."""

END_TO_END: Mapping[str, Any] = {
    "rollout": ("rollout", {}),
    "attribution": ("attribution", {}),
    "attention grad": ("attention_grad", {}),
    "contribution": ("contribution", {}),
    "alti rollout": ("alti", {"compose": "rollout"}),
    "alti logit": ("alti_logit", {}),
    "logit": ("logit", {}),
    "lrp": ("lrp", {}),
    "attn_lrp": ("attn_lrp", {}),
    CAUSAL.label: CAUSAL,
    **by_operators(
        {
            "gradient": "gradient",
            "input x gradient": "input_x_gradient",
            "integrated gradients": ("integrated_gradients", {"n_steps": 16}),
        }
    ),
}
"""Methods that compose all layers."""

COMPOSED = [name for name in END_TO_END if name != "integrated gradients"]
CONTROLLED = {RANDOM: [*BY_LAYER, *COMPOSED], NEW_MIXER: COMPOSED}
"""Methods that explain the controls: integrated gradients take as long as all others, and the map of one layer does not
depend on later mixers."""

BASELINES = ("random", "recency", "primacy")
METRICS = ("auc", "ap", "recall_at_k", "hit_at_1")
TABLE_2 = {
    "raw": (0.79, 0.49, 0.39),
    "attribution": (0.79, 0.47, 0.39),
    "latim l2": (0.98, 0.86, 0.74),
    "alti": (0.85, 0.71, 0.63),
    "alti logit": (0.87, 0.70, 0.61),
}
"""AUC, AP and Recall@K of LaTIM Table 2 for Mamba-2, against the three main diagonals."""


def _build(model: str) -> nn.Module:
    sizes = {
        "mamba2": {
            "hidden_size": 128,
            "expand": 1,
            "state_size": 48,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 1,
            "chunk_size": 64,
        },
        "transformer": {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 128,
            "max_position_embeddings": 128,
        },
    }
    tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False}
    shape = {"vocab_size": TASK.vocabulary, "num_hidden_layers": 4, "use_cache": False}
    return build(model, {**shape, **tokens, **sizes[model]})


def _view(table: str, title: str, model: str, papers: Mapping[str, Sequence[float]] = MappingProxyType({})) -> View:
    headings = ("AUC", "AP", "Recall@K", "hit@1")
    return View(
        table,
        title,
        [(model, metric, heading) for metric, heading in zip(METRICS, headings, strict=True)],
        {
            f"paper, {heading}": {method: f"{values[at]:.2f}" for method, values in papers.items()}
            for at, heading in enumerate(headings[:3] if papers else ())
        },
    )


class CopyingStudy(Study):
    """Copying of fifty tokens, by two architectures."""

    name = "copying"
    title = "Copying"
    question = "Do scores of a copied token name the position that it is copied from?"
    source = "LaTIM Table 2"
    text = """
A random source of 50 tokens of 32, a separator and the copy, which is read as input. The answer of each copied token
stands 50 positions before the query that predicts it. Models of four layers, trained on this task only: a Mamba-2 of
width 128 and a Transformer of width 64; the paper fine-tunes pretrained models of 370 million parameters.

A query is scored against the one key that holds its answer. LaTIM counts that key and its two neighbours, the three
main diagonals, though a change of the next source token does not change the answer: its numbers stand beside ours for
that pattern. Methods that keep a layer axis are scored at one layer, chosen on other sequences. `same token` marks the
keys that hold the predicted token. Methods explain the prediction, also that of a model that has not learned the task.
"""
    caption = (
        "Maps of one held-out sequence: rows are the queries that predict the fifty copied tokens, columns the keys. "
        "The answer lies on the diagonal on the left. Each layer was chosen on another sequence."
    )
    models: ClassVar[Mapping[str, Model]] = {
        "mamba2": Model(partial(_build, "mamba2"), Recipe(1500, 4e-3, through_operators=True)),
        "transformer": Model(partial(_build, "transformer"), Recipe(1000, 2e-3)),
    }
    size = Size(72, 24)
    quick = Size(2, 2)
    views = (
        _view("answer", "Mamba-2 against the key of the answer", "mamba2"),
        _view("answer", "Transformer against the key of the answer", "transformer"),
        _view("diagonals", "Mamba-2 against the three diagonals, as in the paper", "mamba2", TABLE_2),
        controlled_view("answer", "The key of the answer", ("mamba2", "transformer")),
    )

    def loss(self, host: nn.Module, model: str, seed: int, batch: int) -> Tensor:
        """Return the cross-entropy of the copied tokens."""
        drawn = TASK.sample(batch, seed)
        logits = host(drawn.input_ids).logits
        return functional.cross_entropy(logits.flatten(0, 1), drawn.labels.flatten(), ignore_index=NO_ANSWER)

    def accuracy(self, host: nn.Module, model: str) -> float:
        """Return the share of right copied tokens."""
        return accuracy(host, TASK.sample(ACCURACY_SEQUENCES, HELD_OUT_SEED))

    def measure(
        self, hosts: Mapping[str, Callable[[], nn.Module]], seed: int, size: Size, out: Path
    ) -> dict[str, Table]:
        """Score one random copied token of each sequence against its answer, and against the three diagonals."""
        methods: Mapping[str, Any] = {**BY_LAYER, **END_TO_END}
        tables = {}
        # The two patterns are those of the same sequences and scores.
        rows, loads = remembered(methods, {}), {name: cache(load) for name, load in hosts.items()}
        of_paper = {name: rows[name] for name in ("lrp", *TABLE_2)}
        for gold, models, names in (("answer", loads, rows), ("diagonals", {"mamba2": loads["mamba2"]}, of_paper)):
            tables[gold] = ula.evaluate(
                models,
                samples(size.scored, scored_seed(seed), gold),
                {**SAME_TOKEN_ROW, **names},
                METRICS,
                selection=samples(size.selection, selection_seed(seed), gold),
                select_by="ap",
                baselines=BASELINES,
                out=out / gold,
                progress=False,
                batch_size=BATCH,
            )
        unlearned = ula.evaluate(
            controls(self.models, hosts, seed),
            samples(size.scored, scored_seed(seed)),
            {name: methods[name] for name in CONTROLLED[RANDOM]},
            ["ap"],
            selection=samples(size.selection, selection_seed(seed)),
            baselines=BASELINES,
            out=out / "controls",
            progress=False,
            batch_size=BATCH,
        )
        tables["answer"] = Table([*tables["answer"], *unlearned])
        return tables

    def remark(self, record: Mapping[str, Any]) -> str:
        """Return the baselines that win."""
        return remark(record, "answer", [SAME_TOKEN], CONTROLLED, list(self.models))

    def claims(self, results: Results) -> list[Claim]:
        """Return the claims of LaTIM 4.1 and of this library."""
        recurrent, every = ("mamba2",), tuple(self.models)
        return [
            Claim.of(
                "All variants of LaTIM outperform the baselines: raw attention, attribution and LRP",
                "LaTIM 4.1",
                *(
                    better("diagonals", "ap", variant, baseline, recurrent)
                    for variant in ("latim l2", "alti", "alti logit")
                    for baseline in ("raw", "attribution", "lrp")
                ),
            ),
            Claim.of(
                "The l2 variant ranks the diagonals best of all, by AUC",
                "LaTIM Table 2",
                *(
                    better("diagonals", "auc", "latim l2", other, recurrent)
                    for other in ("raw", "attribution", "lrp", "alti", "alti logit")
                ),
            ),
            Claim.of(
                "`alti` finds more than `raw` on every architecture",
                HERE,
                better("answer", "ap", "alti", "raw", every),
            ),
            Claim.of(
                "`latim` finds more than `raw` on every architecture",
                HERE,
                better("answer", "ap", "latim l2", "raw", every),
            ),
            Claim.of(
                "`logit`, end to end, finds more than `rollout`, `attribution` and integrated gradients",
                HERE,
                *(
                    better("answer", "ap", "logit", other, every)
                    for other in ("rollout", "attribution", "integrated gradients")
                ),
            ),
            Claim.of(
                "`logit`, without a choice of a layer, finds no less than `latim` at its best layer",
                HERE,
                within("answer", "ap", "latim l2", "logit", every, most=0.05),
            ),
            Claim.of(
                "Every method finds more than the keys that hold the predicted token",
                HERE,
                *(better("answer", "ap", method, SAME_TOKEN, every) for method in (*BY_LAYER, *END_TO_END)),
            ),
            *of_default("answer", [*END_TO_END], every),
            *of_training("answer", "ap", CONTROLLED, every),
            Claim(
                "Mamba-1 finds less than Mamba-2 by every variant",
                "LaTIM Table 2",
                untested="a Mamba-1 of this size trains too slowly on two cores",
            ),
            Claim(
                "The numbers of pretrained models of 370 million parameters",
                "LaTIM Table 2",
                untested="the checkpoints are not part of this repository",
            ),
        ]

    def picture(self, hosts: Mapping[str, Callable[[], nn.Module]], results: Results) -> "Figure":
        """Draw the maps of one sequence, each at the layer that finds most on another one."""
        drawn = figure(11, 2.9 * len(hosts))
        axes = drawn.subplots(len(hosts), len(BY_LAYER), squeeze=False)
        queries = slice(TASK.source_length, 2 * TASK.source_length)
        for row, (model, load) in enumerate(hosts.items()):
            host, maps = load(), []
            for seed in (SELECTION_SEED, HELD_OUT_SEED):
                batch = TASK.sample(1, seed)
                trace = ula.trace(host, batch.input_ids, progress=False)
                maps.append(
                    [
                        ula.explain(trace, method=method, progress=False, **options).scores[:, 0, queries].abs()
                        for method, options in BY_LAYER.values()
                    ]
                )
            gold = TASK.sample(1, SELECTION_SEED).relevant[0, queries]
            for column, (label, selection, shown) in enumerate(zip(BY_LAYER, *maps, strict=True)):
                layer = int(((selection * gold).sum((1, 2)) / selection.sum((1, 2))).argmax())
                ax = axes[row][column]
                ax.imshow(shown[layer], cmap="magma_r", aspect="auto", interpolation="nearest")
                ax.set_title(f"{model}, {label}, layer {layer}", fontsize=10)
                ax.set_xlabel("key" if row == len(hosts) - 1 else "")
                ax.set_ylabel("copied token" if column == 0 else "")
        return drawn


def samples(count: int, seed: int, gold: str = "answer") -> list[Sample]:
    """Return sequences, each with one random query that predicts a copied token.

    `gold`: "answer", the one key that holds the answer, or "diagonals", LaTIM's pattern.
    """
    batch = TASK.sample(count, seed)
    generator = torch.Generator().manual_seed(seed)
    n = TASK.source_length
    targets = (n + torch.randint(n, (count,), generator=generator)).tolist()
    return [
        Sample(
            inputs=batch.input_ids[at : at + 1],
            target=target,
            relevant=batch.relevant[at, target] if gold == "answer" else TASK.diagonals[target],
        )
        for at, target in enumerate(targets)
    ]


STUDY = CopyingStudy()
