"""Registered once, verified, and never without a verdict that passed."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kfp_gate.errors import Broken, InvalidInput
from kfp_gate.evaluation.model_folder import read_card
from kfp_gate.registry.alias import previous_tag, rollback
from kfp_gate.registry.fetch import fetch_champion, fetch_model
from kfp_gate.registry.register import register_model
from kfp_gate.registry.tracking import connect
from kfp_gate.registry.versions import UNVERIFIED_TAG, aliases, all_versions

Make = Callable[..., Path]


def test_a_model_that_passed_becomes_one_version_with_its_files_tags_and_alias(
    tracking_uri: str, make_model: Make, make_verdict: Make, tmp_path: Path
) -> None:
    model = make_model()
    verdict = make_verdict(model)
    report = tmp_path / "report.html"
    report.write_text("<p>report</p>")

    first = register_model(model, verdict, name="det", tracking_uri=tracking_uri, run_id="run-1", report=report)
    again = register_model(model, verdict, name="det", tracking_uri=tracking_uri, run_id="run-1", report=report)
    other = register_model(model, verdict, name="det", tracking_uri=tracking_uri, run_id="run-2", report=report)

    assert (first.version, first.created, first.alias, first.previous) == (1, True, "champion", None)
    assert [(r.version, r.created) for r in (again, other)] == [(1, False), (1, False)]
    tracking = connect(tracking_uri)
    (version,) = all_versions(tracking, "det")
    assert aliases(tracking, "det") == {"champion": 1}
    assert version.tags["sha256"] == first.sha256 == read_card(model).sha256
    assert version.tags["kfp_gate.pipeline_run"] == "run-1"
    assert version.tags["kfp_gate.training_run"] == "training-run"
    assert version.tags["kfp_gate.verdict_id"] == first.verdict_id
    assert version.tags["kfp_gate.licence"] == "AGPL-3.0"
    assert version.tags["metric.map50"] == "0.75"
    assert json.loads(version.tags["kfp_gate.versions"]) == {"ultralytics": "8.4.190"}
    # Every attempt's own logged models but the one in use are gone.
    assert len(tracking.client.search_logged_models([tracking.experiment_id])) == 1

    got = fetch_model("models:/det@champion", tmp_path / "got", tracking_uri=tracking_uri)
    assert {p.name for p in got.iterdir()} == {
        "model.pt", "model.json", "fingerprints.parquet", "verdict.json", "report.html",
    }  # fmt: skip
    assert (got / "model.pt").read_bytes() == b"weights"
    assert read_card(got).classes == read_card(model).classes


@pytest.mark.parametrize("how", ["refused", "foreign", "edited", "no criteria", "no verdict"])
def test_nothing_is_registered_without_a_verdict_that_let_exactly_this_model_pass(
    how: str, tracking_uri: str, make_model: Make, make_verdict: Make, tmp_path: Path
) -> None:
    """This is also what stands between a pipeline whose condition was made always true and the registry."""
    model = make_model()
    verdict = {
        "refused": lambda: make_verdict(model, passed=False),
        "foreign": lambda: make_verdict(make_model(b"other weights", "other")),
        "edited": lambda: _edited(make_verdict(model, passed=False)),
        "no criteria": lambda: make_verdict(model, entries=()),
        "no verdict": lambda: tmp_path / "missing.json",
    }[how]()
    with pytest.raises(Broken if how in ("edited", "no criteria") else InvalidInput) as caught:
        register_model(model, verdict, name="det", tracking_uri=tracking_uri, run_id="run-1")
    tracking = connect(tracking_uri)
    assert aliases(tracking, "det") is None
    assert tracking.client.search_logged_models([tracking.experiment_id]) == []
    expected = {
        "refused": "the gate refused this model",
        "foreign": "a verdict on the model with sha256",
        "edited": "passed with 1 blocking",
        "no criteria": "passed without any criterion",
        "no verdict": "not a verdict",
    }
    assert expected[how] in str(caught.value)


def test_a_model_of_a_probe_is_not_registered_whatever_its_verdict_says(
    tracking_uri: str, make_model: Make, make_verdict: Make
) -> None:
    model = make_model(settings={"probe_steps": 60})
    with pytest.raises(
        InvalidInput, match=r"(?s)a model of a probe \(probe_steps 60\).*train with probe_steps 0"
    ) as caught:
        register_model(model, make_verdict(model), name="det", tracking_uri=tracking_uri)
    assert str(model) in str(caught.value)
    assert aliases(connect(tracking_uri), "det") is None


def test_weights_changed_after_training_are_not_registered(
    tracking_uri: str, make_model: Make, make_verdict: Make
) -> None:
    model = make_model()
    verdict = make_verdict(model)
    (model / "model.pt").write_bytes(b"weights, cut")
    with pytest.raises(Broken, match="weights with sha256"):
        register_model(model, verdict, name="det", tracking_uri=tracking_uri)


def test_the_alias_moves_only_from_where_the_gate_saw_it(
    tracking_uri: str, make_model: Make, make_verdict: Make, tmp_path: Path
) -> None:
    one, two, three = (make_model(name.encode(), name) for name in ("one", "two", "three"))
    sha = {m: read_card(m).sha256 for m in (one, two, three)}
    where = {"name": "det", "tracking_uri": tracking_uri}
    register_model(one, make_verdict(one, name="v1"), **where)
    moved = register_model(two, make_verdict(two, name="v2", champion=sha[one]), **where)
    assert (moved.version, moved.previous) == (2, 1)

    for seen in (sha[one], ""):  # compared with the champion before last, or with none
        with pytest.raises(InvalidInput, match="version 3 is registered, the alias was not moved") as caught:
            register_model(three, make_verdict(three, name="v3", champion=seen), **where)
        assert "stands at version 2" in caught.value.found
    tracking = connect(tracking_uri)
    assert aliases(tracking, "det") == {"champion": 2}
    assert not [t for v in all_versions(tracking, "det") for t in v.tags if ".claim." in t]

    third = register_model(three, make_verdict(three, name="v3", champion=sha[two]), **where)
    assert (third.version, third.previous, third.created) == (3, 2, False)

    assert rollback(tracking, "det", "champion").version == 2
    assert rollback(tracking, "det", "champion").version == 1
    with pytest.raises(InvalidInput, match="no version before 1 is known"):
        rollback(tracking, "det", "champion")
    assert rollback(tracking, "det", "champion", to=3).version == 3
    champion = fetch_champion("det", "champion", tmp_path / "champion", tracking_uri=tracking_uri)
    assert champion is not None
    assert (champion.version, champion.sha256) == (3, sha[three])
    assert fetch_champion("det", "other", tmp_path / "champion", tracking_uri=tracking_uri) is None
    assert fetch_champion("nothing", "champion", tmp_path / "champion", tracking_uri=tracking_uri) is None


@pytest.mark.parametrize("own", [None, "http://127.0.0.1:9"])
def test_the_environment_is_left_as_it_was(
    own: str | None, tracking_uri: str, make_model: Make, make_verdict: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    if own:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", own)
    model = make_model()
    register_model(model, make_verdict(model), name="det", tracking_uri=tracking_uri)
    assert os.environ.get("MLFLOW_TRACKING_URI") == own


def test_no_alias_is_touched_where_none_is_asked_for(tracking_uri: str, make_model: Make, make_verdict: Make) -> None:
    model = make_model()
    done = register_model(model, make_verdict(model), name="det", alias="", tracking_uri=tracking_uri)
    assert (done.alias, done.previous) == ("", None)
    assert aliases(connect(tracking_uri), "det") == {}


def test_a_claim_of_a_step_that_died_blocks_for_two_minutes_and_no_longer(
    tracking_uri: str, make_model: Make, make_verdict: Make
) -> None:
    one, two = make_model(b"one", "one"), make_model(b"two", "two")
    where = {"name": "det", "tracking_uri": tracking_uri}
    register_model(one, make_verdict(one, name="v1"), alias="", **where)
    tracking = connect(tracking_uri)
    import time

    def claim(age: float) -> None:
        value = json.dumps({"from": "none", "time": time.time() - age})
        tracking.client.set_model_version_tag("det", "1", "kfp_gate.alias.champion.claim.dead", value)

    claim(age=60)
    with pytest.raises(InvalidInput, match="version 1 is moving alias 'champion' at the same time"):
        register_model(two, make_verdict(two, name="v2"), **where)
    claim(age=121)
    assert register_model(two, make_verdict(two, name="v2"), **where).alias == "champion"
    assert all_versions(tracking, "det")[1].tags[previous_tag("champion")] == "none"


def test_a_version_whose_files_were_replaced_is_marked_and_never_used_again(
    tracking_uri: str, make_model: Make, make_verdict: Make, tmp_path: Path
) -> None:
    model = make_model()
    where = {"name": "det", "tracking_uri": tracking_uri}
    register_model(model, make_verdict(model), **where)
    (stored,) = tmp_path.glob("mlflow-artifacts/**/model.pt")
    stored.write_bytes(b"replaced")

    with pytest.raises(Broken, match="weights with sha256"):
        fetch_model("models:/det@champion", tmp_path / "got", tracking_uri=tracking_uri)
    assert not (tmp_path / "got" / "model.pt").exists()
    with pytest.raises(Broken):
        rollback(connect(tracking_uri), "det", "champion", to=1)

    again = register_model(model, make_verdict(model, champion=read_card(model).sha256), **where)
    assert (again.version, again.created, again.previous) == (2, True, 1)
    first, second = all_versions(connect(tracking_uri), "det")
    assert "weights with sha256" in first.tags[UNVERIFIED_TAG]
    assert UNVERIFIED_TAG not in second.tags


@pytest.mark.parametrize(
    ("name", "alias", "said"),
    [
        ("a/b", "champion", "separate parts of a models:/ URI"),
        ("a:b", "champion", "holds :"),
        ("a@b", "champion", "starts an alias"),
        ("..", "champion", "reads as a path"),
        ("", "champion", "empty"),
        (" a", "champion", "blank at an end"),
        ("a\n", "champion", "unprintable"),
        ("x" * 257, "champion", "257 characters"),
        ("det", "prod.eu", "letters, digits"),
        ("det", "latest", "reserved"),
        ("det", "V3", "reserved"),
        ("det", "a\n", "letters, digits"),
    ],
)
def test_names_that_the_registry_refuses_are_told_before_anything_is_sent(
    name: str, alias: str, said: str, make_model: Make, make_verdict: Make
) -> None:
    model = make_model()
    with pytest.raises(InvalidInput, match=r"a name that the model registry refuses") as caught:
        register_model(model, make_verdict(model), name=name, alias=alias, tracking_uri="http://127.0.0.1:9")
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["원뿔 detector", "it's", 'say "x"', "50%", "a+b", "x" * 256, "name with  spaces"])
def test_unusual_names_that_the_registry_accepts_work_all_the_way(
    name: str, tracking_uri: str, make_model: Make, make_verdict: Make, tmp_path: Path
) -> None:
    model = make_model()
    where = {"name": name, "tracking_uri": tracking_uri}
    assert register_model(model, make_verdict(model), **where).version == 1
    assert register_model(model, make_verdict(model), **where).version == 1
    assert fetch_model(f"models:/{name}@champion", tmp_path / "got", tracking_uri=tracking_uri).is_dir()


def _edited(verdict: Path) -> Path:
    """A refused verdict in which somebody wrote `passed: true`."""
    values = json.loads(verdict.read_text(encoding="utf-8"))
    verdict.write_text(json.dumps({**values, "passed": True}), encoding="utf-8")
    return verdict
