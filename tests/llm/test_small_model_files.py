"""The small model that ships with the package: its files, its tokenizer and what it has learnt."""

from __future__ import annotations

import ast

import pytest
import torch
from repository import ROOT
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = ROOT / "core" / "slotline" / "core" / "small_model"
SIZE_LIMIT = 16 * 2**20

# Written for this test, so in no corpus.
HELD_OUT = '''\
import json
from pathlib import Path


class RecipeBook:
    """A collection of recipes stored in one JSON file."""

    def __init__(self, path, encoding="utf-8"):
        self.path = Path(path)
        self.encoding = encoding
        self._recipes = {}

    def load(self):
        """Read all the recipes from the file."""
        if not self.path.exists():
            raise FileNotFoundError(f"no such file: {self.path}")
        with open(self.path, encoding=self.encoding) as stream:
            self._recipes = json.load(stream)
        return len(self._recipes)

    def add(self, name, ingredients):
        if name in self._recipes:
            raise ValueError("recipe %r already exists" % name)
        self._recipes[name] = list(ingredients)

    def __len__(self):
        return len(self._recipes)

    def __iter__(self):
        for name in sorted(self._recipes):
            yield name


def main():
    book = RecipeBook("recipes.json")
    try:
        count = book.load()
    except FileNotFoundError as error:
        print(error)
    else:
        print("loaded", count, "recipes")


if __name__ == "__main__":
    main()
'''


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=False)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, trust_remote_code=False).eval()


def mean_loss(model: LlamaForCausalLM, ids: list[int]) -> float:
    tokens = torch.tensor([ids])
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=tokens).loss)


def complete(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, tokens: int) -> str:
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def parsed_prefix(text: str) -> ast.Module:
    """The syntax tree of the longest run of whole leading lines that is valid Python."""
    lines = text.split("\n")
    for count in range(len(lines), 0, -1):
        try:
            return ast.parse("\n".join(lines[:count]))
        except SyntaxError:
            continue
    return ast.parse("")


def test_the_folder_is_complete_and_small() -> None:
    names = {path.name for path in FOLDER.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    assert names >= {"tokenizer.json", "tokenizer_config.json"}
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < SIZE_LIMIT


@pytest.mark.parametrize("text", [HELD_OUT, "\tif x:\r\n\t\tpass  \n", "naïve = '日本語 🐍'", " \n\n    \n", ""])
def test_the_tokenizer_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text


def test_runs_of_indentation_and_newlines_are_single_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    for run in ("\n", "\n\n", "\n\n\n", " " * 4, " " * 8, " " * 12, " " * 16):
        assert len(tokenizer.encode(run)) == 1, repr(run)
    assert len(HELD_OUT) / len(tokenizer.encode(HELD_OUT)) > 2.8  # characters a token; a byte vocabulary has 1


def test_special_tokens_and_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 1)
    message = [{"role": "user", "content": "Return the name."}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nReturn the name.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(text)[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_the_model_predicts_code_it_has_not_seen(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Measured 1.514 nats a token, with a margin of 9 %; a uniform guess costs 8.3."""
    assert mean_loss(model, tokenizer.encode(HELD_OUT)) < 1.65


def test_the_order_of_the_code_matters(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """The same lines, reversed, cost clearly more: the model uses what came before."""
    reversed_lines = "\n".join(reversed(HELD_OUT.split("\n")))
    straight = mean_loss(model, tokenizer.encode(HELD_OUT))
    assert mean_loss(model, tokenizer.encode(reversed_lines)) > straight + 0.5


def test_the_model_continues_a_function(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    text = complete(model, tokenizer, "def main(", 48)
    function = parsed_prefix(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert function.name == "main"
    assert len(function.body) >= 2


def test_the_model_continues_a_class(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = "class Foo:\n    def __init__(self, name, value):\n"
    text = complete(model, tokenizer, prompt, 32)
    assert "self.name = name\n        self.value = value" in text
    tree = parsed_prefix(text)
    assert isinstance(tree.body[0], ast.ClassDef)
    assert sum(isinstance(node, ast.FunctionDef) for node in ast.walk(tree)) >= 1
