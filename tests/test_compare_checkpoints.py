"""`unilinattn compare PATH ...`: local checkpoints side by side on texts."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.host.test_image import picture, processor, vit
from tests.test_cli import TEXT, WORDS, fails, save_tokenizer
from tests.test_cli import checkpoints as checkpoints  # a fixture
from unilinattn import cli
from unilinattn.analysis import report
from unilinattn.errors import InputError
from unilinattn.evaluation import read_texts


@pytest.mark.long
def test_checkpoints_are_compared_in_tables_a_page_and_a_file(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, texts = tmp_path / "report", tmp_path / "texts.jsonl"
    texts.write_text('\n{"text": "the cat sat"}\n')
    paths = [str(checkpoints / name) for name in ("mamba", "llama")]
    chosen = ["--methods", "raw,logit", "--dtype", "float32", "--out", str(out)]
    assert cli.main(["compare", *paths, "--text", TEXT, "--texts", str(texts), *chosen]) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and f"Report: {out / 'index.html'}, compare.json" in printed.out
    numbers = json.loads((out / "compare.json").read_text())
    (stored,) = numbers["comparisons"]
    assert stored["texts"] == [TEXT, "the cat sat"]
    assert list(stored["models"]) == ["mamba", "llama"]
    assert stored["models"]["llama"]["tokens"] == [6, 3]
    assert all(model["worst_error"] < 1e-5 for model in stored["models"].values())
    (area,) = (row["value"] for row in stored["table"] if (row["model"], row["method"]) == ("mamba", "raw"))
    assert any(line.split() == ["mamba", "raw", "all", f"{area:.4g}"] for line in printed.out.splitlines())
    page = (out / "index.html").read_text()
    assert (
        "backbone.layers.0.mixer" in page and f"{area:.3f}" in page and "http" not in page.replace("http://www.w3", "")
    )
    assert sorted(path.name for path in out.iterdir()) == ["compare.json", "index.html"]
    # A report replaces an earlier one.
    assert cli.main(["compare", paths[1], "--text", "the cat", *chosen]) == 0
    assert list(json.loads((out / "compare.json").read_text())["comparisons"][0]["models"]) == ["llama"]


def test_bad_arguments_are_refused_and_nothing_is_written(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, mamba = tmp_path / "texts.jsonl", checkpoints / "mamba"
    out = ("--out", tmp_path / "report")

    def refused(*arguments: object) -> str:
        return fails(capsys, "compare", *arguments, *out)

    assert "give --text TEXT, --texts FILE or --images FOLDER" in refused(mamba)
    assert "--task and --models cannot be given" in refused(mamba, "--text", TEXT, "--task", "all", "--models", "s4d")
    assert "--text cannot be given without PATH" in refused("--text", TEXT)
    assert "did you mean 'rollout'" in refused(mamba, "--text", TEXT, "--methods", "rolout")
    assert "names a folder twice" in refused(mamba, checkpoints / "llama" / ".." / "mamba", "--text", TEXT)
    assert "is not a folder" in refused(tmp_path / "nowhere", "--text", TEXT)
    assert "no tokenizer" in refused(checkpoints / "silent", "--text", TEXT)
    assert "text 1 is empty" in refused(mamba, "--text", TEXT, "--text", " ")
    assert "model mamba, sample text 0: it has 1 token" in refused(mamba, "--text", "cat")
    assert "cannot be read" in refused(mamba, "--texts", texts)
    texts.write_text('{"text": "the cat"}\n{"text": 3}\n')
    assert f"{texts}, line 2 is no JSON object with a text" in refused(mamba, "--texts", texts)
    texts.write_text('{"text": "the cat"}\n\n{"text": \n')
    assert f"{texts}, line 3 is no JSON: " in refused(mamba, "--texts", texts)
    texts.write_text("\n")
    assert "has no texts; give a JSON object" in refused(mamba, "--texts", texts)
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]


def test_an_interrupted_comparison_leaves_the_earlier_report(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["compare", str(checkpoints / "llama"), "--text", TEXT, "--methods", "raw", "--out", str(out)]
    assert cli.main(arguments) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def interrupted(found: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "numbers", interrupted)
    assert cli.main(arguments) == 130
    assert capsys.readouterr().err == "unilinattn compare: interrupted\n"
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_folders_of_one_name_keep_their_paths(checkpoints: Path, tmp_path: Path) -> None:
    from unilinattn.cli.compare import _names

    paths = [Path("a/model"), Path("b/model"), Path("b/other")]
    assert _names(paths) == {"a/model": paths[0], "b/model": paths[1], "other": paths[2]}


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (checkpoints / "llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_tokenizer(tmp_path, [*WORDS, "dog"])
    message = fails(capsys, "compare", tmp_path, "--text", "the dog sat", "--out", tmp_path / "out")
    assert "sample text 0: " in message and "8" in message


def test_a_text_is_read_from_each_line(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("one line\u2028of two\n\n  \n {not json}\n", encoding="utf-8")
    assert read_texts(path) == ["one line\u2028of two", " {not json}"]
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read as UTF-8"):
        read_texts(path)
    path.write_text("")
    with pytest.raises(InputError, match="has no texts; give a text on each line"):
        read_texts(path)


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two image classifiers with their processors, one without, and a folder of two images."""
    folder = tmp_path_factory.mktemp("classifiers")
    for name, patch_size in (("vit", 4), ("fine", 2), ("silent", 4)):
        vit(patch_size=patch_size).save_pretrained(folder / name)
        if name != "silent":
            processor().save_pretrained(folder / name)
    (folder / "pictures").mkdir()
    for name in ("b.png", "a.png"):
        Image.fromarray(picture()).save(folder / "pictures" / name)
    return folder


def test_image_classifiers_are_compared_on_a_folder(
    classifiers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(classifiers / name) for name in ("vit", "fine")]
    arguments = ["--images", str(classifiers / "pictures"), "--methods", "raw", "--out", str(tmp_path / "out")]
    assert cli.main(["compare", *paths, *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and "2 x 2 patches, 1 class token" in printed.out
    numbers = json.loads((tmp_path / "out" / "compare.json").read_text())
    (stored,) = numbers["comparisons"]
    assert stored["images"] == ["a.png", "b.png"] and list(stored["models"]) == ["vit", "fine"]
    assert stored["models"]["fine"]["patches"] == "4 x 4 patches, 1 class token"
    assert "a.png" in (tmp_path / "out" / "index.html").read_text()


def test_bad_folders_of_images_are_refused_and_nothing_is_written(
    classifiers: Path, checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures, empty = classifiers / "pictures", tmp_path / "empty"
    empty.mkdir()

    def refused(model: Path, folder: Path, *arguments: object) -> str:
        return fails(capsys, "compare", model, "--images", folder, *arguments, "--out", tmp_path / "out")

    assert "--text cannot be given with --images" in refused(classifiers / "vit", pictures, "--text", TEXT)
    assert "holds no images" in refused(classifiers / "vit", empty)
    assert "is no folder" in refused(classifiers / "vit", tmp_path / "nowhere")
    assert "has no image processor" in refused(classifiers / "silent", pictures)
    assert "cannot be loaded as an image classifier" in refused(checkpoints / "mamba", pictures)
    (empty / "a.png").write_bytes(b"no image")
    assert "a.png cannot be read as an image" in refused(classifiers / "vit", empty)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
