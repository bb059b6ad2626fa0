"""The commands of the example engine in short forms: demo, and soaks with and without faults."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest

from jax_kvcanary import cli
from jax_kvcanary.serving import Engine, SamplingParams, make_canary, random_params, soak


def test_the_demo_with_a_random_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    demo = importlib.import_module("jax_kvcanary.serving.demo")

    def missing() -> None:
        raise ImportError("no model here")

    monkeypatch.setattr(demo, "smollm2_tokenizer", missing)
    code = cli.main(["demo", "--tokens", "12"])
    text = capsys.readouterr().out
    assert code == 0, text
    assert "a random model" in text and "the same tokens without the canary" in text
    assert "11 of 11 faults seen and rightly named; the clean run was silent" in text


def test_the_canary_changes_no_token() -> None:
    """Twenty prompts, greedy, with and without it."""
    config, sizes = soak.MODEL, soak.SIZES
    params, rng = random_params(config, seed=0), np.random.default_rng(0)
    prompts = [rng.integers(config.vocab_size, size=int(rng.integers(3, 60))).tolist() for _ in range(20)]
    outputs = []
    for canary in (make_canary(config, sizes, soak.canary_config(sizes)), None):
        engine = Engine(config, params, canary, engine_config=sizes)
        ids = [engine.add_request(prompt, SamplingParams(max_new_tokens=12)) for prompt in prompts]
        results = engine.run()
        outputs.append([results[request_id].output for request_id in ids])
    assert outputs[0] == outputs[1] and all(len(output) == 12 for output in outputs[0])


def test_a_soak_without_faults_is_silent() -> None:
    summary = soak.run_clean(steps=600, seed=1)
    assert summary.good, "\n".join(soak.describe(summary))
    assert summary.steps >= 600 and summary.counts["evictions"] > 0 and summary.counts["loads"] > 0


def test_a_soak_with_faults_sees_and_names_them() -> None:
    summary = soak.run_faulty(steps=150, seed=0, every=8)
    assert summary.good, "\n".join(soak.describe(summary))
    assert summary.seen >= 11 and len(summary.delays) >= 10


def test_the_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["tour"]) == 0
    assert "every fault was seen" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["sing"])
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert cli.main(["soak", "--steps", "1"]) == 2
    assert "install jax_kvcanary[demo]" in capsys.readouterr().err
