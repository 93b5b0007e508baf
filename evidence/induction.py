"""Induction: recall the token after the last occurrence of the current one (Induction Table 2, sections 4 and 5)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from evidence import baselines, induction_length
from evidence.baselines import NEW_MIXER, RANDOM, SAME_TOKEN, SAME_TOKEN_ROW
from evidence.claims import HERE, Claim, Results
from evidence.comparisons import Comparison, Relation, better, bounded, within
from evidence.conv_ssm import ConvSSMForCausalLM
from evidence.convergence import CONVERGED, RULE
from evidence.mechanism import VOCABULARY, constructed, last_answers, mechanism
from evidence.pictures import COLOURS, figure
from evidence.rows import number, proportion
from evidence.study import BATCH, Model, Size, Study, View
from evidence.training import HELD_OUT_SEED, Recipe, scored_seed, selection_seed
from unilinattn.evaluation import Sample, Table
from unilinattn.examples import build
from unilinattn.examples.tasks import NO_ANSWER, Induction, TaskBatch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTH, WIDTH, STATE = 48, 64, 16
KEY = VOCABULARY - 1
"""Id of the special token."""

ACCURACY_SEQUENCES, MECHANISM_SEQUENCES = 1024, 64
DECAYS = (0.25, 0.5, 0.75, 0.9, 1.0)
"""Decays of the constructed model."""


@dataclass(frozen=True)
class SpecialToken(Induction):
    """Induction with a special token: it occurs twice, and the answer is the token after its first occurrence.

    The other tokens are drawn uniformly; the second occurrence is the last position, the only one with an answer
    (Induction 3.1, Table 1, after Gu and Dao, 2023).
    """

    def _draw(self, count: int, generator: torch.Generator) -> TaskBatch:
        ids = torch.randint(self.vocabulary - 1, (count, self.length), generator=generator)
        first = torch.randint(self.length - 2, (count, 1), generator=generator)
        ids.scatter_(1, first, KEY)
        ids[:, -1] = KEY
        labels = torch.full_like(ids, NO_ANSWER)
        labels[:, -1:] = ids.gather(1, first + 1)
        relevant = torch.zeros(count, self.length, self.length, dtype=torch.bool)
        relevant[:, -1] = torch.arange(self.length) == first + 1
        return TaskBatch(input_ids=ids, labels=labels, relevant=relevant)


TASKS: Mapping[str, Induction] = {
    "": Induction(vocabulary=VOCABULARY, length=LENGTH),
    "_key": SpecialToken(vocabulary=VOCABULARY, length=LENGTH),
}
"""The task without and with the special token, by the end of a model's name."""

SIMPLE = {"conv_ssm": (True, True), "conv": (True, False), "ssm": (False, True)}
BLOCKS = {"mamba_x1": 1, "mamba_x2": 2}
FULL = ("conv_ssm", "mamba_x1", "mamba_x2")
"""Models that the paper finds to solve the task."""
EXPLAINED = ("mamba_x1", "mamba_x2")
"""Models that the methods explain; the simplified ones have no residual stream, which most methods need."""

TABLE_2 = {
    "mamba_x2": ("94.8 %", "100 %"),
    "mamba_x1": ("92.9 %", "100 %"),
    "conv_ssm": ("90.3 %", "100 %"),
    "conv": ("21.8 %", "12.7 %"),
    "ssm": ("20.8 %", "8.50 %"),
}
"""Accuracies of Induction Table 2, without and with the special token."""

METHODS: Mapping[str, Any] = {
    "raw": ("raw", {}),
    "latim l1": ("latim", {"p": 1}),
    "latim l2": ("latim", {}),
    "alti": ("alti", {}),
    "rollout": ("rollout", {}),
    "attribution": ("attribution", {}),
    "alti rollout": ("alti", {"compose": "rollout"}),
    "logit": ("logit", {}),
    "lrp": ("lrp", {}),
    "attn_lrp": ("attn_lrp", {}),
    "gradient": ("gradient", {}),
    "input x gradient": ("input_x_gradient", {}),
    CONVERGED.label: CONVERGED,
}

BY_LAYER = ("raw", "latim l1", "latim l2", "alti")
COMPOSED = [name for name in METHODS if name not in (*BY_LAYER, CONVERGED.label)]
CONTROLLED = {RANDOM: [*BY_LAYER, *COMPOSED], NEW_MIXER: COMPOSED}
"""Methods that explain the controls; the map of one layer does not depend on later mixers."""


def _mamba(blocks: int) -> nn.Module:
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    shape = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "state_size": STATE, "num_hidden_layers": blocks}
    return build("mamba", {**shape, **tokens, "tie_word_embeddings": False, "use_cache": False})


def _models() -> dict[str, Model]:
    models = {}
    for ending in TASKS:
        for name, (conv, ssm) in SIMPLE.items():
            made = partial(ConvSSMForCausalLM, VOCABULARY, WIDTH, STATE, conv=conv, ssm=ssm)
            models[name + ending] = Model(made, Recipe(steps=1200, learning_rate=1e-2, weight_decay=0.0))
        for name, blocks in BLOCKS.items():
            recipe = Recipe(steps=700, learning_rate=5e-3, weight_decay=0.01, through_operators=True)
            models[name + ending] = Model(partial(_mamba, blocks), recipe)
    # The scan of the operator takes linear time.
    recipe = Recipe(steps=1200, learning_rate=1e-2, weight_decay=0.0, through_operators=True)
    models[induction_length.TRAINED] = Model(partial(ConvSSMForCausalLM, VOCABULARY, WIDTH, STATE), recipe)
    return models


class InductionStudy(Study):
    """Induction with and without a special token, by five models; the mechanism; and the methods."""

    name = "induction"
    title = "Induction"
    question = "Do scores of a predicted token name the one that followed the same token before?"
    source = "Induction Table 2, sections 4 and 5"
    text = f"""
Sequences of {LENGTH} random tokens of {VOCABULARY}; the answer is the token after the last earlier occurrence of the
last one. With the special token, the last token occurs once before. Models of width {WIDTH} and state {STATE}: the
paper's convolution of two taps and selective SSM without norm, gate or residual, either of them alone, and one or two
Mamba blocks. The paper's sequences have 255 tokens and its trainings up to 204,800 steps of 8.

`same token` marks the keys that hold the predicted token. Methods explain the prediction, also that of a model that has
not learned the task.
`construction` is the model of the paper's Eq. 12-17, whose parameters are written down but for the decay A: a state
without decay (1.0) sums all earlier occurrences, and with one half the last one outweighs the others.
"""
    caption = (
        "From left to right: accuracy without (filled) and with (open) the special token, three seeds each, crosses "
        "for the paper; absolute taps of the trained convolution, channels sorted; cosine of the key by the previous "
        "token and the query; hidden attention of one sequence's last token, the tokens after earlier occurrences in "
        "orange."
    )
    models = _models()
    size = Size(72, 24)
    views = (
        View(
            "accuracy",
            "Accuracy at the last position, 1024 sequences",
            [("", "without", "without special token"), ("", "with", "with special token")],
            {
                "paper, without": {name: pair[0] for name, pair in TABLE_2.items()},
                "paper, with": {name: pair[1] for name, pair in TABLE_2.items()},
            },
            "The paper does not say how often its models were trained.",
        ),
        induction_length.view(TABLE_2, LENGTH),
        View("construction", "The constructed model by its decay: accuracy", [("", "accuracy", "accuracy")]),
        View(
            "mechanism",
            "The mechanism in the trained convolution and SSM",
            [("conv_ssm", "value", "value")],
            note="The match of the same token is absolute: keys and unembedding may change their sign together.",
        ),
        View(
            "methods",
            "Methods against the key that holds the answer, last position",
            [
                (model, metric, f"{model}, {short}")
                for model in EXPLAINED
                for metric, short in (("hit_at_1", "hit@1"), ("ap", "AP"))
            ],
            note=f"Of two layers, the scored one is chosen on other sequences. {RULE}",
        ),
        baselines.controlled_view("methods", "The key of the answer", EXPLAINED),
    )

    def loss(self, host: nn.Module, model: str, seed: int, batch: int) -> Tensor:
        """Return the cross-entropy at all positions with an answer."""
        drawn = task_of(model).sample(batch, seed)
        logits = host(drawn.input_ids).logits
        return functional.cross_entropy(logits.flatten(0, 1), drawn.labels.flatten(), ignore_index=NO_ANSWER)

    def accuracy(self, host: nn.Module, model: str) -> float:
        """Return the share of right answers at the last position."""
        right = last_answers(host, task_of(model).sample(ACCURACY_SEQUENCES, HELD_OUT_SEED))
        return float(right.double().mean())

    def measure(
        self, hosts: Mapping[str, Callable[[], nn.Module]], seed: int, size: Size, out: Path
    ) -> dict[str, Table]:
        """Measure accuracies, the construction, the mechanism and the methods."""
        accuracies = []
        for model, load in hosts.items():
            if model == induction_length.TRAINED:
                continue
            heading = "with" if model.endswith("_key") else "without"
            right = last_answers(load(), task_of(model).sample(ACCURACY_SEQUENCES, scored_seed(seed)))
            accuracies += proportion(model.removesuffix("_key"), heading, right.tolist())
        batch = TASKS[""].sample(ACCURACY_SEQUENCES, scored_seed(seed))
        built = [
            row
            for decay in DECAYS
            for row in proportion(f"decay {decay}", "accuracy", last_answers(constructed(decay), batch).tolist())
        ]
        simple = hosts["conv_ssm"]()
        assert isinstance(simple, ConvSSMForCausalLM)
        measured = mechanism(simple, TASKS[""].sample(MECHANISM_SEQUENCES, scored_seed(seed)).input_ids)
        explained = {model: hosts[model] for model in EXPLAINED}
        scored, selection = samples(size.scored, scored_seed(seed)), samples(size.selection, selection_seed(seed))
        settings: dict[str, Any] = {"selection": selection, "progress": False, "batch_size": BATCH}
        table = ula.evaluate(
            explained,
            scored,
            {**SAME_TOKEN_ROW, **METHODS},
            ["hit_at_1", "ap"],
            out=out / "methods",
            **settings,
        )
        unlearned = ula.evaluate(
            baselines.controls(self.models, explained, seed),
            scored,
            {name: METHODS[name] for name in CONTROLLED[RANDOM]},
            ["ap"],
            out=out / "controls",
            **settings,
        )
        return {
            "accuracy": Table(accuracies),
            induction_length.TABLE: induction_length.measure(hosts, TASKS, seed, size.scored),
            "construction": Table(built),
            "mechanism": Table([number(name, "value", *pair, model="conv_ssm") for name, pair in measured.items()]),
            "methods": Table([*table, *unlearned]),
        }

    def remark(self, record: Mapping[str, Any]) -> str:
        """Return the baselines that win."""
        return baselines.remark(record, "methods", [SAME_TOKEN], CONTROLLED, EXPLAINED)

    def claims(self, results: Results) -> list[Claim]:
        """Return the claims of the paper and of this library."""
        paper = "Induction"

        def every(metric: str, model: str, relation: Relation, bound: float) -> list[Comparison]:
            return bounded("accuracy", metric, model, [""], relation, bound)

        def value(name: str, relation: Relation, bound: float) -> list[Comparison]:
            return bounded("mechanism", "value", name, ["conv_ssm"], relation, bound)

        def built(decay: float) -> list[Comparison]:
            return bounded("construction", "accuracy", f"decay {decay}", [""], ">", 0.99)

        return [
            Claim.of(
                "A convolution and a selective SSM, without norm, gate or second layer, solve induction without a "
                "special token",
                f"{paper} Table 2",
                every("without", "conv_ssm", ">", 0.85),
            ),
            Claim.of(
                "Neither the convolution nor the SSM solves the task without the other",
                f"{paper} Table 2",
                every("without", "conv", "<", 0.3),
                every("without", "ssm", "<", 0.3),
                every("with", "conv", "<", 0.3),
                every("with", "ssm", "<", 0.3),
            ),
            Claim.of(
                "With a special token every model with a convolution and an SSM is always right",
                f"{paper} Table 2",
                *(every("with", model, ">", 0.99) for model in FULL),
            ),
            Claim.of(
                "A second Mamba block adds little",
                f"{paper} Table 2",
                within("accuracy", "without", "mamba_x2", "mamba_x1", [""], most=0.05),
            ),
            Claim.of(
                "The trained embeddings are orthogonal",
                f"{paper} 4.2.1",
                value("embedding similarity", "<", 0.1),
            ),
            Claim.of(
                "Channels of the convolution carry either token: the taps' sizes are negatively correlated",
                f"{paper} 4.2.2",
                value("tap correlation", "<", 0),
                value("tap Pearson", "<", 0),
            ),
            Claim.of(
                "A key by the previous token matches the query by the same token: W_b (k_0 * e(w)) and "
                "W_c (k_1 * e(w))",
                f"{paper} 4.1, Eq. 16-17",
                value("match of the same token", ">", 0.8),
                value("match of other tokens", "<", 0.2),
                value("match of other tokens", ">", -0.2),
            ),
            Claim.of(
                "The state stores each token in the row of the token before it",
                f"{paper} 4.2.3, Fig. 6b",
                value("written to the predecessor", ">", 0.8),
            ),
            Claim.of(
                "The hidden attention of the last token points to a token after an earlier occurrence",
                f"{paper} 5, Fig. 7",
                value("attends after an occurrence", ">", 0.8),
            ),
            Claim.of(
                "The construction of Eq. 12-17, which give no A, solves the task without decay",
                f"{paper} 4.1, Eq. 12-17",
                built(1.0),
            ),
            Claim.of(
                "The construction solves the task with a decay of one half, so that the last occurrence outweighs all "
                "others",
                HERE,
                built(0.5),
            ),
            Claim.of(
                "`alti` finds the answer's key more often than `raw`",
                HERE,
                better("methods", "hit_at_1", "alti", "raw", EXPLAINED),
            ),
            Claim.of(
                "`logit` finds the answer's key more often than integrated gradients",
                HERE,
                better("methods", "hit_at_1", "logit", CONVERGED.label, EXPLAINED),
            ),
            Claim.of(
                "Every method finds the answer's key more often than chance",
                HERE,
                *(better("methods", "hit_at_1", method, "random", EXPLAINED) for method in METHODS),
            ),
            Claim.of(
                "Every method finds more than the keys that hold the predicted token",
                HERE,
                *(better("methods", "ap", method, SAME_TOKEN, EXPLAINED) for method in METHODS),
            ),
            *baselines.of_default("methods", [*COMPOSED, CONVERGED.label], EXPLAINED),
            *baselines.of_training("methods", "ap", CONTROLLED, EXPLAINED),
            *induction_length.claims(),
        ]

    def picture(self, hosts: Mapping[str, Callable[[], nn.Module]], results: Results) -> "Figure":
        """Draw the accuracies and the mechanism of the simplified model."""
        drawn = figure(13, 3.4)
        bars, taps, match, row = drawn.subplots(1, 4, width_ratios=[1.3, 0.8, 1, 1.3])
        for at, (name, papers) in enumerate(TABLE_2.items()):
            for heading, paper, fill in zip(("without", "with"), papers, (COLOURS[0], "white"), strict=True):
                values = [100 * value for value in results.values("accuracy", "", name, heading)]
                bars.plot(values, [at] * len(values), "o", color=fill, markeredgecolor=COLOURS[0], markersize=6)
                bars.plot(float(paper.removesuffix("%")), at, "x", color=COLOURS[1], markersize=6)
        bars.set_yticks(range(len(TABLE_2)), list(TABLE_2))
        bars.invert_yaxis()
        bars.set_xlabel("accuracy (%)")
        batch = TASKS[""].sample(MECHANISM_SEQUENCES, HELD_OUT_SEED)
        trace = ula.trace(hosts["conv_ssm"](), batch.input_ids, progress=False)
        sizes = ula.analysis.convolution_taps(trace.layers[0]).taps.abs()
        by_size = sizes[sizes[:, 1].argsort(descending=True)]
        taps.imshow(by_size, cmap="magma_r", aspect="auto", interpolation="nearest")
        taps.set_xticks([0, 1], ["current", "previous"])
        taps.set_ylabel("channel")
        pair = ula.analysis.token_keys(trace, 0, lag=1), ula.analysis.token_queries(trace, 0)
        match.imshow(ula.analysis.token_similarity(*pair).similarity, cmap="RdBu_r", vmin=-1, vmax=1)
        match.set(xlabel="query of token", ylabel="key by the previous token")
        weights = trace.layers[0].operator.rows(-1, scope="core", heads=0)[0].abs().flatten().tolist()
        ids = batch.input_ids[0].tolist()
        after = [at for at in range(1, LENGTH - 1) if ids[at - 1] == ids[-1]]
        row.vlines(range(LENGTH), 0, weights, color="#8a90a0", linewidth=1.5)
        row.vlines(after, 0, [weights[at] for at in after], color=COLOURS[1], linewidth=2.5)
        row.set(xlabel="key", ylabel="|hidden attention|")
        for ax in (bars, row):
            ax.spines[["top", "right"]].set_visible(False)
        return drawn


def task_of(model: str) -> Induction:
    """Return the task on which a model is trained, by its name."""
    task = TASKS["_key" if model.endswith("_key") else ""]
    return replace(task, length=induction_length.LENGTH) if model == induction_length.TRAINED else task


def samples(count: int, seed: int) -> list[Sample]:
    """Return sequences whose answer stands before the last position."""
    batch = TASKS[""].sample(2 * count, seed)
    earlier = batch.relevant[:, -1, :-1].any(1).nonzero().flatten().tolist()
    return [
        Sample(inputs=batch.input_ids[at : at + 1], target=LENGTH - 1, relevant=batch.relevant[at, -1])
        for at in earlier[:count]
    ]


STUDY = InductionStudy()
