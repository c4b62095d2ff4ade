"""From a model's name to a model ready to serve. Runs on the engine's thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from drift_sdk.config import EngineConfig
from drift_sdk.driver.loaded_model import LoadedModel
from drift_sdk.driver.request import ModelText
from drift_sdk.errors import ConfigError, ModelLoadError, RequestError, short_repr
from drift_sdk.execution.stages import StageMarks
from drift_sdk.loading.source import Role, Source, eos_token_ids, expand_home, name_role, resolve
from drift_sdk.models.decoder import Decoder
from drift_sdk.models.decoder_config import DecoderConfig
from drift_sdk.sampling_params import SamplingParams
from drift_sdk.scheduling.config import SchedulerConfig
from drift_sdk.startup.device_memory import DeviceMemory, opening_lock
from drift_sdk.startup.draft_startup import open_drafter_factory
from drift_sdk.startup.executor_factory import (
    choose_executor,
    kv_demand,
    open_eager_executor,
    open_graph_executor,
)
from drift_sdk.startup.kv_sizing import gib
from drift_sdk.text.chat import ChatTemplate
from drift_sdk.text.tokenizer import Tokenizer

__all__ = ["open_model"]

log = logging.getLogger("drift_sdk")

BLOCK_SIZES = {"eager": 16, "graph": 64}

Report = Callable[[str, float], None]


def open_model(
    model: str | Path,
    config: EngineConfig,
    report: Report,
    *,
    acceptance_trace: Sequence[int] | None = None,
    stages: StageMarks | None = None,
) -> LoadedModel:
    """Find the files, load weights and tokenizer, make the executor; ModelLoadError or ConfigError.

    For measuring with graphs: acceptance_trace, tokens that rounds emit in turn, whatever was drafted;
    stages, marks around their parts.
    """
    report("find", 0.0)
    source = _resolve(model, config, "model", report)
    device = _device(config)
    dtype = _dtype(config, device)
    executor_name, fallback = choose_executor(config, device)
    decoder_config = _decoder_config(source)

    report("load tokenizer", 0.0)
    tokenizer, own_template = _tokenizer(source, config, report)
    chat_template = _chat_template(source, config, tokenizer, own_template)
    default_params = _default_params(source)
    eos_ids = eos_token_ids(source, decoder_config.vocab_size)

    with opening_lock(device):
        memory = DeviceMemory(device, config)
        decoder = _load_decoder(source, decoder_config, config, device, dtype, memory, report)
        drafter_factory = open_drafter_factory(config, decoder, report)
        block_size = config.block_size or BLOCK_SIZES[executor_name]
        demand = kv_demand(decoder, drafter_factory, block_size)
        if executor_name == "graph":
            opened = open_graph_executor(
                config, decoder, demand, memory, drafter_factory, report, acceptance_trace, stages
            )
        else:
            opened = open_eager_executor(config, decoder, demand, memory, drafter_factory)
    limits = opened.executor.limits
    num_bytes = limits.num_blocks * demand.bytes_per_block
    log.info(
        "KV cache: %d tokens, %s, for up to %d sequences of up to %d tokens",
        limits.num_blocks * limits.block_size,
        gib(num_bytes),
        limits.max_num_seqs,
        limits.max_model_len,
    )
    report("ready", 1.0)
    return LoadedModel(
        executor=opened.executor,
        executor_name=executor_name,
        fallback=fallback,
        untuned_shapes=opened.untuned,
        scheduling=SchedulerConfig(
            max_num_seqs=limits.max_num_seqs,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            prefill_token_budget=config.prefill_token_budget,
            draft_choices=drafter_factory.draft_choices,
            is_draft_adaptive=drafter_factory.is_adaptive,
            round_costs=opened.round_costs,
            has_draft_kv=drafter_factory.needs_draft_kv,
            wants_history=drafter_factory.needs_history,
            target_latency_ms_p50=config.target_latency_ms_p50,
            target_latency_ms_p95=config.target_latency_ms_p95,
            prefer_high_throughput=config.prefer_high_throughput,
        ),
        text=ModelText(
            tokenizer=tokenizer,
            chat_template=chat_template,
            eos_token_ids=eos_ids,
            default_params=default_params,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            has_drafts=bool(drafter_factory.draft_choices),
        ),
    )


def _resolve(name: str | Path, config: EngineConfig, role: Role, report: Report) -> Source:
    return resolve(
        name,
        role=role,
        revision=config.revision,
        cache_dir=config.cache_dir,
        local_files_only=config.local_files_only,
        report=report,
    )


def _device(config: EngineConfig) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if config.device == "auto":
        return torch.device("cuda", 0) if has_gpu else torch.device("cpu")

    device = torch.device(config.device)
    if device.type == "cuda" and (not has_gpu or (device.index or 0) >= torch.cuda.device_count()):
        found = f"{torch.cuda.device_count()} GPUs" if has_gpu else "no GPU"
        raise ConfigError.of("device", config.device, f"a device of this machine, which has {found}")

    return device


def _dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32

    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype]


def _tokenizer(source: Source, config: EngineConfig, report: Report) -> tuple[Tokenizer, str | None]:
    """The tokenizer and the chat template that comes with it."""
    if config.tokenizer is None:
        return source.tokenizer(), source.chat_template

    if str(config.tokenizer).endswith(".json"):
        with name_role("tokenizer"):
            tokenizer = Tokenizer.from_file(expand_home(config.tokenizer))
        return tokenizer, source.chat_template

    other = _resolve(config.tokenizer, config, "tokenizer", report)
    with name_role("tokenizer"):
        tokenizer, own_template = other.tokenizer(), other.chat_template
    return tokenizer, own_template or source.chat_template


def _decoder_config(source: Source) -> DecoderConfig:
    settings = source.config  # its errors name the file
    file = source.path if source.path.is_file() else source.path / "config.json"
    try:
        return DecoderConfig.from_hf(settings)
    except ModelLoadError as error:
        raise ModelLoadError(f"{file}: {error}") from error
    except Exception as error:  # whatever foreign settings of the wrong type lead to
        raise ModelLoadError(f"{file}: not the config of a model: {error!r}") from error


def _chat_template(
    source: Source, config: EngineConfig, tokenizer: Tokenizer, own: str | None
) -> ChatTemplate | None:
    text, origin = (config.chat_template, "EngineConfig") if config.chat_template else (own, source.path)
    if text is None:
        return None

    try:
        return ChatTemplate(text, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    except ModelLoadError as error:
        raise ModelLoadError(f"{origin}: {error}") from error


def _default_params(source: Source) -> SamplingParams:
    """The model's own sampling defaults. As transformers reads them, except that a temperature without
    do_sample asks for sampling too."""
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


def _load_decoder(
    source: Source,
    decoder_config: DecoderConfig,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    memory: DeviceMemory,
    report: Report,
) -> Decoder:
    report("load weights", 0.0)
    check_bytes = memory.check_weights
    if config.load == "random":
        return Decoder.random(decoder_config, device=device, dtype=dtype, check_bytes=check_bytes)

    return Decoder.load(
        decoder_config,
        source.tensors(),
        device=device,
        dtype=dtype,
        on_tensor=lambda done, total: report("load weights", done / total),
        check_bytes=check_bytes,
    )
