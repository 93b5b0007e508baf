"""Run the named set-ups, or all; print their outcomes as JSON, or write docs/hosts.md with `--write`."""

import json
import os
import sys
from importlib.util import find_spec

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch

from tests.setups import arguments, calls, page, states, weights, wrappers  # noqa: F401  each module registers its set-ups
from tests.setups.harness import SETUPS, outcome


def main(options: list[str]) -> None:
    """Run the named set-ups, or all without names."""
    torch.set_num_threads(1)
    names = [option for option in options if option != "--write"]
    missing = {package for entry in SETUPS for package in entry.needs if find_spec(package) is None}
    if missing and "--write" in options:
        sys.exit(f"the page needs every set-up, and {', '.join(sorted(missing))} is not installed: run `make setups`")
    ran = {}
    for entry in SETUPS:
        if not names or entry.name in names:
            ran[entry.name] = outcome(entry)
            print(f"{entry.name}: {ran[entry.name]}", file=sys.stderr)
    if "--write" in options:
        page.PAGE.write_text(page.text(ran))
    else:
        print(json.dumps({name: (each_outcome.kind, each_outcome.words) for name, each_outcome in ran.items()}))


main(sys.argv[1:])
