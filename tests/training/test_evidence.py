"""Evidence: exit codes, kinds, and no secrets."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gate.errors import Broken, InvalidInput, Unavailable
from kfp_gate.training.evidence import Terminated, describe, exit_code, kind_of, write_failure
from kfp_gate.training.group import PeerFailed
from kfp_gate.training.redaction import redact

PARTS = {"expected": "e", "where": "w", "next_step": "n"}


class OutOfMemoryError(RuntimeError):
    """Named as torch names the device's."""


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (InvalidInput("x", **PARTS), "user", 2),
        (Broken("x", **PARTS), "broken", 1),
        (Unavailable("x", **PARTS), "unavailable", 1),
        (PeerFailed(1, "training", "gone"), "peer", 1),
        (Terminated("SIGTERM"), "terminated", 143),
        (MemoryError(), "memory", 137),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate"), "memory", 137),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "memory", 137),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error."), "memory", 137),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), "memory", 137),
        (RuntimeError("shapes do not match"), "broken", 1),
    ],
)
def test_kinds_and_codes(error: BaseException, kind: str, code: int) -> None:
    assert (kind_of(error), exit_code(error)) == (kind, code)


def test_memory_is_found_behind_another_error() -> None:
    try:
        try:
            raise MemoryError
        except MemoryError as inner:
            raise Broken("validation failed", **PARTS) from inner
    except Broken as error:
        assert exit_code(error) == 137


secrets = st.text(st.characters(min_codepoint=48, max_codepoint=122, categories=["L", "N"]), min_size=8, max_size=40)


@given(secrets, st.sampled_from([
    "password={}", "AWS_SECRET_ACCESS_KEY: {}", '"api_key": "{}"', "Authorization: Bearer {}", "https://user:{}@host/x",
    "GET /b/k?X-Amz-Signature={}&x=1", "MLFLOW_TRACKING_TOKEN='{}'",
]))  # fmt: skip
def test_no_secret_is_left(secret: str, form: str) -> None:
    assert secret not in redact(f"line before\n{form.format(secret)}\nafter") or secret in "line before after user host"


def test_what_is_no_secret_stays() -> None:
    text = "epoch 3: token count 7, https://host/path?x=1, keys: a, b"
    assert redact(text) == text


def test_a_failure_file_has_what_a_reader_needs(tmp_path: Path) -> None:
    try:
        raise ValueError("wrong shape, password=hunter22")
    except ValueError as error:
        text = write_failure(tmp_path / "a" / "failure-rank3.json", rank=3, **describe(error))
    found = json.loads((tmp_path / "a" / "failure-rank3.json").read_text())
    assert found == json.loads(text)
    assert found["rank"] == 3 and "ValueError" in found["traceback"] and "hunter22" not in text


def test_a_full_disk_does_not_hide_the_failure() -> None:
    assert "boom" in write_failure(Path("/dev/full/x.json"), message="boom")
