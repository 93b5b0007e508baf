import json
import re
from pathlib import Path

import pytest
import torch

from unilinattn import examples
from unilinattn.errors import OptionError, ResultFileError
from unilinattn.evaluation import report, side_by_side
from unilinattn.evaluation.metrics import earlier_keys
from unilinattn.evaluation.side_by_side import Counts, Measured, measure, select
from unilinattn.examples.tasks import HELD_OUT_SEED, SELECTION_SEED, TRAINING_SEEDS
from unilinattn.registry import method

FEW = Counts(accuracy=8, selection=4, scored=4)


@pytest.fixture(scope="module")
def measured() -> list[Measured]:
    chosen = [method(name) for name in ("raw", "rollout")]
    pairs = [("copying", "transformer"), ("induction", "transformer"), ("induction", "s4d")]
    return [measure(task, model, chosen, FEW) for task, model in pairs]


def test_the_seeds_of_selection_scores_and_training_differ() -> None:
    assert SELECTION_SEED != HELD_OUT_SEED
    assert not {SELECTION_SEED, HELD_OUT_SEED} & set(TRAINING_SEEDS)


def test_held_out_sequences_do_not_affect_the_choice_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [method("raw"), method("latim")]
    before = measure("induction", "s4d", chosen, FEW)
    monkeypatch.setattr(side_by_side, "HELD_OUT_SEED", HELD_OUT_SEED + 1)
    after = measure("induction", "s4d", chosen, FEW)
    for name in ("raw", "latim"):
        assert after.scores[name].selection == before.scores[name].selection
        assert after.scores[name].layers == before.scores[name].layers
        assert after.scores[name].found != before.scores[name].found
    assert not torch.equal(after.expected, before.expected)


def test_the_layer_is_chosen_on_the_selection_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    score = measure("induction", "transformer", [method("raw")], FEW).scores["raw"]
    best = max(score.selection, key=lambda layer: score.selection[layer])
    assert score.layers == (best,) == ("model.layers.1.self_attn",)
    assert score.found.auc < 0.1


def test_the_choice_of_layers_uses_the_selection_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    before = measure("induction", "s4d", [method("raw")], FEW).scores["raw"]
    monkeypatch.setattr(side_by_side, "SELECTION_SEED", SELECTION_SEED + 7)
    after = measure("induction", "s4d", [method("raw")], FEW).scores["raw"]
    assert after.selection != before.selection
    assert after.layers != before.layers or after.found == before.found


def test_the_measurements_of_trained_models(measured: list[Measured]) -> None:
    copying, transformer, fixed = measured
    assert (copying.name, copying.kind) == ("copying/transformer", "softmax attention")
    assert copying.accuracy > 0.98 and transformer.accuracy > 0.9 > fixed.accuracy
    assert all(0 <= one.worst_error <= 1e-5 for one in measured)
    # The second layer of a Transformer that solves induction attends to the answer.
    assert transformer.scores["raw"].found.ap > 0.95
    assert [transformer.layer_text(row) for row in ("raw", "rollout", "recency", "intervention")] == [
        "1",
        "all",
        "-",
        "-",
    ]
    assert transformer.scores["rollout"].layers == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    assert list(fixed.scores) == ["random", "recency", "primacy", "raw", "rollout", "intervention"]
    assert transformer.scores["raw"].found.rows + transformer.scores["raw"].found.dropped == 4 * 48
    assert fixed.scores["raw"].found.ap < transformer.scores["raw"].found.ap


def test_only_keys_before_the_query_are_candidates() -> None:
    batch = examples.TASKS["induction"].sample(2, HELD_OUT_SEED)
    scores = batch.relevant.float()
    found = side_by_side.answer_scores(scores + 2 * torch.ones(48, 48).triu(), batch)
    assert (found.auc, found.ap, found.recall_at_k, found.hit_at_1) == (1, 1, 1, 1)
    worse = side_by_side.answer_scores(scores + 2 * torch.ones(48, 48).triu(-1), batch)
    assert worse.hit_at_1 < 0.2


def test_an_answer_at_the_query_is_dropped_and_counted() -> None:
    ids, labels = torch.tensor([[3, 3, 5, 3, 7]]), torch.tensor([[-100, 3, -100, 5, -100]])
    relevant = torch.zeros(1, 5, 5, dtype=torch.bool)
    relevant[0, 1, 1] = relevant[0, 3, 2] = True
    batch = examples.TaskBatch(ids, labels, relevant)
    found = side_by_side.answer_scores(torch.arange(5.0).expand(1, 5, 5), batch)
    assert (found.rows, found.dropped, found.hit_at_1) == (1, 4, 1)


def test_the_baselines_rank_by_position_or_at_random() -> None:
    batch = examples.TASKS["copying"].sample(96, HELD_OUT_SEED)
    drawn, recency, primacy = side_by_side.baselines(batch).values()
    assert torch.equal(recency[0, 0].argsort(), torch.arange(33))
    assert torch.equal(primacy[0, 0].argsort(), torch.arange(33).flip(0))
    found = side_by_side.answer_scores(drawn, batch)
    assert found.auc == pytest.approx(0.5, abs=0.02)
    # By chance, one key of the n before each query.
    assert found.hit_at_1 == pytest.approx(sum(1 / n for n in range(16, 32)) / 16, abs=0.01)


def test_each_variant_of_a_method_is_a_row() -> None:
    rows = side_by_side.forms([method("alti"), method("raw")])
    assert [(name, dict(form.options)) for name, form in rows.items()] == [
        ("alti", {}),
        ("alti (composed)", {"compose": "rollout"}),
        ("raw", {}),
    ]


@pytest.mark.slow
def test_recency_beats_rollout_and_attribution_on_linear_rnns() -> None:
    chosen = [method(name) for name in ("rollout", "attribution", "alti")]
    for model in ("mamba", "mamba2"):
        scores = measure("induction", model, chosen, Counts(accuracy=16)).scores
        recency, composed = scores["recency"].found, scores["alti (composed)"].found
        for name in ("rollout", "attribution"):
            assert scores[name].found.ap < recency.ap < composed.ap
            assert scores[name].found.hit_at_1 < recency.hit_at_1 < composed.hit_at_1


def test_the_intervention_correlates_with_itself_and_ranks_the_answer_first(measured: list[Measured]) -> None:
    for one in measured:
        truth = one.scores["intervention"]
        assert truth.correlation.mean == pytest.approx(1)
        assert truth.correlation.rows == truth.found.rows == one.scores["recency"].correlation.rows
        assert truth.found.ap > one.scores["recency"].found.ap
    assert measured[0].scores["intervention"].found.hit_at_1 > 0.95


def test_the_diagonal_of_the_shown_maps_is_blank(measured: list[Measured]) -> None:
    diagonal = torch.eye(48, dtype=torch.bool)
    for result in measured[1].shown.values():
        assert result.scores[..., diagonal].isnan().all()
        assert not result.scores[..., ~diagonal].isnan().any()


def test_the_numbers(measured: list[Measured]) -> None:
    numbers = report.numbers(measured, FEW, ["raw", "rollout"])
    assert json.loads(json.dumps(numbers, allow_nan=False)) == numbers
    assert numbers["format_version"] == "2"
    assert numbers["seeds"] == {"selection": SELECTION_SEED, "held_out": HELD_OUT_SEED, "random": 0, "intervention": 1}
    assert numbers["options"]["sequences"] == {"accuracy": 8, "selection": 4, "scored": 4}
    assert list(numbers["models"]) == list(numbers["scores"]) == [one.name for one in measured]
    for one in measured:
        entry = numbers["models"][one.name]
        assert entry["reconstruction_error"] == max(entry["reconstruction_errors"].values())
        assert {"kind", "accuracy", "task", "model"} <= set(entry)
        for score in numbers["scores"][one.name].values():
            assert {"auc", "ap", "hit_at_1", "rank_correlation", "layers"} <= set(score)
    assert len(numbers["scores"]["copying/transformer"]["rollout"]["layers"]) == 2
    assert numbers["scores"]["copying/transformer"]["recency"]["layers"] == []
    assert {"unilinattn", "torch", "transformers", "python"} <= set(numbers["versions"])


def test_the_numbers_name_neither_the_machine_nor_a_path(measured: list[Measured]) -> None:
    import platform

    text = json.dumps(report.numbers(measured, FEW, ["raw", "rollout"]))
    assert str(Path.home()) not in text and str(Path.cwd()) not in text
    assert platform.node() not in text


def test_the_table_has_one_line_per_row_of_scores(measured: list[Measured]) -> None:
    lines = report.text_table(measured).splitlines()
    assert sum(bool(line.strip()) for line in lines) == 2 + 6 * len(measured)
    assert lines[0].split()[-5:] == ["hit@1", "AP", "AUC", "corr.", "layer"]
    assert lines[0].split()[:3] == ["task", "model", "mixer"]
    assert lines[2].split()[:4] == ["copying", "transformer", "softmax", "attention"]
    assert max(map(len, lines)) <= 120


def test_the_page_and_the_picture(measured: list[Measured], tmp_path: Path) -> None:
    report.write(tmp_path, measured, report.numbers(measured, FEW, ["raw", "rollout"]))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted((report.PAGE, report.PICTURE, report.NUMBERS))
    page = (tmp_path / report.PAGE).read_text()
    boards = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    # Two layers of raw, one composed map and the intervention for each of three models; answers are outlined.
    assert [list(board["columns"]) for board in boards] == [["transformer"], ["transformer", "s4d"]]
    assert [list(dict.fromkeys(cell["row"] for cell in board["cells"])) for board in boards] == [
        ["raw", "rollout", "intervention"]
    ] * 2
    cells = [cell for board in boards for cell in board["cells"]]
    pictures = [picture for cell in cells for picture in cell["pictures"]]
    assert len(pictures) == 12 and all(picture["expected"] for picture in pictures)
    for one, first in zip(measured, (0, 3, 4), strict=True):
        # The scored layer is shown first, and has the average precision.
        cell = cells[first]
        assert (cell["row"], cell["column"]) == ("raw", one.model)
        assert cell["pictures"][cell["start"]]["title"] == one.scores["raw"].layers[0]
        assert cell["notes"][cell["start"]] == f"AP over all sequences {one.scores['raw'].found.ap:.3f}"
        assert cell["notes"][1 - cell["start"]] == "layer not scored"
    for words in ("recency", "primacy", "intervention", "hit@1", f"accuracy {measured[0].accuracy:.1%}"):
        assert words in page
    assert page.index('class="ula-board"') < page.index("<table>")
    for link in ('src="http', 'href="http', "@import", "url(http"):
        assert link not in page
    assert (tmp_path / report.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_invalid_counts_are_refused() -> None:
    for counts in ({"accuracy": 0}, {"selection": 0}, {"scored": 0}):
        with pytest.raises(OptionError, match="at least one"):
            Counts(**counts)


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


def test_a_report_is_written_atomically_and_replaces_an_older_one(tmp_path: Path) -> None:
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
def test_a_failed_report_changes_nothing(tmp_path: Path, error: type[BaseException]) -> None:
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
def test_a_folder_with_other_files_is_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ResultFileError, match=message), report.staged(tmp_path):
        raise AssertionError
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_a_file_is_refused_and_an_empty_folder_accepted(tmp_path: Path) -> None:
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
