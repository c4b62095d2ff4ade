"""Names of other libraries, and of earlier versions of this one, with what takes their place here, for
errors."""

from __future__ import annotations

__all__ = ["OTHER_NAMES"]

GRAMMAR = "SamplingParams.grammar, a JsonSchema, Regex or Lark"
SAMPLES = "samples(prompt, n) gives several completions of a prompt"

OTHER_NAMES = {
    # Fields that earlier versions had.
    "exact_prefill": "prompts are exact unless EngineConfig.fast_prompts",
    # Arguments of LLM and EngineArgs in vLLM, and of Llama in llama-cpp-python.
    "data_parallel_size": "EnginePool",
    "download_dir": "EngineConfig.cache_dir",
    "draft_model": "EngineConfig.speculation",
    "enable_chunked_prefill": "always so",
    "enable_prefix_caching": "always so",
    "enforce_eager": 'EngineConfig.executor, "eager"',
    "gpu_memory_utilization": "EngineConfig.gpu_memory_fraction, of the memory that is free",
    "kv_cache_dtype": "EngineConfig.kv_dtype",
    "kv_cache_memory_bytes": "EngineConfig.kv_cache_tokens, in tokens",
    "load_format": "EngineConfig.load",
    "max_context_len": "EngineConfig.max_model_len",
    "max_num_batched_tokens": "EngineConfig.prefill_token_budget, of tokens of prompts",
    "max_seq_len": "EngineConfig.max_model_len",
    "model_path": "model",
    "n_batch": "EngineConfig.prefill_token_budget",
    "n_ctx": "EngineConfig.max_model_len",
    "n_gpu_layers": "EngineConfig.device",
    "n_threads": "EngineConfig.num_threads",
    "num_gpu_blocks_override": "EngineConfig.kv_cache_tokens, in tokens",
    "num_speculative_tokens": "Speculation.shape, such as Chain(3)",
    "prompt_lookup_max": "NGram.max_length",
    "prompt_lookup_min": "NGram.min_length",
    "quantization": "EngineConfig.weights",
    "reasoning_parser": "EngineConfig.reasoning_format",
    "speculative_config": "EngineConfig.speculation",
    "speculative_model": "Speculation.draft",
    "tensor_parallel_size": "EngineConfig.tensor_parallel",
    "tool_call_parser": "EngineConfig.tool_format",
    "tp_size": "EngineConfig.tensor_parallel",
    # Parameters of a request in vLLM, llama-cpp-python, transformers and OpenAI's protocol.
    "bad_words": "none; a logit_bias of -100 bars a token",
    "best_of": SAMPLES,
    "chat_template_kwargs": "template_args",
    "continue_final_message": "continue_final",
    "do_sample": "SamplingParams.temperature, 0 without sampling",
    "guided_choice": GRAMMAR,
    "guided_decoding": GRAMMAR,
    "guided_grammar": GRAMMAR,
    "guided_json": GRAMMAR,
    "guided_regex": GRAMMAR,
    "include_stop_str_in_output": "SamplingParams.include_stop",
    "max_completion_tokens": "SamplingParams.max_tokens",
    "max_length": "SamplingParams.max_tokens, without the prompt",
    "max_new_tokens": "SamplingParams.max_tokens",
    "min_new_tokens": "SamplingParams.min_tokens",
    "n": SAMPLES,
    "num_return_sequences": SAMPLES,
    "prompt_token_ids": "prompt, which may be token ids",
    "prompts": "prompt; map(prompts) takes several",
    "repeat_penalty": "SamplingParams.repetition_penalty",
    "response_format": GRAMMAR,
    "sampling_params": "params",
    "stop_sequences": "SamplingParams.stop",
    "stream": "always so: iterate over the stream, or await it",
    "structured_outputs": GRAMMAR,
    "thinking_token_budget": "SamplingParams.thinking_budget",
    "top_logprobs": "SamplingParams.logprobs",
}
"""Name there -> what to write here."""
