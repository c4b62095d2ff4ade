"""Findings about a model before it is loaded."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["ModelInfo", "RemoteFile"]

GIB, MIB = 2**30, 2**20


class RemoteFile(Struct, frozen=True, kw_only=True):
    """A file that a start would download: its path in the repository, and its size (None if the hub does not
    tell)."""

    name: str
    num_bytes: int | None


class ModelInfo(Struct, frozen=True, kw_only=True):
    """The findings of `inspect`. Fields are None that cannot be known, because of what `reasons` says.

    model:              the name that was given.
    reasons:            what keeps an engine from serving the model with this config on this machine: each
                        names file, field and value. Empty if nothing was found.
    architecture:       of the config, such as "LlamaForCausalLM".
    unread:             parts of the model that no engine of this package computes, such as "vision": only its
                        text part is loaded.
    num_parameters:     numbers in the weights.
    stored_bytes:       bytes of the files that hold the weights.
    weight_bytes:       bytes of the weights in memory, of each GPU with tensor_parallel.
    kv_dtype:           numbers of the KV cache, such as "bfloat16", "fp8" or "nvfp4".
    kv_bytes_per_token: bytes of the KV cache for a token, without those of a draft; of each GPU likewise.
    window_bytes_per_token: the part of these for layers with windows, if they have blocks of their own and so
                        keep the last tokens of a sequence alone; 0 if there are none.
    state_bytes:        bytes of the recurrent states of a running sequence; 0 for a model without any.
    num_checkpoints:    checkpoints of such states that there would be room for.
    has_mtp:            whether files have a layer that predicts one more token, with which
                        `Speculation(draft="mtp")` drafts; of random weights, whether the config has it.
    context:            the model's own context, in tokens.
    has_tokenizer:      whether it takes and gives text; if not, token ids alone.
    has_chat_template:  whether `chat` can be used.
    device, dtype:      where and as what it would run, such as "cuda:0" and "bfloat16".
    executor:           "graph" or "eager".
    kv_cache_tokens:    tokens that the KV cache would hold, by the memory that is free now. On a GPU the
                        scratch memory of the graph executor, and a draft, will leave less.
    window_cache_tokens: tokens that it would hold in layers with windows; 0 if there are none.
    max_model_len:      most tokens of prompt and completion together.
    max_num_seqs:       most sequences running at once, by the config and the memory for recurrent states.
    downloads:          files that a start would download.
    """

    model: str
    reasons: tuple[str, ...]
    architecture: str | None = None
    unread: tuple[str, ...] = ()
    num_parameters: int | None = None
    stored_bytes: int | None = None
    weight_bytes: int | None = None
    kv_dtype: str | None = None
    kv_bytes_per_token: int | None = None
    window_bytes_per_token: int | None = None
    state_bytes: int | None = None
    num_checkpoints: int | None = None
    has_mtp: bool | None = None
    context: int | None = None
    has_tokenizer: bool | None = None
    has_chat_template: bool | None = None
    device: str | None = None
    dtype: str | None = None
    executor: str | None = None
    kv_cache_tokens: int | None = None
    window_cache_tokens: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int
    downloads: tuple[RemoteFile, ...] = ()

    @property
    def is_supported(self) -> bool:
        """Whether nothing was found that keeps an engine from serving the model."""
        return not self.reasons

    @property
    def download_bytes(self) -> int:
        """Bytes that a start would download, as far as the hub tells the sizes of files."""
        return sum(file.num_bytes or 0 for file in self.downloads)

    @property
    def num_full_sequences(self) -> int | None:
        """Sequences of `max_model_len` tokens that the KV cache holds at once."""
        if self.kv_cache_tokens is None or self.max_model_len is None:
            return None

        return self.kv_cache_tokens // self.max_model_len

    def text(self) -> str:
        """The findings, one a line."""
        rows = [
            ("model", self.model),
            ("architecture", self.architecture),
            *([("not read", ", ".join(self.unread))] if self.unread else []),
            ("parameters", None if self.num_parameters is None else f"{self.num_parameters:,}"),
            ("weights", self._weights()),
            ("context", None if self.context is None else f"{self.context:,} tokens"),
            ("tokenizer", yes_or_no(self.has_tokenizer)),
            ("chat template", yes_or_no(self.has_chat_template)),
            ("runs on", " ".join(filter(None, (self.device, self.dtype, self.executor))) or None),
            ("KV cache", self._kv_cache()),
            *([("states", self._states())] if self.state_bytes else []),
            *([("MTP layer", 'yes, for Speculation(draft="mtp")')] if self.has_mtp else []),
            ("to download", self._downloads()),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value if value is not None else 'unknown'}" for name, value in rows]
        lines += [f"problem: {reason}" for reason in self.reasons]
        lines.append("supported" if self.is_supported else "not supported")
        return "\n".join(lines)

    def _weights(self) -> str | None:
        parts = [
            f"{size(num_bytes)} {place}"
            for num_bytes, place in ((self.stored_bytes, "in files"), (self.weight_bytes, "in memory"))
            if num_bytes is not None
        ]
        return ", ".join(parts) or None

    def _kv_cache(self) -> str | None:
        if self.kv_bytes_per_token is None:
            return None

        of_windows = self.window_bytes_per_token or 0
        token = f"{self.kv_dtype}, {self.kv_bytes_per_token:,} bytes a token"
        if of_windows:
            token += f" ({of_windows:,} of them in windows)"
        if self.kv_cache_tokens is None:
            return token

        num_bytes = (self.kv_bytes_per_token - of_windows) * self.kv_cache_tokens
        found = (
            f"{token}; room for {self.kv_cache_tokens:,} tokens ({size(num_bytes)}), "
            f"{self.num_full_sequences:,} sequences of {self.max_model_len:,}"
        )
        if not of_windows or self.window_cache_tokens is None:
            return found

        num_bytes = of_windows * self.window_cache_tokens
        return f"{found}; {self.window_cache_tokens:,} tokens in windows ({size(num_bytes)})"

    def _states(self) -> str:
        found = f"{size(self.state_bytes or 0)} a sequence"
        return (
            found
            if self.num_checkpoints is None
            else f"{found}; room for {self.num_checkpoints:,} checkpoints"
        )

    def _downloads(self) -> str:
        if not self.downloads:
            return "nothing"

        files = "1 file" if len(self.downloads) == 1 else f"{len(self.downloads)} files"
        return f"{files}, {size(self.download_bytes)}"


def yes_or_no(value: bool | None) -> str | None:
    return None if value is None else "yes" if value else "no"


def size(num_bytes: int) -> str:
    """Bytes in GiB, or in MiB below a tenth of one."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / MIB:.2f} MiB"
