"""Tests of the report: self-contained, escaped, complete, and the same bytes for the same data."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from sweeps.cli import main as cli
from sweeps.curve import Curve, make_curve
from sweeps.decide.rank import rank
from sweeps.errors import UserError
from sweeps.fit.compare import compare
from sweeps.fit.fit import FitOptions, fit_curve, fit_curves
from sweeps.fit.points import select
from sweeps.fit.predict import confidence_curve, fitted_line
from sweeps.report.drawing import label
from sweeps.report.figures import history_figure, profile_figure, residuals_figure
from sweeps.report.write import histories, write_ranking_csv, write_report
from sweeps.run.journal import Journal, read_journal
from sweeps.run.rollouts import write_groups
from sweeps.run.spec import make_spec
from sweeps.source import load
from tests.examples import every
from tests.paths import ROOT
from tests.sweeps.fit.simulate import curve

EXAMPLE = ROOT / "examples" / "curves.csv"
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "nav", "a", "code", "b", "br", "span"),
    *("ul", "li", "figure", "figcaption", "div", "table", "thead", "tbody", "tr", "th", "td"),
    *("h4", "dl", "dt", "dd", "script"),
    *("svg", "g", "path", "use", "defs", "text", "tspan", "clippath", "rect"),
}
VOID = {"meta", "br", "img", "link"}


class Page(HTMLParser):
    """Parse a page, collect its text and attributes, and check that every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.data: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in {"link", "iframe", "img"}
        # Scripts are inline, so they have no src.
        assert tag != "script" or dict(attrs).keys() <= {"type", "id"}
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "xlink:href", "src"):
                self.references.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_data(self, data: str) -> None:
        self.data.append(data)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def words(text: str) -> str:
    """Return the visible text of a page, without tags, styles and scripts."""
    return re.sub(r"<[^>]*>", " ", re.sub(r"<style>.*?</style>", "", without_scripts(text), flags=re.DOTALL))


def without_scripts(text: str) -> str:
    """Return the page without its scripts: the library, the data and our own script, in this order at its end."""
    library = r'<script type="application/gzip" id="library">[A-Za-z0-9+/=]+</script>\n'
    data = r'<script type="application/json" id="study">[^<]*</script>\n'
    our_script = re.escape(
        f"<script>{(ROOT / 'sweeps/report/templates/report.js').read_text(encoding='utf-8')}</script>"
    )
    page, count = re.subn(f"{library}{data}{our_script}(?=\n</body></html>\n$)", "", text)
    assert count == 1
    return page


@cache
def usual_report(folder: Path) -> tuple[str, tuple[Path, ...]]:
    """Write a page of two ranked recipes and one unranked recipe. It is cached, because many tests read it."""
    text, written = report(folder, *usual_curves(), title="My study")
    return text, tuple(written)


def usual_curves() -> tuple[Curve, ...]:
    return curve("scalerl", rng=1), curve("scalerl+loss=dapo", b=1.5, rng=2), curve("short", end=1500)


@pytest.fixture
def usual_page(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, tuple[Path, ...]]:
    return usual_report(tmp_path_factory.getbasetemp() / "usual")


def report(tmp_path: Path, *curves: Curve, **options: object) -> tuple[str, list[Path]]:
    fits = fit_curves(curves)
    written = write_report(tmp_path / "report.html", curves, fits, rank(fits, budget=20000.0), **options)  # type: ignore[arg-type]
    return written[0].read_text(encoding="utf-8"), written


@pytest.mark.slow
def test_page_is_self_contained_and_well_formed(usual_page: tuple[str, tuple[Path, ...]]) -> None:
    text, written = usual_page
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert all(reference.startswith("#") and reference[1:] in page.ids for reference in page.references)
    # The only addresses are XML namespaces.
    assert set(re.findall(r"https?://[^\"'\s<)]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "@import" not in text and "prefers-color-scheme:dark" in text and "@media print" in text
    # Every section is in the table of contents, in order.
    links = re.findall(r'<a href="#(section-\d+)">', text)
    assert links and links == re.findall(r'<h2 id="(section-\d+)">', text)
    names = ("overlay", "curves", "asymptotes", "profile", "residuals")
    figures = {f"report_{name}.{kind}" for name in names for kind in ("svg", "png", "pdf")}
    assert {path.name for path in written} == {"report.html", *figures}
    assert "nan" not in re.sub(r"<[^>]*>", "", text).lower().split()
    for path in written[1:]:
        if path.suffix == ".svg":
            drawing = ElementTree.fromstring(path.read_text(encoding="utf-8"))
            assert drawing.tag.endswith("svg")
            assert "NaN" not in path.read_text() and "inf" not in re.findall(r'd="([^"]*)"', path.read_text())
        else:
            assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"%PDF")


def test_outcome_tables_and_verdicts_are_on_the_page(usual_page: tuple[str, tuple[Path, ...]]) -> None:
    text, _ = usual_page
    plain = words(text)
    for expected in (
        "My study",
        "Ranking",
        "Each variant compared with the baseline",
        "What to run next",
        "pre_inflection",
        "P(best A)",
        "R at 20000",
        "Fits",
        "R²",
        "Effect of R0",
        "Sensitivity",
        "leaving out early points moves A by at most",
        "Other families of curves",
        "Last value",
        "Provenance",
        "Fitted: sigmoid, from the first evaluation to the last, R0 first",
    ):
        assert expected in plain, expected
    assert "A over time" not in plain and "How the sources were read" not in plain


@pytest.mark.full
@pytest.mark.parametrize(
    "evil", every(3, ['<script>alert("x")</script>&$\\frac{1}{0}$\x07\u202e', '<b>&"x"', "_'>$x_1$"], pytest.mark.full)
)
def test_everything_is_escaped(tmp_path: Path, evil: str) -> None:
    base = curve(evil, rng=1)
    curves = (
        make_curve(evil, base.compute, base.reward, base.seed, axis=evil, metric=evil, warnings=[evil]),
        curve(f"{evil}+{evil}", a=0.5, rng=2),
        curve(f"{evil}!", end=1500),
    )
    fits = fit_curves(curves)
    text, written = report(
        tmp_path, *curves, title=evil, warnings=[evil], mapping=[evil],
        comparisons=[compare(one) for one in curves], histories=histories(fits),
    )  # fmt: skip
    page = Page(text)
    assert set(page.tags) <= TAGS
    plain = without_scripts(text)
    # Bold text of the template: the smallest errors and explained terms.
    plain = re.sub(r"<b>(?=0|How to read|A</b>|C_mid</b>|B</b>)", "", plain)
    assert not {"script", "b"} & set(re.findall(r"<(\w+)", plain))
    shown = "".join(ch for ch in evil if ch.isprintable())
    assert sum(shown in data for data in page.data) >= 20
    for path in written:
        if path.suffix == ".svg":
            ElementTree.fromstring(path.read_text(encoding="utf-8"))


@pytest.mark.full
def test_quality_R0_and_sensitivity_equal_those_of_the_fit(usual_page: tuple[str, tuple[Path, ...]]) -> None:
    fit, *_ = fit_curves(usual_curves())
    plain = " ".join(words(usual_page[0]).split())
    assert fit.r2 is not None and fit.rmse is not None and fit.extrapolation_error is not None
    row = re.search(r"scalerl identifiable .*? 66 / 2 (\S+) (\S+) (\S+) ", plain)
    # The last digit may differ, because worker processes fit several curves.
    quality = (fit.r2, fit.rmse, fit.extrapolation_error)
    assert row is not None and [float(number) for number in row.groups()] == pytest.approx(quality, abs=1e-4)
    effect = fit.R0_effect
    assert effect is not None and fit.A.value is not None and effect.A[0] is not None and effect.A[1] is not None
    assert (
        f"{fit.R0:.3f} first {effect.A[0]:.3f} {effect.A[0] - fit.A.value:+.3f} "
        f"{effect.A[1]:.3f} {effect.A[1] - fit.A.value:+.3f}"
    ) in plain
    cut = fit_curve(fit.curve, FitOptions(min_compute=4800), pool=fit.pool)
    assert cut.A.value is not None
    assert f"from compute 4800 (30% of the end) {cut.A.value:.3f}" in plain


@pytest.mark.slow
def test_families_are_shown_with_their_forecast_errors(usual_page: tuple[str, tuple[Path, ...]]) -> None:
    comparison = compare(curve("scalerl", rng=1))
    plain = words(usual_page[0])
    assert comparison.sentence in plain and f"{comparison.last_value:.4f}" in plain
    for row in comparison.rows:
        assert row.family in plain and f"{row.held_out:.4f}" in plain


def test_long_tables_scroll_and_short_ones_do_not(usual_page: tuple[str, tuple[Path, ...]]) -> None:
    text, _ = usual_page
    assert text.count('<div class="wide tall" tabindex="0">') == 1
    assert "max-height:none" in text.split("@media print")[1].split("</style>")[0]


@pytest.mark.slow
def test_journals_add_counters_and_provenance(tmp_path: Path) -> None:
    for recipe in ("scalerl", "scalerl+loss=dapo"):
        data = curve(recipe, seeds=1)
        journal = Journal(tmp_path / recipe)
        departures = {} if recipe == "scalerl" else {"loss": "dapo"}
        identity = {"run": recipe, "curve": recipe, "recipe": recipe, "departures": departures, "hardware": {}}
        journal.header(**identity, seed=7, commit="abc<123>", versions={"torch": "2.13"})
        journal.record("train", 1, {"mechanism/loss": 0.0, "mechanism/kl": 0.5, "alarm/truncated": 0.0})
        if recipe == "scalerl":
            journal.record("train", 2, {"mechanism/loss": 0.0, "mechanism/kl": 0.5, "alarm/truncated": 2.0})
        for step, (c, r) in enumerate(zip(data.compute, data.reward, strict=True)):
            journal.record("eval", step, {"eval/heldout/pass_rate": r, "compute/flops": c})
        journal.close()
    study = load([tmp_path])
    text, _ = report(tmp_path / "out", *study.curves, runs=study.runs)
    Page(text)
    assert "scalerl+loss=dapo: no step showed an effect of this variant" in text
    assert "scalerl seed 7: 15% or more of the completions were truncated (first at step 2, in 1 of 2 steps)" in text
    assert "scalerl+loss=dapo seed 7" not in text
    assert "abc&lt;123&gt;" in text and "2.13" in text and "How often did each choice make a difference?" in text
    # Each run is listed once, and columns without a value are left out.
    provenance = text.split("<h4>Runs</h4>")[1].split("<script")[0]
    assert "<th>Run</th><th>Status</th><th>curve</th><th>departures</th><th>recipe</th>" in provenance
    assert "{}" not in provenance and "hardware" not in provenance


@pytest.mark.full
def test_runs_that_continued_with_other_code_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The warning is on the page and in the output of `scalerl rank`."""
    code = {"commit": None, "diff": None, "files": "aa", "folders": {}, "versions": {"torch": "2.13.0"}}
    for seed in (0, 1):
        data = curve("scalerl", seeds=1, rng=seed)
        journal = Journal(tmp_path / "runs" / str(seed))
        journal.header(run=str(seed), curve="c", recipe="scalerl", seed=seed, code=code)
        for step, (c, r) in enumerate(zip(data.compute, data.reward, strict=True)):
            journal.record("eval", step, {"eval/heldout/pass_rate": r, "compute/flops": c})
            if step == 2:
                later = {**code, "versions": {"torch": "2.14.0"}} if seed else code
                journal.resume(2, code=later)
        journal.close()
    study = load([tmp_path / "runs"])
    text, _ = report(tmp_path / "out", *study.curves, runs=study.runs)
    assert "scalerl seed 1: continued from step 2 with other code: torch 2.13.0 -&gt; 2.14.0" in text
    assert "seed 0: continued from step" not in text
    assert cli.main(["rank", str(tmp_path / "runs"), "--json"]) == 0
    stderr = capsys.readouterr().err
    assert "warning: scalerl seed 1: continued from step 2 with other code: torch 2.13.0 -> 2.14.0" in stderr
    assert "seed 0: continued from step" not in stderr


@pytest.mark.full
def test_sample_completions_are_shown_and_escaped(tmp_path: Path) -> None:
    def group(step: int, *rewards: float | None) -> dict[str, object]:
        completions = [
            {
                "completion": f"<b>{step}</b> & {reward} " + "x" * 2000,
                **{"reward": reward, "outcome": "error" if reward is None else "score", "correct": False},
                **{"tokens": 7, "extra": {"why": "out"}, "parts": {}, "finish_reason": "length"},
            }
            for reward in rewards
        ]
        prompt = {"admission": step, "prompt_id": "<i>", "prompt": "1 < 2?", "answer": "yes", "source": ""}
        return {"step": step, "difficulty": "", **prompt, "rollouts": completions}

    runs = []
    for seed in (0, 1):
        journal = Journal(tmp_path / f"run{seed}")
        journal.header(run=f"r{seed}", curve="c", recipe="scalerl", seed=seed, baseline="scalerl", departures={})
        journal.close()
        runs.append(read_journal(tmp_path / f"run{seed}"))
    write_groups(tmp_path / "run1", [group(1, 0.0, 1.0, None), group(2, 0.5, 0.5)])
    text, _ = report(tmp_path, curve("scalerl", rng=1), curve("short", end=1500), runs=runs)
    page = Page(text)
    assert "Sample completions" in page.data and "<b>" not in words(text)
    shown = " ".join(page.data)
    # From the last group with different rewards: the best rollout, and the one without a score.
    assert "<b>1</b> & 1.0" in shown and "error: out" in shown and "<b>2</b>" not in shown and "[...]" in shown
    assert "reward 1, 7 tokens, cut off" in shown


@pytest.mark.full
def test_sentences_keep_the_case_of_names(tmp_path: Path) -> None:
    """`ppo` and `Ppo` are two recipes. `ppo has ...` must not become a sentence about the other one."""
    text, _ = report(tmp_path, curve("ppo", a=0.7), curve("Ppo", a=0.5))
    plain = words(text)
    assert "Choose ppo: its asymptote" in plain and " ppo has the highest asymptote" in plain
    assert "Ppo has the highest asymptote" not in plain


@pytest.mark.full
def test_characters_that_the_figures_font_lacks_are_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    data = curve("日本")
    rows = [f"{data.recipe},{s},{c},{r}" for s, c, r in zip(data.seed, data.compute, data.reward, strict=True)]
    (tmp_path / "curves.csv").write_text("\n".join(["recipe,seed,compute,reward", *rows]), encoding="utf-8")
    assert cli.main(["report", str(tmp_path / "curves.csv"), "-o", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().err.count("warning: the font of the PNG and PDF figures lacks 日本: ") == 1
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


@pytest.mark.full
def test_page_without_any_ranked_recipe(tmp_path: Path) -> None:
    points = np.arange(3.0)
    few = Curve("few", points, 0.1 * points, np.full(3, "0"))
    only_zero = Curve("zero", np.zeros(2), np.array([0.1, 0.2]), np.full(2, "0"))
    text, written = report(tmp_path, few, only_zero, curve("short", end=1500))
    Page(text)
    assert "undecided" in text
    # There is no asymptote to compare. The one fitted curve has residuals.
    assert {path.name for path in written[1:]} == {
        f"report_{name}.{kind}" for name in ("overlay", "curves", "residuals") for kind in ("svg", "png", "pdf")
    }


@pytest.mark.full
def test_the_same_data_gives_the_same_bytes(tmp_path: Path, usual_page: tuple[str, tuple[Path, ...]]) -> None:
    curves = curve("scalerl", rng=1), curve("scalerl+loss=dapo", b=1.5, rng=2), curve("short", end=1500)
    _, again = report(tmp_path, *curves, title="My study")
    assert [path.read_bytes() for path in usual_page[1]] == [path.read_bytes() for path in again]


def test_ranking_csv(tmp_path: Path) -> None:
    fits = fit_curves([curve("scalerl", rng=1), curve("a,b", end=1500)])
    path = write_ranking_csv(tmp_path / "new" / "ranking.csv", fits, rank(fits))
    with path.open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert [row["recipe"] for row in rows] == ["scalerl", "a,b"]
    assert {"verdict", "A", "A_low", "A_high", "B", "C_mid", "p_best"} <= set(rows[0])
    assert float(rows[0]["A_low"]) < float(rows[0]["A"]) < float(rows[0]["A_high"])
    assert rows[1]["A_high"] == "" and float(rows[1]["p_best"]) > 0.05
    # Text that a spreadsheet would execute as a formula is quoted. Numbers stay numbers.
    evil = replace(fits[0], curve=replace(fits[0].curve, recipe="=cmd|'/C calc'!A1"))
    with write_ranking_csv(path, [evil, fits[1]], rank([evil, fits[1]])).open(newline="") as handle:
        first = next(csv.DictReader(handle))
    assert first["recipe"] == "'=cmd|'/C calc'!A1" and float(first["A"]) == float(rows[0]["A"])


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fits = fit_curves([curve(points=12)])
    with pytest.raises(UserError, match="cannot be written"):
        write_ranking_csv(tmp_path / "file" / "x.csv", fits, rank(fits))


# --- figures about the fits ---------------------------------------------------------------------------------


def test_the_confidence_curve_is_5_percent_at_the_ends_of_the_interval() -> None:
    fit = fit_curve(curve(rng=1))
    assert fit.A.value is not None
    x, p = confidence_curve(fit)
    low, middle, high = np.interp([fit.A.low or 0, fit.A.value, fit.A.high or 0], x, p)
    # Tolerance: the last digits of the draws depend on the processor.
    assert low == pytest.approx(0.05, abs=0.004) and high == pytest.approx(0.05, abs=0.004) and middle > 0.95
    assert (np.diff(x) > 0).all()
    top = int(p.argmax())
    assert (np.diff(p[: top + 1]) >= 0).all() and (np.diff(p[top:]) <= 0).all()


def test_an_open_asymptote_ends_at_its_bound_with_a_mark() -> None:
    unbent = next(fit for fit in (fit_curve(curve(end=2500, rng=i)) for i in range(9)) if fit.A.high is None)
    opened = replace(unbent, verdict="open")
    x, p = confidence_curve(opened)
    assert x[-1] == 1 and p[0] < 0.05
    sure = fit_curve(curve("sure", rng=1))
    fits = [opened, sure]
    figure = profile_figure(fits, rank(fits))
    assert figure is not None
    named, unnamed = figure.axes
    assert [text.get_text() for text in unnamed.texts] == ["open"] and not named.texts
    # Recipes that are neither ranked nor open are not drawn.
    unranked_figure = profile_figure([unbent], rank([unbent]))
    assert unranked_figure is None


def test_residuals_are_relative_to_the_fitted_curve() -> None:
    data = curve(rng=1)
    fit = fit_curve(data, FitOptions(min_compute=2000))
    points = select(data, fit.options)
    residuals = points.reward - fitted_line(fit, points.compute)
    assert np.sqrt(np.mean(residuals**2)) == pytest.approx(fit.rmse, rel=1e-9)
    figure = residuals_figure([fit], rank([fit]))
    assert figure is not None and fit.outlook is not None
    (panel,) = figure.axes
    drawn = np.concatenate([line.get_ydata() for line in panel.lines if line.get_linestyle() == "None"])
    np.testing.assert_allclose(np.sort(drawn), np.sort(residuals))
    assert panel.texts[0].get_text() == f"sd {np.median(fit.outlook.noise):.4f}"


@pytest.mark.full
def test_A_over_time_and_departures_are_shown(tmp_path: Path) -> None:
    good = curve("good", rng=1)
    late = good.compute > 11000
    bad = make_curve("bad", good.compute, good.reward + 0.12 * late, good.seed)
    fits = fit_curves([good, bad])
    snapshots_by_recipe = histories(fits)
    assert all(5 <= len(snapshots) <= 13 for snapshots in snapshots_by_recipe.values())
    figure = history_figure(snapshots_by_recipe, rank(fits), "compute")
    assert figure is not None
    named = [snapshot for snapshot in snapshots_by_recipe["good"] if snapshot.A.value is not None]
    panel = next(panel for panel in figure.axes if panel.get_title(loc="left") == "good")
    assert sum(line.get_marker() == "o" for line in panel.lines) == len(named)
    text, written = report(tmp_path, good, bad, histories=snapshots_by_recipe)
    Page(text)
    plain = words(text)
    assert "A over time" in plain and "bad: reward has been above its forecast" in plain
    assert "good: reward has been" not in plain
    assert plain.count("departed") == 1 and plain.count("Departed: ") == 1
    assert tmp_path / "report_history.png" in written


@pytest.mark.full
def test_the_command_adds_mapping_families_and_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert cli.main(["report", str(EXAMPLE), "-o", str(page), "--history"]) == 0
    assert str(tmp_path / "page_history.svg") in capsys.readouterr().out
    plain = words(page.read_text(encoding="utf-8"))
    assert "How the sources were read" in plain and "264 rows: 264 points" in plain
    # The families of an unranked recipe are compared, too.
    assert "scalerl+aggregation=token: exponential predicts later rewards best" in plain


@pytest.mark.slow
def test_advice_for_our_own_study_is_a_command(tmp_path: Path) -> None:
    for number, (recipe, a) in enumerate((("scalerl", 0.61), ("scalerl+loss=dapo", 0.59))):
        config = {"seed": 0, "budget": {"steps": 24}, "loss": {"_target_": recipe}}
        spec = replace(make_spec(config, config, recipe, "scalerl"), overrides=("experiment=<mine>", "seed=0"))
        spec.write(tmp_path / spec.run)
        journal = Journal(tmp_path / spec.run)
        journal.header(run=spec.run, curve=spec.curve, recipe=recipe, seed=0)
        data = curve(a=a, end=7000, points=25, seeds=1, rng=number)
        for step, (compute, reward) in enumerate(zip(data.compute, data.reward, strict=True)):
            journal.record("eval", step, {"compute/flops": float(compute), "eval/heldout/pass_rate": float(reward)})
        journal.close()
    study = load([tmp_path], x="compute/flops")
    fits = fit_curves(study.curves)
    text = write_report(tmp_path / "x.html", study.curves, fits, rank(fits), study.runs)[0].read_text()
    commands = re.findall(r'<code class="command">(.*?)</code>', text)
    ours = r"scalerl train --multirun &#39;experiment=&lt;mine&gt;&#39; .*budget.steps=\d+"
    assert any(re.match(ours, command) for command in commands)
    Page(text)


def test_labels_in_a_figure_stay_different() -> None:
    prefix = "scalerl+async_mode=ppo_off_policy+async_mode.k=32"
    names = [prefix, f"{prefix}+loss=dapo", f"{prefix}+loss=reinforce"]
    assert len({label(name) for name in names}) == 3
    assert all(len(label("x" * length)) == min(length, 34) for length in range(80))
    assert label("scalerl+loss=dapo") == "scalerl+loss=dapo" and label("a\nb") == "a?b"


@pytest.mark.full
def test_no_recipe_is_called_the_fastest_if_none_is_known_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no draw reaches the reward, the column of ratios must not contain a 1."""
    monkeypatch.setattr("sweeps.decide.reward.first_compute_above", lambda paths, *_: np.full(len(paths), np.inf))
    text, _ = report(tmp_path, curve("scalerl", rng=1), curve("b", a=0.5, rng=2))
    section = text.split("Ratio to the least")[1].split("</table>")[0]
    assert section.count("<tr>") >= 2 and not re.search(r">\s*1\s*</td>", section)
