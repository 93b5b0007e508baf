"""Pages of the documentation as programs, whose output is compared with the output on the page.

A `text` block after a `python` block is the output of that block. A block under `<!-- from: FILE -->` is a verbatim
part of that file. `python tests/docs/pages.py` runs all programs and writes their outputs into the pages.
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
"""Numbers below this are rounding errors, which depend on the machine: they agree within a factor of ten."""

UNIT = Decimal(2) ** -23
"""Rounding of float32: a run may have less by chance. Errors below a hundredth of it are those of float64."""

ROUNDING = 1e-6
"""Numbers below this agree with a zero on the page: equal operations may be ordered differently on another machine."""

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
"""The program that checks each wrong adapter of the tutorial."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: language, text, position of the text in the page, and the file that it quotes."""

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
        Block(match["kind"], match["text"], match.span("text"), match["file"])
        for match in _BLOCK.finditer(page.read_text())
    ]


def shown(page: Path) -> Iterator[tuple[Block, Block]]:
    """Pairs of a `python` or `diff` block and the `text` block that follows it."""
    for source, output in pairwise(blocks(page)):
        if source.kind in ("python", "diff") and output.kind == "text":
            yield source, output


def patched(source: str, diff: str) -> str:
    """Apply a diff; the removed lines of each hunk must occur once."""
    for hunk in re.finditer(r"((?:^-.*\n)+)((?:^\+.*\n)+)", diff, re.M):
        old, new = (re.sub(r"^[-+]", "", part, flags=re.M) for part in hunk.groups())
        if source.count(old) != 1:
            raise ValueError(f"{source.count(old)} times in the file of the diff:\n{old}")
        source = source.replace(old, new)
    return source


def run(programs: Sequence[tuple[Path, Sequence[str]]]) -> list[list[str]]:
    """Run programs, each in a folder, and return the outputs of their blocks."""
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
    """Every shown output: its page, the block that prints it, the shown and the current output."""
    programs = {page: _programs(page) for page in pages()}
    pairs = [(page, *pair) for page in programs for pair in shown(page)]
    diffs = [source for _, source, _ in pairs if source.kind == "diff"]
    with tempfile.TemporaryDirectory() as folder:
        wrong = laid_out([block.text for block in diffs], Path(folder))
        ran = run([*((EXAMPLES, [block.text for block in blocks]) for blocks in programs.values()), *wrong])
    now = {
        (page, block.span): text
        for (page, blocks), texts in zip(programs.items(), ran, strict=False)
        for block, text in zip(blocks, texts, strict=False)
    }
    now |= {(TUTORIAL, block.span): texts[0] for block, texts in zip(diffs, ran[len(programs) :], strict=True)}
    return [(*pair, now.get((pair[0], pair[1].span), "nothing: an earlier block failed\n")) for pair in pairs]


def _programs(page: Path) -> list[Block]:
    """The Python blocks of a page that are run: those that do not quote a file."""
    return [block for block in blocks(page) if block.kind == "python" and block.file is None]


def laid_out(diffs: Sequence[str], folder: Path) -> list[tuple[Path, list[str]]]:
    """Write the tutorial's adapter with each diff applied into a folder; return the programs that check them."""
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
    """Whether a page has an output: words exactly, numbers to the last digit, rounding errors to a factor of ten."""
    # Columns are as wide as their widest number.
    text, other = (re.sub(" +", " ", one.strip()) for one in (text, other))
    if _NUMBER.split(text) != _NUMBER.split(other):
        return False
    pairs = zip(_NUMBER.findall(text), _NUMBER.findall(other), strict=True)
    return all(_close(Decimal(a), Decimal(b)) for a, b in pairs)


def _close(a: Decimal, b: Decimal) -> bool:
    small, large = sorted((abs(a), abs(b)))
    if a == 0 and large < ROUNDING:
        return True
    if small > 0 and large < ERROR_FIGURE:
        return large <= 10 * (max(small, UNIT) if small > UNIT / 100 else small)
    exponent = a.as_tuple().exponent
    assert isinstance(exponent, int)
    return abs(a - b) <= (Decimal(1).scaleb(exponent) if exponent < 0 or "E" in str(a) else 0)


def main() -> None:
    """Write the current outputs into every page."""
    for page, _, output, now in reversed(printed()):
        if not same(output.text, now):
            text = page.read_text()
            page.write_text(text[: output.span[0]] + now + text[output.span[1] :])


if __name__ == "__main__":
    main()
