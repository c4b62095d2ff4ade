"""README and documents: snippets run, links lead to files and headings, the API page matches the code."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import httpx
import pytest
from loops import WAIT_S
from model_zoo import make_model
from slow_cases import slow_after

import drift_sdk
from drift_sdk import Engine, EngineConfig, EnginePool, prometheus
from drift_sdk.cli.command_line import main as drift_sdk_main
from drift_sdk.families import families, read_spec
from drift_sdk.loading.source import Source, found_at
from drift_sdk.testing import scripted_engine

ROOT = Path(__file__).parent.parent
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


@pytest.fixture
def any_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolves every model name to a small random model."""
    make_model(0, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    monkeypatch.setattr("drift_sdk.startup.model_startup.resolve", lambda model, **_: Source(tmp_path))
    monkeypatch.setattr("drift_sdk.startup.model_startup.find", lambda model, **_: found_at(tmp_path))


def snippets_of(file: str) -> list[str]:
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / file).read_text(), flags=re.DOTALL)
    assert snippets
    return snippets


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_snippets_of_a_first_page_run_as_scripts(
    page: str, any_model: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, snippet in enumerate(snippets_of(page)):
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(snippet, f"{page}#{number}", "exec"), names)
        tests = [value for name, value in names.items() if name.startswith("test_")]
        for test in tests:
            asyncio.run(test())
        assert tests or capsys.readouterr().out


def test_the_readme_is_short() -> None:
    """The tests beside this one run its snippets."""
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 600
    blocks = re.findall(r"```(?:python)?\n(.*?)```", text, flags=re.DOTALL)
    for subject, limit in (("print(chunk.text", 8), ("drift_sdk serve", 1), ("assert ", 4), ("make test", 2)):
        (block,) = [block for block in blocks if subject in block]
        assert len([line for line in block.splitlines() if line]) <= limit


DEPLOYMENT = tuple(f"deployment/{name}" for name in ("operations", "scaling", "server", "sizing"))
GUIDE_NAMES = ("batch", "embeddings", "streaming", "structured", "sync", "testing", "tools", "weights")
GUIDE = tuple(f"guide/{name}" for name in GUIDE_NAMES)
NAMES = (*DEPLOYMENT, *GUIDE, "migration", "models", "speculation", "troubleshooting")
PAGES = tuple(f"docs/{name}.md" for name in NAMES)


@pytest.mark.parametrize("page", PAGES)
def test_snippets_of_a_page_run(page: str, any_model: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run one after the other, with `await` at the top level."""
    for name in [name for name in os.environ if name.startswith("DRIFT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DRIFT_MAX_NUM_SEQS", "")  # set by a snippet
    module = types.ModuleType("snippets")
    monkeypatch.setitem(sys.modules, "snippets", module)  # typing looks names up there

    async def main() -> None:
        for number, snippet in enumerate(snippets_of(page)):
            code = compile(snippet, f"{page}#{number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code, module.__dict__)  # a coroutine if the snippet awaits
            if inspect.iscoroutine(result):
                await result

    asyncio.run(main())


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to send")
@pytest.mark.parametrize(
    "page", slow_after(1, ["README.md", "docs/quickstart.md", "docs/deployment/server.md"])
)
def test_the_command_that_serves_runs(page: str, tmp_path: Path) -> None:
    """With a small random model, and a free port."""
    make_model(0, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    found = re.findall(r"^python -m (drift_sdk serve .*)$", (ROOT / page).read_text(), flags=re.MULTILINE)
    [arguments] = [line.split() for line in found]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    arguments[2], arguments[arguments.index("--port") + 1] = str(tmp_path), port
    with subprocess.Popen([sys.executable, "-m", *arguments], stderr=subprocess.PIPE, text=True) as process:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as client:
            while True:
                try:
                    assert client.get("/health").json()["status"] == "ok"
                    break
                except httpx.ConnectError:
                    assert process.poll() is None
                    time.sleep(0.1)
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            assert client.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] > 0
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err


@pytest.fixture
def scripted_ray(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Puts scripted engines in place of those of Ray, and a module in place of Ray, which may be missing;
    returns the arguments of each engine."""
    ray, errors = types.ModuleType("ray"), types.ModuleType("ray.exceptions")
    for name in ("ActorUnavailableError", "RayActorError", "RayError", "RayTaskError"):
        setattr(errors, name, type(name, (Exception,), {}))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", errors)
    for name in [name for name in sys.modules if name.startswith("drift_sdk.ray")]:
        monkeypatch.delitem(sys.modules, name)
    given: list[dict[str, Any]] = []

    def new_engine(model: str, config: EngineConfig, **options: Any) -> Engine:
        given.append({"model": model, **options})
        return scripted_engine("Hi.", config=config)

    module = importlib.import_module("drift_sdk.ray")
    monkeypatch.setattr(module, "RayEngine", new_engine)
    for name in [name for name in sys.modules if name.startswith("drift_sdk.ray")]:
        monkeypatch.setitem(sys.modules, name, sys.modules.pop(name))  # removed after the test
    return given


def test_snippet_of_a_cluster_runs(
    scripted_ray: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """With scripted engines in place of those of a cluster."""
    _run_snippet_of_scaling("drift_sdk.ray")
    assert capsys.readouterr().out == "Hi.\n"
    assert len(scripted_ray) == 4 and scripted_ray[0]["placement"].num_gpus == 1


def test_snippet_of_a_divided_model_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a scripted engine in place of one on two GPUs."""
    given = []

    def new_engine(model: str, config: EngineConfig) -> Engine:
        given.append(config.tensor_parallel)
        return scripted_engine("Paris.", config=EngineConfig())

    monkeypatch.setattr(drift_sdk, "Engine", new_engine)
    _run_snippet_of_scaling("tensor_parallel")
    assert "Paris." in capsys.readouterr().out and given == [2]


def test_snippet_of_a_pool_of_processes_runs() -> None:
    """It starts nothing."""
    assert "0 of 2 open" in repr(_run_snippet_of_scaling("processes=True", EnginePool=EnginePool)["pool"])


def _run_snippet_of_scaling(subject: str, **names: object) -> dict[str, object]:
    """Run the snippet of docs/deployment/scaling.md that contains `subject`, among those that need GPUs or a
    cluster, with these names defined; return all names afterwards."""
    page = ROOT / "docs/deployment/scaling.md"
    snippets = re.findall(r"```py\n(.*?)```", page.read_text(), flags=re.DOTALL)
    [snippet] = [snippet for snippet in snippets if subject in snippet]
    code = compile(snippet, "scaling.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    found = eval(code, names)
    if asyncio.iscoroutine(found):
        asyncio.run(found)
    return names


def test_the_page_of_models_lists_the_architectures() -> None:
    text = (ROOT / "docs/models.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted(family.architectures[0] for family in families())
    (line,) = [line for line in text.splitlines() if line.startswith("GGUF files of these architectures")]
    names = {architecture.name for family in families() for architecture in family.gguf}
    assert sorted(re.findall(r"`([\w-]+)`", line)) == sorted(names)


def test_names_of_the_migration_page_exist() -> None:
    names = re.findall(r"`([A-Z]\w+)\.(\w+)", (ROOT / "docs/migration.md").read_text())
    own = [(kind, name) for kind, name in names if hasattr(drift_sdk, kind)]
    assert len(own) > 40
    assert not [f"{kind}.{name}" for kind, name in own if not hasattr(getattr(drift_sdk, kind), name)]


def test_names_of_the_page_of_troubleshooting_exist(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    fields = re.findall(r"`([A-Z]\w+)\.(\w+)", text)
    assert len(fields) > 30
    assert not [f"{kind}.{name}" for kind, name in fields if not hasattr(getattr(drift_sdk, kind), name)]
    metrics = set(re.findall(r"`(drift_(?!sdk)\w+)`", text))
    described = re.findall(r"^(drift_\w+)", prometheus.__doc__ or "", flags=re.MULTILINE)
    assert len(metrics) > 8 and metrics <= set(described)
    labels = re.findall(r"\| `EngineStats.num_undrafted_\w+` \| `(\w+)` \|", text)
    (reasons,) = [line for line in (prometheus.__doc__ or "").splitlines() if "undrafted_rows" in line]
    assert len(labels) == 5 and all(label in reasons for label in labels)
    for command in set(re.findall(r"python -m drift_sdk (\w+)", text)):
        with pytest.raises(SystemExit) as ended:
            drift_sdk_main([command, "--help"])
        assert ended.value.code == 0
    for module, options in re.findall(r"`python -m perf\.(\w+)([^`]*)`", text):
        source = (ROOT / "perf" / f"{module}.py").read_text()
        assert all(option in source for option in re.findall(r"--[a-z-]+", options))
    capsys.readouterr()


REJECTED: dict[str, dict[str, Any]] = {
    "architectures": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"},
    "quantization_config": {"quantization_config": {"quant_method": "bitsandbytes"}},
    "desc_act": {"quantization_config": {"quant_method": "gptq", "bits": 4, "desc_act": True}},
    "rope_type": {"rope_scaling": {"rope_type": "xpos"}},
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "final_logit_softcapping": {"final_logit_softcapping": 30.0},
}


def test_the_page_of_models_quotes_messages() -> None:
    quoted = re.findall(r"\| `(config: .*?)(?:, \.\.\.)?` \|", (ROOT / "docs/models.md").read_text())
    assert len(quoted) == len(REJECTED)
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64)
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 1}
    llama = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64, **sizes}
    for message, settings in zip(quoted, REJECTED.values(), strict=True):
        with pytest.raises(drift_sdk.ModelLoadError) as error:
            read_spec(llama | settings)
        assert str(error.value).startswith(message)


async def test_the_fastapi_handler_answers_with_the_right_status(any_model: None) -> None:
    """Errors of preparing a prompt become 400, a full queue 429, and both come before the headers."""
    (snippet,) = [text for text in snippets_of("docs/deployment/server.md") if "def stream_text(" in text]
    names: dict[str, Any] = {}
    exec(compile(snippet, "server.md#fastapi", "exec"), names)
    app = names["app"]
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://guide") as client,
    ):
        found = await client.get("/stream", params={"prompt": "Hello"})
        empty = await client.get("/stream", params={"prompt": ""})
        assert (found.status_code, empty.status_code) == (200, 400)
        assert "prompt" in empty.json()["detail"]

        class FullEngine:
            def generate(self, prompt: str) -> None:
                raise drift_sdk.QueueFull("8 requests are waiting")

        app.state.engine, engine = FullEngine(), app.state.engine
        full = await client.get("/stream", params={"prompt": "Hello"})
        app.state.engine = engine
        assert (full.status_code, full.json()["detail"]) == (429, "8 requests are waiting")


def pages() -> list[Path]:
    """All Markdown files of the repository."""
    folders = [ROOT / name for name in ("docs", "perf", "examples")]
    return [*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))]


def headings_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    anchors: set[str] = set()
    for title in re.findall(r"^#+ (.+?) *$", text, flags=re.MULTILINE):
        shown = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title)
        anchor = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        number = len([each for each in anchors if re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", each)])
        anchors.add(f"{anchor}-{number}" if number else anchor)
    return anchors


def test_links_lead_to_files_and_headings() -> None:
    broken = []
    for page in pages():
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and anchor not in headings_of(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken


def test_pages_that_are_named_exist() -> None:
    """In code, and in pages without a link."""
    sources = [
        path for name in ("src", "tests", "perf", "examples", "docs") for path in (ROOT / name).rglob("*.py")
    ]
    missing = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in (*pages(), *sources)
        for name in re.findall(r"(?<![\w/.])(?:docs|perf)/[\w/-]+\.md", file.read_text())
        if not (ROOT / name).exists()
    ]
    assert not missing


def test_the_api_page_matches_the_code() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import generate_api
    finally:
        sys.path.pop(0)
    assert generate_api.FILE.read_text() == generate_api.render(), "run python docs/generate_api.py"


def test_every_public_name_is_documented() -> None:
    for name in drift_sdk.__all__:
        if name not in ("FinishReason", "JobResult"):  # aliases of types
            assert inspect.getdoc(getattr(drift_sdk, name)), name
            for method, value in vars(getattr(drift_sdk, name)).items():
                if inspect.isfunction(value) and not method.startswith("_"):
                    assert inspect.getdoc(value), f"{name}.{method}"
