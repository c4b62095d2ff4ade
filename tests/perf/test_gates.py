"""Gates: their file, verdicts on recorded and fabricated results, the record of green runs, exit statuses."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from drift_sdk import ConfigError
from drift_sdk._kernels.gemm.tuning import TunedTable
from perf import gates
from perf.gating import history
from perf.gating.figures import figure_of, read_folder
from perf.gating.gate import FILE, Gate, GateFile, load_gates
from perf.gating.history import Place, add_attempt, num_green_in_a_row, reason_to_refuse
from perf.gating.judging import Verdict, judge, judge_runs
from perf.gating.measuring import COMMANDS, Measurement, commands_of
from perf.harness.commands import Command, CommandFailed, run_command
from perf.harness.record import Results
from perf.harness.scenario import SCENARIOS

LLAMA = {"model": "llama-3.1-8b", "dtype": "bfloat16"}
GPU = "NVIDIA H200"
SCENARIO_NAMES = {scenario.name for scenario in SCENARIOS}
ROOFLINE = "8B plain, share of the roofline"
# Results as they were recorded on an H200, so that new results change no test.
RECORDED = Path(__file__).parent / "recorded" / "nvidia-h200"


@pytest.fixture(scope="module")
def file() -> GateFile:
    return load_gates()


@pytest.fixture(scope="module")
def recorded() -> dict[str, Results]:
    found = read_folder(RECORDED)
    found["speculative"].runs += at_another_length(found["speculative"].runs)
    return found


def at_another_length(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs with three drafts as they would be at an acceptance length of 3.0: rounds take the same time."""
    return [
        one | {"acceptance_length": 3.0, "tokens_per_s": one["tokens_per_s"] * 3.0 / 3.2}
        | {"speedup": one["speedup"] * 3.0 / 3.2}
        for one in runs
        if one["num_draft_tokens"] == 3
    ]  # fmt: skip


def copy(found: dict[str, Results]) -> dict[str, Results]:
    return {topic: msgspec.convert(msgspec.to_builtins(one), Results) for topic, one in found.items()}


def run(**fields: Any) -> dict[str, Any]:
    common = {"engine": "drift", "executor": "graph", "scenario": "single-512", "batch": 1, "context": 512}
    drafts = {"num_draft_tokens": 0, "acceptance": "none", "acceptance_length": None}
    return LLAMA | common | drafts | {"tokens_per_s": 240.0, "roofline_fraction": 0.84} | fields


def results(*runs: dict[str, Any], **fields: Any) -> dict[str, Results]:
    header = {"commit": "abc", "date": "2026-01-02", "gpu": GPU, "driver": None, "versions": {}}
    return {"decode": Results(**{**header, "read_bandwidth_tb_s": 4.3, "runs": list(runs), **fields})}


def gate(**fields: Any) -> Gate:
    common: dict[str, Any] = {
        "name": "g", "suite": "micro", "topic": "decode", "where": {}, "field": "roofline_fraction",
        "over": {}, "unit": "", "less_is_better": False, "normalised_by": None,
        "is_compared": True, "slow_paths": (), "floor": 0.8, "goal": 0.9,
    }  # fmt: skip
    return Gate(**common | fields)


def over_vllm(**fields: Any) -> Gate:
    own = {"field": "tokens_per_s", "over": {"engine": "vllm"}, "floor": 1.15, "goal": 1.25}
    return gate(where={"scenario": "single-512"}, normalised_by="read_bandwidth_tb_s", **own | fields)


def judged(
    suite: Literal["micro", "full"],
    file: GateFile,
    measured: dict[str, Results],
    committed: dict[str, Results],
    error: str = "",
) -> list[Verdict]:
    """The verdicts of a suite whose commands have all ended, or failed with `error`."""
    done = [Measurement(command=command, seconds=1.0, error=error) for command in COMMANDS[suite]]
    return gates.judge_suite(gates.gates_of(suite, file), file, done, measured, committed)


def figure(given: Gate, found: dict[str, Results], file: GateFile) -> Any:
    return figure_of(given, found, file.reference)


def test_every_gate_of_one_gpu_has_a_floor_that_its_figure_can_miss(file: GateFile) -> None:
    assert len(file.gates) > 50
    assert {given.suite for given in file.gates} == {"micro", "full", "results"}
    for given in file.gates:
        worse = given.floor * (1.01 if given.less_is_better else 0.99)
        assert given.passes(given.floor) and given.passes(given.goal) and not given.passes(worse)
        assert given.distance(given.goal) == pytest.approx(0)
        assert given.distance(given.floor) >= 0


def test_recorded_results_of_micro_are_green(file: GateFile, recorded: dict[str, Results]) -> None:
    verdicts = judged("micro", file, recorded, recorded)
    assert {verdict.state for verdict in verdicts} == {"green"}
    assert len(verdicts) == len(file.of("micro")) + 1


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda one: one.update(roofline_fraction=one["roofline_fraction"] * 0.9), "under the floor"),
        (lambda one: one.update(executor="eager"), "ran on the executor 'eager'"),
        (lambda one: one.update(slow_paths={"num_untuned_shapes": 3}), "slow paths: num_untuned_shapes 3"),
        (lambda one: one.update(tokens_per_s=one["tokens_per_s"] * 0.94), "worse than the last committed"),
        (lambda one: one.update(tokens_per_s=float("nan"), roofline_fraction=float("nan")), "figure is nan"),
        (lambda one: one.update(scenario="single-513"), "no such run"),
    ],
    ids=["slow kernel", "fallback", "corrupted table", "regression", "not a number", "missing"],
)
def test_each_fault_turns_micro_red(
    change: Callable[[dict[str, Any]], None], reason: str, file: GateFile, recorded: dict[str, Results]
) -> None:
    measured = copy(recorded)
    for one in measured["speculative"].runs:
        change(one)
    verdicts = judged("micro", file, measured, recorded)
    assert any(verdict.state == "red" and reason in str(verdict) for verdict in verdicts)


def test_raised_threshold_turns_micro_red(file: GateFile, recorded: dict[str, Results]) -> None:
    for given in file.of("micro"):
        broken = msgspec.structs.replace(given, floor=figure(given, recorded, file).value * 1.001)
        verdict = judge(broken, file, recorded, recorded)
        assert verdict.state == "red" and "under the floor" in verdict.reason


def test_slowed_kernel_turns_its_topic_red(recorded: dict[str, Results]) -> None:
    measured, committed = copy(recorded)["kernels"], recorded["kernels"]
    assert judge_runs("kernels", 0.05, measured, committed).state == "green"
    slow = next(one for one in measured.runs if one["kernel"] == "gemm" and one["us"] > 20)
    slow["us"] *= 1.1
    verdict = judge_runs("kernels", 0.05, measured, committed)
    assert verdict.state == "red" and slow["shape"] in verdict.reason and "9.1% worse" in verdict.reason
    slow["us"] /= 1.1
    short = next(one for one in measured.runs if one["us"] < 8)
    short["us"] *= 1.1  # too short to be compared
    assert judge_runs("kernels", 0.05, measured, committed).state == "green"
    assert judge_runs("kernels", 0.05, measured, None).state == "not measured"


def test_figures_are_compared_at_equal_bandwidths(file: GateFile) -> None:
    """A machine that is 10% slower, and reads 10% slower, is as good as the committed one."""
    given = gate(field="tokens_per_s", floor=100.0, goal=300.0, normalised_by="read_bandwidth_tb_s")
    committed = results(run(), read_bandwidth_tb_s=4.3)
    slower = results(run(tokens_per_s=216.0), read_bandwidth_tb_s=3.87)
    verdict = judge(given, file, slower, committed)
    assert (verdict.state, verdict.figure) == ("green", pytest.approx(240.0))
    verdict = judge(given, file, results(run(tokens_per_s=216.0)), committed)
    assert verdict.state == "red" and "10.0% worse" in verdict.reason
    assert judge(given, file, results(run(tokens_per_s=230.0)), committed).state == "green"
    assert judge_runs("decode", 0.05, slower["decode"], committed["decode"]).state == "green"
    same_speed = results(run(tokens_per_s=216.0))["decode"]
    assert judge_runs("decode", 0.05, same_speed, committed["decode"]).state == "red"


def test_prompts_are_compared_at_equal_speeds_of_products(recorded: dict[str, Results]) -> None:
    measured, committed = copy(recorded)["prefill"], recorded["prefill"]
    for one in measured.runs:
        one["tokens_per_s"] *= 0.9
    assert judge_runs("prefill", 0.05, measured, committed).state == "red"
    for one in measured.runs:
        one["matmul_tflop_s"] *= 0.9
    assert judge_runs("prefill", 0.05, measured, committed).state == "green"


def test_runs_own_bandwidth_precedes_that_of_the_file(file: GateFile) -> None:
    given = gate(field="tokens_per_s", floor=100.0, goal=300.0, normalised_by="read_bandwidth_tb_s")
    found = results(run(read_bandwidth_tb_s=4.3), read_bandwidth_tb_s=2.15)
    assert figure(given, found, file).value == 240.0


def test_ratio_is_to_a_peer_of_the_same_commit_or_to_its_anchor(file: GateFile) -> None:
    peer = run(engine="vllm", tokens_per_s=200.0, executor=None)
    beside = figure(over_vllm(), results(run(), peer), file)
    assert (beside.value, beside.is_anchored) == (1.2, False)
    for other in (peer | {"commit": "old"}, peer | {"tokens_per_s": 150.0}):  # another commit; void
        anchored = figure(over_vllm(), results(run(), other), file)
        assert (anchored.value, anchored.is_anchored) == (pytest.approx(240 / 205), True)
    verdict = judge(over_vllm(), file, results(run()), {})
    assert "(anchor)" in str(verdict)


def test_gate_over_a_peer_without_a_run_or_anchor_is_not_measured(file: GateFile) -> None:
    found = results(run(), gpu="NVIDIA H100")
    verdict = judge(over_vllm(), file, found, {})
    assert (verdict.state, verdict.figure) == ("not measured", None)
    assert "engine='vllm'" in verdict.reason


def test_repeats_count_by_their_median_and_models_by_the_worst(file: GateFile) -> None:
    shares = (0.7, 0.9, 0.8)
    repeats = results(*(run(repeat=nth, roofline_fraction=share) for nth, share in enumerate(shares)))
    assert figure(gate(), repeats, file).value == 0.8
    models = results(*(run(model=f"m{share}", roofline_fraction=share) for share in shares))
    assert figure(gate(), models, file).value == 0.7
    less = gate(less_is_better=True, floor=0.9, goal=0.8)
    assert figure(less, models, file).value == 0.9


def test_slow_paths_that_a_row_is_about_are_allowed(file: GateFile) -> None:
    untuned = {"num_untuned_shapes": 3}
    allowing = gate(slow_paths=("num_untuned_shapes",))
    found = results(run(slow_paths=untuned))
    assert figure(gate(), found, file).problem == "slow paths: num_untuned_shapes 3"
    assert figure(allowing, found, file).problem == ""
    both = run(slow_paths=untuned | {"num_host_waits": 2})
    assert figure(allowing, results(both), file).problem == "slow paths: num_host_waits 2"


def test_runs_of_another_kind_are_not_taken(file: GateFile) -> None:
    for other in (
        {"num_draft_tokens": 3}, {"temperature": 0.8}, {"config": "block_size=32"}, {"engine": "vllm"},
    ):  # fmt: skip
        assert figure(gate(), results(run(**other)), file) == "no such run"


@pytest.mark.parametrize(
    "old, new, field",
    [
        ("single-512 = [0.82, 0.88]", "single-512 = [0.88, 0.82]", f"{ROOFLINE}: single-512"),
        ("single-512 = [0.82, 0.88]", "single-512 = [-1, 0.88]", f"{ROOFLINE}: single-512"),
        ("tolerance = 0.05", "tolerance = 5", "tolerance"),
        ("matmul_tflop_s = 780.0", "matmul_tflop_s = 0", "reference.matmul_tflop_s"),
        ('field = "speedup"', 'field = "several_share"', "8B EAGLE-3 K=3 AL 3.2 over plain: single-32k"),
        ('topic = "speculative"', 'topics = "speculative"', "file"),
        ("[[row]]", "[[row", "file"),
    ],
)  # fmt: skip
def test_wrong_file_is_refused(old: str, new: str, field: str, tmp_path: Path) -> None:
    path = tmp_path / "gates.toml"
    path.write_text(FILE.read_text().replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load_gates(path)
    assert caught.value.field == field


def test_acceptance_has_thresholds_where_it_is_real(tmp_path: Path) -> None:
    path = tmp_path / "gates.toml"
    text = FILE.read_text()
    start = text.index("[[row]]")
    row = text[start : text.index("[[row]]", start + 1)]
    row = row.replace("roofline_fraction", "measured_acceptance_length")
    path.write_text(text[:start] + row)
    with pytest.raises(ConfigError, match="simulated acceptance"):
        load_gates(path)
    path.write_text(
        text[:start] + row.replace('dtype = "bfloat16"', 'dtype = "bfloat16", acceptance = "real"')
    )
    assert load_gates(path).gates[0].field == "measured_acceptance_length"


HERE = Place(commit="abc", machine="m", gpu=GPU)


def test_full_waits_for_three_green_runs_in_a_row(tmp_path: Path) -> None:
    record = tmp_path / "folder" / "gates.json"
    for is_green, expected in ((True, 1), (True, 2), (False, 0), (True, 1), (True, 2)):
        add_attempt(HERE, is_green, record)
        assert num_green_in_a_row(HERE, record) == expected
        assert f"green {expected} times" in reason_to_refuse(HERE, record)
    for name in Place.__struct_fields__:  # of another commit, machine or GPU
        add_attempt(msgspec.structs.replace(HERE, **{name: "other"}), False, record)
        add_attempt(msgspec.structs.replace(HERE, **{name: "other"}), True, record)
    assert num_green_in_a_row(HERE, record) == 2
    add_attempt(HERE, True, record)
    assert reason_to_refuse(HERE, record) == ""


def test_changed_code_is_not_counted(tmp_path: Path) -> None:
    record = tmp_path / "gates.json"
    dirty = msgspec.structs.replace(HERE, commit="abc-dirty")
    for _ in range(3):
        add_attempt(dirty, True, record)
    assert "expected a commit without changes" in reason_to_refuse(dirty, record)


def test_list_shows_every_gate_without_a_gpu(
    file: GateFile, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "list.json"
    assert gates.main(["list", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "8B plain, share of the roofline: single-512" in printed
    assert len(json.loads(out.read_text())) == len(file.gates)
    assert gates.main(["list", "--gpu", "nvidia-t4"]) == 2
    assert "nvidia-h200" in capsys.readouterr().err


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine that seems to have a GPU, with a record and committed results of its own."""
    monkeypatch.setattr(gates.machine, "gpu_name", lambda device: GPU)
    monkeypatch.setattr(gates, "RESULTS", RECORDED.parent)
    monkeypatch.setenv("DRIFT_COMMIT", "abc")
    for function in (add_attempt, num_green_in_a_row, reason_to_refuse):
        monkeypatch.setattr(function, "__defaults__", (tmp_path / "record.json",))
    yield tmp_path / "out"


def fake_run(slowed: float = 1.0) -> Callable[..., None]:
    """Writes recorded results of a command's scenarios instead of measuring, with rates of drafts divided by
    `slowed`."""

    def run(command: Command, device: str, folder: Path, on_line: Callable[[str], None]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{command.topic}.json"
        found = json.loads((RECORDED / path.name).read_text()) | {"commit": "abc"}
        if command.topic == "speculative":
            found["runs"] += at_another_length(found["runs"])
        if "--scenario" in command.arguments:
            found["runs"] = [one for one in found["runs"] if one["scenario"] in command.arguments]
        for one in found["runs"]:
            if one["num_draft_tokens"] and one["tokens_per_s"]:
                one["tokens_per_s"] /= slowed
        path.write_text(json.dumps(found))

    return run


def test_suites_are_measured_and_judged_in_order(on_a_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--device", "cuda", "--out", str(on_a_gpu)]
    assert gates.main(["full", *asked], fake_run()) == 2
    for count in (1, 2, 3):
        assert gates.main(["micro", *asked], fake_run()) == 0
        assert f"green {count} times in a row" in capsys.readouterr().out
    # The recorded results miss some floors of `full`, which is red for these alone.
    assert gates.main(["full", *asked], fake_run()) == 1
    report = json.loads((on_a_gpu / "gates-full.json").read_text())
    assert (report["commit"], report["gpu"], report["suite"]) == ("abc", GPU, "full")
    assert report["is_complete"] and report["seconds"] >= 0
    assert [one["command"].split()[0] for one in report["timings"]] == [
        "perf.speculative", "perf.decode", "perf.prefill", "perf.startup", "perf.kernel_speed",
    ]  # fmt: skip
    red = {verdict["gate"] for verdict in report["verdicts"] if verdict["state"] == "red"}
    green = {verdict["gate"] for verdict in report["verdicts"] if verdict["state"] == "green"}
    assert all("start" in name or "CPU time" in name for name in red)
    # The first comes from the last results of `micro`.
    assert {"8B plain over vLLM: single-512", "8B plain over vLLM: batch8-512"} <= green
    assert gates.main(["micro", *asked], fake_run(slowed=1.1)) == 1
    assert "green 0 times in a row" in capsys.readouterr().out
    assert gates.main(["full", *asked], fake_run()) == 2


def test_full_judges_no_results_of_micro_of_another_commit(
    on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["--device", "cuda", "--out", str(on_a_gpu)]
    for _ in range(3):
        gates.main(["micro", *asked], fake_run())
    path = on_a_gpu / "micro" / "speculative.json"
    path.write_text(path.read_text().replace('"commit": "abc"', '"commit": "old"'))
    gates.main(["full", *asked], fake_run())
    report = json.loads((on_a_gpu / "gates-full.json").read_text())
    verdicts = {verdict["gate"]: verdict for verdict in report["verdicts"]}
    missing = verdicts["8B plain over vLLM: single-512"]
    assert (missing["state"], missing["reason"]) == ("red", "no such run")


def test_failed_measurement_is_red(on_a_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(command: Command, *arguments: Any) -> None:
        raise CommandFailed("perf.speculative: ConfigError: strict_performance=True: expected a tuned table")

    assert gates.main(["micro", "--device", "cuda", "--out", str(on_a_gpu)], fail) == 1
    printed = capsys.readouterr().out
    assert "speculative: the measurement: perf.speculative: ConfigError: strict_performance" in printed
    assert "no speculative.json" in printed


def test_interrupted_suite_leaves_a_report_that_is_red(on_a_gpu: Path) -> None:
    asked = ["--device", "cuda", "--out", str(on_a_gpu)]
    for _ in range(3):
        gates.main(["micro", *asked], fake_run())

    def interrupted(command: Command, *arguments: Any) -> None:
        if command.topic == "prefill":
            raise KeyboardInterrupt
        fake_run()(command, *arguments)

    with pytest.raises(KeyboardInterrupt):
        gates.main(["full", *asked], interrupted)
    content = (on_a_gpu / "gates-full.json").read_bytes()
    report = msgspec.json.decode(content, type=gates.Report)
    assert not report.is_complete and not report.is_green and len(report.timings) == 3
    states = {verdict.gate: verdict.state for verdict in report.verdicts}
    assert states["prefill: the measurement"] == "red"
    assert states["8B EAGLE-3 K=3 AL 3.2 over vLLM: batch8-512"] == "green"
    assert "start to the first token: warm" not in states
    assert num_green_in_a_row(Place.here("abc", GPU)) == 3


def test_folder_with_other_files_is_not_emptied(on_a_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = on_a_gpu / "micro" / "thesis.txt"
    own.parent.mkdir(parents=True)
    own.write_text("a")
    with pytest.raises(SystemExit):
        gates.main(["micro", "--device", "cuda", "--out", str(on_a_gpu)], fake_run())
    assert str(own) in capsys.readouterr().err and own.exists()


def test_results_of_an_earlier_run_are_not_judged(on_a_gpu: Path) -> None:
    (on_a_gpu / "micro").mkdir(parents=True)
    shutil.copy(RECORDED / "speculative.json", on_a_gpu / "micro")
    asked = ["micro", "--device", "cuda", "--out", str(on_a_gpu)]
    assert gates.main(asked, lambda *arguments: None) == 1


def test_gates_need_a_gpu_and_peers_a_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        gates.main(["micro", "--device", "cpu"])
    assert "`list` needs none" in capsys.readouterr().err
    monkeypatch.setenv("VLLM_PATH", "/opt/site")
    with pytest.raises(SystemExit):
        gates.main(["micro", "--device", "cuda", "--peer", "vllm"])
    assert "expected with full" in capsys.readouterr().err
    monkeypatch.delenv("VLLM_PATH")
    monkeypatch.setattr(gates, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        gates.main(["full", "--device", "cuda", "--peer", "vllm"])
    assert "$VLLM_PATH" in capsys.readouterr().err


def test_corrupted_table_of_launch_configurations_is_refused() -> None:
    """An engine on a GPU whose table cannot be read does not start, so that its measurement fails."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"gemms": {"6144x4096": {"by_rows": [[16, "fast"]]}}}', type=TunedTable)


def test_command_runs_in_its_own_process_and_reports_its_last_line(tmp_path: Path) -> None:
    lines: list[str] = []
    good = Command(module="perf.harness.scenario", topic="nothing")
    run_command(good, "cpu", tmp_path, lines.append)
    assert lines == []
    bad = Command(module="perf.no_such_module", topic="nothing")
    with pytest.raises(CommandFailed, match=r"perf.no_such_module: .*No module named"):
        run_command(bad, "cpu", tmp_path, lines.append)
    assert "No module named" in lines[-1]
    assert "No module named" in (tmp_path / "nothing.log").read_text()


def test_suites_measure_nothing_twice_and_keep_their_engines_strict(file: GateFile) -> None:
    both = [*COMMANDS["micro"], *COMMANDS["full"]]
    assert {command.topic for command in both} == {"speculative", "decode", "prefill", "startup", "kernels"}
    strict = {command.module for command in both if "--strict-performance" in command.arguments}
    assert strict == {"perf.speculative", "perf.decode", "perf.prefill"}
    first, rest = (set(suite[0].arguments) & SCENARIO_NAMES for suite in COMMANDS.values())
    assert first.isdisjoint(rest) and first | rest == SCENARIO_NAMES
    topics = {command.topic for command in COMMANDS["full"]}
    assert {given.topic for given in file.of("micro")} == {"speculative"}
    assert {given.topic for given in file.of("full")} <= topics


def test_peer_is_measured_in_all_scenarios_of_its_gates(file: GateFile) -> None:
    commands = commands_of("full", peer=True)
    with_peer = {command.module: command.arguments for command in commands if "vllm" in command.arguments}
    assert set(with_peer) == {"perf.prefill", "perf.speculative"}
    assert "--scenario" not in with_peer["perf.speculative"]
    over = [given.name for given in gates.gates_of("full", file, peer=True) if "engine" in given.over]
    assert len(over) == 12 and len(set(over)) == 12
    assert history.FILE.is_relative_to(gates.OUT)


def test_commands_are_accepted_by_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command lines of both suites are parsed up to the first measurement."""

    def stop(*arguments: Any) -> None:
        raise InterruptedError

    for suite in (*COMMANDS.values(), commands_of("full", peer=True)):
        for command in suite:
            module = importlib.import_module(command.module)
            monkeypatch.setattr(module, "Recording", stop)
            with pytest.raises(InterruptedError):
                module.main(command.line("cuda", Path("nowhere"))[3:])
