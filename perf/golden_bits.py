"""Golden hashes: the bits of products and attention for fixed inputs, compared with a file.

    python -m perf.golden_bits           compare; exit status 1 if a hash differs or is missing
    python -m perf.golden_bits --write   write the hashes of this machine into the file

Hashes are kept by compute capability: GPUs of one capability run the same instructions, so an H100 and an
H200 have the same hashes. They change on purpose only: with the slices of a weight, the partitions of
attention, or the order of a sum. Another Triton or another compiler may change them too, and then the tokens
of all exact modes.

Inputs are made by integer arithmetic, so that they are the same on every machine, and are exact in a type of
two bytes. Within a case, the same rows are computed alone and among others, and by the tiles of every entry
of the tuned table and untuned; a case has one hash, or it raises BitsDiffer.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
import triton
from msgspec import Struct
from torch import Tensor

from drift_sdk._kernels.attention.decode import AttentionConfig, AttentionScratch, paged_attention
from drift_sdk._kernels.attention.layer_attention import LayerAttention, LayerKV
from drift_sdk._kernels.attention.plan import AttentionPlan, PlannedRows, plan_attention
from drift_sdk._kernels.attention.softmax import Partitions
from drift_sdk._kernels.gemm.gemm import GemmConfig, fastest_gated_multiply, fastest_multiply
from drift_sdk._kernels.gemm.tuning import TunedTable, table_for
from perf.harness.processes import ROOT

__all__ = [
    "CASES",
    "FILE",
    "AttentionCase",
    "BitsDiffer",
    "Case",
    "GoldenBits",
    "ProductCase",
    "current_hashes",
    "main",
    "noise",
    "read_golden",
]

FILE = ROOT / "perf" / "results" / "golden-bits.json"
MASK_BITS = 2**40 - 1
BLOCK_SIZE = 64


class BitsDiffer(Exception):
    """The same rows of a case have other bits in another batch or with other tiles."""


class ProductCase(Struct, frozen=True):
    """The product of a weight [num_columns, inner], gate and up together where it is gated.

    row_counts: numbers of rows in which the first rows are computed.
    """

    num_columns: int
    inner: int
    dtype: torch.dtype = torch.bfloat16
    is_gated: bool = False
    row_counts: tuple[int, ...] = (1, 5, 64, 300)

    def __str__(self) -> str:
        gated = " gated" if self.is_gated else ""
        return f"product {self.num_columns}x{self.inner}{gated} {_name(self.dtype)}"

    def hash(self, device: str) -> str:
        """Raises BitsDiffer."""
        x = noise((self.row_counts[-1], self.inner), 1, device, self.dtype)
        weight = noise((self.num_columns, self.inner), 2, device, self.dtype)
        first: Tensor | None = None
        for config, num_rows in self._configs():
            product = self._multiply(x[:num_rows].contiguous(), weight, config)
            if first is None:
                first = product
            both = min(num_rows, len(first))
            if not torch.equal(product[:both], first[:both]):
                raise BitsDiffer(f"{self}: {num_rows} rows with {config}")
            first = product if num_rows > len(first) else first
        assert first is not None
        return sha256(first[: self.row_counts[-2]])

    def _configs(self) -> Iterator[tuple[GemmConfig, int]]:
        """The configurations of the tuned table and without one, with the numbers of rows they are for."""
        for table in (TunedTable(), table_for("nvidia-h200")):
            gemm = table.gemm(self.num_columns, self.inner, is_gated=self.is_gated)
            for num_rows in self.row_counts:
                yield gemm.config(num_rows), num_rows

    def _multiply(self, x: Tensor, weight: Tensor, config: GemmConfig) -> Tensor:
        num_rows = len(x)
        if self.is_gated:
            out = torch.empty(num_rows, self.num_columns // 2, dtype=self.dtype, device=x.device)
            gate_up = torch.empty(num_rows, self.num_columns, dtype=self.dtype, device=x.device)
            fastest_gated_multiply(x, weight, out, config, gate_up)
            return out

        partials = torch.empty(config.num_partials, num_rows, self.num_columns, device=x.device)
        fastest_multiply(x, weight, partials, config)
        total = partials[0]
        for part in partials[1:]:
            total = total + part
        return total


class AttentionCase(Struct, frozen=True):
    """Attention of the last `num_rows` rows of sequences of some lengths, together and row by row."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    lengths: tuple[int, ...] = (4, 130, 700, 3000, 5000)
    num_rows: int = 4
    partitions: Partitions = Partitions()
    config: AttentionConfig = AttentionConfig()

    def __str__(self) -> str:
        heads = f"{self.num_heads} heads, {self.num_kv_heads} of keys, {self.head_dim} wide"
        return f"attention {heads} {_name(self.dtype)}"

    def hash(self, device: str) -> str:
        """Raises BitsDiffer."""
        num_blocks = -(-max(self.lengths) // BLOCK_SIZE)
        shape = (len(self.lengths) * num_blocks, self.num_kv_heads, BLOCK_SIZE, self.head_dim)
        caches = (noise(shape, 1, device, self.dtype), noise(shape, 2, device, self.dtype))
        table = torch.arange(shape[0], dtype=torch.int32, device=device).view(-1, num_blocks).flip(0)
        slots, positions = (
            torch.tensor(values, dtype=torch.int32, device=device)
            for values in zip(
                *(
                    (slot, length - self.num_rows + row)
                    for slot, length in enumerate(self.lengths)
                    for row in range(self.num_rows)
                ),
                strict=True,
            )
        )
        query = noise((len(slots), self.num_heads, self.head_dim), 3, device, self.dtype)

        def attend(rows: slice, rows_per_sequence: int) -> Tensor:
            planned = PlannedRows(slots[rows], positions[rows], rows_per_sequence)
            return self._attend(query[rows], LayerKV(*caches), table.contiguous(), planned)

        together = attend(slice(None), self.num_rows)
        for rows in (slice(None), slice(len(slots) - 1, None)):
            if not torch.equal(attend(rows, 1), together[rows]):
                raise BitsDiffer(f"{self}: rows verified together and decoded one by one")
        return sha256(together)

    def _attend(self, query: Tensor, kv: LayerKV, table: Tensor, rows: PlannedRows) -> Tensor:
        plan = AttentionPlan(rows.num_sequences, max(self.lengths), self.partitions, query.device)
        plan_attention(rows, plan)
        scratch = AttentionScratch.allocate(
            plan,
            num_kv_heads=self.num_kv_heads,
            num_rows=rows.rows_per_sequence,
            group=self.num_heads // self.num_kv_heads,
            head_dim=self.head_dim,
        )
        out = torch.full_like(query, torch.nan)  # the kernel between the plan and attention
        layer = LayerAttention(query=query, out=out, kv=kv, block_table=table)
        paged_attention(layer, rows, scratch, self.config)
        return out


Case = ProductCase | AttentionCase

CASES: tuple[Case, ...] = (
    *(ProductCase(*shape) for shape in ((6144, 4096), (4096, 4096), (4096, 14_336))),  # Llama-3.1-8B
    ProductCase(28_672, 4096, is_gated=True),
    ProductCase(6144, 4096, torch.float16),
    *(ProductCase(*shape) for shape in ((960, 576), (576, 576), (576, 1536))),  # SmolLM2-135M
    ProductCase(3072, 576, is_gated=True),
    *(ProductCase(*shape) for shape in ((4608, 3584), (3584, 18_944), (896, 4864))),  # Qwen2.5, not tuned
    AttentionCase(32, 8, 128),
    AttentionCase(32, 8, 128, torch.float16),
    AttentionCase(9, 3, 64),
    AttentionCase(14, 2, 64),
    AttentionCase(8, 4, 256),
)


class GoldenBits(Struct, frozen=True, kw_only=True):
    """The hashes of one compute capability, by the name of the case, and the machine that computed them."""

    provenance: str
    hashes: dict[str, str]


def noise(shape: tuple[int, ...], seed: int, device: str, dtype: torch.dtype) -> Tensor:
    """Numbers of -1 to 1 over many magnitudes, the same on every device, exact in bfloat16 and float16."""
    size = 1
    for length in shape:
        size *= length
    found = torch.empty(size, dtype=dtype, device=device)
    scales = torch.tensor([2.0 ** -(7 + power) for power in range(8)], device=device)
    for part in found.split(2**24):
        # Two rounds of multiplication and shift in int64 (Steele et al., SplitMix): all exact, on any device.
        number = torch.arange(len(part), device=device) + (part.storage_offset() + seed * 2**34)
        for factor in (0x9E3779B97F, 0xBF58476D1C):
            number = ((number ^ (number >> 17)) * factor) & MASK_BITS
        number = number >> 8
        part.copy_(((number & 255) - 128) * scales[(number >> 8) & 7])
    return found.view(shape)


def sha256(tensor: Tensor) -> str:
    """The hash of a tensor's bytes."""
    data = tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def current_hashes(device: str, cases: tuple[Case, ...] = CASES) -> dict[str, str]:
    """The hash of each case on this machine, by name. Raises BitsDiffer."""
    return {str(case): case.hash(device) for case in cases}


def read_golden(file: Path = FILE) -> dict[str, GoldenBits]:
    """The hashes of the file by compute capability; none if there is no file."""
    if not file.is_file():
        return {}

    return msgspec.json.decode(file.read_bytes(), type=dict[str, GoldenBits])


def compare(golden: GoldenBits | None, hashes: dict[str, str]) -> list[str]:
    """A line for each case whose hash differs from the golden one, or has none."""
    if golden is None:
        return ["no golden hashes for this compute capability: python -m perf.golden_bits --write makes them"]

    lines = []
    for name, found in hashes.items():
        expected = golden.hashes.get(name)
        if expected is None:
            lines.append(f"{name}: no golden hash")
        elif expected != found:
            lines.append(f"{name}: {found[:16]}, expected {expected[:16]} ({golden.provenance})")
    return lines


def capability() -> str:
    """The compute capability of the current GPU, as the file names it."""
    return ".".join(map(str, torch.cuda.get_device_capability()))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace this compute capability's hashes")
    parser.add_argument("--file", type=Path, default=FILE, help="the file of hashes")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("an NVIDIA GPU is needed: the hashes of interpreted kernels depend on the CPU")

    hashes, golden = current_hashes("cuda"), read_golden(options.file)
    if options.write:
        write_golden(options.file, golden | {capability(): GoldenBits(provenance=_machine(), hashes=hashes)})
        return 0

    lines = compare(golden.get(capability()), hashes)
    print("\n".join(lines) or f"{len(hashes)} hashes are as expected")
    return 1 if lines else 0


def write_golden(file: Path, golden: dict[str, GoldenBits]) -> None:
    """Write all hashes, in the order of capabilities."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.encode(dict(sorted(golden.items())))
    file.write_bytes(msgspec.json.format(text, indent=1) + b"\n")


def _machine() -> str:
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    return f"{torch.cuda.get_device_name()}, {versions}, {datetime.now(UTC):%Y-%m-%d}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    sys.exit(main())
