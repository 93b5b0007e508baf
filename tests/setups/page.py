"""The page of the set-ups and their outcomes."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.setups.harness import SETUPS, Outcome

PAGE = Path(__file__).parents[2] / "docs" / "hosts.md"
PACKAGES = ("torch", "transformers", "accelerate", "peft", "torchao", "bitsandbytes")

GROUPS = {
    "wrappers": "Wrappers, compiled models, and models in parts",
    "weights": "Weights that were replaced, merged or quantised",
    "states": "States of the model and of torch",
    "arguments": "Arguments of the model",
    "calls": "Arguments of the library",
}

HEAD = """\
# Set-ups

Each row was measured on real transformers classes with small random weights: Mamba, Mamba-2, Llama and Jamba if the
set-up applies to them.

- *works*: the worst reconstruction error of a layer. The output of the trace was also compared with a call of the
  model, and the attention maps and the scores of the default method with those of the same model without the set-up,
  if there is one.
- *refused*: the error and the first sentence of its message.

Any other outcome is a bug.

A trace runs a model module by module, without compiled code, gradient checkpointing and caches, none of which changes
the values. `torch.compile`, `DataParallel` and `DistributedDataParallel` are unwrapped, so layers have the names of the
inner model. So are the wrappers of nnsight and TransformerLens ([other tools](other_tools.md)).

"""


def text(ran: Mapping[str, Outcome]) -> str:
    """Return the text of the page."""
    versions = ", ".join(f"{package} {number}" for package in PACKAGES if (number := _version(package)))
    parts = [HEAD, f"Measured with {versions}. `python -m tests.setups --write` writes this page.\n"]
    for group, title in GROUPS.items():
        parts.append(f"\n## {title}\n\n| set-up | procedure | outcome |\n| --- | --- | --- |\n")
        parts += [
            f"| {_cell(entry.name)} | {_cell(entry.done)} | {_cell(str(ran[entry.name]))} |\n"
            for entry in SETUPS
            if entry.group == group
        ]
    return "".join(parts)


def outcomes(page: str) -> dict[str, str]:
    """Return the outcomes on a page, by set-up."""
    rows = (line.strip("| \n").split(" | ") for line in page.splitlines() if line.startswith("| "))
    return {
        _plain(cells[0]): _plain(cells[2]) for cells in rows if len(cells) == 3 and cells[0] not in ("set-up", "---")
    }


def _cell(words: str) -> str:
    return words.replace("|", "\\|")


def _plain(cell: str) -> str:
    return cell.replace("\\|", "|")


def _version(package: str) -> str | None:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None
