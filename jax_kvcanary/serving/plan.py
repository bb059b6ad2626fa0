"""What the scheduler decides about and what it decides: requests, and the plan of a step."""

from __future__ import annotations

import dataclasses
import enum

from jax_kvcanary.serving.sampling import SamplingParams


class Status(enum.Enum):
    """Where a request stands; the last four are final."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    DROPPED = "dropped"
    FAILED = "failed"


@dataclasses.dataclass(eq=False)
class Request:
    """A request and where its K and V lie.

    tokens: prompt and output so far. computed: leading tokens whose K and V are written. pages: those that hold them, in order.
    row: of the token table, 0 when not running. siblings: parallel samples that fork off once the prompt is computed.
    """

    request_id: int
    prompt: list[int]
    sampling: SamplingParams
    namespace: int
    arrival: int
    tokens: list[int]
    status: Status = Status.WAITING
    row: int = 0
    computed: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    siblings: list[Request] = dataclasses.field(default_factory=list)
    finish_reason: str = ""
    cached_tokens: int = 0
    preemptions: int = 0
    recomputes: int = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def pending(self) -> int:
        """Tokens whose K and V are not written yet; 1 in decode."""
        return len(self.tokens) - self.computed

    @property
    def remaining(self) -> int:
        """Tokens still to be sampled."""
        return self.sampling.max_new_tokens - (len(self.tokens) - len(self.prompt))

    @property
    def is_done(self) -> bool:
        return self.status not in (Status.WAITING, Status.RUNNING)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One request of a step and how many of its tokens go in."""

    request: Request
    extend: int


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """entries: in batch order. copies: pages (from, to) to copy before the step. num_steps: above 1 only for decode."""

    entries: list[Entry]
    copies: list[tuple[int, int]]
    num_steps: int
    is_decode: bool
