import json
from pathlib import Path

import pytest
import torch

from unilinattn import examples
from unilinattn.errors import OptionError, ResultFileError
from unilinattn.evaluation import report, side_by_side
from unilinattn.evaluation.side_by_side import Counts, Measured, measure, select
from unilinattn.examples.tasks import HELD_OUT_SEED, SELECTION_SEED, TRAINING_SEEDS
from unilinattn.registry import method

FEW = Counts(accuracy=8, selection=4, scored=4)


@pytest.fixture(scope="module")
def measured() -> list[Measured]:
    chosen = [method(name) for name in ("raw", "rollout")]
    pairs = [("copying", "transformer"), ("induction", "transformer"), ("induction", "s4d")]
    return [measure(task, model, chosen, FEW) for task, model in pairs]


def test_the_seeds_of_choice_score_and_training_differ() -> None:
    assert SELECTION_SEED != HELD_OUT_SEED
    assert not {SELECTION_SEED, HELD_OUT_SEED} & set(TRAINING_SEEDS)


def test_other_held_out_sequences_change_the_scores_and_never_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [method("raw"), method("latim")]
    before = measure("induction", "s4d", chosen, FEW)
    monkeypatch.setattr(side_by_side, "HELD_OUT_SEED", HELD_OUT_SEED + 1)
    after = measure("induction", "s4d", chosen, FEW)
    for name in ("raw", "latim"):
        assert after.scores[name].selection == before.scores[name].selection
        assert after.scores[name].layer == before.scores[name].layer
        assert after.scores[name].found != before.scores[name].found
    assert not torch.equal(after.expected, before.expected)


def test_the_layer_has_the_best_selection_precision_even_where_it_scores_worse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Held-out sequences with the opposite answer: a choice that looked at them would take the other layer.
    problem = examples.TASKS["induction"]
    sample = type(problem).sample

    # The type checker sees no `self` in a function that will be a method.
    def swapped(self, count: int, seed: int) -> examples.TaskBatch:  # type: ignore[no-untyped-def]
        batch = sample(self, count, seed)
        if seed == SELECTION_SEED:
            return batch
        causal = torch.ones_like(batch.relevant[0]).tril()
        return examples.TaskBatch(batch.input_ids, batch.labels, causal & ~batch.relevant)

    monkeypatch.setattr(type(problem), "sample", swapped)
    score = measure("induction", "transformer", [method("raw")], FEW).scores["raw"]
    best = max(score.selection, key=lambda layer: score.selection[layer])
    assert score.layer == best == "model.layers.1.self_attn"
    assert score.found.auc < 0.1


def test_other_selection_sequences_change_what_the_choice_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    before = measure("induction", "s4d", [method("raw")], FEW).scores["raw"]
    monkeypatch.setattr(side_by_side, "SELECTION_SEED", SELECTION_SEED + 7)
    after = measure("induction", "s4d", [method("raw")], FEW).scores["raw"]
    assert after.selection != before.selection
    assert after.layer != before.layer or after.found == before.found


def test_what_is_measured(measured: list[Measured]) -> None:
    copying, transformer, fixed = measured
    assert (copying.name, copying.kind) == ("copying/transformer", "softmax attention")
    assert copying.accuracy > 0.98 and transformer.accuracy > 0.9 > fixed.accuracy
    assert all(0 <= one.worst_error <= 1e-5 for one in measured)
    # The second layer of a Transformer that solved induction attends to the answer itself.
    assert transformer.scores["raw"].found.ap > 0.95
    assert transformer.layer_index("raw") == 1
    assert transformer.scores["rollout"].layer is None
    assert transformer.scores["raw"].found.rows + transformer.scores["raw"].found.dropped == 4 * 48
    assert fixed.scores["raw"].found.ap < transformer.scores["raw"].found.ap


def test_only_keys_up_to_the_query_are_candidates() -> None:
    batch = examples.TASKS["induction"].sample(2, HELD_OUT_SEED)
    result = measure("induction", "s4d", [method("raw")], FEW).shown["raw"].select(layer=0)
    scores = batch.relevant[:1].float() + 2 * torch.ones(48, 48).triu(1)
    found = side_by_side._found(
        type(result)(scores=scores, dims=("batch", "query", "key"), method="known"),
        side_by_side._first(batch, 1),
    )
    assert (found.auc, found.ap, found.recall_at_k) == (1, 1, 1)


def test_the_numbers(measured: list[Measured]) -> None:
    found = report.numbers(measured, FEW, ["raw", "rollout"])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["seeds"] == {"selection": SELECTION_SEED, "held_out": HELD_OUT_SEED}
    assert found["options"]["sequences"] == {"accuracy": 8, "selection": 4, "scored": 4}
    assert list(found["models"]) == list(found["scores"]) == [one.name for one in measured]
    for one in measured:
        entry = found["models"][one.name]
        assert entry["reconstruction_error"] == max(entry["reconstruction_errors"].values())
        assert {"kind", "accuracy", "task", "model"} <= set(entry)
        for score in found["scores"][one.name].values():
            assert {"auc", "ap", "recall_at_k", "layer"} <= set(score)
    assert found["scores"]["copying/transformer"]["rollout"]["layer"] is None
    assert {"unilinattn", "torch", "transformers", "python"} <= set(found["versions"])


def test_the_numbers_name_neither_the_machine_nor_a_path(measured: list[Measured]) -> None:
    import platform

    text = json.dumps(report.numbers(measured, FEW, ["raw", "rollout"]))
    assert str(Path.home()) not in text and str(Path.cwd()) not in text
    assert platform.node() not in text


def test_the_table_has_a_line_a_method(measured: list[Measured]) -> None:
    lines = report.text_table(measured).splitlines()
    assert sum(bool(line.strip()) for line in lines) == 2 + 2 * len(measured)
    assert lines[0].split()[:3] == ["task", "model", "mixer"]
    assert lines[2].split()[:4] == ["copying", "transformer", "softmax", "attention"]
    assert max(map(len, lines)) <= 120


def test_the_page_and_the_picture(measured: list[Measured], tmp_path: Path) -> None:
    report.write(tmp_path, measured, report.numbers(measured, FEW, ["raw", "rollout"]))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted((report.PAGE, report.PICTURE, report.NUMBERS))
    page = (tmp_path / report.PAGE).read_text()
    # Two layers of raw and one composed map for each of three models, each with the answer outlined.
    assert page.count('<figure class="ula-map">') == page.count('<path class="expected"') == 9
    for link in ('src="http', 'href="http', "@import", "url(http"):
        assert link not in page
    assert (tmp_path / report.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_counts_that_do_not_fit() -> None:
    with pytest.raises(OptionError, match="no more scored than held out"):
        Counts(accuracy=4, selection=4, scored=5)
    with pytest.raises(OptionError, match="at least one"):
        Counts(selection=0)


def test_select() -> None:
    assert select("all", None) == examples.names()
    assert select("copying", ["s4d"]) == [("copying", "s4d")]
    with pytest.raises(OptionError, match="did you mean 'induction'"):
        select("inducton", None)
    with pytest.raises(OptionError, match="did you mean 'mamba2'"):
        select("copying", ["mamba-2"])


def write_report(folder: Path) -> None:
    (folder / report.NUMBERS).write_text(json.dumps({"format": report.FORMAT}))
    (folder / report.PAGE).write_text("page")


def test_a_report_appears_whole_and_replaces_an_older_one(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "report"
    with report.staged(out) as folder:
        write_report(folder)
        assert not out.exists()
    with report.staged(out) as folder:
        write_report(folder)
        (folder / report.PAGE).write_text("newer")
        assert (out / report.PAGE).read_text() == "page"
    assert (out / report.PAGE).read_text() == "newer"
    assert [path.name for path in out.parent.iterdir()] == ["report"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_report_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    out = tmp_path / "report"
    with report.staged(out) as folder:
        write_report(folder)
    with pytest.raises(error), report.staged(out) as folder:
        (folder / report.PAGE).write_text("half")
        raise error
    assert (out / report.PAGE).read_text() == "page"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"notes.txt": "mine"}, "notes.txt"),
        ({report.NUMBERS: "{}"}, "not one of ours"),
        ({report.NUMBERS: "[1]"}, "not one of ours"),
        ({report.PAGE: "another page"}, "not one of ours"),
        ({report.NUMBERS: json.dumps({"format": report.FORMAT}), "notes.txt": "mine"}, "notes.txt"),
    ],
)
def test_a_folder_that_is_not_just_a_report_is_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ResultFileError, match=message), report.staged(tmp_path):
        raise AssertionError
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_a_file_is_refused_and_an_empty_folder_taken(tmp_path: Path) -> None:
    file, empty = tmp_path / "file", tmp_path / "empty"
    file.write_text("mine")
    empty.mkdir()
    with pytest.raises(ResultFileError, match="no folder"), report.staged(file):
        raise AssertionError
    with report.staged(empty) as folder:
        write_report(folder)
    assert (empty / report.PAGE).read_text() == "page"
    with pytest.raises(ResultFileError, match="Cannot write"), report.staged(file / "below"):
        raise AssertionError
