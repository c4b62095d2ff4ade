"""BaseEngine: the face that `Engine`, `EnginePool` and `RayEngine` share.

EngineKind: everything but the request that affects its tokens.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from importlib import metadata, resources
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from msgspec import Struct
from msgspec.structs import asdict

from drift_sdk.config import EngineConfig
from drift_sdk.sampling_params import SamplingParams
from drift_sdk.serving import Serving
from drift_sdk.stats import EngineMetrics, EngineStats

if TYPE_CHECKING:
    from drift_sdk.text.tokenizer import Tokenizer

LIBRARIES = ("torch", "triton", "cuda-core", "tokenizers", "llguidance")
CPU_INFO = Path("/proc/cpuinfo")


class EngineKind(Struct, frozen=True, kw_only=True):
    """Everything that tokens depend on besides prompt, parameters and seed. Two engines of one kind
    give a request the same tokens, as far as docs/guarantees.md promises it.

    model:          its name, which must name the same files for both.
    settings:       the fields of the config except `device`, as text.
    executor:       "graph", "eager" or "scripted".
    device:         name of the GPU or of the CPU.
    versions:       of this package and of the libraries that compute.
    table:          hash of the tuned table of the GPU; "" if there is none.
    max_model_len:  most tokens of prompt and completion together.
    default_params: parameters of requests that give none.
    is_lossy:       tokens may depend on other requests too, by `PartialVerification`.
    """

    model: str
    settings: dict[str, str]
    executor: str
    device: str
    versions: dict[str, str]
    table: str
    max_model_len: int
    default_params: SamplingParams
    is_lossy: bool = False

    @classmethod
    def of(
        cls,
        model: str,
        config: EngineConfig,
        *,
        executor: str,
        max_model_len: int,
        default_params: SamplingParams,
    ) -> EngineKind:
        """The kind of an open engine of this process."""
        device = device_name(config.device)
        return cls(
            model=model,
            settings={name: repr(value) for name, value in asdict(config).items() if name != "device"},
            executor=executor,
            device=device,
            versions=versions(),
            table=table_hash(device),
            max_model_len=max_model_len,
            default_params=default_params,
            is_lossy=config.speculation is not None and config.speculation.partial_verification is not None,
        )

    def differences(self, other: EngineKind) -> list[str]:
        """The fields in which another kind differs, each with both values; those of mappings one by one."""
        ours, theirs = flat(self), flat(other)
        return [
            f"{name}: {ours.get(name)!r} and {theirs.get(name)!r}"
            for name in dict.fromkeys((*ours, *theirs))
            if ours.get(name) != theirs.get(name)
        ]


def flat(kind: EngineKind) -> dict[str, object]:
    """The fields of a kind by name, and those of its mappings by their own names."""
    found: dict[str, object] = {}
    for name, value in asdict(kind).items():
        found.update(value if isinstance(value, dict) else {name: value})
    return found


def versions() -> dict[str, str]:
    """Versions of this package and of the installed libraries that compute."""
    found = {"drift_sdk": sys.modules["drift_sdk"].__version__}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue

    return found


def device_name(device: str) -> str:
    """The name of the GPU or of the CPU that a config's device stands for."""
    torch = sys.modules.get("torch")  # imported by an engine that computes
    if torch is None or device == "cpu" or not torch.cuda.is_available():
        return cpu_name()

    index = int(device.partition(":")[2] or 0)
    return str(torch.cuda.get_device_properties(index).name)


def cpu_name() -> str:
    """The model of the CPU, where the system tells it, else its architecture."""
    lines = CPU_INFO.read_text(errors="replace").splitlines() if CPU_INFO.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def table_hash(device: str) -> str:
    """Hash of the tuned table of a GPU; "" if it has none."""
    folder = resources.files("drift_sdk._kernels.gemm") / "tuned"
    file = folder / f"{'-'.join(device.lower().split())}.json"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


class BaseEngine(Serving):
    """An engine that serves requests: an `Engine`, or engines behind the same methods. For annotations of
    functions that take any of them."""

    @abstractmethod
    async def start(self) -> None:
        """Load the model and get ready to serve; returns at once if the engine is open. While it is closing,
        wait for that first.

        If the task is cancelled, the engine is closed unless another task has started it too; loading stops
        at the next tensor. Raises ModelLoadError or ConfigError, after which the engine
        is as if it had never been started, and EngineClosed if it is closed meanwhile."""

    @abstractmethod
    async def aclose(self, drain: float = 0.0) -> None:
        """Close the engine: reject new requests, end those that still run after `drain` seconds with
        EngineClosed, end the thread and free the memory. Returns when that is done; returns at once if the
        engine is closed. If the task is cancelled, the cancellation is raised afterwards.

        drain: seconds, 0 to 1,000,000; RequestError otherwise.
        """

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def pause(self) -> None:
        """Launch no more steps until `resume()`. Returns when no step is running. Requests are kept, and new
        ones are admitted. If the task is cancelled, the engine is as it was before. EngineClosed if it is not
        open, ExecutorError if it has failed."""
        await self._pause()

    @abstractmethod
    async def resume(self) -> None:
        """End all calls of `pause()`. If the task is cancelled, the cancellation is raised afterwards. Raises
        as `pause` does."""

    @abstractmethod
    async def sleep(self) -> None:
        """Free weights and KV cache until `wake()`. Requests are kept and compute their context again after
        that. If the task is cancelled, the cancellation is raised afterwards. Raises as `pause` does."""

    @abstractmethod
    async def wake(self) -> None:
        """Load the model again after `sleep()`, with the same number of KV blocks. If the task is cancelled,
        the cancellation is raised afterwards.

        ModelLoadError if that fails or requests cannot go on with the files as they are now; the engine then
        stays asleep. Raises as `pause` does.
        """

    @abstractmethod
    async def update_weights(self, tensors: Mapping[str, Any]) -> None:
        """Replace weights between two steps. Graphs and memory are kept, so this takes about as long as
        copying the tensors.

        tensors: by the names that the model's files have for them, one or all, on any device; torch tensors
                 of float32, bfloat16, float16 or float64, with the shapes of the files. Tensors of parts
                 that read images or sound are left out. They must not be changed before this returns. A layer
                 whose weights are quantised when they are loaded (`EngineConfig.weights`), or stand in
                 another order than in files, is replaced whole. Experts that are quantised when they are
                 loaded come one by one or in one tensor, as in the files.

        All or nothing: tensors are checked and memory is allocated before the first number is written. A
        layer that is replaced whole takes a layer's memory on the device for a while, and until the end its
        own in the host's; tensors on another device, in another dtype or not contiguous, one of the largest
        of them on that device.

        Requests go on: their text so far stays, their context is computed again with the new weights, and so
        is what follows; each step has one set of weights, and `Completion.weights_versions` tells which. The
        prefix cache is emptied. Drafts keep their own weights. The files are as they were: `wake()` and a
        restart load those again. If the task is cancelled, the cancellation is raised afterwards.

        RequestError names the first tensor that is not part of the model, has another shape or type, is not
        finite in the model's dtype or is missing beside others, and tells if memory is short; nothing has
        changed then. Also for weights that files store quantised and that are kept so, with
        `tensor_parallel`, for an engine that is asleep, and for engines in other processes. Raises as `pause`
        does.
        """

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether requests are admitted: the engine is started, not closing and has not failed."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """A snapshot of the engine's state and of its counters since the start, also of an engine that has
        failed. EngineClosed before the start and when it is closed."""

    @abstractmethod
    def metrics(self) -> EngineMetrics:
        """The statistics and histograms, with the names of model and executor, also of an engine that has
        failed. EngineClosed before the start and when it is closed.

        `drift_sdk.prometheus.collector` shows them in a registry of the host, those of several engines on one
        page.
        """

    def metrics_text(self) -> str:
        """The statistics and histograms as Prometheus text, from a registry that belongs to this engine.

        The docstring of `drift_sdk.prometheus` lists the names. Needs the extra `metrics`: DriftError without
        it. EngineClosed if the engine is not open.
        """
        from drift_sdk.prometheus import metrics_text

        shown = self.metrics()
        return metrics_text(shown.stats, shown.histograms, model=shown.model, executor=shown.executor)

    @property
    @abstractmethod
    def executor(self) -> str:
        """The executor that runs the steps, "graph" or "eager": with executor="auto" the one that was chosen.
        EngineClosed if the engine is not open."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Its `encode(text)` returns token ids, with those that the model has around a
        text unless `add_special_tokens=False`; `decode(ids)` returns a text; `token_to_id(token)` returns an
        id, or None for a token that the vocabulary lacks. `vocab_size`, `eos_token_id` and
        `special_token_ids` are attributes. `token_texts` is indexed by token id, and so is `token_bytes`,
        which tokenizers have whose `has_token_bytes` is True.

        The tokenizer of a model without one has `has_text` False and rejects every text. EngineClosed if the
        engine is not open."""
        return self._model_text().tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and completion together. EngineClosed if the engine is not open."""
        return self._model_text().max_model_len

    @abstractmethod
    async def _pause(self) -> Callable[[], None]:
        """Pause, and return the function that takes this pause back; others stay in force."""

    @abstractmethod
    async def _kind(self) -> EngineKind:
        """Everything that tokens depend on besides the request. EngineClosed if the engine is not open."""
