"""The command `unilinattn decomposition`: errors of LaTIM's splits of the activation."""

import argparse

from unilinattn.errors import OptionError
from unilinattn.evaluation import decomposition, decomposition_errors
from unilinattn.evaluation.checkpoints import load_checkpoint
from unilinattn.evaluation.side_by_side import example_decompositions, one_thread, quiet_hosts
from unilinattn.tracing.trace import trace


def run(options: argparse.Namespace) -> None:
    """Print the decomposition errors of a checkpoint on a text, or of the trained models; write them with --out."""
    if (options.path is None) != (options.text is None):
        raise OptionError("a checkpoint is measured on a text: give PATH and --text, or neither.")
    with quiet_hosts(), one_thread():
        if options.path is not None:
            host, tokenizer = load_checkpoint(options.path)
            found = trace(host, options.text, tokenizer=tokenizer)
        errors = {options.path.name: decomposition_errors(found)} if options.path else example_decompositions()
    print(decomposition.text_table(errors))
    if options.out is not None:
        decomposition.write(errors, options.out)
