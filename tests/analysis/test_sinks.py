"""Stream norms and column masses against loops over rows; the sinks that each of them names."""

import math

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from tests.analysis.plain import image
from tests.hosts import named
from tests.methods.hosts import BATCH, LENGTH, real_tokens, traced
from tests.methods.sinks import SINK, llama
from unilinattn import analysis, trace
from unilinattn.errors import InputError, OptionError, UncoveredError
from unilinattn.examples import MODELS, TASKS, load
from unilinattn.memory import max_memory
from unilinattn.testing.promote import promoted

IDS = torch.tensor([[SINK, 5, 3, 9, 7, 4]])
WORDS = ["<s>", "a", "b", "c", "d", "e"]


def drawing(strength: float = 20.0) -> GPT2LMHeadModel:
    """A GPT-2 whose queries all match the key of `SINK`, and whose stream has no outlier."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=16, n_positions=16, n_embd=16, n_layer=2, n_head=2, eos_token_id=None)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        model.transformer.wpe.weight.zero_()
        model.transformer.wte.weight[:, 0] = 0
        model.transformer.wte.weight[SINK] = 0
        model.transformer.wte.weight[SINK, 0] = 0.05
        for block in model.transformer.h:
            block.attn.c_attn.weight[:, :32] = 0
            # The first channel of both heads' keys is that of the token, and that of their queries a constant.
            block.attn.c_attn.weight[0, 16] = block.attn.c_attn.weight[0, 24] = 1
            block.attn.c_attn.bias[0] = block.attn.c_attn.bias[8] = strength
            block.attn.c_proj.weight.zero_()
            block.mlp.c_proj.weight.zero_()
    return model


def plain_masses(maps: Tensor, real: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The column mass of each key by loops, (batch, head, token), and that of even attention."""
    batch, heads, length, _ = maps.shape
    mass = torch.full((batch, heads, length), math.nan, dtype=torch.float64)
    even = torch.full((batch, length), math.nan, dtype=torch.float64)
    for b in range(batch):
        keys = {i: [j for j in range(length) if real[b, j] and (j <= i or not causal)] for i in range(length)}
        for j in range(length):
            queries = [i for i in range(length) if real[b, i] and i != j and j in keys[i]]
            if not queries:
                continue
            even[b, j] = sum(1 / len(keys[i]) for i in queries) / len(queries)
            for h in range(heads):
                row = maps[b, h].double().abs()
                shares = [float(row[i, j] / row[i, keys[i]].sum()) for i in queries]
                mass[b, h, j] = sum(shares) / len(shares)
    return mass, even


def same(measured: Tensor, expected: Tensor) -> bool:
    return bool((measured.isnan() == expected.isnan()).all()) and bool(
        ((measured - expected).nan_to_num().abs() < 1e-10).all()
    )


@pytest.mark.parametrize("name", ["mamba", "llama"])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_masses_and_norms_by_loops(name: str, padding: str) -> None:
    run, real = traced(name, padding), real_tokens(padding)
    measured = analysis.sinks(run)
    for index, layer in enumerate(run.layers):
        mass, even = plain_masses(layer.operator.matrix(heads=None), real, causal=True)
        assert same(measured.masses[index], mass) and same(measured.even, even)
        norms = layer.stream_norms.double()
        for b in range(BATCH):
            median = sorted(norms[b, real[b]].tolist())[(int(real[b].sum()) - 1) // 2]
            ratios = torch.where(real[b], norms[b] / median, math.nan)
            assert same(measured.norms[index, b], ratios)
    assert measured.even.shape == (BATCH, LENGTH)


def test_a_bidirectional_map_has_readers_on_both_sides() -> None:
    vim = named("vim")
    with promoted():
        run = trace(vim.model().double(), vim.inputs().double())
        for scope, heads in (("core", None), ("unified", "mean")):
            measured = analysis.sinks(run, scope=scope, heads=heads)
            for mass, layer in zip(measured.masses, run.layers, strict=True):
                maps = layer.operator.matrix(scope, heads)
                maps = maps if maps.ndim == 4 else maps[:, None]
                real = torch.ones(maps.shape[0], maps.shape[-1], dtype=torch.bool)
                assert same(mass, plain_masses(maps, real, causal=False)[0])
            assert bool((measured.readers == maps.shape[-1] - 1).all())


def test_blocks_of_rows_give_the_same() -> None:
    run = traced("mamba")
    whole = analysis.sinks(run)
    with max_memory(30_000):
        assert len(list(run.layers[0].operator.row_blocks(heads=None, extra_elements=8 * 12))) > 1
        blocks = analysis.sinks(run)
    assert all(same(a, b) for a, b in zip(whole.masses, blocks.masses, strict=True))


def test_a_norm_outlier_that_nothing_reads_is_a_sink_by_norm_only() -> None:
    measured = analysis.sinks(llama(), IDS, tokens=WORDS)
    assert (measured.by_norm, measured.by_mass) == (((0,),), ((),))
    assert "attention sinks: 0 '<s>'\n" in repr(measured)
    (row,) = [line for line in repr(measured).splitlines() if line.startswith("  0 '<s>'")]
    assert row.endswith("  norm")


@pytest.mark.parametrize(("ids", "sinks"), [([SINK, 5, 3, 9, 7, 4], (0,)), ([5, 3, SINK, 9, 7, 4], (2,))])
def test_a_key_that_every_head_reads_is_a_sink_by_mass_only(ids: list[int], sinks: tuple[int, ...]) -> None:
    measured = analysis.sinks(drawing(), torch.tensor([ids]))
    assert (measured.by_norm, measured.by_mass) == (((),), (sinks,))
    (row,) = [line for line in repr(measured).splitlines() if line.startswith(f"  {sinks[0]} ")]
    assert row.endswith("  mass") and "100%" in row
    assert analysis.sinks(drawing(0.0), torch.tensor([ids])).by_mass == ((),)


def test_the_last_tokens_have_too_few_readers() -> None:
    ids = torch.tensor([[5, 3, 9, 7, SINK, 4]])
    measured = analysis.sinks(drawing(), ids)
    assert float(measured.sinking[0, 4]) == 1 and measured.by_mass == ((),)


@pytest.mark.parametrize("length", [2, 3, 6])
def test_even_attention_has_no_sinks(length: int) -> None:
    measured = analysis.sinks(drawing(0.0), IDS[:, :length])
    assert measured.by_mass == ((),)
    assert float((measured.masses[0] - measured.even[:, None]).nan_to_num().abs().max()) < 1e-6


@pytest.mark.long
def test_a_single_token_has_no_sinks_and_a_picture(tmp_path) -> None:
    measured = analysis.sinks(llama(), IDS[:, :1])
    assert (measured.by_norm, measured.by_mass) == (((),), ((),))
    assert bool(measured.masses[0].isnan().all())
    assert "one token, which nothing is compared with and no other token reads" in repr(measured)
    measured.plot(tmp_path / "one.png")
    assert image(tmp_path / "one.png")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("task", TASKS)
def test_trained_examples_have_no_sinks(task: str, model: str) -> None:
    measured = analysis.sinks(load(task, model), TASKS[task].sample(4, 0).input_ids)
    assert (measured.by_norm, measured.by_mass) == (((),) * 4, ((),) * 4)


def test_a_model_without_streams_has_masses() -> None:
    host = named("bert")
    measured = analysis.sinks(host.model(), host.inputs())
    assert measured.by_norm is None and bool(measured.norms.isnan().all())
    assert not measured.masses[0].isnan().any() and "no attention sinks" in repr(measured)
    assert len(measured.plot().axes) == 4


@pytest.mark.long
def test_the_picture(tmp_path) -> None:
    measured = analysis.sinks(llama(), torch.cat([IDS, IDS.flip(1)]), tokens=[WORDS, WORDS[::-1]])
    figure = measured.plot(tmp_path / "sinks.png", batch=1)
    assert image(tmp_path / "sinks.png")
    titles = ["stream norm / median, log10", "column mass, mean over heads", "column mass, largest of the heads"]
    panels = [axes for axes in figure.axes if axes.get_title(loc="left")]
    assert [axes.get_title(loc="left") for axes in panels] == titles
    assert [text.get_text() for text in panels[0].get_yticklabels()] == WORDS[::-1]
    drawn = torch.tensor(panels[0].images[0].get_array().filled(math.nan))
    assert same(drawn, measured.norms[:, 1].log10().T)
    with pytest.raises(InputError, match="batch=2; there are 2 sequences"):
        measured.plot(batch=2)


def test_refusals() -> None:
    with pytest.raises(OptionError, match="unknown scope"):
        analysis.sinks(llama(), IDS, scope="cor")
    with pytest.raises(InputError, match="tokens must be 1 lists of 6 texts"):
        analysis.sinks(llama(), IDS, tokens=WORDS[:2])
    with pytest.raises(InputError, match="needs inputs"):
        analysis.sinks(llama())
    with pytest.raises(UncoveredError, match="no layer with an operator"):
        analysis.sinks(trace(Opaque(), torch.randn(1, 4, 8), strict=False))


class Opaque(nn.Module):
    """A model whose only mixer has functions that cannot be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(x)[0]
