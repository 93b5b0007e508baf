"""Pages of the documentation as programs: their Python is run, and what they show must be what it prints.

A `text` block after a `python` block is what that block prints. A block under `<!-- from: FILE -->` is a piece of that
file, word for word. `python tests/docs/pages.py` runs everything and fills in what is printed.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
EXAMPLES = DOCS / "examples"
TUTORIAL = DOCS / "adding_an_architecture.md"

_BLOCK = re.compile(r"(?:<!-- from: (?P<file>\S+) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")

ERROR_FIGURE = 1e-5
"""Numbers below this measure rounding: they depend on the machine, and agree within a factor of ten."""

VERDICT = """
import os
import sys
sys.dont_write_bytecode = True
import torch
import mingru_adapter
from mingru import MinGRUForCausalLM
from unilinattn.testing import LawViolation, check_architecture, randomize
model = randomize(MinGRUForCausalLM(vocabulary=31, width=12, blocks=1)).eval()
ids = torch.randint(31, (2, 13), generator=torch.Generator().manual_seed(0))
stdout, sys.stdout = sys.stdout, open(os.devnull, "w")
try:
    check_architecture(model, ids)
    reason = "every law holds"
except LawViolation as violation:
    reason = str(violation).split("\\n")[0]
sys.stdout = stdout
print(reason)
"""
"""What the tutorial says was run on each wrong adapter."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its text, where the text lies in the page, the file it is cut from."""

    kind: str
    text: str
    span: tuple[int, int]
    file: str | None


def pages() -> list[Path]:
    """The README and every page of the documentation."""
    return [README, *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [
        Block(found["kind"], found["text"], found.span("text"), found["file"])
        for found in _BLOCK.finditer(page.read_text())
    ]


def shown(page: Path) -> Iterator[tuple[Block, Block]]:
    """Each `text` block that stands next to a `python` or `diff` block, with it."""
    for source, output in pairwise(blocks(page)):
        if source.kind in ("python", "diff") and output.kind == "text":
            yield source, output


def patched(source: str, diff: str) -> str:
    """Replace the lines that a diff takes away by those that it adds, each hunk found once."""
    for hunk in re.finditer(r"((?:^-.*\n)+)((?:^\+.*\n)+)", diff, re.M):
        old, new = (re.sub(r"^[-+]", "", part, flags=re.M) for part in hunk.groups())
        if source.count(old) != 1:
            raise ValueError(f"stands {source.count(old)} times in the file that the diff is of:\n{old}")
        source = source.replace(old, new)
    return source


def run(programs: Sequence[tuple[Path, Sequence[str]]]) -> list[list[str]]:
    """Run programs, each in a folder, and return what their blocks printed."""
    request = json.dumps([{"folder": str(folder), "blocks": list(parts)} for folder, parts in programs])
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    runner = [sys.executable, str(Path(__file__).with_name("runner.py"))]
    done = subprocess.run(runner, input=request, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def printed() -> list[tuple[Path, Block, Block, str]]:
    """Every shown output: its page, the block that prints it, the output as shown, and what is printed now."""
    own = {page: _programs(page) for page in pages()}
    pairs = [(page, *pair) for page in own for pair in shown(page)]
    diffs = [source for _, source, _ in pairs if source.kind == "diff"]
    with tempfile.TemporaryDirectory() as folder:
        wrong = laid_out([block.text for block in diffs], Path(folder))
        ran = run([*((EXAMPLES, [block.text for block in blocks]) for blocks in own.values()), *wrong])
    now = {
        (page, block.span): text
        for (page, blocks), texts in zip(own.items(), ran, strict=False)
        for block, text in zip(blocks, texts, strict=False)
    }
    now |= {(TUTORIAL, block.span): texts[0] for block, texts in zip(diffs, ran[len(own) :], strict=True)}
    return [(*pair, now.get((pair[0], pair[1].span), "nothing: an earlier block failed\n")) for pair in pairs]


def _programs(page: Path) -> list[Block]:
    """The Python of a page that is run: what is cut from a file is not."""
    return [block for block in blocks(page) if block.kind == "python" and block.file is None]


def laid_out(diffs: Sequence[str], folder: Path) -> list[tuple[Path, list[str]]]:
    """Lay out the tutorial's adapter, changed by each diff, in a folder each; return the programs that check it."""
    adapter = (EXAMPLES / "mingru_adapter.py").read_text()
    programs = []
    for number, diff in enumerate(diffs):
        place = folder / str(number)
        place.mkdir()
        (place / "mingru.py").write_text((EXAMPLES / "mingru.py").read_text())
        (place / "mingru_adapter.py").write_text(patched(adapter, diff))
        programs.append((place, [VERDICT]))
    return programs


def same(text: str, other: str) -> bool:
    """Whether two texts agree: words exactly, numbers to the last digit shown, tiny errors within a factor of ten."""
    if _NUMBER.split(text.strip()) != _NUMBER.split(other.strip()):
        return False
    pairs = zip(_NUMBER.findall(text), _NUMBER.findall(other), strict=True)
    return all(_close(Decimal(a), Decimal(b)) for a, b in pairs)


def _close(a: Decimal, b: Decimal) -> bool:
    small, large = sorted((abs(a), abs(b)))
    if small > 0 and large < ERROR_FIGURE:
        return large <= 10 * small
    exponent = a.as_tuple().exponent
    assert isinstance(exponent, int)
    return abs(a - b) <= (Decimal(1).scaleb(exponent) if exponent < 0 or "E" in str(a) else 0)


def main() -> None:
    """Fill every shown output of every page with what is printed now."""
    for page, _, output, now in reversed(printed()):
        if not same(output.text, now):
            text = page.read_text()
            page.write_text(text[: output.span[0]] + now + text[output.span[1] :])


if __name__ == "__main__":
    main()
