"""`python -m tools.surface [--check]`: write the files that repeat the registry for those who must not import torch.

`unilinattn/cli/registered.json` is what `unilinattn list` prints, and `unilinattn/methods/typed.pyi` the signatures of
`explain` and `estimate` for each method, which editors and type checkers read.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.coverage_pages import METHODS, package_architectures, package_methods
from tools.families import GROUPS
from unilinattn.cli import listing

ROOT = Path(__file__).resolve().parents[1]
REGISTERED = Path("unilinattn/cli") / listing.FILE


def registered() -> str:
    """Return the content of `registered.json`: the package's own entries, each method with its question and page."""
    questions = {name: group.question for group in GROUPS for name in group.methods}
    every = listing.from_registry()
    own = {
        "architectures": [entry for entry in every["architectures"] if entry["name"] in package_architectures()],
        "methods": [
            {**entry, "question": questions[entry["name"]], "page": f"{METHODS / entry['name']}.md"}
            for entry in every["methods"]
            if entry["name"] in package_methods()
        ],
    }
    return json.dumps(own, indent=1) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or with `--check` return 1 if one is stale."""
    parser = argparse.ArgumentParser(prog="python -m tools.surface", description="Write the files about the registry.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a file is stale")
    check = parser.parse_args(arguments).check
    texts = {REGISTERED: registered()}
    stale = [path for path, text in texts.items() if not (ROOT / path).is_file() or (ROOT / path).read_text() != text]
    for path in stale:
        print(f"{path} is stale: run `python -m tools.surface`." if check else f"{path} is written.")
        if not check:
            (ROOT / path).write_text(texts[path])
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
