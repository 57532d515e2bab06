"""`scalerl memory`: a table, JSON, an exit code by which a script can stop, and mistakes in one line."""

from __future__ import annotations

import json
import re

import pytest

from sweeps.cli.main import main

RUN = ("memory", "scale=0.6b", "model.width=128")


def test_it_says_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "strategy=fsdp2", "--devices", "4", "--gib", "80"]) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"4 devices \(fsdp2\), \d+ tokens per pass, rows of up to \d+ tokens\n", out
    ) and out.rstrip().endswith("fits into 80 GiB")
    assert "layers made whole" in out and "rank 0: its keys and values" in out and "on the host of rank 0" in out


def test_it_says_what_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] and told["peak"] == sum(told["bytes"]["device"].values()) + sum(
        told["bytes"]["rank 0"].values()
    )
    limit = (told["peak"] - 1) / 2**30
    assert main([*RUN, "--gib", f"{limit}"]) == 1
    assert f"does not fit into {limit:g} GiB; it would with batch.recompute=true" in capsys.readouterr().out


@pytest.mark.slow
def test_devices_are_those_that_the_run_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("strategy=fsdp2", "strategy.nodes=2", "strategy.devices=4")
    assert main([*RUN, *asked]) == 0
    whole = capsys.readouterr().out
    assert re.search(r"8 devices \(fsdp2\), \d+ tokens per pass, rows", whole)
    assert main([*RUN, *asked, "strategy.tensor_parallel=2"]) == 0
    assert capsys.readouterr().out != whole
    assert main([*RUN, *asked, "strategy.tensor_parallel=3"]) == 1
    assert "strategy.tensor_parallel: 3 does not divide the 8 device(s)" in capsys.readouterr().err
    assert main([*RUN, *asked, "--devices", "1"]) == 0
    assert re.search(r"1 device \(fsdp2\), \d+ tokens per pass, rows", capsys.readouterr().out)


@pytest.mark.slow
def test_keys_and_values_take_what_the_generator_may_have(capsys: pytest.CaptureFixture[str]) -> None:
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
