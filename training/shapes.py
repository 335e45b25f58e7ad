"""Train a tiny model that sees: it names the colour and shape on an image of 32 x 32 pixels.

A LLaVA of 150,000 parameters, trained from nothing in a minute on a CPU, for docs/multimodal.md and to try images with.
It writes a checkpoint that transformers and slotline read, and an image to ask about.

    python training/shapes.py /tmp/shapes
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 210, 40),
    "purple": (150, 50, 180),
    "orange": (245, 140, 30),
}
SHAPES = ("circle", "square", "triangle")
SIDE, PATCH = 32, 8
MEAN, STD = 0.5, 0.5
QUESTIONS = ("What colour ?", "What shape ?", "What is it ?")
WORDS = ("<pad>", "</s>", "<unk>", "<image>", "What", "colour", "shape", "is", "it", "?", "a", *COLOURS, *SHAPES)
TEMPLATE = """{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{% if part.type == "image" %}<image> {% else %}{{ part.text }}{% endif %}{% endfor %}
{%- endif %}{% endfor %}"""
Pixels = npt.NDArray[np.uint8]


def drawn(colour: str, shape: str, rng: np.random.Generator) -> Pixels:
    """Return an image [SIDE, SIDE, 3] of a shape somewhere on a light ground."""
    radius = rng.uniform(6, 10)
    x, y = rng.uniform(radius + 1, SIDE - radius - 1, 2)
    across, down = np.meshgrid(np.arange(SIDE) - x, np.arange(SIDE) - y)
    inside = {
        "circle": across**2 + down**2 < radius**2,
        "square": np.maximum(np.abs(across), np.abs(down)) < 0.85 * radius,
        "triangle": (down < radius) & (2 * np.abs(across) < down + radius),
    }[shape]
    ground = rng.integers(215, 256) + rng.normal(0, 4, (SIDE, SIDE, 3))
    paint = np.array(COLOURS[colour]) + rng.normal(0, 10, 3)
    return np.asarray(np.where(inside[..., None], paint, ground).clip(0, 255), np.uint8)


def example(rng: np.random.Generator) -> tuple[Pixels, str, str]:
    """Return an image, a question about it and the answer."""
    colour, shape = str(rng.choice(list(COLOURS))), str(rng.choice(SHAPES))
    question = str(rng.choice(QUESTIONS))
    answer = {QUESTIONS[0]: colour, QUESTIONS[1]: shape, QUESTIONS[2]: f"a {colour} {shape}"}[question]
    return drawn(colour, shape, rng), question, answer


def build_processor() -> Any:
    """Return a processor whose tokens are whole words."""
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    kind = getattr(transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor)
    return transformers.LlavaProcessor(
        image_processor=kind(
            size={"shortest_edge": SIDE},
            crop_size={"height": SIDE, "width": SIDE},
            image_mean=[MEAN] * 3,
            image_std=[STD] * 3,
        ),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        chat_template=TEMPLATE,
    )


def build_model() -> Any:
    """Return the model with random weights."""
    config = transformers.LlavaConfig(
        vision_config=transformers.SiglipVisionConfig(
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=SIDE,
            patch_size=PATCH,
        ),
        text_config=transformers.LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.1,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        ),
        image_token_id=WORDS.index("<image>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    model = transformers.LlavaForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(eos_token_id=1, pad_token_id=0)
    return model


def batch(count: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Return examples as the model reads them. Only answers are to be learnt."""
    images, token_ids, labels = [], [], []
    number = {word: index for index, word in enumerate(WORDS)}
    for _ in range(count):
        image, question, answer = example(rng)
        images.append(image)
        asked = [number["<image>"]] * (SIDE // PATCH) ** 2 + [number[word] for word in question.split()]
        told = [*(number[word] for word in answer.split()), 1]
        rest = 4 + 4 - (len(asked) - (SIDE // PATCH) ** 2) - len(told)
        token_ids.append(asked + told + [0] * rest)
        labels.append([-100] * len(asked) + told + [-100] * rest)
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255
    return {
        "pixel_values": (pixels - MEAN) / STD,
        "input_ids": torch.tensor(token_ids),
        "labels": torch.tensor(labels),
    }


def train(model: Any, steps: int, size: int, seed: int) -> None:
    """Train on `steps` batches of `size` images."""
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        loss = model(**batch(size, rng)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    return steps


@torch.no_grad()
def right_answers(model: Any, processor: Any, count: int, seed: int) -> int:
    """Return how many of `count` new images the model answers right."""
    rng, right = np.random.default_rng(seed), 0
    for _ in range(count):
        image, question, answer = example(rng)
        inputs = processor(text=f"<image> {question}", images=[Image.fromarray(image)], return_tensors="pt")
        found = model.generate(**inputs, max_new_tokens=5, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        right += processor.tokenizer.decode(found, skip_special_tokens=True) == answer
    return right


def main() -> None:
    """Train, measure and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the checkpoint and shape.png")
    parser.add_argument("--steps", type=int, default=600, help="batches to train on")
    parser.add_argument("--batch", type=int, default=48, help="images in a step")
    parser.add_argument("--questions", type=int, default=100, help="new ones, to measure it")
    parser.add_argument("--seed", type=int, default=0, help="of weights and images")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model, processor = build_model(), build_processor()
    begun = time.monotonic()
    train(model, options.steps, options.batch, options.seed)
    seconds = time.monotonic() - begun
    model.to(torch.bfloat16).save_pretrained(options.out)
    processor.save_pretrained(options.out)
    Image.fromarray(drawn("blue", "triangle", np.random.default_rng(7))).save(options.out / "shape.png")
    right = right_answers(model.float(), processor, options.questions, options.seed + 1)
    print(f"trained in {seconds:.0f} s; {right} of {options.questions} new questions answered right")


if __name__ == "__main__":
    main()
