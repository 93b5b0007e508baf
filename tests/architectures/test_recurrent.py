"""Hosts with special recurrences: outputs, resets, states, rescaled weights, hybrids."""

import pytest
import torch
from torch import Tensor, nn

from tests.architectures.recurrent_steps import frozen
from tests.hosts import named
from unilinattn import trace
from unilinattn.errors import UncoveredError
from unilinattn.mixers import DiagonalDecay
from unilinattn.testing import check_architecture, left_as_found, promoted, relative_error, tolerance
from unilinattn.testing.hosts import VOCABULARY, randomize, transformers_model
from unilinattn.tracing.layer import Layer

EXACT, LAW = tolerance("reconstruction", torch.float64), tolerance("law", torch.float64)


def settled(model: nn.Module, inputs: object) -> tuple[Layer, ...]:
    """Trace a promoted model and build its operators."""
    with promoted():
        layers = trace(model, inputs).layers
        for layer in layers:
            layer.operator  # noqa: B018  the property builds it
    return layers


def test_minimax_scales_its_outputs() -> None:
    host = named("minimax")
    layers = trace(host.model().double(), host.inputs()).layers
    assert [layer.multiplier for layer in layers] == pytest.approx([0.7, 1.0, 0.7], rel=1e-6)


@pytest.mark.long
def test_the_eps_of_the_normaliser_of_xlstm_is_that_of_the_host() -> None:
    # The norm of the heads cancels the scale of its input, except for a large eps.
    settings = dict(eps=0.4, norm_eps=0.5, hidden_size=16, num_hidden_layers=1, num_heads=2, chunk_size=8)
    sizes = dict(vocab_size=VOCABULARY, ffn_round_up_to_multiple_of=4, pad_token_id=None)
    build = transformers_model("xLSTMForCausalLM", "xLSTMConfig", **settings, **sizes)
    model, ids = randomize(build().eval()), torch.randint(VOCABULARY, (2, 11))
    check_architecture(model, ids)
    with promoted():
        (layer,) = trace(model.double(), ids).layers
        layer.operator  # noqa: B018  builds it while the host is promoted
    module = dict(model.named_modules())[layer.name]
    exact = frozen(module, layer, layer.input)
    assert relative_error(layer.operator.apply(layer.input), exact) <= tolerance("reconstruction", torch.float64)
    module.config.eps = 1e-6
    assert relative_error(frozen(module, layer, layer.input), exact) > 1e-3


def packed(lengths: tuple[int, ...], batch: int) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths]).expand(batch, -1)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["recurrent gemma", pytest.param("recurrent gemma, no convolution", marks=pytest.mark.slow)]
)
def test_packed_sequences_are_segments(name: str) -> None:
    host, lengths = named(name), (4, 1, 8)
    model, ids = host.model().double(), torch.arange(26).reshape(2, 13)
    positions = packed(lengths, 2)
    # With a cache, the default, the host attends across segments.
    check_architecture(host.model(), {"input_ids": ids, "position_ids": positions, "use_cache": False})
    layers = settled(model, {"input_ids": ids, "position_ids": positions, "use_cache": False})
    modules = dict(model.named_modules())
    apart = (positions == 0).cumsum(1)
    apart = apart[:, :, None] != apart[:, None, :]
    for number, layer in enumerate(layers):
        core = layer.operator.matrix("core", heads=None)
        assert core[apart[:, None].expand_as(core)].count_nonzero() == 0
        if layer.architecture == "griffin":
            paper = frozen(modules[layer.name], layer, layer.input, positions)
            assert relative_error(paper, layer.output) <= EXACT
        if name == "recurrent gemma, no convolution":
            for part, place in zip(ids.split(lengths, dim=1), torch.arange(13).split(lengths), strict=True):
                single = settled(model, part)[number].operator
                block = core[:, :, place[0] : place[-1] + 1, place[0] : place[-1] + 1]
                assert relative_error(block, single.matrix("core", heads=None)) <= LAW


@pytest.mark.long
def test_a_missing_reset_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    host = named("recurrent gemma")
    inputs = {"input_ids": torch.arange(26).reshape(2, 13), "position_ids": packed((6, 7), 2), "use_cache": False}
    constructor = DiagonalDecay.__init__
    monkeypatch.setattr(DiagonalDecay, "__init__", lambda *args, reset, **rest: constructor(*args, **rest))
    with pytest.raises(AssertionError, match="law 'reconstruction' does not hold"):
        check_architecture(host.model(), inputs)


def test_states_stored_in_a_host_are_neither_read_nor_changed() -> None:
    host = named("recurrent gemma")
    model, ids = host.model(), host.inputs()
    before = [layer.output for layer in trace(model, ids).layers]
    with torch.no_grad():
        model(ids.flip(1), use_cache=True)
    blocks = [m for m in model.modules() if hasattr(m, "conv1d_state")]
    states = [(block.conv1d_state, block.rg_lru.recurrent_states) for block in blocks]
    assert all(state.abs().sum() > 0 for pair in states for state in pair)
    after = [layer.output for layer in trace(model, ids).layers]
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    for block, (conv, memory) in zip(blocks, states, strict=True):
        assert block.conv1d_state is conv
        assert block.rg_lru.recurrent_states is memory


def versions(model: nn.Module) -> dict[str, int]:
    return {name: p._version for name, p in model.named_parameters()}


@pytest.mark.long
def test_rescaled_weights_are_restored() -> None:
    host = named("rwkv")
    model, ids = host.model(), host.inputs()
    before = versions(model)
    with left_as_found(model):
        first = trace(model, ids)
        first.gradient(-1)
    assert versions(model) == before
    assert model.rwkv.layers_are_rescaled is False
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    assert model.rwkv.layers_are_rescaled is True
    assert torch.equal(first.output.logits, expected)
    with left_as_found(model):
        second = trace(model, ids)
    for one, two in zip(first.layers, second.layers, strict=True):
        assert torch.equal(one.output, two.output)
        assert two.operator.reconstruction_error() <= 1e-6
    model.train()
    with left_as_found(model):
        trained = trace(model, ids)
    assert model.rwkv.layers_are_rescaled is True
    assert all(layer.operator.reconstruction_error() <= 1e-6 for layer in trained.layers)
    # The streams differ by two halvings, except for the eps of the norms that read them.
    for one, two in zip(trained.layers[4:], second.layers[4:], strict=True):
        assert relative_error(one.output, 4 * two.output) <= 1e-3


def test_rescaled_weights_are_restored_after_an_exception() -> None:
    model = named("rwkv").model()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.rwkv.ln_out.register_forward_hook(fail)
    with left_as_found(model), pytest.raises(KeyboardInterrupt):
        trace(model, named("rwkv").inputs())
    handle.remove()
    assert model.rwkv.layers_are_rescaled is False


def test_weights_before_their_rescaling_are_detected() -> None:
    host = named("rwkv")
    for layer in trace(host.model(), host.inputs()).layers[4:]:
        layer.seen = ()
        assert layer.operator.reconstruction_error() > 1


def test_decay_tables_of_a_cast_lightning_layer_are_those_of_float64() -> None:
    host = named("minimax")
    with promoted():
        built = dict(host.build().named_buffers())
    for name, table in host.model().double().named_buffers():
        if "decay" in name or "slope" in name:
            assert table.dtype == torch.float64
            assert torch.equal(table, built[name])


def test_decay_tables_in_float32_are_reproduced_exactly() -> None:
    host = named("minimax")
    model = host.model()
    for module in model.modules():
        module.__dict__.pop("_apply", None)
    errors = [layer.operator.reconstruction_error() for layer in settled(model.double(), host.inputs())]
    assert EXACT < max(errors) <= tolerance("unpromoted", torch.float64)


def unbuilt(model: nn.Module, inputs: object, message: str) -> None:
    with pytest.raises(UncoveredError, match=message):
        trace(model, inputs).layers[0].operator  # noqa: B018  the property builds it


@pytest.mark.parametrize(
    "name", ["rwkv", "recurrent gemma", "minimax", "lfm2", "qwen3 next", "jamba", "granite hybrid"]
)
def test_a_trace_runs_without_a_cache(name: str) -> None:
    cached = {"input_ids": torch.arange(12).reshape(2, 6), "use_cache": True}
    for layer in trace(named(name).model(), cached).layers:
        assert layer.reconstruction_error() <= tolerance("reconstruction", torch.float32)


def test_an_unsupported_activation_is_refused_by_name() -> None:
    ids = torch.arange(12).reshape(2, 6)
    model = named("minimax").model()
    for module in model.modules():
        if hasattr(module, "decay_factors"):
            module.act_fn = nn.Mish()
    unbuilt(model, ids, "activation 'mish'")


def test_a_width_that_the_host_truncates_is_refused() -> None:
    # The host stores its states in a width of 64.
    settings = dict(hidden_size=128, num_heads=2, num_hidden_layers=1, chunk_size=8, max_inference_chunksize=4)
    model = transformers_model("xLSTMForCausalLM", "xLSTMConfig", vocab_size=31, **settings)()
    unbuilt(model.eval(), torch.arange(12).reshape(2, 6), "max_inference_chunksize = 4")
