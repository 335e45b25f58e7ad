"""`LLM` and its requests take paths and numbers in every form, and name what is neither."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_engines import DEFAULTS

from slotline.cli import main
from slotline.core import LLM, BeamSearchParams, LoRARequest, PoolingParams, SamplingParams, StructuredOutputsParams
from slotline.planner.plan import SMALL_MODEL
from slotline.registry.architectures import of_same_family
from slotline.registry.config import load_config
from slotline.registry.errors import ConfigError, ModelError, RequestError, SlotlineError
from slotline.registry.safe_repr import safe_repr

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]


class Wild:
    """What raises wherever it is looked at."""

    def __repr__(self) -> str:
        raise ValueError("no")

    __str__ = __fspath__ = __iter__ = __len__ = __index__ = __float__ = __repr__


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with a model, and with what people name instead of one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(SMALL_MODEL)
    (tmp_path / "weights.gguf").write_bytes(b"GGUF\0\0")
    (tmp_path / "weights.safetensors").write_bytes(b"\0")
    return tmp_path


NAMES = [
    ("Qwen/Qwen3-0.6B", "a model on the Hugging Face Hub", r"hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"),
    ("https://huggingface.co/Qwen/Qwen3-0.6B", "an address on the net", "hf download Qwen/Qwen3-0.6B "),
    ("model/config.json", r"the file config\.json of a checkpoint", "name its folder: 'model'"),
    ("weights.gguf", "a GGUF file, which is not read", "name a Hugging Face folder"),
    ("elsewhere.gguf", "a GGUF file, which is not read", "name a Hugging Face folder"),
    ("weights.safetensors", "a file of weights", "name its folder"),
    ("~/modle", "no such file or folder", "did you mean '.*/model'"),
    ("a\0b", "a NUL character", "correct it"),
]


@pytest.mark.parametrize(("name", "what", "fix"), NAMES)
def test_what_is_named_instead_of_a_model_is_said_with_what_to_do(name: str, what: str, fix: str, home: Path) -> None:
    for arguments in ((name,), (Path(name),)) if "://" not in name else ((name,),):
        with pytest.raises(ConfigError, match=rf"{what}[\s\S]*fix: .*{fix}"):
            LLM(*arguments)
    for key in ("model", "tokenizer"):
        with pytest.raises(ModelError, match=rf"{key} = .*{what}[\s\S]*fix: .*{fix}"):
            LLM(**{key: name, "memory": "4MiB"})


def test_a_model_of_the_hub_that_was_downloaded_is_named_with_its_folder(home: Path) -> None:
    snapshot = home / ".cache" / "huggingface" / "hub" / "models--Qwen--Qwen3-0.6B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"in the Hub's cache: name {snapshot}"):
        LLM("Qwen/Qwen3-0.6B")


def test_a_home_folder_is_found_in_every_place(home: Path, tiny: Tiny) -> None:
    (home / "run.toml").write_text('model = "model"')
    assert load_config("~/run.toml").path("model") == home / "model"
    assert LoRARequest("a", 1, "~/adapter").lora_path == str(home / "adapter")
    llm = LLM("~/model", **{**DEFAULTS, "backend": "auto"})
    assert llm.engine.runner.model.facts.architecture == "LlamaForCausalLM"
    llm.update_config(model="~/model")
    llm.reload_weights()
    with pytest.raises(ConfigError, match="model=5 is no path"):
        llm.update_config(model=5)
    with pytest.raises(ConfigError, match="name two models"):
        LLM("~/model", model="other")


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((5,), {}, "5 is no path"),
        ((True,), {}, "True is no path"),
        ((b"a",), {}, "b'a' is no path"),
        ((["a"],), {}, r"\['a'\] is no path"),
        (("",), {}, "'' is no path"),
        (("nothing",), {}, "'nothing' is no configuration file: there is no such file or folder"),
        ((Wild(),), {}, "<Wild, whose repr raises ValueError> is no path"),
        ((), {"overrides": 5}, "overrides=5 is no list of texts"),
        ((), {"overrides": "a=1"}, "overrides='a=1' is no list of texts"),
        ((), {"overrides": [5]}, r"overrides=\[5\] is no list of texts"),
        ((), {"overrides": Wild()}, "overrides=<Wild"),
        ((), {"model": Wild()}, "model: <Wild, whose repr raises ValueError> is not a text"),
        ((), {"max_model_len": Wild()}, "max_model_len: <Wild"),
        ((), {"max_model_len": np.float64(2.5)}, "max_model_len: 2.5 is not a whole number"),
        ((), {"max_model_len": [np.int64(2)]}, r"max_model_len: \[2\] is not a whole number"),
    ],
)
def test_what_is_no_argument_of_llm_is_refused(arguments: Any, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(*arguments, **settings)


def test_the_command_names_a_file_that_is_no_configuration(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "model"]) == 2
    assert "'model' is a folder and no configuration file\n  fix: name a model as such" in capsys.readouterr().err
    assert main(["generate", "--config", "model/config.json", "x"]) == 2
    assert "it is the file config.json of a checkpoint" in capsys.readouterr().err


def test_an_architecture_that_is_not_served_is_named_with_its_family_or_with_nothing(tmp_path: Path) -> None:
    def message(architecture: str) -> str:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        with pytest.raises(ModelError) as caught:
            LLM(tmp_path)
        return caught.value.message

    qwen = message("Qwen3_9ForConditionalGeneration")
    assert "of the same family are served" in qwen
    assert "Qwen3VLForConditionalGeneration" in qwen
    assert "Whisper" not in qwen
    assert message("CohereXForCausalLM").endswith(f"of {str(tmp_path)!r}")
    assert of_same_family("Phi4ForCausalLM", ["Phi3ForCausalLM", "PhimoeForCausalLM", "GPT2Model"]) == (
        "Phi3ForCausalLM",
    )
    assert of_same_family("ForCausalLM", ["LlamaForCausalLM"]) == ()


# ---- numbers of NumPy


def test_numbers_of_numpy_are_numbers(engines: Engines, tiny: Tiny) -> None:
    config = load_config(
        values={
            "scheduler.max_model_len": np.int64(64),
            "cache.memory": np.float32(0.5),
            "optimize": np.bool_(False),
            "graphs.sizes": np.array([1, 2]),
            "parallel.layers": [np.int32(1), np.array(2)],
        }
    ).config
    assert (config.scheduler.max_model_len, config.cache.memory, config.optimize) == (64, 0.5, False)
    assert (config.graphs.sizes, config.parallel.layers) == ((1, 2), (1, 2))
    plain = SamplingParams(
        n=2, temperature=0.5, top_k=3, top_p=0.5, seed=7, max_tokens=3, ignore_eos=True, logprobs=1,
        stop_token_ids=[300], allowed_token_ids=[5, 6, 7], bad_words_token_ids=[[9, 8]], logit_bias={5: 1.0},
    )  # fmt: skip
    theirs = SamplingParams(
        n=np.int8(2), temperature=np.float32(0.5), top_k=np.int64(3), top_p=np.float16(0.5), seed=np.uint64(7),
        max_tokens=np.int16(3), ignore_eos=np.bool_(True), logprobs=np.int64(1), stop_token_ids=np.array([300]),
        allowed_token_ids=[np.int32(5), 6, np.int64(7)], bad_words_token_ids=np.array([[9, 8]]),
        logit_bias={np.int64(5): np.float32(1)},
    )  # fmt: skip
    assert theirs == plain
    assert all(type(getattr(theirs, name)) is type(getattr(plain, name)) for name in ("n", "temperature", "ignore_eos"))
    llm = engines(tiny("llama"))
    prompt = {"prompt_token_ids": np.array([5, 6, 7], np.uint8), "priority": np.int64(0)}
    (output,) = llm.generate(prompt, theirs)
    assert [one.token_ids for one in output.outputs] == [
        one.token_ids for one in llm.generate([5, 6, 7], plain)[0].outputs
    ]
    beams = BeamSearchParams(beam_width=np.int64(2), max_tokens=np.int64(2), length_penalty=np.float32(1))
    assert llm.beam_search([5, 6], beams)[0].sequences
    assert PoolingParams(dimensions=np.int64(8), normalize=np.bool_(True)) == PoolingParams(
        dimensions=8, normalize=True
    )
    assert LoRARequest("a", np.int64(3), "folder").lora_int_id == 3
    assert StructuredOutputsParams(json_object=np.bool_(True)).constraint.kind == "json_object"


# ---- values that raise


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop_token_ids": np.array(5)},
        {"stop": np.array(5)},
        {"allowed_token_ids": np.array(5)},
        {"bad_words_token_ids": [np.array(5)]},
        {"bad_words": np.array(5)},
        {"logits_processors": np.array(5)},
        {"negative_prompt_token_ids": np.array(5), "guidance_scale": 2},
        {"temperature": np.array(0.5)},
        {"temperature": Wild()},
        {"stop": Wild()},
        {"stop": [Wild()]},
        {"stop_token_ids": [Wild()]},
        {"logit_bias": Wild()},
        {"extra_args": Wild()},
        {"structured_outputs": Wild()},
        {"max_tokens": Wild()},
        {"temprature": 1},
    ],
)
def test_no_parameter_shows_an_error_that_is_not_ours(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**wrong)
    assert caught.value.fix
    assert str(caught.value)


@pytest.mark.parametrize(
    "prompt",
    [
        np.array(5),
        {"prompt_token_ids": np.array(5)},
        {"prompt": np.array(5)},
        {"prompt": Wild()},
        {"prompt_token_ids": Wild()},
        {"prompt_token_ids": [5, Wild()]},
        {"prompt_token_ids": [5], "priority": Wild()},
        {"prompt_token_ids": [5], "cache_salt": Wild()},
        {"prompt_token_ids": [5], "request_id": Wild()},
        {"prompt_token_ids": [5], "multi_modal_data": [Wild()]},
        {Wild(): 5},
        Wild(),
        [5, Wild()],
        [[5], Wild()],
        5,
        None,
    ],
    ids=safe_repr,
)
def test_no_prompt_shows_an_error_that_is_not_ours(prompt: Any, engines: Engines, tiny: Tiny) -> None:
    llm = engines(tiny("llama"))
    for call in (llm.generate, lambda one: list(llm.stream(one))):
        with pytest.raises(RequestError) as caught:
            call(prompt)
        assert str(caught.value)
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("name", "value"),
    [("sampling_params", Wild()), ("sampling_params", [Wild()]), ("lora_request", Wild()), ("lora_request", [Wild()])],
    ids=safe_repr,
)
def test_no_option_shows_an_error_that_is_not_ours(name: str, value: Any, engines: Engines, tiny: Tiny) -> None:
    with pytest.raises(RequestError):
        engines(tiny("llama")).generate([5], **{name: value})


# ---- files nested too deeply

DEEP = "[" * 100_000


@pytest.fixture
def lora(engines: Engines, tiny: Tiny) -> LLM:
    return engines(tiny("llama"), **{"lora.name": "torch"})


@pytest.mark.parametrize(
    "content", [DEEP, '{"r": 4, "use_dora": ' * 1 + "[" * 900 + "]" * 900 + "}", '{"a":' * 100_000]
)
def test_an_adapter_nested_too_deeply_is_refused(content: str, lora: LLM, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(RequestError, match=r"adapter_config\.json"):
        lora.add_lora(LoRARequest("deep", 1, tmp_path))


@pytest.mark.parametrize("path", ["a\0b", "\0", Path("a\0b")])
def test_an_adapter_whose_path_has_a_nul_is_refused(path: Any, lora: LLM) -> None:
    with pytest.raises(RequestError, match="is no path"):
        lora.add_lora(LoRARequest("a", 1, path))
    with pytest.raises(SlotlineError):
        LLM(**{**DEFAULTS, "lora.name": "torch", "lora.adapters": {"a": "x\0y"}})


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "modules.json"]
)
def test_a_file_of_a_checkpoint_nested_too_deeply_is_a_typed_error(name: str, tmp_path: Path) -> None:
    parts = shutil.ignore_patterns("eagle*", "medusa*", "adapters")
    shutil.copytree(SMALL_MODEL, tmp_path / "model", ignore=parts)
    (tmp_path / "model" / name).write_text(DEEP)
    with pytest.raises(ModelError, match=r"nested too deeply|recursion|cannot be read"):
        LLM(tmp_path / "model", task="embed" if name == "modules.json" else "auto", memory="4MiB", max_model_len=64)


@pytest.mark.parametrize("head", ["eagle", "medusa"])
def test_a_draft_head_nested_too_deeply_is_a_typed_error(head: str, tmp_path: Path) -> None:
    shutil.copytree(SMALL_MODEL / head, tmp_path / head)
    (tmp_path / head / "config.json").write_text(DEEP)
    settings = {"drafter.name": head, "drafter.path": str(tmp_path / head), "memory": "4MiB", "max_model_len": 64}
    with pytest.raises(ModelError, match="nested too deeply"):
        LLM(**settings)
