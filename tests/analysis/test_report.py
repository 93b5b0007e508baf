"""The comparison of the trained models and its report."""

import json
import platform
import re
from functools import cache
from pathlib import Path

import pytest
import torch

import unilinattn as ula
from unilinattn import examples
from unilinattn.analysis import report, report_folder
from unilinattn.analysis.compare import compare_trained, method_rows
from unilinattn.analysis.comparison import ModelComparison
from unilinattn.errors import OptionError, ResultFileError
from unilinattn.evaluation import task_samples, trained
from unilinattn.evaluation.metrics import earlier_keys
from unilinattn.evaluation.trained import Counts, select
from unilinattn.examples.tasks import HELD_OUT_SEED, SELECTION_SEED, TRAINING_SEEDS

FEW = Counts(accuracy=8, selection=4, scored=4)


@cache
def compared() -> tuple[ModelComparison, ModelComparison]:
    chosen = ["raw", "rollout"]
    return (
        compare_trained("copying", ["transformer"], chosen, FEW),
        compare_trained("induction", ["transformer", "s4d"], chosen, FEW),
    )


def values(found: ModelComparison, model: str, metric: str = "ap") -> dict[str, float]:
    return {row["method"]: row["value"] for row in found.table.summary().select(model=model, metric=metric)}


def layer(found: ModelComparison, method: str) -> str:
    """The scored layer of a method of a single model."""
    (name,) = {row["layer"] for row in found.table.select(method=method)}
    return name


def test_the_seeds_of_selection_scores_and_training_differ() -> None:
    assert SELECTION_SEED != HELD_OUT_SEED
    assert not {SELECTION_SEED, HELD_OUT_SEED} & set(TRAINING_SEEDS)


@pytest.mark.slow
def test_held_out_sequences_do_not_affect_the_choice_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ["raw", "latim"]
    before = compare_trained("induction", ["s4d"], chosen, FEW)
    monkeypatch.setattr(
        trained,
        "task_samples",
        lambda task, count, *, seed=HELD_OUT_SEED + 1, target=None: task_samples(task, count, seed=seed, target=target),
    )
    monkeypatch.setattr(trained, "HELD_OUT_SEED", HELD_OUT_SEED + 1)
    after = compare_trained("induction", ["s4d"], chosen, FEW)
    assert after.models["s4d"].selection == before.models["s4d"].selection
    for name in chosen:
        assert layer(after, name) == layer(before, name)
        assert values(after, "s4d")[name] != values(before, "s4d")[name]


def test_the_layer_is_chosen_on_the_selection_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    # Held-out sequences with opposite relevance: a choice that used them would take the other layer.
    problem = examples.TASKS["induction"]
    sample = type(problem).sample

    # mypy does not know that this function becomes a method.
    def swapped(self, count: int, seed: int) -> examples.TaskBatch:  # type: ignore[no-untyped-def]
        batch = sample(self, count, seed)
        if seed == SELECTION_SEED:
            return batch
        earlier = earlier_keys(48) & batch.relevant.any(-1, keepdim=True)
        return examples.TaskBatch(batch.input_ids, batch.labels, earlier & ~batch.relevant)

    monkeypatch.setattr(type(problem), "sample", swapped)
    found = compare_trained("induction", ["transformer"], ["raw"], FEW)
    selection = found.models["transformer"].selection["raw"]
    best = max(selection, key=lambda name: selection[name])
    assert layer(found, "raw") == best == "model.layers.1.self_attn"
    assert values(found, "transformer", "auc")["raw"] < 0.1


@pytest.mark.long
def test_the_choice_of_layers_uses_the_selection_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compare_trained("induction", ["s4d"], ["raw"], FEW)
    monkeypatch.setattr(trained, "SELECTION_SEED", SELECTION_SEED + 7)
    after = compare_trained("induction", ["s4d"], ["raw"], FEW)
    assert after.models["s4d"].selection != before.models["s4d"].selection
    assert layer(after, "raw") != layer(before, "raw") or values(after, "s4d") == values(before, "s4d")


@pytest.mark.slow
def test_the_measurements_of_trained_models() -> None:
    copying, induction = compared()
    transformer, fixed = induction.models.values()
    assert transformer.kinds == ("softmax attention",) * 2
    assert copying.models["transformer"].accuracy > 0.98 and transformer.accuracy > 0.9 > fixed.accuracy
    assert all(0 <= one.worst_error <= 1e-5 for found in compared() for one in found.models.values())
    # The second layer of a Transformer that solves induction attends to the answer.
    assert values(induction, "transformer")["raw"] > 0.95
    layers = {row["method"]: row["layer"] for row in induction.table.select(model="transformer")}
    assert layers == {
        **{name: "" for name in ("random", "recency", "primacy", "intervention")},
        "raw": "model.layers.1.self_attn",
        "rollout": "all",
    }
    assert list(values(induction, "s4d")) == ["random", "recency", "primacy", "raw", "rollout", "intervention"]
    assert values(induction, "s4d")["raw"] < values(induction, "transformer")["raw"]
    assert transformer.tokens == (48,) * 4


def test_each_variant_of_a_method_is_a_row() -> None:
    rows = method_rows(["alti", "raw"])
    assert list(rows) == ["alti", "alti (composed)", "raw"] and (rows["alti"], rows["raw"]) == ("alti", "raw")
    assert rows["alti (composed)"] == ula.methods.Alti(compose="rollout")


@pytest.mark.slow
def test_recency_beats_rollout_and_attribution_on_linear_rnns() -> None:
    for model in ("mamba", "mamba2"):
        found = compare_trained("induction", [model], ["rollout", "attribution", "alti"], FEW)
        for metric in ("ap", "hit_at_1"):
            scores = values(found, model, metric)
            for name in ("rollout", "attribution"):
                assert scores[name] < scores["recency"] < scores["alti (composed)"]


@pytest.mark.long
def test_the_intervention_correlates_with_itself_and_ranks_the_answer_first() -> None:
    for found in compared():
        for model in found.models:
            assert values(found, model, "rank_correlation")["intervention"] == pytest.approx(1)
            assert values(found, model)["intervention"] > values(found, model)["recency"]
    assert values(compared()[0], "transformer", "hit_at_1")["intervention"] > 0.95


def test_the_diagonal_of_the_shown_maps_is_blank() -> None:
    diagonal = torch.eye(48, dtype=torch.bool)
    for _, _, result in compared()[1].shown.results():
        assert result.scores[..., diagonal].isnan().all()
        assert not result.scores[..., ~diagonal].isnan().any()


def test_the_numbers_are_plain_and_name_neither_the_machine_nor_a_path() -> None:
    numbers = report.numbers(compared())
    text = json.dumps(numbers, allow_nan=False)
    assert json.loads(text) == numbers and numbers["format_version"] == "3"
    assert numbers["seeds"] == {"selection": SELECTION_SEED, "held_out": HELD_OUT_SEED, "intervention": 1}
    assert numbers["sequences"] == {"accuracy": 8, "selection": 4, "scored": 4}
    assert [stored["task"] for stored in numbers["comparisons"]] == ["copying", "induction"]
    for stored, found in zip(numbers["comparisons"], compared(), strict=True):
        assert stored["table"] == [dict(row) for row in found.table.summary()]
        for one in stored["models"].values():
            assert one["worst_error"] == max(one["reconstruction_error"].values())
            assert {"kinds", "accuracy", "statistics", "selection"} <= set(one)
    assert {"unilinattn", "torch", "transformers", "python"} <= set(numbers["versions"])
    assert not any(name in text for name in (str(Path.home()), str(Path.cwd()), platform.node()))


def test_the_text_has_the_table_of_each_task() -> None:
    text = report.text(compared())
    for found in compared():
        assert f"\n\n{found.table}\n\n" in text and f"{found.task}\n\n" in text
    for words in ("random scores, the mean of 4 draws", "rank_correlation: ", "intervention: "):
        assert words in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.long
def test_the_page_and_the_picture(tmp_path: Path) -> None:
    report.write(tmp_path, compared())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        (report_folder.PAGE, report_folder.PICTURE, report_folder.NUMBERS)
    )
    page = (tmp_path / report_folder.PAGE).read_text()
    boards = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    # Two layers of raw, one composed map and the intervention for each of three models; answers are outlined.
    assert [list(board["columns"]) for board in boards] == [["transformer"], ["transformer", "s4d"]]
    assert [list(dict.fromkeys(cell["row"] for cell in board["cells"])) for board in boards] == [
        ["raw", "rollout", "intervention"]
    ] * 2
    cells = [cell for board in boards for cell in board["cells"]]
    pictures = [picture for cell in cells for picture in cell["pictures"]]
    assert len(pictures) == 12 and all(picture["expected"] for picture in pictures)
    copying, induction = compared()
    for found, model, first in ((copying, "transformer", 0), (induction, "transformer", 3), (induction, "s4d", 4)):
        # The scored layer is shown first, and has the average precision.
        cell = cells[first]
        assert (cell["row"], cell["column"]) == ("raw", model)
        (scored,) = {row["layer"] for row in found.table.select(model=model, method="raw")}
        assert cell["pictures"][cell["start"]]["title"] == scored
        assert cell["notes"][cell["start"]] == f"AP over all sequences {values(found, model)['raw']:.3f}"
        assert cell["notes"][1 - cell["start"]] == "layer not scored"
    for words in (
        "recency",
        "primacy",
        "intervention",
        "hit_at_1",
        "induction: Layers",
        "scored 4",
        "Similarity of the maps",
    ):
        assert words in page
    assert f"accuracy {induction.models['s4d'].accuracy:.1%}" in page
    assert page.index('class="ula-board"') < page.index("<table>")
    for link in ('src="http', 'href="http', "@import", "url(http"):
        assert link not in page
    assert (tmp_path / report_folder.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_invalid_counts_are_refused() -> None:
    for counts in ({"accuracy": 0}, {"selection": 0}, {"scored": 0}):
        with pytest.raises(OptionError, match="at least one"):
            Counts(**counts)


def test_select() -> None:
    assert [(task, model) for task, models in select("all", None).items() for model in models] == examples.names()
    assert select("copying", ["s4d"]) == {"copying": ["s4d"]}
    with pytest.raises(OptionError, match="did you mean 'induction'"):
        select("inducton", None)
    with pytest.raises(OptionError, match="did you mean 'mamba2'"):
        select("copying", ["mamba-2"])


def write_report(folder: Path) -> None:
    (folder / report_folder.NUMBERS).write_text(json.dumps({"format": report_folder.FORMAT}))
    (folder / report_folder.PAGE).write_text("page")


def test_a_report_is_written_atomically_and_replaces_an_older_one(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "report"
    with report_folder.staged(out) as folder:
        write_report(folder)
        assert not out.exists()
    with report_folder.staged(out) as folder:
        write_report(folder)
        (folder / report_folder.PAGE).write_text("newer")
        assert (out / report_folder.PAGE).read_text() == "page"
    assert (out / report_folder.PAGE).read_text() == "newer"
    assert [path.name for path in out.parent.iterdir()] == ["report"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_report_changes_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    out = tmp_path / "report"
    with report_folder.staged(out) as folder:
        write_report(folder)
    with pytest.raises(error), report_folder.staged(out) as folder:
        (folder / report_folder.PAGE).write_text("half")
        raise error
    assert (out / report_folder.PAGE).read_text() == "page"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"notes.txt": "mine"}, "notes.txt"),
        ({report_folder.NUMBERS: "{}"}, "not one of ours"),
        ({report_folder.NUMBERS: "[1]"}, "not one of ours"),
        ({report_folder.PAGE: "another page"}, "not one of ours"),
        ({report_folder.NUMBERS: json.dumps({"format": report_folder.FORMAT}), "notes.txt": "mine"}, "notes.txt"),
    ],
)
def test_a_folder_with_other_files_is_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ResultFileError, match=message), report_folder.staged(tmp_path):
        raise AssertionError
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_a_file_is_refused_and_an_empty_folder_accepted(tmp_path: Path) -> None:
    file, empty = tmp_path / "file", tmp_path / "empty"
    file.write_text("mine")
    empty.mkdir()
    with pytest.raises(ResultFileError, match="no folder"), report_folder.staged(file):
        raise AssertionError
    with report_folder.staged(empty) as folder:
        write_report(folder)
    assert (empty / report_folder.PAGE).read_text() == "page"
    with pytest.raises(ResultFileError, match="Cannot write"), report_folder.staged(file / "below"):
        raise AssertionError
