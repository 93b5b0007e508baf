import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import unilinattn as ula
from tests.evaluation import tiny
from unilinattn.errors import InputError, OptionError, ResultFileError
from unilinattn.evaluation import (
    Case,
    PerturbationTest,
    Sample,
    Table,
    task_samples,
)
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.trace import Trace

RANKINGS = ("auc", "ap", "recall_at_k", "hit_at_1", "aer")


def ranked_row(scores: list[float], relevant: list[bool], valid: list[bool]) -> dict[str, float]:
    """The ranking metrics of one row of different scores, by loops over its keys."""
    keys = sorted((j for j in range(len(scores)) if valid[j]), key=lambda j: -scores[j])
    hits = [j for j in keys if relevant[j]]
    others = [j for j in keys if not relevant[j]]
    precisions = [sum(relevant[k] for k in keys[: keys.index(j) + 1]) / (keys.index(j) + 1) for j in hits]
    return {
        "auc": sum(scores[j] > scores[k] for j in hits for k in others) / (len(hits) * len(others)),
        "ap": sum(precisions) / len(hits),
        "recall_at_k": sum(relevant[j] for j in keys[: len(hits)]) / len(hits),
        "hit_at_1": float(relevant[keys[0]]),
        # One link and one sure link a row, so that the error rate is the mean over rows.
        "aer": 1.0 - float(relevant[keys[0]]),
    }


def ranked(scores: Tensor, sample: Sample) -> list[dict[str, float]]:
    assert sample.relevant is not None
    length = scores.shape[-1]
    rows = []
    for i in range(length):
        relevant = [bool(sample.relevant[i, j]) for j in range(length)]
        valid = [j < i and any(relevant) for j in range(length)]
        if any(relevant):
            rows.append(ranked_row(scores[i].tolist(), relevant, valid))
    return rows


def mean(rows: list[dict[str, float]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def rows_of(table: Table) -> list[Any]:
    return json.loads(json.dumps([dict(row) for row in table]))


@pytest.mark.long
def test_the_table_equals_plain_loops() -> None:
    model, data, selection = tiny.model(), tiny.data(), tiny.selection()
    table = ula.evaluate(
        {"s4d": model}, data, ["logit", "raw"], RANKINGS, selection=selection, select_by="ap", baselines=["recency"]
    )
    precision = [0.0, 0.0]
    for layer in range(2):
        results = [ula.explain(model, sample.inputs, method="raw").scores[layer, 0] for sample in selection]
        rows = [row for scores, one in zip(results, selection, strict=True) for row in ranked(scores, one)]
        precision[layer] = mean(rows, "ap")
    best = precision.index(max(precision))
    expected: dict[str, Callable[[Sample], Tensor]] = {
        "recency": lambda sample: torch.arange(7.0).expand(7, 7),
        "logit": lambda sample: ula.explain(model, sample.inputs, method="logit").scores[0],
        "raw": lambda sample: ula.explain(model, sample.inputs, method="raw").scores[best, 0],
    }
    assert len(table) == 3 * 3 * len(RANKINGS)
    for method, score in expected.items():
        by_sample = [ranked(score(sample), sample) for sample in data]
        for name in RANKINGS:
            chosen = table.select(method=method, metric=name)
            assert [row["sample"] for row in chosen] == ["0", "1", "2"]
            for row, rows in zip(chosen, by_sample, strict=True):
                assert row["value"] == pytest.approx(mean(rows, name), abs=1e-12)
            (total,) = table.summary().select(method=method, metric=name)
            assert total["value"] == pytest.approx(mean([row for rows in by_sample for row in rows], name), abs=1e-12)
    assert {row["layer"] for row in table.select(method="raw")} == {f"layers.{best}.mixer"}
    assert [{row["layer"] for row in table.select(method=name)} for name in ("logit", "recency")] == [{"all"}, {""}]


def layered(trace: Trace, sample: Sample) -> Attribution:
    """Layer 0 finds the answer of a sample named "0", layer 1 that of the others."""
    relevant = sample.relevant.double()  # type: ignore[union-attr]  # not None
    order = [relevant, -relevant] if sample.name.startswith("first") else [-relevant, relevant]
    return Attribution(
        scores=torch.stack(order)[:, None], dims=("layer", "batch", "query", "key"), method="l", layers=("a", "b")
    )


def test_the_layer_is_chosen_on_the_selection_alone() -> None:
    def named(name: str, seed: int) -> list[Sample]:
        (one,) = task_samples(tiny.TASK, 1, seed=seed)
        return [Sample(inputs=one.inputs, relevant=one.relevant, valid=one.valid, name=name)]

    arguments = ({"m": tiny.model()}, named("second", 1), {"layered": layered})
    for select_by, chosen in ((None, ("a", 0.0)), ("aer", ("a", 0.0))):
        table = ula.evaluate(
            *arguments, ["hit_at_1", "aer"], selection=named("first", 2), select_by=select_by, baselines=[]
        )
        assert (table[0]["layer"], table[0]["value"]) == chosen
    with pytest.raises(OptionError, match=r"model m, sample second, layered: .* 2 layers; give `selection`"):
        ula.evaluate(*arguments, ["ap"], baselines=[])
    with pytest.raises(InputError, match="selection sample 0 is sample 0 of data"):
        ula.evaluate(*arguments, ["ap"], selection=named("first", 1), baselines=[])
    one_layer = ula.evaluate(arguments[0], arguments[1], [("raw", {"layers": [1]})], ["ap"], baselines=[])
    assert one_layer[0]["layer"] == "layers.1.mixer" and one_layer[0]["method"] == "raw (layers=[1])"


def test_an_object_is_the_row_of_its_name_and_options() -> None:
    raw = ula.methods.Raw
    objects = [raw(layers=[1]), raw(layers="mean")]
    listed = ula.evaluate({"m": tiny.model()}, tiny.data(1), objects, ["ap"], baselines=[])
    pairs = [("raw", {"layers": [1]}), ("raw", {"layers": "mean"})]
    assert rows_of(listed) == rows_of(ula.evaluate({"m": tiny.model()}, tiny.data(1), pairs, ["ap"], baselines=[]))
    labelled = ula.evaluate({"m": tiny.model()}, tiny.data(1), {"mine": raw(layers=[1])}, ["ap"], baselines=[])
    assert (labelled[0]["method"], labelled[0]["value"]) == ("mine", listed[0]["value"])


@pytest.mark.usefixtures("unchecked")
def test_a_method_is_no_metric() -> None:
    with pytest.raises(OptionError, match="'latim'"):
        ula.evaluate({"m": tiny.model()}, tiny.data(1), ["raw"], [ula.methods.Latim()], baselines=[])


DRAWN: list[str] = []


def draw(trace: Trace, sample: Sample) -> Tensor:
    """Random scores, counted in `DRAWN`."""
    DRAWN.append(sample.name)
    return torch.rand(7, 7)


def test_random_scores_depend_on_the_sample_and_the_seed_alone() -> None:
    data, methods = tiny.data(3), {"draw": draw}
    metrics = {"sum": lambda case: float(case.scores.sum())}
    three = ula.evaluate({"m": tiny.model()}, data, methods, metrics)
    two = ula.evaluate({"m": tiny.model()}, data[:2], methods, metrics, baselines=["random"])
    for method in ("random", "draw"):
        values = [row["value"] for row in three.select(method=method)]
        assert len(set(values)) == 3
        assert [row["value"] for row in two.select(method=method)] == values[:2]
    other = ula.evaluate({"m": tiny.model()}, data, methods, metrics, seed=1)
    assert rows_of(other.select(method="draw")) != rows_of(three.select(method="draw"))


def test_the_callers_generator_is_left_alone() -> None:
    model = tiny.model()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    ula.evaluate({"m": model}, tiny.data(1), {"draw": draw}, ["auc"])
    assert torch.equal(torch.rand(3), expected)


def test_perturbation_metrics_are_those_of_the_test() -> None:
    model, target = tiny.model(), 4
    (sample,) = task_samples(tiny.TASK, 1, target=target)
    options = {"masking": "token", "mask_token_id": 0}
    names = {
        "positive_perturbation": lambda test: test.positive().area,
        "negative_perturbation": lambda test: test.negative().area,
        "activation_auac": lambda test: test.activation().area,
        "pruning_au_mse": lambda test: test.pruning().area,
        "comprehensiveness": lambda test: test.comprehensiveness(),
        "sufficiency": lambda test: test.sufficiency(),
    }
    metrics = {name: (name, options) for name in names}
    table = ula.evaluate(
        {"m": model},
        [sample],
        ["logit"],
        {**metrics, "other": ("pruning_au_mse", {**options, "mask_token_id": 1})},
        baselines=[],
    )
    scores = ula.explain(model, sample.inputs, method="logit", target=target).scores
    valid = (torch.arange(7) < target)[None]
    arguments = {"target": target, "valid": valid, "labels": torch.tensor([sample.label])}
    test = PerturbationTest(model, sample.inputs, scores, masking="token", mask_token_id=0, **arguments)
    for name, measure in names.items():
        assert table.select(metric=name)[0]["value"] == measure(test)
    other = PerturbationTest(model, sample.inputs, scores, masking="token", mask_token_id=1, **arguments)
    assert table.select(metric="other")[0]["value"] == other.pruning().area != test.pruning().area


def test_the_completeness_gap_has_rows_for_shares_of_a_logit() -> None:
    (sample,) = task_samples(tiny.TASK, 1, target=4)
    model = tiny.model()
    table = ula.evaluate({"m": model}, [sample], ["logit", "rollout"], ["completeness_gap", "auc"])
    (row,) = table.select(metric="completeness_gap")
    result = ula.explain(model, sample.inputs, method="logit", target=4)
    total = sum(result.scores[0].double().tolist()) + float(result.extras["bias"])
    exact = float(result.extras["logit"])
    assert row["method"] == "logit"
    assert row["value"] == pytest.approx(abs(total - exact) / abs(exact), abs=1e-15) and row["value"] < 1e-5
    with pytest.raises(InputError, match="no method has a completeness_gap"):
        ula.evaluate({"m": model}, [sample], ["rollout"], ["completeness_gap"])


def test_default_keys_are_those_that_reach_the_query() -> None:
    model, (one,) = tiny.model(), tiny.data(1)
    seen: dict[str, Tensor] = {}

    def look(case: Case) -> float:
        seen[case.sample.name] = case.valid
        return 0.0

    data = [Sample(inputs=one.inputs, target=target, name=name) for name, target in (("all", None), ("one", 4))]
    ula.evaluate({"m": model}, data, ["rollout"], {"look": look}, baselines=[])
    assert torch.equal(seen["all"], torch.ones(7, 7, dtype=torch.bool).tril(-1))
    assert seen["one"].tolist() == [True] * 4 + [False] * 3


UNITS = 9
"""Files of the evaluation below: configuration, model, two of the selection, three of the samples, two tables."""


def stored_evaluation(out: Path | None, **changed: Any) -> Table:
    arguments: dict[str, Any] = {
        "models": {"s4d": tiny.model()},
        "data": tiny.data(),
        "methods": {"raw": "raw", "draw": draw},
        "metrics": ["ap", "auc"],
        "selection": tiny.selection(),
        **changed,
    }
    return ula.evaluate(**arguments, out=out)


def test_functions_with_arguments_are_known_by_them_in_every_run(tmp_path: Path) -> None:
    def evaluated(factor: float) -> Table:
        scaled = partial(lambda case, factor: factor * float(case.ranking.ap), factor=factor)
        return stored_evaluation(tmp_path, metrics={"ap": "ap", "scaled": scaled}, select_by="ap")

    first = rows_of(evaluated(2.0))
    DRAWN.clear()
    assert rows_of(evaluated(2.0)) == first
    assert len(DRAWN) <= 1, "stored samples are not computed again"
    with pytest.raises(ResultFileError, match=r"\(factor=2.0\)\" there, .*\(factor=3.0\)\" now"):
        evaluated(3.0)


@pytest.mark.slow
def test_an_interruption_at_every_file_changes_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rows_of(stored_evaluation(None))
    replace = Path.replace
    for stop in range(UNITS):
        out, written = tmp_path / str(stop), []

        def interrupted(self: Path, target: Path) -> Path:
            if len(written) == stop:  # noqa: B023  called in this turn of the loop
                raise KeyboardInterrupt
            written.append(target)  # noqa: B023  as above
            return replace(self, target)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Path, "replace", interrupted)
            stored_evaluation(out)
        files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        assert len(files) == len(written) == stop
        DRAWN.clear()
        assert rows_of(stored_evaluation(out)) == expected
        # Samples that were stored are not computed again; each process finds out once that `draw` has no layers.
        left = min(3, max(0, UNITS - 2 - stop))
        assert len(DRAWN) == left + (stop < 4)
        assert all(path.read_bytes() == content for path, content in files.items())
        assert rows_of(Table.load(out / "table.json")) == expected
        assert not list(out.rglob("*.tmp"))
    assert stop == UNITS - 1 and len(files) == UNITS - 1


def test_another_configuration_is_refused_with_its_differences(tmp_path: Path) -> None:
    out = tmp_path / "out"
    stored_evaluation(out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    changes: dict[str, tuple[str, Any]] = {
        r'methods\.raw\.options\.scope is "core" there, "mixer" now': (
            "methods",
            {"raw": ("raw", {"scope": "mixer"}), "draw": draw},
        ),
        r"methods\.raw is stored, and not asked for": ("methods", {"draw": draw}),
        r"metrics\.aer is asked for, and not stored": ("metrics", ["ap", "auc", "aer"]),
        r"data\.3 is asked for": ("data", tiny.data(4)),
        r"data\.0 is .* now": ("data", task_samples(tiny.TASK, 3, seed=7)),
        r"selection is .* now": ("selection", tiny.selection(3)),
        r"seed is 0 there, 1 now": ("seed", 1),
        r'models is \["s4d"\] there, \["s4d", "other"\] now': ("models", {"s4d": tiny.model(), "other": tiny.model()}),
        r"s4d\.weights is .* now": ("models", {"s4d": tiny.model(1)}),
    }
    for message, (name, value) in changes.items():
        with pytest.raises(ResultFileError, match=f"another evaluation: .*{message}"):
            stored_evaluation(out, **{name: value})
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_folders_of_others_and_damaged_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ResultFileError, match=r"holds 'notes\.txt' and no configuration\.json"):
        stored_evaluation(tmp_path)
    with pytest.raises(ResultFileError, match="is no folder"):
        stored_evaluation(tmp_path / "notes.txt")
    out = tmp_path / "out"
    stored_evaluation(out)
    (out / "samples" / "0-000001.json").write_text('[{"model"')
    with pytest.raises(ResultFileError, match=r"0-000001\.json is damaged .* delete it"):
        stored_evaluation(out)


def test_models_are_loaded_when_there_is_work_for_them(tmp_path: Path) -> None:
    loaded = []

    def load() -> Any:
        loaded.append(1)
        return tiny.model()

    for _ in range(2):
        stored_evaluation(tmp_path / "out", models={"s4d": load})
    assert len(loaded) == 1
    with pytest.raises(InputError, match="returned a int, no model"):
        stored_evaluation(None, models={"s4d": lambda: 3})


def test_each_sample_and_row_has_its_seed_and_random_scores_are_averaged() -> None:
    draws: list[float] = []

    def first(case: Case) -> float:
        draws.append(float(case.scores[-1, 0]))
        return draws[-1]

    def drawn(_: Trace, __: Sample) -> Tensor:
        return torch.rand(7, 7)

    def evaluated() -> Table:
        methods, metrics = {"one": drawn, "two": drawn}, {"first": first, "seed": lambda case: case.seed}
        return ula.evaluate({"s4d": tiny.model()}, tiny.data()[:2], methods, metrics, baselines=["random"])

    table = evaluated()
    of_rows = [row["value"] for name in ("one", "two") for row in table.select(method=name, metric="first")]
    assert len(set(of_rows)) == 4
    # The metrics of one sample share its seed.
    names = sorted({row["sample"] for row in table})
    seeds = [{row["value"] for row in table.select(sample=name, metric="seed")} for name in names]
    assert [len(each) for each in seeds] == [1, 1] and seeds[0] != seeds[1]
    random = [draw for draw in draws[:6] if draw not in of_rows]
    assert len(set(random)) == 4
    (row, _) = table.select(method="random", metric="first")
    assert row["value"] == pytest.approx(sum(random) / 4)
    assert rows_of(evaluated()) == rows_of(table)
