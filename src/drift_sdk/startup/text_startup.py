"""Loads what concerns text, beside the weights: tokenizer, chat templates, default parameters, end tokens.

The tokens that end a completion are those that settings name, the tokenizer's, and the chat template's.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from drift_sdk.config import EngineConfig
from drift_sdk.driver.prompts import ModelText
from drift_sdk.errors import ConfigError, ModelLoadError, RequestError, short_repr
from drift_sdk.events import Download, Report, ignore_progress
from drift_sdk.loading.source import (
    Source,
    eos_token_ids,
    expand_home,
    hub_settings,
    name_role,
    resolve,
)
from drift_sdk.sampling_params import SamplingParams
from drift_sdk.steps import ExecutorLimits
from drift_sdk.text.chat import ChatTemplate, configured_template
from drift_sdk.text.gguf_tokenizer import ANSWER_ENDS, MESSAGE_END, TOOL_ANSWER
from drift_sdk.text.tokenizer import NoTokenizer, Tokenizer

QUESTION, THOUGHT, ANSWER = "driftquestion", "driftthought", "driftanswer"
"""Texts of messages that no template has by itself."""


def completion_ends(
    named_ids: Sequence[int], tokenizer: Tokenizer, template: ChatTemplate | None, vocab_size: int
) -> tuple[int, ...]:
    """The ids that end a completion, `named_ids` first.

    Many fine-tuned models have settings of their base model, which name another end than their answers have:
    the tokenizer's end-of-sequence token and the token after an assistant's message in the template are ends
    as well, and so is the token with which Gemma 4 begins a tool's answer. Of gpt-oss, whose answers consist
    of several messages, the end of a message is none.
    """
    found = dict.fromkeys(named_ids)
    turn_end = None if template is None else _turn_end(tokenizer, template)
    ends = [tokenizer.eos_token_id, turn_end, tokenizer.token_to_id(TOOL_ANSWER)]
    if any(tokenizer.token_to_id(text) is not None for text in ANSWER_ENDS):
        message_end = tokenizer.token_to_id(MESSAGE_END)
        ends = [token_id for token_id in ends if token_id != message_end]
    found |= {token_id: None for token_id in ends if token_id is not None and token_id < vocab_size}
    return tuple(found)


def _turn_end(tokenizer: Tokenizer, template: ChatTemplate) -> int | None:
    """The added token that follows an assistant's message in a template. None if there is none, if it also
    stands inside of a message, after the reasoning, or if the template rejects the messages."""
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT},
    ]
    try:
        prompt = template.render(messages, add_generation_prompt=False)
    except RequestError:
        return None

    before, answer, after = prompt.rpartition(ANSWER)
    token = tokenizer.leading_added_token(after.lstrip()) if answer else None
    _, thought, between = before.rpartition(THOUGHT)
    if token is None or (thought and token in between):
        return None

    return tokenizer.token_to_id(token)


log: logging.Logger = logging.getLogger("drift_sdk")

UNSAMPLED_PARAMS = {"max_new_tokens": "max_tokens", "repetition_penalty": "repetition_penalty"}
PARAMS = UNSAMPLED_PARAMS | {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
"""Fields of SamplingParams by their names in generation_config.json; the first, those without sampling."""


class Text(Struct, frozen=True, kw_only=True):
    """The parts of a `ModelText` that are read from files."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    default_params: SamplingParams


def load_text(source: Source, config: EngineConfig, vocab_size: int, report: Report) -> Text:
    """All of a model that concerns text. Raises ModelLoadError naming the file."""
    tokenizer, templates = _tokenizer(source, config, report)
    chat_template = _chat_template(source, config, tokenizer, templates)
    named_ids = eos_token_ids(source, vocab_size)
    return Text(
        tokenizer=tokenizer,
        chat_template=chat_template,
        default_params=_default_params(source),
        eos_token_ids=completion_ends(named_ids, tokenizer, chat_template, vocab_size),
    )


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


def model_text(text: Text, limits: ExecutorLimits, *, has_drafts: bool, has_states: bool) -> ModelText:
    """All that requests need of a model besides its executor."""
    return ModelText(
        tokenizer=text.tokenizer,
        chat_template=text.chat_template,
        eos_token_ids=text.eos_token_ids,
        default_params=text.default_params,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        has_drafts=has_drafts,
        has_states=has_states,
    )


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
    """The model's own sampling defaults, from generation_config.json.

    They are read as transformers reads them, with three exceptions: a temperature without do_sample turns
    sampling on too; without top_k, none is applied, where transformers keeps 50 tokens; and -1 as top_k means
    none, as in vLLM. A value that SamplingParams refuses is ignored, and a warning names it.
    """
    file = source.path / "generation_config.json"
    settings = {name: value for name, value in source.generation_config.items() if value is not None}
    if settings.get("top_k") == -1:
        settings["top_k"] = 0
    does_sample = settings.get("do_sample", "temperature" in settings)
    if not isinstance(does_sample, bool):
        raise ModelLoadError(f"{file}: do_sample={short_repr(does_sample)}: expected true or false")

    params: dict[str, Any] = {}
    for name, field in PARAMS.items() if does_sample else UNSAMPLED_PARAMS.items():
        if name in settings and _is_valid(file, name, field, settings[name]):
            params[field] = settings[name]
    if does_sample:
        params.setdefault("temperature", 1.0)
    return SamplingParams(**params)


def _is_valid(file: Path, name: str, field: str, value: Any) -> bool:
    """Whether a field of SamplingParams may have a value of a file, where it is called `name`."""
    try:
        SamplingParams(**{field: value})
    except RequestError as error:
        found = f"{name}={short_repr(error.value)}"
        log.warning("%s: %s is ignored: expected %s", file, found, error.allowed)
        return False

    return True
