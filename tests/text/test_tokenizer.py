from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from drift_sdk.errors import ModelLoadError, RequestError
from drift_sdk.text import tokenizer_limits
from drift_sdk.text.tokenizer import Tokenizer

TEXT = "<|im_start|>user\nThe quick 中文 🎉 don't <think>  12<|im_end|>"


@pytest.fixture
def path(tmp_path: Path, byte_level_json: str) -> Path:
    file = tmp_path / "tokenizer.json"
    file.write_text(byte_level_json, encoding="utf-8")
    return file


def test_ids_and_text_equal_those_of_transformers(path: Path) -> None:
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    tokenizer = Tokenizer.from_file(path, config)
    reference = PreTrainedTokenizerFast(tokenizer_file=str(path), **config)
    ids = tokenizer.encode(TEXT)
    assert ids == reference.encode(TEXT)
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.eos_token_id == reference.eos_token_id
    for skip in (True, False):
        expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected

    assert tokenizer.decode(ids, skip_special_tokens=False) == TEXT


def test_long_texts_have_the_tokens_of_the_library_and_leave_the_interpreter_to_other_threads(
    path: Path,
) -> None:
    tokenizer, raw = Tokenizer.from_file(path), tokenizers.Tokenizer.from_file(str(path))
    for text in (TEXT * 2000, "<think>" * 5000, " \n" * 5000, "é" * 5000):
        assert tokenizer.encode(text) == raw.encode(text).ids
        bare = raw.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == bare

    with ThreadPoolExecutor(1) as thread:
        encoded = thread.submit(tokenizer.encode, "ab c\n" * 200_000)
        num_turns = 0
        while not encoded.done():
            time.sleep(0.001)
            num_turns += 1
    assert encoded.result() and num_turns > 5


def test_fields_are_read_from_the_config(path: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    config = {
        "bos_token": None,
        "eos_token": {"content": "<|im_end|>", "special": True, "__type": "AddedToken"},
        "chat_template": templates,
    }
    tokenizer = Tokenizer.from_file(path, config)
    assert tokenizer.bos_token is None
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == tokenizer.token_to_id("<|im_end|>") == 2
    assert tokenizer.chat_template == "plain"
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.token_to_id("no such token") is None


def test_config_is_optional(path: Path) -> None:
    tokenizer = Tokenizer.from_file(path)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_id) == (None, None, None)
    assert tokenizer.chat_template is None


@pytest.mark.parametrize("template", [[{"name": "rag", "template": "x"}], None])
def test_template_is_none_without_a_default(path: Path, template: object) -> None:
    assert Tokenizer.from_file(path, {"chat_template": template}).chat_template is None


@pytest.mark.parametrize("has_template", [False, True])
@pytest.mark.parametrize("add_bos_token", [None, False, True])
def test_bos_is_added_as_transformers_does(
    path: Path, has_template: bool, add_bos_token: bool | None
) -> None:
    if has_template:
        raw = tokenizers.Tokenizer.from_file(str(path))
        raw.post_processor = processors.TemplateProcessing(
            "<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
        raw.save(str(path))

    config: dict[str, Any] = {"bos_token": "<|im_start|>"}
    if add_bos_token is not None:
        config["add_bos_token"] = add_bos_token

    tokenizer = Tokenizer.from_file(path, config)
    is_added = has_template if add_bos_token is None else add_bos_token
    plain = tokenizer.encode("The", add_special_tokens=False)
    assert tokenizer.token_to_id("<|im_start|>") not in plain
    assert tokenizer.encode("The") == ([1] if is_added else []) + plain


def test_truncation_and_padding_of_the_file_are_ignored(path: Path) -> None:
    raw = tokenizers.Tokenizer.from_file(str(path))
    expected = raw.encode(TEXT).ids
    raw.enable_truncation(max_length=3)
    raw.enable_padding(length=64)
    raw.save(str(path))
    assert Tokenizer.from_file(path).encode(TEXT) == expected


def test_dropout_of_the_file_is_ignored(path: Path) -> None:
    raw = tokenizers.Tokenizer.from_file(str(path))
    expected = raw.encode(TEXT).ids
    raw.model.dropout = 0.9
    raw.save(str(path))
    assert json.loads(path.read_text())["model"]["dropout"] == pytest.approx(0.9)
    assert all(Tokenizer.from_file(path).encode(TEXT) == expected for _ in range(3))


def test_eos_is_special_even_if_the_file_does_not_mark_it(path: Path) -> None:
    tokenizer = Tokenizer.from_file(path, {"eos_token": "<think>"})
    assert tokenizer.eos_token_id in tokenizer.special_token_ids
    assert tokenizer.decode(tokenizer.encode("a<think>b")) == "ab"


def test_eos_keeps_its_rules_for_adjacent_spaces(path: Path) -> None:
    raw = tokenizers.Tokenizer.from_file(str(path))
    raw.add_special_tokens([tokenizers.AddedToken("<|im_end|>", rstrip=True, normalized=False)])
    raw.save(str(path))
    expected = raw.encode("a<|im_end|>  b").ids
    assert Tokenizer.from_file(path, {"eos_token": "<|im_end|>"}).encode("a<|im_end|>  b") == expected


def test_token_outside_the_vocabulary_is_not_added(path: Path) -> None:
    tokenizer = Tokenizer.from_file(
        path, {"eos_token": "<|none|>", "bos_token": "<s>", "add_bos_token": True}
    )
    assert tokenizer.vocab_size == Tokenizer.from_file(path).vocab_size
    assert tokenizer.eos_token_id is None
    assert tokenizer.encode("") == []


@pytest.mark.parametrize("content", [None, "", "{", '{"version": "1.0"}'])
def test_missing_and_broken_files_are_named_in_the_error(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_text(content)

    with pytest.raises(ModelLoadError, match=str(file)):
        Tokenizer.from_file(file)


def test_error_of_unsupported_decoder_names_file_and_decoder(path: Path) -> None:
    raw = tokenizers.Tokenizer.from_file(str(path))
    raw.decoder = decoders.Strip("_", 1, 0)
    raw.save(str(path))
    with pytest.raises(ModelLoadError, match=rf"{path}.*Strip"):
        Tokenizer.from_file(path)


@pytest.mark.parametrize(
    "config",
    [
        {"bos_token": 7},
        {"eos_token": ["</s>"]},
        {"eos_token": {"content": 7}},
        {"eos_token": {}},
        {"add_bos_token": "yes"},
        {"chat_template": 7},
        {"chat_template": ["x"]},
        {"chat_template": [{"name": "default", "template": 7}]},
    ],
)
def test_settings_of_the_wrong_type_are_named_in_the_error(path: Path, config: dict[str, Any]) -> None:
    (name,) = config
    with pytest.raises(ModelLoadError, match=f"tokenizer_config.json: {name}="):
        Tokenizer.from_file(path, config)


def test_panic_of_the_library_names_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As PyO3 names it."""

    def load(error: BaseException) -> Any:
        class Library:
            @staticmethod
            def from_buffer(content: bytes) -> Any:
                raise error

        monkeypatch.setattr(tokenizers, "Tokenizer", Library)
        return Tokenizer.from_file(path)

    with pytest.raises(ModelLoadError, match=f"{path}: .*index out of bounds"):
        load(PanicException("index out of bounds"))
    with pytest.raises(KeyboardInterrupt):
        load(KeyboardInterrupt())


def test_lone_surrogates_raise_request_error(path: Path) -> None:
    with pytest.raises(RequestError, match="surrogates"):
        Tokenizer.from_file(path).encode("a" * 5000 + "\ud800")
    with pytest.raises(RequestError, match="surrogates") as caught:
        Tokenizer.from_file(path).encode("a\ud800")

    assert caught.value.field == "prompt"


def test_post_processor_with_unknown_tokens_is_rejected(path: Path) -> None:
    """The library panics when it applies one."""
    raw = tokenizers.Tokenizer.from_file(str(path))
    raw.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    spec = json.loads(raw.to_str())
    spec["post_processor"]["special_tokens"] = {}
    path.write_text(json.dumps(spec))
    with pytest.raises(ModelLoadError, match=f"{path}: not a usable tokenizer.json"):
        Tokenizer.from_file(path)


def test_text_outside_the_vocabulary_raises_request_error(path: Path) -> None:
    spec = json.loads(path.read_text(encoding="utf-8"))
    spec["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}
    path.write_text(json.dumps(spec))
    tokenizer = Tokenizer.from_file(path)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(RequestError, match="prompt: expected text that can be tokenised"):
        tokenizer.encode("b")


@pytest.mark.parametrize("unknown", [-(2**70), -1, 10**6, 2**32 - 1, 2**32, 2**70])
def test_unknown_ids_add_nothing(path: Path, unknown: int) -> None:
    tokenizer = Tokenizer.from_file(path)
    left, right = tokenizer.encode("The"), tokenizer.encode(" dog")
    for skip in (True, False):
        assert tokenizer.decode([*left, unknown, *right], skip_special_tokens=skip) == "The dog"
    assert tokenizer.decode([unknown]) == ""
    assert tokenizer.detokenizer().push([*left, unknown, *right]) == "The dog"
    assert tokenizer.token_bytes[unknown] == b""


X = "x" * 10
REGEX = {"type": "Replace", "pattern": {"Regex": "."}, "content": X}
STRING = {"type": "Replace", "pattern": {"String": "ab"}, "content": X * 10}
EMPTY = {"type": "Replace", "pattern": {"String": ""}, "content": X}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "s", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}] * 2,
    "pair": [],
    "special_tokens": {"s": {"id": "s", "ids": [1] * 600, "tokens": ["s"] * 600}},
}


def charsmap(*replacements: str, num_bytes: int = 4) -> str:
    """A charsmap whose table has 4 bytes, and states `num_bytes`."""
    data = b"".join(each.encode() + b"\0" for each in replacements)
    return base64.b64encode(num_bytes.to_bytes(4, "little") + bytes(4) + data).decode()


def precompiled(num_bytes: int) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": charsmap("a", num_bytes=num_bytes)}


@pytest.mark.parametrize(
    ("part", "spec", "message"),
    [
        (
            "normalizer",
            {"type": "Sequence", "normalizers": [REGEX] * 9},
            "normalizer: makes more than a mill",
        ),
        ("normalizer", {"type": "Sequence", "normalizers": [REGEX] * 2}, "makes up to 121 of one"),
        ("normalizer", {"type": "Sequence", "normalizers": [STRING, STRING]}, "makes up to 2500 of one"),
        ("normalizer", {"type": "Sequence", "normalizers": [EMPTY, EMPTY]}, "makes up to 121 of one"),
        ("normalizer", {"type": "Prepend", "prepend": "x" * 100}, "makes up to 101 of one"),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": charsmap("a", X * 20)}, "up to 200"),
        ("normalizer", precompiled(2**32 - 4), "a table of 4294967292 bytes among 10, expected"),
        (
            "normalizer",
            {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [precompiled(8)]}]},
            "a table of 8 bytes among 10, expected a multiple of 4 up to 6",
        ),
        ("normalizer", precompiled(3), "a table of 3 bytes"),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAA="}, "a table of 0 bytes among 2"),
        ("normalizer", {"normalizers": [REGEX]}, "it is not known how much longer"),
        ("normalizer", {"prepend": "x" * 1000}, "it is not known how much longer"),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "new"}]}, "it is not known how much"),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [BYTES] * 30}, "makes more than a million"),
        ("pre_tokenizer", {"type": "new"}, "it is not known how much longer"),
        ("decoder", {"type": "Sequence", "decoders": [STRING] * 9}, "decoder: makes more than a million"),
        ("post_processor", TEMPLATE, "adds 1200 tokens, expected at most 1024"),
        (
            "post_processor",
            {"type": "Sequence", "processors": [TEMPLATE | {"single": TEMPLATE["single"][1::2]}] * 40},
            "makes more than a million of one",
        ),
        ("post_processor", {"type": "new"}, "post_processor: .* is not known"),
    ],
)
def test_parts_that_need_too_much_memory_are_rejected_before_they_are_built(
    path: Path, part: str, spec: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers, "Tokenizer", None)
    file = json.loads(path.read_text(encoding="utf-8"))
    file[part] = spec
    path.write_text(json.dumps(file))
    with pytest.raises(ModelLoadError, match=f"{path}.*{message}"):
        Tokenizer.from_file(path)


def test_affix_that_is_too_long_is_rejected(path: Path) -> None:
    file = json.loads(path.read_text(encoding="utf-8"))
    file["model"]["end_of_word_suffix"] = "x" * 65
    path.write_text(json.dumps(file))
    with pytest.raises(ModelLoadError, match="a prefix or suffix of 65 characters"):
        Tokenizer.from_file(path)


UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]}
LOADS_AND_FREES = """
import sys, threading
from pathlib import Path
from drift_sdk.errors import ModelLoadError
from drift_sdk.text.tokenizer import Tokenizer

def load():
    try:
        print(Tokenizer.from_file(Path(sys.argv[1])).vocab_size)
    except ModelLoadError as error:
        print(error)

threading.stack_size(2**20)
thread = threading.Thread(target=load)
thread.start()
thread.join()
"""


def load_and_free(path: Path, *parts: tuple[str, Any]) -> str:
    """What a process prints that loads a tokenizer.json with these parts, and frees it, on a thread with a
    stack of 1 MiB."""
    listed = ", ".join(f'"{name}": {json.dumps(part)}' for name, part in parts)
    path.write_text("{" + listed + "}")
    child = subprocess.run(
        [sys.executable, "-c", LOADS_AND_FREES, str(path)], capture_output=True, text=True, check=True
    )
    return child.stdout.strip()


def test_tokens_that_overflow_the_stack_of_the_library_are_rejected(tmp_path: Path) -> None:
    """It frees a trie by a recursion as deep as the longest token. Both of two parts are built."""
    path, longest = tmp_path / "tokenizer.json", tokenizer_limits.MAX_TOKEN_CHARS
    model, allowed, deep = (
        UNIGRAM | {"vocab": [*UNIGRAM["vocab"], [token, -2.0]]}
        for token in ("b", "\U0001f389" * longest, "é" * 160_000)
    )
    assert load_and_free(path, ("model", allowed)) == "3"
    message = f"{path}: not a usable tokenizer.json: a token of 160000 characters, expected at most {longest}"
    assert load_and_free(path, ("model", deep)) == message
    assert load_and_free(path, ("model", deep), ("model", model)) == "3"


@pytest.mark.parametrize(
    "model",
    [
        {"type": "BPE", "vocab": {"a": 0, "x" * 2049: 1}, "merges": []},
        {"type": "WordPiece", "vocab": {"a": 0, "x" * 2049: 1}, "unk_token": "a"},
        {"vocab": [["<unk>", 0.0], ["x" * 2049, -1.0]], "unk_id": 0},
        None,
    ],
)
def test_tokens_that_are_too_long_are_rejected_in_all_vocabularies(path: Path, model: Any) -> None:
    file = json.loads(path.read_text(encoding="utf-8"))
    if model is None:
        file["added_tokens"][0]["content"] = "x" * 2049
    else:
        file["model"] = model
    path.write_text(json.dumps(file))
    with pytest.raises(ModelLoadError, match="a token of 2049 characters, expected at most 2048"):
        Tokenizer.from_file(path)


def test_vocabularies_of_too_many_characters_are_rejected(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_limits, "MAX_VOCAB_CHARS", 100)
    with pytest.raises(ModelLoadError, match=r"tokens of \d+ characters together, expected at most 100"):
        Tokenizer.from_file(path)


SPLIT = pre_tokenizers.Split(tokenizers.Regex(r"\p{N}{1,3}"), "isolated")
PLAIN_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
UNDERSCORE = "\u2581"
# Parts of tokenizer.json files of well-known models.
USUAL: dict[str, tuple[Any, Any, Any]] = {
    "gpt-2": (None, pre_tokenizers.ByteLevel(), processors.ByteLevel()),
    "llama-2, mistral": (
        normalizers.Sequence([normalizers.Prepend(UNDERSCORE), normalizers.Replace(" ", UNDERSCORE)]),
        None,
        processors.TemplateProcessing("<s> $A", "<s> $A <s> $B:1", special_tokens=[("<s>", 1)]),
    ),
    "llama-3": (
        None,
        pre_tokenizers.Sequence([SPLIT, PLAIN_BYTES]),
        processors.Sequence(
            [processors.ByteLevel(), processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])]
        ),
    ),
    "qwen": (normalizers.NFC(), pre_tokenizers.Sequence([SPLIT, PLAIN_BYTES]), processors.ByteLevel()),
    "gpt-oss": (None, pre_tokenizers.Sequence([SPLIT, PLAIN_BYTES]), processors.ByteLevel()),
    "deepseek": (
        normalizers.Sequence([]),
        pre_tokenizers.Sequence([SPLIT, SPLIT, pre_tokenizers.Digits(True), PLAIN_BYTES]),
        None,
    ),
    "gemma": (normalizers.Replace(" ", UNDERSCORE), pre_tokenizers.Split(" ", "merged_with_previous"), None),
    "sentencepiece": (
        normalizers.Sequence(
            [
                normalizers.NFKC(),
                normalizers.Strip(),
                normalizers.Replace(tokenizers.Regex(" {2,}"), UNDERSCORE),
            ]
        ),
        pre_tokenizers.Metaspace(),
        None,
    ),
    "bert": (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
        processors.BertProcessing(("a", 1), ("b", 2)),
    ),
}


@pytest.mark.parametrize("kind", USUAL)
def test_usual_parts_are_within_bounds(path: Path, kind: str) -> None:
    raw = tokenizers.Tokenizer.from_file(str(path))
    normalizer, pre_tokenizer, post_processor = USUAL[kind]
    for name, part in (("normalizer", normalizer), ("pre_tokenizer", pre_tokenizer)):
        if part is not None:
            setattr(raw, name, part)
    if post_processor is not None:
        raw.post_processor = post_processor
    expected = raw.encode(TEXT).ids
    raw.save(str(path))
    assert Tokenizer.from_file(path).encode(TEXT) == expected


def test_growth_of_normalizers_is_at_most_the_stated_one() -> None:
    kinds = {"NFC": normalizers.NFC(), "NFD": normalizers.NFD(), "NFKC": normalizers.NFKC()}
    kinds |= {"NFKD": normalizers.NFKD(), "Lowercase": normalizers.Lowercase()}
    kinds |= {"BertNormalizer": normalizers.BertNormalizer(), "ByteLevel": normalizers.ByteLevel()}
    every = [chr(code) for code in range(1, 0x30000) if not 0xD800 <= code < 0xE000]
    chars = [char for char in every if unicodedata.normalize("NFKD", char).lower() != char]
    chars += every[:300] + ["\u4e2d", "\U0001f389"]
    for kind, normalizer in kinds.items():
        longest = max(len(normalizer.normalize_str(char)) for char in chars)
        assert longest <= tokenizer_limits.NORMALIZERS[kind], kind


def test_threads_may_share_a_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer.from_file(path)
    texts = [f"{TEXT} {number} 🎉" * 5 for number in range(200)]

    def round_trip(text: str) -> tuple[list[int], str]:
        ids = tokenizer.encode(text)
        return ids, tokenizer.detokenizer().push(ids)

    expected = [round_trip(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(round_trip, texts)) == expected


def test_import_does_not_load_torch_or_change_the_environment(path: Path) -> None:
    program = (
        "import json, os, sys; before = dict(os.environ)\n"
        "from pathlib import Path; from drift_sdk.text.chat import ChatTemplate\n"
        "from drift_sdk.text.answers.reader import StopMatcher\n"
        "from drift_sdk.text.tokenizer import Tokenizer\n"
        "tokenizer = Tokenizer.from_file(Path(sys.argv[1])); tokenizer.decode(tokenizer.encode('text'))\n"
        "print(json.dumps([before == dict(os.environ), 'torch' in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, check=True, env=dict(os.environ)
    )
    assert json.loads(done.stdout) == [True, False]
