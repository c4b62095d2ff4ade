"""Opens a model: from its name to a model that is ready to serve. Runs on the engine's thread."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct

from drift_sdk.config import EngineConfig
from drift_sdk.driver.loaded_model import LoadedModel
from drift_sdk.driver.request import ModelText
from drift_sdk.errors import ConfigError, ModelLoadError, RequestError, short_repr
from drift_sdk.execution.drafter_factory import DrafterFactory
from drift_sdk.execution.stages import StageMarks
from drift_sdk.loading.source import Source, eos_token_ids, expand_home, name_role, resolve
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.models.shard import Shard
from drift_sdk.models.weights import weight_bytes
from drift_sdk.progress import Download, Report, ignore_progress
from drift_sdk.sampling_params import SamplingParams
from drift_sdk.scheduling.config import SchedulerConfig
from drift_sdk.startup.device_memory import DeviceMemory
from drift_sdk.startup.executor_factory import (
    OpenedExecutor,
    choose_executor,
    kv_demand,
    open_eager_executor,
    open_graph_executor,
)
from drift_sdk.startup.kv_sizing import KVDemand, check_model_len, gib
from drift_sdk.startup.model_config import check_kv_scheme, read_config
from drift_sdk.startup.model_part import ModelPart, StoredWeights, load_part
from drift_sdk.startup.tensor_parallel import (
    check_division,
    opening_locks,
    parallel_devices,
    shards_of,
)
from drift_sdk.startup.views import check_views, view_costs, view_layout
from drift_sdk.startup.weight_form import choose_weight_form, stored_scheme, with_weight_form
from drift_sdk.steps import ExecutorLimits
from drift_sdk.text.chat import ChatTemplate, configured_template
from drift_sdk.text.no_tokenizer import NoTokenizer
from drift_sdk.text.tokenizer import Tokenizer

__all__ = ["dtype_name", "open_model"]

log = logging.getLogger("drift_sdk")

BLOCK_SIZES = {"eager": 16, "graph": 64}
"""Tokens in a KV block by default."""


def open_model(
    model: str | Path,
    config: EngineConfig,
    report: Report,
    *,
    acceptance_trace: Sequence[int] | None = None,
    stages: StageMarks | None = None,
) -> LoadedModel:
    """Find the model's files, load weights and tokenizer, and make the executor. Runs on the engine's thread.

    report:           called with each stage and the fraction of it that is done, 0 to 1.
    acceptance_trace: for measurement with graphs: tokens that rounds emit in turn, whatever was drafted.
    stages:           for measurement with graphs: marks around the stages of a step.

    Raises ModelLoadError or ConfigError, and ExecutorError if the device fails.
    """
    use_threads(config.num_threads)
    report("find", 0.0)
    device = choose_device(config)
    dtype = choose_dtype(config, device)
    choose_executor(config, device)  # raises before anything is downloaded
    devices = parallel_devices(config, device)
    source = resolve(
        model,
        **hub_settings(config),
        revision=config.revision,
        report=report,
        judge=lambda source: _check_shapes(source, config, device, dtype),
        has_weights=config.load == "auto",
    )
    decoder_config = read_config(source, config)
    check_kv_scheme(source, config, decoder_config)
    executor_name, fallback = choose_executor(config, device)
    config = with_weight_form(config, decoder_config, executor_name, device, dtype)
    check_division(config, decoder_config, executor_name)
    check_views(config, decoder_config)

    if executor_name == "graph":
        from drift_sdk._kernels.common.cache_keys import prepare_cache_keys  # needs Triton

        prepare_cache_keys()

    report("load tokenizer", 0.0)
    load = partial(load_text, source, config, decoder_config.vocab_size)
    with opening_locks(devices), loaded_beside(config, load, report) as loading_text:
        weights = [
            StoredWeights(source, decoder_config, place, dtype, shard)
            for place, shard in zip(devices, shards_of(config), strict=True)
        ]
        parts = _load_parts(weights, config, checked(report, loading_text))
        first, drafter_factory = parts[0], parts[0].drafter_factory
        text = loading_text.result()
        demand = kv_demand(first.decoder, drafter_factory, config.block_size or BLOCK_SIZES[executor_name])
        if executor_name == "graph":
            opened = open_graph_executor(config, parts, demand, report, acceptance_trace, stages)
        else:
            opened = open_eager_executor(config, first, demand)
    kv_dtype = first.decoder.kv_form or dtype_name(first.decoder.dtype)
    _log_kv_cache(opened.executor.limits, demand, kv_dtype)
    report("ready", 1.0)
    return LoadedModel(
        executor=opened.executor,
        executor_name=executor_name,
        fallback=fallback,
        num_tuned_shapes=opened.num_tuned,
        untuned_shapes=opened.untuned,
        kv_dtype=kv_dtype,
        scheduling=_scheduling(config, opened, drafter_factory, decoder_config),
        text=_model_text(text, opened.executor.limits, has_drafts=bool(drafter_factory.draft_choices)),
    )


def _load_parts(weights: Sequence[StoredWeights], config: EngineConfig, report: Report) -> list[ModelPart]:
    """The parts of a model, each on its GPU, one after the other."""
    parts = [load_part(each, config, report) for each in weights]
    if len({part.drafter_factory.draft_choices for part in parts}) > 1:
        raise ModelLoadError("the draft could be loaded on some GPUs alone")

    return parts


@contextmanager
def loaded_beside(
    config: EngineConfig, load: Callable[[Report], Text], report: Report
) -> Iterator[Future[Text]]:
    """Load what concerns text on another thread, while the block loads weights: the tokenizer of a large
    vocabulary takes as long.

    A tokenizer of another model may have to be downloaded, which is reported: it is loaded before the block.
    """
    if config.tokenizer is not None:
        done: Future[Text] = Future()
        done.set_result(load(report))
        yield done
        return

    with ThreadPoolExecutor(1, thread_name_prefix="drift-tokenizer") as threads:
        yield threads.submit(load, ignore_progress)


def checked(report: Report, text: Future[Text]) -> Report:
    """A report of the loading of weights that raises the error that loading what concerns text has raised."""

    def checked_report(stage: str, fraction: float, download: Download | None = None) -> None:
        if text.done():
            text.result()
        report(stage, fraction, download)

    return checked_report


class Text(Struct, frozen=True, kw_only=True):
    """The parts of a `ModelText` that are read from files."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    default_params: SamplingParams


def load_text(source: Source, config: EngineConfig, vocab_size: int, report: Report) -> Text:
    """All of a model that concerns text. Raises ModelLoadError naming the file."""
    tokenizer, templates = _tokenizer(source, config, report)
    return Text(
        tokenizer=tokenizer,
        chat_template=_chat_template(source, config, tokenizer, templates),
        default_params=_default_params(source),
        eos_token_ids=eos_token_ids(source, vocab_size),
    )


def _model_text(text: Text, limits: ExecutorLimits, *, has_drafts: bool) -> ModelText:
    return ModelText(
        tokenizer=text.tokenizer,
        chat_template=text.chat_template,
        eos_token_ids=text.eos_token_ids,
        default_params=text.default_params,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        has_drafts=has_drafts,
    )


def _scheduling(
    config: EngineConfig, opened: OpenedExecutor, drafter_factory: DrafterFactory, model: DecoderConfig
) -> SchedulerConfig:
    limits = opened.executor.limits
    layout = view_layout(config, limits, drafter_factory.draft_choices)
    return SchedulerConfig(
        max_num_seqs=limits.max_num_seqs,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        prefill_token_budget=config.prefill_token_budget,
        draft_choices=drafter_factory.draft_choices,
        max_tree_depth=drafter_factory.max_tree_depth,
        is_draft_adaptive=drafter_factory.is_adaptive,
        round_costs=opened.round_costs,
        mixed_tokens=opened.mixed_tokens,
        view_layout=layout,
        view_costs=None if layout is None else view_costs(layout, model, opened.refresh_costs),
        has_draft_kv=drafter_factory.needs_draft_kv,
        wants_history=drafter_factory.needs_history,
        target_latency_ms_p50=config.target_latency_ms_p50,
        target_latency_ms_p95=config.target_latency_ms_p95,
        prefer_high_throughput=config.prefer_high_throughput,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as configurations name it."""
    return str(dtype).removeprefix("torch.")


def _log_kv_cache(limits: ExecutorLimits, demand: KVDemand, kv_dtype: str) -> None:
    log.info(
        "KV cache: %d tokens in %s, %s, for up to %d sequences of up to %d tokens",
        limits.num_blocks * limits.block_size,
        kv_dtype,
        gib(limits.num_blocks * demand.bytes_per_block),
        limits.max_num_seqs,
        limits.max_model_len,
    )


def hub_settings(config: EngineConfig) -> dict[str, Any]:
    """Arguments of `find` and `resolve` for any role."""
    return {"cache_dir": config.cache_dir, "local_files_only": config.local_files_only}


def _check_shapes(source: Source, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raise the errors of opening a model that its config shows, before its weights are downloaded."""
    decoder_config = read_config(source, config)
    check_kv_scheme(source, config, decoder_config)
    executor_name, _ = choose_executor(config, device)
    config = with_weight_form(config, decoder_config, executor_name, device, dtype)
    check_division(config, decoder_config, executor_name)
    check_views(config, decoder_config)
    check_model_len(config, decoder_config.max_position_embeddings)
    form = choose_weight_form(config, decoder_config)
    decoder_config = Shard(rank=0, size=config.tensor_parallel).config(decoder_config)
    if form != "stored" or stored_scheme(config, decoder_config) is None:  # else files have the sizes
        DeviceMemory(device, config).check_weights(weight_bytes(decoder_config, dtype, form))


def use_threads(num_threads: int | None) -> None:
    """Have torch split operations of the calling thread over so many threads; None changes nothing.

    torch keeps the number in each thread that uses it, and gives threads that begin later the number that was
    set last: that is set to what it was, by a thread that ends at once.
    """
    if num_threads is None or num_threads == torch.get_num_threads():
        return

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    restorer = threading.Thread(target=torch.set_num_threads, args=(before,))
    restorer.start()
    restorer.join()


def choose_device(config: EngineConfig) -> torch.device:
    """The device of a configuration; ConfigError if this machine does not have it."""
    has_gpu = torch.cuda.is_available()
    if config.device == "auto":
        return torch.device("cuda", 0) if has_gpu else torch.device("cpu")

    device = torch.device(config.device)
    if device.type == "cuda" and (not has_gpu or (device.index or 0) >= torch.cuda.device_count()):
        found = f"{torch.cuda.device_count()} GPUs" if has_gpu else "no GPU"
        raise ConfigError.of("device", config.device, f"a device of this machine, which has {found}")

    return device


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32

    if config.dtype == "float16" and device.type == "cpu":
        raise ConfigError.of("dtype", config.dtype, "float32 or bfloat16 on the CPU")

    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype]


def _tokenizer(source: Source, config: EngineConfig, report: Report) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer, and the chat templates that come with it or with the model, by name."""
    if config.tokenizer is None:
        if source.has_tokenizer:
            return source.tokenizer(), source.chat_templates

        log.warning("%s holds no tokenizer.json: requests and results are token ids alone", source.path)
        return NoTokenizer(str(source.path)), {}

    if str(config.tokenizer).endswith(".json"):
        with name_role("tokenizer"):
            tokenizer = Tokenizer.from_file(expand_home(config.tokenizer))
        return tokenizer, source.chat_templates

    other = resolve(config.tokenizer, role="tokenizer", **hub_settings(config), report=report)
    with name_role("tokenizer"):
        tokenizer, templates = other.tokenizer(), other.chat_templates
    return tokenizer, templates or source.chat_templates


def _chat_template(
    source: Source, config: EngineConfig, tokenizer: Tokenizer, templates: Mapping[str, str]
) -> ChatTemplate | None:
    template: Callable[..., ChatTemplate] = ChatTemplate
    if config.chat_template is not None and config.chat_template in templates:
        templates = {"default": templates[config.chat_template]}
    elif config.chat_template is not None:
        if re.fullmatch(r"[\w.-]+", config.chat_template):
            named = f", which has {', '.join(map(repr, templates)) or 'none'}"
            allowed = f"a Jinja template, or the name of one of the model's templates{named}"
            raise ConfigError.of("chat_template", config.chat_template, allowed)

        templates, template = {"default": config.chat_template}, configured_template

    make = partial(
        template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        tool_format=config.tool_format,
        reasoning_format=config.reasoning_format,
    )
    default, with_tools = templates.get("default"), templates.get("tool_use")
    try:
        for_tools = make(with_tools) if with_tools is not None else None
        return make(default, with_tools=for_tools) if default is not None else for_tools
    except ModelLoadError as error:
        raise ModelLoadError(f"{source.path}: {error}") from error


def _default_params(source: Source) -> SamplingParams:
    """The model's own sampling defaults, from generation_config.json. They are read as transformers reads
    them, except that a temperature without do_sample turns sampling on too."""
    settings = {name: value for name, value in source.generation_config.items() if value is not None}
    does_sample = settings.get("do_sample", "temperature" in settings)
    names = {"max_new_tokens": "max_tokens", "repetition_penalty": "repetition_penalty"}
    if does_sample:
        settings.setdefault("temperature", 1.0)
        names |= {name: name for name in ("temperature", "top_k", "top_p", "min_p")}

    file = source.path / "generation_config.json"
    if not isinstance(does_sample, bool):
        raise ModelLoadError(f"{file}: do_sample={short_repr(does_sample)}: expected true or false")

    try:
        return SamplingParams(**{names[name]: value for name, value in settings.items() if name in names})
    except RequestError as error:
        name = next(name for name, field in names.items() if field == error.field)
        raise ModelLoadError(f"{file}: {name}={short_repr(error.value)}: expected {error.allowed}") from error
