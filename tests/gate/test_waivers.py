"""A waiver is bound to one criterion, one model and a day; anything else changes nothing and is said aloud."""

from datetime import date

import pytest

from kfp_gate.errors import InvalidInput
from kfp_gate.gate.verdict import Entry
from kfp_gate.gate.waivers import apply_waivers, parse_waivers

MODEL, OTHER = "a" * 64, "b" * 64
IDS = ("map50:min", "class/cone/map50:min", "class/tree/map50:min")
ENTRIES = (
    Entry("map50:min", "map50", "min", 0.5, "met", 0.6),
    Entry("class/cone/map50:min", "class/cone/map50", "min", 0.8, "missed", 0.7),
    Entry("class/tree/map50:min", "class/tree/map50", "min", 0.8, "insufficient", None, "3 of 10 instances"),
)


def waiver(**changes):
    one = {"criterion": IDS[1], "model": MODEL, "who": "A. Person", "why": "new labels come", "expires": "2030-01-31"}
    return {**one, **changes}


def apply(*waivers, today=date(2030, 1, 31), model=MODEL):
    return apply_waivers(ENTRIES, parse_waivers(list(waivers), IDS), model, today)


def test_a_valid_waiver_lets_one_entry_pass_until_the_end_of_its_day():
    done = apply(waiver(), waiver(criterion=IDS[2]))
    assert [e.state for e in done.entries] == ["met", "waived", "waived"]
    assert done.entries[1].waived_by == "A. Person"
    assert done.entries[1].waived_until == "2030-01-31"
    assert done.entries[2].reason == "insufficient (3 of 10 instances)"
    assert (done.refused, done.unused) == ((), ())


def test_expired_and_foreign_waivers_are_refused_aloud():
    done = apply(waiver(), waiver(criterion=IDS[2], model=OTHER), today=date(2030, 2, 1))
    assert [e.state for e in done.entries] == ["met", "missed", "insufficient"]
    assert done.refused == (
        "waiver of class/cone/map50:min by A. Person: expired on 2030-01-31",
        "waiver of class/tree/map50:min by A. Person: given for model bbbbbbbbbbbb, this one is aaaaaaaaaaaa",
    )


def test_a_waiver_that_was_not_needed_is_said():
    assert apply(waiver(criterion=IDS[0])).unused == ("waiver of map50:min by A. Person was not needed",)


def test_malformed_waivers_are_input_errors(snapshot):
    with pytest.raises(InvalidInput) as caught:
        parse_waivers(
            [
                waiver(criterion="class/cnoe/map50:min"),
                waiver(who="", why="  "),
                waiver(model="abc"),
                waiver(expires="next week"),
                waiver(until="2030-01-01"),
                "all",
                {},
            ],
            IDS,
        )
    snapshot("waiver_problems", str(caught.value))
    with pytest.raises(InvalidInput):
        parse_waivers({"criterion": IDS[0]}, IDS)
