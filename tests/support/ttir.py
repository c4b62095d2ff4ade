"""Triton IR of a kernel with two pointers, "a" and "b", and a number."""

from __future__ import annotations

import hashlib

HEAD = """
#loc1 = loc("source"(#loc))
module {
  tt.func public @kernel(%a: !tt.ptr<f32> {tt.divisibility = 16 : i32} loc("a"(#loc)), %b: !tt.ptr<bf16> loc("b"(#loc)), %n: i32 loc("n"(#loc))) attributes {noinline = false} {
"""  # noqa: E501
LOAD_A = """
    %at = tt.splat %a : !tt.ptr<f32> -> tensor<32x!tt.ptr<f32>> loc(#loc2)
    %at_0 = tt.addptr %at, %x : tensor<32x!tt.ptr<f32>>, tensor<32xi32> loc(#loc2)
    %value = tt.load %at_0, %mask, %other : tensor<32x!tt.ptr<f32>> loc(#loc2)
"""
STORE_B = """
    %place = tt.addptr %b, %n : !tt.ptr<bf16>, i32 loc(#loc3)
    tt.store %place, %value : !tt.ptr<bf16> loc(#loc3)
"""
WAIT = "    tt.grid_dependency_wait loc(#loc4)\n"
OLD_WAIT = """
    %0 = tt.elementwise_inline_asm "griddepcontrol.wait; // dummy $0" {constraints = "=r"} -> i32 loc(#loc4)
"""
TRIGGER = "    tt.grid_dependency_launch_dependents loc(#loc5)\n"
TAIL = "    tt.return loc(#loc)\n  } loc(#loc)\n} loc(#loc)\n"


class CompiledKernel:
    """A compiled kernel, which counts how often its code is read."""

    def __init__(self, *body: str) -> None:
        self._ttir, self.num_read = f"{HEAD}{''.join(body)}{TAIL}", 0
        self.hash = hashlib.sha256(self._ttir.encode()).hexdigest()

    @property
    def asm(self) -> dict[str, str]:
        self.num_read += 1
        return {"ttir": self._ttir}
