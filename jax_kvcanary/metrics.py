"""Prometheus metrics of monitors; needs prometheus-client, the extra ``metrics``."""

from __future__ import annotations

import importlib
import weakref
from typing import Any

POLL_BUCKETS = (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 1.0)
"""Seconds."""

_COUNTERS = {
    "violations": ("kvcanary_violations", "Violation rows by reason; a row with two reasons counts in both.", ("reason", "tag")),
    "verified": ("kvcanary_slots_verified", "Slots that head and sweep launches checked.", ("tag",)),
    "written": ("kvcanary_slots_written", "Slots that tail launches stamped or checked.", ("tag",)),
    "sweeps": ("kvcanary_sweeps", "Launches over idle slots.", ("tag",)),
    "dropped": ("kvcanary_ring_dropped", "Violation rows that were not stored or not decoded.", ("tag",)),
}
_LABELS = ("name", "shard")
_families: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


class PrometheusMetrics:
    """The counters of monitors in a registry: ``kvcanary_violations_total{reason,tag}``, ``kvcanary_slots_verified_total``,
    ``kvcanary_slots_written_total``, ``kvcanary_sweeps_total``, ``kvcanary_ring_dropped_total`` and ``kvcanary_poll_seconds``.

    All have the labels ``name`` (of the canary) and ``shard``. One registry serves any number of monitors.

    Args:
      registry: None is prometheus_client's own.
      shard: of counts that no row names the shard of, such as the process index.

    Raises:
      ImportError: prometheus-client is not installed.

    Example:
      >>> from prometheus_client import CollectorRegistry  # doctest: +SKIP
      >>> monitor = Monitor(canary, metrics=PrometheusMetrics(registry=CollectorRegistry()))  # doctest: +SKIP
    """

    def __init__(self, *, registry: Any = None, shard: int | str = 0) -> None:
        try:
            client = importlib.import_module("prometheus_client")
        except ImportError as e:
            raise ImportError("kv-canary: PrometheusMetrics needs prometheus-client: pip install 'jax_kvcanary[metrics]'") from e
        registry = client.REGISTRY if registry is None else registry
        made = _families.get(registry)
        if made is None:
            made = {
                key: client.Counter(name, words, (*labels, *_LABELS), registry=registry) for key, (name, words, labels) in _COUNTERS.items()
            }
            made["poll"] = client.Histogram(
                "kvcanary_poll_seconds", "Host time of one observe.", _LABELS, registry=registry, buckets=POLL_BUCKETS
            )
            _families[registry] = made
        self._made = made
        self._shard = str(shard)
        self._children: dict[tuple[str, ...], Any] = {}

    def violations(self, *, name: str, tag: str, reason: str, shard: int, count: int) -> None:
        """Count rows of a reason."""
        self._child("violations", reason, tag, name, str(shard)).inc(count)

    def count(self, key: str, *, name: str, tag: str, count: int) -> None:
        """Add to "verified", "written", "sweeps" or "dropped"."""
        self._child(key, tag, name, self._shard).inc(count)

    def poll(self, *, name: str, seconds: float) -> None:
        """Note the host time of one observe."""
        self._child("poll", name, self._shard).observe(seconds)

    def _child(self, key: str, *labels: str) -> Any:
        child = self._children.get((key, *labels))
        if child is None:
            child = self._children[(key, *labels)] = self._made[key].labels(*labels)
        return child
