"""An engine without weights or GPU, for testing code that embeds one.

    engine = scripted_engine("Paris.")
    async with engine:
        assert (await engine.generate("Capital of France?")).text == "Paris."

Everything but the model is real: threads, streams, scheduling, stops, cancellation.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from drift_sdk.config import EngineConfig
from drift_sdk.driver.loaded_model import LoadedModel, with_limits
from drift_sdk.driver.request import ModelText
from drift_sdk.engine import Engine
from drift_sdk.execution.eager.slot import Slot
from drift_sdk.progress import Report
from drift_sdk.results import TokenLogprobs
from drift_sdk.scheduling.config import SchedulerConfig
from drift_sdk.steps import DecodeRow, ExecutorLimits, PrefillChunk, SlotOutput, StepPlan, StepResult
from drift_sdk.text.chat import ChatTemplate
from drift_sdk.text.tokenizer import Tokenizer

__all__ = [
    "EOS_TOKEN_ID",
    "ScriptedEngine",
    "ScriptedExecutor",
    "ScriptedModel",
    "byte_tokenizer",
    "scripted_engine",
]

EOS_TOKEN_ID = 256
"""The scripted model's end-of-sequence id; ids 0 to 255 are bytes."""

NextToken = Callable[[Sequence[int], Sequence[int], int], int]
"""A scripted model: (token ids of the prompt, token ids generated so far, seed) -> next token id."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class ScriptedExecutor:
    """An executor whose tokens are a function of the tokens before them.

    Like a device, it runs steps in the order of their launch and keeps the lengths of its sequences itself.

    limits:          slots, blocks and lengths, as of any executor.
    next_token:      (token ids of the prompt, token ids generated so far, seed) -> next token id.
    step_s:          seconds that a step takes.
    tokens_per_step: most tokens that a decode row emits in one step.
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        next_token: NextToken,
        *,
        step_s: float = 0.0,
        tokens_per_step: int = 1,
    ) -> None:
        self.limits = limits
        self.is_closed = False
        self.num_steps = 0
        self._next_token = next_token
        self._step_s = step_s
        self._tokens_per_step = tokens_per_step
        self._slots: dict[int, Slot] = {}
        # The KV cache: each place holds the token computed there, so that a prefix hit finds those tokens.
        self._kv = [-1] * (limits.num_blocks * limits.block_size)
        self._launched: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)

    def collect(self) -> StepResult:
        plan = self._launched.popleft()
        self.num_steps += 1
        if self._step_s:
            time.sleep(self._step_s)

        for assignment in plan.assignments:
            self._slots[assignment.slot] = Slot(assignment.sampling)
        for update in plan.block_updates:
            self._slots[update.slot].place_blocks(update.first_index, update.block_ids)

        prefill = tuple(self._prefill(chunk) for chunk in plan.prefill)
        decode = tuple(self._decode(row) for row in plan.decode)
        return StepResult(step_id=plan.step_id, prefill=prefill, decode=decode, duration_s=self._step_s)

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
        return self._emit(slot, 1)

    def _decode(self, row: DecodeRow) -> SlotOutput:
        return self._emit(self._slots[row.slot], min(row.num_draft_tokens + 1, self._tokens_per_step))

    def _emit(self, slot: Slot, max_tokens: int) -> SlotOutput:
        emitted: list[int] = []
        finish = None
        while len(emitted) < max_tokens and not slot.is_finished:
            if slot.last_token >= 0:
                self._kv[self._kv_slot(slot, slot.length - 1)] = slot.last_token
            tokens = [self._kv[self._kv_slot(slot, position)] for position in range(slot.length)]
            num_prompt_tokens = slot.sampling.num_prompt_tokens
            token = self._next_token(
                tokens[:num_prompt_tokens], tokens[num_prompt_tokens:], slot.sampling.seed
            )
            finish = slot.append(token)
            emitted.append(token)

        logprobs = None
        if slot.sampling.num_logprobs is not None:
            logprobs = tuple(TokenLogprobs(token_id=token, logprob=0.0) for token in emitted)

        return SlotOutput(token_ids=tuple(emitted), finish=finish, logprobs=logprobs)

    def _kv_slot(self, slot: Slot, position: int) -> int:
        block_size = self.limits.block_size
        return slot.block_table[position // block_size] * block_size + position % block_size


class ScriptedModel:
    """Opens a `ScriptedExecutor` in place of a model's files: the `open_model` of an `Engine`.

    reply:           the text that answers every prompt, or a function that computes each next token: (token
                     ids of the prompt, token ids generated so far, seed) -> token id.
    config:          of the engine. None = a context of 4,096 tokens and a KV cache of 65,536.
    step_s:          seconds that a step takes.
    tokens_per_step: most tokens that a decode row emits in one step.

    `executors` lists the executors opened so far, the newest last. To make opening fail or wait, wrap it:

        model = ScriptedModel("Paris.")

        def open_slowly(report, limits=None):
            time.sleep(1.0)
            return model(report, limits)

        engine = Engine("scripted", model.config, open_model=open_slowly)
    """

    def __init__(
        self,
        reply: str | NextToken = "Hello!",
        *,
        config: EngineConfig | None = None,
        step_s: float = 0.0,
        tokens_per_step: int = 1,
    ) -> None:
        self.config = (
            config if config is not None else EngineConfig(max_model_len=4096, kv_cache_tokens=65_536)
        )
        self.executors: list[ScriptedExecutor] = []
        self._next_token = text_script(reply) if isinstance(reply, str) else reply
        self._step_s = step_s
        self._tokens_per_step = tokens_per_step

    def __call__(self, report: Report, limits: ExecutorLimits | None = None) -> LoadedModel:
        config = with_limits(self.config, limits)
        executor = ScriptedExecutor(
            scripted_limits(config),
            self._next_token,
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
                chat_template=ChatTemplate(
                    config.chat_template or CHAT_TEMPLATE,
                    bos_token=None,
                    eos_token=None,
                    tool_format=config.tool_format,
                    reasoning_format=config.reasoning_format,
                ),
                eos_token_ids=(EOS_TOKEN_ID,),
                max_model_len=executor.limits.max_model_len,
                vocab_size=executor.limits.vocab_size,
            ),
        )


class ScriptedEngine(Engine):
    """An `Engine` that opens a `ScriptedModel`; `executors` lists its executors, the newest last."""

    def __init__(self, model: ScriptedModel) -> None:
        super().__init__("scripted", model.config, open_model=model)
        self.executors = model.executors


def scripted_engine(
    reply: str | NextToken = "Hello!",
    *,
    config: EngineConfig | None = None,
    step_s: float = 0.0,
    tokens_per_step: int = 1,
) -> Engine:
    """An engine whose model answers every prompt with `reply`, then ends; or computes each next token with
    `reply`, a function of the prompt's token ids, the token ids generated so far and the seed. Tokens are the
    UTF-8 bytes of the text, and `EOS_TOKEN_ID`.

    config:          None = a context of 4,096 tokens and a KV cache of 65,536.
    step_s:          seconds that a step takes.
    tokens_per_step: most tokens that a sequence emits in one step.
    """
    return ScriptedEngine(ScriptedModel(reply, config=config, step_s=step_s, tokens_per_step=tokens_per_step))


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
        prefill_token_budget=config.prefill_token_budget,
        draft_choices=(tokens_per_step - 1,) if tokens_per_step > 1 else (),
        is_draft_adaptive=False,
        target_latency_ms_p50=config.target_latency_ms_p50,
        target_latency_ms_p95=config.target_latency_ms_p95,
        prefer_high_throughput=config.prefer_high_throughput,
    )


def text_script(text: str) -> NextToken:
    """A script that answers any prompt with the bytes of the text, then `EOS_TOKEN_ID`."""
    answer = [*text.encode(), EOS_TOKEN_ID]

    def next_token(prompt_ids: Sequence[int], output_ids: Sequence[int], seed: int) -> int:
        token_id: int = answer[min(len(output_ids), len(answer) - 1)]
        return token_id

    return next_token


def byte_tokenizer() -> Tokenizer:
    """A tokenizer of 256 byte tokens and an end-of-sequence token, `EOS_TOKEN_ID`."""
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*byte_alphabet(), "<eos>"],
            "tokenizer.ggml.token_type": [1] * 256 + [3],
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": EOS_TOKEN_ID,
        }
    )


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]
