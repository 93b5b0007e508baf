"""Arguments of a model: caches, embeddings, masks, non-finite numbers."""

import torch
from torch import Tensor

from tests.setups.harness import HOSTS, each, outputs, require_same, setup, works
from unilinattn import explain, trace
from unilinattn.errors import FactorError, InputError
from unilinattn.testing.hosts import Host

TRANSFORMERS = ("Mamba", "Mamba-2", "Llama")


@setup(
    "past_key_values with tokens",
    "the cache of the first 5 tokens, and the ids of the remaining ones",
    refused=InputError,
)
def cache_with_tokens() -> float:
    host = HOSTS["Llama"]
    ids, model = host.inputs(), host.model()
    with torch.no_grad():
        cache = model(ids[:, :5], use_cache=True).past_key_values
    trace(model, {"input_ids": ids[:, 5:], "past_key_values": cache})
    return 0.0


@setup(
    "cache_params with tokens",
    "Mamba's cache of the first 5 tokens, and the ids of the remaining ones",
    refused=InputError,
)
def state_with_tokens() -> float:
    host = HOSTS["Mamba"]
    ids, model = host.inputs(), host.model()
    with torch.no_grad():
        cache = model(ids[:, :5], use_cache=True).cache_params
    trace(model, {"input_ids": ids[:, 5:], "cache_params": cache})
    return 0.0


@setup("an empty cache", "`past_key_values=DynamicCache()`: dropped, and not filled")
def empty_cache() -> float:
    from transformers import DynamicCache

    host = HOSTS["Llama"]
    ids, model, cache = host.inputs(), host.model(), DynamicCache()
    error = works(model, {"input_ids": ids, "past_key_values": cache}, lambda: model(ids), like=(host.model(), ids))
    assert cache.get_seq_length() == 0
    return error


@setup("use_cache=True", "`use_cache=True`: the trace runs without a cache")
def use_cache() -> float:
    def one(host: Host) -> float:
        ids, model = host.inputs(), host.model()
        return works(model, {"input_ids": ids, "use_cache": True}, lambda: model(ids), like=(host.model(), ids))

    return each(one)


@setup("inputs_embeds", "`inputs_embeds=` in place of ids, against the ids")
def embeddings() -> float:
    def one(host: Host) -> float:
        ids, model = host.inputs(), host.model()
        inputs = {"inputs_embeds": model.get_input_embeddings()(ids).detach()}
        return works(model, inputs, lambda: model(**inputs), like=(host.model(), ids))

    return each(one)


@setup("inputs_embeds with a graph", "the same with embeddings that have a gradient graph")
def embeddings_with_graph() -> float:
    def one(host: Host) -> float:
        ids, model = host.inputs(), host.model()
        inputs = {"inputs_embeds": model.get_input_embeddings()(ids)}
        for actual, expected in zip(trace(model, inputs).gradient(), trace(model, ids).gradient(), strict=True):
            require_same("gradient", actual, expected)
        return works(model, inputs, lambda: model(**inputs), like=(host.model(), ids))

    return each(one)


@setup("labels", "`labels=`: the output contains the model's loss")
def labels() -> float:
    def one(host: Host) -> float:
        ids, model = host.inputs(), host.model()
        inputs = {"input_ids": ids, "labels": ids}
        loss = trace(model, inputs).output.loss
        require_same("loss", loss, model(**inputs).loss.detach())
        return works(model, inputs, lambda: model(**inputs), like=(host.model(), ids))

    return each(one)


def padding(side: str) -> Tensor:
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[1, slice(4) if side == "left" else slice(9, None)] = 0
    return mask


@setup("padding on the right", "a mask of zeros and ones")
def padded_right() -> float:
    def one(host: Host) -> float:
        model, inputs = host.model(), {"input_ids": host.inputs(), "attention_mask": padding("right")}
        return works(model, inputs, lambda: model(**inputs), real=inputs["attention_mask"].bool())

    return each(one)


@setup(
    "padding on the left",
    "a mask of zeros and ones, with `position_ids` that count real tokens where the host takes them",
)
def padded_left() -> float:
    def one(host: Host) -> float:
        model, mask = host.model(), padding("left")
        inputs = {"input_ids": host.inputs(), "attention_mask": mask}
        call_arguments = dict(inputs)
        if host is HOSTS["Llama"]:
            call_arguments["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
        return works(model, inputs, lambda: model(**call_arguments), real=mask.bool())

    return each(one)


@setup("a boolean 2-D mask", "`attention_mask` of booleans, against zeros and ones")
def boolean_mask() -> float:
    def one(host: Host) -> float:
        ids, mask = host.inputs(), padding("right")
        model, inputs = host.model(), {"input_ids": ids, "attention_mask": mask.bool()}
        like = (host.model(), {"input_ids": ids, "attention_mask": mask})
        return works(model, inputs, lambda: model(**inputs), like=like, real=mask.bool())

    return each(one)


def pairs() -> Tensor:
    """Return the mask of pairs: causal, a window of five tokens, and one key that no query reads."""
    mask = torch.ones(13, 13, dtype=torch.bool).tril().triu(-4)
    mask[:, 2] = torch.arange(13) == 2
    return mask.expand(2, 1, 13, 13).clone()


@setup(
    "a boolean 4-D mask", "a window of 5 tokens as booleans, True to keep as in sdpa, against the same mask in floats"
)
def boolean_pairs() -> float:
    host = HOSTS["Llama"]
    ids, model = host.inputs(), host.model()
    assert model.config._attn_implementation == "sdpa"
    inputs = {"input_ids": ids, "attention_mask": pairs()}
    for layer in trace(model, inputs).layers:
        assert not layer.operator.matrix()[~pairs()[:, 0]].any(), "a pair that the mask drops has weight"
    return works(model, inputs, lambda: model(**inputs), like=(host.model(), floats(ids)))


def floats(ids: Tensor) -> dict[str, Tensor]:
    dropped = torch.zeros(2, 1, 13, 13).masked_fill(~pairs(), torch.finfo(torch.float32).min)
    return {"input_ids": ids, "attention_mask": dropped}


@setup("a boolean 4-D mask that drops whole queries", "one token has no key: its attention returns zeros, as in sdpa")
def dropped_queries() -> float:
    host = HOSTS["Llama"]
    model, mask = host.model(), pairs()
    mask[1, :, 6] = False
    inputs = {"input_ids": host.inputs(), "attention_mask": mask}
    assert not trace(model, inputs).layers[0].operator.matrix()[1, 6].any()
    return works(model, inputs, lambda: model(**inputs))


@setup(
    "a boolean 4-D mask, eager",
    "the same mask in a model with `attn_implementation='eager'`, which adds True to scores",
)
def boolean_pairs_eager() -> float:
    host = HOSTS["Llama"]
    model = host.model()
    model.set_attn_implementation("eager")
    inputs = {"input_ids": host.inputs(), "attention_mask": pairs()}
    return works(model, inputs, lambda: model(**inputs))


@setup("a float 4-D mask", "the same window as numbers that are added to the scores")
def float_pairs() -> float:
    host = HOSTS["Llama"]
    model, inputs = host.model(), floats(host.inputs())
    return works(model, inputs, lambda: model(**inputs))


@setup("a mask of the wrong length", "9 entries for 13 tokens", refused=InputError)
def wrong_length() -> float:
    host = HOSTS["Mamba-2"]
    trace(host.model(), {"input_ids": host.inputs(), "attention_mask": torch.ones(2, 9, dtype=torch.long)})
    return 0.0


@setup("a mask for one sequence", "one row for two sequences", refused=InputError)
def wrong_batch() -> float:
    host = HOSTS["Mamba"]
    trace(host.model(), {"input_ids": host.inputs(), "attention_mask": torch.ones(1, 13, dtype=torch.long)})
    return 0.0


@setup("an argument that the model does not take", "`{'inputs_ids': ids}`", refused=InputError)
def misspelt() -> float:
    from unilinattn.models import S4DConfig, S4DForCausalLM

    trace(S4DForCausalLM(S4DConfig(vocab_size=31, d_model=12, n_layers=2)), {"inputs_ids": HOSTS["Mamba"].inputs()})
    return 0.0


@setup("NaN in the input", "one NaN in `inputs_embeds`", refused=InputError)
def not_finite() -> float:
    host = HOSTS["Llama"]
    model = host.model()
    states = model.get_input_embeddings()(host.inputs()).detach()
    states[0, 3, 2] = torch.nan
    explain(model, {"inputs_embeds": states})
    return 0.0


@setup("NaN before a layer", "one NaN in the weights of the embedding", refused=FactorError)
def not_finite_inside() -> float:
    raised = []
    for host in HOSTS.values():
        model = host.model()
        with torch.no_grad():
            model.get_input_embeddings().weight[int(host.inputs()[0, 3]), 2] = torch.nan
        try:
            explain(model, host.inputs())
        except FactorError as error:
            raised.append(error)
    assert len(raised) == len(HOSTS), "a host with NaN before its layers was explained"
    raise raised[0]


@setup("a tokenizer's output", "the `BatchEncoding` that a tokenizer returns for two texts")
def encoding() -> float:
    from tests.setups.calls import tokenizer

    def one(host: Host) -> float:
        model, inputs = host.model(), tokenizer()(["a b c d", "d c"], return_tensors="pt", padding=True)
        real = inputs["attention_mask"].bool()
        return works(model, inputs, lambda: model(**inputs), real=real)

    return each(one)


@setup("one token", "ids of one token")
def one_token() -> float:
    def one(host: Host) -> float:
        ids, model = host.inputs()[:, :1], host.model()
        return works(model, ids, lambda: outputs(model(ids)))

    return each(one)
