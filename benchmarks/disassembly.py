"""Machine code of kernels, without a GPU: Triton compiles them ahead of time, and cuobjdump disassembles them.

The benchmark of the machine code and the tests that hold it to something share this.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from normscope.runtime.launches import KernelCall
from normscope.swaps.kernels.launch import LANES

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P\w+\s+)?)([A-Z][\w.]*)([^;]*);")
_JUMPS = ("BRA", "BRX", "JMP", "JMX", "CALL", "RET", "EXIT", "KILL")  # where threads meet again, nothing jumps
_BRANCHES = ("BRA", "BRA.U")


@dataclass(frozen=True)
class Instruction:
    """One line of machine code: where it is, what it does (``LDG.E.128``), to what, and whether a predicate decides."""

    address: int
    operation: str
    operands: str
    predicated: bool

    @property
    def target(self) -> int:
        """Target address of a branch."""
        return int(self.operands.split()[-1], 16)


@dataclass(frozen=True)
class Code:
    """Kernel for one GPU, without NOPs and without the branch to itself that ends every kernel.

    ``local`` counts a thread's bytes of stack and spilled registers.
    """

    instructions: tuple[Instruction, ...]
    registers: int
    local: int
    asm: dict[str, Any]

    @functools.cached_property
    def loop(self) -> tuple[Instruction, ...]:
        """The body of its one loop; nothing where there is none.

        Raises:
            ValueError: if anything branches but what goes round, leaves or skips the loop, skips some instructions
                before, in or after it, or ends the program after it.
        """
        jumps = [each for each in self.instructions if each.operation.split(".")[0] in _JUMPS]
        back = [each for each in jumps if each.operation in _BRANCHES and each.target < each.address]
        if len(back) > 1:
            raise ValueError(f"{len(back)} branches go back, and only one loop can be counted")
        first, last = (back[0].target, back[0].address) if back else (0, -1)

        def part(address: int) -> int:
            return (address >= first) + (address > last)

        for each in set(jumps) - set(back):
            ends = each.operation == "EXIT" and part(each.address) == 2
            skips = each.operation in _BRANCHES and each.predicated and part(each.target) in (part(each.address), 2)
            # On sm_80 a loop is also left by what looks like a call of what comes next.
            leaves = each.operation == "CALL.REL.NOINC" and each.predicated and each.target == last + 16
            if not (ends or skips or leaves):
                raise ValueError(f"{each.operation} {each.operands} at {each.address:#x} is no part of one loop")
        return tuple(each for each in self.instructions if first <= each.address <= last)

    def counted(self, pattern: str, within: tuple[Instruction, ...] | None = None) -> Counter[str]:
        """Count the operations that a pattern matches in full, in all of the code or in a part of it."""
        part = self.instructions if within is None else within
        return Counter(each.operation for each in part if re.fullmatch(pattern, each.operation))

    def executed(self, iterations: float, pattern: str = ".*") -> float:
        """Return how many instructions a thread takes that goes round so often, skips none and does not end early."""
        body = self.counted(pattern, self.loop).total()
        return self.counted(pattern).total() + (iterations - 1 if self.loop else 0) * body


def code_of(source: ASTSource, capability: int, options: dict[str, Any]) -> Code:
    """Compile for a GPU by its compute capability (90 is ``sm_90``), and disassemble."""
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, LANES), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _cuobjdump("--dump-resource-usage", cubin)
        lines = _INSTRUCTION.findall(_cuobjdump("-sass", cubin))
    instructions = [
        Instruction(int(address, 16), operation, operands.strip(" `()"), bool(predicate) or "UP" in operands)
        for address, predicate, operation, operands in lines
        if operation != "NOP"
    ]
    own = instructions.pop()
    if own.operation != "BRA" or own.target != own.address:
        raise ValueError(f"the code ends with {own.operation} {own.operands}, and not with a branch to itself")
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Code(tuple(instructions), used["REG"], used["STACK"] + used["LOCAL"], compiled.asm)


def code_of_launch(launch: KernelCall, capability: int) -> Code:
    """Compile what a launch would run, specialized for its arguments by Triton itself, as at a launch."""
    backend = make_backend(GPUTarget("cuda", capability, LANES))
    bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    bound, specialization, options = bind(**launch.arguments, **launch.options, debug=False)
    _, signature, constants, attributes = launch.kernel._pack_args(backend, options, bound, specialization, options)
    return code_of(ASTSource(launch.kernel, signature, constants, attributes), capability, launch.options)


def _cuobjdump(*arguments: str | Path) -> str:
    return subprocess.run([TOOLS / "cuobjdump", *arguments], capture_output=True, text=True, check=True).stdout
