"""Forms in which weights are loaded: of the checkpoint, random, and as the engine wrote them after its passes."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints
import torch
from safetensors.torch import load_file, save_file

from slotline.cli import main
from slotline.core import LLM, SamplingParams
from slotline.plugins.weight_formats.online import Online
from slotline.registry.errors import ConfigError, ModelError, NegotiationError, SlotlineError

Tiny = Callable[..., Path]
SETTINGS: dict[str, Any] = {
    "backend": "torch",
    "memory": "4MiB",
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "device": "cpu",
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=2)
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8]}, {"prompt_token_ids": [9, 3]}]


def answers(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY)]


def bare(folder: Path, target: Path) -> Path:
    """The folder without its weights."""
    return Path(shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors")))


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_row_126_random_weights_run_a_folder_without_weights(family: str, tiny: Tiny, tmp_path: Path) -> None:
    folder = bare(tiny(family), tmp_path / "bare")
    llm = LLM(model=str(folder), **SETTINGS, **{"load.format": "dummy"})
    assert answers(llm) == answers(LLM(model=str(folder), **SETTINGS, **{"load.format": "dummy"}))
    assert "random weights" in " ".join(llm.engine.notes)
    assert "load.format" in llm.plan.explain()
    assert "dummy" in llm.plan.explain()


def test_random_weights_are_finite_and_of_the_dtype(tiny: Tiny, tmp_path: Path) -> None:
    folder = bare(tiny("llama"), tmp_path / "bare")
    llm = LLM(model=str(folder), dtype="bfloat16", optimize=False, **SETTINGS, **{"load.format": "dummy"})
    parameters = dict(llm.engine.runner.model.hf_model.named_parameters())
    assert all(parameter.dtype == torch.bfloat16 for parameter in parameters.values())
    assert all(bool(parameter.isfinite().all()) for parameter in parameters.values())
    assert len({float(p.flatten()[0]) for p in parameters.values() if p.dim() == 2}) > 5  # not one block for all


def test_a_folder_without_weights_needs_the_dummy_format(tiny: Tiny, tmp_path: Path) -> None:
    folder = bare(tiny("llama"), tmp_path / "bare")
    with pytest.raises(ModelError, match="holds no weights"):
        LLM(model=str(folder), **SETTINGS)


def test_a_family_that_makes_no_random_weights_refuses(tiny_vision_model: Any) -> None:
    with pytest.raises(NegotiationError, match=r"load\.format = 'dummy': model family .* reads hf"):
        LLM(model=str(tiny_vision_model()), **SETTINGS, **{"load.format": "dummy"})


def test_an_unknown_format_is_a_wrong_setting(tiny: Tiny) -> None:
    with pytest.raises(SlotlineError, match=r"load\.format"):
        LLM(model=str(tiny("llama")), **SETTINGS, **{"load.format": "tensorizer"})


def saved(llm: LLM, folder: Path) -> Path:
    """The folder, with the engine's weights in it."""
    llm.save_weights(folder)
    return folder


def log_probabilities(llm: LLM) -> list[float]:
    found = llm.generate(PROMPTS, GREEDY)
    return [each.logprob for out in found for step in out.outputs[0].logprobs or () for each in step.values()]


@pytest.fixture(scope="module")
def llama(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama as it is after the passes. Tests copy it before they change anything."""
    return saved(LLM(model=str(tiny("llama")), **SETTINGS), tmp_path_factory.mktemp("saved") / "llama")


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"dtype": "bfloat16"}),
        ("llama", {"optimize": False}),
        ("llama_tied", {}),
        ("mixtral", {}),
        ("gpt_oss", {}),
        ("gemma3", {}),
    ],
)
def test_row_133_saved_weights_answer_as_the_checkpoint(
    family: str, settings: dict[str, Any], tiny: Tiny, tmp_path: Path
) -> None:
    first = LLM(model=str(tiny(family)), **{**SETTINGS, **settings})
    folder = saved(first, tmp_path / "saved")
    given = {"dtype": "auto"} | settings  # the folder says which, if every processor computes in it
    again = LLM(model=str(folder), **{**SETTINGS, **given})
    assert answers(again) == answers(first)
    torch.testing.assert_close(log_probabilities(again), log_probabilities(first), rtol=0, atol=2e-6)
    assert again.plan.dtype == first.plan.dtype
    assert {note for note in first.engine.notes if "lean loop" not in note} <= set(again.engine.notes)
    assert "weights saved after the passes" in again.engine.notes[0]


def test_passes_check_nothing_when_saved_weights_are_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slotline.plugins.model_families.passes import gated_mlp, lean_attention, lean_layer, rms_norm

    def refuse(*_: Any) -> Any:
        raise AssertionError("a check ran")

    for module, name in (
        (gated_mlp, "equal"),
        (rms_norm, "_equal_with"),
        (lean_attention, "_facts"),
        (lean_layer, "_is_equal"),
    ):
        assert callable(getattr(module, name))
        monkeypatch.setattr(module, name, refuse)
    notes = " ".join(LLM(model=str(llama), **SETTINGS).engine.notes)
    assert "fused activation and product into" in notes
    assert "lean loop over the layers, checked when the weights were saved" in notes
    assert "straight calls with residuals added inside the products in" in notes


def test_saved_weights_are_saved_again_and_reloaded_in_place(llama: Path, tiny: Tiny, tmp_path: Path) -> None:
    llm = LLM(model=str(llama), **SETTINGS, **{"load.format": "sharded"})
    wanted = answers(llm)
    again = saved(llm, tmp_path / "again")
    assert (again / "slotline_weights.json").read_bytes() == (llama / "slotline_weights.json").read_bytes()
    llm.update_config(model=tiny("llama", seed=1))
    llm.reload_weights()
    assert answers(llm) != wanted
    llm.update_config(model=again)
    llm.reload_weights()
    assert answers(llm) == wanted


def test_weights_are_divided_into_shards(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slotline.plugins.model_families import saved_weights

    monkeypatch.setattr(saved_weights, "SHARD_BYTES", 1 << 17)
    first = LLM(model=str(tiny("llama")), **SETTINGS)
    folder = saved(first, tmp_path / "saved")
    count = len(list(folder.glob("*.safetensors")))
    assert count > 3
    assert (folder / f"slotline-{count:05d}-of-{count:05d}.safetensors").is_file()
    assert answers(LLM(model=str(folder), **SETTINGS)) == answers(first)


def change(folder: Path, **values: Any) -> None:
    """Change the index of a saved folder. Values of `fits` are joined to those that are there."""
    file = folder / "slotline_weights.json"
    content = json.loads(file.read_text())
    values["fits"] = content["fits"] | values.get("fits", {})
    file.write_text(json.dumps(content | values))


def cut(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def rename_a_weight(folder: Path) -> None:
    content = json.loads((folder / "slotline_weights.json").read_text())
    weights = dict(content["weights"])
    weights["model.norm.wait"] = weights.pop("model.norm.weight")
    change(folder, weights=weights)


def other_config(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(file.read_text().replace("1e-06", "1e-05") + " ")


def rewrite(folder: Path, name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change a tensor of a folder with one file of weights, and the size in the index if there is one."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    save_file(tensors | {name: edit(tensors.get(name, torch.empty(0)))}, file, metadata={"format": "pt"})
    if (folder / "slotline_weights.json").exists():
        change(folder, files={file.name: file.stat().st_size})


def break_header(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(b"\xff" * 16 + content[16:])


def test_scales_of_the_cache_are_saved(tiny: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "scaled"))
    rewrite(folder, "model.layers.0.self_attn.k_scale", lambda _: torch.tensor(0.5))
    first = LLM(model=str(folder), **SETTINGS)
    again = LLM(model=str(saved(first, tmp_path / "saved")), **SETTINGS)
    scales = [llm.engine.runner.model.facts.kv_scales for llm in (first, again)]
    assert scales == [{0: (0.5, 1.0)}] * 2


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (other_config, "config.json is not the one that the weights in .* were saved with"),
        (lambda f: change(f, fits={"slotline": "0.0.1"}), r'saved with slotline = "0\.0\.1", and here it is'),
        (lambda f: change(f, fits={"transformers": "4.0"}), 'saved with transformers = "4.0"(.|\n)*fix: install trans'),
        (lambda f: change(f, fits={"device": "cuda"}), 'saved with device = "cuda", and here it is "cpu"'),
        (lambda f: change(f, format=9), "has format 9, and this version reads 1"),
        (lambda f: change(f, files=[]), "is no index of saved weights"),
        (
            lambda f: change(f, weights={"a": "../a.safetensors"}),
            r"names the shard '\.\./a\.safetensors', which it does",
        ),
        (lambda f: change(f, answers=[True]), "saved after other passes than those that this version makes"),
        (lambda f: change(f, dtypes={"model.norm.weight": "save"}), "names 'save', which is no dtype"),
        (lambda f: rewrite(f, "model.norm.weight", lambda t: t[None]), r"model\.norm\.weight in .* is \[1, 64\] of"),
        (
            lambda f: rewrite(f, "model.norm.weight", lambda t: t.half()),
            r"is \[64\] of torch\.float16, and the",
        ),
        (break_header, "00001-of-00001.safetensors cannot be read"),
        (rename_a_weight, r"not those of the model after its passes: model\.norm\.wait, model\.norm\.weight"),
        (lambda f: next(f.glob("*.safetensors")).unlink(), "the shard .*00001-of-00001.safetensors is missing"),
        (cut, r"has \d+ bytes, and was saved with \d+"),
        (lambda f: (f / "slotline_weights.json").write_text("{"), "slotline_weights.json cannot be read as JSON"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    spoil: Callable[[Path], Any], said: str, llama: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "spoilt"))
    spoil(folder)
    with pytest.raises(ModelError, match=said) as error:
        LLM(model=str(folder), **SETTINGS)
    assert error.value.fix


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"dtype": "bfloat16"},
            'saved with dtype = "float32"(.|\n)*fix: set dtype = "float32"',
        ),
        ({"optimize": False}, "saved with optimize = true, and here it is false"),
        ({"load.format": "hf"}, "load.format = 'hf', and .* holds weights that `LLM.save_weights` wrote"),
    ],
)
def test_settings_that_saved_weights_do_not_fit_are_refused(settings: dict[str, Any], said: str, llama: Path) -> None:
    with pytest.raises(ModelError, match=said):
        LLM(model=str(llama), **SETTINGS, **settings)


def test_the_sharded_format_needs_a_folder_of_its_own(tiny: Tiny) -> None:
    with pytest.raises(ModelError, match=r"load\.format = 'sharded', and .* has no slotline_weights\.json"):
        LLM(model=str(tiny("llama")), **SETTINGS, **{"load.format": "sharded"})


@pytest.mark.parametrize(("family", "method"), [("llama_tied", "int8"), ("mixtral", "int4")])
def test_weights_that_were_quantized_at_load_are_saved_as_they_are(
    family: str, method: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SETTINGS, "weights.linear": "dequantized"}
    first = LLM(model=str(tiny(family)), **settings, **{"weights.quantize": method})
    folder = saved(first, tmp_path / "saved")

    def refuse(*_: Any) -> Any:
        raise AssertionError("weights are quantized again")

    monkeypatch.setattr(Online, "quantize", refuse)
    again = LLM(model=str(folder), **settings)
    assert answers(again) == answers(first)
    torch.testing.assert_close(log_probabilities(again), log_probabilities(first), rtol=0, atol=2e-6)
    assert "reads the weights: int8" in again.plan.weight_format or method == "int4"
    more = {"weights.quantize": method, "weights.activation": "none"}
    copy = LLM(model=str(saved(again, tmp_path / "copy")), **settings, **more)
    assert answers(copy) == answers(first)
    with pytest.raises(NegotiationError, match=f"the weights in .* were saved as '{method}'"):
        LLM(model=str(folder), **settings, **{"weights.quantize": "fp8"})


def test_weights_saved_in_full_precision_are_not_quantized(llama: Path) -> None:
    with pytest.raises(NegotiationError, match="were saved in full precision, and are read as they are"):
        LLM(model=str(llama), **SETTINGS, **{"weights.quantize": "int8"})


def test_random_weights_are_quantized_as_a_checkpoint_s(tiny: Tiny, tmp_path: Path) -> None:
    folder = bare(tiny("llama"), tmp_path / "bare")
    settings = {**SETTINGS, "load.format": "dummy", "weights.linear": "dequantized"}
    plain, quantized = (LLM(model=str(folder), **settings, **{"weights.quantize": q}) for q in ("", "int8"))
    assert "quantizes the weights at load: int8" in quantized.plan.weight_format
    difference = torch.tensor(log_probabilities(quantized)) - torch.tensor(log_probabilities(plain))
    assert 0 < float(difference.abs().max()) < 0.1


def test_models_that_cannot_be_saved_say_so(tiny: Tiny, tmp_path: Path) -> None:
    form, quantized = quantized_checkpoints.FORMS["GPTQ"], tmp_path / "gptq"
    quantized_checkpoints.write(form, tiny("llama"), quantized, tmp_path / "meant")
    linear = {"weights.linear": "dequantized"}
    for folder, settings, said in (
        (quantized, linear, "they are quantized in the checkpoint(.|\n)*fix: use the checkpoint itself"),
        (tiny("llama"), {"task": "embed"}, 'the task is embed(.|\n)*fix: set task = "generate"'),
        (tiny("llama"), {"parallel.pipeline": ["cpu", "cpu"]}, "they are divided over pipeline stages"),
    ):
        llm = LLM(model=str(folder), **SETTINGS, **settings)
        with pytest.raises(ModelError, match=said):
            llm.save_weights(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()


def test_saved_weights_are_no_drafter_s(llama: Path, tiny: Tiny) -> None:
    drafter = {"drafter.name": "draft_model", "drafter.path": str(llama)}
    with pytest.raises(ModelError, match="which are read only as an engine's model"):
        LLM(model=str(tiny("llama")), **SETTINGS, **drafter)


def test_a_folder_that_is_in_use_is_not_written_to(llama: Path, tmp_path: Path) -> None:
    llm = LLM(model=str(llama), **SETTINGS)
    with pytest.raises(ModelError, match="is there already"):
        llm.save_weights(llama)
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="weights cannot be saved in"):
        llm.save_weights(tmp_path / "file" / "folder")
    with pytest.raises(ConfigError, match="folder=7 is no path"):
        llm.save_weights(7)  # type: ignore[arg-type]


def test_a_disk_without_room_leaves_nothing_behind(llama: Path, tmp_path: Path) -> None:
    llm = LLM(model=str(llama), **SETTINGS)
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(ModelError, match=r"cannot be saved in .*too large(.|\n)*fix: free some space"):
            llm.save_weights(tmp_path / "saved")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())


def test_the_command_line_saves_weights(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = (f"model={tiny('llama')}", "cache.memory=4MiB", "attention.backend=torch", "device=cpu")
    assert main(["save-weights", *(f"--set={key}" for key in keys), str(tmp_path / "saved")]) == 0
    assert "MiB of weights in" in capsys.readouterr().err
    assert answers(LLM(model=str(tmp_path / "saved"), **SETTINGS)) == answers(LLM(model=str(tiny("llama")), **SETTINGS))
