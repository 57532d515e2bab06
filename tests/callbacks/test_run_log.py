"""`RunLog`: the label of a script's run, and the file of the held-out prompts that each evaluation passed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_scalerl import CISPO, DAPO
from sweeps.errors import UserError
from sweeps.run.journal import SEMANTICS_FILE, Journal, read_journal
from sweeps.run.passes import PASSES_FILE, Passes, digest, read_passes, write_passes
from sweeps.source import load
from sweeps.source.held_out import passes_by
from tests.helpers import fit


@pytest.mark.parametrize(
    ("options", "changes", "departures"),
    [
        ({"overrides": ["loss=dapo"]}, "loss=DAPO", "DAPO"),
        ({"overrides": ["loss=gspo"]}, "loss=GSPO", "GSPO"),
        ({"callbacks": [DAPO(clip_low=0.2, clip_high=0.5)]}, "loss=DAPO+loss.clip_high=0.5", "DAPO, clip_high=0.5"),
        ({"callbacks": [CISPO(max_ratio=4.0)]}, "loss.max_ratio=4", "max_ratio=4"),
    ],
)
def test_a_scripts_label_lists_every_override(
    tiny_model_path: str, tmp_path: Path, options: dict[str, Any], changes: str, departures: str
) -> None:
    logger = CSVLogger(str(tmp_path), name="csv")
    fit(tiny_model_path, tmp_path, 1, recipe="scalerl", logger=logger, **options)
    header = read_journal(tmp_path).header
    label = f"scalerl+async_mode.k=3+{changes}"
    assert (header["curve"], header["baseline"], header["recipe"]) == ("local", "scalerl", label)
    assert header["departures"]["loss"] == departures
    semantics = json.loads((tmp_path / SEMANTICS_FILE).read_text())
    assert semantics["departs_from_recipe_on"] == list(header["departures"])
    assert semantics["model"] == str(Path(tiny_model_path).resolve()) and semantics["task"]["name"] == "CountingTask"
    # Lightning's logs alone are read under the same label.
    (curve,) = load([tmp_path / "csv"]).curves
    assert curve.recipe == label


@pytest.mark.slow
def test_passes_by_prompt_match_the_journal_across_a_resume(tiny_model_path: str, tmp_path: Path) -> None:
    def fit_part(run: str, steps: int, resume: bool = False) -> None:
        fit(tiny_model_path, tmp_path / run, steps, resume=resume, checkpoint_every=1)

    fit_part("whole", 4)
    fit_part("parts", 3)
    (tmp_path / "parts" / PASSES_FILE).open("ab").write(b'{"step": 4, "set": "heldo')  # a torn line
    fit_part("parts", 4, resume=True)
    view = read_journal(tmp_path / "whole")
    (name,) = [key for key in view.of_kind("eval")[0].metrics if key.endswith("/pass_rate")]
    rates = {record.step: record.metrics[name] for record in view.of_kind("eval")}
    kept = read_passes(tmp_path / "whole", name.split("/")[1], list(rates))
    assert kept.keys() == rates.keys() == {0, 2, 4}
    for step, entry in kept.items():
        assert set(entry.scored) == {2} and sum(entry.passed) / sum(entry.scored) == pytest.approx(
            rates[step], abs=1e-12
        )
    assert len({entry.prompts for entry in kept.values()}) == 1
    assert read_passes(tmp_path / "parts", name.split("/")[1], list(rates)) == kept
    # pass@k and maj@k are computed from the same completions.
    for record in view.of_kind("eval"):
        recorded = {key: value for key, value in record.metrics.items() if "@" in key}
        for statistic, (mean, error) in kept[record.step].at_k(2).items():
            assert (recorded[f"eval/heldout/{statistic}"], recorded[f"eval/heldout/{statistic}_se"]) == (mean, error)
        assert {key.split("/")[-1] for key in recorded} == {"pass@2", "pass@2_se", "maj@2", "maj@2_se"}
        assert recorded["eval/heldout/pass@2"] >= recorded["eval/heldout/maj@2"]
    # A lookup by compute returns the newest evaluation at or before it.
    axis = "compute/flops"
    spent = {record.step: record.metrics[axis] for record in view.of_kind("eval")}
    passes_at = passes_by([view], axis, name)
    recipe, seed = str(view.header["recipe"]), str(view.header["seed"])
    assert passes_at(recipe, spent[2]) == {seed: kept[2]} and passes_at(recipe, spent[4] * 2) == {seed: kept[4]}
    assert passes_at("another", spent[4]) == {} and passes_at(recipe, -1.0) == {}
    assert passes_by([view], axis, "train/reward")(recipe, spent[4]) == {}


def test_pass_at_k_of_earlier_journals_comes_from_their_passes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    journal = Journal(run)
    journal.header(run="run", curve="c", recipe="scalerl", seed=0)
    passes = [Passes("p", (0, 1, 3), (4, 4, 4)), Passes("p", (0, 2, 2), (4, 4, 2)), Passes("p", (4, 2, 0), (4, 4, 0))]
    for step, entry in enumerate(passes):
        rates = [passed / scored for passed, scored in zip(entry.passed, entry.scored, strict=True) if scored]
        journal.record("eval", step, {"eval/heldout/pass_rate": sum(rates) / len(rates), "compute/flops": step + 1.0})
        write_passes(run, step, {"heldout": entry})
    journal.close()
    curve = load([run], metric="eval/heldout/pass@3").curves[0]
    # 1 - C(n - c, 3) / C(n, 3); a prompt with fewer than three graded completions does not count.
    assert curve.reward.tolist() == pytest.approx([(0 + 3 / 4 + 1) / 3, (0 + 1) / 2, (1 + 1) / 2])
    assert curve.sd is not None and (curve.sd > 0).all() and curve.bounds == (0.0, 1.0)
    with pytest.raises(UserError, match=r"eval/heldout/maj@3 is missing .* found eval/heldout/pass_rate"):
        load([run], metric="eval/heldout/maj@3")


def test_the_later_of_two_evaluations_counts_and_void_steps_do_not(tmp_path: Path) -> None:
    one, two = Passes("p", (1, 0), (2, 2)), Passes("p", (2, 0), (2, 0))
    for step, entry in ((0, one), (2, one), (3, one), (2, two)):
        write_passes(tmp_path, step, {"heldout": entry, "other": one})
    assert read_passes(tmp_path, "heldout", [0, 2]) == {0: one, 2: two}
    assert read_passes(tmp_path, "heldout", []) == {} and read_passes(tmp_path / "none", "heldout", [0]) == {}


def test_the_digest_depends_on_prompts_answers_and_order() -> None:
    pairs = [("1+1", "2"), ("2+2", "4")]
    assert digest(pairs) == digest(list(pairs)) and len(digest(pairs)) == 16
    assert len({digest(pairs), digest(pairs[::-1]), digest([("1+1", "3"), ("2+2", "4")]), digest(pairs[:1])}) == 4
