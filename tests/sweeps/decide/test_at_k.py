"""Tests of rankings by pass@1 and by pass@k: `rank`, the report and MLflow show both and say if they differ."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sweeps.cli.main import main
from sweeps.run.journal import Journal, read_journal
from sweeps.run.passes import Passes, write_passes
from sweeps.source.held_out import metric_at_k, prompt_shares

SAMPLES, PROMPTS = 8, 60


def run(root: Path, recipe: str, seed: int, sharp: bool, recorded: bool = True) -> Path:
    """Write a run whose pass rate rises. `sharp`: it passes some prompts nearly always and the others nearly never."""
    random = np.random.default_rng([seed, sharp])
    folder = root / "runs" / f"{recipe}{seed}"
    journal = Journal(folder, clock=lambda: 0.0)
    journal.header(run=folder.name, curve=recipe, recipe=recipe, seed=seed, device="cpu", baseline="broad")
    for step in range(13):
        # sharp: the passed share of prompts grows; otherwise: the pass rate of every prompt grows.
        reached = 0.08 + (0.62 if sharp else 0.4) / (1 + (5 / max(step, 0.01)) ** 2)
        rates = np.where(np.arange(PROMPTS) < PROMPTS * reached, 0.97, 0.01) if sharp else np.full(PROMPTS, reached)
        passed = random.binomial(SAMPLES, rates)
        passes = Passes("p", tuple(map(int, passed)), (SAMPLES,) * PROMPTS)
        at_k = {f"eval/heldout/{name}": mean for name, (mean, _) in passes.at_k(SAMPLES).items()} if recorded else {}
        metrics = {"eval/heldout/pass_rate": float(passed.mean() / SAMPLES), "eval/heldout/pass_rate_se": 0.02, **at_k}
        journal.record("eval", step, {**metrics, "compute/flops": 1e9 * step, "compute/device_hours": 0.5 * step,
                                      "compute/virtual_device_hours": 2.0 * step})  # fmt: skip
        write_passes(folder, step, {"heldout": passes})
    journal.end(12, "finished", None)
    journal.close()
    return folder


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("study")
    for seed in (0, 1):
        run(root, "sharp", seed, sharp=True)
        run(root, "broad", seed, sharp=False, recorded=False)  # a journal of an earlier version
    return root


def test_rank_shows_both_orders_and_that_they_differ(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rank", str(study), "--json"]) == 0
    two_rankings = json.loads(capsys.readouterr().out)["pass_at_k"]
    assert (two_rankings["k"], two_rankings["metric"], two_rankings["differs"]) == (8, "eval/heldout/pass@8", True)
    places = {row["recipe"]: (row["at_1"]["place"], row["at_k"]["place"]) for row in two_rankings["rows"]}
    assert places == {"sharp": (1, 2), "broad": (2, 1)}
    assert "sharp is ahead by pass@1" in two_rankings["sentence"] and "broad by pass@8" in two_rankings["sentence"]
    assert main(["rank", str(study)]) == 0
    printed = capsys.readouterr().out
    assert two_rankings["sentence"] in printed and "pass@8 at" in printed
    # A metric other than the pass rate gives one ranking.
    assert main(["rank", str(study), "--metric", "eval/heldout/pass@8", "--json"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["pass_at_k"] is None and other["rewards"]["rows"][0]["recipe"] == "broad"


@pytest.mark.full
def test_the_report_and_mlflow_show_both_orders(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mlflow.tracking import MlflowClient

    assert main(["report", str(study), "-o", str(study / "report.html")]) == 0
    page = (study / "report.html").read_text()
    assert "The two rankings differ: sharp is ahead by pass@1" in page and ">Ranking by pass@k<" in page
    assert (study / "report_prompts.svg").is_file() and "How many prompts are solved?" in page
    uri = f"sqlite:///{study}/mlflow.db"
    assert main(["publish", str(study), "--mlflow", uri]) == 0
    client = MlflowClient(uri)
    (experiment,) = [one for one in client.search_experiments() if one.name == study.name]
    runs = client.search_runs([experiment.experiment_id])
    places = {
        run.data.tags["recipe"]: run.data.metrics["rank/place_at_k"]
        for run in runs
        if run.data.tags.get("kind") == "fit"
    }
    assert places == {"broad": 1, "sharp": 2}
    (sentence,) = [run.data.tags["rank.pass_at_k"] for run in runs if "rank.pass_at_k" in run.data.tags]
    assert sentence.startswith("the two rankings differ")
    capsys.readouterr()


def test_without_recorded_passes_there_is_one_ranking(tmp_path: Path) -> None:
    folder = run(tmp_path, "sharp", 0, sharp=True, recorded=False)
    view = read_journal(folder)
    assert metric_at_k([view], "eval/heldout/pass_rate") == "eval/heldout/pass@8"
    assert metric_at_k([view], "eval/heldout/pass@8") is None and metric_at_k([], "eval/heldout/pass_rate") is None
    (folder / "passes.jsonl").unlink()
    assert metric_at_k([view], "eval/heldout/pass_rate") is None


def test_prompt_shares_are_computed_from_the_passes(tmp_path: Path) -> None:
    for seed, (first, last) in enumerate([((0, 2, 4, 0), (1, 0, 4, 4)), ((0, 0, 1, 4), (0, 3, 4, 4))]):
        folder = tmp_path / "runs" / f"run{seed}"
        journal = Journal(folder, clock=lambda: 0.0)
        journal.header(run=folder.name, curve="c", recipe="one", seed=seed)
        for step, passed in ((0, first), (4, last)):
            journal.record("eval", step, {"eval/heldout/pass_rate": sum(passed) / 16, "compute/flops": 10.0 * step})
            write_passes(folder, step, {"heldout": Passes("p", passed, (4, 4, 4, 4))})
        journal.close()
    views = [read_journal(folder) for folder in sorted((tmp_path / "runs").iterdir())]
    (shares,) = prompt_shares(views, "compute/flops", "eval/heldout/pass_rate")
    assert (shares.recipe, shares.compute) == ("one", (0.0, 40.0))
    assert shares.never == (0.5, 0.25) and shares.always == (0.25, 0.5)
    assert (shares.gained, shares.lost) == ((2 + 1) / 8, (1 + 0) / 8)
    assert prompt_shares(views, "compute/flops", "train/reward") == []


def test_a_run_without_an_evaluation_does_not_hide_the_second_ranking(study: Path) -> None:
    views = [read_journal(folder) for folder in sorted((study / "runs").iterdir())]
    started = replace(views[0], records=[record for record in views[0].records if record.kind == "train"])
    assert metric_at_k([*views, started], "eval/heldout/pass_rate") == "eval/heldout/pass@8"
    assert metric_at_k([started], "eval/heldout/pass_rate") is None


def test_evaluations_of_other_prompts_are_left_out(tmp_path: Path) -> None:
    folder = run(tmp_path, "one", 0, sharp=True)
    write_passes(folder, 12, {"heldout": Passes("others", (1, 0), (2, 2))})
    (shares,) = prompt_shares([read_journal(folder)], "compute/flops", "eval/heldout/pass_rate")
    assert len(shares.compute) == 1 and (shares.gained, shares.lost) == (0.0, 0.0)
