"""Engines with quantised weights on a GPU: every format near its numbers, and drafts of any form."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import transformers
from gguf import GGMLQuantizationType
from gguf_files import write_gguf
from model_zoo import random_model, save_tokenizer
from quantised_files import write_checkpoint
from random_folder import make_random_draft_folder, make_random_folder
from reference_comparison import ask_all, compare, graph_config, in_bfloat16, joined, random_prompts

from drift_sdk import Chain, Completion, Engine, EngineConfig, NGram, SamplingParams, Speculation
from drift_sdk._kernels.quantised import quantised_gemm

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

FORMATS = ("fp8, channel", "fp8, blocks", "awq", "gptq", "packed, zero points", "nvfp4")
"""Formats with a scale a row, with groups and with zero points."""
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
GREEDY = SamplingParams(max_tokens=48, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model all of whose projections the kernels take: their inner dimensions are multiples of 64."""
    config = transformers.LlamaConfig(
        vocab_size=500,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    model = random_model(transformers.LlamaForCausalLM, config, seed=5)
    folder = tmp_path_factory.mktemp("plain")
    model.save_pretrained(folder)
    save_tokenizer(folder, 500)
    return folder, model


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The epilogues of products that the CUDA program has computed."""
    found: list[str] = []
    launch = quantised_gemm._launch

    def noting(x: Any, weight: Any, bias: Any, out: Any, epilogue: str, tiles: Any) -> None:
        found.append(epilogue)
        launch(x, weight, bias, out, epilogue, tiles)

    monkeypatch.setattr(quantised_gemm, "_launch", noting)
    return found


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_format_is_near_its_numbers(
    dtype: str, kind: str, plain: tuple[Path, Any], launches: list[str], tmp_path: Path
) -> None:
    """float32: the best tokens of transformers with the dequantised numbers. bfloat16: an error no larger
    than that of transformers in bfloat16."""
    write_checkpoint(plain[0], kind, tmp_path / "quantised", tmp_path / "twin")
    check_near(
        tmp_path / "quantised", transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "twin"), dtype
    )
    assert set(launches) == ({"SUMS", "SILU"} if dtype == "bfloat16" else set())


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_gguf_are_near_their_numbers(
    dtype: str, kind: str, plain: tuple[Path, Any], launches: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    check_near(file, write_gguf(plain[1], file, GGMLQuantizationType[kind]), dtype)
    assert set(launches) == ({"SUMS", "SILU"} if dtype == "bfloat16" else set())


def check_near(model: Path, numbers: Any, dtype: str) -> None:
    """Compare an engine with stored weights, the default in bfloat16, with transformers. numbers: the model
    with their numbers."""
    exact = numbers.eval().to("cuda")
    rough = in_bfloat16(exact)
    prompts = random_prompts(1)
    weights = "stored" if dtype == "float32" else None
    config = graph_config(dtype=dtype, weights=weights, prefill_token_budget=32)
    completions = ask_all(model, config, prompts, GREEDY)
    found = joined(
        [compare(exact, rough, prompt, each) for prompt, each in zip(prompts, completions, strict=True)]
    )
    assert len({token for each in completions for token in each.token_ids}) > 10
    if dtype == "float32":
        assert found.regret.max().item() <= 1e-4
        assert found.error.max().item() < 1e-3
    else:
        assert found.error.mean() <= 1.25 * found.reference_error.mean()
        assert found.regret.max() <= 2 * max(found.error.max(), found.reference_error.max())


@pytest.mark.parametrize("kind", ["fp8, channel", "awq", "nvfp4"])
def test_default_multiplies_by_stored_weights(
    kind: str, plain: tuple[Path, Any], launches: list[str], tmp_path: Path
) -> None:
    write_checkpoint(plain[0], kind, tmp_path / "quantised", tmp_path / "twin")

    def answers(**settings: Any) -> list[tuple[list[int], Any]]:
        config = graph_config(**settings)  # bits do not depend on what arrives together
        completions = ask_all(tmp_path / "quantised", config, random_prompts(1), GREEDY)
        return [(each.token_ids, each.logprobs) for each in completions]

    found = answers()
    assert set(launches) == {"SUMS", "SILU"}
    assert found == answers(weights="stored")
    launches.clear()
    answers(weights="expanded")
    answers(dtype="float32")
    assert not launches


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K"])
def test_blocks_of_gguf_run_eagerly_with_the_tokens_of_their_numbers(
    kind: str, plain: tuple[Path, Any], tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(plain[1], file, GGMLQuantizationType[kind])

    async def answers(weights: Any) -> list[Completion]:
        config = EngineConfig(
            device="cuda", executor="eager", dtype="bfloat16", weights=weights, max_model_len=256
        )
        async with Engine(file, config) as engine:
            assert engine.executor == "eager"
            return [await engine.generate(prompt, GREEDY) for prompt in random_prompts(2)]

    stored, expanded = anyio.run(answers, "stored"), anyio.run(answers, "expanded")
    assert [each.token_ids for each in stored] == [each.token_ids for each in expanded]
    assert [each.logprobs for each in stored] == [each.logprobs for each in expanded]


def cases() -> list[tuple[list[int], SamplingParams]]:
    """Requests of several lengths, greedy and sampled; some repeat tokens, which n-grams find."""
    rng = random.Random(4)
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.8, "top_p": 0.9}, {"repetition_penalty": 1.2}]
    return [
        (
            [rng.randrange(3, 32_000) for _ in range(rng.choice((1, 30, 65, 200)))] * (1 + index % 2),
            SamplingParams(max_tokens=100, ignore_eos=True, seed=index, logprobs=1, **ways[index % 3]),
        )
        for index in range(17)
    ]


def together(
    folder: Path, weights: Any, speculation: Speculation | None, *, num_seqs: int = 17
) -> Sequence[Completion]:
    config = graph_config(
        load="random",
        dtype="bfloat16",
        weights=weights,
        max_num_seqs=num_seqs,
        max_model_len=640,
        kv_cache_tokens=16_384,
        speculation=speculation,
    )

    async def main() -> Sequence[Completion]:
        async with Engine(folder, config) as engine:
            streams = [engine.generate(*case) for case in cases()]
            found = [await stream for stream in streams]
            if speculation is not None:
                assert engine.stats().num_draft_rounds > 20
            return found

    return anyio.run(main)


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_drafts_do_not_change_the_output(weights: str, tmp_path: Path) -> None:
    """Alone, in a batch, with n-grams, and with an EAGLE-3 head whose weights are quantised or not."""
    folder = make_random_folder(tmp_path / "model", "llama")
    head = make_random_draft_folder(tmp_path / "draft", folder)
    expected = [(each.token_ids, each.logprobs) for each in together(folder, weights, None, num_seqs=1)]
    assert len({token_ids for token_ids, _ in expected}) == len(expected)
    speculations = [
        None,
        Speculation(draft=NGram(min_length=1), shape=Chain(4), adaptive=False),
        Speculation(draft=head, shape=Chain(3), adaptive=False),
        Speculation(draft=head, shape=Chain(3), adaptive=False, draft_weights="fp8"),
        Speculation(draft=head, shape=Chain(3), adaptive=False, draft_weights="int4"),
    ]
    for speculation in speculations:
        found = [(each.token_ids, each.logprobs) for each in together(folder, weights, speculation)]
        assert found == expected, f"{speculation}"
