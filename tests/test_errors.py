"""Four parts in every message, and no secret in any."""

import pickle

import pytest

from kfp_gate.errors import Broken, InvalidInput, Problem, Unavailable, hide_secrets


def test_a_message_has_found_expected_where_and_next_step_and_lists_twenty_problems() -> None:
    problems = [Problem(f"line {i}", "not five numbers") for i in range(23)]
    error = InvalidInput(
        "23 bad lines", expected="five numbers", where="a.txt", next_step="fix them", problems=problems
    )
    lines = str(error).splitlines()
    assert lines[0] == "found:     23 bad lines"
    assert lines[1] == "             line 0: not five numbers"
    assert lines[20:] == [
        "             line 19: not five numbers", "             ... and 3 more", "expected:  five numbers",
        "where:     a.txt", "next step: fix them",
    ]  # fmt: skip
    assert [e.exit_code for e in (InvalidInput, Unavailable, Broken)] == [2, 1, 1]


@pytest.mark.parametrize("kind", [InvalidInput, Unavailable, Broken])
def test_errors_cross_a_process_border_whole(kind: type[InvalidInput]) -> None:
    error = kind("f", expected="e", where="w", next_step="n", problems=[Problem("a", "b")])
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), back.problems) == (kind, str(error), error.problems)


def test_secrets_of_the_environment_never_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2")
    monkeypatch.setenv("SOME_API_KEY", "hunter2-longer")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/token")
    monkeypatch.setenv("TINY_TOKEN", "ab")
    monkeypatch.setenv("USE_SECRET_STORE", "true")
    error = Broken(
        "said hunter2", expected="hunter2", where="http://u:hunter2@h/p", next_step="ask hunter2-longer",
        problems=[Problem("hunter2", "https://u:other@h")],
    )  # fmt: skip
    assert "hunter2" not in str(error) + repr(error) + str(pickle.loads(pickle.dumps(error)))
    assert "-longer" not in str(error)  # the longer of two secrets is blanked out first
    assert "u:other" not in str(error)
    # A file's name is where to look, and two letters would blank out half the text.
    assert hide_secrets("see /var/run/token about ab, true") == "see /var/run/token about ab, true"
    # The step has the name of the cluster's Secret in its environment: whoever must create it needs to read it.
    monkeypatch.setenv("KFP_GATE_SECRET", "kfp-gate-credentials")
    assert hide_secrets("no Secret kfp-gate-credentials") == "no Secret kfp-gate-credentials"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:pass@host/p", "https://***@host/p"),
        ("s3://key:secret@bucket", "s3://***@bucket"),
        ("mail a@b.c and http://host/@x", "mail a@b.c and http://host/@x"),
        ("models:/NAME@champion", "models:/NAME@champion"),
    ],
)
def test_user_and_password_in_a_uri_are_blanked_out(text: str, shown: str) -> None:
    assert hide_secrets(text) == shown
