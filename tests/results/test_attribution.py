"""The labelled result: its checks, its file, its tables, and the comparison that holds several."""

import copy
import dataclasses
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from unilinattn import optional
from unilinattn.errors import InputError, OptionError, ResultFileError, UnilinattnError
from unilinattn.optional import MissingExtraError
from unilinattn.results import file as resultfile
from unilinattn.results.attribution import Attribution
from unilinattn.results.comparison import Comparison

LAYERS, BATCH, LENGTH = 2, 2, 5
TOKENS = [["the", "<b>", "\n", "é", "漢"], ["a", "b", "c", "", ""]]
MASK = torch.tensor([[True] * 5, [True, True, True, False, False]])


def make(**changes: Any) -> Attribution:
    values: dict[str, Any] = {
        "scores": torch.randn(LAYERS, BATCH, LENGTH, LENGTH),
        "dims": ("layer", "batch", "query", "key"),
        "method": "latim",
        "options": {"p": float("inf"), "target": None, "layers": [0, 1]},
        "scope": "layer",
        "tokens": TOKENS,
        "mask": MASK,
        "layers": ("h.0", "h.1"),
        "kinds": ("dense", "Toeplitz"),
        "model": "tiny",
        "versions": {"torch": "2"},
        "reconstruction_error": {"h.0": 1e-7, "h.1": 3e-7},
        "completeness_gap": 1e-9,
        "extras": {"bias": torch.randn(LAYERS, BATCH, LENGTH), "other": torch.arange(3)},
    }
    return Attribution(**(values | changes))


def of_target(**changes: Any) -> Attribution:
    return make(**({"scores": torch.randn(BATCH, LENGTH), "dims": ("batch", "key"), "extras": {}} | changes))


def labels(result: Attribution) -> dict[str, Any]:
    tensors = {"scores", "mask", "extras"}
    return {f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name not in tensors}


def assert_same(first: Attribution, second: Attribution) -> None:
    assert labels(first) == labels(second)
    assert first.scores.dtype == second.scores.dtype
    assert torch.equal(first.scores, second.scores)
    assert (first.mask is None) == (second.mask is None)
    if first.mask is not None and second.mask is not None:
        assert torch.equal(first.mask, second.mask)
    assert first.extras.keys() == second.extras.keys()
    assert all(torch.equal(first.extras[name], second.extras[name]) for name in first.extras)


class TestLabels:
    def test_a_result_is_frozen_and_apart_from_what_it_was_made_of(self) -> None:
        scores = torch.randn(LENGTH, LENGTH, requires_grad=True)
        options = {"layers": [0]}
        result = Attribution(scores=scores * 2, dims=("query", "key"), method="raw", options=options)
        options["layers"].append(1)
        assert not result.scores.requires_grad
        assert result.options == {"layers": [0]}
        with pytest.raises(dataclasses.FrozenInstanceError):
            result.method = "rollout"  # type: ignore[misc]  # refused, as tested
        with pytest.raises(TypeError):
            result.options["p"] = 1  # type: ignore[index]  # refused, as tested

    def test_sizes_and_the_worst_error(self) -> None:
        assert make().sizes == {"layer": 2, "batch": 2, "query": 5, "key": 5}
        assert make().worst_error == ("h.1", 3e-7)
        assert make(reconstruction_error={}).worst_error is None
        unknown = make(reconstruction_error={"h.0": float("nan"), "h.1": 3e-7}).worst_error
        assert unknown is not None
        assert unknown[0] == "h.0"

    def test_the_text_names_what_a_reader_needs(self) -> None:
        text = repr(make())
        for words in ("latim of tiny", "scope layer", "layer 2, batch 2, query 5, key 5", "float32"):
            assert words in text
        for words in ("dense, Toeplitz", "p=inf", "3.0e-07 at worst (h.1)", "completeness gap: 1.0e-09"):
            assert words in text
        bare = Attribution(scores=torch.ones(3), dims=("key",), method="raw")
        assert repr(bare) == "Attribution: raw\n  scores: key 3 (float32)"

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"scores": torch.ones(2, 2, 5)}, "name 4 axes"),
            ({"scores": torch.ones(2, 2, 5, 5, dtype=torch.long)}, "floating point"),
            ({"scores": [1.0]}, "must be a tensor"),
            ({"dims": ("layer", "batch", "key", "query")}, "in this order"),
            ({"dims": ("layer", "batch", "query", "query")}, "in this order"),
            ({"dims": ("layer", "batch", "head", "key")}, "dims"),
            ({"scores": torch.ones(2, 2, 5), "dims": ("layer", "batch", "query")}, "key among them"),
            ({"options": {"p": torch.ones(1)}}, "plain JSON"),
            ({"tokens": TOKENS[:1]}, "2 lists of 5"),
            ({"tokens": [row[:4] for row in TOKENS]}, "got lengths"),
            ({"tokens": [[1, 2, 3, 4, 5]] * 2}, "valid string"),
            ({"mask": MASK[:1]}, "mask must have shape"),
            ({"mask": MASK.float()}, "boolean"),
            ({"layers": ("h.0",), "kinds": ()}, "layer axis has 2"),
            ({"layers": ("h.0", "h.0")}, "unique"),
            ({"kinds": ("dense",)}, "one name for each"),
            ({"grid": (2, 3)}, "more than the 5 keys"),
            ({"grid": (0, 3)}, "or none"),
            ({"extras": {"bias": 3.0}}, "bias must be a tensor"),
            ({"model": 3}, "model"),
            ({"versions": {"torch": 2}}, "versions.torch"),
        ],
    )
    def test_labels_that_do_not_fit_are_refused(
        self, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # As a user runs it: this test run's check of every signature would speak before our own errors.
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        with pytest.raises(InputError, match=words):
            make(**changes)

    def test_copies_and_other_processes_get_the_same_result(self) -> None:
        result = make()
        for other in (copy.deepcopy(result), pickle.loads(pickle.dumps(result)), dataclasses.replace(result)):
            assert_same(result, other)


class TestSelect:
    def test_a_layer_by_place_and_name(self) -> None:
        result = make()
        for chosen in (result.select(layer=1), result.select(layer=-1), result.select(layer="h.1")):
            assert chosen.dims == ("batch", "query", "key")
            assert torch.equal(chosen.scores, result.scores[1])
            assert (chosen.layers, chosen.kinds) == (("h.1",), ("Toeplitz",))
            assert dict(chosen.reconstruction_error) == {"h.1": 3e-7}
            assert chosen.tokens == result.tokens

    def test_a_sequence_keeps_its_own_tokens_mask_and_extras(self) -> None:
        result = make()
        chosen = result.select(layer=0, batch=1)
        assert chosen.dims == ("query", "key")
        assert torch.equal(chosen.scores, result.scores[0, 1])
        assert chosen.tokens == (tuple(TOKENS[1]),)
        assert chosen.mask is not None
        assert torch.equal(chosen.mask, MASK[1:])
        assert chosen.extras.keys() == {"bias"}
        assert torch.equal(chosen.extras["bias"], result.extras["bias"][0, 1])

    def test_nothing_asked_changes_nothing(self) -> None:
        result = make()
        assert_same(result.select(), result)

    def test_what_is_not_there_is_refused(self) -> None:
        with pytest.raises(OptionError, match=r"did you mean 'h\.1'"):
            make().select(layer="h1")
        with pytest.raises(InputError, match="layer 2 is out of range"):
            make().select(layer=2)
        with pytest.raises(InputError, match="no layer axis"):
            of_target().select(layer=0)


class TestFile:
    def test_everything_comes_back(self, tmp_path: Path) -> None:
        for number, result in enumerate(
            (
                make(),
                of_target(scores=torch.randn(BATCH, LENGTH).bfloat16(), grid=(2, 2)),
                make(scores=torch.randn(BATCH, LAYERS, LENGTH, LENGTH).double().transpose(0, 1)),
                Attribution(scores=torch.ones(3).expand(4, 3), dims=("query", "key"), method="raw"),
            )
        ):
            path = result.save(tmp_path / f"{number}.safetensors")
            assert_same(Attribution.load(path), result)
        assert len(list(tmp_path.iterdir())) == 4

    def test_it_is_one_safetensors_file_with_a_json_header(self, tmp_path: Path) -> None:
        path = make().save(str(tmp_path / "result"))
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            assert set(file.keys()) == {"scores", "mask", "extras/bias", "extras/other"}
        assert (metadata["format"], metadata["format_version"]) == ("unilinattn.results.attribution", "1")
        assert json.loads(metadata["header"])["method"] == "latim"

    def test_a_failed_save_leaves_the_older_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def test_a_folder_that_does_not_exist_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ResultFileError, match="no folder"):
            make().save(tmp_path / "nowhere" / "result")

    def test_a_file_that_is_not_there_or_not_a_file(self, tmp_path: Path) -> None:
        for path in (tmp_path / "nothing", tmp_path):
            with pytest.raises(ResultFileError, match="no result file"):
                Attribution.load(path)

    def test_a_truncated_file(self, tmp_path: Path) -> None:
        path = make().save(tmp_path / "result")
        whole = path.read_bytes()
        for length in [*range(0, len(whole), 97), len(whole) - 1]:
            path.write_bytes(whole[:length])
            with pytest.raises(ResultFileError, match="truncated"):
                Attribution.load(path)

    def test_a_file_of_another_kind(self, tmp_path: Path) -> None:
        path = tmp_path / "result"
        for content in (b"# a note\n" * 50, pickle.dumps({"scores": [1.0]}), b"\xff" * 64):
            path.write_bytes(content)
            with pytest.raises(ResultFileError, match="not a whole safetensors file"):
                Attribution.load(path)

    def test_a_safetensors_file_that_is_not_ours(self, tmp_path: Path) -> None:
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
    def test_a_header_of_another_version_or_kind(
        self, tmp_path: Path, changes: dict[str, str | None], words: str
    ) -> None:
        path = make().save(tmp_path / "result")
        rewrite(path, changes)
        with pytest.raises(ResultFileError, match=words):
            Attribution.load(path)

    def test_a_header_with_a_field_too_many_or_too_few(self, tmp_path: Path) -> None:
        path = make().save(tmp_path / "result")
        with safe_open(path, framework="pt") as file:
            header = json.loads(file.metadata()["header"])
        for changed in (header | {"unheard": 1}, {k: v for k, v in header.items() if k != "method"}):
            rewrite(path, {"header": json.dumps(changed)})
            with pytest.raises(ResultFileError, match=r"unheard|method: Field required"):
                Attribution.load(path)

    def test_tensors_that_contradict_the_header(self, tmp_path: Path) -> None:
        path = make().save(tmp_path / "result")
        rewrite(path, {}, {"scores": torch.ones(3)})
        with pytest.raises(ResultFileError, match="contradict"):
            Attribution.load(path)
        rewrite(path, {}, {"scores": None})
        with pytest.raises(ResultFileError, match="no tensor 'scores'"):
            Attribution.load(path)

    @settings(max_examples=150)
    @given(st.data())
    def test_damage_is_never_another_error(self, tmp_path_factory: Any, data: st.DataObject) -> None:
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
    kept = {name: value.clone() for name, value in values.items() if value is not None}
    save_file(kept, path, {name: value for name, value in header.items() if value is not None})


class TestTables:
    def test_xarray_names_axes_and_coordinates(self) -> None:
        result = make()
        array = result.to_xarray()
        assert array.dims == result.dims
        np.testing.assert_array_equal(array.values, result.scores.numpy())
        assert array.sel(layer="h.1", batch=0, query=3, key=2).item() == result.scores[1, 0, 3, 2].item()
        assert list(array.coords["kind"].values) == ["dense", "Toeplitz"]
        assert array.coords["key_token"].sel(batch=0, key=4).item() == "漢"
        assert not array.coords["real"].sel(batch=1, key=3).item()
        assert array.attrs["method"] == "latim"
        assert json.loads(array.attrs["reconstruction_error"]) == {"h.0": 1e-7, "h.1": 3e-7}

    def test_xarray_of_one_sequence_without_labels(self) -> None:
        array = Attribution(scores=torch.ones(2, 3).bfloat16(), dims=("query", "key"), method="raw").to_xarray()
        assert dict(array.sizes) == {"query": 2, "key": 3}
        one = make().select(batch=1).to_xarray()
        assert list(one.coords["query_token"].values) == TOKENS[1]

    def test_the_long_format_has_every_real_score_once(self) -> None:
        result = make()
        frame = result.to_dataframe()
        columns = ["layer", "kind", "batch", "query", "query_token", "key", "key_token", "score"]
        assert list(frame.columns) == columns
        assert len(frame) == LAYERS * (5 * 5 + 3 * 3)
        for row in frame.sample(20, random_state=0).itertuples():
            layer = result.layers.index(row.layer)
            assert row.score == result.scores[layer, row.batch, row.query, row.key].item()
            assert row.kind == result.kinds[layer]
            assert (row.query_token, row.key_token) == (
                TOKENS[row.batch][row.query],
                TOKENS[row.batch][row.key],
            )

    def test_the_long_format_of_a_target(self) -> None:
        frame = of_target(mask=None).to_dataframe()
        assert list(frame.columns) == ["batch", "key", "key_token", "score"]
        assert len(frame) == BATCH * LENGTH

    @pytest.mark.parametrize(
        ("package", "call"),
        [
            ("xarray", lambda result: result.to_xarray()),
            ("pandas", lambda result: result.to_dataframe()),
            ("matplotlib", lambda result: result.plot()),
        ],
    )
    def test_a_missing_package_names_its_extra(self, monkeypatch: pytest.MonkeyPatch, package: str, call: Any) -> None:
        for module in [name for name in sys.modules if name.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, package, None)
        extra = {"matplotlib": "plot"}.get(package, "xarray")
        with pytest.raises(MissingExtraError, match=rf"needs {package}.*'unilinattn\[{extra}\]'") as caught:
            call(of_target())
        assert isinstance(caught.value, UnilinattnError)
        assert isinstance(caught.value, ImportError)

    def test_a_package_broken_inside_is_not_called_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(name: str) -> None:
            raise ModuleNotFoundError("No module named 'inner'", name="inner")

        monkeypatch.setattr(optional.importlib, "import_module", broken)
        with pytest.raises(ModuleNotFoundError, match="inner") as caught:
            optional.import_extra("xarray", "xarray")
        assert not isinstance(caught.value, MissingExtraError)


class TestComparison:
    @pytest.fixture
    def compared(self) -> Comparison:
        return Comparison(
            {
                "mamba": {"raw": make(method="raw"), "rollout": of_target(method="rollout")},
                "gpt": {"raw": make(method="raw", kinds=("dense", "dense"), reconstruction_error={})},
            }
        )

    def test_it_maps_models_to_methods_to_results(self, compared: Comparison) -> None:
        assert list(compared) == ["mamba", "gpt"]
        assert compared.methods == ("raw", "rollout")
        assert compared["mamba"]["rollout"].method == "rollout"
        assert [(model, method) for model, method, _ in compared.results()] == [
            ("mamba", "raw"),
            ("mamba", "rollout"),
            ("gpt", "raw"),
        ]
        assert "llama" not in compared
        assert compared["gpt"].get("rollout") is None

    def test_an_unknown_name_shows_the_nearest(self, compared: Comparison) -> None:
        with pytest.raises(OptionError, match=r"^There is no model 'mambo' here; did you mean 'mamba'\?"):
            compared["mambo"]
        with pytest.raises(KeyError, match="did you mean 'rollout'"):
            compared["mamba"]["rolout"]

    def test_the_table(self, compared: Comparison) -> None:
        lines = compared.table().splitlines()
        assert len(lines) == 4
        assert lines[0].split("  ")[0] == "model"
        assert "dense x2" in lines[3]
        assert lines[1].endswith("3.0e-07")
        assert lines[3].endswith("-")
        assert compared.table() in repr(compared)

    def test_one_long_table(self, compared: Comparison) -> None:
        frame = compared.to_dataframe()
        assert list(frame.columns[:2]) == ["model", "method"]
        assert len(frame) == sum(len(result.to_dataframe()) for *_, result in compared.results())
        assert set(frame["model"]) == {"mamba", "gpt"}

    def test_copies(self, compared: Comparison) -> None:
        other = pickle.loads(pickle.dumps(compared))
        assert_same(other["gpt"]["raw"], compared["gpt"]["raw"])
        assert list(pickle.loads(pickle.dumps(compared["mamba"]))) == ["raw", "rollout"]

    def test_it_needs_results(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        for nothing in ({}, {"mamba": {}}):
            with pytest.raises(InputError, match="at least one"):
                Comparison(nothing)
        with pytest.raises(InputError, match="holds Attribution, not int"):
            Comparison({"mamba": {"raw": 3}})  # type: ignore[dict-item]  # refused, as tested
