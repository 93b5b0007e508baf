"""The command `unilinattn decomposition`: errors of LaTIM's splits of the activation."""

import argparse

from unilinattn import examples
from unilinattn.analysis import decomposition
from unilinattn.analysis.decomposition import DecompositionErrors, decomposition_errors
from unilinattn.errors import OptionError
from unilinattn.evaluation.checkpoints import load_checkpoint, one_thread, quiet_hosts
from unilinattn.examples.tasks import HELD_OUT_SEED
from unilinattn.tracing.trace import trace

SEQUENCES = 8
"""Number of held-out sequences on which the trained models are measured."""


def run(options: argparse.Namespace) -> None:
    """Print the decomposition errors of a checkpoint on a text, or of the trained models; write them with --out."""
    if (options.path is None) != (options.text is None):
        raise OptionError("a checkpoint is measured on a text: give PATH and --text, or neither.")
    with quiet_hosts(), one_thread():
        if options.path is not None:
            host, tokenizer = load_checkpoint(options.path)
            traced = trace(host, options.text, tokenizer=tokenizer)
        errors = {options.path.name: decomposition_errors(traced)} if options.path else _examples()
    print(decomposition.text_table(errors))
    if options.out is not None:
        decomposition.write(errors, options.out)


def _examples() -> dict[str, DecompositionErrors]:
    """Return the decomposition errors of the trained models on held-out sequences, by "task/model"."""
    errors = {}
    for task, model in examples.names():
        batch = examples.TASKS[task].sample(SEQUENCES, HELD_OUT_SEED)
        errors[f"{task}/{model}"] = decomposition_errors(trace(examples.load(task, model), batch.input_ids))
    return errors
