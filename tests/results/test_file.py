"""Saved results: their format, and the errors of damaged files."""

import json
import pickle
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.results.samples import BATCH, LAYERS, LENGTH, assert_same, labels, make, make_target
from unilinattn.errors import ResultFileError
from unilinattn.results import file as resultfile
from unilinattn.results.attribution import Attribution
from unilinattn.results.comparison import Comparison


def test_a_loaded_result_equals_the_saved_one(tmp_path: Path) -> None:
    for number, result in enumerate(
        (
            make(),
            make_target(scores=torch.randn(BATCH, LENGTH).bfloat16(), grid=(2, 2)),
            make_target(sinks=[[0, 3], []]),
            make(scores=torch.randn(BATCH, LAYERS, LENGTH, LENGTH).double().transpose(0, 1)),
            Attribution(scores=torch.ones(3).expand(4, 3), dims=("query", "key"), method="raw"),
        )
    ):
        path = result.save(tmp_path / f"{number}.safetensors")
        assert_same(Attribution.load(path), result)
    assert len(list(tmp_path.iterdir())) == 5


LONE = "\ud83dx"
"""The first half of a surrogate pair, which UTF-8 does not have; an argument of a shell can hold one."""


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": [[LONE] * 5] * 2},
        {"options": {LONE: [LONE, {"note": LONE}], "target": None}},
        {"layers": ("h.0", LONE), "reconstruction_error": {LONE: 1e-7}, "stream_error": {LONE: 1e-7}},
        {"method": LONE, "scope": LONE, "model": LONE, "kinds": ("dense", LONE)},
        {"left_out": (LONE,), "warnings": (LONE,), "versions": {LONE: LONE}, "extras": {LONE: torch.zeros(2, 2, 5)}},
        {"scores": torch.zeros(2, 2, 1, 5), "query_tokens": [[LONE]] * 2, "logit_names": [[LONE]] * 2, "extras": {}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_lone_surrogate_in_any_label_is_its_escape(change: dict[str, Any], tmp_path: Path) -> None:
    made = make(**change)
    assert "\\ud83dx" in str({**labels(made), **made.extras}) and LONE not in str(labels(made))
    assert_same(made, Attribution.load(made.save(tmp_path / "result.safetensors")))
    comparison = Comparison({LONE: {LONE: made}})
    assert list(comparison) == list(comparison["\\ud83dx"]) == ["\\ud83dx"]
    for result in (made, comparison):
        result.to_html(tmp_path / "page.html")
        result.to_dataframe()
        repr(result).encode()
    made.to_xarray()
    made.plot(layer=1).savefig(tmp_path / "figure.png")


def test_the_format_is_one_safetensors_file_with_a_json_header(tmp_path: Path) -> None:
    path = make().save(str(tmp_path / "result"))
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        assert set(file.keys()) == {"scores", "mask", "extras/bias", "extras/other"}
    assert (metadata["format"], metadata["format_version"]) == ("unilinattn.results.attribution", "1")
    assert json.loads(metadata["header"])["method"] == "latim"


def test_a_file_from_before_a_label_loads_without_it(tmp_path: Path) -> None:
    path = make().save(tmp_path / "result.safetensors")
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["header"])
    del header["sinks"]
    rewrite(path, {"header": json.dumps(header)})
    assert Attribution.load(path).sinks is None


def test_a_failed_save_keeps_the_existing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = make()
    path = older.save(tmp_path / "result")

    def full_disk(tensors: Any, name: Path, metadata: Any) -> None:
        name.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(resultfile, "save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        make().save(path)
    assert list(tmp_path.iterdir()) == [path]
    assert_same(Attribution.load(path), older)


def test_saving_to_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultFileError, match="no folder"):
        make().save(tmp_path / "nowhere" / "result")


def test_loading_a_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ResultFileError, match="no result file"):
            Attribution.load(path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = make().save(tmp_path / "result")
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ResultFileError, match="truncated"):
            Attribution.load(path)


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "result"
    for content in (b"# a note\n" * 50, pickle.dumps({"scores": [1.0]}), b"\xff" * 64):
        path.write_bytes(content)
        with pytest.raises(ResultFileError, match="not a whole safetensors file"):
            Attribution.load(path)


def test_a_safetensors_file_without_a_result_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    for metadata in (None, {"format": "pt"}):
        save_file({"scores": torch.ones(3)}, path, metadata)
        with pytest.raises(ResultFileError, match="no saved result"):
            Attribution.load(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format_version": "2"}, "version 2; this release reads version 1"),
        ({"format_version": None}, "version None"),
        ({"header": None}, "lacks the entry 'header'"),
        ({"header": "{"}, "cannot be read"),
        ({"header": "[]"}, "cannot be read"),
        ({"header": "{}"}, "dims: Field required"),
    ],
)
def test_an_unreadable_header_is_refused(tmp_path: Path, changes: dict[str, str | None], words: str) -> None:
    path = make().save(tmp_path / "result")
    rewrite(path, changes)
    with pytest.raises(ResultFileError, match=words):
        Attribution.load(path)


def test_a_header_with_an_extra_or_a_missing_field_is_refused(tmp_path: Path) -> None:
    path = make().save(tmp_path / "result")
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["header"])
    for changed in (header | {"unheard": 1}, {k: v for k, v in header.items() if k != "method"}):
        rewrite(path, {"header": json.dumps(changed)})
        with pytest.raises(ResultFileError, match=r"unheard|method: Field required"):
            Attribution.load(path)


def test_tensors_that_contradict_the_header_are_refused(tmp_path: Path) -> None:
    path = make().save(tmp_path / "result")
    rewrite(path, {}, {"scores": torch.ones(3)})
    with pytest.raises(ResultFileError, match="contradict"):
        Attribution.load(path)
    rewrite(path, {}, {"scores": None})
    with pytest.raises(ResultFileError, match="no tensor 'scores'"):
        Attribution.load(path)


@pytest.mark.long
@settings(max_examples=150)
@given(st.data())
def test_damaged_files_raise_only_result_file_errors(tmp_path_factory: Any, data: st.DataObject) -> None:
    path = make().save(tmp_path_factory.mktemp("damage") / "result")
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        loaded = Attribution.load(path)
    except ResultFileError:
        return
    assert loaded.sizes["key"] == LENGTH


def rewrite(path: Path, metadata: dict[str, str | None], tensors: dict[str, torch.Tensor | None] | None = None) -> None:
    with safe_open(path, framework="pt") as file:
        header = file.metadata() | metadata
    values = load_file(path) | (tensors or {})
    stored_tensors = {name: value.clone() for name, value in values.items() if value is not None}
    save_file(stored_tensors, path, {name: value for name, value in header.items() if value is not None})
