"""Pictures for people: the pool as a map of slots, checks and events over time, chains of requests that share a prefix.

They take a live state, plain arrays, or the arrays of a dump. Needs matplotlib: the extra ``viz``.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_kvcanary import validation
from jax_kvcanary.canary_state import CanaryState
from jax_kvcanary.report import decode_log
from jax_kvcanary.spec import CHAIN_ANCHOR, RECORD_WORDS, RING_WORDS, SPLITMIX_MULTIPLIERS, SPLITMIX_SHIFTS, Column, RecordFlag

_OWNERS = ("#4c78a8", "#f2a541", "#59a14f", "#b07aa1", "#76b7b2", "#9c755f", "#d47fb0", "#86a83b", "#5b5ea6", "#c9a227")
_RED, _INK, _PALE, _FREE, _GRID = "#d62728", "#222222", "#f3f3f1", "#c9c9c5", "#ffffff"
_MASK = (1 << 64) - 1


def _pyplot() -> Any:
    try:
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ImportError("jax_kvcanary.viz draws with matplotlib; install jax_kvcanary[viz]") from error


# ------------------------------------------------------------------------------------------------ what is drawn


def records_of(source: Any, group: str | None = None) -> np.ndarray:
    """The records of a state, of a mapping of arrays, or themselves: uint32 ``[slots, words]``.

    A mapping has "records", and, if these are only some slots of a pool, "slots" with their numbers and maybe "num_slots".

    Raises:
      ValueError: nothing of that kind, or several groups and none is named.
    """
    held = getattr(source, "arrays", source)
    slots = None
    if isinstance(source, CanaryState):
        held = source.records
    elif isinstance(held, Mapping) and "records" in held:
        slots = held.get("slots")
        size = held.get("num_slots")
        held = held["records"]
    if isinstance(held, Mapping):
        if group is None and len(held) != 1:
            raise validation.error(f"group is required, there are {', '.join(map(repr, held)) or 'none'}")
        held = held[next(iter(held)) if group is None else group]
    records = np.asarray(held)
    if records.ndim != 2 or records.shape[1] < RECORD_WORDS or records.dtype != np.uint32:
        raise validation.error(f"records must be uint32 [slots, words], got {records.dtype} {records.shape}")
    if slots is not None:
        at = np.asarray(slots).astype(np.int64).reshape(-1)
        if at.shape[0] != records.shape[0]:
            raise validation.error(f"slots must name the {records.shape[0]} records, got {at.shape[0]}")
        full = np.zeros((int(np.max(at, initial=-1)) + 1 if size is None else int(np.asarray(size)), records.shape[1]), np.uint32)
        full[at[at >= 0]] = records[at >= 0]
        records = full
    return records


def bad_slots_of(source: Any, violations: Any = None) -> set[int]:
    """Slots of violations: of a state's log, of rows uint32 ``[n, 32]``, of things with a ``slot``, or numbers."""
    if violations is None:
        if isinstance(source, CanaryState):
            return {row.slot for part in source.log.parts for row in decode_log(part).violations}
        held = getattr(source, "arrays", source)
        violations = held.get("violations", held.get("rows", ())) if isinstance(held, Mapping) else ()
    if isinstance(violations, np.ndarray | jax.Array):
        rows = np.asarray(violations)
        if rows.ndim == 2 and rows.shape[1] == RING_WORDS:
            return set(rows[:, 2 * Column.SLOT].astype(np.int64).tolist())
        return set(rows.reshape(-1).tolist())
    return {int(getattr(each, "slot", each)) for each in violations}


def _pairs(records: np.ndarray, word: int) -> np.ndarray:
    return records[:, word].astype(np.uint64) | records[:, word + 1].astype(np.uint64) << np.uint64(32)


def _name(request: int) -> str:
    """A request's id as people read it: engine and number, if the upper half is used."""
    return f"{request >> 32}:{request & 0xFFFFFFFF}" if request >> 32 else str(request)


# ------------------------------------------------------------------------------------------------ the pool


def slot_map(
    source: Any,
    *,
    violations: Any = None,
    group: str | None = None,
    page_size: int = 1,
    columns: int | None = None,
    labels: Mapping[int, str] | None = None,
    title: str | None = None,
    ax: Any = None,
) -> Any:
    """The pool as a grid of slots: the colour is who wrote a slot, paler is longer ago, crossed out in red is a violation.

    Args:
      source: a :class:`CanaryState`, records uint32 ``[slots, words]``, or a mapping with "records" as a dump has it.
      violations: see :func:`bad_slots_of`; None: those that the source knows.
      group: of a state with several. page_size: slots a page, drawn together. columns: pages a line.
      labels: name of requests by id, for the legend. title: None counts what is there.
      ax: to draw on; None: a new figure.

    Returns:
      The figure.
    """
    plt = _pyplot()
    patches = importlib.import_module("matplotlib.patches")
    colors = importlib.import_module("matplotlib.colors")
    records = records_of(source, group)
    bad = bad_slots_of(source, violations)
    slots = records.shape[0]
    size = validation.static_int("page_size", page_size, minimum=1)
    pages = max(1, -(-slots // size))
    wide = columns or max(1, min(pages, round(math.sqrt(2.6 * slots) / size) or 1))
    high = -(-pages // wide)

    owners, ages, free = _owners(records)
    listed = [owner for owner, _ in sorted(((o, int(np.sum(owners == o))) for o in set(owners.tolist()) - {-1}), key=lambda p: p[0])]
    rgb = np.ones((high, wide * size, 3))
    rgb[:] = colors.to_rgb("#ffffff")
    hue = {owner: np.array(colors.to_rgb(_OWNERS[i % len(_OWNERS)])) for i, owner in enumerate(listed)}
    for slot in range(slots):
        row, column = slot // size // wide, (slot // size % wide) * size + slot % size
        if owners[slot] == -1:
            rgb[row, column] = colors.to_rgb(_PALE)
        elif free[slot]:
            rgb[row, column] = colors.to_rgb(_FREE)
        else:
            rgb[row, column] = 1 - (1 - hue[int(owners[slot])]) * (1 - 0.6 * ages[slot])

    if ax is None:
        width = min(10.0, max(5.0, 0.26 * wide * size + 1.6))
        _, ax = plt.subplots(figsize=(width, min(8.0, max(1.6, (width - 1.6) * high / (wide * size) * 1.15 + 0.8))), layout="constrained")
    ax.imshow(rgb, interpolation="nearest", aspect="equal" if wide * size <= 8 * high else "auto")
    if wide * size <= 160:
        for x in range(wide * size + 1):
            ax.axvline(x - 0.5, color=_GRID, lw=2.5 if x % size == 0 and size > 1 else 0.5)
        for y in range(high + 1):
            ax.axhline(y - 0.5, color=_GRID, lw=2.5)
    numbered = _numbers(ax, records, owners, rgb, size, wide)
    for slot in sorted(bad):
        if 0 <= slot < slots:
            row, column = slot // size // wide, (slot // size % wide) * size + slot % size
            ax.add_patch(patches.Rectangle((column - 0.46, row - 0.46), 0.92, 0.92, fill=False, ec=_RED, lw=2.2, zorder=3))
            if not numbered:
                ax.plot([column - 0.4, column + 0.4], [row + 0.4, row - 0.4], color=_RED, lw=1.6, zorder=3)
    if size > 1 and wide > 1:
        ax.set_xticks([(page + 0.5) * size - 0.5 for page in range(wide)], [f"+{page}" for page in range(wide)])
    else:
        ax.set_xticks([])
    every = -(-high // 16)
    ax.set_yticks(range(0, high, every), [str(row * wide) for row in range(0, high, every)])
    ax.set_ylabel("page" if size > 1 else "slot")
    ax.tick_params(length=0, labelsize=8, colors="#555555")
    for spine in ax.spines.values():
        spine.set_visible(False)
    names = labels or {}
    handles = [patches.Patch(color=hue[o], label=names.get(o, "unknown writer" if o == 0 else f"request {_name(o)}")) for o in listed[:10]]
    if len(listed) > 10:
        handles.append(patches.Patch(color="#ffffff", label=f"and {len(listed) - 10} more"))
    if free.any():
        handles.append(patches.Patch(color=_FREE, label="given back"))
    handles.append(patches.Patch(color=_PALE, label="never written"))
    if bad:
        handles.append(patches.Patch(fill=False, ec=_RED, lw=2, label="violation"))
    place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.02), "alignment": "left"}
    ax.legend(handles=handles, frameon=False, fontsize=8, handlelength=1.2, title=_paler(ages), title_fontsize=7.5, **place)
    stamped = int(np.sum(owners != -1))
    found = f", {len(bad)} bad" if bad else ""
    ax.set_title(title or f"{stamped} of {slots} slots stamped{found}", fontsize=10, loc="left")
    return _closed(ax.figure, plt)


def _owners(records: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Writer of each slot (-1: none, 0: unknown), its age in 0..1, and whether it was given back."""
    written = records.any(axis=1)
    if records.shape[1] < 16:
        return np.where(written, 0, -1).astype(object), np.zeros(len(records)), np.zeros(len(records), bool)
    owners = np.where(written, _pairs(records, 8).astype(object), -1)
    steps = records[:, 10].astype(np.int64)
    newest, oldest = int(steps[written].max(initial=0)), int(steps[written].min(initial=0)) if written.any() else 0
    ages = np.where(written, (newest - steps) / max(1, newest - oldest), 0.0)
    return owners, ages, written & ((records[:, 11] & int(RecordFlag.FREE)) != 0)


def _paler(ages: np.ndarray) -> str | None:
    return "paler: written earlier" if ages.any() else None


def _numbers(ax: Any, records: np.ndarray, owners: np.ndarray, rgb: np.ndarray, size: int, wide: int) -> bool:
    """The position in each slot, where there is room; whether there was."""
    if wide * size > 32 or len(records) > 512:
        return False
    for slot in range(len(records)):
        if owners[slot] != -1:
            x, y = (slot // size % wide) * size + slot % size, slot // size // wide
            color = "white" if rgb[y, x].mean() < 0.55 else _INK
            ax.text(x, y, str(int(records[slot, 2])), ha="center", va="center", fontsize=6.5, color=color)
    return True


# ------------------------------------------------------------------------------------------------ time


def timeline(
    events: Iterable[Any] = (),
    *,
    checks: Sequence[Any] = (),
    marks: Mapping[int, str] | None = None,
    title: str | None = None,
    ax: Any = None,
) -> Any:
    """What was checked in each step, and when what was found.

    Args:
      events: of a monitor.
      checks: :class:`ReportHeader` of the steps (``slot_runs`` counts up), or pairs of a step and a mapping of launch names to slots.
      marks: words at steps, such as a planted fault.
      ax: to draw on; None: a new figure.

    Returns:
      The figure.
    """
    plt = _pyplot()
    told = list(events)
    per_step = _checked(checks)
    names = sorted({name for _, held in per_step for name in held} | {_launch(event) for event in told}, key=_order)
    lanes = {name: len(names) - 1 - i for i, name in enumerate(names)}
    if ax is None:
        _, ax = plt.subplots(figsize=(8.4, 0.75 * max(1, len(names)) + 1.5), layout="constrained")
    for name, lane in lanes.items():
        held = [(step, counts[name]) for step, counts in per_step if counts.get(name)]
        most = max((count for _, count in held), default=1)
        ax.bar([s for s, _ in held], [0.62 * c / most for _, c in held], bottom=lane, width=0.8, color="#9db4c9", lw=0)
        ax.axhline(lane, color="#dddddd", lw=0.8, zorder=0)
        if held:
            ax.text(
                1.005,
                lane + 0.3,
                f"up to {most}\nslots a step",
                transform=ax.get_yaxis_transform(),
                fontsize=7,
                color="#666666",
                va="center",
            )
    top = len(names) - 0.1
    for step, words in (marks or {}).items():
        ax.axvline(step, color=_INK, lw=1, ls=(0, (3, 3)), zorder=1)
        ax.text(step, top, f" {words}", fontsize=8, color=_INK, va="bottom", ha="left")
    groups: dict[tuple[int, str], list[Any]] = {}
    for event in told:
        if getattr(event, "root", None) is None:
            groups.setdefault((event.step, _launch(event)), []).append(event)
    for number, ((step, name), found) in enumerate(sorted(groups.items())):
        ax.plot(step, lanes[name] + 0.31, marker="o", ms=8, color=_RED, mec="white", zorder=4)
        if number < 6:
            first = found[0]
            more = f" (+{len(found) - 1})" if len(found) > 1 else ""
            cause = getattr(getattr(first, "cause", None), "value", "")
            ax.annotate(
                f"slot {first.slot}{more}: {cause.replace('_', ' ')}", (step, lanes[name] + 0.31), xytext=(8, 0),
                textcoords="offset points", va="center", fontsize=8, color=_RED, zorder=5,
                bbox={"fc": "white", "ec": "none", "alpha": 0.85, "pad": 1},
            )  # fmt: skip
    ax.set_yticks([lane + 0.31 for lane in lanes.values()], [name.lower().replace("_", " ") for name in lanes], fontsize=8)
    ax.set_ylim(-0.15, len(names) + (0.35 if marks else 0.05))
    ax.set_xlabel("step", fontsize=8)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.tick_params(length=0, labelsize=8)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    if title:
        ax.set_title(title, fontsize=10, loc="left")
    return _closed(ax.figure, plt)


def _launch(event: Any) -> str:
    return str(getattr(event, "tag_name", "event"))


def _order(name: str) -> tuple[int, str]:
    return next((i for i, part in enumerate(("HEAD", "TAIL", "SWEEP")) if part in name), 9), name


def _checked(checks: Sequence[Any]) -> list[tuple[int, dict[str, int]]]:
    """Slots by launch of each step."""
    out: list[tuple[int, dict[str, int]]] = []
    before: dict[Any, int] = {}
    for each in checks:
        if isinstance(each, tuple):
            out.append((int(each[0]), {str(name): int(count) for name, count in each[1].items()}))
            continue
        held = {tag: count - before.get(tag, 0) for tag, count in each.slot_runs.items()}
        out.append((each.step - 1, {tag.name: count for tag, count in held.items() if count > 0}))  # a header counts the steps done
        before = each.slot_runs
    return out


# ------------------------------------------------------------------------------------------------ chains


def _splitmix(x: int) -> int:
    for shift, multiplier in zip(SPLITMIX_SHIFTS, (*SPLITMIX_MULTIPLIERS, 1), strict=True):
        x = (x ^ (x >> shift)) * multiplier & _MASK
    return x


def chain_hashes(records: np.ndarray, slots: Sequence[int], *, namespace: int = 0) -> list[tuple[int, int]]:
    """(stored, expected) hash of the predecessor at each slot of a chain; expected follows from the record before."""
    out, expected = [], _splitmix(CHAIN_ANCHOR ^ namespace)
    for slot in slots:
        token, position, stored, _ = (int(word) for word in _row(records, slot))
        out.append((stored, expected))
        expected = _splitmix(_splitmix(_splitmix(stored) ^ token) ^ position)
    return out


def _row(records: np.ndarray, slot: int) -> list[int]:
    words = records[slot, :8].astype(np.uint64)
    return [int(words[2 * i] | words[2 * i + 1] << np.uint64(32)) for i in range(4)]


def chains(
    source: Any,
    requests: Mapping[Any, Sequence[int]],
    *,
    group: str | None = None,
    violations: Any = None,
    namespace: int = 0,
    words: Mapping[int, str] | None = None,
    title: str | None = None,
    ax: Any = None,
) -> Any:
    """The records of two requests (or more) as boxes: what they share is drawn once, and a link that does not fit is red.

    Args:
      source: as for :func:`slot_map`.
      requests: slots in order of positions, by a name or id of each request.
      violations: slots to mark. namespace: of the requests. words: text of tokens by id.
      ax: to draw on; None: a new figure.

    Returns:
      The figure.
    """
    plt = _pyplot()
    patches = importlib.import_module("matplotlib.patches")
    records, bad = records_of(source, group), bad_slots_of(source, violations)
    held = {name: [int(slot) for slot in slots] for name, slots in requests.items()}
    if not held:
        raise validation.error("requests must name at least one request")
    shared = 0
    if len(held) > 1:
        while all(len(slots) > shared for slots in held.values()) and len({slots[shared] for slots in held.values()}) == 1:
            shared += 1
    longest = max(len(slots) for slots in held.values())
    count = len(held)
    if ax is None:
        _, ax = plt.subplots(figsize=(min(13.0, 1.12 * longest + 1.2), 1.15 * count + 0.75), layout="constrained")
    middle = (count - 1) / 2

    def place(number: int, at: int) -> tuple[float, float]:
        return at * 1.25, -middle if at < shared else -float(number)

    drawn: set[tuple[float, float]] = set()
    for number, (name, slots) in enumerate(held.items()):
        color = _OWNERS[number % len(_OWNERS)]
        hashes = chain_hashes(records, slots, namespace=namespace)
        for at, slot in enumerate(slots):
            x, y = place(number, at)
            broken = hashes[at][0] != hashes[at][1]
            if at:
                fx, fy = place(number, at - 1)
                arrow = {
                    "arrowstyle": "-|>",
                    "color": _RED if broken else "#888888",
                    "lw": 1.6 if broken else 1.0,
                    "shrinkA": 0,
                    "shrinkB": 0,
                }
                ax.annotate("", (x - 0.5, y), (fx + 0.5, fy), arrowprops=arrow, zorder=1)
            if (x, y) in drawn:
                continue
            drawn.add((x, y))
            wrong = broken or slot in bad
            face = "#e4e4e0" if at < shared else _tint(color)
            box = patches.FancyBboxPatch(
                (x - 0.5, y - 0.36), 1.0, 0.72, boxstyle="round,pad=0,rounding_size=0.06", fc=face,
                ec=_RED if wrong else "#777777", lw=2.2 if wrong else 0.8, zorder=2,
            )  # fmt: skip
            ax.add_patch(box)
            token = _row(records, slot)[0]
            token = token - (1 << 64) if token >> 63 else token
            text = (words or {}).get(token, str(token))
            ax.text(x, y + 0.19, text, ha="center", va="center", fontsize=9, color=_INK, zorder=3, clip_on=True)
            ax.text(x, y - 0.02, f"slot {slot}", ha="center", va="center", fontsize=6.5, color="#555555", zorder=3)
            hashed = f"{hashes[at][0] >> 40:06x}"
            ax.text(
                x, y - 0.21, hashed, ha="center", va="center", fontsize=7, family="monospace", color=_RED if broken else "#555555", zorder=3
            )
            if broken:
                says = f"{hashes[at][1] >> 40:06x} expected"
                ax.text(x, y - 0.46, says, ha="center", va="center", fontsize=6.5, family="monospace", color=_RED, zorder=3)
        x, y = place(number, len(slots) - 1)
        label = name if isinstance(name, str) else f"request {_name(int(name))}"
        ax.text(x + 0.62, y, label, ha="left", va="center", fontsize=9, color=color if len(slots) > shared else _INK, weight="bold")
    if shared:
        ax.text((shared - 1) * 0.625, -middle + 0.5, "shared prefix", ha="center", va="bottom", fontsize=8, color="#555555")
    ax.set_xlim(-0.65, (longest - 1) * 1.25 + 2.0)
    ax.set_ylim(-(count - 1) - 0.62, 0.62 if count > 1 or not shared else 0.75)
    ax.set_axis_off()
    if title:
        ax.set_title(title, fontsize=10, loc="left")
    return _closed(ax.figure, plt)


def _tint(color: str) -> Any:
    colors = importlib.import_module("matplotlib.colors")
    return 1 - (1 - np.array(colors.to_rgb(color))) * 0.3


def _closed(figure: Any, plt: Any) -> Any:
    """The figure, out of pyplot's hands: a notebook shows it once, as what a cell returns."""
    plt.close(figure)
    return figure
