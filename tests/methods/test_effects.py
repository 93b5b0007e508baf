"""Effects of other tokens: content, control and interaction against substituted forwards and dense layers."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

import unilinattn as ula
from tests.frozen import detached
from tests.frozen.detached import BY_HAND, LENGTH, Steps, llama_model, token_ids, worst
from tests.hosts import named
from tests.shared import exact_trace
from tests.texts import PARIS, mamba, tokenizer
from unilinattn.errors import InputError, OptionError
from unilinattn.examples import TASKS, load
from unilinattn.frozen.shares import AffineScalar
from unilinattn.results.effects import Effects
from unilinattn.testing import promoted

HOSTS = ("mamba", "mamba2", "llama, grouped queries", "qwen3 next", "bert")
NAMES = ("effect", "content", "control", "interaction")


def other_ids() -> Tensor:
    return torch.randint(17, (2, LENGTH), generator=torch.Generator().manual_seed(2))


class _Substituted(TorchFunctionMode):
    """Records the results of `detach`, and returns those of another run in their place."""

    def __init__(self, factors: list[Tensor] | None = None) -> None:
        super().__init__()
        self.factors, self.recorded = None if factors is None else iter(factors), list[Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not Tensor.detach:
            return result
        self.recorded.append(result)
        return result if self.factors is None else next(self.factors)


def substituted(name: str, values: Tensor, factors: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Return logit 3 of a hand-written forward on `values`, whose detached tensors are those of a run on `factors`."""
    monkeypatch.setattr(detached, "token_ids", lambda: factors)
    model = BY_HAND[name].build()
    model.config._attn_implementation = "eager"
    embed = model.get_input_embeddings()
    positions = model.transformer.wpe.weight[:LENGTH] if name == "gpt2" else 0

    def run(ids: Tensor, mode: _Substituted) -> Tensor:
        with mode:
            return BY_HAND[name].logits(model, embed(ids) + positions, Steps([], [], []))[:, 3]

    with promoted(), torch.no_grad():
        record = _Substituted()
        run(factors, record)
        replay = _Substituted(record.recorded)
        result = run(values, replay)
    assert len(record.recorded) == len(replay.recorded) > 0
    return result


@cache
def by_hand(name: str, by: Any = "tokens") -> Effects:
    # Inside of `promoted` the weights would be drawn in float64, which are others.
    model = BY_HAND[name].build()
    with promoted():
        return ula.effects(model, token_ids(), against=other_ids(), logit=3, by=by, progress=False)


@pytest.mark.parametrize("name", BY_HAND)
def test_effects_are_those_of_substituted_forwards(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = by_hand(name)
    x, other = token_ids(), other_ids()
    for values, factors, difference in (
        (x, x, torch.zeros(2, dtype=torch.float64)),
        (other, x, result.content),
        (x, other, result.control),
        (other, other, result.effect),
    ):
        expected = substituted(name, values, factors, monkeypatch)
        assert worst(result.value - difference, expected) <= 1e-10
    assert worst(result.content_by_token.sum(1), result.content) <= 1e-10
    assert float(torch.stack([getattr(result, each).abs().min() for each in NAMES]).min()) > 1e-4


def _case(name: str) -> tuple[ula.Trace, Tensor]:
    traced = exact_trace(named(name))
    ids = traced.ids
    assert ids is not None
    other = torch.where(ids > 3, ids - 1, ids + 1)
    return traced, other


@pytest.mark.parametrize("name", HOSTS)
def test_the_parts_add_up_to_the_difference_of_two_runs(name: str) -> None:
    traced, other = _case(name)
    with promoted():
        result = ula.effects(traced, against=other, logit=1, progress=False)
        logits = [traced.host(ids).logits[:, -1, 1].detach() for ids in (traced.ids, other)]
    assert result.gap <= 1e-10
    assert worst(result.effect, logits[0] - logits[1]) <= 1e-10
    assert float((result.effect - result.content - result.control - result.interaction).abs().max()) <= 1e-10


@pytest.mark.parametrize("name", HOSTS)
def test_swapped_inputs_swap_signs(name: str) -> None:
    traced, other = _case(name)
    with promoted():
        there = ula.effects(traced, against=other, logit=1, progress=False)
        back = ula.effects(traced.host, other, against=traced.ids, logit=1, progress=False)
    assert worst(back.effect, -there.effect) <= 1e-10
    assert worst(back.content, -there.content - there.interaction) <= 1e-10
    assert worst(back.control, -there.control - there.interaction) <= 1e-10
    assert worst(back.interaction, there.interaction) <= 1e-10


def test_a_lost_bias_opens_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without(AffineScalar):
        def __init__(self, *fields: Any) -> None:
            super().__init__(*fields[:3], torch.zeros_like(fields[3]), *fields[4:])

    monkeypatch.setattr("unilinattn.frozen.run.AffineScalar", Without)
    with promoted(), pytest.raises(ula.UnilinattnError, match="shares and biases miss the logit"):
        ula.effects(llama_model(), token_ids(), against=other_ids(), logit=3, progress=False)


@pytest.mark.long
@pytest.mark.parametrize("name", ["mamba", "llama"])
def test_effects_by_layer_are_those_of_operators_behind_a_gradient_by_hand(name: str) -> None:
    result = by_hand(name, "layer")
    model, logit, _, _, steps = detached.detached_model(name)
    with promoted():
        here, there = (ula.trace(model, ids, progress=False) for ids in (token_ids(), other_ids()))
        assert result.parts == tuple(layer.name for layer in here.layers) and result.gap <= 1e-10
        for k, (layer, other) in enumerate(zip(here.layers, there.layers, strict=True)):
            (grad,) = torch.autograd.grad(logit.sum(), steps.outputs[k], retain_graph=True)
            outputs = {
                "effect": other.output,
                "content": layer.operator.apply({"x": other.operator.inputs["x"]}),
                "control": other.operator.apply({"x": layer.operator.inputs["x"]}),
            }
            for number, output in outputs.items():
                expected = (grad * (layer.output - output)).flatten(1).sum(1).detach()
                assert worst(getattr(result, number)[:, k], expected) <= 1e-10


@pytest.mark.parametrize("name", HOSTS)
def test_effects_by_layer_add_up(name: str) -> None:
    traced, other = _case(name)
    with promoted():
        result = ula.effects(traced, against=other, logit=1, by="layer", progress=False)
    assert result.gap <= 1e-10 and result.effect.shape == (len(result.rows), len(traced.layers))
    assert worst(result.content_by_token.sum(-1), result.content) <= 1e-10


def _sent(mixer: Any, attention: Tensor, vectors: Tensor, columns: slice) -> Tensor:
    """Return the part of an attention layer's output that passes through the head of these columns, without biases."""
    return attention @ (vectors @ mixer.v_proj.weight.T) @ mixer.o_proj.weight[:, columns].T


def test_effects_by_head_are_those_of_attention_maps() -> None:
    result, layers = by_hand("llama", "head"), by_hand("llama", "layer")
    model, logit, _, _, steps = detached.detached_model("llama")
    runs = []
    with promoted(), torch.no_grad():
        for ids in (token_ids(), other_ids()):
            output = model(ids, output_attentions=True)
            traced = ula.trace(model, ids, progress=False)
            runs.append([(a, layer.input) for a, layer in zip(output.attentions, traced.layers, strict=True)])
    for k, block in enumerate(model.model.layers):
        (grad,) = torch.autograd.grad(logit.sum(), steps.outputs[k], retain_graph=True)
        (here, x), (there, x_other) = runs[0][k], runs[1][k]
        for head in range(2):
            columns = slice(4 * head, 4 * head + 4)

            def passed(
                attention: Tensor, vectors: Tensor, grad: Any = grad, block: Any = block, columns: slice = columns
            ) -> Tensor:
                value = vectors @ block.self_attn.v_proj.weight.T
                sent = attention[:, columns.start // 4] @ value @ block.self_attn.o_proj.weight[:, columns].T
                return (grad * sent).flatten(1).sum(1).detach()

            same = passed(here, x)
            column = 3 * k + head
            assert worst(result.effect[:, column], same - passed(there, x_other)) <= 1e-10
            assert worst(result.content[:, column], same - passed(here, x_other)) <= 1e-10
            assert worst(result.control[:, column], same - passed(there, x)) <= 1e-10
        assert result.parts[3 * k + 2] == f"model.layers.{k}.self_attn, rest"
        for each in NAMES:
            assert worst(getattr(result, each)[:, 3 * k : 3 * k + 3].sum(1), getattr(layers, each)[:, k]) <= 1e-10


@pytest.mark.long
@pytest.mark.parametrize("name", ["mamba2", "qwen3 next"])
def test_heads_of_a_recurrence_add_up_to_their_layer(name: str) -> None:
    traced, other = _case(name)
    with promoted():
        by_head, by_layer = (
            ula.effects(traced, against=other, logit=1, by=by, progress=False) for by in ("head", "layer")
        )
    assert by_head.gap <= 1e-10
    for k, layer in enumerate(by_layer.parts):
        columns = [index for index, part in enumerate(by_head.parts) if part.startswith(f"{layer},")]
        assert len(columns) > 2
        for each in NAMES:
            assert worst(getattr(by_head, each)[:, columns].sum(1), getattr(by_layer, each)[:, k]) <= 1e-10


@pytest.mark.long
def test_the_mean_is_over_the_replacements() -> None:
    model, ids = llama_model(), token_ids()[:1]
    with promoted():
        singles = [ula.effects(model, ids, replaced=4, replacement=each, logit=3, progress=False) for each in (5, 9)]
        both = ula.effects(model, ids, replaced=4, replacement=[5, 9], logit=3, progress=False)
        changed = ids.clone()
        changed[0, 4] = 5
        against = ula.effects(model, ids, against=changed, logit=3, progress=False)
    assert both.rows[0].draws == 2 and len(both.rows) == 1
    for each in NAMES:
        assert worst(getattr(both, each), sum(getattr(single, each) for single in singles) / 2) <= 1e-10
        assert worst(getattr(singles[0], each), getattr(against, each)) <= 1e-10
    assert set(both.content_by_token[0].nonzero().flatten().tolist()) == {4}


@pytest.mark.long
def test_every_token_is_replaced_by_seeded_draws_in_pieces() -> None:
    model, ids = llama_model(), token_ids()

    def measured(**options: Any) -> Effects:
        with promoted():
            return ula.effects(model, ids, progress=False, **options)

    result, pieces, other = measured(draws=3), measured(draws=3, max_memory=1), measured(draws=3, seed=1)
    assert [(row.sequence, row.first) for row in result.rows] == [(b, k) for b in range(2) for k in range(LENGTH)]
    assert {row.draws for row in result.rows} == {3}
    assert worst(pieces.effect, result.effect) <= 1e-10 and worst(other.effect, result.effect) > 1e-3
    # The logit of every run is the prediction on the inputs.
    logits = model(ids).logits[:, -1].detach()
    assert worst(result.value, logits.max(-1).values) <= 1e-6
    assert result.logits == tuple(f"logit {each}" for each in logits.argmax(-1).tolist())


@pytest.mark.parametrize("model", ["mamba", "mamba2", "s4d", "transformer"])
def test_a_matched_token_decides_and_the_answer_sends(model: str) -> None:
    batch = TASKS["induction"].sample(1, 0)
    answer = int(batch.relevant[0, -1].nonzero())
    result = ula.effects(
        load("induction", model), batch.input_ids, replaced=[answer - 1, answer], draws=8, progress=False
    )
    assert result.gap <= 1e-4 * float(result.value)
    # The token before the answer is matched with the query, and has nothing to send.
    assert float(result.control[0]) > 4 * abs(float(result.content[0]))
    assert float(result.content[1]) > float(result.content[0])


def test_texts_name_spans_and_replacements() -> None:
    options: dict[str, Any] = dict(tokenizer=tokenizer(), logit="!", progress=False)
    result = ula.effects(mamba(), PARIS, replaced=["capital", "of"], replacement=[" is", "x"], **options)
    assert [row.text for row in result.rows] == [" capital", " of"] and result.logits == ("'!'",)
    positions = [row.first for row in result.rows]
    span = ula.effects(mamba(), PARIS, replaced=(positions[0], positions[1] + 1), replacement=7, **options)
    assert [row.text for row in span.rows] == [" capital of"] and span.rows[0].last - span.rows[0].first == 2
    with pytest.raises(InputError, match="replaced 'London' does not occur"):
        ula.effects(mamba(), PARIS, replaced="London", **options)
    assert " capital of" in repr(span) and "interaction" in repr(span) and "gap" in repr(span)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_replaced(side: str) -> None:
    texts = [PARIS, "The capital"]
    single, batch = (
        ula.effects(mamba(), text, tokenizer=tokenizer(side), replaced=[0, -1], replacement=9, logit=3, progress=False)
        for text in (texts[1:], texts)
    )
    rows = [index for index, row in enumerate(batch.rows) if row.sequence == 1]
    assert [batch.rows[index][1:] for index in rows] == [row[1:] for row in single.rows]
    assert torch.allclose(batch.effect[rows], single.effect, atol=1e-5)
    assert torch.allclose(batch.control[rows], single.control, atol=1e-5)


@pytest.mark.long
def test_placeholders_of_an_image_are_not_replaced() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    vision = CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=16)
    text = LlamaConfig(**sizes, vocab_size=20)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=19, vision_feature_layer=-1)
    model, ids = LlavaForConditionalGeneration(config).eval(), torch.tensor([[3, 19, 19, 19, 19, 5, 6]])
    trace = ula.trace(model, {"input_ids": ids, "pixel_values": torch.randn(1, 3, 8, 8)}, progress=False)
    assert [row.first for row in ula.effects(trace, draws=1).rows] == [0, 5, 6]
    shifted = torch.tensor([[19, 19, 19, 19, 5, 5, 6]])
    for options, message in (
        ({"replaced": (0, 2)}, "token 1 of sequence 0 is a placeholder, in whose place LlavaForConditionalGeneration"),
        ({"against": shifted}, "token 0 of sequence 0 is a placeholder"),
        ({"replaced": 0, "replacement": 19}, "replacement has the id 19, in whose place"),
    ):
        with pytest.raises(InputError, match=message):
            ula.effects(trace, **options)


def test_a_single_token_has_an_effect() -> None:
    model = llama_model()
    with promoted():
        result = ula.effects(model, token_ids()[:1, :1], logit=3, progress=False)
        values = model(torch.arange(17)[:, None]).logits[:, -1, 3].detach()
    assert len(result.rows) == 1 and result.gap <= 1e-10
    assert float(result.effect.abs()) <= float(values.max() - values.min())


def _t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config).eval()


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "by": ({"by": "neuron"}, OptionError, "unknown effects by 'neuron'"),
    "target": ({"target": 40}, InputError, "target 40 is out of range"),
    "no target": ({"target": None}, OptionError, "effects are those of one logit"),
    "both": ({"against": token_ids(), "replaced": 3}, OptionError, "without replaced="),
    "length": ({"against": token_ids()[:, :4]}, InputError, r"ids \(2, 4\), and the inputs \(2, 13\)"),
    "vocabulary": ({"against": token_ids() + 9}, InputError, "has no id .*ids from 0 to 16"),
    "mask": (
        {"against": {"input_ids": token_ids(), "attention_mask": torch.zeros(2, LENGTH, dtype=torch.long)}},
        InputError,
        "another attention_mask",
    ),
    "position": ({"replaced": 13}, InputError, "has the real tokens 0 to 12"),
    "span": ({"replaced": (4, 4)}, InputError, r"give a position, \(first, stop\)"),
    "empty": ({"replaced": []}, InputError, r"replaced=\[\]; give"),
    "text": ({"replaced": "Paris"}, InputError, "was not given text"),
    "replacement text": ({"replacement": "Paris"}, InputError, "tokenizer="),
    "replacement length": ({"replaced": 3, "replacement": [[1, 2]]}, InputError, "has 2 tokens, and the replaced"),
    "itself": ({"replaced": 3, "replacement": token_ids()[0, 3].item()}, InputError, "is equal to them"),
    "replaced": ({"replaced": 3.5}, InputError, "replaced=3.5; give"),
    "replacement": ({"replacement": 2.5}, InputError, "replacement=2.5; give"),
    "seed": ({"seed": "a"}, OptionError, "seed='a'"),
    "draws": ({"draws": 0}, OptionError, "draws=0"),
    "many draws": ({"draws": 17}, OptionError, "no special ids"),
    "not linear": ({"logit": lambda out: out.logits[:, -1].log_softmax(-1)[:, 3]}, InputError, "is not linear"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_misfits_are_refused(case: str) -> None:
    options, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        ula.effects(llama_model(), token_ids(), progress=False, **options)


def test_models_without_one_tensor_of_ids_are_refused() -> None:
    inputs = {"input_ids": torch.tensor([[12, 40, 7]]), "decoder_input_ids": torch.tensor([[0, 31]])}
    with pytest.raises(InputError, match="two streams"):
        ula.effects(_t5(), inputs, progress=False)
    with pytest.raises(InputError, match="not given one tensor of token ids"):
        ula.effects(llama_model(), {"inputs_embeds": torch.randn(1, 5, 8).double()}, progress=False)
