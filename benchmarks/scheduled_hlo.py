"""A program as XLA has scheduled it for a GPU: kernels and messages in order, and their bytes."""

import itertools
import math
import re
from typing import NamedTuple

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f64": 8, "s64": 8, "u64": 8}
_ARRAY = re.compile(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)")
_NO_KERNELS = ("parameter", "bitcast", "get-tuple-element", "tuple", "constant")
_MATMULS = ("__triton_gemm", "__triton_nested_gemm", "__cublas", "__cudnn$fmha")


class Instruction(NamedTuple):
    """An instruction of the entry computation; those that run nothing are left out."""

    name: str
    opcode: str
    scope: str  # as jax.named_scope has it, with the function and the primitive
    operands: list[str]
    read: int  # bytes
    written: int  # bytes
    flops: float  # of matrix products, otherwise 0


def entry(text: str) -> list[Instruction]:
    """The instructions of ``compiled.as_text()``, in the order in which they are started."""
    shapes: dict[str, str] = {}
    found = []
    for line in text[text.index("\nENTRY ") :].splitlines():
        match = _INSTRUCTION.match(line)
        if not match:
            continue
        name, shape, opcode, rest = match.groups()
        shapes[name] = shape
        if opcode in _NO_KERNELS:
            continue
        operands = re.findall(r"%([^\s,()]+)", rest.split("), ")[0])
        scope = re.search(r'op_name="([^"]*)"', line)
        flops = 0.0
        if any(kind in line for kind in _MATMULS):
            arrays = [shapes.get(operand, "") for operand in operands[:2]] + [shape]
            flops = 2 * math.sqrt(math.prod(_largest(array) for array in arrays))
        read = sum(size_of(shapes.get(operand, "")) for operand in operands)
        found.append(
            Instruction(
                name, opcode, scope[1] if scope else "", operands, read, size_of(shape), flops
            )
        )
    return found


def size_of(shape: str) -> int:
    """Bytes of an array, or of all arrays of a tuple."""
    return sum(_BYTES.get(kind, 4) * _elements(dims) for kind, dims in _ARRAY.findall(shape))


def _largest(shape: str) -> int:
    return max((_elements(dims) for _, dims in _ARRAY.findall(shape)), default=1)


def _elements(dims: str) -> int:
    return math.prod(int(n) for n in dims.split(",") if n)


def outline(instructions: list[Instruction]) -> str:
    """Messages and loops in the order in which they start and end, as ``2 all-gather-start, loop``.

    A message that is not split into a start and an end is written without either.
    """
    kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    found = [
        "loop" if one.opcode == "while" else one.opcode
        for one in instructions
        if one.opcode == "while" or one.opcode.startswith(kinds)
    ]
    runs = ((name, len(list(same))) for name, same in itertools.groupby(found))
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in runs)


class Window(NamedTuple):
    """A message that travels while kernels run."""

    kind: str  # such as "collective-permute"
    start: int  # index among the instructions
    done: int
    nbytes: int


def windows(instructions: list[Instruction]) -> list[Window]:
    """The collectives that are started and waited for separately."""
    started = {
        instruction.name: k
        for k, instruction in enumerate(instructions)
        if instruction.opcode.endswith("-start")
    }
    return [
        Window(
            instruction.opcode.removesuffix("-done"),
            started[instruction.operands[0]],
            k,
            instruction.written,
        )
        for k, instruction in enumerate(instructions)
        if instruction.opcode.endswith("-done")
    ]
