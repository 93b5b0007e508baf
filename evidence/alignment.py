"""Word alignment: which method finds the source words that a translation comes from (LaTIM 4.2, Table 3)."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from evidence import activations
from evidence.baselines import (
    NEW_MIXER,
    RANDOM,
    controlled_view,
    controls,
    of_default,
    of_training,
    remark,
    token_scorer,
)
from evidence.claims import HERE, Claim, Results
from evidence.comparisons import Comparison, better
from evidence.drawing import draw_links
from evidence.hosts import builder
from evidence.pictures import BASELINES, figure
from evidence.queries import in_one_batch
from evidence.study import BATCH, Model, Size, Study, View
from evidence.training import HELD_OUT_SEED, SELECTION_SEED, STEPS_OF_A_SEED, Recipe, scored_seed, selection_seed
from evidence.translation import END, NAMES, VOCABULARY, WORDS, sentences
from unilinattn.evaluation import Case, Sample, Table
from unilinattn.evaluation.measures import function_metric
from unilinattn.examples.tasks import NO_ANSWER
from unilinattn.methods.default import CAUSAL
from unilinattn.tracing.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def samples(count: int, seed: int) -> list[Sample]:
    """Return sentences in which every target word is explained by the source words."""
    data = sentences(count, seed)
    found = []
    for at in range(count):
        size = int(data.lengths[at])
        sure, possible = data.sure[at, :size, :size], data.possible[at, :size, :size]
        valid = sure.any(-1, keepdim=True) & (torch.arange(size) < WORDS)
        ids = data.input_ids[at : at + 1, :size]
        found.append(Sample(inputs=ids, relevant=sure, possible=possible, valid=valid, name=str(at)))
    return found


def single_words(sentences: Sequence[Sample]) -> list[Sample]:
    """Return each sentence with one target word explained: the words take turns."""
    single = []
    for at, sample in enumerate(sentences):
        assert sample.relevant is not None
        words = sample.relevant.any(-1).nonzero().flatten().tolist()
        target = words[at % len(words)]
        row = {name: getattr(sample, name)[target] for name in ("relevant", "possible", "valid")}
        single.append(Sample(inputs=sample.inputs, target=target, name=f"{sample.name}-{target}", **row))
    return single


def diagonal(trace: Trace, sample: Sample) -> Float[Tensor, "*query key"]:
    """Score source words by their closeness to the place of the target word, both as shares of their sentences."""
    size = sample.inputs.shape[1]
    query, key = torch.arange(size, dtype=torch.float64)[:, None] - WORDS, torch.arange(size, dtype=torch.float64)
    scores = -((query + 0.5) / (size - WORDS - 1) - (key + 0.5) / WORDS).abs()
    return scores if sample.target is None else scores[sample.target]


def entropy(case: Case) -> float:
    """Return the mean entropy, in bits, of a target word's absolute scores over the source words."""
    scores = torch.where(case.valid, case.scores.abs().double(), 0.0)
    scores = torch.atleast_2d(scores)[torch.atleast_2d(case.valid).any(-1)]
    # A row of zeros is spread evenly over the source words.
    shares = torch.where(scores.sum(-1, keepdim=True) > 0, scores, 1.0 / WORDS)[:, :WORDS]
    shares = shares / shares.sum(-1, keepdim=True)
    return float(-torch.special.xlogy(shares, shares).sum(-1).mean() / log(2))


DICTIONARY_SENTENCES = 2000


@cache
def dictionary() -> Float[Tensor, "target source"]:
    """Return Dice's coefficient of each target word and each source word over sentences like those of the training.

    Twice the number of sentences with both words, divided by the sum of the numbers with each of them.
    """
    data = sentences(DICTIONARY_SENTENCES, 3 * STEPS_OF_A_SEED)
    source, target = torch.zeros(2, DICTIONARY_SENTENCES, VOCABULARY, dtype=torch.float64)
    source.scatter_(1, data.input_ids[:, :WORDS], 1.0)
    target.scatter_(1, data.labels.masked_fill(data.labels == NO_ANSWER, END), 1.0)
    return 2 * target.T @ source / (target.sum(0)[:, None] + source.sum(0)).clamp(min=1)


def cooccurrence(trace: Trace, sample: Sample) -> Float[Tensor, "*query key"]:
    """Score the source words by the dictionary's coefficient of the target word that each query predicts."""
    ids = sample.inputs[0]
    scores = dictionary()[torch.cat([ids[1:], torch.tensor([END])])][:, ids]
    return scores if sample.target is None else scores[sample.target]


DICTIONARY = "dictionary"
OF_TOKENS: Mapping[str, Any] = {
    label: token_scorer(label, function) for label, function in (("diagonal", diagonal), (DICTIONARY, cooccurrence))
}
"""The rows of the diagonal and of co-occurrences, besides the usual baselines."""

BY_LAYER: Mapping[str, Any] = {
    "raw": "raw",
    "latim l1": ("latim", {"p": 1}),
    "latim l2": "latim",
    "alti": "alti",
}
"""Methods of one layer, chosen on other sentences."""

END_TO_END: Mapping[str, Any] = {
    "rollout": "rollout",
    "alti rollout": ("alti", {"compose": "rollout"}),
    "alti_logit": "alti_logit",
    **in_one_batch({"logit": "logit", "lrp": "lrp", "attn_lrp": "attn_lrp", CAUSAL.label: CAUSAL}),
}
"""Methods of all layers that explain every target word in one run."""

BY_WORD: Mapping[str, Any] = {
    "attribution": "attribution",
    "contribution": "contribution",
    "gradient": "gradient",
    "input_x_gradient": "input_x_gradient",
}
"""Methods that need a backward pass of the model for each target word."""

CONTROLLED = {RANDOM: [*BY_LAYER, *END_TO_END], NEW_MIXER: [*END_TO_END]}
"""Methods that explain the controls; the map of one layer does not depend on later mixers."""

RECIPES = {
    "mamba": Recipe(1000, 8e-3, through_operators=True),
    "mamba2": Recipe(1000, 8e-3, through_operators=True),
    "gated_deltanet": Recipe(1300, 8e-3, through_operators=True),
    "transformer": Recipe(2000, 3e-3),
}
MODELS = tuple(RECIPES)
HEADINGS = dict(zip(MODELS, ("Mamba-1", "Mamba-2", "Gated DeltaNet", "Transformer"), strict=True))

PAPER = {
    "lrp": ("0.50 / 0.65 / 0.65", "0.47 / 0.68 / 0.66", "", ""),
    "alti_logit": ("0.68 / 0.67 / 0.71", "0.69 / 0.71 / 0.69", "0.63 / 0.60 / 0.62", "0.69 / 0.74 / 0.76"),
    "raw": ("0.84 / 0.79 / 0.80", "0.85 / 0.79 / 0.79", "0.84 / 0.72 / 0.69", "0.85 / 0.79 / 0.78"),
    "attribution": ("0.86 / 0.81 / 0.73", "0.87 / 0.82 / 0.68", "0.78 / 0.81 / 0.72", "0.70 / 0.81 / 0.66"),
    "latim l2": ("0.46 / 0.47 / 0.46", "0.44 / 0.49 / 0.48", "0.49 / 0.43 / 0.35", "0.52 / 0.49 / 0.37"),
    "alti": ("0.55 / 0.52 / 0.53", "0.54 / 0.53 / 0.53", "0.51 / 0.47 / 0.38", "0.51 / 0.47 / 0.38"),
}
"""LaTIM Table 3: GoldAlign, IWSLT17 de-en and fr-en, of Mamba-1 small and large, and of Mamba-2 small and large."""

SIZES = ("LaTIM Mamba-1 130M", "LaTIM Mamba-1 370M", "LaTIM Mamba-2 130M", "LaTIM Mamba-2 370M")


SHOWN = 9
"""The scored sentence of the picture."""

POSSIBLE_WEIGHT = 0.4
"""Weight of a possible link in the picture of the known alignment."""


class Alignment(Study):
    """The study of word alignment."""

    name = "alignment"
    title = "Word alignment"
    question = "Do scores of a translated word name the source words that it translates?"
    source = "LaTIM Tables 3 and 4"
    text = """
Models translate sentences of eight words: a noun becomes a stem, for 13 of 18 nouns with an article before it; a
modifier moves behind its noun and takes its gender; a verb and its particle become one word. The input is the source,
a separator and the translation. A target word is predicted at the position before it, so the query of its row is the
preceding target word (the separator for the first). The gold alignment is exact. A verb and its particle are both
sure links of their word, of which a method that links each target word to its best source word finds one; the noun
whose gender a modifier takes is a possible link, since the gender also stands in the target. So AER differs from 1 -
Recall. Candidates are the source words. AER counts the links of all sentences; AP is the mean over target words, for
the sure links. `diagonal` links words by their places; `dictionary` links a target word to the source words with which
it occurs in other sentences, by Dice's coefficient, and reads no layer.
"""
    unit = "sentences"
    caption = (
        "One sentence, translated by Mamba-2: the source above, the translation below. A line is as strong as its "
        "score, relative to the best of its target word; sure links are dark blue, possible ones dotted, wrong ones "
        "orange. The layers were chosen on other sentences."
    )
    models: ClassVar[Mapping[str, Model]] = {
        **{name: Model(builder(name, VOCABULARY), recipe) for name, recipe in RECIPES.items()},
        **activations.retrained(RECIPES["mamba2"]),
    }
    size = Size(72, 24)
    quick = Size(4, 2)
    views = (
        View(
            "sentences",
            "AER, every target word",
            [(model, "aer", heading) for model, heading in HEADINGS.items()],
            {size: {name: row[at] for name, row in PAPER.items() if row[at]} for at, size in enumerate(SIZES)},
            "Smaller is better. LaTIM's numbers are for GoldAlign / IWSLT17 de-en / IWSLT17 fr-en. Methods of one "
            "layer are scored at the layer that is best on other sentences; `attribution`, which needs a backward pass "
            "for each word, is in the next table but one.",
        ),
        View(
            "sentences",
            "AP and entropy of the scores, every target word",
            [(model, metric, f"{heading} {label}")
             for metric, label in (("ap", "AP"), ("entropy", "bits"))
             for model, heading in HEADINGS.items()],
            note="Entropy of a target word's absolute scores over the eight source words: 0 for one word, 3 bits for "
            "an even spread.",
        ),
        View(
            "words",
            "AER and AP, one target word of each sentence",
            [(model, metric, f"{heading} {label}")
             for metric, label in (("aer", "AER"), ("ap", "AP"))
             for model, heading in HEADINGS.items()],
        ),
        controlled_view("sentences", "Every target word", MODELS),
        activations.VIEW,
    )  # fmt: skip

    def loss(self, host: nn.Module, model: str, seed: int, batch: int) -> Tensor:
        """Return the cross entropy of the translations."""
        data = sentences(batch, seed)
        logits = host(data.input_ids).logits
        return functional.cross_entropy(logits.flatten(0, 1), data.labels.flatten(), ignore_index=NO_ANSWER)

    @torch.no_grad()
    def accuracy(self, host: nn.Module, model: str) -> float:
        """Return the share of right target words, the end of the sentence included."""
        data = sentences(512, HELD_OUT_SEED)
        right = host(data.input_ids).logits.argmax(-1) == data.labels
        return right[data.labels != NO_ANSWER].double().mean().item()

    def measure(
        self, hosts: Mapping[str, Callable[[], nn.Module]], seed: int, size: Size, out: Path
    ) -> dict[str, Table]:
        """Return the tables `sentences`, of every target word, `words`, of one of each sentence, and `activations`."""
        every, hosts = hosts, {model: hosts[model] for model in MODELS}
        scored, selection = samples(size.scored, scored_seed(seed)), samples(size.selection, selection_seed(seed))
        metrics: dict[str, Any] = {"aer": "aer", "ap": "ap", "hit_at_1": "hit_at_1"}
        metrics["entropy"] = function_metric(entropy)
        settings: dict[str, Any] = {"progress": False, "batch_size": BATCH}
        unlearned = ula.evaluate(
            controls(self.models, hosts, seed),
            scored,
            {**BY_LAYER, **END_TO_END},
            ["ap"],
            selection=selection,
            out=out / "controls",
            **settings,
        )
        translated = ula.evaluate(
            hosts,
            scored,
            {**OF_TOKENS, **BY_LAYER, **END_TO_END},
            metrics,
            selection=selection,
            out=out / "sentences",
            **settings,
        )
        return {
            "sentences": Table([*translated, *unlearned]),
            "words": ula.evaluate(
                hosts,
                single_words(scored),
                {**OF_TOKENS, "latim l2": "latim", "logit": "logit", **BY_WORD},
                metrics,
                selection=single_words(selection),
                out=out / "words",
                **settings,
            ),
            activations.TABLE: activations.measure(every, seed, scored, selection, out / "activations"),
        }

    def remark(self, record: Mapping[str, Any]) -> str:
        """Return the baselines that win."""
        return remark(record, "sentences", [DICTIONARY], CONTROLLED, MODELS)

    def claims(self, results: Results) -> list[Claim]:
        """Return the claims of LaTIM 4.2 and 4.4, and those of this library."""
        both, every = MODELS[:2], MODELS

        def lower(method: str, than: str, models: tuple[str, ...], table: str = "sentences") -> list[Comparison]:
            return better(table, "aer", method, than, models, larger=False)

        def sharper(method: str, than: str, models: tuple[str, ...]) -> list[Comparison]:
            return better("sentences", "entropy", method, than, models, larger=False)

        def precise(method: str, than: str, table: str = "sentences") -> list[Comparison]:
            return better(table, "ap", method, than, every)

        ends = [name for name in END_TO_END if name != "logit"]
        claims = [
            Claim.of(
                "MambaLRP consistently outperforms LaTIM (ALTI-Logit) by AER",
                "LaTIM 4.2, Table 3 (Mamba-1)",
                lower("lrp", "alti_logit", ("mamba",)),
            ),
            Claim.of(
                "LaTIM (l2) has the lowest AER among all methods",
                "LaTIM 4.2, Table 3",
                *(lower("latim l2", other, both) for other in ("raw", "alti", "alti_logit")),
                lower("latim l2", "lrp", ("mamba",)),
                lower("latim l2", "attribution", both, "words"),
            ),
            Claim.of(
                "Alignments of one layer are preferable to those collapsed over all layers",
                "LaTIM 4.2, Table 3",
                *(lower(one, "alti_logit", both) for one in ("latim l2", "alti")),
                lower("latim l2", "lrp", ("mamba",)),
            ),
            Claim.of(
                "Heat maps of LaTIM (l2) are sparser than those of Mamba-Attention and MambaLRP",
                "LaTIM 4.2, Fig. 2",
                sharper("latim l2", "raw", both),
                sharper("latim l2", "lrp", ("mamba",)),
            ),
            Claim.of(
                "LaTIM (ALTI-Logit) is sparse, and still fails to capture the gold alignments",
                "LaTIM 4.2, Fig. 2",
                sharper("alti_logit", "raw", both),
                lower("latim l2", "alti_logit", both),
            ),
            *activations.claims(),
            Claim(
                "The ranking is the same for models of 130M and 370M parameters",
                "LaTIM Table 3",
                untested="the pretrained checkpoints and IWSLT17 are not part of this repository",
            ),
            Claim.of("`alti` finds more than `raw` on every architecture", HERE, precise("alti", "raw")),
            Claim.of("`latim` finds more than `raw` on every architecture", HERE, precise("latim l2", "raw")),
            Claim.of(
                "`logit` is the best method of all layers that explains every word in one run",
                HERE,
                *(precise("logit", other) for other in ends),
            ),
            Claim.of(
                "`logit` finds more than the methods that take a backward pass of the model for each word",
                HERE,
                *(precise("logit", other, "words") for other in BY_WORD),
            ),
        ]
        for table, methods in (("sentences", [*BY_LAYER, *END_TO_END]), ("words", [*BY_WORD])):
            claims += [
                Claim.of(
                    f"`{method}` aligns better than every baseline",
                    HERE,
                    *(lower(method, baseline, every, table) for baseline in (*BASELINES, DICTIONARY)),
                )
                for method in methods
            ]
        claims += of_default("sentences", [*END_TO_END], every)
        claims += of_training("sentences", "ap", CONTROLLED, every)
        return claims

    def picture(self, hosts: Mapping[str, Callable[[], nn.Module]], results: Results) -> "Figure":
        """Draw the known links of a sentence beside those of three methods on Mamba-2."""
        host, sample = hosts["mamba2"](), samples(self.size.scored, HELD_OUT_SEED)[SHOWN]
        methods = {"LaTIM (latim l2)": "latim", "Mamba-Attention (raw)": "raw", "Exact shares (logit)": "logit"}
        table = ula.evaluate({"": host}, [sample], methods, ["aer"], selection=samples(8, SELECTION_SEED), baselines=[])
        assert sample.relevant is not None and sample.possible is not None
        queries = sample.relevant.any(-1).nonzero().flatten()
        sure, possible = sample.relevant[queries, :WORDS], sample.possible[queries, :WORDS]
        ids = sample.inputs[0]
        above, below = ([NAMES[token] for token in part.tolist()] for part in (ids[:WORDS], ids[queries + 1]))
        drawn = figure(11.6, 6.4)
        axes = drawn.subplots(2, 2)
        gold = sure + POSSIBLE_WEIGHT * (possible & ~sure)
        draw_links(axes.flat[0], above, below, gold, sure, possible, "Known alignment")
        for axis, row in zip(axes.flat[1:], table, strict=True):
            composed = row["layer"] == "all"
            options: dict[str, Any] = {} if composed else {"layers": [row["layer"]]}
            scores = ula.explain(host, sample.inputs, method=methods[row["method"]], progress=False, **options).scores
            layer = "" if composed else f", layer {row['layer'].split('.')[2]}"
            title = f"{row['method']}{layer}: AER {row['value']:.2f}"
            draw_links(axis, above, below, scores.flatten(0, -3)[0, queries, :WORDS], sure, possible, title)
        return drawn


STUDY = Alignment()
