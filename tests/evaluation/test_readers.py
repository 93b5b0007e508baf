"""Data that `evaluate` reads: texts, JSON lines, folders of images and data sets, with broken entries."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import unilinattn as ula
from tests.host.test_image import picture, processor, vit
from tests.texts import LONDON, PARIS, mamba, tokenizer
from unilinattn.errors import InputError, OptionError, ResultFileError
from unilinattn.evaluation import Table, read_samples
from unilinattn.optional import MissingExtraError


class Rows:
    """A data set as `datasets.Dataset` is one: a length, and mappings by position."""

    def __init__(self, *rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> Any:
        return self.rows[at]


def images(folder: Path) -> Path:
    folder.mkdir()
    for name, size in (("b.png", (10, 14)), ("a.jpg", (20, 8))):
        Image.fromarray(picture(*size)).save(folder / name)
    (folder / "notes.md").write_text("no image")
    return folder


def test_a_text_file_has_a_text_a_line(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text(f"{PARIS}\n\n{LONDON}\n")
    samples = read_samples(path, tokenizer())
    assert [sample.inputs.tolist() for sample in samples] == [
        [tokenizer()(text)["input_ids"]] for text in (PARIS, LONDON)
    ]
    assert all(sample.target == -1 for sample in samples)


def test_a_text_may_hold_a_separator_of_lines_that_is_no_line_end(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text(f"{PARIS}\u2028{LONDON}\n", encoding="utf-8")
    (sample,) = read_samples(path, tokenizer())
    assert sample.inputs.tolist() == [tokenizer()(f"{PARIS}\u2028{LONDON}")["input_ids"]]


def test_a_folder_has_its_images_in_order(tmp_path: Path) -> None:
    folder, way = images(tmp_path / "images"), processor()
    first, second = read_samples(str(folder), processor=way)
    assert (first.name, second.name) == ("a.jpg", "b.png") and first.grid is None and first.target is None
    pixels = way(images=Image.open(folder / "b.png"), return_tensors="pt")["pixel_values"]
    assert torch.equal(second.inputs["pixel_values"], pixels)
    placed = read_samples(folder, processor=way, model=vit())
    for sample in placed:
        assert sample.valid is not None and sample.valid.tolist() == [False, True, True, True, True]
        assert (sample.grid, sample.target) == ((2, 2), 0)


def test_data_sets_have_texts_or_images() -> None:
    data = Rows({"text": PARIS, "label": 3, "idx": 7, "target": None}, {"text": LONDON, "relevant": [1], "target": 2})
    first, second = read_samples(data, tokenizer())
    assert (first.label, first.target) == (3, -1) and second.relevant is not None
    assert (second.target, second.relevant.nonzero().flatten().tolist()) == (2, [1])
    shown = Rows({"image": Image.fromarray(picture()), "label": 1, "name": "cat"}, {"image": picture(), "label": 0})
    cat, other = read_samples(shown, processor=processor())
    assert (cat.name, cat.label, other.label) == ("cat", 1, 0)
    assert torch.equal(cat.inputs["pixel_values"], other.inputs["pixel_values"])


def broken_sources(folder: Path) -> dict[str, tuple[Any, str, int]]:
    """Sources with broken entries: the source, the place of the first one, and how many entries are whole."""
    lines = folder / "lines.jsonl"
    lines.write_text(json.dumps({"text": PARIS}) + '\n{"text": \n' + json.dumps({"text": LONDON}) + '\n{"txt": 1}\n')
    pictures = images(folder / "images")
    (pictures / "aa.png").write_bytes((pictures / "b.png").read_bytes()[:60])
    rows = Rows({"text": PARIS}, {"title": "x"}, 3, {"image": "cat.png"}, {"image": picture(), "label": "cat"})
    return {
        "lines": (lines, r"lines\.jsonl, line 2: Expecting value", 2),
        "images": (pictures, r"aa\.png: ", 2),
        "rows": (rows, "Rows, entry 1: the entry has neither `text` nor `image`: title", 1),
    }


@pytest.mark.parametrize("kind", ["lines", "images", "rows"])
def test_broken_entries_stop_or_are_skipped(tmp_path: Path, kind: str) -> None:
    source, place, whole = broken_sources(tmp_path)[kind]
    with pytest.raises(InputError, match=place):
        read_samples(source, tokenizer(), processor=processor())
    with pytest.warns(UserWarning, match=rf"[124] of [345] entries of .* are skipped: .*{place}"):
        samples = read_samples(source, tokenizer(), processor=processor(), on_error="skip")
    assert len(samples) == whole
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_samples(Rows({"text": PARIS}), tokenizer(), on_error="skip")


@pytest.mark.usefixtures("unchecked")
def test_invalid_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    wrong: list[tuple[Any, dict[str, Any], Any, str]] = [
        (tmp_path / "empty", {}, InputError, "has no images that can be read"),
        (Rows(), {}, InputError, "Rows has no entries"),
        (3, {}, InputError, "the data are a int; give a path"),
        (Rows({"text": PARIS}), {"on_error": "ignore"}, OptionError, "unknown on_error 'ignore'"),
        (Rows({"text": PARIS}), {"tokenizer": None}, InputError, "entry 0: texts need their tokenizer"),
        (Rows({"image": picture()}), {}, InputError, "entry 0: the input is an image, with no processor"),
    ]
    for source, options, error, message in wrong:
        with pytest.raises(error, match=message):
            read_samples(source, **{"tokenizer": tokenizer(), **options})
    with pytest.warns(UserWarning, match="1 of 1 entries"), pytest.raises(InputError, match="no entries that can be"):
        read_samples(Rows({"title": "x"}), tokenizer(), on_error="skip")


@pytest.mark.long
def test_evaluate_reads_texts(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(f"{json.dumps({'text': PARIS})}\nbroken\n{json.dumps({'text': LONDON})}\n")
    asked: dict[str, Any] = dict(methods=["lrp", ("latim", {"layers": [1]})], metrics=["comprehensiveness"])
    asked |= {"tokenizer": tokenizer(), "on_error": "skip", "baselines": ["recency"]}
    with pytest.warns(UserWarning, match="1 of 3 entries"):
        table = ula.evaluate({"mamba": mamba()}, path, out=tmp_path / "out", save_results=True, **asked)
    given = read_samples(Rows({"text": PARIS}, {"text": LONDON}), tokenizer())
    assert list(table) == list(ula.evaluate({"mamba": mamba()}, given, **{**asked, "on_error": "stop"}))
    files = sorted((tmp_path / "out" / "results").iterdir())
    assert [file.name for file in files] == [
        f"0-{at:06d}-{name}.safetensors" for at in range(2) for name in ("0-recency", "1-lrp", "2-latim_layers=_1_")
    ]
    stored = ula.Attribution.load(files[4])
    assert torch.equal(
        stored.scores, ula.explain(mamba(), LONDON, method="lrp", tokenizer=tokenizer(), target=-1).scores
    )
    with pytest.warns(UserWarning, match="1 of 3"), pytest.raises(ResultFileError, match="save_results is stored"):
        ula.evaluate({"mamba": mamba()}, path, out=tmp_path / "out", **asked)
    with pytest.raises(OptionError, match="save_results stores files"):
        ula.evaluate({"mamba": mamba()}, given, ["logit"], ["comprehensiveness"], save_results=True)


@pytest.mark.usefixtures("unchecked")
def test_evaluate_takes_data_sets_whose_first_entry_is_broken() -> None:
    class Damaged(Rows):
        def __getitem__(self, at: int) -> Any:
            if at == 0:
                raise OSError("cannot identify image file")
            return super().__getitem__(at)

    asked: dict[str, Any] = dict(methods=["logit"], metrics=["comprehensiveness"], baselines=[], tokenizer=tokenizer())
    (sample,) = read_samples(Rows({"text": LONDON}), tokenizer())
    for whole in ({"text": LONDON}, sample):
        with pytest.warns(UserWarning, match="Damaged, entry 0: cannot identify image file"):
            table = ula.evaluate({"mamba": mamba()}, Damaged({}, whole), on_error="skip", **asked)
        assert len(table) == 1
    assert list(ula.evaluate({"mamba": mamba()}, [{"text": LONDON}], **asked)) == list(table)
    with pytest.raises(InputError, match="data holds a str"):
        ula.evaluate({"mamba": mamba()}, {"text": LONDON}, **asked)


def test_evaluate_reads_images(tmp_path: Path) -> None:
    folder, model = images(tmp_path / "images"), vit()
    asked: dict[str, Any] = dict(methods=["logit"], metrics=["activation_auac"], baselines=[])
    table = ula.evaluate({"vit": model}, folder, processor=processor(), **asked)
    samples = read_samples(folder, processor=processor(), model=model)
    assert [row["sample"] for row in table] == ["a.jpg", "b.png"]
    assert list(table) == list(ula.evaluate({"vit": model}, samples, **asked))


ROW = {"model": "m", "method": "a", "layer": "", "sample": "0", "metric": "ap", "value": 0.1 + 0.2, "parts": [[1, 2]]}


def test_tables_as_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    path = Table([ROW, ROW]).save(tmp_path / "table.parquet")
    assert parquet.read_table(path).to_pylist() == [{name: ROW[name] for name in ROW if name != "parts"}] * 2


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"needs pyarrow.*unilinattn\[parquet\]"):
        Table([ROW]).save(tmp_path / "table.parquet")
    assert not list(tmp_path.iterdir())
