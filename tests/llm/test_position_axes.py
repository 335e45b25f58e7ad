"""Images with positions on three axes through the whole engine: transformers' own text, however steps are cut."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_grids
import tiny_vision
import torch
from arena import Arena
from cli_cases import pretend_project_installed
from devices import tables_on_a_device
from engine_driver import GREEDY, recorded, recorded_items
from repository import SUPPORT, TESTS
from thread_ranks import ThreadRanks
from tiny_engines import DEFAULTS
from tiny_grids import IMAGE, VIDEO, greedy_reference, image, video
from transformers.utils import is_torchvision_available

from slotline.builder import engine_builder
from slotline.core import LLM
from slotline.core.device.cpu_ops import CpuOps
from slotline.registry.errors import NegotiationError, RequestError

pytest.importorskip("PIL", reason="image processors need Pillow")
pytestmark = pytest.mark.usefixtures("one_thread")

Engines = Callable[..., LLM]
Asked = Sequence[tuple[str, Sequence[int]]]

PROMPTS: Asked = [
    (f"def {IMAGE} main(", [0]),
    (f"class Row {IMAGE}{IMAGE} pass", [1, 0]),
    ("import os, sys, json", []),
    (f"The quick {IMAGE} jumps over the {IMAGE} word word word", [2, 2]),
    (IMAGE, [3]),
]
KIB_PER_TOKEN = 4 * 2 * (16 + 16) * 4 // 1024


@pytest.fixture(scope="module")
def tiny_grid(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root, made = tmp_path_factory.mktemp("grids"), dict[str, Path]()

    def get(name: str = tiny_grids.VARIANTS[0]) -> Path:
        if name not in made:
            made[name] = tiny_grids.build(name, root / name)
        return made[name]

    return get


Grid = Callable[..., Path]


def generate(llm: LLM, asked: Asked) -> list[Any]:
    prompts = [
        {"prompt": text, "multi_modal_data": {"image": [image(seed) for seed in seeds]}} for text, seeds in asked
    ]
    return llm.generate(prompts, GREEDY, progress=False)


def tokens(outputs: Sequence[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def expected(path: Path, asked: Asked) -> list[list[int]]:
    return [greedy_reference(path, text, seeds, 20) for text, seeds in asked]


@pytest.mark.spread(1, slow=4)
@pytest.mark.parametrize(("backend", "optimize"), [("torch", False), ("cpu", True)])
@pytest.mark.parametrize("name", tiny_grids.VARIANTS)
@pytest.mark.behaviour(12, 25, 65, 66)
def test_a_batch_of_images_and_text_gives_transformers_tokens(
    name: str, backend: str, optimize: bool, tiny_grid: Grid, engines: Engines
) -> None:
    path = tiny_grid(name)
    llm = engines(path, backend=backend, optimize=optimize)
    assert tokens(generate(llm, PROMPTS)) == expected(path, PROMPTS)


def test_the_text_depends_on_the_positions_of_rows_and_columns(
    tiny_grid: Grid, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_grid()
    llm = engines(path, **{"cache.prefix_caching": False})
    model: Any = llm.engine.runner.model
    forward = model.forward

    def flat(*args: Any, position_offsets: torch.Tensor, **rest: Any) -> Any:
        return forward(*args, position_offsets=torch.zeros_like(position_offsets), **rest)

    monkeypatch.setattr(model, "forward", flat)
    found, wanted = tokens(generate(llm, PROMPTS)), expected(path, PROMPTS)
    assert [a == b for a, b in zip(found, wanted, strict=True)] == [False, False, True, False, False]


def test_the_text_depends_on_what_the_first_layers_add(
    tiny_grid: Grid, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_grid("qwen3_vl")
    llm = engines(path, **{"cache.prefix_caching": False})
    model: Any = llm.engine.runner.model
    forward = model.forward

    def plain(*args: Any, layer_embeds: Any = None, **rest: Any) -> Any:
        return forward(*args, **rest)

    monkeypatch.setattr(model, "forward", plain)
    found, wanted = tokens(generate(llm, PROMPTS)), expected(path, PROMPTS)
    assert [a == b for a, b in zip(found[:4], wanted[:4], strict=True)] == [False, False, True, False]


@pytest.mark.spread(1)
@pytest.mark.parametrize(("name", "asynchronous"), [("qwen2_vl", False), ("qwen3_vl", True)])
@pytest.mark.behaviour(25, 66)
def test_chunks_that_end_inside_images_give_transformers_tokens(
    name: str, asynchronous: bool, tiny_grid: Grid, engines: Engines
) -> None:
    path = tiny_grid(name)
    settings = {"scheduler.max_batched_tokens": 5, "cache.prefix_caching": False, "scheduler.async": asynchronous}
    llm = engines(path, block_size=4, **settings)
    with recorded(llm) as steps, recorded_items(llm) as items:
        assert tokens(generate(llm, PROMPTS)) == expected(path, PROMPTS)
    assert any(
        feature.start < end < feature.end
        for step, of_step in zip(steps, items, strict=True)
        for row, feature in of_step.features
        for end in [int((step.num_computed + step.num_scheduled)[step.rows.tolist().index(row)])]
    )


@pytest.mark.behaviour(66)
def test_drafts_leave_the_text_as_it_is(tiny_grid: Grid, engines: Engines) -> None:
    path = tiny_grid()
    llm = engines(path, **{"drafter.name": "ngram", "scheduler.max_batched_tokens": 12})
    assert tokens(generate(llm, PROMPTS)) == expected(path, PROMPTS)
    counts = llm.engine.extension("drafts").counts
    assert 0 < counts.accepted < counts.proposed


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_5"])
@pytest.mark.behaviour(66)
def test_rejected_drafts_of_a_step_in_flight_move_no_positions(
    name: str, tiny_grid: Grid, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_grid(name)
    settings: dict[str, Any] = {"drafter.name": "foreseeing", "drafter.tokens": 3, "drafter.adaptive": False}
    settings |= {"plugins.inline": (f"{SUPPORT / 'device_drafter.py'}:Foreseeing",), "scheduler.async": True}
    llm = engines(path, **settings, **{"scheduler.max_batched_tokens": 12})
    prompts = [output.prompt_token_ids for output in generate(llm, PROMPTS)]
    wanted, drafts = expected(path, PROMPTS), llm.engine.extension("drafts")
    texts = {tuple(prompt): prompt + text for prompt, text in zip(prompts, wanted, strict=True)}
    monkeypatch.setattr(type(drafts.drafting.drafter), "texts", texts)
    before = drafts.counts.accepted
    assert tokens(generate(llm, PROMPTS)) == wanted
    assert drafts.counts.accepted - before > 20
    assert drafts.counts.accepted < drafts.counts.proposed


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_prefixes_with_the_same_image_are_shared(name: str, tiny_grid: Grid, engines: Engines) -> None:
    path = tiny_grid(name)
    llm = engines(path, block_size=4)
    asked = [(f"a {IMAGE} b", [1]), (f"a {IMAGE} quite another text behind it", [1]), (f"a {IMAGE} b", [2])]
    outputs = [generate(llm, [one])[0] for one in asked]
    assert tokens(outputs) == expected(path, asked)
    cached = [output.metrics.num_cached_tokens for output in outputs]
    assert cached[1] > 6 > cached[2]  # a prefix that ends inside the image, or behind it


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("name", "prefix_caching", "asynchronous"), [("qwen2_vl", False, False), ("qwen3_vl", True, True)]
)
@pytest.mark.behaviour(25)
def test_preempted_requests_give_transformers_tokens(
    name: str, prefix_caching: bool, asynchronous: bool, tiny_grid: Grid, engines: Engines
) -> None:
    path = tiny_grid(name)
    settings = {"cache.prefix_caching": prefix_caching, "scheduler.async": asynchronous}
    settings |= {"scheduler.max_batched_tokens": 11}
    llm = engines(path, block_size=4, memory=f"{72 * KIB_PER_TOKEN}KiB", **settings)
    outputs = generate(llm, PROMPTS)
    assert tokens(outputs) == expected(path, PROMPTS)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0


@pytest.mark.spread(1)
@pytest.mark.parametrize("lean", [False, True])
def test_stages_give_transformers_tokens(lean: bool, tiny_grid: Grid, engines: Engines) -> None:
    path = tiny_grid("qwen3_vl")
    settings = {"parallel.pipeline": ("cpu", "cpu"), "scheduler.async": True}
    llm = engines(path, **settings, **{"model_family.transformers_vision.lean": lean})
    assert tokens(generate(llm, PROMPTS)) == expected(path, PROMPTS)


@pytest.mark.spread(1)
@pytest.mark.parametrize(("name", "asynchronous"), [("qwen3_5", False), ("qwen3_5_moe", True)])
@pytest.mark.behaviour(12, 66)
def test_layers_with_states_see_images(
    name: str, asynchronous: bool, tiny_grid: Grid, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_grid(name)
    settings = {"scheduler.max_batched_tokens": 7, "scheduler.async": asynchronous, "memory": "16MiB"}
    llm = engines(path, block_size=4, **settings)
    assert llm.engine.runner.model.facts.state_layers
    assert tokens(generate(llm, PROMPTS)) == expected(path, PROMPTS)
    step, count = llm.engine.step, iter(range(1000))

    def preempting() -> Any:
        if next(count) in (3, 6, 12):
            llm.engine.scheduler._preempt_last()
        return step()

    monkeypatch.setattr(llm.engine, "step", preempting)
    outputs = generate(llm, PROMPTS)
    assert tokens(outputs) == expected(path, PROMPTS)
    assert sum(output.metrics.num_preemptions for output in outputs) == 3
    assert any(output.metrics.num_cached_tokens for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "divided"), [("qwen2_vl", False), ("qwen3_vl", True)])
def test_ranks_give_transformers_tokens(name: str, divided: bool, tiny_grid: Grid) -> None:
    path = tiny_grid(name)
    ranks = ThreadRanks(path, **{**DEFAULTS, "scheduler.max_batched_tokens": 12, "parallel.sequence": divided})
    assert ranks.same(lambda llm: tokens(generate(llm, PROMPTS))) == expected(path, PROMPTS)
    ranks.close()


@pytest.mark.slow
def test_stages_of_ranks_give_transformers_tokens(tiny_grid: Grid) -> None:
    path = tiny_grid()
    ranks = ThreadRanks(path, tensor=1, pipeline=2, **DEFAULTS)
    assert ranks.same(lambda llm: tokens(generate(llm, PROMPTS))) == expected(path, PROMPTS)
    ranks.close()
    with pytest.raises(NegotiationError, match="adds embeddings of items behind layers"):
        ThreadRanks(tiny_grid("qwen3_vl"), tensor=1, pipeline=2, **DEFAULTS)


VIDEOS: Sequence[tuple[str, Sequence[int], Sequence[int]]] = [
    (f"a {VIDEO} b", [], [0]),
    (f"a {VIDEO} b {IMAGE} and {VIDEO}", [1], [1, 0]),
    (f"{IMAGE}{VIDEO}", [0], [2]),
    ("import os, sys, json", [], []),
]


@pytest.mark.spread(2, slow=2)
@pytest.mark.parametrize("name", tiny_grids.VARIANTS)
@pytest.mark.behaviour(65)
def test_videos_beside_images_give_transformers_tokens(name: str, tiny_grid: Grid, engines: Engines) -> None:
    path = tiny_grid(name)
    llm = engines(path, block_size=4, memory="16MiB", max_model_len=192, **{"scheduler.max_batched_tokens": 13})
    prompts = [
        {"prompt": text, "multi_modal_data": {"image": [image(i) for i in images], "video": [video(i) for i in videos]}}
        for text, images, videos in VIDEOS
    ]
    wanted = [greedy_reference(path, text, images, 20, videos) for text, images, videos in VIDEOS]
    for _ in range(2):  # the second time from cached blocks
        assert tokens(llm.generate(prompts, GREEDY, progress=False)) == wanted


def test_the_text_depends_on_the_times_of_a_video(tiny_grid: Grid, engines: Engines) -> None:
    llm = engines(tiny_grid("qwen2_5_vl"), max_model_len=96)
    prompts = [
        {"prompt": f"a {VIDEO} b", "multi_modal_data": {"video": {**video(1), "fps": fps}}} for fps in (0.1, 2.0, 2.0)
    ]
    slow, fast, again = tokens(llm.generate(prompts, GREEDY, progress=False))
    assert slow != fast
    assert fast == again


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("cat.mp4", "No such file"),
        ({**video(0), "fps": 0}, "inf seconds|cannot be read"),
        ({"pixel_values_videos": video(0)["pixel_values_videos"], "video_grid_thw": [[2, 4, 6]]}, "has no fps"),
        ({**video(0), "video_grid_thw": [[2, 4, 8]]}, "do not fit video_grid_thw"),
        ({**video(0), "video_grid_thw": [[2, 3, 8]]}, "do not fit video_grid_thw"),
        ({"pixel_values_videos": torch.zeros(1), "fps": 1}, "cannot be read"),
    ],
)
def test_what_is_no_video_is_refused(item: Any, message: str, tiny_grid: Grid, engines: Engines) -> None:
    llm = engines(tiny_grid("qwen2_5_vl"), max_model_len=96)
    with pytest.raises(RequestError, match=message):
        llm.generate({"prompt": VIDEO, "multi_modal_data": {"video": item}}, GREEDY, progress=False)


def test_frames_go_through_the_video_processor(tiny_grid: Grid, engines: Engines) -> None:
    llm = engines(tiny_grid("qwen2_5_vl"), max_model_len=96)
    frames = [np.asarray(tiny_vision.image(i, 16, 24)) for i in range(3)]
    asked = {"prompt": VIDEO, "multi_modal_data": {"video": {"frames": frames, "fps": 2}}}
    if not is_torchvision_available():
        with pytest.raises(RequestError, match="need torchvision"):
            llm.generate(asked, GREEDY, progress=False)
        return
    (output,) = llm.generate(asked, GREEDY, progress=False)
    assert output.prompt_token_ids.count(llm.engine.extension("multimodal").reader.placeholders["video"]) == 2 * 2 * 3


def test_captured_steps_read_offsets_at_one_address(
    tiny_grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_device"]:
        monkeypatch.delitem(sys.modules, name)
    pretend_project_installed(monkeypatch, tmp_path / "site", TESTS / "third_party" / "acme-device")
    path = tiny_grid()
    settings: dict[str, Any] = {"graphs.sizes": (1, 2, 4, 8), "observability.check_integrity": True}
    llm = LLM(path, device="acme:0", dtype="float32", memory="16MiB", max_model_len=64, max_num_seqs=4, **settings)
    graphs = llm.engine.graphs
    assert graphs is not None
    replayed, original = list[int](), graphs.replay

    def remember(inputs: Any) -> Any:
        replayed.append(inputs.num_tokens)
        return original(inputs)

    monkeypatch.setattr(graphs, "replay", remember)
    assert tokens(generate(llm, PROMPTS)) == expected(path, PROMPTS)
    assert len(replayed) > 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="an engine on a CPU runs the kernel interpreted")
@pytest.mark.behaviour(48, 66)
def test_repeated_steps_keep_the_distance_behind_an_image(tiny_grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the device goes on by a kernel of Triton's")
    from slotline.backends.cuda.triton_ops import TritonOps

    path, asked = tiny_grid(), [PROMPTS[0], PROMPTS[2]]
    with monkeypatch.context() as patched:  # a CPU that stages as a GPU does
        patched.setattr(engine_builder, "transfer_buffer_for", Arena)
        patched.setattr(engine_builder, "tables_for", tables_on_a_device)
        patched.setattr(CpuOps, "advance_decode_batch", TritonOps.advance_decode_batch)
        llm = LLM(path, **{**DEFAULTS, "block_size": 4, "scheduler.async": True})
    repeated, steps = llm.engine.extension("repeated_steps").path, list[bool]()
    original = repeated.next

    def counted(*given: Any) -> Any:
        found = original(*given)
        steps.append(found is not None)
        return found

    monkeypatch.setattr(repeated, "next", counted)
    assert tokens(generate(llm, asked)) == expected(path, asked)
    assert sum(steps) > 10
    model: Any = llm.engine.runner.model
    found = model.axis_positions
    monkeypatch.setattr(model, "axis_positions", lambda *given: (found(*given)[0], 0))
    llm.engine.scheduler.cache.reset()
    same = [a == b for a, b in zip(tokens(generate(llm, asked)), expected(path, asked), strict=True)]
    assert same == [False, True]  # of text alone the distance is zero


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_5"])
@pytest.mark.behaviour(25, 48)
def test_text_alone_has_one_position_on_all_axes(
    name: str, tiny_grid: Grid, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = tiny_grid(name), PROMPTS[2:3]
    llm = engines(path, **{"cache.prefix_caching": False})
    model: Any = llm.engine.runner.model
    forward, offsets = model.forward, list[torch.Tensor]()

    def on_one_axis(*args: Any, position_offsets: torch.Tensor, **rest: Any) -> Any:
        offsets.append(position_offsets.clone())
        return forward(*args, **rest)

    generate(llm, PROMPTS[:2])  # whose offsets are no others' in the same rows
    monkeypatch.setattr(model, "forward", on_one_axis)
    assert tokens(generate(llm, asked)) == expected(path, asked)
    assert len(offsets) >= 20
    assert not any(one.any() for one in offsets)
    assert {len(one) for one in offsets} == {3}


def test_images_without_a_token_between_them_are_refused(tiny_grid: Grid, engines: Engines) -> None:
    llm = engines(tiny_grid())
    with pytest.raises(RequestError, match="2 images are in 1 places") as caught:
        generate(llm, [("a <|image_pad|><|image_pad|> b", [0, 1])])
    assert "vision_start" in str(caught.value.fix)
    with pytest.raises(RequestError, match="multi_modal_data has audio; this model takes image, video"):
        llm.generate({"prompt": VIDEO, "multi_modal_data": {"audio": video(0)}}, GREEDY)


def test_microbatches_are_refused(tiny_grid: Grid, engines: Engines) -> None:
    with pytest.raises(NegotiationError, match="positions on several axes"):
        engines(tiny_grid(), **{"scheduler.microbatches": 2})
