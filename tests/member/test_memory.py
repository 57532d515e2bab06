"""Tests of `scalerl memory`: table, JSON, exit code and error messages."""

from __future__ import annotations

import json
import re

import pytest

from sweeps.cli.main import main

RUN = ("memory", "scale=0.6b", "model.width=128")


def test_a_run_that_fits_is_shown_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "strategy=fsdp2", "--devices", "4", "--gib", "80"]) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"4 devices \(fsdp2\), \d+ tokens per pass, rows of up to \d+ tokens\n", out
    ) and out.rstrip().endswith("fits into 80 GiB")
    assert "layers made whole" in out and "rank 0: its keys and values" in out and "on the host of rank 0" in out


def test_a_run_that_does_not_fit_has_exit_code_1_and_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fits"] and report["peak"] == sum(report["bytes"]["device"].values()) + sum(
        report["bytes"]["rank 0"].values()
    )
    limit = (report["peak"] - 1) / 2**30
    assert main([*RUN, "--gib", f"{limit}"]) == 1
    assert f"does not fit into {limit:g} GiB; it would with batch.recompute=true" in capsys.readouterr().out


@pytest.mark.slow
def test_devices_are_those_of_the_strategy_unless_given(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = ("strategy=fsdp2", "strategy.nodes=2", "strategy.devices=4")
    assert main([*RUN, *strategy]) == 0
    full_table = capsys.readouterr().out
    assert re.search(r"8 devices \(fsdp2\), \d+ tokens per pass, rows", full_table)
    assert main([*RUN, *strategy, "strategy.tensor_parallel=2"]) == 0
    assert capsys.readouterr().out != full_table
    assert main([*RUN, *strategy, "strategy.tensor_parallel=3"]) == 1
    assert "strategy.tensor_parallel: 3 does not divide the 8 device(s)" in capsys.readouterr().err
    assert main([*RUN, *strategy, "--devices", "1"]) == 0
    assert re.search(r"1 device \(fsdp2\), \d+ tokens per pass, rows", capsys.readouterr().out)


@pytest.mark.slow
def test_keys_and_values_are_limited_by_generator_cache_gib(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--json"]) == 0
    all_slots = json.loads(capsys.readouterr().out)["bytes"]["rank 0"]["its keys and values"]
    half = all_slots / 2**31
    assert main([*RUN, f"generator.cache_gib={half}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"]["rank 0"]["its keys and values"] == all_slots / 2
    assert main([*RUN, f"generator.cache_gib={4 * half}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"]["rank 0"]["its keys and values"] == all_slots


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "strategy.nodes=2"]) == 1
    assert "scalerl: strategy.nodes: 2, and strategy.devices does not say" in capsys.readouterr().err
    assert main(["memory", "nope=1"]) == 1
    assert capsys.readouterr().err.startswith("scalerl: Could not override 'nope'")
    assert main(["memory", "model=path", "model.path=/nowhere/at/all"]) == 1
    assert "scalerl: model.path: '/nowhere/at/all' is a place on this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--devices", "0"), "--devices 0: give 1 or more"),
        (("strategy.devices=0",), "strategy.devices: 0 must be a whole number, 1 or more"),
    ],
)
def test_no_devices_are_refused(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, *arguments]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"scalerl: {message}\n")
