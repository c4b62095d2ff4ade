"""An engine without weights or GPU, for testing code that embeds one.

    engine = scripted_engine("Paris.")
    async with engine:
        assert (await engine.generate("Capital of France?")).text == "Paris."

Everything but the model is real: threads, streams, scheduling, stops, cancellation, parsing of tool calls.
"""

from __future__ import annotations

import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from drift_sdk._fields import check_float, check_int, with_config
from drift_sdk.config import EngineConfig, prefill_token_budget
from drift_sdk.driver.life_cycle import LoadedModel, with_limits
from drift_sdk.driver.prompts import ModelText, Prompt
from drift_sdk.driver.requests import Request
from drift_sdk.engine import Engine
from drift_sdk.errors import ConfigError
from drift_sdk.events import Report
from drift_sdk.execution.eager.slot import Slot
from drift_sdk.results import PromptStates, StateKind, TokenLogprobs
from drift_sdk.scheduling.planning import SchedulerConfig
from drift_sdk.steps import (
    DecodeRow,
    ExecutorLimits,
    PrefillChunk,
    SlotOutput,
    StepPlan,
    StepResult,
    TokenConstraint,
)
from drift_sdk.sync import SyncEngine
from drift_sdk.testing.replies import (
    EOS_TOKEN_ID,
    Answer,
    NextToken,
    Reply,
    ReplyLike,
    Script,
    byte_alphabet,
    byte_tokenizer,
)
from drift_sdk.text.chat import configured_template

__all__ = [
    "CHAT_TEMPLATE",
    "EOS_TOKEN_ID",
    "NextToken",
    "Reply",
    "ReplyLike",
    "ScriptedEngine",
    "ScriptedExecutor",
    "ScriptedModel",
    "ScriptedSyncEngine",
    "byte_alphabet",
    "byte_tokenizer",
    "scripted_engine",
    "scripted_sync_engine",
]


class ScriptedExecutor:
    """An executor whose tokens a script tells.

    Like a device, it runs steps in the order of their launch and keeps the lengths of its sequences itself.

    limits:          slots, blocks and lengths, as of any executor.
    script:          the replies.
    step_s:          seconds that a step takes, besides the delays of replies.
    tokens_per_step: most tokens that a decode row emits in one step.
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        script: Script,
        *,
        step_s: float = 0.0,
        tokens_per_step: int = 1,
    ) -> None:
        self.limits = limits
        self.is_closed: bool = False
        self.num_steps: int = 0
        self._script = script
        self._step_s = step_s
        self._tokens_per_step = tokens_per_step
        self._slots: dict[int, Slot] = {}
        self._arrivals: dict[int, int] = {}  # by slot
        self._constraints: dict[int, TokenConstraint | None] = {}  # by slot
        self._delay_s = 0.0  # of the step that is being collected
        # The KV cache: each place holds the token computed there, so that a prefix hit finds those tokens.
        self._kv = [-1] * (limits.num_blocks * limits.block_size)
        self._launched: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)

    @property
    def is_done(self) -> bool:
        return True

    def collect(self) -> StepResult:
        plan = self._launched.popleft()
        self.num_steps += 1
        self._delay_s = 0.0
        for assignment in plan.assignments:
            self._slots[assignment.slot] = Slot(assignment.sampling)
            self._arrivals[assignment.slot] = assignment.arrival
            self._constraints[assignment.slot] = assignment.constraint
        for update in plan.block_updates:
            self._slots[update.slot].place_blocks(update.first_index, update.block_ids)

        prefill = tuple(self._prefill(chunk) for chunk in plan.prefill)
        decode = tuple(self._decode(row) for row in plan.decode)
        duration_s = self._step_s + self._delay_s
        if duration_s:
            time.sleep(duration_s)
        return StepResult(step_id=plan.step_id, prefill=prefill, decode=decode, duration_s=duration_s)

    def close(self) -> None:
        self.is_closed = True
        self._slots.clear()

    def _prefill(self, chunk: PrefillChunk) -> SlotOutput:
        slot = self._slots[chunk.slot]
        for position, token in enumerate(chunk.token_ids, chunk.start):
            self._kv[self._kv_slot(slot, position)] = token
        if not chunk.is_last:
            return SlotOutput()

        slot.length = chunk.start + len(chunk.token_ids)
        output = self._emit(chunk.slot, 1)
        kind, num_prompt_tokens = slot.sampling.prompt_states, slot.sampling.num_prompt_tokens
        if kind is None or chunk.start + len(chunk.token_ids) > num_prompt_tokens:
            return output

        return replace(output, prompt_states=scripted_states(self._tokens(slot, num_prompt_tokens), kind))

    def _decode(self, row: DecodeRow) -> SlotOutput:
        return self._emit(row.slot, min(row.num_draft_tokens + 1, self._tokens_per_step))

    def _emit(self, slot_number: int, max_tokens: int) -> SlotOutput:
        slot, arrival = self._slots[slot_number], self._arrivals[slot_number]
        emitted: list[int] = []
        finish = None
        delay_s = 0.0
        while len(emitted) < max_tokens and not slot.is_finished:
            if slot.last_token >= 0:
                self._kv[self._kv_slot(slot, slot.length - 1)] = slot.last_token
            if self._script.next_token is not None:
                tokens = self._tokens(slot, slot.length)
                num_prompt_tokens = slot.sampling.num_prompt_tokens
                token = self._script.next_token(
                    tokens[:num_prompt_tokens], tokens[num_prompt_tokens:], slot.sampling.seed
                )
            else:
                answer, index = self._answer(slot, arrival), slot.length - slot.sampling.num_prompt_tokens
                if index >= len(answer.token_ids) and answer.failure is not None:
                    if emitted:
                        break  # they are delivered before the next step fails

                    raise answer.failure

                delay_s += answer.token_s if index else answer.first_token_s
                token = answer.token_ids[index] if index < len(answer.token_ids) else EOS_TOKEN_ID
            is_inside = token == EOS_TOKEN_ID and not may_end(self._constraints[slot_number], emitted)
            finish = slot.append(token)
            emitted.append(token)
            if is_inside:
                # The sequence goes on, so that its constraint gets the token, which fails the request.
                slot.is_finished, finish = False, None
                break

        self._delay_s = max(self._delay_s, delay_s)
        if slot.is_finished:
            self._script.ended(arrival)
        logprobs = None
        if slot.sampling.num_logprobs is not None:
            num_top = min(slot.sampling.num_logprobs, 1)  # a scripted token is the only one
            logprobs = tuple(
                TokenLogprobs(token_id=token, logprob=0.0, top=((token, 0.0),) * num_top) for token in emitted
            )

        return SlotOutput(token_ids=tuple(emitted), finish=finish, logprobs=logprobs)

    def _answer(self, slot: Slot, arrival: int) -> Answer:
        return self._script.answer(arrival, lambda: self._tokens(slot, slot.sampling.num_prompt_tokens))

    def _tokens(self, slot: Slot, end: int) -> list[int]:
        """The tokens of a sequence before position `end`, from the KV cache."""
        size, tokens = self.limits.block_size, list[int]()
        for block in slot.block_table[: -(-end // size)]:
            tokens += self._kv[block * size : (block + 1) * size]
        return tokens[:end]

    def _kv_slot(self, slot: Slot, position: int) -> int:
        block_size = self.limits.block_size
        return slot.block_table[position // block_size] * block_size + position % block_size


def may_end(constraint: TokenConstraint | None, token_ids: Sequence[int]) -> bool:
    """Whether a constraint lets the text end after tokens of the current step."""
    if constraint is None:
        return True

    mask = constraint.masks(token_ids)[len(token_ids)]
    return bool(mask[EOS_TOKEN_ID // 32] >> EOS_TOKEN_ID % 32 & 1)


def scripted_states(token_ids: Sequence[int], kind: StateKind) -> PromptStates:
    """Hidden states of `STATE_SIZE` numbers: the shares of the tokens so far that have each remainder of a
    division by it. Equal texts have equal ones, and texts of similar letters similar ones."""
    counts = [0] * STATE_SIZE
    rows: list[list[float]] = []
    for number, token_id in enumerate(token_ids, 1):
        counts[token_id % STATE_SIZE] += 1
        rows.append([count / number for count in counts])
    if kind == "mean":
        rows = [[sum(column) / len(rows) for column in zip(*rows, strict=True)]]
    rows = rows if kind == "all" else rows[-1:]
    data = array("f", [number for row in rows for number in row]).tobytes()
    return PromptStates(num_rows=len(rows), size=STATE_SIZE, data=data)


STATE_SIZE = 32
MAX_TOKENS_PER_STEP = 1024

# It takes tools, so that there is no warning, and leaves them out: each of their characters would be a token.
CHAT_TEMPLATE = (
    "{% if tools %}{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class ScriptedModel:
    """Opens a `ScriptedExecutor` in place of a model's files: the `open_model` of an `Engine`.

    reply:           the reply to every request; a list of the replies to the requests in the order of
                     submission; a function from the text of the prompt to the reply, such as
                     `lambda prompt: "yes"`; or a function that computes each next token of three arguments:
                     token ids of the prompt, token ids generated so far, seed. A reply is a text, a
                     `ToolCall`, a `Reply`, a mapping of its fields, an exception (see `Reply.raises`) or a
                     list that mixes them.
    config:          of the engine. None = a context of 4,096 tokens and a KV cache of 65,536.
    step_s:          seconds that a step takes, 0 to 3,600.
    tokens_per_step: most tokens that a decode row emits in one step, 1 to 1,024.

    It serves one engine at a time. RequestError and QueueFull are raised where they belong by the engine of
    `scripted_engine` alone; in another one they are failures of the executor.

    `executors` lists the executors opened so far, the newest last. To make opening fail or wait, wrap it:

        model = ScriptedModel("Paris.")

        def open_slowly(report, limits=None):
            time.sleep(1.0)
            return model(report, limits)

        engine = Engine("scripted", model.config, open_model=open_slowly)
    """

    @with_config(EngineConfig)
    def __init__(
        self,
        reply: ReplyLike | Sequence[object] | Callable[..., object] = "Hello!",
        *,
        config: EngineConfig | None = None,
        step_s: float = 0.0,
        tokens_per_step: int = 1,
    ) -> None:
        check_float(ConfigError, "step_s", step_s, ge=0.0, le=3600.0)
        check_int(ConfigError, "tokens_per_step", tokens_per_step, ge=1, le=MAX_TOKENS_PER_STEP)
        self.config: EngineConfig = (
            config if config is not None else EngineConfig(max_model_len=4096, kv_cache_tokens=65_536)
        )
        self.executors: list[ScriptedExecutor] = []
        self.script: Script = Script(reply)
        self._step_s = step_s
        self._tokens_per_step = tokens_per_step

    def __call__(self, report: Report, limits: ExecutorLimits | None = None) -> LoadedModel:
        config = with_limits(self.config, limits)
        template = configured_template(
            config.chat_template or CHAT_TEMPLATE,
            bos_token=None,
            eos_token=None,
            tool_format=config.tool_format,
            reasoning_format=config.reasoning_format,
        )
        if limits is None:  # not after sleep: requests go on then
            self.script.forget()
        self.script.open(template)
        executor = ScriptedExecutor(
            scripted_limits(config),
            self.script,
            step_s=self._step_s,
            tokens_per_step=self._tokens_per_step,
        )
        self.executors.append(executor)
        report("ready", 1.0)
        return LoadedModel(
            executor=executor,
            executor_name="scripted",
            scheduling=scripted_scheduling(config, executor.limits, self._tokens_per_step),
            text=ModelText(
                tokenizer=byte_tokenizer(),
                chat_template=template,
                eos_token_ids=(EOS_TOKEN_ID,),
                max_model_len=executor.limits.max_model_len,
                vocab_size=executor.limits.vocab_size,
            ),
        )


class ScriptedEngine(Engine):
    """An `Engine` that opens a `ScriptedModel`; `executors` lists its executors, the newest last."""

    def __init__(self, model: ScriptedModel) -> None:
        super().__init__("scripted", model.config, open_model=model)
        self._new_request = partial(new_request, model.script, weakref.ref(self))
        self.executors: list[ScriptedExecutor] = model.executors


@with_config(EngineConfig)
def scripted_engine(
    reply: ReplyLike | Sequence[object] | Callable[..., object] = "Hello!",
    *,
    config: EngineConfig | None = None,
    step_s: float = 0.0,
    tokens_per_step: int = 1,
) -> Engine:
    """A real engine around a scripted model.

    reply:           the reply to every request; a list of the replies to the requests in the order of
                     submission; a function from the text of the prompt to the reply, such as
                     `lambda prompt: "yes"`; or a function that computes each next token of three arguments:
                     token ids of the prompt, token ids generated so far, seed. A reply is a text, a
                     `ToolCall`, a `Reply`, a mapping of its fields, an exception (see `Reply.raises`) or a
                     list that mixes them.
    config:          None = a context of 4,096 tokens and a KV cache of 65,536.
    step_s:          seconds that a step takes, 0 to 3,600.
    tokens_per_step: most tokens that a sequence emits in one step, 1 to 1,024.

    Tokens are the UTF-8 bytes of the text, and `EOS_TOKEN_ID`: with the default `max_tokens=256`, a reply is
    cut off after 256 bytes. A reply to a request with a grammar, or with a `tool_choice` that forces a call,
    must follow it to its end; otherwise the stream raises RequestError for the field `grammar`. So does, for
    the field `thinking_budget`, a reply with more reasoning than that.

    Every call that submits takes the next reply of a list, each sample of `samples` too; a request beyond the
    last one raises AssertionError at the call. Which reply a request gets depends on this order alone, not on
    the order in which requests run. The function of the prompt is called once for each request, on a thread
    beside the event loop; what it raises is its reply. An error as the first reply of `samples` ends all
    samples.

    Raises ConfigError for a value that is not a reply; starting the engine raises ConfigError for a tool call
    or reasoning that the model's format (`EngineConfig.tool_format`, `reasoning_format`) cannot express.
    """
    return ScriptedEngine(ScriptedModel(reply, config=config, step_s=step_s, tokens_per_step=tokens_per_step))


class ScriptedSyncEngine(SyncEngine):
    """A `SyncEngine` around a `ScriptedEngine`; `executors` lists its executors, the newest last."""

    def __init__(self, model: ScriptedModel) -> None:
        super().__init__("scripted", model.config, open_model=model)
        self._engine = ScriptedEngine(model)
        self.executors: list[ScriptedExecutor] = model.executors


@with_config(EngineConfig)
def scripted_sync_engine(
    reply: ReplyLike | Sequence[object] | Callable[..., object] = "Hello!",
    *,
    config: EngineConfig | None = None,
    step_s: float = 0.0,
    tokens_per_step: int = 1,
) -> SyncEngine:
    """As `scripted_engine`, for code that uses a `SyncEngine`."""
    model = ScriptedModel(reply, config=config, step_s=step_s, tokens_per_step=tokens_per_step)
    return ScriptedSyncEngine(model)


def new_request(
    script: Script,
    engine: weakref.ref[ScriptedEngine],
    *,
    arrival: int,
    prompt: Prompt,
    **details: Any,
) -> Request:
    """A request whose prompt raises the error that the script has for it. Raises QueueFull if that is its
    reply, and AssertionError if it has none; an engine that is not open rejects the request itself."""
    is_open = (serving := engine()) is not None and serving.is_open
    scripted = script.scripted(arrival, prompt) if is_open else prompt
    return Request(arrival=arrival, prompt=scripted, **details)


def scripted_limits(config: EngineConfig) -> ExecutorLimits:
    max_model_len = config.max_model_len or 4096
    block_size = config.block_size or 16
    kv_cache_tokens = max(config.kv_cache_tokens or 65_536, max_model_len)
    return ExecutorLimits(
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        num_blocks=-(-kv_cache_tokens // block_size),
        block_size=block_size,
        vocab_size=EOS_TOKEN_ID + 1,
    )


def scripted_scheduling(
    config: EngineConfig, limits: ExecutorLimits, tokens_per_step: int
) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=limits.max_num_seqs,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        prefill_token_budget=prefill_token_budget(config, "cuda"),
        draft_choices=(tokens_per_step - 1,) if tokens_per_step > 1 else (),
        is_draft_adaptive=False,
        target_latency_ms_p50=config.target_latency_ms_p50,
        target_latency_ms_p95=config.target_latency_ms_p95,
        prefer_high_throughput=config.prefer_high_throughput,
    )
