"""`Attribution`: validation of its labels, selection, and tables."""

import copy
import dataclasses
import json
import pickle
import sys
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch

from tests.results.samples import BATCH, LAYERS, LENGTH, MASK, TOKENS, assert_same, make, make_target
from unilinattn import optional
from unilinattn.errors import InputError, OptionError, UnilinattnError
from unilinattn.optional import MissingExtraError
from unilinattn.results.attribution import Attribution


class TestLabels:
    def test_a_result_is_frozen_and_copies_its_arguments(self) -> None:
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

    def test_repr_lists_labels_options_and_errors(self) -> None:
        text = repr(make())
        for words in ("latim of tiny", "scope layer", "layer 2, batch 2, query 5, key 5", "float32"):
            assert words in text
        for words in ("dense, Toeplitz", "p=inf", "3.0e-07 at worst (h.1)", "completeness gap 1.0e-09"):
            assert words in text
        bare = Attribution(scores=torch.ones(3), dims=("key",), method="raw")
        assert repr(bare) == "Attribution: raw\n  largest  0  1  2\n  score    1  1  1\n  scores: key 3 (float32)"

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"scores": torch.ones(2, 2, 5)}, "name 4 axes"),
            ({"scores": torch.ones(2, 2, 5, 5, dtype=torch.long)}, "floating point"),
            ({"scores": [1.0]}, "must be a tensor"),
            ({"dims": ("layer", "batch", "key", "query")}, "in this order"),
            ({"dims": ("layer", "batch", "query", "query")}, "in this order"),
            ({"dims": ("layer", "batch", "channel", "key")}, "dims"),
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
            ({"sinks": [[0]]}, "sinks must be 2 lists"),
            ({"sinks": [[0], [5]]}, "positions of the 5 keys"),
            ({"grid": (2, 3)}, "more than the 5 keys"),
            ({"grid": (0, 3)}, "or none"),
            ({"extras": {"bias": 3.0}}, "bias must be a tensor"),
            ({"model": 3}, "model"),
            ({"versions": {"torch": 2}}, "versions.torch"),
        ],
    )
    def test_invalid_labels_are_refused(
        self, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Thorough runs check signatures, whose errors would precede those of the library.
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        with pytest.raises(InputError, match=words):
            make(**changes)

    def test_copies_and_pickles_are_equal(self) -> None:
        result = make()
        for other in (copy.deepcopy(result), pickle.loads(pickle.dumps(result)), dataclasses.replace(result)):
            assert_same(result, other)


class TestSelect:
    def test_a_layer_by_index_and_name(self) -> None:
        result = make()
        for chosen in (result.select(layer=1), result.select(layer=-1), result.select(layer="h.1")):
            assert chosen.dims == ("batch", "query", "key")
            assert torch.equal(chosen.scores, result.scores[1])
            assert (chosen.layers, chosen.kinds) == (("h.1",), ("Toeplitz",))
            assert dict(chosen.reconstruction_error) == {"h.1": 3e-7}
            assert chosen.tokens == result.tokens

    def test_a_sequence_keeps_its_tokens_mask_and_extras(self) -> None:
        result = make()
        chosen = result.select(layer=0, batch=1)
        assert chosen.dims == ("query", "key")
        assert torch.equal(chosen.scores, result.scores[0, 1])
        assert chosen.tokens == (tuple(TOKENS[1]),)
        assert chosen.mask is not None
        assert torch.equal(chosen.mask, MASK[1:])
        assert chosen.extras.keys() == {"bias"}
        assert torch.equal(chosen.extras["bias"], result.extras["bias"][0, 1])

    def test_numbers_of_steps_are_no_numbers_of_sequences(self) -> None:
        steps = {"cancellation": torch.rand(BATCH, BATCH), "decomposition_error": torch.rand(BATCH)}
        result = make_target(extras={**steps, "logit": torch.rand(BATCH)})
        assert result.select(batch=1).extras == {"logit": result.extras["logit"][1]}
        assert result.extras.keys() == {*steps, "logit"}

    def test_without_arguments_the_result_is_equal(self) -> None:
        result = make()
        assert_same(result.select(), result)

    def test_unknown_layers_are_refused(self) -> None:
        with pytest.raises(OptionError, match=r"did you mean 'h\.1'"):
            make().select(layer="h1")
        with pytest.raises(InputError, match="layer 2 is out of range"):
            make().select(layer=2)
        with pytest.raises(InputError, match="no layer axis"):
            make_target().select(layer=0)


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

    def test_the_data_frame_has_every_real_score_once(self) -> None:
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

    def test_tables_mark_attention_sinks(self) -> None:
        result = make_target(sinks=[[0, 3], [2]])
        frame, array = result.to_dataframe(), result.to_xarray()
        assert frame[frame.sink][["batch", "key"]].to_numpy().tolist() == [[0, 0], [0, 3], [1, 2]]
        assert array.coords["sink"].dims == ("batch", "key")
        assert array.where(~array.coords["sink"]).isnull().sum() == 3
        assert result.select(batch=1).to_xarray().coords["sink"].values.tolist() == [False, False, True, False, False]
        assert "sink" not in make_target(sinks=[[], []]).to_dataframe().columns

    def test_the_data_frame_of_a_target(self) -> None:
        frame = make_target(mask=None).to_dataframe()
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
            call(make_target())
        assert isinstance(caught.value, UnilinattnError)
        assert isinstance(caught.value, ImportError)

    def test_a_failing_import_inside_a_package_is_not_a_missing_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(name: str) -> None:
            raise ModuleNotFoundError("No module named 'inner'", name="inner")

        monkeypatch.setattr(optional.importlib, "import_module", broken)
        with pytest.raises(ModuleNotFoundError, match="inner") as caught:
            optional.import_extra("xarray", "xarray")
        assert not isinstance(caught.value, MissingExtraError)
