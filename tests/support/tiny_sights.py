"""Tiny random checkpoints of models that see images of several sizes, one table, and what transformers answers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import tiny_models
import tiny_vision
import torch
import transformers
from attrs import field, frozen
from transformers.models.smolvlm import processing_smolvlm

SHAPES: tuple[tuple[int, int], ...] = ((16, 24), (24, 16), (32, 16), (16, 16))
"""Height and width of the image of each seed, over and over."""
_SIZES = {**tiny_models._SIZES, "vocab_size": 392}
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_VISION |= {"initializer_range": 0.15}


@frozen(kw_only=True)
class TinySight:
    """How to build one model.

    Attributes:
        placeholder: what stands for an image in a prompt.
        tokens: special tokens by the tokenizer's attribute.
        model: builds the model from the ids of these tokens.
        image_processor: builds the image processor.
        processor: the processor's class, read with an image processor and a tokenizer alone. None for `expanded`.
        settings: of processor_config.json.
        expanded: the tokens of an image in words, from what the image processor returns.
        longest_run: tokens of an image that see each other. 0 if all are causal.
    """

    placeholder: str
    tokens: Mapping[str, str]
    model: Callable[[Mapping[str, int]], Any]
    image_processor: Callable[[], Any]
    processor: str
    settings: Mapping[str, Any] = field(factory=dict)
    expanded: Callable[[Any, int], str] | None = None
    longest_run: int = 0


def image(seed: int) -> Any:
    """A PIL image of noise, of a size that depends on the seed."""
    return tiny_vision.image(seed, *SHAPES[seed % len(SHAPES)])


def video(seed: int) -> Mapping[str, torch.Tensor]:
    """A video of noise as LLaVA-OneVision's processor gives it, of two or three frames by the seed."""
    frames = (1, 2 + seed % 2, 3, 16, 16)
    return {"pixel_values_videos": torch.randn(frames, generator=torch.Generator().manual_seed(seed))}


def build(name: str, path: Path) -> Path:
    """Write a random checkpoint with tokenizer and image processor into `path`."""
    sight = SIGHTS[name]
    path.mkdir(parents=True, exist_ok=True)
    tiny_models.build_tokenizer(path)
    special = dict(sight.tokens)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
        path, extra_special_tokens=special, trust_remote_code=False
    )
    tokenizer.add_tokens(["\n\n", "\n\n\n"])  # as Gemma's, which has tokens of many line breaks
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    model = sight.model({key: tokenizer.convert_tokens_to_ids(text) for key, text in sight.tokens.items()})
    tiny_models._widen(model)
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.any():  # a projection that is left for a checkpoint to fill
            torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    sight.image_processor().save_pretrained(path)
    config = {"processor_class": sight.processor, **sight.settings}
    (path / "processor_config.json").write_text(json.dumps(config))
    return path


def _mistral3(ids: Mapping[str, int]) -> Any:
    vision = transformers.PixtralVisionConfig(**_VISION, image_size=32, patch_size=4)
    config = transformers.Mistral3Config(
        vision_config=vision,
        text_config=transformers.MistralConfig(**_SIZES, sliding_window=None),
        image_token_index=ids["image_token"],
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def _pixtral(ids: Mapping[str, int]) -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.PixtralVisionConfig(**_VISION, image_size=32, patch_size=8),
        text_config=transformers.MistralConfig(**_SIZES, sliding_window=None),
        image_token_id=ids["image_token"],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return transformers.LlavaForConditionalGeneration(config)


def _pixtral_processor() -> Any:
    return transformers.PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size=8)


def _rows(found: Any, index: int) -> str:
    height, width = (int(size) // 8 for size in found["image_sizes"][index])
    return "[IMG_BREAK]".join(["[IMG]" * width] * height) + "[IMG_END]"


def _internvl(ids: Mapping[str, int]) -> Any:
    config = transformers.InternVLConfig(
        vision_config=transformers.InternVLVisionConfig(
            **_VISION, image_size=[16, 16], patch_size=[4, 4], layer_scale_init_value=0.7
        ),
        text_config=transformers.Qwen2Config(**_SIZES),
        image_token_id=ids["context_image_token"],
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    return transformers.InternVLForConditionalGeneration(config)


def _tiles() -> Any:
    size = {"height": 16, "width": 16}
    return transformers.GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, min_patches=1, max_patches=3)


def _idefics3(ids: Mapping[str, int]) -> Any:
    config = transformers.Idefics3Config(
        vision_config=transformers.models.idefics3.Idefics3VisionConfig(**_VISION, image_size=16, patch_size=4),
        text_config=transformers.LlamaConfig(**_SIZES),
        image_token_id=ids["image_token"],
        scale_factor=2,
    )
    return transformers.Idefics3ForConditionalGeneration(config)


def _smolvlm(ids: Mapping[str, int]) -> Any:
    config = transformers.SmolVLMConfig(
        vision_config=transformers.models.smolvlm.SmolVLMVisionConfig(**_VISION, image_size=16, patch_size=4),
        text_config=transformers.LlamaConfig(**_SIZES),
        image_token_id=ids["image_token"],
        scale_factor=2,
    )
    return transformers.SmolVLMForConditionalGeneration(config)


def _splitting(kind: Any) -> Any:
    return kind(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})


def _smolvlm_words(found: Any, index: int) -> str:
    return processing_smolvlm.get_image_prompt_string(
        found["rows"][0][index],
        found["cols"][0][index],
        image_seq_len=4,
        fake_token_around_image="<fake_token_around_image>",
        image_token="<image>",
        global_image_token="<global-img>",
    )


_PINPOINTS = [[16, 32], [32, 16], [16, 16], [32, 32]]


def _llava_next(ids: Mapping[str, int]) -> Any:
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**_VISION, image_size=16, patch_size=8),
        text_config=transformers.MistralConfig(**_SIZES, sliding_window=None),
        image_token_id=ids["image_token"],
        image_grid_pinpoints=_PINPOINTS,
    )
    return transformers.LlavaNextForConditionalGeneration(config)


def _next_tiles() -> Any:
    return transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, image_grid_pinpoints=_PINPOINTS
    )


def _onevision(ids: Mapping[str, int]) -> Any:
    config = transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(**_VISION, image_size=16, patch_size=8),
        text_config=transformers.Qwen2Config(**_SIZES),
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        image_grid_pinpoints=_PINPOINTS,
        vision_aspect_ratio="anyres_max_2",
    )
    return transformers.LlavaOnevisionForConditionalGeneration(config)


def _onevision_tiles() -> Any:
    return transformers.LlavaOnevisionImageProcessorPil(
        size={"height": 16, "width": 16}, image_grid_pinpoints=_PINPOINTS
    )


def _gemma3(ids: Mapping[str, int]) -> Any:
    config = transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**_VISION, image_size=24, patch_size=4),
        text_config=transformers.Gemma3TextConfig(**{**tiny_models._FAMILIES["gemma3"].settings, **_SIZES}),
        tie_word_embeddings=False,
        mm_tokens_per_image=9,
        image_token_index=ids["image_token"],
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _gemma4(ids: Mapping[str, int], **settings: Any) -> Any:
    text = {**tiny_models._FAMILIES["gemma4"].settings, **_SIZES, "tie_word_embeddings": False, **settings}
    layers = text["num_hidden_layers"] = 4
    config = transformers.Gemma4Config(
        vision_config=transformers.Gemma4VisionConfig(
            **_VISION, num_key_value_heads=2, head_dim=16, patch_size=2, pooling_kernel_size=2, standardize=True
        ),
        text_config=transformers.Gemma4TextConfig(
            **text | {"layer_types": text["layer_types"][:layers], "vocab_size_per_layer_input": text["vocab_size"]}
        ),
        audio_config=None,
        tie_word_embeddings=False,
        **{name: ids.get(name.removesuffix("_id")) for name in ("image_token_id", "video_token_id", "audio_token_id")},
    )
    return transformers.Gemma4ForConditionalGeneration(config)


def _seventy() -> Any:
    return transformers.Gemma4ImageProcessorPil(patch_size=2, pooling_kernel_size=2, max_soft_tokens=70)


def _squares() -> Any:
    return transformers.Gemma3ImageProcessorPil(size={"height": 24, "width": 24})


_SPLIT = {
    "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>",
    "end_of_utterance_token": "<end_of_utterance>",
    "global_image_token": "<global-img>",
    **{f"row_{row}_col_{column}": f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)},
}
_ROWS = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
_GEMMA4 = {
    "boi_token": "<|image>",
    "image_token": "<|image|>",
    "eoi_token": "<image|>",
    "boa_token": "<|audio>",
    "audio_token": "<|audio|>",
    "eoa_token": "<audio|>",
    "video_token": "<|video|>",
}
SIGHTS: Mapping[str, TinySight] = {
    "idefics3": TinySight(
        placeholder="<image>",
        tokens=_SPLIT,
        model=_idefics3,
        image_processor=partial(_splitting, transformers.Idefics3ImageProcessorPil),
        processor="Idefics3Processor",
        settings={"image_seq_len": 4},
    ),
    "smolvlm": TinySight(
        placeholder="<image>",
        tokens=_SPLIT,
        model=_smolvlm,
        image_processor=partial(_splitting, transformers.SmolVLMImageProcessorPil),
        processor="SmolVLMProcessor",
        settings={"image_seq_len": 4},
        expanded=_smolvlm_words,
    ),
    "llava_next": TinySight(
        placeholder="<image>",
        tokens={"image_token": "<image>"},
        model=_llava_next,
        image_processor=_next_tiles,
        processor="LlavaNextProcessor",
        settings={
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "llava_onevision": TinySight(
        placeholder="<image>",
        tokens={"image_token": "<image>", "video_token": "<video>"},
        model=_onevision,
        image_processor=_onevision_tiles,
        processor="LlavaOnevisionProcessor",
        settings={
            "num_image_tokens": 4,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_2",
        },
    ),
    "gemma3": TinySight(
        placeholder="<start_of_image>",
        tokens={"boi_token": "<start_of_image>", "image_token": "<image>", "eoi_token": "<end_of_image>"},
        model=_gemma3,
        image_processor=_squares,
        processor="Gemma3Processor",
        settings={"image_seq_length": 9},
        longest_run=9,
    ),
    "gemma4": TinySight(
        placeholder="<|image|>",
        tokens=_GEMMA4,
        model=partial(_gemma4, initializer_range=0.2),
        image_processor=_seventy,
        processor="Gemma4Processor",
    ),
    "gemma4_ahead": TinySight(
        placeholder="<|image|>",
        tokens=_GEMMA4,
        model=partial(
            _gemma4,
            use_bidirectional_attention="vision",
            num_kv_shared_layers=0,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
        ),
        image_processor=_seventy,
        processor="Gemma4Processor",
        longest_run=70,
    ),
    "mistral3": TinySight(
        placeholder="[IMG]",
        tokens=_ROWS,
        model=_mistral3,
        image_processor=_pixtral_processor,
        processor="PixtralProcessor",
        settings={"patch_size": 4, "spatial_merge_size": 2},
        expanded=_rows,
    ),
    "pixtral": TinySight(
        placeholder="[IMG]",
        tokens=_ROWS,
        model=_pixtral,
        image_processor=_pixtral_processor,
        processor="PixtralProcessor",
        settings={"patch_size": 8},
        expanded=_rows,
    ),
    "internvl": TinySight(
        placeholder="<IMG_CONTEXT>",
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        model=_internvl,
        image_processor=_tiles,
        processor="InternVLProcessor",
        settings={"image_seq_length": 4},
    ),
}
"""Models by name."""


class _Processor:
    """transformers' processor of a folder without the parts that read sound or videos."""

    def __init__(self, path: Path, sight: TinySight) -> None:
        self._sight = sight
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        self._images = transformers.AutoImageProcessor.from_pretrained(path, trust_remote_code=False)
        self._images.return_row_col_info = True  # not saved, and not read by processors that split nothing
        if sight.expanded is None:
            original = getattr(transformers, sight.processor)
            kind = type("Lone", (original,), {"check_argument_for_proper_class": lambda *_: None})
            parts = {"tokenizer": self._tokenizer, "image_processor": self._images}
            given = {name: parts.get(name) for name in original.get_attributes()}
            self._whole = kind(**given, **sight.settings)

    def take_videos_as_text(self) -> None:
        """Refuse no tokens of videos without a video."""
        self._whole.video_token = None

    def __call__(self, text: str, images: Sequence[Any]) -> Mapping[str, Any]:
        if not images:
            return dict(self._tokenizer(text, return_tensors="pt"))
        if self._sight.expanded is None:
            return dict(self._whole(text=text, images=list(images), return_tensors="pt"))
        found = dict(self._images(images=list(images), return_tensors="pt"))
        first, *others = text.split(self._sight.placeholder)
        texts = [self._sight.expanded(found, i) + other for i, other in enumerate(others)]
        return {**found, **self._tokenizer("".join([first, *texts]), return_tensors="pt")}


@cache
def _oracle(name: str, path: Path) -> tuple[Any, _Processor]:
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    return model.eval(), _Processor(path, SIGHTS[name])


@cache
def answer(
    name: str, path: Path, text: str, seeds: tuple[int, ...], max_tokens: int, videos: tuple[int, ...] = ()
) -> tuple[list[int], list[int]]:
    """The prompt's tokens and those of transformers' greedy generation, for a text with the images of these seeds.

    Its videos are those of the seeds `videos`, of equal numbers of frames. Each is <video> in the text.
    """
    model, processor = _oracle(name, path)
    shown = [video(seed)["pixel_values_videos"] for seed in videos]
    if shown:
        processor.take_videos_as_text()
    tokens = (
        shown[0].shape[1] * math.ceil(math.sqrt(SIGHTS[name].settings["num_image_tokens"]) / 2) ** 2 if shown else 0
    )
    inputs = processor(text.replace("<video>", "<video>" * (tokens + 1)), [image(seed) for seed in seeds])
    inputs = {key: value for key, value in inputs.items() if isinstance(value, torch.Tensor)}
    inputs |= {"pixel_values_videos": torch.cat(shown)} if shown else {}
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
    count = inputs["input_ids"].shape[1]
    return out[0, :count].tolist(), out[0, count:].tolist()
