"""Tiny configurations of transformers' models, derived from the defaults by rules on the names of attributes.

Each size is shrunk by the kind of its name, in nested configurations too. No rule knows a model type; the exceptions
are in `sweep_needs`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from tools.sweep_needs import SETTINGS, merged

WIDTH, INNER, STAGE, HEAD, STEP = 64, 96, 16, 16, 8
"""Widths of a model, of its feed-forward layers, of a pyramid's first stage and of a head; the divisor of widths."""

HEADS, LAYERS, MOST_LAYERS, POSITIONS, VOCABULARY = 4, 2, 4, 64, 128
"""Upper limits of other sizes; a model with several types of layers has one of each, up to `MOST_LAYERS`."""

ORDINARY = 100
"""Ids from here on are special tokens, numbered down from the end of the vocabulary."""

PATCHES = 4
"""Patches along the side of an image."""

KINDS = {
    "token": r"(token|bos|eos|pad|sep|cls|mask|unk|boi|eoi)_(id|index|ids)$",
    "vocabulary": r"vocab(_size|$)|^num_embeddings$|codebook_size$|^num_embeds$",
    "other": r"dropout|drop_|eps$|_std$|range|theta|factor|temperature|coef|_cost|loss|weight|prob|label|threshold"
    r"|_scale|scale_|multiplier|ratio|layerdrop|momentum|stride|padding|kernel|dilation|quantile|slope|alpha|limit|softcap"
    r"|num_feat_extract|num_feature_levels|num_channels|^(audio|input|image)_channels$|insert_layer"
    r"|num_quantizers|num_codebooks|n_codebooks|merge_size|tubelet|temporal_patch|num_image_tokens",
    "indices": r"(indexes|indices|idxs|hook_ids|layer_ids|feature_layers?)$"
    r"|^(cross_attention|moe|mlp_only)_layers$|^global_attn_",
    "shared": r"^num_kv_shared_layers$",
    "chosen": r"per_tok|topk|top_?k$|moe_k$|kpool$|top_k_experts",
    "experts": r"experts$|_expert_groups?$|^moe_num_|^n_group$",
    "key heads": r"key_value_heads|kv_heads|kv_n_heads|num_key_heads",
    "heads": r"heads(_per_stage)?$|^n_head$",
    "head": r"head_dim|^d_kv$|kv_channels|dim_head|^d_head$|(qk|nope|rope)_.*dim$|_rank$|rotary_dim|head_size$",
    "first layers": r"first_k_dense|num_dense_layers|max_window_layers|moe_layer_start",
    "stages": r"^depths$|blocks_per_stage|stage_num_blocks|stage_numb_of_layers|layer_depths",
    "layers": r"layers$|^depth$|_depth$|^n_layer$|^num_blocks$|^num_encoder_blocks$|num_res_blocks",
    "frames": r"^num_frames$|^frames_per_clip$",
    "channels": r"^base_channels$",
    "patch": r"^patch_size$|^patch_length$",
    "image": r"^(pretrain_)?image_size$|^img_size$|^input_size$|^crop_size$",
    "window": r"window(_size)?s?$|^context_size$|window_size_per_stage|^local_attention$|^sliding_window|chunk_size$"
    r"|attention_chunk",
    "positions": r"position_embeddings$|positions$|^n_ctx$|context_length|max_seq|max_length$|seq_length$|max_ep_len",
    "inner": r"intermediate|ffn_?dim|^d_ff$|mlp_dim|ffn_hidden|d_inner|dim_feedforward|feedforward_dim|linear_units"
    r"|ffn_size",
    "states": r"d_state$|state_size$",
    "queries": r"num_quer|num_latents|n_latents|query_tokens|latent_query_num",
    "bins": r"mel_bins$|^n_mel|^mel_dim$|input_feat_size|input_feat_per_channel",
    "width": r"hidden_size|d_model|n_embd|dims?(_per_stage)?$|channels?s?$|feature_size|projection_size|_filters$"
    r"|sizes$|embedding_size|output_size|_width$|_units$|size_global|upsample_groups$|^d_latents$",
}
"""Kinds of sizes with the names of their attributes; the first kind that matches counts."""

LIMITS = {
    "vocabulary": VOCABULARY,
    "shared": 0,
    "chosen": 2,
    "heads": HEADS,
    "head": HEAD,
    "first layers": 1,
    "patch": 16,
    "positions": POSITIONS,
    "states": HEAD,
    "queries": 8,
    "bins": HEAD,
    "frames": 4,
    "channels": 32,
}
"""Upper limits of the kinds of sizes that depend on no other size."""

PATTERNS = {kind: re.compile(pattern) for kind, pattern in KINDS.items()}
MAIN = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim")
"""Names of the width of a model, in the order of preference."""

UNSET = {
    "head_dim": HEAD,
    "num_key_value_heads": HEADS,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "prediction_length": 4,
    "vocab_size": VOCABULARY,
    "pad_token_id": 1,
}
"""Attributes that some classes leave unset and their models need."""


@dataclass(frozen=True)
class Rules:
    """A choice where several are possible.

    With `uniform` all models inside have the width `width`; otherwise all widths are divided by one number, which keeps
    the relations between those of a backbone and of the modules on it, and two layers of each type stay. `sections`
    gives the sections of a rotation along several axes, for models that otherwise take those of their full size.
    """

    uniform: bool = True
    width: int = WIDTH
    sections: bool = False


RULES = (Rules(), Rules(sections=True), Rules(uniform=False), Rules(width=96))
"""The choices, in the order in which they are tried; 96 is divisible by 3 as well."""


def kind_of(name: str) -> str:
    """Return the kind of size that the name of an attribute stands for, "other" if it is none."""
    return next((kind for kind, pattern in PATTERNS.items() if pattern.search(name)), "other")


def tiny_config(config_class: type, rules: Rules = RULES[0], model: str = "") -> Any:
    """Return a tiny configuration of a class, for a class of models; errors are those of the class."""
    default = config_class()
    return config_class(**merged(_Shrinking(default, rules).arguments(default), SETTINGS.get(model, {})))


def nested(config: Any) -> Iterator[Any]:
    """Yield a configuration and those inside it, the outer ones first."""
    yield config
    for value in vars(config).values():
        if _is_config(value):
            yield from nested(value)


class _Shrinking:
    """The rules, with the sizes of the whole configuration that they refer to."""

    def __init__(self, default: Any, rules: Rules) -> None:
        self._rules = rules
        configs = [vars(config) for config in nested(default)]
        mains = [values[name] for values in configs if (name := _named(values, MAIN))]
        self._largest = max(mains, default=WIDTH)
        self._widths = dict.fromkeys(mains, rules.width)
        self._stages: dict[int, int] = {}
        lists = [v for values in configs for n, v in values.items() if kind_of(n) == "width" and _is_numbers(v)]
        for widths in lists:
            large = [width for width in widths if width > STEP]
            self._stages |= {w: _stepped(STAGE * w / min(large)) for w in large if w not in self._stages}
        self._pyramid = any(kind_of(n) == "stages" and _is_numbers(v) for c in configs for n, v in c.items())
        self._tokens: dict[int, int] = {}
        self._side = next((self._image(v["image_size"], v) for v in configs if _is_number(v.get("image_size"))), 0)

    def arguments(self, config: Any) -> dict[str, Any]:
        """Return the arguments that build the tiny form of a configuration."""
        base = _base_names()
        by_name = {field.name: field for field in fields(config) if field.name not in base}
        values = {name: vars(config).get(name) for name in by_name}
        layers = self._layers(values)
        arguments: dict[str, Any] = {}
        for name, value in values.items():
            if _is_config(value):
                arguments[name] = {"model_type": value.model_type, **self._stages_of(value), **self.arguments(value)}
            elif value is None:
                arguments |= {name: UNSET[name]} if name in UNSET else {}
            elif not (by_name[name].default is None and _is_number(value)):
                tiny = self._value(name, value, values, layers)
                if tiny != value or _changed(by_name[name], value):
                    arguments[name] = tiny
        for name, value in vars(config).items():
            if kind_of(name) == "token" and name in base | {"decoder_start_token_id"} and name not in arguments:
                tiny = self._value(name, value, values, layers)
                arguments |= {name: tiny} if tiny != value else {}
        self._keep_products(values, arguments)
        if self._rules.sections and isinstance(rotation := values.get("rope_parameters"), Mapping):
            arguments["rope_parameters"] = self._sectioned(dict(arguments.get("rope_parameters", rotation)))
        return merged(arguments, SETTINGS.get(config.model_type, {}))

    def _stages_of(self, backbone: Any) -> dict[str, Any]:
        """Return the stages whose outputs the models around a backbone take, none for another configuration."""
        if not _is_numbers(stages := vars(backbone).get("_out_indices")):
            return {}
        values = dict(vars(backbone))
        return {"out_indices": self._list("out_indices", list(stages), values, self._layers(values))}

    def _layers(self, values: Mapping[str, Any]) -> dict[int, list[int]]:
        """Return, for each number of layers, the layers that stay: those of each type, and at least `LAYERS`."""
        layers: dict[int, list[int]] = {}
        repeats = 1 if self._rules.uniform else 2
        for count in {v for n, v in values.items() if kind_of(n) == "layers" and _is_number(v) and v > LAYERS}:
            lists = [list(v) for v in values.values() if isinstance(v, list | tuple) and len(v) == count]
            positions = [[position for position, x in enumerate(v) if x == y] for v in lists for y in v]
            firsts = sorted({position for same in positions for position in same[:repeats]} | {0})[:MOST_LAYERS]
            marked = [v for n, v in values.items() if kind_of(n) == "indices" and _is_numbers(v)]
            least = min(MOST_LAYERS, max([LAYERS, *(len(set(v)) for v in marked if max(v, default=0) <= count)]))
            others = [layer for layer in range(count) if layer not in firsts]
            layers[count] = sorted([*firsts, *others[: max(0, least - len(firsts))]])
        return layers

    def _value(self, name: str, value: Any, values: Mapping[str, Any], layers: Mapping[int, list[int]]) -> Any:
        kind = kind_of(name)
        if isinstance(value, Mapping):
            return {key: self._value(str(key), inner, values, layers) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return self._list(name, list(value), values, layers)
        if not _is_number(value) or value < 0:
            return value
        if kind in LIMITS:
            return min(value, LIMITS[kind])
        match kind:
            case "token":
                return self._token(value)
            case "layers":
                return len(layers[value]) if value in layers else min(value, LAYERS)
            case "experts":
                return min(value, 4 if value > 8 else 2)
            case "key heads":
                heads = [v for n, v in values.items() if kind_of(n) == "heads" and _is_number(v) and v >= value]
                return min(value, HEADS if value in heads else HEADS // 2)
            case "image":
                return self._image(value, values)
            case "window":
                return min(value, 2 if self._pyramid else 4)
            case "inner":
                return min(value, INNER) if self._rules.uniform else self._scaled(value)
            case "width":
                return self._width(value)
        return value

    def _list(
        self, name: str, value: list[Any], values: Mapping[str, Any], layers: Mapping[int, list[int]]
    ) -> list[Any]:
        kind, numbers = kind_of(name), _is_numbers(value)
        if name == "mrope_section" and numbers:
            return _sections(value, HEAD // 2)
        if name == "image_grid_pinpoints" and self._side:
            return [[self._side, 2 * self._side], [2 * self._side, self._side]]
        if kind == "indices" and numbers:
            most = min(
                (len(remaining) for count, remaining in layers.items() if max(value, default=0) <= count), default=None
            )
            return _ranked(value, most) if most else value
        if len(value) in layers:
            value = [value[layer] for layer in layers[len(value)]]
        if len(value) == 2 and isinstance(value[0], list | tuple) and _is_number(value[1]):
            return [list(value[0]), 1]  # a pattern of layers and how often it is repeated
        if kind == "stages" and numbers:
            return [min(v, LAYERS if index == 0 else 1) for index, v in enumerate(value)]
        if kind in ("heads", "key heads") and numbers and value:
            return [max(1, v // min(value)) for v in value]
        if kind == "width" and numbers:
            return [self._stages.get(v, v) if self._rules.uniform else self._scaled(v) for v in value]
        if kind == "other" and not any(isinstance(v, list | tuple) for v in value):
            return value
        return [self._value(name, v, values, layers) for v in value]

    def _token(self, value: int) -> int:
        """Return an id within the vocabulary; large ids are numbered down from its end."""
        if value < ORDINARY:
            return value
        return self._tokens.setdefault(value, VOCABULARY - 1 - len(self._tokens))

    def _image(self, value: int, values: Mapping[str, Any]) -> int:
        size: Any = values.get("patch_size")
        patch = min(size, LIMITS["patch"]) if _is_number(size) else LIMITS["patch"]
        return min(value, patch * (4 * PATCHES if self._pyramid and patch <= PATCHES else PATCHES))

    def _width(self, value: int) -> int:
        if not self._rules.uniform:
            return self._scaled(value)
        if value in self._widths or value in self._stages:
            return self._widths.get(value, self._stages.get(value, value))
        return min(value, _stepped(self._rules.width * min(4.0, value / self._largest))) if value > HEAD else value

    def _scaled(self, value: int) -> int:
        return _stepped(value * WIDTH / max(WIDTH, self._largest)) if value > HEAD else value

    def _sectioned(self, rotation: dict[str, Any]) -> dict[str, Any]:
        share = rotation.get("partial_rotary_factor", 1.0)
        return rotation | {"mrope_section": _sections([2, 3, 3], int(HEAD * share) // 2)}

    def _keep_products(self, values: Mapping[str, Any], arguments: dict[str, Any]) -> None:
        """Keep the number of heads times their width equal to the expanded width where it is so by default."""
        main, expand = _named(values, MAIN), _named(values, ("expand", "mamba_expand"))
        tiny = {**values, **arguments}
        for heads, head, inner in (
            ("mamba_n_heads", "mamba_d_head", "mamba_d_ssm"),
            ("mamba_num_heads", "mamba_head_dim", ""),
            ("num_heads", "head_dim", ""),
        ):
            if not (main and expand and _is_number(values.get(heads))):
                continue
            width = values.get(inner) or values[expand] * values[main]
            if values.get(head) in ("auto", None) or values[heads] * values[head] == width:
                total = tiny[expand] * tiny[main]
                arguments |= {head: HEAD, heads: total // HEAD} | ({inner: total} if values.get(inner) else {})


def _changed(field: "Field[Any]", value: Any) -> bool:
    """Tell whether a configuration inside another one differs from the default of its class."""
    return field.default is not MISSING and value != field.default


def _ranked(indices: Sequence[int], most: int) -> list[int]:
    """Return the indices of `most` layers in the same order; the last stays the last, and negative ones stay."""
    ranks = {index: rank for rank, index in enumerate(sorted({index for index in indices if index >= 0}))}
    shift = max(0, most - len(ranks))
    return list(dict.fromkeys(index if index < 0 else min(ranks[index] + shift, most - 1) for index in indices))


def _sections(value: Sequence[int], total: int) -> list[int]:
    """Return sections in about the same proportions that sum to `total`."""
    sizes = [max(1, size * total // max(1, sum(value))) for size in value]
    return [*sizes[:-1], total - sum(sizes[:-1])]


def _named(values: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if _is_number(values.get(name))), None)


def _base_names() -> set[str]:
    from transformers import PreTrainedConfig

    return {field.name for field in fields(PreTrainedConfig)}


def _is_config(value: Any) -> bool:
    from transformers import PreTrainedConfig

    return isinstance(value, PreTrainedConfig)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(_is_number(v) for v in value)


def _stepped(value: float) -> int:
    return max(STEP, round(value / STEP) * STEP)
