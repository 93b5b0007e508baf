"""The documentation: outputs of its programs, quoted files, links, and completeness."""

import importlib
import json
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import unilinattn
from tests.docs import pages
from tools import notebooks, pictures
from unilinattn import errors, list_methods

every_page = pytest.mark.parametrize("page", pages.pages(), ids=lambda page: str(page.relative_to(pages.ROOT)))


@pytest.mark.slow
def test_every_page_shows_the_output_of_its_programs() -> None:
    outputs = pages.printed()
    wrong = [
        f"{page.name}:\n{source.text}\nprints\n{now}\nand the page shows\n{output.text}"
        for page, source, output, now in outputs
        if not pages.same(output.text, now)
    ]
    assert not wrong, "\n".join(wrong)
    assert {page for page, *_ in outputs} >= {
        pages.README,
        pages.TUTORIAL,
        pages.DOCS / "index.md",
        pages.DOCS / "errors.md",
        pages.DOCS / "your_checkpoint.md",
    }


@every_page
def test_quotations_are_verbatim_and_links_resolve(page: Path) -> None:
    for block in pages.blocks(page):
        if block.file is not None:
            assert block.text in (pages.DOCS / block.file).read_text(), block.file
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_the_tutorial_shows_its_programs_and_its_wrong_adapters() -> None:
    shown = list(pages.shown(pages.TUTORIAL))
    assert sum(source.kind == "python" for source, _ in shown) >= 5
    assert sum(source.kind == "diff" for source, _ in shown) == 6
    assert all("does not hold" in output.text for source, output in shown if source.kind == "diff")
    assert len((pages.EXAMPLES / "mingru_adapter.py").read_text().splitlines()) < 60


def test_every_method_and_every_error_is_documented() -> None:
    assert {path.stem for path in (pages.DOCS / "methods").glob("*.md")} == {"index", *list_methods()}
    for name in list_methods():
        assert f"({name}.png)" in (pages.DOCS / "methods" / f"{name}.md").read_text()
    listed = set(re.findall(r"^\| `(\w+)` ", (pages.DOCS / "errors.md").read_text(), re.M))
    classes = [
        value for value in vars(errors).values() if isinstance(value, type) and value.__module__ == errors.__name__
    ]
    assert listed == {error.__name__ for error in classes} - {"UnilinattnError"}


def test_the_navigation_lists_every_page() -> None:
    written = {str(path.relative_to(pages.DOCS)) for path in pages.DOCS.rglob("*.md")}
    navigation = (pages.ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert set(re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", navigation, re.M)) == written


def exported(module: ModuleType) -> list[str]:
    return list(getattr(module, "__all__", vars(module)))


def test_the_api_reference_covers_the_public_surface() -> None:
    texts = [page.read_text() for page in (pages.DOCS / "api").glob("*.md")]
    names = [name for text in texts for name in re.findall(r"^::: (\S+)$", text, re.M)]
    objects = [pkgutil.resolve_name(name) for name in names]
    members = [
        getattr(module, name) for module in objects if isinstance(module, ModuleType) for name in exported(module)
    ]
    described = {id(each) for each in (*objects, *members)}
    assert [name for name in unilinattn.__all__ if id(getattr(unilinattn, name)) not in described] == []
    assert sorted(names) == sorted(set(names))


def test_the_readme_is_short_and_opens_with_a_program() -> None:
    lines = pages.README.read_text().splitlines()
    assert len(lines) < 120
    program, own = [block for block in pages.blocks(pages.README) if block.kind == "python"]
    assert len(program.text.splitlines()) <= 10
    assert lines.index("```python") < 12
    # With `pip install`, the first picture of one's own checkpoint takes five lines.
    assert len(own.text.split("\n\n")) == 2 and len(own.text.replace("\n\n", "\n").splitlines()) == 4


@pytest.mark.long
def test_the_readme_draws_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(pages.EXAMPLES)
    train = importlib.import_module("train_checkpoint")
    train.train(train.mamba2, "checkpoint", steps=1)
    _, own = [block for block in pages.blocks(pages.README) if block.kind == "python"]
    exec(compile(own.text, "README.md", "exec"), {})
    assert "<title>lrp of Mamba2ForCausalLM</title>" in (tmp_path / "scores.html").read_text()


@pytest.mark.slow
def test_the_programs_of_the_gallery_draw_its_pictures(tmp_path: Path) -> None:
    drawn = [(path, blocks) for path, blocks in pictures.programs() if path.parent.name == "gallery"]
    assert len(drawn) == 10
    assert {path for path, _ in drawn} == set((pages.DOCS / "gallery").glob("*.png"))
    for path, blocks in drawn:
        (program,) = blocks
        assert len(program.splitlines()) <= 12
        figure = pictures.figure_of([program], path.stem)
        figure.savefig(tmp_path / path.name)
        assert figure.axes and (tmp_path / path.name).stat().st_size > 5000


@pytest.mark.parametrize("name", notebooks.PAGES)
def test_a_notebook_has_the_programs_of_its_page_with_their_outputs(name: str) -> None:
    page = pages.DOCS / name
    stored = json.loads((notebooks.FOLDER / page.with_suffix(".ipynb").name).read_text())["cells"]
    plain = [{**cell, "execution_count": None, "outputs": []} if "outputs" in cell else cell for cell in stored]
    assert plain == notebooks.cells(page)
    code = [cell for cell in stored if "outputs" in cell]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    printed = {
        "".join(cell["source"]): "".join(output["text"])
        for cell in code
        for output in cell["outputs"]
        if output["output_type"] == "stream"
    }
    shown = {source.text.strip("\n"): output.text for source, output in pages.shown(page) if source.kind == "python"}
    assert printed.keys() == shown.keys()
    assert all(pages.same(shown[source], printed[source]) for source in shown)


@pytest.mark.parametrize(
    ("text", "other", "agree"),
    [
        ("error 1.4e-07 at token 3", "error 9.1e-08 at token 3", True),
        ("error 1.4e-07", "error 1.6e-06", False),
        ("error 1.4e-07", "error 0.0e+00", False),
        ("gap 1.6e-08", "gap 2.8e-07", True),
        ("gap 1.6e-08", "gap 2.8e-06", False),
        ("gap 1.6e-16", "gap 2.8e-14", False),
        ("error       0", "error 8.2e-08", True),
        ("error 0", "error 2e-06", False),
        ("error 2.6e+00", "error 2.7e+00", True),
        ("error 2.6e+00", "error 2.8e+00", False),
        ("weights 0.123, 0.5", "weights 0.124, 0.5", True),
        ("weights 0.123", "weights 0.125", False),
        ("token 3", "token 4", False),
        ("token 3", "Token 3", False),
        ("token 3 ", "token 3\n", True),
        ("one 1 2", "one 1", False),
    ],
)
def test_outputs_agree_up_to_rounding(text: str, other: str, agree: bool) -> None:
    assert pages.same(text, other) is agree


def test_a_diff_must_apply_once() -> None:
    assert pages.patched("a\nb\nc\n", "-b\n+d\n+e\n") == "a\nd\ne\nc\n"
    for source in ("a\nc\n", "b\nb\n"):
        with pytest.raises(ValueError, match="times in the file"):
            pages.patched(source, "-b\n+d\n")


@pytest.mark.slow
def test_the_correct_adapter_passes_and_a_failing_block_shows_its_error(tmp_path: Path) -> None:
    failing = (pages.EXAMPLES, ["print(1)", "print(2)\n1 / 0", "print(3)"])
    unchanged, failed = pages.run([*pages.laid_out([""], tmp_path), failing])
    assert unchanged == ["every law holds\n"]
    assert failed[0] == "1\n"
    assert failed[1].startswith("2\nTraceback")
    assert "ZeroDivisionError" in failed[1]
    assert len(failed) == 2
