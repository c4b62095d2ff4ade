"""The ways in which byte-level BPE vocabularies of GGUF files split a text, by the names in the files.

A way is a sequence of regular expressions. Each cuts the parts that are left by the expressions before it
into its matches and the text between them. The names, and the ways that they stand for, are llama.cpp's;
where it adapts an expression to its own engine, this module has the model's own. Names whose expressions take
time that grows with the square of a text's length, such as "superbpe", are left out.
"""

from __future__ import annotations

__all__ = ["ADDS_BOS", "COMPOSES", "IGNORES_MERGES", "SPLITS"]

DIGIT, UP_TO_3_DIGITS = r"\p{N}", r"\p{N}{1,3}"
ENGLISH = "'s|'t|'re|'ve|'m|'ll|'d"
SUFFIXES = f"(?i:{ENGLISH})"
NEWLINES = r"\s*[\r\n]+"
SPACES = r"\s+(?!\S)|\s+"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS = r" ?[^\s\p{L}\p{N}]+"
HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

GPT2 = rf"{ENGLISH}| ?\p{{L}}+| ?\p{{N}}+|{SIGNS}|{SPACES}"


def _cl100k(digits: str, *, suffixes: str = f"{SUFFIXES}|", signs: str = rf"{SIGNS}[\r\n]*") -> str:
    """The split of GPT-4, with runs of digits as given."""
    return rf"{suffixes}{WORD}|{digits}|{signs}|{NEWLINES}|{SPACES}"


LLAMA3, QWEN2 = _cl100k(UP_TO_3_DIGITS), _cl100k(DIGIT)
QWEN35 = (
    rf"{SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|{DIGIT}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{NEWLINES}|{SPACES}"
)
BAILING = rf"'(?i:[sdmt]|ll|ve|re)|{WORD}|{DIGIT}|{SIGNS}[\r\n]*|\s*[\r\n]|{SPACES}"
EXAONE_MOE = (
    rf"{SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{DIGIT}"
    rf"|{SIGNS}[\r\n/]?|\s*[\r\n]|{SPACES}"
)
FEWER_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"|\s{1}"
JAIS2 = rf"{SUFFIXES}|{WORD}|{UP_TO_3_DIGITS}|{SIGNS}[\r\n]*|{NEWLINES}|{FEWER_SPACES}"


def _o200k(
    digits: str, *, suffixes: str = f"{SUFFIXES}?", but: str = "", signs: str = rf"{SIGNS}[\r\n/]*"
) -> str:
    """The split of GPT-4o, which cuts words before capitals. but: excluded from the characters of words."""
    upper, lower = (rf"[\p{{{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]" for case in (r"Lu}\p{Lt", "Ll"))
    words = (f"{upper}*{lower}+", f"{upper}+{lower}*")
    cut = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{word}{suffixes}" for word in words)
    return f"{cut}|{digits}|{signs}|{NEWLINES}|{SPACES}"


GPT4O = _o200k(UP_TO_3_DIGITS)
TEKKEN = _o200k(DIGIT, suffixes="")
KIMI = r"\p{Han}+|" + _o200k(UP_TO_3_DIGITS, but=r"&&[^\p{Han}]", signs=rf"{SIGNS}[\r\n]*")

ASCII_SIGN = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
DEEPSEEK3_WORDS = rf"{ASCII_SIGN}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
DEEPSEEK3 = (UP_TO_3_DIGITS, HAN_AND_KANA, rf"{DEEPSEEK3_WORDS}[\r\n]*|{NEWLINES}|{SPACES}")
# Letters of scripts with two cases, as DeepSeek lists them.
CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
DEEPSEEK_SIGNS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
DEEPSEEK_LLM = (r"[\r\n]", rf"\s?[{CASED}]+", rf"\s?{DEEPSEEK_SIGNS}+", r"\s+$", EAST_ASIAN, r"\p{N}+")
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", EAST_ASIAN, DIGIT)
BLOOM = "[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
CHAMELEON = (
    "<sentinel:[0-9]+>",
    "IMGIMG[A-I]{1,4}Z",
    "[\t\n]|    |  ",
    DIGIT,
    r"[\p{P}!-/:-@\[-`{-~]",
    GPT2,
)

LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "midm-2.0", "pixtral")

SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "roberta-bpe", "jais", "trillion"), (GPT2,)),
    **dict.fromkeys(("gigachat", "a.x-4.0", "mellum", "exaone4", "granite-docling"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (DIGIT, GPT2)),
    **dict.fromkeys(("minerva-7b", "mellum2"), (DIGIT, GPT2)),
    **dict.fromkeys(LLAMA3_NAMES, (LLAMA3,)),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan"), (QWEN2,)),
    **dict.fromkeys(("solar-open", "grok-2"), (QWEN2,)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), (GPT4O,)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), (BAILING,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), DEEPSEEK3),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (f" ?{BLOOM}",)),
    "viking": (f" ?{BLOOM}", DIGIT),
    "qwen35": (QWEN35,),
    "tekken": (TEKKEN,),
    "kimi-k2": (KIMI,),
    "deepseek-llm": DEEPSEEK_LLM,
    "deepseek-coder": DEEPSEEK_CODER,
    "seed-coder": (_cl100k(DIGIT, signs=r" ?[^\s\p{L}\p{N}\r\n]+"),),
    "ufakzeka": (_cl100k(DIGIT, suffixes=""),),
    "laguna": (r"[^\n]+|\n+", QWEN2),
    "minicpm5": (UP_TO_3_DIGITS, _cl100k(r"\p{N}+")),
    "jais-2": (JAIS2,),
    "exaone-moe": (EXAONE_MOE,),
    "falcon": (r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]"),
    "chameleon": CHAMELEON,
}
"""The expressions of each name, first to last."""

IGNORES_MERGES = frozenset({*LLAMA3_NAMES, "tekken", "minicpm5"})
"""Names whose vocabularies take a part that is a token as it is, whether merges lead to it or not."""

ADDS_BOS = frozenset({*LLAMA3_NAMES, "tekken", "chameleon"})
"""Names with which a text begins with the beginning-of-sequence token, unless a file says otherwise."""

COMPOSES = frozenset({"qwen2", "qwen35", "command-r"})
"""Names of models that were trained with composed characters (NFC), which files do not say."""
