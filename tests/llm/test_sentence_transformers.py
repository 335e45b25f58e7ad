"""Folders of sentence-transformers: embeddings and scores equal those of the library itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from pooling_folders import bert

from slotline.core import LLM, PoolingParams
from slotline.registry.errors import ModelError, RequestError

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = ["the cat sat on a mat", "a dog", "cat on the dog ."]
EAGER = {"attn_implementation": "eager"}
PROMPTS = {"query": "query : ", "passage": "passage : ", "plain": ""}
PAIR_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }} {% endif %}"
    "{% if m.role == 'query' %}query : {{ m.content }} {% elif m.role == 'document' %}"
    "passage : {{ m.content }} {% endif %}{% endfor %}yes"
)


@pytest.fixture(scope="module")
def st() -> Any:
    """The library and its modules, imported only if a test runs: it takes seconds."""
    import sentence_transformers
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
    from sentence_transformers.sentence_transformer.modules import Pooling

    modules = {"Dense": Dense, "Normalize": Normalize, "Transformer": Transformer, "LogitScore": LogitScore}
    modules |= {"MultiVectorMask": MultiVectorMask, "Pooling": Pooling}
    return SimpleNamespace(**vars(sentence_transformers), **modules)


def transformer(st: Any, path: Path) -> Any:
    """The library's own module on a tiny encoder."""
    return st.Transformer(str(bert(path, "BertModel")), model_kwargs=EAGER)


@pytest.fixture(scope="module")
def library(st: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of the library with linear layers, prompts and a default prompt, and its folder."""
    root = tmp_path_factory.mktemp("library")
    torch.manual_seed(1)
    modules = [
        transformer(st, root / "bert"),
        st.Pooling(64, pooling_mode="mean"),
        st.Dense(64, 96, activation_function=torch.nn.Tanh()),
        st.Dense(96, 32, bias=False, activation_function=torch.nn.Identity()),
        st.Normalize(),
    ]
    model = st.SentenceTransformer(modules=modules, prompts=PROMPTS, default_prompt_name="passage", device="cpu")
    model.save(str(root / "folder"), create_model_card=False)
    return model, root / "folder"


@pytest.fixture(scope="module")
def embedder(library: tuple[Any, Path]) -> LLM:
    return LLM(library[1], device="cpu")


def found(outputs: list[Any]) -> torch.Tensor:
    return torch.stack([one.outputs.data for one in outputs])


@pytest.mark.behaviour(35)
def test_embeddings_with_layers_and_prompts_equal_the_librarys(library: tuple[Any, Path], embedder: LLM) -> None:
    model = library[0]
    for name in (None, "query", "plain"):
        expected = model.encode(TEXTS, prompt_name=name, convert_to_tensor=True)
        torch.testing.assert_close(found(embedder.embed(TEXTS, prompt_name=name)), expected, atol=2e-5, rtol=0)
    ids = [embedder.tokenizer.encode(text) for text in TEXTS]  # as they are
    expected = model.encode(TEXTS, prompt="", convert_to_tensor=True)
    torch.testing.assert_close(found(embedder.embed(ids)), expected, atol=2e-5, rtol=0)
    for ask, says in (
        (lambda: embedder.embed(TEXTS, prompt_name="other"), "'other' is not known"),
        (lambda: embedder.embed(ids, prompt_name="query"), "with token ids"),
        (lambda: embedder.embed(TEXTS, PoolingParams(dimensions=8)), "dimensions=8 is not served"),
        (lambda: embedder.score("a", "b", instruction="which?"), "only a cross-encoder"),
    ):
        with pytest.raises(RequestError, match=says):
            ask()


@pytest.mark.behaviour(35)
def test_long_texts_are_cut_as_the_library_cuts_them(library: tuple[Any, Path], embedder: LLM) -> None:
    model, texts = library[0], [TEXTS[0] * 20, TEXTS[1]]
    whole, model.max_seq_length = model.max_seq_length, 7
    try:
        expected = model.encode(texts, prompt_name="plain", convert_to_tensor=True)
    finally:
        model.max_seq_length = whole
    params = PoolingParams(truncate_prompt_tokens=7)
    outputs = embedder.embed(texts, params, prompt_name="plain")
    torch.testing.assert_close(found(outputs), expected, atol=2e-5, rtol=0)
    assert [len(one.prompt_token_ids) for one in outputs] == [7, 4]
    assert embedder.embed([9, 8, 7, 6], PoolingParams(truncate_prompt_tokens=2))[0].prompt_token_ids == [7, 6]
    (cut,) = embedder.embed([np.array([9, 8, 7])], PoolingParams(truncate_prompt_tokens=2))
    assert cut.prompt_token_ids == [8, 7]
    with pytest.raises(RequestError, match=r"at most .* fit"):
        embedder.embed(texts)


@pytest.mark.behaviour(35)
def test_queries_and_documents_are_compared_with_their_prompts(library: tuple[Any, Path], embedder: LLM) -> None:
    model = library[0]
    expected = model.similarity(model.encode_query([TEXTS[0]]), model.encode_document(TEXTS))[0]
    scores = [one.outputs.score for one in embedder.score(TEXTS[0], TEXTS)]
    assert scores == pytest.approx(expected.tolist(), abs=2e-5)


@pytest.mark.slow
@pytest.mark.behaviour(35)
@pytest.mark.parametrize("similarity", ["dot", "euclidean", "manhattan"])
def test_the_folder_says_how_embeddings_are_compared_and_cut(
    similarity: str, st: Any, library: tuple[Any, Path], embedder: LLM, tmp_path: Path
) -> None:
    model = st.SentenceTransformer(
        modules=list(library[0])[:2],
        similarity_fn_name=similarity,
        truncate_dim=24,
        device="cpu",
    )
    model.save(str(tmp_path / "folder"), create_model_card=False)
    llm = LLM(tmp_path / "folder", device="cpu")
    expected = model.encode(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(found(llm.embed(TEXTS)), expected, atol=5e-5, rtol=0)
    whole = llm.embed(TEXTS, PoolingParams(dimensions=64))
    torch.testing.assert_close(
        found(whole), model.encode(TEXTS, truncate_dim=64, convert_to_tensor=True), atol=5e-5, rtol=0
    )
    scores = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS)]
    assert scores == pytest.approx(model.similarity(expected[:1], expected)[0].tolist(), abs=5e-3, rel=1e-4)


def test_weights_of_the_layers_are_read_again(library: tuple[Any, Path], embedder: LLM) -> None:
    before = found(embedder.embed(TEXTS))
    pooler = embedder.engine.runner.model.pooler
    pooler.dense._layers[0].weight.zero_()  # type: ignore[union-attr]
    assert not torch.equal(found(embedder.embed(TEXTS)), before)
    embedder.engine.reload_weights()
    assert torch.equal(found(embedder.embed(TEXTS)), before)


@pytest.mark.slow
@pytest.mark.behaviour(35)
def test_late_interaction_equals_the_librarys(st: Any, library: tuple[Any, Path], tmp_path: Path) -> None:
    torch.manual_seed(2)
    tokens_key = {"module_input_name": "token_embeddings"}
    modules = [
        library[0][0],
        st.Dense(64, 24, bias=False, activation_function=torch.nn.Identity(), **tokens_key),
        st.MultiVectorMask(skiplist_words=[".", ":"]),
        st.Normalize(**tokens_key),
    ]
    prompts = {"query": "query : ", "document": "passage : "}
    model = st.MultiVectorEncoder(modules=modules, prompts=prompts, device="cpu")
    model.save(str(tmp_path / "late"), create_model_card=False)
    llm = LLM(tmp_path / "late", device="cpu")
    queries, documents = model.encode_query(TEXTS[:1]), model.encode_document(TEXTS)
    (tokens,) = llm.encode(TEXTS[0], pooling_task="token_embed", prompt_name="query")
    torch.testing.assert_close(tokens.outputs.data, torch.as_tensor(queries[0]), atol=2e-5, rtol=0)
    scores = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS)]
    assert scores == pytest.approx(model.similarity(queries, documents)[0].tolist(), abs=1e-4)
    with pytest.raises(RequestError, match="a vector for each token, and none for the text"):
        llm.embed(TEXTS)
    wrong = ("query_expansion", {"strategy": "fixed"}, "masked tokens"), ("skiplist_tasks", ["query"], "skiplist")
    for key, value, says in wrong:
        settings = tmp_path / "late" / "2_MultiVectorMask" / "config.json"
        settings.write_text(json.dumps({key: value}))
        with pytest.raises(ModelError, match=says):
            LLM(tmp_path / "late", device="cpu")


@pytest.mark.slow
@pytest.mark.behaviour(35)
def test_a_decoder_scores_pairs_by_its_logits_as_the_library_does(st: Any, tmp_path: Path) -> None:
    path = tmp_path / "qwen3"
    bert(path, "Qwen3ForCausalLM", num_key_value_heads=2, head_dim=16, tie_word_embeddings=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    tokenizer.chat_template, tokenizer.padding_side = PAIR_TEMPLATE, "left"
    tokenizer.save_pretrained(path)
    module = st.Transformer(str(path), transformer_task="text-generation", model_kwargs=EAGER)
    model = st.CrossEncoder(
        modules=[module, st.LogitScore(16, 17)], prompts=PROMPTS, default_prompt_name="query", device="cpu"
    )
    model.save(str(tmp_path / "reranker"), create_model_card=False)
    llm = LLM(tmp_path / "reranker", device="cpu", max_num_batched_tokens=16, memory="4MiB")
    pairs = [(TEXTS[0], text) for text in TEXTS]
    scores = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS)]
    assert scores == pytest.approx(model.predict(pairs).tolist(), abs=2e-5)
    told = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS, instruction="cat")]
    assert told == pytest.approx(model.predict(pairs, prompt="cat").tolist(), abs=2e-5)
    assert not hasattr(llm.engine.runner.model.hf_model, "lm_head")  # type: ignore[attr-defined]


@pytest.mark.behaviour(35)
def test_a_cross_encoder_has_the_librarys_activation(st: Any, tmp_path: Path) -> None:
    path = bert(tmp_path / "bert", "BertForSequenceClassification", num_labels=1)
    model = st.CrossEncoder(str(path), activation_fn=torch.nn.Identity(), device="cpu")
    model.save(str(tmp_path / "folder"), create_model_card=False)
    pairs = [(TEXTS[0], text) for text in TEXTS]
    scores = [one.outputs.score for one in LLM(tmp_path / "folder", device="cpu").score(TEXTS[0], TEXTS)]
    assert scores == pytest.approx(model.predict(pairs).tolist(), abs=2e-5)


@pytest.mark.slow
@pytest.mark.behaviour(35)
def test_a_causal_embedder_with_instructions_comes_in_chunks(st: Any, tmp_path: Path) -> None:
    path = bert(tmp_path / "qwen3", "Qwen3Model", num_key_value_heads=2, head_dim=16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(path)
    module = st.Transformer(str(path), model_kwargs=EAGER)
    modules = [module, st.Pooling(64, pooling_mode="lasttoken"), st.Normalize()]
    prompts = {"query": "query : the cat sat on a mat ", "document": ""}
    model = st.SentenceTransformer(modules=modules, prompts=prompts, device="cpu")
    model.save(str(tmp_path / "embedding"), create_model_card=False)
    llm = LLM(tmp_path / "embedding", device="cpu", max_num_batched_tokens=8, block_size=4, memory="4MiB")
    queries = torch.as_tensor(model.encode_query(TEXTS))
    outputs = llm.embed(TEXTS, prompt_name="query")
    torch.testing.assert_close(found(outputs), queries, atol=2e-5, rtol=0)
    again = llm.embed(TEXTS, prompt_name="query")  # the instruction's blocks are cached
    torch.testing.assert_close(found(again), queries, atol=2e-5, rtol=0)
    assert all(one.metrics.num_cached_tokens >= 8 for one in again)
    expected = model.similarity(queries[:1], torch.as_tensor(model.encode_document(TEXTS)))[0]
    assert [one.outputs.score for one in llm.score(TEXTS[0], TEXTS)] == pytest.approx(expected.tolist(), abs=2e-5)
