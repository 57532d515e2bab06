"""Tests of the export of trained models, by command and by script: transformers loads the trained weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_scalerl import ScaleRL
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.member.identify import plan_members
from lightning_scalerl.member.run import run_member
from lightning_scalerl.model.save import save_model
from sweeps.cli.main import main
from sweeps.run.journal import read_journal
from sweeps.run.spec import RunSpec
from tests.helpers import SMALL, fit


def train_run(path: str, root: Path, *overrides: str) -> Path:
    """Train a user's model for six steps with a checkpoint every two; return the folder of the run."""
    (spec,) = plan_members(
        [
            [
                "model=path",
                f"model.path={path}",
                *(override for override in SMALL if not override.startswith("async_mode")),
                "scaled_for=null",
                "task.train=[9]",
                "task.heldout=[4]",
                "budget.steps=6",
                "checkpoint.every_n_steps=2",
                f"output_dir={root}",
                *overrides,
            ]
        ]
    )
    folder = root / "runs" / spec.run
    spec.write(folder)
    run_member(folder)
    return folder


@pytest.fixture(scope="module")
def run(tiny_model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run with a critic."""
    return train_run(tiny_model_path, tmp_path_factory.mktemp("export"), "recipe=ppo")


def weights_in(checkpoint: Path) -> dict[str, Any]:
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    return {name.removeprefix("policy.model."): w for name, w in saved.items() if name.startswith("policy.model.")}


@pytest.mark.slow
def test_the_exported_model_has_the_trained_weights(
    run: Path, tiny_model_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), str(tmp_path / "deep" / "model")]) == 0
    assert "step 6" in capsys.readouterr().out
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "model")
    trained_weights = weights_in(run / "checkpoints" / "step-00000006.ckpt")
    assert loaded.state_dict().keys() == trained_weights.keys()
    assert all(torch.equal(loaded.state_dict()[name], weights) for name, weights in trained_weights.items())
    before = AutoModelForCausalLM.from_pretrained(tiny_model_path).state_dict()
    assert not all(torch.equal(before[name], weights) for name, weights in trained_weights.items())
    one, two = (AutoTokenizer.from_pretrained(path) for path in (tiny_model_path, tmp_path / "deep" / "model"))
    assert one.encode(" 12+34=") == two.encode(" 12+34=") and one.eos_token_id == two.eos_token_id
    card = (tmp_path / "deep" / "model" / "README.md").read_text()
    spec = RunSpec.read(run)
    rate = read_journal(run).of_kind("eval")[-1].metrics["eval/heldout/pass_rate"]
    for text in (spec.recipe, spec.curve, spec.run, "| optimizer steps | 6 |", f"{rate:.4g}"):
        assert text in card
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["model"]
    # A new run can start from the exported model.
    assert fit(str(tmp_path / "deep" / "model"), steps=1).completed_steps == 1


@pytest.mark.slow
def test_an_adapter_is_exported_merged(tiny_model_path: str, tmp_path: Path) -> None:
    """The exported weights equal the checkpoint's weights merged by peft. semantics.json has the trained parameters."""
    folder = train_run(
        tiny_model_path, tmp_path, "recipe=ppo", "variant=adapter_lora", "precision=fp32", "optimizer.lr=3e-2"
    )
    assert main(["export", str(folder), str(tmp_path / "model")]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    adapted = peft.get_peft_model(model, config)
    adapted.get_base_model().load_state_dict(weights_in(folder / "checkpoints" / "step-00000006.ckpt"))
    merged = adapted.merge_and_unload().state_dict()
    for name, value in loaded.items():
        assert torch.allclose(value, merged[name], atol=1e-6), name
        assert torch.equal(value, before[name]) == ("_proj" not in name), name
    semantics = json.loads((folder / "semantics.json").read_text())
    assert semantics["choices"]["adapter"]["rank"] == 16 and "adapter" in semantics["departs_from_recipe_on"]
    assert semantics["trained_parameters"] > 0 and semantics["parameters"] == sum(
        value.numel() for value in before.values()
    )


@pytest.mark.slow
def test_an_earlier_step_can_be_exported_in_another_type(run: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert main(["export", str(run), str(tmp_path / "model"), "--step", "4", "--dtype", "bf16"]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    trained_weights = weights_in(run / "checkpoints" / "step-00000004.ckpt")
    for name, weights in loaded.state_dict().items():
        assert weights.dtype == torch.bfloat16 and torch.equal(weights, trained_weights[name].to(torch.bfloat16))
    assert "| weights | bf16 |" in (tmp_path / "model" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "{run}"], "something is there already; give a folder that is new or empty"),
        (["{run}", "{tmp}/m", "--step", "3"], "--step 3: no such checkpoint"),
        (["{tmp}", "{tmp}/m"], "no run of scalerl train"),
    ],
)
def test_invalid_exports_are_refused_in_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert main(["export", *(word.format(run=run, tmp=tmp_path) for word in arguments)]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not any(tmp_path.iterdir())
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}


@pytest.mark.slow
def test_a_run_without_a_checkpoint_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "run"
    other.mkdir()
    for name in ("spec.json", "metrics.jsonl"):
        (other / name).write_bytes((run / name).read_bytes())
    assert main(["export", str(other), str(tmp_path / "m")]) == 1
    assert "no checkpoint that can be read; there is none" in capsys.readouterr().err


@pytest.mark.slow
def test_a_script_can_save_its_model(tiny_model_path: str, tmp_path: Path) -> None:
    module = fit(tiny_model_path, steps=3)
    assert module.save_pretrained(tmp_path / "model") == tmp_path / "model"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(loaded[name], weights) for name, weights in module.policy.model.state_dict().items())
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| recipe | scalerl_core |" in card and "| optimizer steps | 3 |" in card and "loss: CISPO" in card
    untrained = ScaleRL(tiny_model_path, overrides=["scaled_for=null"])
    untrained.save_pretrained(tmp_path / "untrained", dtype="fp16")
    assert json.loads((tmp_path / "untrained" / "config.json").read_text())["dtype"] == "float16"
    assert all(weights.dtype == torch.float32 for weights in untrained.policy.model.state_dict().values())


def test_a_chat_template_from_a_file_is_exported_with_the_model(tiny_model_path: str, tmp_path: Path) -> None:
    """Otherwise the model would be served with prompts in another format than in training."""
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    (tmp_path / "mine.jinja").write_text(template)
    overrides = ["scaled_for=null", f"chat.template={tmp_path}/mine.jinja", "chat.stop=['</s>']"]
    module = ScaleRL(tiny_model_path, overrides=overrides)
    module.save_pretrained(tmp_path / "model")
    saved = AutoTokenizer.from_pretrained(tmp_path / "model")
    conversation = [{"role": "user", "content": "1+2="}]
    text = saved.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert text == "<user>1+2=<assistant>"
    assert module.tokenizer.chat_template is None  # the tokenizer of the run is unchanged
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"| prompts | the template of {tmp_path}/mine.jinja |" in card and "| completions end at | '</s>' |" in card
    ScaleRL(tiny_model_path, overrides=["scaled_for=null"]).save_pretrained(tmp_path / "plain")
    assert AutoTokenizer.from_pretrained(tmp_path / "plain").chat_template is None
    assert "| prompts | plain text, no chat template |" in (tmp_path / "plain" / "README.md").read_text()


def test_a_failed_export_leaves_no_files(tiny_model: Any, tmp_path: Path) -> None:
    class Broken:
        def save_pretrained(self, path: Path) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_model(tiny_model, Broken(), tmp_path / "model")
    assert not any(tmp_path.iterdir())
    with pytest.raises(ConfigurationError, match="dtype: 'int8' is unknown; valid: fp32, bf16, fp16"):
        save_model(tiny_model, Broken(), tmp_path / "model", dtype="int8")


def test_the_target_may_be_the_working_directory_or_a_link(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory and a link to a folder are both valid targets if they are empty, and are not replaced."""

    class Silent:
        def save_pretrained(self, path: Path) -> None: ...

    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "here")
    for target, folder in ((".", "here"), (tmp_path / "link", "there")):
        assert save_model(tiny_model, Silent(), target) == tmp_path / folder
        assert {"config.json", "model.safetensors", "README.md"} <= {
            path.name for path in (tmp_path / folder).iterdir()
        }
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "link", "there"]


def test_model_cards_escape_tables_and_mask_secrets(tiny_model: Any, tmp_path: Path) -> None:
    class Silent:
        def save_pretrained(self, path: Path) -> None: ...

    save_model(tiny_model, Silent(), tmp_path / "m", card={"recipe": "a|b\nc", "source": "https://me:pw@x.org/m"})
    card = (tmp_path / "m" / "README.md").read_text()
    assert "| recipe | a\\|b c |" in card and "pw@" not in card
