"""The samples of copying, and the rows and tables of the studies that share its models."""

import torch

from evidence.copying import TASK, samples


def test_a_sample_holds_one_query_and_the_key_of_its_answer() -> None:
    for sample in samples(30, 5):
        ids, (answer,) = sample.inputs[0].tolist(), sample.relevant.nonzero().flatten().tolist()
        assert ids[sample.target + 1] == ids[answer]
        assert answer == sample.target - TASK.source_length
        assert sample.target < len(ids) - 1


def test_the_diagonals_are_the_answer_and_its_neighbours() -> None:
    for sample, wide in zip(samples(30, 5), samples(30, 5, "diagonals"), strict=True):
        answer = int(sample.relevant.nonzero())
        near = [key for key in (answer - 1, answer, answer + 1) if 0 <= key < TASK.source_length]
        assert wide.relevant.nonzero().flatten().tolist() == near
        assert torch.equal(sample.inputs, wide.inputs)
