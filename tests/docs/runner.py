"""Run programs, each in a separate process, and print the outputs of their blocks as JSON.

Reads from standard input a list of programs {"folder": modules to import, "blocks": Python code}. The processes are
forked after the imports that most of them share: matplotlib, and those of a trace of the trained examples.
"""

import contextlib
import gc
import io
import json
import os
import sys
import tempfile
import traceback

import matplotlib.figure  # noqa: F401  takes a second
import torch

import unilinattn.testing  # configures torch when it is imported
from unilinattn.examples import load


def printed(folder: str, blocks: list[str]) -> list[str]:
    """Run blocks in one namespace and return their outputs; an exception ends the program and is printed.

    They import the modules of `folder`, and write their files into a folder of their own.
    """
    sys.path.insert(0, folder)
    with tempfile.TemporaryDirectory() as own:
        os.chdir(own)
        return _printed(blocks)


def _printed(blocks: list[str]) -> list[str]:
    names = {"__name__": "__main__"}
    outputs = []
    for block in blocks:
        stream = io.StringIO()
        outputs.append("")
        try:
            with contextlib.redirect_stdout(stream):
                exec(compile(block, "<block>", "exec"), names)
        except Exception:
            return [*outputs[:-1], stream.getvalue() + traceback.format_exc()]
        outputs[-1] = stream.getvalue()
    return outputs


def main() -> None:
    """Run each program in a forked process, one after the other."""
    torch.set_num_threads(1)
    for host in ("mamba", "mamba2", "transformer"):
        unilinattn.explain(load("induction", host), torch.arange(8)[None], progress=False)
    # The children share these objects, and their collectors do not look through them.
    gc.freeze()
    results = []
    for program in json.load(sys.stdin):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            with os.fdopen(writer, "w") as pipe:
                json.dump(printed(**program), pipe)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            results.append(json.load(pipe))
        os.waitpid(child, 0)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
