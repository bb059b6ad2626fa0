"""What a compiled step holds because of a canary: its calls, copies and collectives of the pool, memory, and what to change.

Two views are put together: the traced program says what was asked for and in which order the pool is read, handed on and updated; the
compiled text says what the compiler made of it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gzip
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_kvcanary import spec, validation
from jax_kvcanary.lowering import OPERATIONS
from jax_kvcanary.spec import CanaryLaunchTag, RealKvHashMode

_MOVEMENT = {"reshape", "transpose", "convert_element_type", "bitcast_convert_type", "rev", "squeeze", "expand_dims", "broadcast_in_dim",
             "concatenate", "copy", "copy_p", "slice", "dynamic_slice", "gather", "pad"}  # fmt: skip
_UPDATES = ("scatter", "dynamic_update_slice")
_CHECKS = ("verify", "verify_fused", "write")
_COPY_KINDS = {"copy": "copy", "copy-start": "copy", "reshape": "copy", "reverse": "copy", "concatenate": "copy", "gather": "copy",
               "slice": "copy", "dynamic-slice": "copy", "pad": "copy", "transpose": "transpose", "convert": "convert",
               "bitcast-convert": "convert", "all-gather": "gather", "all-gather-start": "gather", "all-to-all": "gather",
               "collective-permute": "gather", "collective-permute-start": "gather", "all-reduce": "gather"}  # fmt: skip
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id", "iota"}
_DONE = {"all-gather-done", "collective-permute-done", "copy-done", "all-reduce-done"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CanaryCall:
    """One operation of the canary in the traced program.

    operation: such as "verify_fused". launch: name of its launch tag, "-" without one. reads: arrays of the pool that it is given.
    passes: whether it hands them on. mode: how many bytes are hashed. loop: whether it stands inside a loop. sharded: inside
    ``shard_map``. moved: what was done to the pool between the step's argument and the call, such as ("transpose",).
    """

    operation: str
    launch: str
    reads: int
    passes: bool
    mode: str
    loop: bool
    sharded: bool
    moved: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.operation if self.launch == "-" else f"{self.operation} {self.launch}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectionFinding:
    """Something to change.

    kind: "copy", "transpose", "convert" or "gather" (collectives) of a pool-sized array; "removed" (a check that was asked for and is not
    in the program); "order" (written so that other compilers copy, and this one did not). count, bytes: of such instructions, and what
    they produce a step, on one device. instructions: their names in the compiled text. advice: a sentence each.
    """

    kind: str
    count: int
    bytes: int
    instructions: tuple[str, ...]
    advice: tuple[str, ...]

    def describe(self) -> str:
        """In words."""
        what = {
            "copy": "a pool-sized array is copied",
            "transpose": "a pool-sized array is transposed",
            "convert": "a pool-sized array is converted",
            "gather": "a pool-sized array goes from device to device",
            "removed": "a check was asked for and is not in the program",
            "order": "nothing is copied here, but other compilers would",
        }[self.kind]
        size = f", {_bytes(self.bytes)} a step" if self.bytes else ""
        times = f" {self.count} times" if self.count > 1 else ""
        where = f" ({', '.join(self.instructions[:4])}{', ...' if len(self.instructions) > 4 else ''})" if self.instructions else ""
        return "\n".join([f"{self.kind}: {what}{times}{size}{where}", *(f"  change: {advice}" for advice in self.advice)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a compiled program on one device. alias: results that take the place of donated arguments."""

    arguments: int
    outputs: int
    alias: int
    temp: int
    instructions: int

    def minus(self, other: Memory) -> Memory:
        """By how much this is more."""
        return Memory(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in dataclasses.fields(self)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandBuffers:
    """What a profiler trace says. available: whether it says anything. canary: launches of the canary's kernels, of which inside: in
    command buffers. graphs: launches of command buffers."""

    available: bool
    canary: int
    inside: int
    graphs: int
    detail: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """What :func:`inspect` found.

    platform: the program was compiled for. calls: as traced. targets: custom calls of the canary in the program, by target. plain: calls
    that became plain JAX operations. findings: what to change, none is good. notes: what else is to be known. memory: of the program;
    added: what it has more than the program without the canary, None without one. scratch: bytes that the calls themselves need.
    collectives: by name, in the whole program; added_collectives: more than without the canary.
    """

    platform: str
    calls: tuple[CanaryCall, ...]
    targets: dict[str, int]
    plain: int
    findings: tuple[InspectionFinding, ...]
    notes: tuple[str, ...]
    memory: Memory
    added: Memory | None
    scratch: int
    pool_bytes: int
    collectives: dict[str, int]
    added_collectives: dict[str, int] | None
    command_buffers: CommandBuffers | None = None

    @property
    def good(self) -> bool:
        """Nothing is to be changed."""
        return not self.findings

    def describe(self) -> str:
        """The whole in lines."""
        lines = [f"compiled for {self.platform}; pool of {_bytes(self.pool_bytes)} a device"]
        lines.append("canary calls: " + (", ".join(f"{n} x {target}" for target, n in self.targets.items()) or "no custom calls"))
        if self.plain:
            lines.append(f"{self.plain} of them as plain JAX operations")
        for call, count in collections.Counter(self.calls).items():
            where = "".join([", in a loop" if call.loop else "", ", inside shard_map" if call.sharded else ""])
            pool = f"{'hands on' if call.passes else 'reads'} {_counted(call.reads, 'pool array')}" if call.reads else "reads no pool"
            lines.append(f"  {call.name}{f' x {count}' if count > 1 else ''}: {pool}{where}")
        lines.append(
            f"memory: {_bytes(self.memory.temp)} temporary, {_bytes(self.memory.arguments)} arguments, "
            f"{_bytes(self.scratch)} scratch of the canary's calls"
        )
        if self.added is not None:
            more = self.added
            lines.append(
                f"more than without the canary: {_bytes(more.temp)} temporary, {_bytes(more.arguments)} arguments, "
                f"{_bytes(more.outputs - more.alias)} results, {more.instructions} instructions"
            )
        collectives = self.collectives if self.added_collectives is None else self.added_collectives
        if collectives:
            of = "collectives" if self.added_collectives is None else "collectives because of the canary"
            lines.append(f"{of}: " + ", ".join(f"{n} x {name}" for name, n in collectives.items()))
        if self.command_buffers is not None:
            lines.append(f"command buffers: {self.command_buffers.detail}")
        lines += [f"note: {note}" for note in self.notes]
        lines += [finding.describe() for finding in self.findings] or ["nothing to change"]
        return "\n".join(lines)


def inspect(
    jitted: Any, *args: Any, pool: Any = None, without: Any = None, trace: str | os.PathLike[str] | None = None, **kwargs: Any
) -> Inspection:
    """Compile a jitted step for these arguments and say what the canary costs in it. Nothing is run.

    Args:
      jitted: what ``jax.jit`` returned.
      args, kwargs: of the step; arrays, or shapes and dtypes (with shardings, if it is to run on several devices).
      pool: the pool among them, arrays or shapes; None: what the canary's calls are given.
      without: the same step without a canary, to compare with: a jitted function of the same arguments, a tuple of a jitted function and
        its arguments, or a function without arguments that returns either, such as one that builds a canary with mode "off".
      trace: directory or file that ``jax.profiler`` wrote while the step ran (with ``create_perfetto_trace=True``).

    Returns:
      The findings, with :meth:`Inspection.describe`.

    Raises:
      TypeError: a function that is not jitted.

    Example:
      >>> print(kvc.inspect(step, pool, state, batch).describe())  # doctest: +SKIP
    """
    program = _Program.of(jitted, args, kwargs)
    other = None if without is None else _Program.of(*_other(without, args, kwargs))
    flow = _Flow.of(program.jaxpr, program.donated)
    sizes = _pool_sizes(pool, flow)
    findings, notes = _judge(program, other, flow, sizes)
    targets = collections.Counter(program.text.targets())
    checks = [call for call in flow.calls if call.operation in OPERATIONS]
    return Inspection(
        platform=program.platform,
        calls=tuple(flow.calls),
        targets=dict(sorted(targets.items())),
        plain=len(checks) if checks and not targets else 0,
        findings=tuple(findings),
        notes=tuple(notes),
        memory=program.memory,
        added=None if other is None else program.memory.minus(other.memory),
        scratch=flow.scratch,
        pool_bytes=_pool_bytes(pool, flow),
        collectives=dict(program.text.collectives()),
        added_collectives=None if other is None else dict(program.text.collectives() - other.text.collectives()),
        command_buffers=None if trace is None else command_buffers(trace),
    )


def _other(without: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    if callable(without) and not hasattr(without, "lower"):
        without = without()
    if isinstance(without, tuple):
        function, given, *named = without
        return function, tuple(given), named[0] if named else {}
    return without, args, kwargs


# ------------------------------------------------------------------------------------------------ the traced program


@dataclasses.dataclass(eq=False)
class _Value:
    """An array that came from an argument of the step by moves, updates and calls that hand it on.

    arg: its number. moved: what was done since. updated: whether anything wrote into it. passed: calls that handed it on and that nothing
    has updated since. reads: calls that read it, or something moved out of it.
    """

    arg: int
    moved: tuple[str, ...] = ()
    updated: bool = False
    passed: frozenset[int] = frozenset()
    reads: list[int] = dataclasses.field(default_factory=list)


class _Flow:
    """The canary's calls of a traced program, and what happens to the pool before and after each."""

    def __init__(self, donated: Sequence[bool]) -> None:
        self.donated = donated
        self.calls: list[CanaryCall] = []
        self.buffers: list[Any] = []  # avals of pool operands, once a call
        self.args_of: list[set[int]] = []  # argument numbers of each call's pool
        self.updated_before: list[bool] = []
        self.updated_after: set[int] = set()  # calls that hand on what is then updated
        self.read_then_updated: set[int] = set()  # calls that only read what is then updated
        self.updated_args: set[int] = set()
        self.scratch = 0

    @classmethod
    def of(cls, jaxpr: Any, donated: Sequence[bool]) -> _Flow:
        flow = cls(donated)
        flow._walk(jaxpr, [_Value(i) for i in range(len(jaxpr.invars))], loop=False, sharded=False)
        return flow

    def _walk(self, jaxpr: Any, given: Sequence[_Value | None], *, loop: bool, sharded: bool) -> list[_Value | None]:
        known: dict[Any, _Value | None] = dict(zip(jaxpr.invars, given, strict=True))

        def value(var: Any) -> _Value | None:
            return None if hasattr(var, "val") else known.get(var)

        for eqn in jaxpr.eqns:
            name, ins = eqn.primitive.name, [value(var) for var in eqn.invars]
            if name.startswith("kvcanary_"):
                outs = self._call(name.removeprefix("kvcanary_"), eqn, ins, loop, sharded)
            elif name.startswith(_UPDATES):
                outs = [self._updated(ins[0])]
            elif name in _MOVEMENT:
                outs = [_moved(ins[0], name)]
            elif name == "optimization_barrier":
                outs = ins
            else:
                outs = self._inner(name, eqn, ins, loop, sharded)
            known.update(zip(eqn.outvars, outs, strict=False))
        return [value(var) for var in jaxpr.outvars]

    def _inner(self, name: str, eqn: Any, ins: list[_Value | None], loop: bool, sharded: bool) -> list[_Value | None]:
        """Into the programs that an equation holds."""
        params = eqn.params
        outs: list[_Value | None] = []
        if name == "while":
            conds, bodies = params["cond_nconsts"], params["body_nconsts"]
            consts, carry = ins[conds : conds + bodies], ins[conds + bodies :]
            self._walk(_open(params["cond_jaxpr"]), [*ins[:conds], *carry], loop=True, sharded=sharded)
            return self._walk(_open(params["body_jaxpr"]), [*consts, *carry], loop=True, sharded=sharded)
        if name == "cond":
            for branch in params["branches"]:
                outs = self._walk(_open(branch), ins[1:], loop=loop, sharded=sharded)
            return outs
        for inner in _programs(params):
            fits = ins if len(inner.invars) == len(ins) else [None] * len(inner.invars)
            outs = self._walk(inner, fits, loop=loop or name == "scan", sharded=sharded or name == "shard_map")
        return outs if len(outs) == len(eqn.outvars) else [None] * len(eqn.outvars)

    def _updated(self, value: _Value | None) -> _Value | None:
        if value is None:
            return None
        self.updated_after |= value.passed
        self.read_then_updated |= set(value.reads)
        self.updated_args.add(value.arg)
        return _Value(value.arg, value.moved, updated=True)

    def _call(self, operation: str, eqn: Any, ins: list[_Value | None], loop: bool, sharded: bool) -> list[_Value | None]:
        rule, params, number = OPERATIONS[operation], eqn.params, len(self.calls)
        first = len(ins) if rule.first_buffer is None else rule.first_buffer
        buffers, passes = ins[first:], bool(params.get("pass_through"))
        self.buffers += [var.aval for var in eqn.invars[first:]]
        if rule.scratch is not None:
            aval = eqn.outvars[rule.scratch].aval
            self.scratch += math.prod(aval.shape) * aval.dtype.itemsize
        held = [value for value in buffers if value is not None]
        tag, mode = params.get("launch_tag"), params.get("real_kv_hash_mode")
        self.calls.append(
            CanaryCall(
                operation=operation,
                launch="-" if tag is None else CanaryLaunchTag(int(tag)).name,
                reads=len(buffers),
                passes=passes and bool(buffers),
                mode="-" if mode is None else RealKvHashMode(int(mode)).name,
                loop=loop,
                sharded=sharded,
                moved=max((value.moved for value in held), key=len, default=()),
            )
        )
        self.args_of.append({value.arg for value in held})
        self.updated_before.append(any(value.updated for value in held))
        outs: list[_Value | None] = [None] * len(eqn.outvars)
        for place, value in enumerate(buffers):
            if value is None:
                continue
            value.reads.append(number)
            if passes:
                handed = _Value(value.arg, value.moved, value.updated, value.passed | {number}, [])
                outs[len(outs) - len(buffers) + place] = handed
        return outs

    def advice(self, kind: str) -> list[str]:
        """What is wrong with the order or the shape in which the calls are given the pool."""
        out: list[str] = []
        forgotten = {number for number in self.read_then_updated if self.calls[number].passes}
        for number, call in enumerate(self.calls):
            if not call.reads:
                continue
            if kind == "gather":
                if call.sharded:
                    out.append(f"{call.name} runs inside shard_map, but its in_specs ask for more of the pool than a device holds")
                else:
                    out.append(
                        f"{call.name} is given a sharded pool outside of shard_map: use ShardedOps, or call the canary inside "
                        "jax.shard_map, so that every device checks its own part"
                    )
                continue
            if call.moved:
                out.append(
                    f"the pool goes through {', '.join(dict.fromkeys(call.moved))} before {call.name}: give it as it lies, and "
                    "describe its axes by the layout"
                )
            elif number in forgotten:
                out.append(f"the step goes on with the pool from before {call.name}: go on with the pool that comes back from it")
            elif call.passes:
                if number in self.updated_after:
                    continue
                if self.updated_before[number]:
                    out.append(f"{call.name} hands the pool on after the step's last update: let the tail only read it")
                else:
                    donated = all(self.donated[arg] for arg in self.args_of[number] if arg < len(self.donated))
                    out.append(
                        f"{call.name} hands on a pool that the step only reads: "
                        + ("use a check that only reads, as the tail's" if donated else "donate the pool, or use a check that only reads")
                    )
            elif number in self.read_then_updated and not any(self.args_of[number] & self.args_of[n] for n in forgotten):
                out.append(
                    f"{call.name} only reads the pool, and the step updates it afterwards: hand it on (pass_through=True, or Canary.head) "
                    "and go on with the pool that comes back"
                )
        return list(dict.fromkeys(out))

    def undonated(self) -> bool:
        """Whether a checked pool that the step updates is not donated: that costs a copy with and without the canary."""
        args = set().union(*self.args_of) if self.args_of else set()
        return any(arg < len(self.donated) and not self.donated[arg] for arg in args & self.updated_args)


def _moved(value: _Value | None, name: str) -> _Value | None:
    return None if value is None else _Value(value.arg, (*value.moved, name), value.updated, value.passed, value.reads)


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _programs(params: Mapping[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for inner in value if isinstance(value, (tuple, list)) else (value,):
            inner = _open(inner)
            if hasattr(inner, "eqns") and hasattr(inner, "invars"):
                yield inner


def _pool_sizes(pool: Any, flow: _Flow) -> set[int]:
    """Numbers of elements that an array of the pool has, whole and on one device."""
    sizes = {math.prod(aval.shape) for aval in flow.buffers}
    for leaf in jax.tree.leaves(pool):
        sizes.add(math.prod(leaf.shape))
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None:
            sizes.add(math.prod(sharding.shard_shape(tuple(leaf.shape))))
    return {size for size in sizes if size > 1}


def _pool_bytes(pool: Any, flow: _Flow) -> int:
    leaves = jax.tree.leaves(pool)
    if not leaves:
        most = max((call.reads for call in flow.calls), default=0)
        leaves = flow.buffers[: most or None]
    return sum(math.prod(leaf.shape) * jax.dtypes.itemsize_bits(leaf.dtype) // 8 for leaf in leaves)


# ------------------------------------------------------------------------------------------------ the compiled program


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    computation: str
    opcode: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    operands: tuple[str, ...]
    rest: str
    root: bool

    @property
    def elements(self) -> int:
        return max((math.prod(dims) for _, dims in self.shapes), default=0)

    @property
    def bytes(self) -> int:
        return max((math.prod(dims) * _bits(dtype) // 8 for dtype, dims in self.shapes), default=0)

    def called(self, key: str) -> str | None:
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.rest)
        return found[1] if found else None


def _bits(dtype: str) -> int:
    found = re.search(r"\d+", dtype)
    return 8 if dtype == "pred" or found is None else int(found[0])


class _Text:
    """Compiled text as instructions by computation."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, _Instruction]] = {}
        self.callers: dict[str, tuple[str, _Instruction]] = {}  # computation: (how, by whom)
        current = ""
        for line in text.splitlines():
            head = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
            if head and not line.startswith(" "):
                current = head[1]
                self.computations[current] = {}
            elif line.startswith(" ") and current and (made := _instruction(line, current)) is not None:
                self.computations[current][made.name] = made
        for computation in self.computations.values():
            for each in computation.values():
                for key in ("calls", "body", "condition", "to_apply"):
                    called = each.called(key)
                    if called in self.computations:
                        self.callers.setdefault(called, (key, each))
        fused = {name for name, (key, by) in self.callers.items() if key == "calls" and by.opcode == "fusion"}
        self.run = [each for name, held in self.computations.items() if name not in fused for each in held.values()]

    def targets(self) -> list[str]:
        """Targets of the canary's custom calls, in order."""
        return [target for each in self.run if (target := canary_target(each)) is not None]

    def collectives(self) -> collections.Counter[str]:
        names = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
        return collections.Counter(each.opcode.removesuffix("-start") for each in self.run if each.opcode.removesuffix("-start") in names)

    def instructions(self) -> int:
        return sum(each.opcode not in _FREE and each.opcode not in _DONE for each in self.run)

    def moves(self, sizes: set[int]) -> list[tuple[str, _Instruction]]:
        """Instructions that only bring a pool-sized array elsewhere, each with its kind."""
        out = []
        for each in self.run:
            if each.elements in sizes and (kind := self._kind(each)) is not None:
                out.append((self._asked(each) if kind == "copy" else kind, each))
        return out

    def _asked(self, each: _Instruction) -> str:
        """What a copy was in the traced program: compilers make a transpose a change of layout and a copy."""
        inside = self.computations.get(each.called("calls") or "", {}).values()
        names = " ".join(re.findall(r'op_name="([^"]*)"', " ".join([each.rest, *(one.rest for one in inside if one.root)])))
        return "transpose" if "/transpose" in names else "convert" if "/convert_element_type" in names else "copy"

    def _kind(self, each: _Instruction) -> str | None:
        if each.opcode != "fusion":
            return _COPY_KINDS.get(each.opcode)
        inside = self.computations.get(each.called("calls") or "", {})
        root = next((one for one in inside.values() if one.root), None)
        kind = None
        while root is not None and root.elements == each.elements:
            kind = kind or _COPY_KINDS.get(root.opcode)
            if root.opcode == "parameter":
                return kind
            if root.opcode not in _COPY_KINDS and root.opcode != "bitcast":
                return None
            if root.opcode in ("gather", "slice", "dynamic-slice", "concatenate", "pad"):
                return kind
            root = inside.get(root.operands[0]) if root.operands else None
        return kind if root is not None else None

    def source(self, computation: str, name: str, depth: int = 0) -> str:
        """The instruction that an array stems from, through copies, tuples, loops and calls that hand it on."""
        each = self.computations.get(computation, {}).get(name)
        if each is None or depth > 200:
            return f"{computation}/{name}"
        up = self._before(each)
        return f"{computation}/{name}" if up is None else self.source(*up, depth=depth + 1)

    def _before(self, each: _Instruction) -> tuple[str, str] | None:
        here = each.computation
        if each.opcode == "get-tuple-element":
            return self._element(each)
        if each.opcode == "parameter":
            how, by = self.callers.get(here, ("", None))
            if by is not None and how == "to_apply" and by.opcode == "call":
                return by.computation, by.operands[int(re.match(r"\d+", each.rest)[0])]  # type: ignore[index]
            return None
        if each.opcode == "call":
            inside = self.computations.get(each.called("to_apply") or "", {})
            root = next((one for one in inside.values() if one.root), None)
            return None if root is None or root.opcode == "tuple" else (root.computation, root.name)
        if each.operands and (each.opcode in ("bitcast", "optimization-barrier", *_DONE) or self._kind(each) is not None):
            return here, each.operands[0]
        return None

    def _element(self, each: _Instruction) -> tuple[str, str] | None:
        here, index = each.computation, int(re.search(r"index=(\d+)", each.rest)[1])  # type: ignore[index]
        of = self.computations[here].get(each.operands[0])
        if of is None:
            return None
        if of.opcode == "tuple":
            return here, of.operands[index]
        if of.opcode == "custom-call":
            aliases = dict(re.findall(r"\{(\d+)\}: \((\d+), \{\}", of.rest))
            operand = aliases.get(str(index))
            return None if operand is None else (here, of.operands[int(operand)])
        if of.opcode == "parameter":
            how, by = self.callers.get(here, ("", None))
            if by is not None and how in ("body", "condition"):
                start = self.computations[by.computation].get(by.operands[0])
                if start is not None and start.opcode == "tuple":
                    return by.computation, start.operands[index]
        if of.opcode in ("while", "optimization-barrier"):
            start = self.computations[here].get(of.operands[0])
            if start is not None and start.opcode == "tuple":
                return here, start.operands[index]
        return None

    def pool_sources(self, sizes: set[int]) -> set[str]:
        """Where the pool arrays of the canary's calls stem from."""
        out = set()
        for each in self.run:
            if canary_target(each) is not None:
                for operand in each.operands:
                    held = self.computations[each.computation].get(operand)
                    if held is not None and held.elements in sizes:
                        out.add(self.source(each.computation, operand))
        return out


def canary_target(each: Any) -> str | None:
    """The canary's target of a custom call, None for any other instruction."""
    found = re.search(r'custom_call_target="(kvcanary_\w+)"', each.rest) if each.opcode == "custom-call" else None
    return found[1] if found else None


def _instruction(line: str, computation: str) -> _Instruction | None:
    found = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if found is None:
        return None
    rest = re.sub(r"/\*.*?\*/", "", line[found.end() :])
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    start = rest.find("(")
    if start < 0:
        return None
    close = _closing(rest, start)
    inside = rest[start + 1 : close]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    shapes = tuple(
        (dtype, tuple(int(n) for n in dims.replace("<=", "").split(",") if n)) for dtype, dims in re.findall(r"(\w+)\[([\d,<=]*)\]", shape)
    )
    return _Instruction(
        name=found[2],
        computation=computation,
        opcode=rest[:start],
        shapes=shapes,
        operands=operands,
        rest=(inside if rest[:start] == "parameter" else "") + rest[close + 1 :],
        root=found[1] is not None,
    )


def _closing(text: str, start: int) -> int:
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    return len(text) - 1


@dataclasses.dataclass(frozen=True)
class _Program:
    jaxpr: Any
    donated: tuple[bool, ...]
    text: _Text
    memory: Memory
    platform: str

    @classmethod
    def of(cls, jitted: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Program:
        if not hasattr(jitted, "trace") or not hasattr(jitted, "lower"):
            raise validation.type_error(f"inspect takes what jax.jit returned, got {type(jitted).__name__}")
        traced = jitted.trace(*args, **kwargs)
        lowered = traced.lower()
        # How hard LLVM works does not change the program's text, and takes most of the time.
        compiled = lowered.compile({"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None)
        text = _Text(compiled.as_text() or "")
        stats = compiled.memory_analysis()
        jaxpr = _open(traced.jaxpr)
        donated = [bool(info.donated) for info in jax.tree.leaves(traced.args_info)]
        return cls(
            jaxpr=jaxpr,
            donated=tuple(([True] * (len(jaxpr.invars) - len(donated)) + donated)[: len(jaxpr.invars)]),
            text=text,
            memory=Memory(
                arguments=int(stats.argument_size_in_bytes) if stats else 0,
                outputs=int(stats.output_size_in_bytes) if stats else 0,
                alias=int(stats.alias_size_in_bytes) if stats else 0,
                temp=int(stats.temp_size_in_bytes) if stats else 0,
                instructions=text.instructions(),
            ),
            platform=_platform(compiled),
        )


def _platform(compiled: Any) -> str:
    for sharding in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)):
        for device in getattr(sharding, "device_set", ()):
            return str(device.platform)
    return jax.default_backend()


# ------------------------------------------------------------------------------------------------ judgement


def _judge(program: _Program, other: _Program | None, flow: _Flow, sizes: set[int]) -> tuple[list[InspectionFinding], list[str]]:
    notes: list[str] = []
    moves = program.text.moves(sizes)
    sources = program.text.pool_sources(sizes)
    connected = [
        (kind, each)
        for kind, each in moves
        if kind == "gather" or not sources or program.text.source(each.computation, each.name) in sources
    ]
    undonated = flow.undonated()
    if other is not None:
        allowed = collections.Counter((kind, each.elements) for kind, each in other.text.moves(sizes))
        kept = []
        for kind, each in sorted(moves, key=lambda move: move in connected):
            if allowed[kind, each.elements] > 0:
                allowed[kind, each.elements] -= 1
            else:
                kept.append((kind, each))
    else:
        kept = connected
        if undonated:
            notes.append("the pool is updated and not donated: a step then copies it with and without the canary")
            kept = [(kind, each) for kind, each in kept if kind != "copy"]
    findings, used = [], set()
    for kind in ("gather", "transpose", "convert", "copy"):
        found = [each for one, each in kept if one == kind]
        if not found:
            continue
        advice = flow.advice(kind)
        used |= set(advice)
        findings.append(
            InspectionFinding(
                kind=kind,
                count=len(found),
                bytes=sum(each.bytes for each in found),
                instructions=tuple(each.name for each in found),
                advice=tuple(advice) or (_unexplained(other is None),),
            )
        )
    findings += _removed(program, flow)
    left = [advice for advice in flow.advice("copy") if advice not in used]
    if left and not any(finding.kind in ("copy", "transpose", "convert") for finding in findings):
        findings.append(InspectionFinding(kind="order", count=len(left), bytes=0, instructions=(), advice=tuple(left)))
    if not flow.calls:
        notes.append("there is no canary call in this step")
    elif not sizes:
        notes.append("no call reads the pool (real_kv is 'none'): give the pool as pool= to look for copies of it")
    return findings, notes


def _unexplained(alone: bool) -> str:
    if alone:
        return "compare with the step without the canary (without=): it may be there too"
    return "keep the pool donated, hand it on in the head and only read it in the tail"


def _removed(program: _Program, flow: _Flow) -> Iterator[InspectionFinding]:
    """Checks whose results nobody uses."""
    there = collections.Counter(program.text.targets())
    if not there and not any(call.reads for call in flow.calls):
        return
    if not there and "kvcanary_" not in "".join(each.rest for each in program.text.run):
        there = collections.Counter()
    elif not there:
        return  # plain operations cannot be counted
    traced = collections.Counter(call.operation for call in flow.calls if call.operation in _CHECKS)
    for operation, wanted in traced.items():
        missing = wanted - there[spec.TARGETS[operation]]
        if missing > 0:
            yield InspectionFinding(
                kind="removed",
                count=missing,
                bytes=0,
                instructions=(),
                advice=(f"{missing} of {wanted} {operation} calls left the program: return the state (or log and records) that they give",),
            )


# ------------------------------------------------------------------------------------------------ profiler traces


def command_buffers(trace: str | os.PathLike[str]) -> CommandBuffers:
    """Whether the canary's kernels ran in command buffers, from what ``jax.profiler`` wrote.

    Args:
      trace: a ``*.json.gz`` file, or a directory with one below it.
    """
    path = Path(trace)
    files = [path] if path.is_file() else sorted(path.rglob("*.json.gz"))
    nothing = CommandBuffers(available=False, canary=0, inside=0, graphs=0, detail="")
    if not files:
        return dataclasses.replace(nothing, detail="not available: no *.json.gz trace (trace with create_perfetto_trace=True)")
    try:
        with gzip.open(files[-1], "rt") as file:
            events = json.load(file).get("traceEvents", [])
    except (OSError, ValueError, EOFError) as error:
        return dataclasses.replace(nothing, detail=f"not available: {type(error).__name__} when the trace was read")
    named = [(str(event.get("name", "")), event.get("args") or {}) for event in events if event.get("ph") == "X"]
    kernels = [args for name, args in named if "kvcanary" in name.lower()]
    graphs = sum("command_buffer::execute" in name or "cuGraphLaunch" in name for name, _ in named)
    inside = sum(any("graph" in str(key).lower() for key in args) for args in kernels)
    if not kernels and not graphs:
        return dataclasses.replace(nothing, detail="not available: the trace names no kernel of the canary and no command buffer")
    detail = f"{inside} of {len(kernels)} launches of the canary's kernels ran in command buffers, which were launched {graphs} times"
    return CommandBuffers(available=True, canary=len(kernels), inside=inside, graphs=graphs, detail=detail)


# ------------------------------------------------------------------------------------------------ the command


def engine_decode_step(*, canary: bool = True) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The example engine's decode step, its arguments and keywords, with a canary or without one."""
    serving: Any = importlib.import_module("jax_kvcanary.serving")
    batching: Any = importlib.import_module("jax_kvcanary.serving.batching")
    model = serving.LlamaConfig()
    sizes = serving.EngineConfig(num_pages=256)
    made = serving.make_canary(model, sizes) if canary else None
    engine = serving.Engine(model, serving.random_params(model, seed=0), made, engine_config=sizes)
    bucket, _ = next(each for each in batching.all_buckets(sizes) if each[1])
    batch = jax.tree.map(np.asarray, batching.dummy_batch(sizes, bucket))
    return engine.compiled.decode, (engine.params, engine.device.pool, engine.device.canary_state, batch), {"pages": bucket.pages}


def _given(text: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    module, _, name = text.partition(":")
    if not module or not name:
        raise validation.error(f"a step is named as module:function, got {text!r}")
    sys.path.insert(0, os.getcwd())
    made = getattr(importlib.import_module(module), name)()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise validation.type_error(f"{text} must return (jitted, args) or (jitted, args, kwargs), got {type(made).__name__}")
    return made[0], tuple(made[1]), dict(made[2]) if len(made) == 3 else {}


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was found; 0 if nothing is to be changed, 2 for a step that cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m jax_kvcanary inspect", description=__doc__)
    parser.add_argument("step", nargs="?", help="module:function that returns (jitted, args); default: the example engine's decode step")
    parser.add_argument("--without", metavar="MODULE:FUNCTION", help="the same step without the canary")
    parser.add_argument("--trace", metavar="DIR", help="what jax.profiler wrote while the step ran")
    options = parser.parse_args(argv)
    try:
        jitted, args, kwargs = engine_decode_step() if options.step is None else _given(options.step)
        without: Callable[[], Any] | None = None
        if options.without is not None:
            without = lambda: _given(options.without)  # noqa: E731
        elif options.step is None:
            without = lambda: engine_decode_step(canary=False)  # noqa: E731
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        print(f"inspect: {error}", file=sys.stderr)
        return 2
    found = inspect(jitted, *args, without=without, trace=options.trace, **kwargs)
    print(found.describe())
    return 0 if found.good else 1


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _bytes(number: int) -> str:
    sign, size = ("-" if number < 0 else ""), float(abs(number))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{sign}{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{sign}{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
