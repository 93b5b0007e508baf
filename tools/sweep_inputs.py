"""Models of the sweep and their inputs: random weights by the kind of parameter, inputs by the signature of forward."""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tools.sweep_configs import PATCHES, WIDTH, nested
from tools.sweep_needs import ARGUMENTS

TOKENS, FRAMES, SAMPLES = 7, 32, 3200
"""Text tokens, frames of a spectrogram, and samples of a waveform in an input."""

WORDS = (5, 90)
"""Range of the ids of ordinary tokens; the special ones are below and above (`sweep_configs`)."""

LAYOUTS = 3
"""Layouts of images, sounds and texts: the usual one, and two that some models need (`_Inputs`)."""

MODALITIES = (
    "input_ids",
    "pixel_values",
    "pixel_values_videos",
    "input_features",
    "input_values",
    "past_values",
    "bbox",
)
"""Names of the main inputs of models."""

BINS = (
    "num_mel_bins",
    "feature_size",
    "n_mels",
    "input_feat_size",
    "feature_projection_input_dim",
    "input_feat_per_channel",
)
"""Names of the number of frequencies of a spectrogram."""


def draw_weights(model: nn.Module, seed: int = 0) -> None:
    """Draw weights with which attention is far from uniform and no bias or norm is constant.

    Matrices keep the size of their inputs, embeddings are drawn with deviation 0.5, and every other parameter, such as
    a norm, a bias or a decay, keeps its initial value up to noise. Parameters without an initial value get one.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    maps = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, maps)}
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in embeddings:
                parameter.copy_(0.5 * noise)
            elif id(parameter) in matrices:
                parameter.copy_(noise / max(1, parameter[0].numel()) ** 0.5)
            elif parameter.ndim == 3 and parameter.shape[-1] > 1 and parameter.std() < 0.05:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(parameter.nan_to_num(0.0, 0.0, 0.0) + 0.1 * noise)


def input_choices(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the inputs to try in turn: all modalities of the model, then the text only, then each other only."""
    maker = _Inputs(model)
    names = maker.modalities()
    texts = [name for name in names if name in ("input_ids", "bbox")]
    others = [name for name in names if name not in texts]
    masks = [name for name in maker.names if name.endswith("_mask") and not name.startswith("decoder")]
    groups = [names, [*names, *masks], texts, *([name] for name in others)]
    tried: list[dict[str, Any]] = []
    for group in [group for index, group in enumerate(groups) if group and group not in groups[:index]]:
        for layout in range(LAYOUTS):
            inputs = maker.inputs(group, layout)
            if not any(_same(inputs, other) for other in tried):
                tried.append(inputs)
                yield inputs


class _Inputs:
    """The inputs of one model.

    Layouts differ in the axes of images and spectrograms, in the number of texts (choices), and in the inputs of a
    decoder, which some models derive.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._configs = list(nested(model.config))
        self._parameters = inspect.signature(model.forward).parameters
        self._generator = torch.Generator()
        self.names = list(self._parameters)

    def modalities(self) -> list[str]:
        """Return the names of the main inputs that the model accepts."""
        accepted = [name for name in MODALITIES if name in self._parameters]
        if "pixel_values" in accepted and "pixel_values_videos" in accepted:
            accepted.remove("pixel_values_videos")
        main = str(getattr(self._model, "main_input_name", ""))
        if not accepted and main in self._parameters:
            accepted = [main]
        return accepted or [name for name in ("inputs_embeds", "hidden_states", "inputs") if name in self._parameters]

    def inputs(self, names: list[str], layout: int) -> dict[str, Any]:
        """Return the inputs with these names, and those that the model needs with them."""
        self._generator.manual_seed(0)
        inputs: dict[str, Any] = {}
        if "use_cache" in self._parameters:
            inputs["use_cache"] = False
        for name in [n for n in names if n != "input_ids" and not n.endswith("_mask")]:
            inputs[name] = self._make(name, layout)
        grid = next((name for name in self._parameters if re.match("(image_)?grid_(thw|hw)", name)), None)
        vectors = next((name for name in ("hidden_states", "pixel_values") if name in inputs), None)
        if grid and vectors:
            sides = [PATCHES, PATCHES] if grid.endswith("_hw") else [1, PATCHES, PATCHES]
            inputs |= {vectors: self._patches(layout), grid: torch.tensor([sides])}
        if "pixel_values" in inputs and "spatial_shapes" in self._parameters:
            inputs["pixel_values"] = self._patches(0)[None]
            inputs["spatial_shapes"] = torch.tensor([[PATCHES, PATCHES]])
            inputs["pixel_attention_mask"] = torch.ones(1, PATCHES**2, dtype=torch.long)
        if "pixel_values" in inputs and "image_sizes" in self._parameters:
            inputs["image_sizes"] = torch.tensor([[self._side, self._side]])
            if any(getattr(config, "image_grid_pinpoints", None) for config in self._configs):
                inputs["pixel_values"] = self._normal(1, 3, 3, self._side, self._side)  # the whole, and two tiles
        if "past_values" in inputs:
            inputs |= self._series(inputs["past_values"])
        if "input_ids" in names:
            inputs["input_ids"] = self._text(inputs)
            if layout == 1 and names == ["input_ids"]:
                inputs["input_ids"] = torch.stack([inputs["input_ids"], self._words(TOKENS)], dim=1)
            if "mm_token_type_ids" in self._parameters:
                inputs["mm_token_type_ids"] = torch.isin(inputs["input_ids"], self._placeholders()).long()
        for name in names:
            if name.endswith("_mask"):
                inputs[name] = self._mask(name, inputs)
        for name, parameter in self._parameters.items():
            needed = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
            wanted = needed or (name == "decoder_input_ids" and layout < 2)
            if name.endswith("input_ids") and name != "input_ids" and wanted:
                inputs[name] = self._words(TOKENS - 2)
            elif needed and name not in inputs and parameter.kind is not parameter.VAR_POSITIONAL:
                inputs[name] = self._make(name, layout)
        for key in (getattr(self._model.config, "model_type", ""), type(self._model).__name__):
            for name, value in ARGUMENTS.get(str(key), {}).items():
                inputs[name] = self._drawn(name, value) if isinstance(value, tuple) else value
        inputs = {name: value for name, value in inputs.items() if value is not None}
        return {name: inputs[name] for name in self._parameters if name in inputs}

    def _make(self, name: str, layout: int) -> Any:
        if name == "pixel_values":
            return self._images(layout)
        if name == "pixel_values_videos":
            return self._images(0 if self._frames else 1)
        if name in ("input_features", "input_values"):
            return self._sound(name, layout)
        if name == "bbox":
            corners = torch.randint(0, 15, (1, TOKENS, 2), generator=self._generator)
            return torch.cat([corners, corners + 15], dim=-1)
        if name == "past_values":
            length = self._number("context_length", 16)
            lags = max(getattr(self._model.config, "lags_sequence", None) or [0])
            channels, size = self._number("num_input_channels", 0), self._number("input_size", 1)
            axes = [channels] if channels else [size] if size > 1 else []
            return self._normal(1, length + lags, *axes)
        if name.endswith("_ids") or name == "tokens":
            return self._words(TOKENS)
        width = self._number("hidden_size", 0) or self._number("d_model", 0)
        return self._normal(1, TOKENS, width or self._number("embed_dim", 64))

    def _mask(self, name: str, inputs: Mapping[str, Any]) -> Tensor:
        """Return a mask of ones, as long as the sound, the image or the text that it belongs to."""
        sounds = [value for key, value in inputs.items() if key in ("input_features", "input_values")]
        if name.startswith("pixel"):
            return torch.ones(1, self._side, self._side, dtype=torch.long)
        if sounds and ("input_ids" not in inputs or name != "attention_mask"):
            bins = self._number("num_mel_bins", 0)
            frames = sounds[0].shape[1] if sounds[0].ndim < 3 or sounds[0].shape[-1] == bins else sounds[0].shape[-1]
            return torch.ones(1, frames, dtype=torch.long)
        return torch.ones(1, inputs["input_ids"].shape[1] if "input_ids" in inputs else TOKENS, dtype=torch.long)

    def _text(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return ids of tokens, with a placeholder for each vector of an image or a sound."""
        words = self._words(TOKENS)
        pieces = [words[:, :2]]
        for kind, names in {"image": ("pixel_values",), "audio": ("input_features", "input_values")}.items():
            placeholder = self._placeholder(kind)
            if placeholder is not None and any(name in inputs for name in names):
                pieces.append(torch.full((1, self._vectors(kind, inputs)), placeholder))
        pieces.append(words[:, 2:])
        eos = getattr(self._model.config, "eos_token_id", None)
        if "decoder_input_ids" in self._parameters and isinstance(eos, int):
            pieces = [*pieces[:-1], pieces[-1][:, 1:], torch.tensor([[eos]])]
        return torch.cat(pieces, dim=1)

    def _vectors(self, kind: str, inputs: Mapping[str, Any]) -> int:
        """Return the number of vectors that the model makes of an image or a sound."""
        owners = (self._model, getattr(self._model, "model", None))
        getters = [getter for owner in owners if (getter := getattr(owner, f"get_{kind}_features", None))]
        if not getters:
            return self._number("image_seq_length", 1)
        named = (getter for getter in getters if inputs.keys() & inspect.signature(getter).parameters.keys())
        getter = next(named, getters[0])
        accepted = inspect.signature(getter).parameters
        try:
            with torch.no_grad():
                features = getter(**{name: value for name, value in inputs.items() if name in accepted})
        except Exception:
            return 1
        vectors = getattr(features, "pooler_output", features)
        deep = getattr(features, "deepstack_features", None)
        return _rows(deep[0][1] if vectors is None and deep else vectors)

    def _placeholder(self, kind: str) -> int | None:
        names = (f"{kind}_token_id", f"{kind}_token_index")
        ids = [getattr(self._model.config, name, None) for name in names]
        return next((i for i in ids if isinstance(i, int)), None)

    def _placeholders(self) -> Tensor:
        return torch.tensor([i for kind in ("image", "audio") if (i := self._placeholder(kind)) is not None] or [-1])

    def _words(self, length: int) -> Tensor:
        sizes = [size for config in self._configs if isinstance(size := getattr(config, "vocab_size", None), int)]
        low, high = WORDS
        high = min([high, *sizes[:1]])
        return torch.randint(min(low, high - 1), high, (1, length), generator=self._generator)

    def _images(self, layout: int) -> Tensor:
        """Return an image, or for a model of videos its frames; other layouts add an axis or have the usual size."""
        channels, side = self._number("num_channels", 3), self._side
        if layout == (0 if self._frames else 1):
            shape: tuple[int, ...] = (1, max(1, self._frames), channels, side, side)
        else:
            shape = (1, channels, side, side) if layout < 2 else (1, 3, 64, 64)
        return torch.rand(shape, generator=self._generator)

    @property
    def _frames(self) -> int:
        return self._number("num_frames", 0) or self._number("frames_per_clip", 0)

    @property
    def _side(self) -> int:
        for config in self._configs:
            size = getattr(config, "image_size", None) or getattr(config, "img_size", None)
            size = size[0] if isinstance(size, list | tuple) and size else size
            if isinstance(size, int):
                return size
        return PATCHES * 16

    def _patches(self, layout: int) -> Tensor:
        """Return an image as a list of patches: flat, flat in pairs along time, or as small images."""
        patch, frames = self._number("patch_size", 14), self._number("temporal_patch_size", 1 + (layout == 1))
        channels = self._number("in_channels", 0) or self._number("num_channels", 3)
        patches = self._normal(PATCHES**2, channels * frames, patch, patch)
        return patches if layout == 2 else patches.flatten(1)

    def _sound(self, name: str, layout: int) -> Tensor:
        bins = next((number for key in BINS if (number := self._number(key, 0))), 0)
        frames = 2 * self._number("max_source_positions", 0) or self._number("max_length", 0) or FRAMES
        is_wave = name == "input_values" and (not bins or (layout == 0 and not self._number("frequency_stride", 0)))
        if is_wave:
            wave = self._normal(1, SAMPLES if layout < 2 else 4 * SAMPLES)
            return wave if layout != 1 else wave[:, None]
        shape = (frames, bins or WIDTH)
        return self._normal(1, *(shape[::-1] if layout == 0 else shape))

    def _series(self, past: Tensor) -> dict[str, Tensor]:
        """Return the inputs of a forecast beside the past values."""
        length, future = past.shape[1], self._number("prediction_length", 4)
        features = self._number("num_time_features", 0)
        made = {
            "past_time_features": self._normal(1, length, features),
            "past_observed_mask": torch.ones_like(past),
            "future_time_features": self._normal(1, future, features),
            "future_values": self._normal(1, future, *past.shape[2:]),
        }
        needed = "past_time_features" in self._parameters
        return {name: value for name, value in made.items() if name in self._parameters and needed}

    def _number(self, name: str, default: int) -> int:
        values = (_attribute(config, name) for config in self._configs)
        return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), default)

    def _drawn(self, name: str, sizes: tuple[int | str, ...]) -> Tensor:
        shape = tuple(self._number(size, 0) if isinstance(size, str) else size for size in sizes)
        if name.endswith("_ids"):
            return self._words(1).new_tensor(0).expand(shape)
        return self._normal(*shape)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)


def _attribute(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    return value[0] if isinstance(value, list | tuple) and value else value


def _rows(features: Any) -> int:
    if isinstance(features, Tensor):
        return features.shape[:-1].numel()
    if isinstance(features, list | tuple):
        return sum(_rows(inner) for inner in features)
    return _rows(features.last_hidden_state)


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a if isinstance(a[k], Tensor))
