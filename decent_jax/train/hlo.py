"""Kernels and messages of a compiled program, in the order in which XLA has scheduled them.

XLA prints the entry computation of a scheduled program in this order. Unknown syntax is an error,
because an overlooked message would count as hidden.
"""

import collections
import itertools
import math
import re
from collections.abc import Callable
from typing import NamedTuple

COLLECTIVES = (
    *("all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute"),
    *("ragged-all-to-all", "reduce-scatter"),
)
POINT_TO_POINT = ("send", "recv")  # how a permute crosses TPU slices
_MESSAGES, _PERMUTES = (*COLLECTIVES, *POINT_TO_POINT), ("collective-permute", *POINT_TO_POINT)
_SUSPECT = re.compile("collective|permute|all-|reduce-scatter|send|recv|remote")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_SUSPECT_TARGET = re.compile("collective|allreduce|all_reduce|megascale|nccl|nvshmem", re.I)
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?(\S+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)")
_HEAD = re.compile(r"(?:ENTRY )?%?(\S+) .*\{$")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|branch_computations)=\{?((?:%[^\s,{}]+(?:, )?)+)")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]")
_BYTES = {
    "token": 0,
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "f64": 8,
    "s64": 8,
    "u64": 8,
}
_NO_KERNELS = ("parameter", "bitcast", "get-tuple-element", "tuple", "constant")
_MATMULS = ("__triton_gemm", "__triton_nested_gemm", "__cublas", "__cudnn$fmha")


class Instruction(NamedTuple):
    """An instruction of the entry computation; instructions that run nothing are left out."""

    name: str
    opcode: str
    scope: str  # the path of jax.named_scope, with the function and the primitive
    operands: list[str]
    read: int  # bytes
    written: int  # bytes
    flops: float  # of a matrix product on a GPU, otherwise 0
    cycles: float  # XLA's estimate on TPUs, otherwise 0; for a loop, of all its iterations
    inside: tuple[str, ...]  # collectives in the computations that it calls


def entry(text: str) -> list[Instruction]:
    """The instructions of ``compiled.as_text()``, in the order in which they start.

    Raises:
      ValueError: an instruction cannot be read, or looks like a message of an unknown kind.
    """
    computations = _computations(text)
    shapes: dict[str, str] = {}
    instructions: list[Instruction] = []
    for line in computations["ENTRY"]:
        match = _INSTRUCTION.match(line)
        if not match:
            raise ValueError(f"an instruction that cannot be read: {line.strip()[:200]}")
        name, shape, opcode, rest = match.groups()
        shapes[name] = shape
        if opcode in _NO_KERNELS:
            continue
        _check_known(opcode, line)
        operands = re.findall(r"%([^\s,()]+)", rest.split("), ")[0])
        scope = re.search(r'op_name="([^"]*)"', line)
        flops = 0.0
        if any(kind in line for kind in _MATMULS):
            arrays = [shapes.get(operand, "") for operand in operands[:2]] + [shape]
            flops = 2 * math.sqrt(math.prod(_largest(array) for array in arrays))
        read = sum(size_of(shapes.get(operand, "")) for operand in operands)
        instructions.append(
            Instruction(
                name,
                opcode,
                scope[1] if scope else "",
                operands,
                read,
                size_of(shape),
                flops,
                _cycles(line, computations),
                tuple(_collectives(line, computations)),
            )
        )
    return instructions


def _computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation by its name, which is ``"ENTRY"`` for the program itself."""
    computations: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in text.splitlines():
        if line.endswith("{") and (head := _HEAD.match(line)) and not line.startswith("HloModule"):
            lines = computations["ENTRY" if line.startswith("ENTRY ") else head[1]] = []
        elif line.startswith("}"):
            lines = None
        elif lines is not None and " = " in line:
            lines.append(line)
    if "ENTRY" not in computations:
        raise ValueError("the program has no entry computation")
    return computations


def _check_known(opcode: str, line: str) -> None:
    base = re.sub("-(start|update|done)$", "", opcode)
    target = _TARGET.search(line)
    unknown = _SUSPECT.search(base) and base not in _MESSAGES
    if unknown or (target and _SUSPECT_TARGET.search(target[1])):
        what = target[1] if target else opcode
        raise ValueError(f"{what} looks like a message of an unknown kind")


def _called(line: str) -> list[str]:
    return [name for names in _CALLED.findall(line) for name in re.findall(r"%([^\s,{}]+)", names)]


def _collectives(line: str, computations: dict[str, list[str]]) -> list[str]:
    """The collectives in all computations that an instruction calls, directly or not."""
    collectives: list[str] = []
    for name in _called(line):
        for inner in computations.get(name, ()):
            match = _INSTRUCTION.match(inner)
            base = re.sub("-start$", "", match[3]) if match else ""
            if base in _MESSAGES:
                collectives.append(base)
            collectives += _collectives(inner, computations)
    return collectives


def _cycles(line: str, computations: dict[str, list[str]]) -> float:
    """XLA's estimate for an instruction, in cycles; for a loop, of all its iterations."""
    own = re.search(r'"estimated_cycles":"(\d+)"', line)
    if own:
        return float(own[1])
    if not re.search(r" (while|call|conditional)\(", line):
        return 0.0
    turns = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
    bodies = [
        sum(_cycles(inner, computations) for inner in computations.get(name, ()))
        for name in _called(line)
    ]
    return max(bodies, default=0.0) * (int(turns[1]) if turns else 1)


def size_of(shape: str) -> int:
    """Bytes of an array, or of all arrays of a tuple."""
    return sum(_BYTES.get(kind, 4) * _elements(dims) for kind, dims in _ARRAY.findall(shape))


def _largest(shape: str) -> int:
    return max((_elements(dims) for _, dims in _ARRAY.findall(shape)), default=1)


def _elements(dims: str) -> int:
    return math.prod(int(n) for n in dims.split(",") if n)


# --- Messages -------------------------------------------------------------------------------------


class Window(NamedTuple):
    """A message, from its start to where the program waits for it."""

    kind: str  # such as "collective-permute"
    start: int  # index among the instructions
    done: int  # index of its end; equal to ``start`` if nothing can overlap the message
    nbytes: int  # 0 for a "recv", whose "send" has them


def windows(instructions: list[Instruction]) -> list[Window]:
    """The messages of the entry computation, except those in loops.

    Raises:
      ValueError: a message ends that has not started.
    """
    starts = {op.name: k for k, op in enumerate(instructions)}
    spans: list[Window] = []
    for k, op in enumerate(instructions):
        base = op.opcode.removesuffix("-done")
        if op.opcode in COLLECTIVES:
            spans.append(Window(op.opcode, k, k, op.written))
        elif op.inside and op.opcode in ("fusion", "call", "custom-call"):
            spans.append(Window(op.inside[0], k, k, op.written))
        elif op.opcode.endswith("-done"):
            begins = next((starts[name] for name in op.operands if name in starts), None)
            if begins is None:
                raise ValueError(f"{op.name} ends a message that has no start")
            kind = base if base in _MESSAGES else next(iter(instructions[begins].inside), None)
            if kind is not None:
                nbytes = {"send": instructions[begins].read, "recv": 0}.get(kind, op.written)
                spans.append(Window(kind, begins, k, nbytes))
    return spans


def outline(instructions: list[Instruction]) -> str:
    """Messages and loops in the order in which they start and end, as ``2 all-gather-start, loop``.

    A message that is not split into a start and an end appears under its plain name.
    """
    names = [
        "loop" if op.opcode == "while" else op.opcode
        for op in instructions
        if op.opcode == "while" or op.opcode.startswith(_MESSAGES)
    ]
    runs = ((name, len(list(same))) for name, same in itertools.groupby(names))
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in runs)


def kinds(messages: list[Window]) -> str:
    """The number of messages of each kind, as ``8 collective-permute, 2 all-reduce``."""
    counts = collections.Counter(message.kind for message in messages)
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


HIDDEN = 0.5  # a message that overlaps less of the gradient's time than this counts as exposed


class Overlap(NamedTuple):
    """How much of the gradient overlaps the messages, as fractions of the gradient's time.

    If a round has permutes, only these use the links between nodes, and only they count.
    """

    first: float  # fraction done when the first message starts
    last: float  # fraction done when the last message starts
    least: float  # smallest fraction that overlaps one message
    exposed: list[Window]  # messages that overlap less than `HIDDEN` of the gradient
    counted: list[Window]  # messages behind the three fractions


def overlap(instructions: list[Instruction], time: Callable[[Instruction], float]) -> Overlap:
    """How the messages overlap the gradient.

    Args:
      instructions: the result of `entry`.
      time: function that returns the time of a kernel, in any unit.

    Raises:
      ValueError: the program has no message, or no gradient kernel.
    """
    messages = windows(instructions)
    counted = [message for message in messages if message.kind in _PERMUTES] or messages
    passed = [0.0, *itertools.accumulate(gradient_times(instructions, time))]
    if not counted or not passed[-1]:
        raise ValueError("the program has no message, or no gradient: is it a training step?")

    def share(message: Window):
        return (passed[message.done] - passed[message.start]) / passed[-1]

    return Overlap(
        min(passed[message.start] for message in counted) / passed[-1],
        max(passed[message.start] for message in counted) / passed[-1],
        min(map(share, counted)),
        [message for message in messages if share(message) < HIDDEN],
        counted,
    )


def gradient_times(
    instructions: list[Instruction], time: Callable[[Instruction], float]
) -> list[float]:
    """The time of each kernel of the gradient, 0 for everything else."""
    return [
        time(op) if "forward_backward" in op.scope and not _waits(op) else 0.0
        for op in instructions
    ]


def _waits(op: Instruction) -> bool:
    return op.opcode.endswith(("-start", "-done")) or op.opcode in POINT_TO_POINT
