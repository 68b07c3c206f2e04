"""Launches, copies and collectives of a compiled program, read from the text of its HLO."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

COLLECTIVES = frozenset(
    {
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "ragged-all-to-all",
        "reduce-scatter",
    }
)
"""Operations between devices, without the `-start` of those that overlap with others."""

_LAUNCHES_NOTHING = frozenset(
    {
        "add-dependency",
        "after-all",
        "bitcast",
        "constant",
        "domain",
        "get-tuple-element",
        "opt-barrier",
        "parameter",
        "tuple",
    }
)
_MOVES = frozenset(
    {"bitcast", "copy", "get-tuple-element", "parameter", "reshape", "transpose", "tuple"}
)
_FUSIONS = frozenset({"fusion", "fusion-start"})
_CALLS = frozenset({"async-start", "call", "call-start"})

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.$-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.$-]+) = (.*)")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations)="
    r"(?:\{([^}]*)\}|(%[\w.$-]+))"
)
_NAME = re.compile(r"%([\w.$-]+)")
_BACKEND_CONFIG = ", backend_config="


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of HLO.

    Attributes:
        name: unique in its program.
        type: of its result, with the layout.
        opcode: what it does.
        operands: the text between the opcode's parentheses.
        attributes: the text behind them, without `backend_config`.
        backend_config: what the compiler has noted; for a kernel, its code.
    """

    name: str
    type: str
    opcode: str
    operands: str
    attributes: str
    backend_config: str

    def __str__(self) -> str:
        return f"%{self.name} = {self.type} {self.opcode}({self.operands}){self.attributes}"

    @property
    def called(self) -> Sequence[str]:
        """Names of the computations that it calls."""
        found = _CALLED.findall(self.attributes)
        return [name for several, one in found for name in _NAME.findall(several or one)]

    @property
    def origin(self) -> str:
        """Where it is from: the names of transformations and scopes around it, "" if unknown."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def argument(self) -> str:
        """For a parameter of the program, the name of the function's argument."""
        return self.origin or self.name

    @property
    def target(self) -> str:
        """Of a custom call."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def trip_count(self) -> int | None:
        """Trip count of a loop, None if it is known only when it runs."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.backend_config)
        return int(found[1]) if found else None


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """Work that is given to a device at once.

    Attributes:
        kind: opcode, or the target of a custom call.
        origin: where it is from, as of an instruction.
        num_bytes: for a collective, the larger of what one device gives and gets; 0 for others.
        instruction: of a custom call; None for others.
    """

    kind: str
    origin: str
    num_bytes: int = 0
    instruction: Instruction | None = None


@dataclasses.dataclass(frozen=True)
class HloProgram:
    """A compiled program. `computations` are in the order of its text, the entry among them."""

    computations: Mapping[str, Sequence[Instruction]]
    entry: str

    @classmethod
    def parse(cls, text: str) -> "HloProgram":
        """Reads the text of an HLO module.

        Raises:
            ValueError: it has no entry computation.
        """
        computations: dict[str, list[Instruction]] = {}
        entry = None
        current: list[Instruction] = []
        for line in text.splitlines():
            # Before any regular expression: the code of a kernel can take megabytes.
            line, _, config = line.partition(_BACKEND_CONFIG)
            if found := _INSTRUCTION.match(line):
                current.append(_parse_instruction(found[1], found[2], config))
            elif found := _COMPUTATION.match(line):
                current = computations[found[2]] = []
                entry = found[2] if found[1] else entry
        if entry is None:
            raise ValueError(f"no HLO module with an ENTRY: {text[:80]!r}")
        return cls(computations, entry)

    def instructions(self) -> Iterator[Instruction]:
        """Instructions of all computations."""
        for computation in self.computations.values():
            yield from computation

    @functools.cached_property
    def executed(self) -> Mapping[str, int]:
        """Runs of each computation that launches something, by name.

        A loop's body counts as often as it runs; where that is known only at run time, it counts
        once, and so does its condition. Of a conditional's branches, the longest one counts.
        """
        times: collections.Counter[str] = collections.Counter()
        self._execute(self.entry, 1, times)
        return times

    def _execute(self, name: str, number: int, times: collections.Counter[str]) -> None:
        times[name] += number
        for instruction in self.computations[name]:
            for called, each in self._runs(instruction):
                self._execute(called, number * each, times)

    def _runs(self, instruction: Instruction) -> Iterator[tuple[str, int]]:
        """Computations whose instructions are launched one by one, and how often."""
        if instruction.opcode == "while":
            condition, body = _loop(instruction)
            if instruction.trip_count is None:
                yield condition, 1
            yield body, 1 if instruction.trip_count is None else instruction.trip_count
        elif instruction.opcode == "conditional":
            yield max(instruction.called, key=self._num_launches), 1
        elif instruction.opcode in _CALLS:
            yield from ((name, 1) for name in instruction.called)

    def _num_launches(self, name: str) -> int:
        times: collections.Counter[str] = collections.Counter()
        self._execute(name, 1, times)
        return sum(
            number * sum(1 for each in self.computations[name] if self._launch(each))
            for name, number in times.items()
        )

    def loops(self) -> Iterator[Instruction]:
        """The loops that run."""
        return self._executed("while")

    def branches(self) -> Iterator[Instruction]:
        """The conditionals that run; in one of another, only those of its longest branch."""
        return self._executed("conditional")

    def _executed(self, opcode: str) -> Iterator[Instruction]:
        for name in self.executed:
            yield from (each for each in self.computations[name] if each.opcode == opcode)

    def launches(self) -> Iterator[tuple[Launch, int]]:
        """Everything that is launched, and how often. Loops count as in `executed`.

        A sort and a call into a library count once, though they may launch several kernels.
        """
        for name, number in self.executed.items():
            for instruction in self.computations[name]:
                if launch := self._launch(instruction):
                    yield launch, number

    def _launch(self, instruction: Instruction) -> Launch | None:
        opcode, origin = instruction.opcode, instruction.origin
        if opcode in _LAUNCHES_NOTHING or opcode.endswith(("-done", "-update")):
            return None
        if opcode in _CALLS or opcode in {"while", "conditional"}:
            return None
        if opcode == "custom-call":
            target = instruction.target
            return (
                None
                if target == "AllocateBuffer"
                else Launch(target, origin, instruction=instruction)
            )
        if opcode in _FUSIONS:
            (fused,) = instruction.called
            inner = [each for each in self.computations[fused] if each.opcode in COLLECTIVES]
            if inner:
                return Launch(inner[0].opcode, origin, sum(map(self._collective_bytes, inner)))
            for call in self.computations[fused]:
                if call.opcode == "custom-call":
                    # Joined with a slice of an operand.
                    return Launch(call.target, call.origin, instruction=call)
            return Launch("fusion", origin)
        kind = opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            return Launch(kind, origin, self._collective_bytes(instruction))
        return Launch(kind, origin)

    def _collective_bytes(self, instruction: Instruction) -> int:
        if instruction.opcode.endswith("-start"):
            return max(map(type_bytes, _tuple_parts(instruction.type)))
        given = sum(self._types.get(name, 0) for name in _NAME.findall(instruction.operands))
        return max(given, type_bytes(instruction.type))

    @functools.cached_property
    def _types(self) -> Mapping[str, int]:
        return {each.name: type_bytes(each.type) for each in self.instructions()}

    def copies(self, min_bytes: int) -> Iterator[Instruction]:
        """Copies of at least `min_bytes`, also those within fusions.

        A transposition counts if the kernel it is fused into does nothing else: so XLA changes an
        array's layout.
        """
        for computation in self.computations.values():
            only_moves = all(each.opcode in _MOVES for each in computation)
            for each in computation:
                copies = each.opcode in {"copy", "copy-start"} or (
                    each.opcode == "transpose" and only_moves
                )
                if copies and type_bytes(_tuple_parts(each.type)[0]) >= min_bytes:
                    yield each


def type_bytes(type_: str) -> int:
    """Bytes of all arrays of an HLO type, rounded up to whole bytes each."""
    return sum(
        -(-_element_bits(element) * math.prod(map(int, filter(None, sizes.split(",")))) // 8)
        for element, sizes in _ARRAY.findall(type_)
    )


def _element_bits(element: str) -> int:
    if element == "pred":
        return 8
    found = re.search(r"\d+", element)
    return int(found[0]) if found else 0  # a token has no bytes


def _parse_instruction(name: str, text: str, config: str) -> Instruction:
    end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
    type_, rest = text[:end], text[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    close = _closing(rest)
    return Instruction(
        name, type_, opcode, rest[len(opcode) + 1 : close], rest[close + 1 :], config
    )


def _closing(text: str) -> int:
    """Index of the parenthesis that closes the first one."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    raise ValueError(f"unbalanced parentheses in HLO: {text[:80]!r}")


def _tuple_parts(type_: str) -> Sequence[str]:
    """The types that a tuple type holds; another type itself."""
    if not type_.startswith("("):
        return [type_]
    parts, depth = [""], 0
    for character in type_[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _loop(instruction: Instruction) -> tuple[str, str]:
    """Names of a loop's condition and body."""
    condition = re.search(r"condition=%([\w.$-]+)", instruction.attributes)
    body = re.search(r"body=%([\w.$-]+)", instruction.attributes)
    if not condition or not body:
        raise ValueError(f"a loop without condition or body in HLO: {instruction}")
    return condition[1], body[1]
