"""The router and the prompt blocks that it compares."""

from __future__ import annotations

from itertools import pairwise

from drift_sdk.driver.prompts import FramedPrompt, TextPrompt, TokenPrompt, as_chat_prompt
from drift_sdk.pool.routing import BLOCK_TOKENS, IDLE_TOKENS, MAX_BLOCKS, PromptBlocks, Router


def tokens(*parts: int) -> PromptBlocks:
    """Blocks of a prompt in which each block consists of one repeated token."""
    return PromptBlocks.of(TokenPrompt(tuple(part for part in parts for _ in range(BLOCK_TOKENS))))


def give(router: Router, index: int, blocks: PromptBlocks) -> None:
    router.begin(index, blocks)
    router.remember(index, blocks)


def test_blocks_of_equal_beginnings_are_equal() -> None:
    one, other = tokens(1, 2, 3), tokens(1, 2, 4)
    assert one.num_tokens == 3 * BLOCK_TOKENS
    assert one.hashes[:2] == other.hashes[:2]
    assert one.hashes[2] != other.hashes[2]
    assert tokens(2, 1).hashes[1] != tokens(1, 1).hashes[1]  # a block counts with those before it


def test_partial_blocks_and_long_prompts_have_no_hash() -> None:
    assert PromptBlocks.of(TokenPrompt(tuple(range(BLOCK_TOKENS - 1)))).hashes == ()
    assert len(PromptBlocks.of(TokenPrompt((7,) * BLOCK_TOKENS * (MAX_BLOCKS + 5))).hashes) == MAX_BLOCKS
    assert PromptBlocks.of(TextPrompt("")) == PromptBlocks(1, ())


def test_documents_of_one_query_have_the_blocks_of_its_text() -> None:
    one, other = (PromptBlocks.of(FramedPrompt("q" * 3000, text, "?")) for text in ("a" * 3000, "b" * 3000))
    assert len(one.hashes) > 20 and one.hashes[:10] == other.hashes[:10]
    assert one.hashes[-1] != other.hashes[-1]


def test_a_longer_conversation_has_the_blocks_of_the_shorter_one() -> None:
    turns = [{"role": "user", "content": "x" * 3000}, {"role": "assistant", "content": "y" * 3000}]
    short = PromptBlocks.of(as_chat_prompt(turns[:1], None, None))
    long = PromptBlocks.of(as_chat_prompt(turns, None, None))
    assert len(short.hashes) >= 10
    assert long.hashes[: len(short.hashes)] == short.hashes
    assert PromptBlocks.of(as_chat_prompt(turns[:1], None, {"a": 1})).hashes[0] != short.hashes[0]


def test_blocks_of_other_salts_differ() -> None:
    prompts = (TextPrompt("x" * 3000), TokenPrompt((7,) * 3000))
    for prompt in prompts:
        hashes = [PromptBlocks.of(prompt, salt).hashes for salt in (None, "a", "b", "a")]
        assert hashes[1] == hashes[3] and len({*hashes}) == 3
        assert all(not {*one} & {*other} for one, other in pairwise(hashes))
    chats = [
        PromptBlocks.of(as_chat_prompt([{"role": "user", "content": "x" * 300}], None, None), salt)
        for salt in (None, "a")
    ]
    assert not {*chats[0].hashes} & {*chats[1].hashes}


def test_requests_go_to_the_replica_with_the_fewest_live_tokens() -> None:
    router = Router(3, 2.0)
    for index, number in ((0, 5), (1, 2), (2, 3)):
        give(router, index, tokens(*range(10 * index, 10 * index + number)))
    assert router.order(tokens(90), [0, 1, 2]) == [1, 2, 0]
    router.grow(1, 200)
    assert router.order(tokens(90), [0, 1, 2]) == [2, 0, 1]
    assert router.order(tokens(90), [0, 1]) == [0, 1]
    assert router.end(1, 2 * BLOCK_TOKENS + 200)
    assert router.loads[1].num_tokens == router.loads[1].num_requests == 0


def test_the_longest_known_beginning_is_preferred() -> None:
    router = Router(3, 2.0)
    give(router, 0, tokens(1, 2))
    give(router, 1, tokens(1, 2, 3))
    assert router.order(tokens(1, 2, 3, 4), [0, 1, 2]) == [1, 2, 0]
    assert router.order(tokens(1, 2, 9), [0, 1, 2]) == [0, 2, 1]  # of equals the less loaded one
    router.forget(1)
    assert router.order(tokens(1, 2, 3, 4), [0, 1, 2])[0] == 0
    assert Router(3, None).order(tokens(1), [2, 1]) == [1, 2]


def test_affinity_yields_when_the_replica_is_overloaded() -> None:
    router = Router(2, 1.5)
    blocks = tokens(1)
    give(router, 0, blocks)
    router.grow(0, IDLE_TOKENS - BLOCK_TOKENS)
    assert router.order(blocks, [0, 1]) == [0, 1]  # as good as idle
    router.grow(0, 1)
    assert router.order(blocks, [0, 1]) == [1, 0]
    router.grow(1, 4000)  # 4,097 are at most 1.5 times 4,000
    assert router.order(blocks, [0, 1]) == [0, 1]
    assert router.loads[0].num_by_prefix == 0
    give(router, 0, blocks)
    assert router.loads[0].num_by_prefix == 1


def test_affinity_none_ignores_beginnings() -> None:
    router = Router(2, None)
    give(router, 0, tokens(1))
    assert router.order(tokens(1), [0, 1]) == [1, 0]


def test_memory_of_beginnings_is_bounded_and_keeps_the_newest() -> None:
    router = Router(1, 2.0, max_remembered=4)
    old, new = tokens(1, 2, 3), tokens(5, 6)
    give(router, 0, old)
    give(router, 0, new)
    prefixes = router.loads[0].prefixes
    assert len(prefixes._hashes) == 4
    assert prefixes.num_known(new.hashes) == 2
    assert prefixes.num_known(old.hashes) == 2  # the end of the older one is forgotten first
