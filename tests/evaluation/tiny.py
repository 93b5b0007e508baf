"""A tiny model and its samples for the tests of evaluations."""

import torch

from unilinattn.evaluation import Sample, task_samples
from unilinattn.examples.tasks import SELECTION_SEED, Copying
from unilinattn.models.s4 import S4DConfig, S4DForCausalLM

TASK = Copying(source_length=3, source_vocabulary=5)


def model(seed: int = 0) -> S4DForCausalLM:
    torch.manual_seed(seed)
    config = S4DConfig(vocab_size=TASK.vocabulary, d_model=4, n_layers=2, d_state=2, dt_min=0.1, dt_max=0.5)
    return S4DForCausalLM(config).eval()


def data(count: int = 3) -> list[Sample]:
    return task_samples(TASK, count)


def selection(count: int = 2) -> list[Sample]:
    return task_samples(TASK, count, seed=SELECTION_SEED)
