"""Failing batches are made small, and are written as files that fail by themselves, for as long as the bug is there."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from slotline.cli import main
from slotline.registry.errors import ConfigError
from slotline.testing.environments.attention_choice import choose
from slotline.testing.environments.attention_shapes import mixed
from slotline.testing.pytest_files import pytest_file, reproduces
from slotline.testing.shrinking import failing_batch, failure, one_line, shrink
from slotline.testing.subject import subject_of

BACKEND = """
from attrs import evolve
from slotline.testing.reference.attention import descriptor as right
from slotline.testing.reference.attention.backend import EagerAttention

class Faulty(EagerAttention):
    def plan(self, batch):
        self.ends = batch.query_start_loc_cpu[1:], batch.seq_lens_cpu
        return super().plan(batch)

    def forward(self, layer, query, key, value, cache, plan, out, sinks=None):
        lse = super().forward(layer, query, key, value, cache, plan, out, sinks)
        for end, length in zip(*self.ends):
            if length > 40 and layer.num_heads > layer.num_kv_heads and {condition}:
                out[end - 1] *= 1.5  # the last query of a longer request, where heads are in groups
        return lse

descriptor = evolve(right, name="faulty", factory=Faulty)
"""
KEY = "attention.mixed[dtype=float32,kv_dtype=float32,layout=NHD]"


@pytest.fixture
def faulty(tmp_path):
    """A file with a backend that is wrong behind 40 tokens."""
    file = tmp_path / "faulty.py"
    file.write_text(BACKEND.replace("{condition}", "end > 0"))
    return file


def test_a_batch_keeps_what_the_bug_needs_and_nothing_else(faulty):
    subject = subject_of(f"{faulty}:descriptor")
    case = shrink(subject, failing_batch(subject, KEY)).case
    assert case.requests == ((1, 41),)
    assert (case.num_heads, case.num_kv_heads, case.head_size, case.block_size) == (2, 1, 1, 1)
    assert case == case.friendly()


def test_the_file_fails_by_itself_until_the_bug_is_gone(faulty):
    subject = subject_of(f"{faulty}:descriptor")
    text = pytest_file(subject, shrink(subject, failing_batch(subject, KEY)).case, KEY)
    assert "slotline.testing" not in text
    assert reproduces(text)
    faulty.write_text(BACKEND.replace("{condition}", "False"))
    assert not reproduces(text)


@pytest.mark.parametrize(
    "features",
    [
        {},
        {"window": 20, "freed_before_window": True},
        {"soft_cap": 5.0, "sinks": True, "scale": 0.3},
        {"mla": True},
        {"attention_type": "encoder_only", "causal": False},
        {"layout": "HND", "dtype": torch.bfloat16, "kv_dtype": torch.bfloat16, "manager_blocks": 2},
    ],
    ids=["plain", "window", "cap-and-sinks", "latents", "encoder", "other-form"],
)
def test_features_and_hostile_surroundings_are_written_as_they_are(faulty, features):
    """The whole batch as a check makes it: the file's tensors are those of the suite."""
    subject = subject_of(f"{faulty}:descriptor")
    case = choose(subject, mixed, amplitude=2.0, **features)
    assert failure(subject, case)
    text = pytest_file(subject, case, KEY)
    assert reproduces(text)
    faulty.write_text(BACKEND.replace("{condition}", "False"))
    assert not reproduces(text)


@pytest.mark.slow
def test_the_line_runs_the_batch_again(faulty):
    subject = subject_of(f"{faulty}:descriptor")
    line = one_line(subject, shrink(subject, failing_batch(subject, KEY)))
    done = subprocess.run(
        line.replace("python", sys.executable, 1), shell=True, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Failed: output of request 0 (1 query tokens, 41 in all)" in done.stderr


def test_what_does_not_fail_cannot_be_made_small(faulty):
    subject = subject_of(f"{faulty}:descriptor")
    right = subject_of("slotline.testing.reference.attention:descriptor")
    with pytest.raises(ConfigError, match="passes"):
        failing_batch(right, KEY)
    with pytest.raises(ConfigError, match=r"there is no run 'attention\.nothing'"):
        failing_batch(subject, "attention.nothing")


@pytest.mark.slow
def test_the_command_writes_a_file_for_each_failing_check(faulty, tmp_path, capsys):
    folder = tmp_path / "failures"
    name = f"{faulty}:descriptor"
    assert main(["conform", name, "--check", "attention.mixed", "--shrink", str(folder)]) == 2
    assert "there is no folder" in capsys.readouterr().err
    folder.mkdir()
    assert main(["conform", name, "--check", "attention.mixed", "--shrink", str(folder)]) == 1
    assert "requests=((1, 41),)" in capsys.readouterr().out
    (file,) = folder.iterdir()
    assert subprocess.run([sys.executable, "-m", "pytest", "-q", str(file)], check=False).returncode == 1
