import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.evaluation import tiny
from unilinattn.errors import InputError, OptionError
from unilinattn.evaluation import Sample, read_samples, task_samples
from unilinattn.evaluation.samples import fingerprint
from unilinattn.examples import TASKS
from unilinattn.examples.tasks import HELD_OUT_SEED

WORDS = ["the", "cat", "sat", "on", "a", "mat"]


def tokenizer(text: str) -> dict[str, list[int]]:
    return {"input_ids": [WORDS.index(word) for word in text.split()]}


def test_task_samples_are_the_held_out_sequences_with_the_keys_before_each_query() -> None:
    batch = TASKS["induction"].sample(3, HELD_OUT_SEED)
    for at, sample in enumerate(task_samples("induction", 3)):
        assert torch.equal(sample.inputs, batch.input_ids[at : at + 1])
        for query in range(48):
            answers = [key for key in range(query) if batch.relevant[at, query, key]]
            assert sample.relevant[query].nonzero().flatten().tolist() == answers  # type: ignore[index]  # not None
            candidates = list(range(query)) if answers else []
            assert sample.valid[query].nonzero().flatten().tolist() == candidates  # type: ignore[index]  # not None
        assert (sample.target, sample.label) == (None, None)
    last, *_ = task_samples("induction", 3, target=-1)
    assert (last.target, last.label) == (-1, int(batch.labels[0, -1]))


def test_task_samples_refuse() -> None:
    with pytest.raises(OptionError, match="did you mean 'copying'"):
        task_samples("copyng", 1)
    with pytest.raises(InputError, match=r"target 6 of sequence 0 of copying has no answer .* \[3, 4, 5\]"):
        task_samples(tiny.TASK, 1, target=6)
    with pytest.raises(InputError, match="target 9"):
        task_samples(tiny.TASK, 1, target=9)


@pytest.mark.usefixtures("unchecked")
def test_masks_of_the_wrong_kind_or_size_are_refused() -> None:
    ids, image = torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 3, 8, 8)
    wrong: dict[str, dict[str, Any]] = {
        "relevant must be a boolean tensor": {"relevant": torch.ones(4)},
        r"valid of shape \(5,\) does not fit 4 tokens": {"valid": torch.ones(5, dtype=torch.bool)},
        r"relevant of shape \(4, 5\) does not fit": {"relevant": torch.ones(4, 5, dtype=torch.bool)},
        r"have one shape.*relevant \(4,\), valid \(4, 4\)": {
            "relevant": torch.ones(4, dtype=torch.bool),
            "valid": torch.ones(4, 4, dtype=torch.bool),
        },
        "grid": {"grid": (0, 2)},
        "foreground must be a boolean tensor": {"foreground": torch.ones(2, 2)},
    }
    for message, fields in wrong.items():
        with pytest.raises(InputError, match=message):
            Sample(inputs={"input_ids": ids}, **fields)
    with pytest.raises(InputError, match=r"foreground of shape \(4, 8\) does not fit an image of 8 x 8 pixels"):
        Sample(inputs=image, foreground=torch.ones(4, 8, dtype=torch.bool))
    Sample(inputs=image, foreground=torch.ones(8, 8, dtype=torch.bool))


def test_a_fingerprint_sees_every_field() -> None:
    mask = torch.tensor([True, False, True])
    ids = torch.tensor([[1, 2, 3]])
    base: dict[str, Any] = {"inputs": ids, "target": 1}
    changes: list[dict[str, Any]] = [
        {"inputs": ids + 1}, {"inputs": ids.int()}, {"inputs": {"input_ids": ids}}, {"target": 2}, {"relevant": mask},
        {"relevant": ~mask}, {"possible": mask}, {"valid": mask}, {"label": 1}, {"grid": (1, 3)},
        {"foreground": mask[None]}, {"name": "a"},
    ]  # fmt: skip
    prints = [fingerprint(Sample(**base | change)) for change in ({}, *changes)]
    assert len(set(prints)) == len(prints)
    assert fingerprint(Sample(**base | {"inputs": ids.clone()})) == prints[0]


def test_samples_are_read_from_json_lines(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"text": "the cat sat"},
        {"text": "a mat on the cat", "target": 2, "relevant": [1, 0], "label": 4, "name": "mat"},
        {"text": "the cat", "relevant": [[1, 0]]},
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    plain, one, every = read_samples(path, tokenizer)
    assert plain.inputs.tolist() == [[0, 1, 2]] and plain.target == -1 and plain.relevant is None
    assert (one.target, one.label, one.name) == (2, 4, "mat")
    assert one.relevant is not None and one.relevant.tolist() == [True, True, False, False, False]
    assert every.target is None
    assert every.relevant is not None and every.relevant.tolist() == [[False, False], [True, False]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "the', "Unterminated string"),
        ("[1]", "no JSON object with a text"),
        ('{"target": 1}', "no JSON object with a text"),
        ('{"text": "the cat", "taget": 1}', "unknown field 'taget'; did you mean 'target'"),
        ('{"text": "the cat", "target": "last"}', "target is 'last'; give an integer"),
        ('{"text": "the cat", "relevant": [2]}', r"gold link \(0, 2\) lies outside the sentence"),
        ('{"text": "the cat", "relevant": [[0, 1], [2, 0]]}', r"gold link \(2, 0\) lies outside"),
        ('{"text": "the cat", "relevant": [[0, 1], 3]}', "give a list of positions, or of pairs"),
        ('{"text": "the cat", "relevant": 1}', "give a list of positions"),
        ('{"text": ""}', "no tokens"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"text": "the cat"}}\n\n{line}\n')
    with pytest.raises(InputError, match=rf"data.jsonl, line 3: .*{message}"):
        read_samples(path, tokenizer)


def test_files_without_lines_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(InputError, match="has no lines"):
        read_samples(tmp_path / "empty", tokenizer)
    with pytest.raises(InputError, match="cannot be read"):
        read_samples(tmp_path / "absent", tokenizer)
