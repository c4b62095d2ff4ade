"""Peers: anchors, the process that runs vLLM, the static-cache loop of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from msgspec import UNSET

from perf.decode import PEERS
from perf.harness.experts import write_routing_weights
from perf.harness.mtp_draft import MtpDraft
from perf.harness.published import PUBLISHED
from perf.harness.scenario import Scenario
from perf.harness.shapes import MODELS, Model, prepare, prepare_draft
from perf.peers import vllm
from perf.peers.anchors import ANCHORS, anchor_of, is_void
from perf.peers.transformers import Decoding, load
from perf.peers.vllm import measure_drafts, measure_prompts, write_mtp_config
from perf.peers.vllm_process import Job, settings_of
from perf.peers.vllm_routing import copying, counted_passes, counting, distinct_tokens, mean_experts

VLLM = """
import sys
import time
from types import SimpleNamespace
__version__ = "0.0.fake"
foreign = {"drift_sdk", "torch", "transformers"} & set(sys.modules)
assert not foreign, foreign
now = [0.0]
time.perf_counter = lambda: now[0]

sys.modules["vllm.sampling_params"] = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta"))

class SamplingParams:
    def __init__(self, *, max_tokens, min_tokens, ignore_eos, **others):
        self.max_tokens, self.output_kind = max_tokens, others.get("output_kind")

class Engine:  # prompts, one a step, take a second; a step takes 1e-4 s for each running request
    def __init__(self):
        self.waiting, self.running = [], {}

    def add_request(self, request_id, prompt, params):
        assert prompt["type"] == "token" and prompt["prompt_token_ids"] and params.output_kind == "delta"
        self.waiting.append((request_id, params.max_tokens - MISSING))

    def has_unfinished_requests(self):
        return bool(self.waiting or self.running)

    def step(self):
        if self.waiting:
            now[0] += 1.0
            self.running.update([self.waiting.pop(0)])
        now[0] += 1e-4 * len(self.running)
        token = SimpleNamespace(token_ids=[1])
        outputs = [SimpleNamespace(request_id=one, outputs=[token]) for one in self.running]
        self.running = {one: count - 1 for one, count in self.running.items() if count > 1}
        return outputs

class LLM:
    llm_engine = Engine()

    def __init__(self, *, model, load_format, **settings):
        assert load_format == "dummy"
        assert settings["max_model_len"] == 1024  # what the model allows
        open(model + "/config.json").close()

    def generate(self, prompts, params, use_tqdm):
        now[0] += 1e-4 * params.max_tokens * len(prompts)
        tokens = SimpleNamespace(token_ids=[1] * (params.max_tokens - MISSING))
        return [SimpleNamespace(outputs=[tokens]) for _ in prompts]
"""


APPLYING = """
def applied(self, function):
    import pathlib
    import sys
    has_draft = self.settings["speculative_config"]["num_speculative_tokens"] == 3
    pathlib.Path(sys.modules["vllm"].__file__).parents[1].joinpath("applied").write_text(str(has_draft))
    return [[]]

def noting(self, *, model, load_format, **settings):
    self.settings = settings

LLM.__init__, LLM.apply_model = noting, applied
"""


COUNTING = """
import json
import pathlib
notes = pathlib.Path(__file__).with_name("notes")

def note(*line):
    with notes.open("a") as file:
        file.write(json.dumps(line) + chr(10))

def initialise(self, *, model, load_format, **settings):
    note("start", settings.get("enforce_eager", False))
    assert not (FAILS and settings.get("enforce_eager"))

def applied(self, function):
    note(function.__name__)
    return {"copy": [[]], "count": [1], "take": [[(64, 8), (4, 6), (4, 5), (16, 7)]]}[function.__name__]

def generate(self, prompts, params, use_tqdm):
    note("prompts", [prompt["prompt_token_ids"] for prompt in prompts], params.max_tokens)
    now[0] += 1e-4 * params.max_tokens * len(prompts)
    tokens = [[0] * 8 + [1 + number // 2] * (params.max_tokens - 8) for number in range(len(prompts))]
    return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=one)]) for one in tokens]

LLM.__init__, LLM.apply_model, LLM.generate = initialise, applied, generate
"""


QUANTISED = """
import os
import types

class Kernel:
    pass

def initialise(self, *, model, load_format, quantization, **settings):
    self.forced = os.environ.get("VLLM_TEST_FORCE_FP8_MARLIN"), settings.get("linear_backend")

def applied(self, function):
    kernel = type("W8A16" if self.forced == ("1", "marlin") else "W8A8", (Kernel,), {})()
    quantised = SimpleNamespace(quant_method=SimpleNamespace(fp8_linear=kernel))
    alone = types.FunctionType(function.__code__, {})  # as a worker gets it
    return [alone(SimpleNamespace(modules=lambda: [quantised, SimpleNamespace()]))]

LLM.__init__, LLM.apply_model = initialise, applied
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Model:
    return prepare("tiny", tmp_path / "tiny")


def fake_vllm(folder: Path, monkeypatch: pytest.MonkeyPatch, missing: int) -> None:
    folder.mkdir()
    (folder / "vllm.py").write_text(f"MISSING = {missing}\n{VLLM}")
    monkeypatch.setenv("VLLM_PATH", str(folder))


def test_vllm_decodes_in_its_own_process(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm(tmp_path / "site", monkeypatch, missing=0)
    scenarios = [Scenario.parse("single-16"), Scenario.parse("batch4-16")]
    runs = list(PEERS["vllm"](tiny, scenarios, 3, 0.01))
    assert [(run.engine, run.scenario, run.engine_version) for run in runs] == [
        ("vllm", "single-16", "0.0.fake"),
        ("vllm", "batch4-16", "0.0.fake"),
    ]
    assert runs[0].ms_per_round == pytest.approx(0.1)
    assert runs[1].ms_per_round == pytest.approx(0.4)
    assert "enable_prefix_caching=True" in str(runs[0].settings)
    assert {(run.num_experts, run.num_distinct_tokens) for run in runs} == {(UNSET, UNSET)}


def test_vllm_quantises_as_the_model_does_and_names_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = prepare("tiny", tmp_path / "tiny", "fp8")
    fake_vllm(tmp_path / "site", monkeypatch, missing=0)
    (tmp_path / "site" / "vllm.py").write_text(f"MISSING = 0\n{VLLM}\n{QUANTISED}")
    for name, kernel in (("vllm", "W8A8"), ("vllm-marlin", "W8A16")):
        (run,) = PEERS[name](model, [Scenario.parse("single-16")], 1, 0.01)
        assert (run.engine, run.dtype) == (name, "fp8")
        assert "quantization='fp8'" in str(run.settings)
        assert str(run.settings).endswith(f", computes with {kernel}")
    assert "linear_backend='marlin'" in str(run.settings)


def test_vllm_divides_a_model_between_gpus(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm(tmp_path / "site", monkeypatch, missing=0)
    scenarios = [Scenario.parse("batch4-16")]
    (alone,) = vllm.measure(tiny, scenarios, 1, 0.01)
    (plain,) = vllm.measure(tiny, scenarios, 1, 0.01, num_gpus=2)
    (drafted,) = measure_drafts(
        tiny, prepare_draft(tiny), scenarios, 1, 0.01, num_draft_tokens=3, acceptance_length=2.5, num_gpus=2
    )
    assert (alone.num_gpus, plain.num_gpus, drafted.num_gpus) == (UNSET, 2, 2)
    assert "tensor_parallel_size" not in str(alone.settings)
    for run in (plain, drafted):
        assert "tensor_parallel_size=2" in str(run.settings)
    assert plain.bytes_per_round == alone.bytes_per_round / 2 < drafted.bytes_per_round


def test_vllm_prefills_in_its_own_process(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm(tmp_path / "site", monkeypatch, missing=0)
    runs = list(measure_prompts(tiny, [16, 32], 3, 100.0))
    assert [(run.engine, run.scenario, run.context, run.num_repeats) for run in runs] == [
        ("vllm", "prefill-16", 16, 3),
        ("vllm", "prefill-32", 32, 3),
    ]
    assert all(run.seconds_min <= run.seconds <= run.seconds_max for run in runs)
    assert runs[1].tflop_s == pytest.approx(tiny.prefill_flops(32) / runs[1].seconds / 1e12)


class Named(torch.nn.Module):
    """A model with a router, and an embedding by vLLM's name with rows of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.ModuleDict(
            {"embedding": torch.nn.Embedding(12, 4), "gate": torch.nn.Linear(4, 3, bias=False)}
        )


def test_weights_are_copied_into_the_model_of_vllm(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    embedding, gate = torch.randn(10, 4), torch.randn(3, 4)
    torch.save({"model.embed_tokens.weight": embedding, "model.gate.weight": gate, "model.other": gate}, file)
    model = Named()
    padding = model.model["embedding"].weight.data[10:].clone()
    assert copying(str(file))(model) == ["model.other"]
    assert torch.equal(model.model["embedding"].weight.data, torch.cat((embedding, padding)))
    assert torch.equal(model.model["gate"].weight.data, gate)


def test_factors_of_layers_are_copied_into_the_model_of_vllm(tmp_path: Path) -> None:
    """vLLM has them as buffers, which dummy weights make small too."""
    torch.save({"model.layers.0.layer_scalar": torch.tensor([0.5])}, tmp_path / "weights.pt")
    layer = torch.nn.Module()
    layer.register_buffer("layer_scalar", torch.zeros(1))
    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})})
    assert copying(str(tmp_path / "weights.pt"))(model) == []
    assert layer.layer_scalar.item() == 0.5


def test_biases_of_attention_are_removed_from_the_model_of_vllm(tmp_path: Path) -> None:
    given = {"mlp.router.bias": torch.randn(3)}
    torch.save(given, tmp_path / "weights.pt")
    model = torch.nn.ModuleDict(
        {
            "self_attn": torch.nn.ModuleDict({"o_proj": torch.nn.Linear(4, 4)}),
            "mlp": torch.nn.ModuleDict({"router": torch.nn.Linear(4, 3), "experts": torch.nn.Linear(4, 4)}),
        }
    )
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()} | given
    expected["self_attn.o_proj.bias"].zero_()
    assert copying(str(tmp_path / "weights.pt"))(model) == []
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


class Router(torch.nn.Linear):
    """A router that returns a pair, as most linear layers of vLLM do."""

    def forward(self, rows: torch.Tensor) -> Any:
        return super().forward(rows), None


class Routing(torch.nn.Module):
    """Two layers with routers by vLLM's names: logits are the input."""

    def __init__(self) -> None:
        super().__init__()
        names = {"router": torch.nn.Linear(8, 8, bias=False)}, {"gate": Router(8, 8, bias=False)}
        self.layers: Any = torch.nn.ModuleList(
            torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict(router)}) for router in names
        )
        for weight in self.parameters():
            weight.data.copy_(torch.eye(8))

    def forward(self, rows: torch.Tensor) -> None:
        for layer in self.layers:
            for router in layer["mlp"].values():
                router(rows)


def test_experts_of_passes_are_counted() -> None:
    model, logits = Routing(), torch.zeros(3, 8)
    logits[0, [0, 1]] = logits[1, [1, 2]] = logits[2, [0, 1]] = 1.0
    model(logits)
    assert counting(2)(model) == 2
    model(logits)
    model(logits[:2])
    model(logits[1:2])
    found = counted_passes()(model)
    assert found == [(3, 3), (3, 3), (2, 3), (2, 3), (1, 2), (1, 2)]
    assert counted_passes()(model) == []
    assert mean_experts([(4, 6), (64, 8), (4, 7)], 4) == 6.5
    assert mean_experts(found, 4) is None


def test_distinct_tokens_are_those_at_the_same_place() -> None:
    assert distinct_tokens([[1, 2, 3, 4], [5, 2, 3, 6], [7, 3, 3, 8]], 0) == pytest.approx(
        (3 + 2 + 1 + 3) / 4
    )
    assert distinct_tokens([[1, 2, 3, 4], [5, 2, 3, 6], [7, 3, 3, 8]], 2) == 2


def notes_of(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "notes").read_text().splitlines()]


def test_vllm_counts_experts_before_it_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that is timed has neither hooks nor the settings of the one that counts."""
    model, scenario = prepare("tiny-experts", tmp_path / "tiny-experts"), Scenario.parse("batch4-16")
    fake_vllm(tmp_path / "site", monkeypatch, missing=0)
    (tmp_path / "site" / "vllm.py").write_text(f"FAILS, MISSING = False, 0\n{VLLM}\n{COUNTING}")
    (plain,) = PEERS["vllm"](model, [scenario], 1, 0.01)
    assert (plain.num_experts, plain.num_distinct_tokens) == (5.5, 2.0)
    assert plain.bytes_per_round == model.decode_bytes(4, scenario.mean_context(), 2, 5.5)
    assert "enforce_eager" not in str(plain.settings)
    notes = notes_of(tmp_path / "site")
    assert [note[:2] for note in notes if note[0] != "prompts"] == [
        ["start", True], ["copy"], ["count"], ["take"], ["start", False], ["copy"],
    ]  # fmt: skip
    prompts = [note[1] for note in notes if note[0] == "prompts"]
    assert prompts == [scenario.prompts(model.spec.vocab_size)] * len(prompts)

    draft = prepare_draft(model)
    (drafted,) = measure_drafts(model, draft, [scenario], 1, 0.01, num_draft_tokens=3, acceptance_length=2.5)
    assert (drafted.num_experts, drafted.num_distinct_tokens) == (7, 2.0)
    num_bytes = model.decode_bytes(4, scenario.mean_context(), 2, 7)
    assert drafted.bytes_per_round == num_bytes + draft.round_bytes(3, 4, scenario.mean_context(), 2)


def test_vllm_is_timed_if_it_cannot_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = prepare("tiny-experts", tmp_path / "tiny-experts")
    fake_vllm(tmp_path / "site", monkeypatch, missing=0)
    (tmp_path / "site" / "vllm.py").write_text(f"FAILS, MISSING = True, 0\n{VLLM}\n{COUNTING}")
    scenarios = [Scenario.parse("batch4-16")]
    (plain,) = PEERS["vllm"](model, scenarios, 1, 0.01)
    assert (plain.num_experts, plain.num_distinct_tokens) == (None, 2.0)
    assert plain.bytes_per_round == model.decode_bytes(4, scenarios[0].mean_context(), 2)
    assert "not all experts of vLLM's steps are counted" in capfd.readouterr().err


def test_vllm_gets_the_routers_of_a_model_with_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function that vLLM's worker gets reads them from a file that holds all tensors of routing."""
    model = prepare("tiny-experts", tmp_path / "tiny-experts")
    fake_vllm(tmp_path / "site", monkeypatch, missing=0)
    (tmp_path / "site" / "vllm.py").write_text(f"MISSING = 0\n{VLLM}\n{APPLYING}")
    runs = list(measure_drafts(
        model, prepare_draft(model), [Scenario.parse("batch4-16")], 2, 0.01,
        num_draft_tokens=3, acceptance_length=2.5,
    ))  # fmt: skip
    assert (tmp_path / "applied").read_text() == "True"
    assert [(run.dtype, run.num_draft_tokens, run.acceptance_length) for run in runs] == [("mxfp4", 3, 2.5)]
    assert runs[0].ms_per_round == pytest.approx(0.4 * 2.5)
    assert runs[0].tokens_per_s == pytest.approx(10_000)
    write_routing_weights(model, tmp_path / "routing.pt")
    names = torch.load(tmp_path / "routing.pt")
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= names.keys()
    for layer in range(4):
        prefix = f"model.layers.{layer}"
        assert {f"{prefix}.mlp.router.weight", f"{prefix}.mlp.router.bias"} <= names.keys()
        assert {
            f"{prefix}.input_layernorm.weight",
            f"{prefix}.post_attention_layernorm.weight",
        } <= names.keys()
    assert not any(part in name for name in names for part in ("experts", "self_attn", "lm_head"))


def test_vllm_gets_the_routers_beside_dense_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "num_hidden_layers": 6, "num_experts": 4, "top_k_experts": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_global_key_value_heads": 1, "head_dim": 16, "global_head_dim": 32,
    }  # fmt: skip
    monkeypatch.setitem(PUBLISHED, "tiny-gemma", PUBLISHED["gemma-4-26b-a4b"] | sizes)
    write_routing_weights(prepare("tiny-gemma", tmp_path / "model"), tmp_path / "routing.pt")
    names = {name.removeprefix("model.layers.0.") for name in torch.load(tmp_path / "routing.pt")}
    routers = {"router.proj.weight", "router.scale", "router.per_expert_scale"}
    norms = {f"{place}_feedforward_layernorm_{number}.weight" for place, number in (("pre", 2), ("post", 1))}
    assert routers | norms | {"layer_scalar"} <= names
    assert not any(part in name for name in names for part in (".experts.", "_proj"))


def test_vllm_answers_with_the_weights_of_a_folder(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm(tmp_path / "site", monkeypatch, missing=0)
    stub = tmp_path / "site" / "vllm.py"
    stub.write_text(stub.read_text().replace('"dummy"', '"auto"'))
    assert vllm.answers(tiny.path, [[1, 2], [3]], 4) == [[1] * 4, [1] * 4]


def test_failure_of_vllm_is_reported(tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm(tmp_path / "site", monkeypatch, missing=1)
    with pytest.raises(RuntimeError, match="exit code 1"):
        list(PEERS["vllm"](tiny, [Scenario.parse("single-16")], 1, 0.01))


def test_static_cache_loop_generates_the_tokens_of_transformers(tiny: Model) -> None:
    torch.manual_seed(0)
    peer = load(tiny, "cpu", torch.float32)
    with torch.no_grad():  # large weights, so that the tokens depend on attention
        for weight in peer.model.layers.parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, 2 * weight.shape[1] ** -0.5)
    prompts = torch.tensor(Scenario.parse("batch3-40").prompts(320))
    expected = peer.generate(prompts, max_new_tokens=9, do_sample=False, eos_token_id=None)[:, 40:]
    assert len({tuple(row) for row in expected.tolist()}) == 3
    decoding = Decoding(peer, 3, 40, 60, compiles=False)
    decoding.prefill(prompts)
    first = decoding.tokens.clone()
    for _ in range(2):
        decoding.rewind()
        decoding.tokens.copy_(first)
        rows = [first]
        for _ in range(8):
            decoding.step()
            rows.append(decoding.tokens.clone())
        assert torch.equal(torch.cat(rows, 1), expected)


def test_peers_reject_scenarios_that_they_cannot_measure(tiny: Model) -> None:
    import msgspec

    real = msgspec.structs.replace(tiny, load="auto")
    for measure in PEERS.values():
        with pytest.raises(RuntimeError, match="random weights"):
            list(measure(real, [], 1, 0.01))


def test_anchor_is_found_by_run() -> None:
    run = {
        "engine": "vllm", "model": "llama-3.1-8b", "dtype": "bfloat16", "scenario": "single-512",
        "num_draft_tokens": 0, "acceptance_length": None,
    }  # fmt: skip
    anchor = anchor_of(run, "NVIDIA H200")
    assert anchor is not None and anchor.tokens_per_s == 205
    drafted = anchor_of(run | {"num_draft_tokens": 3, "acceptance_length": 3.2}, "NVIDIA H200")
    assert drafted is not None and drafted.tokens_per_s == 498
    other = anchor_of(run, "NVIDIA H100 80GB HBM3")
    assert other is not None and other.tokens_per_s == 150.6
    assert anchor_of(run, "NVIDIA A100") is None
    assert anchor_of(run | {"dtype": "float32"}, "NVIDIA H200") is None
    quantised = anchor_of(run | {"dtype": "fp8", "scenario": "batch64-512"}, "NVIDIA H200")
    assert quantised is not None and quantised.tokens_per_s == 12_222
    assert anchor_of(run | {"dtype": "fp8", "scenario": "single-32k"}, "NVIDIA H200") is None
    assert anchor_of(run | {"scenario": "single-16"}, "NVIDIA H200") is None
    divided = anchor_of(run | {"num_gpus": 2}, "NVIDIA H200")
    assert divided is not None and divided.tokens_per_s == 288
    assert anchor_of(run | {"num_gpus": 4}, "NVIDIA H200") is None
    assert is_void(run | {"tokens_per_s": 198.0}, "NVIDIA H200")
    assert not is_void(run | {"tokens_per_s": 199.0}, "NVIDIA H200")


def test_anchors_are_of_distinct_runs() -> None:
    for anchors in ANCHORS.values():
        keys = [(a.engine, a.model, a.scenario, a.num_draft_tokens, a.num_gpus, a.dtype) for a in anchors]
        assert len(set(keys)) == len(keys)
        assert {a.model for a in anchors} <= set(MODELS)


def test_vllm_captures_the_rows_of_the_scenarios(tmp_path: Path) -> None:
    model = prepare("tiny", tmp_path / "tiny")
    scenarios = ["single-512", "batch6-512"]
    job = Job(folder=str(model.path), repeats=1, scenarios=scenarios, num_draft_tokens=2)

    assert settings_of(job)["compilation_config"] == {
        "cudagraph_capture_sizes": [1, 2, 3, 4, 6, 8, 16, 18],
    }
    assert "compilation_config" not in settings_of(Job(folder=str(model.path), repeats=1, prompt_lengths=[8]))


def test_vllm_computes_recurrent_layers_without_flashinfer(tmp_path: Path) -> None:
    for name, backend in (("tiny", None), ("qwen3.5-0.8b", "triton")):
        model = prepare(name, tmp_path / name)
        job = Job(folder=str(model.path), repeats=1, prompt_lengths=[8])
        assert settings_of(job).get("gdn_prefill_backend") == backend


NOTING = """
import json

def initialise(self, *, model, load_format, **settings):
    notes = {"config": json.loads(open(model + "/config.json").read()), **settings}
    open(sys.path[0] + "/notes", "w").write(json.dumps(notes))

def applied(self, function):
    return [["Blocks"]]

LLM.__init__, LLM.apply_model = initialise, applied
"""


def test_vllm_drafts_with_the_mtp_layer_of_a_nested_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = prepare("tiny-hybrid", tmp_path / "tiny", "fp8-blocks")
    fake_vllm(tmp_path / "site", monkeypatch, missing=0)
    notes = tmp_path / "notes"
    noting = NOTING.replace('sys.path[0] + "/notes"', repr(str(notes)))
    (tmp_path / "site" / "vllm.py").write_text(f"MISSING = 0\n{VLLM}\n{noting}")
    scenario = Scenario.parse("batch4-16")
    draft = MtpDraft(model=model, weights="fp8")
    (drafted,) = measure_drafts(model, draft, [scenario], 1, 0.01, num_draft_tokens=3, acceptance_length=2.5)
    assert (drafted.dtype, drafted.num_draft_tokens) == ("fp8-blocks", 3)
    assert str(drafted.settings).endswith("computes with Blocks")
    context = scenario.mean_context()
    num_bytes = model.decode_bytes(4, context, 2) + draft.round_bytes(3, 4, context, 2)
    assert drafted.bytes_per_round == num_bytes
    found = json.loads(notes.read_text())
    assert found["speculative_config"] == {
        "method": "mtp",
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.5,
    }
    assert (found["language_model_only"], found["gdn_prefill_backend"]) == (True, "triton")
    assert found["max_model_len"] == 1024 and "quantization" not in found
    config = found["config"]
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    given = json.loads((model.path / "config.json").read_text())
    skipped = given.pop("quantization_config")["modules_to_not_convert"]
    assert (config["model_type"], config["text_config"]) == ("qwen3_5", given)
    assert "model.layers.0.linear_attn.in_proj_a" in skipped
    modules = config["quantization_config"]["modules_to_not_convert"]
    assert {"lm_head", "mtp.fc", "model.language_model.layers.0.linear_attn.in_proj_a"} <= {*modules}
    assert len(modules) == len(skipped)


def test_transformers_reads_configs_for_mtp_layers(tmp_path: Path) -> None:
    for name, kind in (("qwen3.6-27b", "Qwen3_5"), ("qwen3.6-35b-a3b", "Qwen3_5Moe")):
        nested = tmp_path / f"{name}-nested"
        nested.mkdir()
        write_mtp_config(prepare(name, tmp_path / name).path, nested)
        config = transformers.AutoConfig.from_pretrained(nested)
        assert type(config).__name__ == f"{kind}Config"
        assert config.text_config.mtp_num_hidden_layers == 1
        assert (
            config.get_text_config().layer_types.count("full_attention")
            == config.text_config.num_hidden_layers // 4
        )
    for name, model_type in (("glm-4.7-flash", "glm4_moe_lite"), ("deepseek-v3-4-layers", "deepseek_v3")):
        model, flat = prepare(name, tmp_path / name), tmp_path / f"{name}-flat"
        flat.mkdir()
        write_mtp_config(model.path, flat)
        config = transformers.AutoConfig.from_pretrained(flat)
        assert (config.model_type, config.num_nextn_predict_layers) == (model_type, 1)
        assert config.first_k_dense_replace == 1 < config.num_hidden_layers
        settings = json.loads((model.path / "config.json").read_text())
        settings["num_nextn_predict_layers"] = 0
        (model.path / "config.json").write_text(json.dumps(settings))
        with pytest.raises(ValueError, match=f"num_nextn_predict_layers of {name}: expected 1"):
            write_mtp_config(model.path, flat)
    with pytest.raises(ValueError, match="architecture LlamaForCausalLM: expected one of Qwen3_5ForCausalLM"):
        write_mtp_config(prepare("tiny", tmp_path / "tiny").path, tmp_path)


def test_weights_are_copied_into_the_decoder_of_a_model_that_reads_images(tmp_path: Path) -> None:
    gate = torch.randn(3, 4)
    torch.save({"model.gate.weight": gate}, tmp_path / "weights.pt")
    model = torch.nn.ModuleDict({"language_model": Named()})
    assert copying(str(tmp_path / "weights.pt"))(model) == []
    assert torch.equal(model["language_model"].model["gate"].weight.data, gate)
