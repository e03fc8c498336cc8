"""Ranks as local processes: started, followed, stopped together, explained."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from kfp_gate.errors import Broken, InvalidInput, Problem
from kfp_gate.launching.launch import launch
from kfp_gate.launching.options import LaunchOptions


class Output(list):
    """The lines a user sees; `waits` for one that matches."""

    def matching(self, rule: str) -> list[str]:
        return [line for line in self if re.search(rule, line)]

    def wait_for(self, rule: str, seconds: float = 30) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := self.matching(rule):
                return found[0]
            time.sleep(0.02)
        raise AssertionError(f"no line matches {rule!r} in {list(self)}")


def run(tmp_path: Path, program: str, said: Output | None = None, **settings: object):
    script = tmp_path / "program.py"
    script.write_text("import json, os, signal, sys, time\nfrom pathlib import Path\nrank = int(os.environ['RANK'])\n"
                      "spec, out = (Path(a) for a in sys.argv[1:])\n" + textwrap.dedent(program))  # fmt: skip
    options = LaunchOptions(
        nodes=2, command=(sys.executable, str(script), "{spec}", "{out}"),
        say=(said if said is not None else Output()).append, **settings,
    )  # fmt: skip
    return launch('{"epochs": 1}', options, tmp_path / "model out")


def test_success_moves_the_model_and_prefixes_every_line(tmp_path):
    said = Output()
    outcome = run(
        tmp_path,
        """
        (out / "model").mkdir()
        (out / "model" / "model.pt").write_bytes(b"w")
        assert json.loads(spec.read_text()) == {"epochs": 1}
        keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES")
        print("env", *[os.environ[k] for k in keys], "원뿔")
        print("cwd", Path.cwd() == spec.parent, list(Path("..").iterdir()) and len(list(Path().iterdir())))
        print('KFP_GATE_PROGRESS {"epoch": 1, "epochs": 2, "eta_s": 30, "monitors": {"map50_95": 0.25}}')
        sys.stdout.buffer.write(b"bad \\xff byte\\nlast line without end")
        """,
        said,
    )
    assert outcome.state == "succeeded"
    outcome.raise_if_failed()
    assert (tmp_path / "model out" / "model.pt").read_bytes() == b"w"
    assert outcome.model == tmp_path / "model out"
    assert "[rank 0] env 0 2 0 127.0.0.1  원뿔" in said
    assert "[rank 1] env 1 2 0 127.0.0.1  원뿔" in said
    assert "[rank 1] bad \ufffd byte" in said
    assert "[rank 0] last line without end" in said
    assert "progress: epoch 1 of 2, map50_95 0.25, about 30 s left" in said
    assert not said.matching("RANK_END")


def test_a_command_of_ones_own_stores_checkpoints_where_the_launch_says(tmp_path):
    """Without a word in the script: else its checkpoints went nowhere, and nobody said so."""
    from kfp_gate.training.stored_steps import find_latest

    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from kfp_gate.training import api
        Path("w").write_text("weights")
        with api.start(epochs=1) as run:
            run.checkpoint(1, {"w": Path("w")}, finished=True)
        model = Path(sys.argv[1], "model")
        model.mkdir()
        (model / "model.pt").write_text("w")
        """
    ))  # fmt: skip
    options = LaunchOptions(command=(sys.executable, str(script), "{out}"), environment={"KFP_GATE_RUN_ID": "r"})
    launch(json.dumps({"checkpoint_uri": str(tmp_path / "store")}), options, tmp_path / "model").raise_if_failed()
    found = find_latest(str(tmp_path / "store"))
    assert found is not None and (found.epoch, found.finished, found.run) == (1, True, "r")


def test_a_rank_killed_by_sigkill_stops_the_others_within_seconds(tmp_path):
    said = Output()
    began = time.monotonic()

    def kill() -> None:
        pid = int(said.wait_for(r"rank 1\] pid").split()[-1])
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill).start()
    outcome = run(
        tmp_path, "print('pid', os.getpid(), flush=True)\nprint('epoch 3 ...', flush=True)\ntime.sleep(120)", said
    )
    assert time.monotonic() - began < 60
    assert (outcome.state, outcome.first_failed_rank, outcome.cause) == ("failed", 1, "killed")
    assert "ended by signal 9 (SIGKILL)" in outcome.evidence
    assert outcome.ranks[0].stopped_by_us
    with pytest.raises(Broken) as error:
        outcome.raise_if_failed()
    assert "rank 1 failed first: it was killed by a signal that it did not send itself" in str(error.value)
    assert "epoch 3 ..." in str(error.value)


def test_the_wrapper_killed_takes_its_worker_along(tmp_path):
    said = Output()

    def kill() -> None:
        os.kill(int(said.wait_for(r"rank 0\] parent").split()[-1]), signal.SIGKILL)

    threading.Thread(target=kill).start()
    outcome = run(
        tmp_path,
        "print('pid', os.getpid(), flush=True); print('parent', os.getppid(), flush=True); time.sleep(99)",
        said,
    )
    assert (outcome.first_failed_rank, outcome.cause) == (0, "killed")
    for line in said.matching(r"\] pid"):
        assert_gone(int(line.split()[-1]))


@pytest.mark.all_only
def test_a_rank_that_ignores_sigterm_is_killed_and_so_are_its_children(tmp_path):
    said = Output()
    outcome = run(
        tmp_path,
        """
        import subprocess
        if rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            child = subprocess.Popen([sys.executable, "-c", "import signal,time;"
                                      "signal.signal(15, signal.SIG_IGN); time.sleep(99)"])
            print("child", child.pid, flush=True)
            time.sleep(99)
        while not (spec.parent.parent / "rank-1" / "go").exists() and time.sleep(1.0):
            pass
        raise RuntimeError("no such class: 'cone'")
        """,
        said,
    )
    assert (outcome.first_failed_rank, outcome.cause) == (0, "exception")
    assert "RuntimeError: no such class: 'cone'" in outcome.summary
    assert any("traceback: " in line and "raise RuntimeError" in line for line in outcome.evidence)
    assert_gone(int(said.wait_for("child").split()[-1]))


def test_a_peer_that_lost_its_connection_is_not_named_first(tmp_path):
    outcome = run(
        tmp_path,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 0:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")
        time.sleep(0.2)
        raise KeyError("map50_98")
        """,
    )
    assert (outcome.first_failed_rank, outcome.cause) == (1, "exception")
    assert "KeyError: 'map50_98'" in outcome.summary


def test_invalid_input_reaches_the_user_with_its_own_text(tmp_path):
    outcome = run(
        tmp_path,
        """
        from kfp_gate.errors import InvalidInput, Problem
        error = InvalidInput("1 unknown metric", expected="one of map50, map50_95", where="monitors",
                             next_step="correct the name", problems=[Problem("monitors[0]", "'map5'")])
        print("KFP_GATE_FAILURE " + json.dumps({"rank": rank, "kind": "user", "message": str(error), "exit_code": 2}))
        time.sleep(rank)
        sys.exit(2)
        """,
    )
    assert outcome.cause == "invalid-input"
    with pytest.raises(InvalidInput) as error:
        outcome.raise_if_failed()
    expected = InvalidInput(
        "1 unknown metric", expected="one of map50, map50_95", where="monitors", next_step="correct the name",
        problems=[Problem("monitors[0]", "'map5'")],
    )  # fmt: skip
    assert str(error.value) == str(expected)


def test_invalid_input_is_read_from_the_output_when_no_file_was_left(tmp_path):
    outcome = run(
        tmp_path,
        """
        from kfp_gate.errors import InvalidInput, Problem
        print(InvalidInput("2 bad lines", expected="five numbers", where="labels/a b.txt", next_step="fix: them",
                           problems=[Problem("labels/a b.txt:1", "'x y'")]), file=sys.stderr)
        time.sleep(rank)
        sys.exit(2)
        """,
    )
    with pytest.raises(InvalidInput) as error:
        outcome.raise_if_failed()
    assert error.value.found == "2 bad lines"
    assert error.value.next_step == "fix: them"
    assert error.value.problems[0].found == "'x y'"


def test_success_without_a_model_is_a_failure(tmp_path):
    outcome = run(tmp_path, "print('done')")
    assert (outcome.state, outcome.cause) == ("failed", "no-model")


def test_exit_code_without_a_word_is_not_explained_by_guessing(tmp_path):
    outcome = run(tmp_path, "time.sleep(rank); sys.exit(7)")
    assert outcome.cause == "exit-code"
    assert "exit code 7" in outcome.evidence


def test_a_command_that_does_not_exist_says_so(tmp_path):
    options = LaunchOptions(nodes=1, command=("/nonexistent/python",), say=Output().append)
    outcome = launch("{}", options, tmp_path / "m")
    assert outcome.state == "failed"
    assert any("did not start" in line for line in outcome.evidence)


def test_deadline_stops_the_ranks(tmp_path):
    outcome = run(tmp_path, "time.sleep(99)", deadline_seconds=1)
    assert outcome.cause == "deadline"
    assert "deadline of 1 s" in outcome.summary


def test_much_output_and_endless_lines_keep_memory_bounded(tmp_path):
    count = 0
    longest = 0

    def say(line: str) -> None:
        nonlocal count, longest
        count += 1
        longest = max(longest, len(line))

    script = tmp_path / "p.py"
    script.write_text(
        "import sys, os, pathlib\nfor i in range(20000): print('line', i)\nsys.stdout.write('x' * 3_000_000)\n"
        "m = pathlib.Path(sys.argv[1]) / 'model'; m.mkdir(); (m / 'model.pt').write_text('w')\n"
    )
    outcome = launch(
        "{}", LaunchOptions(nodes=1, command=(sys.executable, str(script), "{out}"), say=say), tmp_path / "m"
    )
    assert outcome.state == "succeeded"
    assert count > 20000
    assert longest < 200_000


def test_records_of_a_failed_run_are_kept(tmp_path):
    outcome = run(
        tmp_path,
        "(out / 'timeline.jsonl').write_text('{}'); time.sleep(rank); sys.exit(3)",
        records=tmp_path / "records",
    )
    assert outcome.state == "failed"
    assert (tmp_path / "records" / "rank-0" / "timeline.jsonl").is_file()


def test_ranks_die_when_the_launcher_is_killed(tmp_path):
    program = tmp_path / "launcher.py"
    program.write_text(
        textwrap.dedent(
            """
            import sys
            from pathlib import Path
            from kfp_gate.launching.launch import launch
            from kfp_gate.launching.options import LaunchOptions
            sleeper = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(99)"
            launch("{}", LaunchOptions(nodes=2, command=(sys.executable, "-c", sleeper)), Path(sys.argv[1]))
            """
        )
    )
    launcher = subprocess.Popen([sys.executable, str(program), str(tmp_path / "m")], stdout=subprocess.PIPE, text=True)
    pids = [int(launcher.stdout.readline().split()[-1]) for _ in range(2)]
    launcher.kill()
    launcher.wait()
    for pid in pids:
        assert_gone(pid)


def assert_gone(pid: int, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return
        except FileNotFoundError:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} still runs")


def test_all_wrong_settings_are_listed_at_once():
    with pytest.raises(InvalidInput) as error:
        LaunchOptions(backend="trainjob", nodes=0, processes_per_node=2, gpus_per_node=4, memory="lots")
    names = [problem.where for problem in error.value.problems]
    assert names == [
        "nodes",
        "processes_per_node",
        "gpus_per_node",
        "worker_image",
        "memory_per_node",
        "checkpoint_uri",
    ]


@pytest.mark.parametrize(("visible", "shown"), [("3,5", ["3", "5"]), (None, ["0", "1"])])
def test_each_rank_sees_one_gpu_of_those_that_are_visible(tmp_path, monkeypatch, visible, shown):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    said = Output()
    run(tmp_path, "print('gpu', os.environ['CUDA_VISIBLE_DEVICES'])", said, gpus_per_node=1)
    assert [said.wait_for(rf"rank {rank}\] gpu").split()[-1] for rank in range(2)] == shown


def test_more_ranks_than_gpus_is_said_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    said = Output()
    with pytest.raises(InvalidInput, match="2 ranks and 1 visible GPUs"):
        run(tmp_path, "print('started')", said, gpus_per_node=1)
    assert not said


def test_the_workers_report_is_evidence_and_its_own_137_is_no_signal(tmp_path):
    outcome = run(
        tmp_path,
        """
        facts = {"kind": "memory", "message": "MemoryError: 2 GiB", "phase": "validation", "exit_code": 137}
        print("KFP_GATE_FAILURE " + json.dumps(facts))
        time.sleep(rank)
        sys.exit(137)
        """,
    )
    assert (outcome.cause, outcome.first_failed_rank) == ("out-of-memory", 0)
    assert "the worker reports (memory in phase validation): MemoryError: 2 GiB" in outcome.evidence
    assert "exit code 137" in outcome.evidence
    assert not any("signal" in line for line in outcome.evidence)


def test_a_rank_that_blames_its_peer_is_believed(tmp_path):
    outcome = run(
        tmp_path,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kinds = {0: ("peer", "rank 1 failed in backward"), 1: ("broken", "ValueError: no such class")}
        print("KFP_GATE_FAILURE " + json.dumps(dict(zip(("kind", "message"), kinds[rank]))), flush=True)
        time.sleep(rank * 1.5)  # told to stop by then
        sys.exit(1)
        """,
    )
    assert outcome.first_failed_rank == 1
    assert outcome.cause == "exception"


def test_an_interrupted_launch_leaves_no_rank_behind(tmp_path):
    said = Output()

    def interrupt(line: str) -> None:
        said.append(line)
        if len(said.matching("pid")) == 2:
            raise KeyboardInterrupt

    options = LaunchOptions(
        nodes=2, say=interrupt,
        command=(sys.executable, "-c", "import os, time; print('pid', os.getpid(), flush=True); time.sleep(99)"),
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        launch("{}", options, tmp_path / "m")
    for line in said:
        assert_gone(int(line.split()[-1]))
