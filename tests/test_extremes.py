"""Tests of degenerate policies that always stop at the first token or never stop: runs end in a defined way."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lightning_scalerl import ScaleRL
from lightning_scalerl.model.load import load_model, load_tokenizer
from lightning_scalerl.stream.prompts import PoolExhaustedError
from sweeps.run.journal import read_journal
from tests.examples import every
from tests.helpers import fit
from tests.test_update import WITH_CRITIC, all_weights, same_weights

STEPS = 3


def degenerate_model(model_path: str, text: str, path: Path) -> str:
    """Train the tiny model to emit only one token, and save it in `path`."""
    model, tokenizer = load_model(model_path), load_tokenizer(model_path)
    (token,) = tokenizer.encode(text, add_special_tokens=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    source = torch.Generator().manual_seed(0)
    for _ in range(120):
        prompts = torch.randint(0, len(tokenizer), (16, 12), generator=source)
        prompts[:, 6:] = torch.where(torch.rand(16, 6, generator=source) < 0.7, token, prompts[:, 6:])
        logits = model(input_ids=prompts).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.full((16 * 12,), token))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def never_stops(tiny_model_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return degenerate_model(tiny_model_path, "1", tmp_path_factory.mktemp("never"))


@pytest.fixture(scope="module")
def always_stops(tiny_model_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return degenerate_model(tiny_model_path, ".", tmp_path_factory.mktemp("always"))


def finite_steps(keep: Path, steps: int = STEPS) -> list[dict[str, float]]:
    rows = [record.metrics for record in read_journal(keep).of_kind("train")]
    assert len(rows) == steps
    assert all(math.isfinite(value) for row in rows for value in row.values())
    return rows


NO_CREDIT = {
    "scalerl": ("filter=zero_variance",),
    "no filter": ("filter=none", "truncated=keep"),
    "terms": ("kl=fixed", "entropy=fixed", "normalization=running"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", every(3, map(pytest.param, reversed(NO_CREDIT.values())), pytest.mark.full), ids=reversed(NO_CREDIT)
)
def test_a_model_that_always_stops_finishes_its_run_without_learning(
    always_stops: str, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """All completions are empty and incorrect. The run finishes, and its metrics show it."""
    module = fit(always_stops, tmp_path, steps=STEPS, overrides=overrides, recipe="scalerl")
    if overrides == NO_CREDIT["scalerl"]:
        assert same_weights(all_weights(module), all_weights(ScaleRL(always_stops, overrides=["scaled_for=null"])))
    for row in finite_steps(tmp_path):
        assert row["train/completion_tokens"] == 1 and row["train/zero_variance"] == 1
        assert (row["train/truncated"], row["train/pass_rate"], row["train/reward"]) == (0, 0, -1)
        if "filter=none" not in overrides:
            assert row["train/credited_rollouts"] == 0 and row["train/loss"] == 0


@pytest.mark.slow
def test_a_refilling_filter_gives_up_on_a_model_that_always_stops(always_stops: str) -> None:
    with pytest.raises(PoolExhaustedError, match=r"filter\.most_dropped: \d+ groups were dropped"):
        fit(always_stops, steps=STEPS, overrides=["filter=dynamic_sampling"])


@pytest.mark.slow
def test_a_model_that_never_stops_gets_no_credit(never_stops: str, tmp_path: Path) -> None:
    module = fit(
        never_stops, tmp_path, steps=17, overrides=["length_control=none", "resampling=uniform"], recipe="scalerl"
    )
    rows = finite_steps(tmp_path, 17)
    assert all(row["train/truncated"] == 1 and row["train/credited_tokens"] == 0 for row in rows)
    assert [row["alarm/truncated"] for row in rows] == [0.0] * 15 + [2.0] * 2
    assert same_weights(all_weights(module), all_weights(ScaleRL(never_stops, overrides=["scaled_for=null"])))


@pytest.mark.slow
def test_thinking_that_never_ends_is_interrupted(never_stops: str, tmp_path: Path) -> None:
    fit(never_stops, tmp_path, steps=STEPS, recipe="scalerl")
    assert all(row["train/interrupted"] == 1 and row["train/forced_tokens"] > 0 for row in finite_steps(tmp_path))


@pytest.mark.slow
def test_a_critic_trains_on_truncated_completions(never_stops: str, tmp_path: Path) -> None:
    """With truncated=keep, truncated completions are credited, because the limit ends an episode."""
    fit(never_stops, tmp_path, steps=STEPS, overrides=[*WITH_CRITIC, "truncated=keep", "length_control=none"])
    assert all(row["train/credited_rollouts"] == 12 and "train/loss_value" in row for row in finite_steps(tmp_path))
