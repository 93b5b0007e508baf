"""`Study`: data with known answers, models trained on them, measurements, and the claims that these test."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from evidence.claims import Claim, Results
from evidence.training import Recipe, loaded, record, trained
from unilinattn.evaluation import Table
from unilinattn.kernels.backend import Backend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
"""Folder of the studies, with the shipped `weights` and the recorded `results`."""

SEEDS = (0, 1, 2)
"""Seeds of the models, each an initialisation, an order of the training batches, and samples to score and select."""

BATCH = 18
"""Most samples that one run of a model explains: a quarter of 72, and all of 72 that have one of four lengths, so that
each of two processes gets half of the batches of a seed."""


@dataclass(frozen=True)
class Model:
    """An architecture of a study: how to build it untrained, and how to train it."""

    build: Callable[[], nn.Module]
    recipe: Recipe


@dataclass(frozen=True)
class View:
    """A table on the page: a row for each method, a column for each (model, metric, heading).

    Attributes:
        table: the table of `Study.measure` with the numbers.
        title: text above it.
        columns: model, metric and heading of each column.
        paper: further columns, printed as in a paper: numbers by heading and method.
        note: text below it.
    """

    table: str
    title: str
    columns: Sequence[tuple[str, str, str]]
    paper: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Size:
    """Numbers of samples: those that are scored, and those on which layers are chosen."""

    scored: int
    selection: int


class Study(ABC):
    """A question, with models trained to have a known answer."""

    name: ClassVar[str]
    title: ClassVar[str]
    question: ClassVar[str]
    """The question that the study answers, one sentence."""
    source: ClassVar[str]
    """The paper and its tables."""
    text: ClassVar[str]
    """The models, the data and the known answers: a paragraph of the page, in Markdown."""
    caption: ClassVar[str]
    """The text of the picture."""
    unit: ClassVar[str] = "sequences"
    """A sample, in the plural."""
    models: ClassVar[Mapping[str, Model]] = {}
    size: ClassVar[Size] = Size(64, 32)
    quick: ClassVar[Size] = Size(4, 4)
    """Numbers of samples of a quick run."""
    views: ClassVar[Sequence[View]] = ()
    kernels: ClassVar[Backend | None] = "numba"
    """The form of the kernels: thousands of small explanations are worth the second in which Numba loads."""

    def loss(self, host: nn.Module, model: str, seed: int, batch: int) -> Tensor:
        """Return the loss of a model, by its name, on the training batch of a seed."""
        raise NotImplementedError

    def accuracy(self, host: nn.Module, model: str) -> float:
        """Return the share of right answers on held-out samples, from 0 to 1."""
        raise NotImplementedError

    def is_trained(self, model: str, path: Path) -> bool:
        """Return whether `path` has weights of the model that were trained by its present recipe."""
        return path.is_file() and record(path)["recipe"] == asdict(self.models[model].recipe)

    def train(self, model: str, seed: int, path: Path) -> None:
        """Train a model and store its weights at `path`."""
        spec = self.models[model]
        trained(
            spec.build,
            spec.recipe,
            seed,
            lambda host, at: self.loss(host, model, at, spec.recipe.batch),
            lambda host: self.accuracy(host, model),
            path,
        )

    @abstractmethod
    def measure(
        self, hosts: Mapping[str, Callable[[], nn.Module]], seed: int, size: Size, out: Path
    ) -> dict[str, Table]:
        """Return tables of numbers by name, of the models of one seed.

        `hosts`: functions that load the trained models. `out`: folder for the numbers that `ula.evaluate` stores.
        """

    @abstractmethod
    def claims(self, results: Results) -> list[Claim]:
        """Return the claims, each with a verdict derived from the numbers."""

    @abstractmethod
    def picture(self, hosts: Mapping[str, Callable[[], nn.Module]], results: Results) -> "Figure":
        """Draw the picture of the study; `hosts` load the models of the first seed."""

    def remark(self, record: Mapping[str, Any]) -> str:
        """Return sentences that follow from the recorded numbers, for the page."""
        return ""

    def path(self, weights: Path, model: str, seed: int) -> Path:
        """Return the file of a model's weights in the folder `weights`."""
        return weights / f"{self.name}-{model}-{seed}.safetensors"

    def hosts(self, weights: Path, seed: int) -> dict[str, Callable[[], nn.Module]]:
        """Return a function for each model that loads its weights of a seed."""

        def load(model: str) -> Callable[[], nn.Module]:
            return lambda: loaded(self.models[model].build, self.path(weights, model, seed))

        return {model: load(model) for model in self.models}
