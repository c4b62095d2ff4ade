"""Reads and writes of a kernel, and their order with respect to its wait, from its PTX.

The PTX of a CUDA C++ kernel shows what each of its threads may do. `griddepcontrol.launch_dependents` counts
for a CTA as soon as one thread executes it, so every path to one has to lead through `griddepcontrol.wait`,
whatever the roles of the CTA's warps are. `access_of_ptx` follows all paths of the control flow. A wait under
a predicate, or in one branch only, is none behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from drift_sdk._kernels.launch.cuda_programs import CudaKernel
from drift_sdk._kernels.launch.launch_order import KernelAccess, LaunchOrderError

__all__ = ["access_of_ptx", "has_nvrtc", "ptx_of"]

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|^\s*\.loc\b[^\n]*", re.DOTALL | re.MULTILINE)
"""Comments, and the lines of sources, which no semicolon ends."""
ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)[^{]*\{")
PARAMETER = re.compile(r"\.param\s.*?([\w$]+)(\[\d+\])?\s*$", re.DOTALL)
WIDE = re.compile(r"\.[usb]64|\[\d+\]")
"""A parameter that may be a pointer, or may hold some: 64 bits, or an array."""
LABEL = re.compile(r"\s*([\w$]+):(?!:)")
STATEMENT = re.compile(r"\s*([^;]*);")
INSTRUCTION = re.compile(r"(@!?%?[\w$]+)?\s*([\w.:]+)\s*(.*)", re.DOTALL)
IDENTIFIER = re.compile(r"%?[A-Za-z_$][\w$]*")
PLACE = re.compile(r"\[([^\]]*)\]")

WAIT, TRIGGER = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
BRANCHES, ENDS = ("bra",), ("ret", "exit", "trap")
UNKNOWN = ("call", "brx")
SHARED = ("ld.shared", "st.shared", "atom.shared", "red.shared", "ldmatrix", "stmatrix", "mbarrier", "mapa")
PREFETCHES = ("prefetch", "applypriority", "discard")
LOADS = ("ld", "ldu", "cp.async")
STORES = ("st", "red", "atom", "multimem")


class Instruction(Struct, frozen=True):
    """An instruction of a kernel. targets: places of the instructions that may be executed next."""

    operation: str
    operands: str
    is_predicated: bool
    targets: tuple[int, ...]

    @property
    def places(self) -> list[str]:
        """The operands in memory."""
        return PLACE.findall(self.operands)


def has_nvrtc() -> bool:
    """Whether NVRTC is installed. It compiles to PTX without a GPU."""
    from cuda.bindings import nvrtc

    try:
        nvrtc.nvrtcVersion()
    except Exception:  # cuda.pathfinder raises its own errors
        return False

    return True


def ptx_of(kernel: CudaKernel, source: str | None = None) -> str:
    """The PTX of a kernel for compute capability 9.0. source: in place of its files."""
    from cuda.bindings import nvrtc

    def checked(result: tuple[Any, ...]) -> Any:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{kernel.files[-1]}: {result[0]}")
        return result[1] if len(result) > 1 else None

    if source is None:
        source = kernel.source()
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), kernel.files[-1].encode(), 0, [], []))
    options = ["--std=c++17", "--gpu-architecture=sm_90a"]
    options += [f"--define-macro={name}={value}" for name, value in kernel.macros]
    checked(nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options]))
    text = b" " * checked(nvrtc.nvrtcGetPTXSize(program))
    checked(nvrtc.nvrtcGetPTX(program, text))
    return text.rstrip(b"\0").decode()


def access_of_ptx(ptx: str, names: Sequence[str] | None = None) -> KernelAccess:
    """Return what the only kernel of a program reads and writes through its parameters.

    names: of the parameters, in order; None: those of the PTX. An address that cannot be traced to a
    parameter counts as one into any of them. Raises LaunchOrderError for a kernel that may end without
    having waited, or that calls a function.
    """
    text = COMMENT.sub("", ptx)
    (entry,) = ENTRY.finditer(text)
    parameters = [PARAMETER.search(part) for part in entry[2].split(",") if part.strip()]
    found = [match for match in parameters if match is not None]
    sources = {
        match[1]: frozenset({match[1] if names is None else names[i]})
        for i, match in enumerate(found)
        if WIDE.search(match[0])
    }
    everything = frozenset[str]().union(*sources.values())
    code = instructions_of(text[entry.end() - 1 :])
    trace(code, sources)

    def arguments(place: str) -> frozenset[str]:
        return sources_of(place, sources) or everything

    kernel = entry[1]
    early = not_waited(code)
    reads, writes, writes_early, triggers_early = set[str](), set[str](), set[str](), False
    for i, instruction in enumerate(code):
        is_early = i in early
        if is_early and instruction.operation.startswith(ENDS):
            raise LaunchOrderError(f"{kernel}: may end without having waited")

        triggers_early |= is_early and instruction.operation.startswith(TRIGGER)
        for is_write, place in accesses(instruction):
            if is_write:
                writes |= arguments(place)
                writes_early |= arguments(place) if is_early else set()
            elif is_early:
                reads |= arguments(place)
    return KernelAccess(frozenset(reads), frozenset(writes), triggers_early, frozenset(writes_early))


def instructions_of(body: str) -> list[Instruction]:
    """The instructions of a kernel's body. Labels of a block in braces belong to it alone."""
    labels: list[dict[str, int]] = []
    found: list[tuple[str | None, str, str, list[dict[str, int]]]] = []
    at = 0
    while True:
        rest = body[at:].lstrip()
        at = len(body) - len(rest)
        if rest.startswith("{"):
            labels.append({})
            at += 1
        elif rest.startswith("}"):
            labels.pop()
            at += 1
            if not labels:
                break
        elif match := LABEL.match(body, at):
            labels[-1][match[1]] = len(found)
            at = match.end()
        else:
            match = STATEMENT.match(body, at)
            assert match is not None, rest[:80]
            at = match.end()
            if match[1] and not match[1].startswith("."):
                parts = INSTRUCTION.fullmatch(match[1].strip())
                assert parts is not None, match[1]
                # Labels are looked up when all are known.
                found.append((parts[1], parts[2], parts[3], list(labels)))
    result = []
    for i, (predicate, operation, operands, scopes) in enumerate(found):
        if operation.startswith(UNKNOWN):
            raise LaunchOrderError(f"{operation}: expected a kernel without calls and tables of branches")

        targets = [i + 1] if predicate is not None or not operation.startswith(BRANCHES + ENDS) else []
        if operation.startswith(BRANCHES):
            targets.append(next(scope[operands] for scope in reversed(scopes) if operands in scope))
        result.append(Instruction(operation, operands, predicate is not None, tuple(targets)))
    return result


def not_waited(code: Sequence[Instruction]) -> set[int]:
    """Places of the instructions that a thread may reach without having waited."""
    reached, left = set[int](), [0]
    while left:
        i = left.pop()
        if i in reached or i == len(code):
            continue
        reached.add(i)
        if not code[i].operation.startswith(WAIT) or code[i].is_predicated:
            left.extend(code[i].targets)
    return reached


def trace(code: Sequence[Instruction], sources: dict[str, frozenset[str]]) -> None:
    """Add registers to `sources`, with the parameters that they were computed from, whatever the order. What
    was loaded from memory is no pointer."""
    flows = []
    for instruction in code:
        if instruction.places and not instruction.operation.startswith("ld.param"):
            continue
        to, _, rest = split_first(instruction.operands)
        flows.append((IDENTIFIER.findall(to), rest))
    grew = True
    while grew:
        grew = False
        for to, rest in flows:
            origins = sources_of(rest, sources)
            for name in to:
                if not origins <= sources.get(name, frozenset()):
                    sources[name] = sources.get(name, frozenset()) | origins
                    grew = True


def split_first(operands: str) -> tuple[str, str, str]:
    """The first operand, which may be a list in braces, and the others."""
    if operands.startswith("{"):
        to, _, rest = operands.partition("}")
        return to, "}", rest

    return operands.partition(",")


def sources_of(operands: str, sources: dict[str, frozenset[str]]) -> frozenset[str]:
    return frozenset[str]().union(*(sources.get(name, frozenset()) for name in IDENTIFIER.findall(operands)))


def accesses(instruction: Instruction) -> Iterator[tuple[bool, str]]:
    """Whether an instruction writes to memory that other kernels see, and where; likewise for reads."""
    operation, places = instruction.operation, instruction.places
    if not places or operation.startswith((*SHARED, *PREFETCHES, "ld.param", "ld.local", "st.local")):
        return

    if operation.startswith("cp.async"):
        if ".global.shared" in operation:
            yield True, places[0]
        else:
            assert ".global" in operation, operation
            yield False, places[1]
    elif operation.startswith(STORES):
        yield True, places[0]
    else:
        assert operation.startswith(LOADS), operation
        yield False, places[0]
