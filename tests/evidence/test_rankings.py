"""Rankings on numbers worked out by hand, the split, paired differences, the default, and the record of a part."""

import json
from pathlib import Path

import pytest
import torch

from evidence import rankings, real, scores, truths
from evidence.rankings import Row
from evidence.truths import Input
from unilinattn import methods
from unilinattn.errors import OptionError
from unilinattn.examples import TASKS, load

ATTENTION, RECURRENT = "smollm2", "text-mamba2"

DEFAULT = rankings.DEFAULTS[truths.CAUSAL]


def line(checkpoint: str, method: str, spearman: float, hit: float, half: str = "choose") -> list[Row]:
    head = {"checkpoint": checkpoint, "half": half, "tokens": "all", "method": method}
    return [{**head, "metric": "spearman", "mean": spearman}, {**head, "metric": "hit_at_1", "mean": hit}]


def rows(checkpoint: str, method: str, values: list[float], start: int = 0) -> list[Row]:
    lines = []
    for index, value in enumerate(values):
        numbers = {"hit_at_1": 0.0, "spearman": value}
        of_tokens = dict.fromkeys(rankings.TOKENS, numbers)
        lines.append({"checkpoint": checkpoint, "method": method, "input": start + index, **of_tokens})
    return lines


def only(lines: list[Row], **keys: str) -> Row:
    (match,) = (line for line in lines if all(line[key] == value for key, value in keys.items()))
    return match


def test_rankings_of_known_numbers_with_and_without_a_sink() -> None:
    truth = torch.tensor([0.5, 3.0, 1.0], dtype=torch.float64)
    values = torch.tensor([9.0, 2.0, 1.0], dtype=torch.float64)
    everything = torch.ones(3, dtype=torch.bool)
    # Ranks (3, 2, 1) against (1, 3, 2): 1 - 6 * (4 + 1 + 1) / 24.
    assert rankings.ranked(values, truth, everything) == pytest.approx({"hit_at_1": 0.0, "spearman": -0.5})
    rest = torch.tensor([False, True, True])
    assert rankings.ranked(values, truth, rest) == pytest.approx({"hit_at_1": 1.0, "spearman": 1.0})


def test_rows_without_the_explained_position_rank_the_other_tokens() -> None:
    prompt, classes = Input((5, 6, 7, 8), 3, 1, True), Input((5, 6, 7, 8), None, 1, True)
    of_prompt, of_classes = (rankings.choices(example, [1])["no last"].tolist() for example in (prompt, classes))
    assert of_prompt == [True, True, True, False]
    assert of_classes == [False, True, True, True]
    scored = {"recency": torch.arange(4.0, dtype=torch.float64)}
    # The last token has the largest effect, and the first one that of the others.
    (row,) = rankings.rows_of("a", [(scored, [0])], [prompt], [[3.0, 1.0, 2.0, 9.0]])
    assert [row[tokens]["hit_at_1"] for tokens in rankings.TOKENS] == [1.0, 1.0, 0.0]


def test_the_halves_share_no_input_and_differ_by_one_at_most() -> None:
    halves = [rankings.half(index) for index in range(64)]
    assert halves.count("choose") == halves.count("report") == 32
    assert halves[0] != halves[1]


def test_the_best_method_has_the_best_mean_on_the_chosen_half_of_methods_that_every_checkpoint_has() -> None:
    lines = [
        *line("a", "logit", 0.5, 0.1),
        *line("b", "logit", 0.3, 0.1),
        *line("a", "lrp", 0.4, 0.9),
        *line("b", "lrp", 0.4, 0.9),
        *line("a", "alti", 0.9, 0.9),
        *line("a", "raw", 0.1, 0.1),
        *line("b", "raw", 0.1, 0.1),
        *line("a", "raw", 1.0, 1.0, "report"),
        *line("b", "raw", 1.0, 1.0, "report"),
        *line("a", "recency", 1.0, 1.0),
        *line("b", "recency", 1.0, 1.0),
    ]
    # logit and lrp have the same mean correlation, and lrp has the larger hit@1.
    assert rankings.best_method(lines) == "lrp"


def test_methods_of_many_sequences_are_no_candidates_for_the_default() -> None:
    lines = [*line(ATTENTION, "logit", 0.5, 0.1), *line(ATTENTION, "occlusion", 0.9, 0.9)]
    sequences = {"logit": 2, "occlusion": rankings.PASSES + 1}
    assert rankings.best_methods(lines, {ATTENTION: sequences}) == {truths.CAUSAL: "logit"}
    assert rankings.best_methods(lines, {ATTENTION: {**sequences, "occlusion": 5}}) == {truths.CAUSAL: "occlusion"}


def test_differences_are_paired_and_on_the_inputs_that_both_methods_have() -> None:
    default = [index / 20 for index in range(20)]
    lines = [
        *rows(ATTENTION, DEFAULT, default),
        *rows(ATTENTION, "lrp", [value + 0.1 for value in default]),
        *rows(ATTENTION, "occlusion", [1.0], start=3),
    ]
    numbers = rankings.differences(lines)
    of_lrp = only(numbers, method="lrp", tokens="all", metric="spearman")
    assert {key: of_lrp[key] for key in ("mean", "low", "high", "count")} == {
        "mean": -0.1,
        "low": -0.1,
        "high": -0.1,
        "count": 10,
    }
    of_occlusion = only(numbers, method="occlusion", tokens="all", metric="spearman")
    assert (of_occlusion["mean"], of_occlusion["count"]) == (-0.85, 1)


def test_the_default_is_behind_the_best_other_method_of_few_sequences() -> None:
    default = [0.5 + index / 100 for index in range(20)]
    lines = [
        *rows(ATTENTION, DEFAULT, default),
        *rows(ATTENTION, "lrp", [value + 0.1 for value in default]),
        *rows(ATTENTION, "logit", [value - 0.1 for value in default]),
        *rows(ATTENTION, "occlusion", [1.0] * 20),
    ]
    read = {ATTENTION: {DEFAULT: 2, "lrp": 2, "logit": 2, "occlusion": 9}}
    best = only(rankings.behind(real.merged({}, lines, sequences=read)), tokens="all", metric="spearman")
    assert (best["method"], best["mean"], best["significant"]) == ("lrp", -0.1, True)
    without = [row for row in lines if row["method"] != "lrp"]
    best = only(rankings.behind(real.merged({}, without, sequences=read)), tokens="all", metric="spearman")
    assert (best["method"], best["mean"], best["significant"]) == ("logit", 0.1, False)


def test_the_default_is_above_or_below_a_baseline_where_the_interval_lies_on_that_side() -> None:
    values = [0.1 * index for index in range(20)]
    noise = [0.5 if index // 2 % 2 else -0.5 for index in range(20)]
    for shift, verdict in ((0.3, "above"), (-0.3, "below")):
        lines = [
            *rows(ATTENTION, DEFAULT, values),
            *rows(ATTENTION, "recency", [value - shift for value in values]),
            *rows(ATTENTION, "random", [value - each for value, each in zip(values, noise, strict=True)]),
            *rows(ATTENTION, "lrp", [value - shift for value in values]),
        ]
        numbers = rankings.beside_baselines({"differences": rankings.differences(lines)})
        assert {line["method"] for line in numbers} == set(rankings.BASELINES)
        assert {line["tokens"] for line in numbers} == {"all", "no last"}
        for tokens in ("all", "no last"):
            keys = {"tokens": tokens, "metric": "spearman"}
            assert only(numbers, method="recency", **keys)["verdict"] == verdict
            assert only(numbers, method="random", **keys)["verdict"] == "neither"
            # hit@1 is 0 for all, so that the interval is zero.
            assert only(numbers, method="recency", tokens=tokens, metric="hit_at_1")["verdict"] == "neither"


def test_baselines_stand_beside_the_default_where_the_last_token_is_explained() -> None:
    record = json.loads(Path(real.RECORD).read_text())
    compared = {line["checkpoint"] for line in rankings.beside_baselines(record)}
    for name, entry in truths.read().items():
        is_last = {row["position"] == len(row["ids"]) - 1 for row in entry["inputs"]}
        assert (name in compared) == (is_last == {True})


def test_a_record_of_one_checkpoint_keeps_the_numbers_of_the_others() -> None:
    read = {"attn_lrp": 2, "logit": 2}
    first = [*rows(ATTENTION, "attn_lrp", [0.3] * 4), *rows(ATTENTION, "logit", [0.1] * 4)]
    second = [*rows(RECURRENT, "attn_lrp", [0.3] * 4), *rows(RECURRENT, "logit", [0.6] * 4)]
    record = real.merged({}, second, sequences={RECURRENT: read}, skipped={ATTENTION: "no wheel"})
    record = real.merged(json.loads(json.dumps(record)), first, sequences={ATTENTION: read}, skipped={})
    assert record["skipped"] == {}
    assert record["best"] == {truths.CAUSAL: "attn_lrp", truths.RECURRENT: "logit"}
    # The order is that of the checkpoints, whichever was scored first.
    assert list(dict.fromkeys(row["checkpoint"] for row in record["numbers"])) == [ATTENTION, RECURRENT]
    again = real.merged(record, rows(ATTENTION, "logit", [0.9] * 4), sequences={ATTENTION: read}, skipped={})
    others = [row for row in again["numbers"] if row["checkpoint"] == RECURRENT]
    assert others == [row for row in record["numbers"] if row["checkpoint"] == RECURRENT]
    mine = [row for row in again["numbers"] if row["checkpoint"] == ATTENTION]
    numbers = {(row["method"], row["mean"]) for row in mine if row["metric"] == "spearman"}
    assert numbers == {("attn_lrp", 0.3), ("logit", 0.9)}
    assert again["sequences"] == {ATTENTION: read, RECURRENT: read}


def test_differences_of_a_former_default_are_left_out() -> None:
    lines = [*rows(RECURRENT, rankings.DEFAULTS[truths.RECURRENT], [0.3] * 4), *rows(RECURRENT, "raw", [0.1] * 4)]
    record = real.merged({}, lines, sequences={RECURRENT: {"raw": 1}}, skipped={})
    assert record["differences"]
    for line in record["differences"]:
        line["default"] = "another"
    again = real.merged(record, rows(RECURRENT, "logit", [0.1] * 4), sequences={RECURRENT: {"logit": 2}}, skipped={})
    assert again["differences"] == []


def test_an_unknown_checkpoint_is_refused() -> None:
    with pytest.raises(OptionError, match="rxnmapper"):
        real.run(names=["rxnmaper"])


def test_methods_of_many_sequences_are_scored_on_a_part_of_the_reporting_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "REFERENCE", 2)
    model = load("induction", "mamba2")
    ids = TASKS["induction"].sample(6, 0).input_ids[:, :12].tolist()
    examples = [Input(tuple(row), 11, 3, predicted=False) for row in ids]
    results, read = scores.scored(model, examples, [methods.Logit(), methods.Occlusion(), methods.Raw()])
    assert read["logit"] <= rankings.PASSES < read["occlusion"]
    assert ["occlusion" in of_input for of_input, _ in results] == [False, True, False, True, False, False]
    assert all({"logit", "raw", "recency", "random"} <= of_input.keys() for of_input, _ in results)


def test_inputs_of_a_batch_are_scored_as_alone() -> None:
    model = load("induction", "mamba2").double()
    ids = TASKS["induction"].sample(3, 0).input_ids[:, :12].tolist()
    examples = {index: Input(tuple(row), 11 - index, 3, predicted=False) for index, row in enumerate(ids)}
    candidates = [methods.Logit(), methods.Rollout()]
    batch = scores.scores_of(model, examples, candidates)
    for index, example in examples.items():
        (alone, _) = scores.scores_of(model, {index: example}, candidates)[index]
        for label, values in alone.items():
            torch.testing.assert_close(batch[index][0][label], values, rtol=1e-10, atol=1e-10)


def test_short_chunks_leave_the_function_of_mamba2() -> None:
    example = truths.CHECKPOINTS["text-mamba2"].inputs(*truths.CHECKPOINTS["text-mamba2"].load())[5]
    short, _ = truths.documented("mamba2")
    long = truths.documentation.load("mamba2")[0]
    chunks = [
        {module.chunk_size for module in model.modules() if hasattr(module, "chunk_size")} for model in (short, long)
    ]
    assert chunks[0] == {truths.CHUNK}
    assert chunks[1] != chunks[0]
    assert len(example.ids) > truths.CHUNK
    with torch.no_grad():
        logits = [model.double()(torch.tensor([example.ids])).logits for model in (short, long)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def test_every_recorded_checkpoint_has_truths_and_a_row_for_its_default() -> None:
    record = json.loads(Path(real.RECORD).read_text())
    for name in dict.fromkeys(row["checkpoint"] for row in record["numbers"]):
        counts = len(truths.read()[name]["inputs"])
        default = rankings.DEFAULTS[truths.CHECKPOINTS[name].kind]
        keys = {"checkpoint": name, "method": default, "tokens": "no last", "metric": "spearman"}
        assert sum(only(record["numbers"], **keys, half=half)["count"] for half in ("choose", "report")) == counts
