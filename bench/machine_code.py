"""Hot loops in the machine code (SASS) of a Hopper kernel: innermost loops with tensor-core products.

`hot_loops` reads the output of `nvdisasm -c`. It splits the code into basic blocks, follows branch targets, and finds
natural loops by dominators. A barrier wait that spins out of line also jumps back into a loop; only dominators
distinguish it from a loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

LABEL = re.compile(r"^\s*([.\w$]+):\s*$")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
TARGET = re.compile(r"`\(([.\w$]+)\)")
TARGETS = re.compile(r'BRANCH_TARGETS ([^"]+)"')

# Instructions at 64 lanes per SM and clock (compares, selects, minima, logic, integers, packing); floats have 128.
ALU = frozenset(
    "FMNMX FSEL FSETP F2FP IABS IADD3 IMNMX ISETP LEA LOP3 PLOP3 PRMT SEL SHF VIADD VIADDMNMX VIMNMX".split()
)
LANE_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
WARP = 32


class Instruction(NamedTuple):
    name: str  # with its suffixes
    operands: str
    predicate: str

    @property
    def operation(self) -> str:
        return self.name.split(".")[0]


@dataclass
class Block:
    """Instructions that always run together. follows: indices of the possible next blocks."""

    instructions: list[Instruction] = field(default_factory=list)
    follows: list[int] = field(default_factory=list)


class Loop(NamedTuple):
    """One iteration of a hot loop, as one warp issues it."""

    instructions: int
    products: dict[str, int]  # count by shape: "64x64x16 shared", "64x64x16 registers" (operand A), HMMA: "16x8x16"
    load_waits: list[int]  # groups of asynchronous copies that each wait leaves in flight
    product_waits: list[int]  # groups of HGMMA that each wait leaves in flight
    spills: int  # local loads and stores
    alu: int  # instructions at half the rate of the others
    mufu: int  # exp2 and the like
    beside: int  # of these, issued while HGMMA are in flight
    shared: int  # bytes that its lanes load from and store to shared memory, without those of HGMMA
    copied: int  # bytes that its lanes copy from global to shared memory


def hot_loops(code: str) -> list[Loop]:
    """The innermost loops that contain HGMMA, or HMMA if the code has no HGMMA, in order of appearance.

    Spinning waits inside a loop are not part of its iteration; neither is the jump back from one.
    """
    blocks = basic_blocks(code)
    operation = "HGMMA" if any(i.operation == "HGMMA" for block in blocks for i in block.instructions) else "HMMA"
    loops = natural_loops(blocks)
    hot = {
        head: body
        for head, body in loops.items()
        if any(i.operation == operation for index in body for i in blocks[index].instructions)
    }
    result = []
    for head, body in sorted(hot.items()):
        inner = [other for at, other in loops.items() if at != head and at in body and other < body]
        if not any(at != head and at in body and other < body for at, other in hot.items()):
            own = sorted(body.difference(*inner))
            result.append(
                _loop([i for index in own if not _is_jump(blocks[index]) for i in blocks[index].instructions])
            )
    return result


def basic_blocks(code: str) -> list[Block]:
    """The blocks of the code in order; the first is the entry."""
    blocks, labels = [Block()], {}
    jumps: list[tuple[int, list[str]]] = []
    falls = True  # True if the block before the current one falls through into it

    def begin() -> None:
        if blocks[-1].instructions:
            blocks.append(Block())
            if falls:
                blocks[-2].follows.append(len(blocks) - 1)

    for line in code.splitlines():
        if label := LABEL.match(line):
            begin()
            falls = True
            labels[label.group(1)] = len(blocks) - 1
        elif match := INSTRUCTION.search(line):
            predicate, name, operands = match.groups()
            instruction = Instruction(name, operands, predicate or "")
            if not falls:
                begin()
                falls = True
            blocks[-1].instructions.append(instruction)
            if instruction.operation in ("BRA", "BRX", "JMP", "EXIT", "RET"):
                targets = TARGETS.search(line)
                jumps.append((len(blocks) - 1, targets.group(1).split(",") if targets else TARGET.findall(line)))
                falls = bool(predicate) or (name.startswith("BRA") and not operands.startswith("`"))  # BRA P0, BRA.DIV
                if falls:
                    begin()
    for index, names in jumps:
        blocks[index].follows += [labels[name.strip()] for name in names]
    return blocks


def natural_loops(blocks: list[Block]) -> dict[int, frozenset[int]]:
    """{head: the blocks of its loop}, over blocks that are reachable from the entry."""
    before = _predecessors(blocks)
    dominators = _dominators(blocks, before)
    loops: dict[int, frozenset[int]] = {}
    for index in dominators:
        for head in blocks[index].follows:
            if dominators[index] >> head & 1:
                body, todo = {head}, [index]
                while todo:
                    here = todo.pop()
                    if here not in body:
                        body.add(here)
                        todo += before[here]
                loops[head] = loops.get(head, frozenset()) | body
    return loops


def _predecessors(blocks: list[Block]) -> dict[int, list[int]]:
    """Predecessors of every block that is reachable from the entry."""
    before: dict[int, list[int]] = {0: []}
    todo = [0]
    while todo:
        here = todo.pop()
        for index in blocks[here].follows:
            if index not in before:
                before[index] = []
                todo.append(index)
            before[index].append(here)
    return before


def _dominators(blocks: list[Block], before: dict[int, list[int]]) -> dict[int, int]:
    """{block: bits of its dominators, the blocks on every path from the entry to it, itself included}."""
    everything = (1 << len(blocks)) - 1
    dominators = {index: everything for index in sorted(before)} | {0: 1}
    changed = True
    while changed:
        changed = False
        for index in dominators:
            if index:
                new = everything
                for other in before[index]:
                    new &= dominators[other]
                new |= 1 << index
                changed |= new != dominators[index]
                dominators[index] = new
    return dominators


def _is_jump(block: Block) -> bool:
    return [i.operation for i in block.instructions] == ["BRA"]


def _loop(body: list[Instruction]) -> Loop:
    products: dict[str, int] = {}
    for shape in _shapes(body):
        products[shape] = products.get(shape, 0) + 1
    return Loop(
        instructions=len(body),
        products=products,
        load_waits=[int(i.operands.split(",")[1], 16) for i in body if i.name == "DEPBAR.LE" and "SB0" in i.operands],
        product_waits=[int(i.operands.split(",")[1], 16) for i in body if i.name.startswith("WARPGROUP.DEPBAR")],
        spills=sum(i.operation in ("LDL", "STL") for i in body),
        alu=sum(i.operation in ALU for i in body),
        mufu=sum(i.operation == "MUFU" for i in body),
        beside=_beside_products(body),
        shared=sum(WARP * _lane_bytes(i) for i in body if i.operation in ("LDS", "STS", "LDSM", "STSM")),
        copied=sum(WARP * _lane_bytes(i) for i in body if i.operation == "LDGSTS"),
    )


def _beside_products(body: list[Instruction]) -> int:
    """MUFU of an iteration that follows another one, issued while a group of HGMMA is in flight."""
    groups = 0
    for _ in range(2):
        result = 0
        for instruction in body:
            if instruction.operation == "HGMMA" and "gsb0" in instruction.operands:
                groups += 1
            elif instruction.name.startswith("WARPGROUP.DEPBAR"):
                groups = min(groups, int(instruction.operands.split(",")[1], 16))
            elif instruction.operation == "MUFU" and groups:
                result += 1
    return result


def _shapes(body: list[Instruction]) -> Iterator[str]:
    for instruction in body:
        if match := re.match(r"HGMMA\.(\d+x\d+x\d+)", instruction.name):
            a = instruction.operands.split(",")[1]
            yield f"{match.group(1)} {'shared' if 'desc' in a else 'registers'}"
        elif match := re.match(r"HMMA\.(16)(8)(16|8)\b", instruction.name):
            yield "x".join(match.groups())


def _lane_bytes(instruction: Instruction) -> int:
    suffixes = instruction.name.split(".")[1:]
    if instruction.operation in ("LDSM", "STSM"):  # matrices of 8 x 8 values of 2 bytes: 4 bytes of each per lane
        return 4 * int(suffixes[-1]) if suffixes[-1] in "24" else 4
    return next((LANE_BYTES[suffix] for suffix in suffixes if suffix in LANE_BYTES), 4)
