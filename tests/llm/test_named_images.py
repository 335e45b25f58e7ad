"""Images by path, URL, data URI, array and tensor through the engine: the same text as for the opened image."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import GREEDY
from file_server import FileServer, file_server
from tiny_engines import DEFAULTS
from tiny_vision import greedy_reference, image

from slotline.core import LLM, AsyncLLM
from slotline.registry.errors import RequestError

pytest.importorskip("PIL", reason="image processors need Pillow")
pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = "def <image> main("


def test_however_an_image_is_given_the_text_is_transformers(
    tiny_vision_model: Callable[..., Path], engines: Callable[..., LLM], tmp_path: Path
) -> None:
    path = tiny_vision_model()
    llm = engines(path, **{"multimodal.urls": ("127.0.0.1",), "multimodal.url_networks": ("127.0.0.1/32",)})
    file = io.BytesIO()
    image(0).save(file, "PNG")
    (tmp_path / "a.png").write_bytes(data := file.getvalue())
    uri = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    with file_server({"/a.png": data}) as files:
        given = [
            image(0),
            tmp_path / "a.png",
            str(tmp_path / "a.png"),
            files.url("/a.png"),
            uri,
            data,
            np.asarray(image(0)),
            torch.from_numpy(np.asarray(image(0)).copy()),
        ]
        outputs = llm.generate([{"prompt": TEXT, "multi_modal_data": {"image": one}} for one in given], GREEDY)
        assert {tuple(output.outputs[0].token_ids) for output in outputs} == {
            tuple(greedy_reference(path, TEXT, [0], 20))
        }
        llm.tokenizer._hf.chat_template = (
            "{% for m in messages %}{% for p in m.content %}"
            "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endfor %}"
        )
        parts: list[dict[str, Any]] = [
            {"type": "image", "image": image(0)},
            {"type": "image", "path": str(tmp_path / "a.png")},
            {"type": "image", "url": files.url("/a.png")},
            {"type": "image", "base64": base64.b64encode(data).decode()},
            {"type": "image_url", "image_url": {"url": uri}},
            {"type": "image_url", "image_url": files.url("/a.png")},
        ]
        texts = [{"type": "text", "text": "def "}, {"type": "text", "text": " main("}]
        turns = [[{"role": "user", "content": [texts[0], part, texts[1]]}] for part in parts]
        chatted = llm.chat(turns, GREEDY)
        assert {tuple(output.outputs[0].token_ids) for output in chatted} == {tuple(outputs[0].outputs[0].token_ids)}


def test_a_slow_url_holds_up_no_other_request(
    tiny_vision_model: Callable[..., Path],
) -> None:
    path = tiny_vision_model()
    settings = {"multimodal.urls": ("127.0.0.1",), "multimodal.url_networks": ("127.0.0.1/32",)}

    async def answers(llm: AsyncLLM, files: FileServer) -> Any:
        async def tokens(given: Any) -> Any:
            prompt = {"prompt": TEXT, "multi_modal_data": {"image": given}}
            (output,) = [part async for part in llm.generate(prompt, GREEDY, output_kind="final_only")]
            return output.outputs[0].token_ids

        slow = asyncio.create_task(tokens(files.url("/slow")))
        while not files.asked:
            await asyncio.sleep(0.01)
        found = await tokens(image(0))
        assert not slow.done()
        files.ends.set()
        with pytest.raises(RequestError, match="an image cannot be read"):
            await slow
        return found

    with file_server({}) as files, closing(AsyncLLM(path, **{**DEFAULTS, **settings})) as llm:
        assert asyncio.run(answers(llm, files)) == greedy_reference(path, TEXT, [0], 20)
