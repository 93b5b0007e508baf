"""`tools.sweep`: tiny configurations by rules, outcomes of models, the record and its table."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from tools import sweep, sweep_run
from tools.markers import markers, read_section
from tools.sweep_configs import RULES, VOCABULARY, kind_of, nested, tiny_config
from tools.sweep_inputs import TOKENS, input_choices
from tools.sweep_needs import ARGUMENTS, SETTINGS, merged
from tools.sweep_pages import OUTCOMES, RECORD, section, table
from tools.sweep_run import Case, attending_calls, build, difference, measure
from unilinattn.errors import UncoveredError

LLAMA = Case("causal lm", "llama", "LlamaForCausalLM")
VIT = Case("image classification", "vit", "ViTForImageClassification")
T5 = Case("base", "t5", "T5Model")
BART = Case("base", "bart", "BartModel")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("hidden_size", "width"),
        ("encoder_ffn_dim", "inner"),
        ("moe_intermediate_size", "inner"),
        ("num_attention_heads", "heads"),
        ("num_key_value_heads", "key heads"),
        ("qk_rope_head_dim", "head"),
        ("num_hidden_layers", "layers"),
        ("first_k_dense_replace", "first layers"),
        ("deepstack_visual_indexes", "indices"),
        ("num_experts_per_tok", "chosen"),
        ("n_routed_experts", "experts"),
        ("vocab_size", "vocabulary"),
        ("image_token_id", "token"),
        ("max_position_embeddings", "positions"),
        ("hidden_dropout_prob", "other"),
        ("rope_theta", "other"),
        ("layer_norm_eps", "other"),
    ],
)
def test_a_size_is_known_by_its_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_each_type_of_layer_stays() -> None:
    config = tiny_config(transformers.Qwen3NextConfig)
    assert config.layer_types == ["linear_attention", "full_attention"]
    assert config.num_hidden_layers == 2
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (64, 4, 2)
    assert (config.num_experts, config.num_experts_per_tok) == (4, 2)
    assert config.vocab_size == VOCABULARY
    twice = tiny_config(transformers.Qwen3NextConfig, RULES[2])
    assert sorted(twice.layer_types) == ["full_attention"] * 2 + ["linear_attention"] * 2


def test_models_inside_have_one_width_and_token_ids_stay_within_the_vocabulary() -> None:
    config = tiny_config(transformers.Qwen2_5_VLConfig)
    assert {c.hidden_size for c in nested(config) if hasattr(c, "hidden_size")} == {64}
    assert config.vision_config.out_hidden_size == config.text_config.hidden_size
    ids = [config.image_token_id, config.video_token_id, config.vision_start_token_id]
    assert len(set(ids)) == 3
    assert all(0 <= i < VOCABULARY for i in ids)
    default = transformers.Qwen2_5_VLConfig()
    assert len(config.vision_config.fullatt_block_indexes) == len(default.vision_config.fullatt_block_indexes)
    assert max(config.vision_config.fullatt_block_indexes) < config.vision_config.depth


def test_the_stages_of_a_pyramid_keep_their_ratios() -> None:
    config = tiny_config(transformers.SegformerConfig)
    assert config.hidden_sizes == [16, 32, 80, 128]
    assert config.num_attention_heads == [1, 2, 5, 8]
    assert config.depths == [2, 1, 1, 1]
    assert len(config.sr_ratios) == 4


def test_heads_of_a_state_space_model_fill_its_inner_width() -> None:
    for config_class in (transformers.BambaConfig, transformers.FalconH1Config):
        config = tiny_config(config_class)
        assert config.mamba_n_heads * config.mamba_d_head == 2 * config.hidden_size


def test_each_need_is_of_a_known_class() -> None:
    names = {config.model_type for config in configurations()} | {case.name for case in sweep.cases()}
    assert (SETTINGS.keys() | ARGUMENTS.keys()) <= names


def configurations() -> Iterator[type[transformers.PreTrainedConfig]]:
    for name in dir(transformers):
        if name.endswith("Config") and issubclass(value := getattr(transformers, name), transformers.PreTrainedConfig):
            yield value


def test_needs_of_configurations_inside_are_merged() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}, "d": {}}) == {"a": {"b": 1, "c": 4}, "d": {}}
    config = tiny_config(transformers.Blip2Config, model="Blip2ForImageTextRetrieval")
    assert config.image_token_index == SETTINGS["blip-2"]["image_token_index"]
    assert config.qformer_config.use_qformer_text_input
    assert config.qformer_config.hidden_size == 64


def test_arguments_that_a_class_needs_are_given() -> None:
    model = build(Case("base", "lxmert", "LxmertModel"))
    inputs = next(input_choices(model))
    assert inputs["visual_feats"].shape == (1, 4, model.config.visual_feat_dim)
    inputs = next(input_choices(build(Case("base", "t5", "T5ForSequenceClassification"))))
    assert inputs.keys() == {"input_ids", "use_cache"}


def test_tiles_of_images_have_placeholders() -> None:
    config = tiny_config(transformers.LlavaNextConfig)
    side = config.vision_config.image_size
    assert config.image_grid_pinpoints == [[side, 2 * side], [2 * side, side]]
    inputs = next(input_choices(build(Case("base", "llava_next", "LlavaNextModel"))))
    assert inputs["pixel_values"].shape == (1, 3, 3, side, side)
    assert int((inputs["input_ids"] == config.image_token_id).sum()) > side // config.vision_config.patch_size


def test_weights_and_inputs_repeat() -> None:
    for case in (LLAMA, VIT):
        models = [build(case) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))
        first, second = (next(input_choices(model)) for model in models)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first if isinstance(first[name], torch.Tensor))


def test_weights_vary() -> None:
    model = build(LLAMA)
    assert all(parameter.std() > 0.05 for parameter in model.parameters())


class Mixing(nn.Module):
    """A model in which one step runs on queries, keys and values."""

    def __init__(self, step: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.step = step

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = input_ids[:, None, :, None].expand(1, 2, -1, 4).float()
        return self.step(x)


@pytest.mark.parametrize(
    ("step", "calls"),
    [
        (lambda x: F.scaled_dot_product_attention(x, x, x), 1),
        (lambda x: (x @ x.mT).softmax(-1) @ x, 1),
        (lambda x: F.softmax(x @ x.mT, dim=-1) @ x + torch.softmax(x @ x.mT, 3) @ x, 1),
        (lambda x: F.scaled_dot_product_attention(x[:, :, :1], x, x), 0),
        (lambda x: x.softmax(-1), 0),
        (lambda x: x @ (x.mT @ x).softmax(-1), 0),
        (lambda x: (x @ x.mT)[0].softmax(-1) @ x[0], 0),
    ],
    ids=["sdpa", "softmax", "twice in a module", "one query", "channels", "channel attention", "no batch"],
)
def test_calls_that_attend_are_counted(step: Callable[[torch.Tensor], torch.Tensor], calls: int) -> None:
    assert attending_calls(Mixing(step), {"input_ids": torch.arange(TOKENS)[None]})[1] == calls


def test_calls_of_a_model_are_counted() -> None:
    model = build(T5)
    inputs = next(input_choices(model))
    layers = model.config.num_layers + 2 * model.config.num_decoder_layers
    assert attending_calls(model, inputs)[1] == layers == 6
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_differences_of_outputs() -> None:
    x = torch.ones(4)
    assert difference({"logits": x + 0.5, "loss": x}, {"logits": x, "loss": 2 * x}) == 0.5
    assert difference({"logits": x, "past_key_values": (x,)}, {"logits": x, "past_key_values": (2 * x,)}) == 0
    assert difference({"logits": x / 0}, {"logits": x}) == float("inf")


def fake(outcome: str) -> Callable[..., Any]:
    """Return a `trace` that is wrong in one way."""

    def trace(model: nn.Module, inputs: dict[str, Any], **options: Any) -> Any:
        if outcome == "crash":
            raise ValueError(f"broken in {Path(__file__).resolve()}")
        if outcome == "refused":
            raise UncoveredError("not covered")
        if outcome == "killed":
            os._exit(3)
        with torch.no_grad():
            output = model(**inputs)
        output.logits = output.logits * (1.01 if outcome == "output" else 1.0)
        return SimpleNamespace(output=output, layers=[None] * (1 if outcome == "layers" else 2))

    return trace


@pytest.mark.parametrize(
    ("way", "outcome", "error"),
    [
        ("output", "wrong", "output"),
        ("layers", "wrong", "layers"),
        ("crash", "crash", "ValueError"),
        ("refused", "refused", "UncoveredError"),
    ],
)
def test_a_broken_trace_is_reported(way: str, outcome: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_run, "trace", fake(way))
    result = measure(LLAMA)
    assert (result["outcome"], result["error"]) == (outcome, error)
    if way == "crash":
        assert result["message"] == "broken in test_sweep.py"


@pytest.mark.parametrize(
    ("scores", "gap", "outcome"),
    [(torch.ones(3), 1e-2, "wrong"), (torch.ones(3) / 0, 0.0, "wrong"), (torch.ones(3), None, "works")],
)
def test_broken_scores_are_reported(
    scores: torch.Tensor, gap: float | None, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_run, "trace", fake("none"))
    monkeypatch.setattr(sweep_run, "explain", lambda *_, **__: SimpleNamespace(scores=scores, completeness_gap=gap))
    assert measure(LLAMA)["outcome"] == outcome


def test_models_that_are_too_large_or_cannot_be_built_are_unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(Case("base", "llama", "NoSuchModel"))["outcome"] == "unbuilt"
    monkeypatch.setattr(sweep_run, "MOST_PARAMETERS", 10)
    result = measure(LLAMA)
    assert (result["outcome"], result["error"]) == ("unbuilt", "ValueError")
    assert "more than 10 parameters" in result["message"]


def test_every_class_is_listed_once() -> None:
    cases = sweep.cases()
    names = [case.name for case in cases]
    assert len(names) == len(set(names)) > 1000
    tasks = {case.name: case.task for case in cases}
    assert tasks["LlamaForCausalLM"] == "causal lm"
    assert tasks["LlamaModel"] == "base"
    assert tasks["BertForMaskedLM"] == "masked lm"


ROWS = [
    {"task": "base", "type": "a", "class": "A", "outcome": "works", "layers": 2, "gap": None},
    {"task": "base", "type": "b", "class": "B", "outcome": "unbuilt", "error": "ImportError", "message": "no timm"},
    {"task": "ctc", "type": "c", "class": "C", "outcome": "wrong", "error": "gap", "message": "scores", "gap": 0.1},
]


def test_the_table_counts_outcomes_by_task() -> None:
    assert table(ROWS).splitlines() == [
        f"| task | {' | '.join(OUTCOMES)} | all |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| base | 1 | 0 | 0 | 0 | 0 | 1 | 2 |",
        "| ctc | 0 | 1 | 0 | 0 | 0 | 0 | 1 |",
        "| all | 1 | 1 | 0 | 0 | 0 | 1 | 3 |",
    ]
    text = section({"transformers": "5.0", "torch": "2.0", "rows": ROWS})
    assert text.startswith("3 model classes of the auto classes of transformers 5.0")
    assert "2 are built and run, and 1 of these work" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 120


def test_differences_are_of_outcomes() -> None:
    moved = [dict(ROWS[0], layers=3, gap=0.5), dict(ROWS[1], outcome="works"), dict(ROWS[2], **{"class": "D"})]
    assert sweep.differences(ROWS, moved) == [
        "C: is recorded, but in no auto class",
        "B: was unbuilt, is works (ImportError: no timm)",
        "D: was never recorded, is wrong (gap: scores)",
    ]
    assert sweep.differences(ROWS, moved[:1], whole=False) == []


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a page to write to, and three models to sweep over."""
    (tmp_path / "docs").mkdir()
    (tmp_path / sweep.PAGE).write_text("before\n" + "\n".join(markers("sweep")) + "\nafter\n")
    monkeypatch.setattr(sweep, "cases", lambda: [LLAMA, VIT, BART])
    return tmp_path


def test_a_sweep_is_recorded_and_checked(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = ["--root", str(checkout)]
    assert sweep.main(root) == 0
    record = json.loads((checkout / RECORD).read_text())
    assert record["transformers"] == transformers.__version__
    assert [(row["class"], row["outcome"]) for row in record["rows"]] == [
        ("LlamaForCausalLM", "works"),
        ("ViTForImageClassification", "works"),
        ("BartModel", "works"),
    ]
    page = (checkout / sweep.PAGE).read_text()
    assert read_section(page, "sweep") == section(record)
    assert page.startswith("before\n")

    record["rows"][0]["outcome"] = "refused"
    (checkout / RECORD).write_text(json.dumps(record))
    capsys.readouterr()
    assert sweep.main([*root, "--check", "--limit", "1"]) == 1
    assert "LlamaForCausalLM: was refused, is works" in capsys.readouterr().out
    assert sweep.main([*root, "--task", "causal lm"]) == 0
    assert sweep.main([*root, "--check", "--limit", "1"]) == 0

    monkeypatch.setattr(sweep_run, "trace", fake("killed"))
    assert sweep.main([*root, "--check", "--limit", "1"]) == 1
    assert (
        "LlamaForCausalLM: was works, is crash (Killed: the process ended without a result)" in capsys.readouterr().out
    )
    monkeypatch.setattr(sweep_run, "trace", fake("output"))
    assert sweep.main([*root, "--limit", "1"]) == 1
    assert json.loads((checkout / RECORD).read_text())["rows"][0]["outcome"] == "wrong"


@pytest.mark.parametrize(("stage", "outcome"), [("building", "unbuilt"), ("tracing", "crash")])
def test_a_process_that_takes_too_long_is_stopped(stage: str, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(case: Case, built: Callable[[], None]) -> Any:
        if stage == "tracing":
            built()
        while True:
            pass

    monkeypatch.setattr(sweep_run, "measure", endless)
    monkeypatch.setattr(sweep_run, "SECONDS", 1)
    ((case, result),) = sweep_run.run([LLAMA], 1)
    assert case == LLAMA
    assert (result["outcome"], result["error"]) == (outcome, "Timeout")


def test_unknown_tasks_folders_and_versions_are_refused(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = ["--root", str(checkout)]
    assert sweep.main([*root, "--task", "causal"]) == 1
    assert "no task is named 'causal'; did you mean 'causal lm'?" in capsys.readouterr().err
    assert sweep.main([*root, "--check"]) == 1
    assert "no record to check" in capsys.readouterr().err
    (checkout / RECORD).write_text(json.dumps({"transformers": "1.0", "rows": ROWS}))
    assert sweep.main([*root, "--limit", "1"]) == 1
    assert "the record is of transformers 1.0" in capsys.readouterr().err
    assert sweep.main(["--root", str(checkout / "docs")]) == 1
    assert "is no checkout of the repository" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("case", "layers"),
    [
        # Convolutions of one tap between layers of attention.
        (Case("masked lm", "squeezebert", "SqueezeBertForMaskedLM"), 2),
        # Scales by parameters of the blocks, and a projection of patches to the text's width.
        (Case("base", "internvl", "InternVLModel"), 5),
        # Experts that a router selects, with biases.
        (Case("causal lm", "gpt_oss", "GptOssForCausalLM"), 2),
        (Case("causal lm", "phimoe", "PhimoeForCausalLM"), 2),
        # A convolution that makes a token of each four patches, between a vision model and a text.
        (Case("image text to text", "glm4v", "Glm4vForConditionalGeneration"), 5),
        # Attention with an adapter between convolutions of one block.
        (Case("base", "florence2", "Florence2Model"), 20),
        (Case("masked image modeling", "swin", "SwinForMaskedImageModeling"), 8),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_classes_of_transformers_work(case: Case, layers: int) -> None:
    result = measure(case)
    assert (result["outcome"], result["layers"]) == ("works", layers)
