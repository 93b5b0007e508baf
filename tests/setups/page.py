"""The page of set-ups and their outcomes."""

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

Each row was run on real classes of transformers with small random weights: Mamba, Mamba-2, Llama and Jamba where the
set-up exists for them. *works* tells the worst reconstruction error of a layer; the output of the trace was compared
with the model as its user calls it, and the maps with those of the model without the set-up, where it has one.
*refused* gives the error and the first sentence of its message. A set-up that is neither is a bug.

The trace runs a model module by module, without compiled code, gradient checkpoints and caches; these change no number.
`torch.compile`, `DataParallel` and `DistributedDataParallel` are taken off, so layers have their names in the model
inside.

"""


def text(ran: Mapping[str, Outcome]) -> str:
    """Return the page."""
    versions = ", ".join(f"{package} {found}" for package in PACKAGES if (found := _version(package)))
    parts = [HEAD, f"Run with {versions}. This page is written by `python -m tests.setups --write`.\n"]
    for group, title in GROUPS.items():
        parts.append(f"\n## {title}\n\n| set-up | what is done | outcome |\n| --- | --- | --- |\n")
        parts += [
            f"| {_cell(entry.name)} | {_cell(entry.done)} | {_cell(str(ran[entry.name]))} |\n"
            for entry in SETUPS
            if entry.group == group
        ]
    return "".join(parts)


def outcomes(page: str) -> dict[str, str]:
    """Return the outcomes that a page shows, by set-up."""
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
