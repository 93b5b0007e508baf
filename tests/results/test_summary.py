"""The text of a result: its explained value, its ranking, its sinks, its sums and its cancellation."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import unilinattn as ula
from unilinattn.examples import TASKS, load
from unilinattn.results.attribution import Attribution
from unilinattn.results.ranking import ranking
from unilinattn.results.summary import CANCELS, cancellation

WORDS = ["<s>", " The", " capital", " of", " France", " is"]
SCORES = torch.tensor([12.7, 0.5, -1.25, 0.25, 3.5, 0.125])
SINK = "attention sink: position 0 '<s>'. The residual stream there is large."


def of_target(**changes: Any) -> Attribution:
    values: dict[str, Any] = {
        "scores": SCORES[None],
        "dims": ("batch", "key"),
        "method": "attn_lrp",
        "options": {"logit": None, "measure": "centered", "target": -1},
        "tokens": [WORDS],
        "logit_names": [[" Paris"]],
        "model": "tiny",
        "extras": {"content": SCORES[None] / 2, "control": SCORES[None] / 4, "logit": torch.tensor([17.434])},
    }
    return Attribution(**(values | changes))


def of_queries(**changes: Any) -> Attribution:
    scores = torch.diag(torch.full((4,), 9.0)) + torch.arange(16.0).view(4, 4).tril(-1) / 10
    values = {"scores": scores.expand(2, 1, 4, 4), "dims": ("layer", "batch", "query", "key"), "method": "raw"}
    return Attribution(**(values | {"layers": ("h.0", "h.1"), "tokens": [list("abcd")]} | changes))


def sums_of(shares: list[float], bias: float) -> Attribution:
    value = sum(shares) + bias
    sizes = sum(map(abs, shares)) + abs(bias)
    extras = {"bias": bias, "logit": value, "cancellation": sizes / abs(value)}
    tensors = {name: torch.tensor([number], dtype=torch.float64) for name, number in extras.items()}
    return of_target(scores=torch.tensor([shares]), tokens=None, method="logit", extras=tensors)


def columns(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
    return re.split(r" {2,}", line.strip())[1:]


@pytest.mark.parametrize(("method", "model"), [("logit", "mamba"), ("attn_lrp", "transformer")])
def test_a_shipped_example_answers_in_twelve_lines(method: str, model: str) -> None:
    ids = TASKS["induction"].sample(1, 0).input_ids
    result = ula.explain(load("induction", model), ids, method=method, target=-1)
    text = repr(result)
    assert len(text.splitlines()) <= 12
    centred = ", centred," if method == "attn_lrp" else ""
    value = float(result.extras["logit"])
    assert f"explains the logit of the model's prediction{centred} at position 47 = {value:.4g}\n" in text
    best = np.argsort(-result.scores[0].abs().numpy())[:5].tolist()
    assert columns(text, "largest") == [str(key) for key in best] and best[0] == 41
    tensors = {"score": result.scores, **{name: result.extras.get(name) for name in ("content", "control")}}
    for name, tensor in tensors.items():
        if tensor is not None:
            assert columns(text, name) == [f"{float(tensor[0, key]):.3g}" for key in best]
    bias = "".join(
        f"{name} {float(result.extras[name]):.3g}, " for name in ("bias", "cancellation") if method == "logit"
    )
    assert ("content" in text) == ("control" in text) == (method == "attn_lrp") and bias in text
    assert "reconstruction error: " in text and "2 layers (" in text and "batch 1, key 48 (float32)" in text


def test_the_text_of_a_sink_and_of_two_parts() -> None:
    assert repr(of_target(sinks=[[0]], warnings=(SINK,))).splitlines() == [
        "Attribution: attn_lrp of tiny",
        "  explains the logit of the model's prediction ' Paris', centred, at position 5 ' is' = 17.43",
        "  largest  4 ' France'  2 ' capital'  1 ' The'  3 ' of'  5 ' is'",
        "  score            3.5         -1.25       0.5     0.25    0.125",
        "  content         1.75        -0.625      0.25    0.125   0.0625",
        "  control        0.875        -0.312     0.125   0.0625   0.0312",
        "  attention sinks, not ranked: 0 '<s>' 12.7 (content 6.35, control 3.17)",
        "  WARNING: attention sink: position 0 '<s>'",
        "  scores: batch 1, key 6 (float32)",
        "  options: logit=None, measure='centered', target=-1",
    ]
    assert "residual stream" in of_target(warnings=(SINK,)).warnings[0]


def test_a_pair_is_named_and_is_not_centred() -> None:
    text = repr(
        of_target(options={"logit": [7, 9], "measure": "centered", "target": 1}, logit_names=[[" Paris", " Rome"]])
    )
    assert (
        "explains the difference of the logits of tokens 7 ' Paris' and 9 ' Rome' at position 1 ' The' = 17.43" in text
    )
    assert "centred" not in text
    rows = of_queries(options={"logit": [7, 9], "target": None})
    assert "explains the difference of the logits of tokens 7 and 9 for each query\n" in repr(rows)


def test_log_odds_are_named() -> None:
    text = repr(of_target(options={"logit": 7, "measure": "log-odds", "target": 1}))
    assert "explains the log-odds of token 7 ' Paris' at position 1 ' The' = 17.43" in text


def test_a_pair_has_no_log_odds_and_generated_tokens_have() -> None:
    pair = repr(of_target(options={"logit": [7, 9], "measure": "log-odds", "target": 1}, logit_names=None))
    assert "the difference of the logits of tokens 7 and 9" in pair and "log-odds of" not in pair
    generated = repr(of_queries(options={"logit": [[7, 9, 7, 9]], "measure": "log-odds", "target": [[0, 1, 2, 3]]}))
    assert "explains the log-odds of the generated token" in generated


def test_keys_without_texts_are_positions_among_real_tokens() -> None:
    mask = torch.tensor([[False, False, True, True, True, True]])
    text = repr(of_target(tokens=None, mask=mask, logit_names=None))
    assert "at position 3 = 17.43" in text and columns(text, "largest") == ["2", "0", "1", "3"]
    assert columns(text, "score") == ["3.5", "-1.25", "0.25", "0.125"]


def test_queries_that_are_no_keys_have_no_text_and_no_diagonal() -> None:
    text = repr(of_queries(streams={"query": {"decoder": 4}, "key": {"encoder": 4}}))
    lines = [line.strip() for line in text.splitlines() if "<-" in line]
    assert {line.rpartition("  ")[0].strip() for line in lines[:4]} <= {
        f"h.{layer}, {query} <- {query} {key!r}" for layer in (0, 1) for query, key in enumerate("abcd")
    }
    assert all(line.endswith("  9") for line in lines)


def test_a_target_that_is_no_key_is_named_in_its_stream() -> None:
    streams = {"query": {"decoder": 9}, "key": {"encoder": 6}}
    assert "at position 8 of 'decoder' = 17.43" in repr(of_target(streams=streams))
    assert "at position" not in repr(of_target(streams=streams, options={"logit": None, "target": 9}))


def test_pairs_of_layers_leave_out_the_diagonal_and_padding() -> None:
    text = repr(of_queries())
    lines = [line.strip() for line in text.splitlines() if "<-" in line]
    assert lines[0] == "h.0, 3 'd' <- 2 'c'  1.4" and len(lines) == 5
    assert {line.split(", ")[0] for line in lines} == {"h.0", "h.1"}
    assert not any(line.endswith("  9") for line in lines)
    padded = of_queries(mask=torch.tensor([[True, True, True, False]]))
    (best, *_) = ranking(padded).top
    assert best.name == "h.0, 2 'c' <- 1 'b'" and best.numbers == (pytest.approx(0.9),)
    sinks = repr(of_queries(sinks=[[2]]))
    assert "attention sinks, not ranked: 2 'c' 1.4" in sinks and "h.0, 3 'd' <- 1 'b'  1.3" in sinks


def test_the_layers_of_a_target_are_pairs_with_it() -> None:
    layered = {"scores": torch.stack([SCORES, SCORES / 2])[:, None], "dims": ("layer", "batch", "key")}
    text = repr(of_target(**layered, layers=("h.0", "h.1"), extras={}))
    lines = [line.strip() for line in text.splitlines() if "<-" in line]
    assert lines[:2] == ["h.0, 5 ' is' <- 0 '<s>'        12.7", "h.1, 5 ' is' <- 0 '<s>'        6.35"]


def test_heads_are_named() -> None:
    heads = of_queries(
        scores=of_queries().scores[:, :, None], dims=("layer", "batch", "head", "query", "key"), heads=(3,)
    )
    assert "h.0, head 3, 3 'd' <- 2 'c'" in repr(heads)


def test_generated_tokens_are_the_last_keys() -> None:
    scores = torch.tensor([[[0.5, 0.25, 0.0, 0.0], [0.1, 0.2, 0.9, 0.0]]])
    made = of_target(
        scores=scores,
        dims=("batch", "query", "key"),
        tokens=[list("abcd")],
        query_tokens=[list("cd")],
        options={"logit": [[7, 9]], "target": [[1, 2]]},
        extras={},
    )
    assert "3 'd' <- 2 'c'   0.9\n" in repr(made) and "2 'c' <- 0 'a'   0.5\n" in repr(made)


def test_an_image_names_its_patches() -> None:
    image = of_target(
        scores=torch.arange(5.0)[None], tokens=None, grid=(2, 2), patches=(1, 2, 3, 4), cls=(0,), extras={}
    )
    assert columns(repr(image), "largest") == ["(1, 1)", "(1, 0)", "(0, 1)", "(0, 0)"]


def test_of_several_sequences_the_first_is_shown() -> None:
    extras = {"logit": torch.tensor([1.0, 2.0])}
    batch = of_target(scores=torch.stack([SCORES, -SCORES]), tokens=[WORDS, WORDS], logit_names=None, extras=extras)
    assert "sequence 0 of 2: explains the logit" in repr(batch) and " = 1\n" in repr(batch)
    assert columns(repr(batch), "score")[0] == "12.7"


def test_single_tokens_and_rows_of_sinks() -> None:
    single = of_target(scores=SCORES[None, :1], tokens=[WORDS[:1]], extras={}, sinks=[[]])
    assert columns(repr(single), "largest") == ["0 '<s>'"]
    sinks = of_target(sinks=[[0, 1, 2, 3, 4, 5]])
    assert "no scores but zero and those of attention sinks\n" in repr(sinks)
    assert "0 '<s>' 12.7 (content 6.35, control 3.17)" in repr(sinks) and " and 2 more\n" in repr(sinks)
    unknown = of_target(scores=torch.full((1, 6), float("nan")), extras={})
    assert "no scores but zero\n" in repr(unknown)


def test_words_name_shares_that_cancel() -> None:
    cancels = sums_of([43.5, -40.4, 0.5, 41.4, 0.0, -0.3], -36.5)
    assert cancellation(cancels) == "shares cancel: 43.5, 41.4 and -40.4 make a logit of 8.2"
    assert "cancellation 19.8" in repr(cancels) and "bias -36.5" in repr(cancels)
    bias = sums_of([43.5, -1.0, 0.5], -42.0)
    assert cancellation(bias) == "shares cancel: 43.5, -42 (bias) and -1 make a logit of 1"
    few = sums_of([1.0, -2.0, 0.5, 3.0], 0.0)
    assert cancellation(few) == "" and float(few.extras["cancellation"]) < CANCELS


def test_words_name_vectors_that_cancel_and_their_row() -> None:
    ratios = torch.ones(2, 1, 4)
    ratios[1, 0, 2] = 64
    made = of_queries(extras={"cancellation": ratios, "bias": ratios})
    assert cancellation(made) == (
        "vectors cancel at h.1, 2 'c': the sum of their norms is 64 times the norm of their sum"
    )
    assert "shares" not in repr(made) and "bias" not in repr(made)


def test_an_old_file_prints(tmp_path: Path) -> None:
    path = of_target(extras={"bias": torch.zeros(1), "logit": torch.tensor([17.434])}).save(tmp_path / "new")
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    newer = {"query_tokens", "word_ids", "offsets", "sinks", "logit_names", "patches", "cls", "heads", "streams"}
    header = {name: label for name, label in json.loads(metadata["header"]).items() if name not in newer}
    save_file(load_file(path), tmp_path / "old", metadata | {"header": json.dumps(header)})
    old = Attribution.load(tmp_path / "old")
    assert old.logit_names is None and old.sinks is None
    assert "the model's prediction, centred, at position 5 ' is' = 17.43" in repr(old)
    assert "bias 0\n" in repr(old) and "cancellation" not in repr(old)


def test_a_check_is_a_line_of_the_text_and_of_the_page() -> None:
    ids = TASKS["induction"].sample(1, 0).input_ids
    result = ula.explain(load("induction", "mamba"), ids, target=-1, check=True)
    assert result.checks is not None
    assert f"\n  {result.checks[0].sentence}\n" in repr(result)
    page = result.checks[0].sentence
    assert f"{page[0].upper()}{page[1:]}." in result.to_html()
