"""Fourteen model families in folders like a user's: trained from a script and from the command line, and exported.

Trainer and generator agree to within 1e-5 in FP32, and the exported model equals the trained one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_scalerl import ConfigurationError, DatasetTask, RolloutDataModule, ScaleRL
from lightning_scalerl.measure.probe import P99
from lightning_scalerl.member.identify import plan_members
from lightning_scalerl.member.run import run_member
from lightning_scalerl.model.load import load_model
from lightning_scalerl.rollouts.rollout import TrainBatch
from lightning_scalerl.update.muon import hidden_matrices
from sweeps.cli.main import main
from sweeps.run.journal import JOURNAL_FILE, JournalView, read_journal
from tests import forked
from tests.examples import every
from tests.families import FAMILIES, STRANGERS, Family, save, write_task
from tests.helpers import quiet
from tests.test_module import Keep

FULL = pytest.mark.full

AGREE = 1e-5
INSTRUCTION = "Put your final answer within \\boxed{}."
EXACT = ("precision=fp32", "async_mode=on_policy")
# Short runs with the verifier in this process. Random models end few completions, so tests add truncated=keep.
SHORT = (
    "scale=trial",
    "optimizer.lr=1e-3",
    "context.max_new_tokens=32",
    "thinking.interrupt_from=6",
    "thinking.interrupt_to=10",
    "verify.workers=0",
)


class Gaps(Callback):
    """Record the largest log-probability gap between trainer and generator, on each batch before its step."""

    def __init__(self) -> None:
        self.largest: list[float] = []
        self.tokens: list[int] = []

    @torch.no_grad()
    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: TrainBatch, batch_idx: int) -> None:
        sampled = batch.loss_mask.bool()
        gaps = (pl_module.policy(batch)[0] - batch.generator_logprobs).abs()[sampled]
        self.largest.append(float(gaps.max()))
        self.tokens.append(gaps.numel())


@dataclass(frozen=True)
class Place:
    """A folder with rows, a reward function and saved models."""

    root: Path

    def model(self, family: Family, name: str, **more: Any) -> Path:
        folder = self.root / name
        return folder if folder.exists() else save(family, folder, **more)

    def task(self) -> DatasetTask:
        return DatasetTask(
            format="gsm8k",
            train=str(self.root / "train.jsonl"),
            heldout={"test": str(self.root / "test.jsonl")},
            rewards=["math", {"use": f"{self.root}/reward.py:vowels"}],
            instruction=INSTRUCTION,
        )

    def overrides(self, model: Path, output: Path, *more: str) -> list[str]:
        """Return overrides for `scalerl train`."""
        return [
            "model=path",
            f"model.path={model}",
            "task=gsm8k",
            f"task.train={self.root}/train.jsonl",
            f"task.heldout={{test: {self.root}/test.jsonl}}",
            f"task.rewards=[math,{{use: '{self.root}/reward.py:vowels'}}]",
            "recipe=scalerl",
            "budget.steps=3",
            f"output_dir={output}",
            *more,
        ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("families")
    write_task(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALERL_CACHE", str(root / "cache"))
        yield Place(root)


def train_from_script(
    place: Place, model: Path, *overrides: str, steps: int = 3, callbacks: tuple[Callback, ...] = ()
) -> ScaleRL:
    module = ScaleRL(str(model), "scalerl", overrides=[*SHORT, *overrides])
    Trainer(max_steps=steps, callbacks=list(callbacks), **quiet()).fit(
        module, datamodule=RolloutDataModule(place.task())
    )
    return module


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    model.eval()
    found: torch.Tensor = model(input_ids=torch.arange(3, 33).reshape(2, 15)).logits
    return found


def check_exported(folder: Path, trained: Any, before: Path) -> None:
    """Check that an export has the trained weights, and the end tokens, tokenizer and template of the original."""
    loaded = load_model(str(folder))
    assert torch.equal(logits(loaded), logits(trained))
    assert float((logits(loaded) - logits(load_model(str(before)))).abs().max()) > 1e-3
    assert loaded.generation_config.eos_token_id == trained.generation_config.eos_token_id
    one, two = (AutoTokenizer.from_pretrained(source) for source in (before, folder))
    assert one("Tom has 12 apples").input_ids == two("Tom has 12 apples").input_ids
    assert one.chat_template == two.chat_template and one.special_tokens_map == two.special_tokens_map


def check_read(module: ScaleRL, family: Family) -> None:
    """Check that prompts have one BOS token, if any, and that every end-of-turn token ends a completion."""
    style, tokenizer = family.style, module.tokenizer
    prompts = module.sampling.sets["training"].tokens
    assert len({len(ids) for ids in prompts}) > 1  # otherwise all rollouts would decode at the same position
    bos = tokenizer.bos_token_id
    if style.adds_bos or "bos_token" in (style.template or ""):
        assert all(ids[0] == bos and bos not in ids[1:] for ids in prompts)
    assert module.stop_tokens == sorted(map(tokenizer.convert_tokens_to_ids, {style.eos, *style.ends}))
    assert (tokenizer.pad_token is None) == (style.pad is None)


# Every test run covers soft caps and experts. CI adds a plain model, learned positions and DeepSeek's attention.
# `make test-full` covers all families.
USUAL_STEPS = (("Mixtral", "muon"), ("Llama", "adamw_8bit"))
QUICK, USUAL = ("Gemma2", "Mixtral"), ("Llama", "GPT2", "DeepSeek-V3")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=() if each in QUICK else pytest.mark.slow if each in USUAL else FULL)
        for each in FAMILIES
    ],
)
def test_a_script_trains_every_family(name: str, place: Place, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model, keep, gaps = place.model(family, name), Keep(), Gaps()
    module = train_from_script(place, model, *EXACT, "truncated=keep", *family.overrides, callbacks=(keep, gaps))
    assert len(gaps.largest) == 3 and min(gaps.tokens) > 100 and max(gaps.largest) < AGREE
    assert len(keep.of(P99)) == 3 and max(keep.of(P99)) < AGREE and max(keep.of("train/logprob_gap")) < AGREE
    assert min(keep.of("train/entropy")) > 1 and min(keep.of("train/gradient_norm")) > 0
    check_read(module, family)
    assert module.save_pretrained(tmp_path / "out") == tmp_path / "out"
    check_exported(tmp_path / "out", module.policy.model, model)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        pytest.param(family, kind, marks=pytest.mark.slow if (family, kind) in USUAL_STEPS else FULL)
        for family in FAMILIES
        for kind in ("muon", "adamw_bf16_kahan", "adamw_8bit")
    ],
)
def test_every_optimizer_trains_every_family(name: str, optimizer: str, place: Place, tmp_path: Path) -> None:
    """Muon trains the linear layers in blocks, also GPT-2's transposed ones, but no expert tables. Some move."""
    family = FAMILIES[name]
    model = place.model(family, name)
    # A large learning rate, because a small step would not change weights in BF16.
    overrides = (f"optimizer={optimizer}", "optimizer.lr=1e-2", "truncated=keep", *EXACT, *family.overrides)
    module = train_from_script(place, model, *overrides, steps=2)
    before, after = load_model(str(model)).state_dict(), module.policy.model.state_dict()
    hidden = {id(weight) for weight in hidden_matrices(module.policy)}
    names = {weight_name for weight_name, weight in module.policy.model.named_parameters() if id(weight) in hidden}
    moved = {weight_name for weight_name in names if not torch.equal(before[weight_name], after[weight_name])}
    assert moved and all(
        after[weight_name].ndim == 2 and "embed" not in weight_name and "lm_head" not in weight_name
        for weight_name in names
    )
    assert module.save_pretrained(tmp_path / "out") == tmp_path / "out"
    check_exported(tmp_path / "out", module.policy.model, model)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_settings_of_each_family_take_effect(name: str, place: Place) -> None:
    """If models ignored their settings, all families would test the same Llama."""
    family = FAMILIES[name]
    model = load_model(str(place.model(family, name)))
    config: Any = model.config
    assert type(config).__name__ == f"{family.config}Config" and all(
        getattr(config, key) == value for key, value in family.settings.items()
    )
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == family.tied
    tokens = torch.arange(3, 23).unsqueeze(0)
    with torch.no_grad():
        reversed_context = torch.cat([tokens[:, :-1].flip(1), tokens[:, -1:]], dim=1)  # the last token stays in place
        in_order, in_reverse = (
            model(input_ids=each).logits[0, -1].log_softmax(-1) for each in (tokens, reversed_context)
        )
    assert float((in_order - in_reverse).abs().max()) > 100 * AGREE  # the model attends to earlier tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_loaded_models_compute_the_same_as_eager_attention(name: str, place: Place) -> None:
    """Queries are so large that a soft cap of attention has an effect."""
    folder = place.model(FAMILIES[name], name)
    eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    models = [load_model(str(folder)), eager]
    with torch.no_grad():
        for weight in (each for model in models for each in model.named_parameters() if "q_proj" in each[0]):
            weight[1].mul_(100)
    ours, theirs = (logits(model) for model in models)
    assert float((ours - theirs).abs().max()) < 1e-3


def test_a_model_whose_attention_drops_its_soft_cap_is_refused_by_name(place: Place) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        place.model(FAMILIES["Gemma2"], "Gemma2"), attn_implementation="sdpa", dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(place.model(FAMILIES["Gemma2"], "Gemma2"))
    with pytest.raises(
        ConfigurationError, match=r"^model: attn_implementation='sdpa' ignores attn_logit_softcapping=50"
    ):
        ScaleRL(model, "scalerl", tokenizer=tokenizer, overrides=[*SHORT])
    model.set_attn_implementation("eager")
    ScaleRL(model, "scalerl", tokenizer=tokenizer, overrides=[*SHORT])


def only_run(folder: Path) -> tuple[Path, JournalView]:
    (run,) = (folder / "runs").iterdir()
    return run, read_journal(run)


def trained_weights(run: Path, model: Path) -> Any:
    """Return the model with the weights of the last checkpoint."""
    saved = torch.load(run / "checkpoints" / "step-00000003.ckpt", weights_only=True)["state_dict"]
    prefix = "policy.model."
    trained = load_model(str(model))
    trained.load_state_dict({key.removeprefix(prefix): w for key, w in saved.items() if key.startswith(prefix)})
    return trained


@pytest.mark.slow
@pytest.mark.parametrize("name", every(17, FAMILIES, FULL))
def test_a_run_of_every_family_is_exported(
    name: str, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run has the recipe's own types and asynchrony, one is exact (FP32, on policy), as from the command line."""
    family = FAMILIES[name]
    model = place.model(family, name)
    for folder, more in (("own", ()), ("exact", (*EXACT, "truncated=keep"))):
        (spec,) = plan_members([place.overrides(model, tmp_path / folder, *SHORT, *family.overrides, *more)])
        spec.write(tmp_path / folder / "runs" / spec.run)
        run_member(tmp_path / folder / "runs" / spec.run)
    run, exact = only_run(tmp_path / "exact")
    for view in (only_run(tmp_path / "own")[1], exact):
        assert view.status == "finished" and [record.step for record in view.of_kind("train")] == [1, 2, 3]
        assert [record.step for record in view.of_kind("eval")] == [0, 3]
    for record in exact.of_kind("train"):
        assert max(record.metrics[P99], record.metrics["train/logprob_gap"]) < AGREE
        assert record.metrics["train/credited_tokens"] > 100
    assert main(["export", str(run), str(tmp_path / "model")]) == 0
    assert "step 3" in capsys.readouterr().out
    check_exported(tmp_path / "model", trained_weights(run, model), model)


def scalerl(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user types it."""
    environment = {**os.environ, "SCALERL_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    return forked.run([sys.executable, "-m", "sweeps.cli.main", *words], cwd=folder, env=environment)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "more"),
    every(3, [("Llama", []), ("Qwen3", ["chat.thinking=false"]), ("GPT2", ["context.max_prompt_tokens=256"])], FULL),
)
def test_typed_commands_train_and_export(name: str, more: list[str], place: Place, tmp_path: Path) -> None:
    """Only settings of a first try are given. The verifiers run in their own processes."""
    model = place.model(FAMILIES[name], name)
    done = scalerl(tmp_path, "train", *place.overrides(model, tmp_path / "out", "scale=trial", *EXACT, *more))
    assert done.returncode == 0, done.stderr
    run, view = only_run(tmp_path / "out")
    assert view.status == "finished" and len(view.of_kind("train")) == 3
    assert max(record.metrics[P99] for record in view.of_kind("train")) < AGREE
    assert ("<think>" in done.stdout) == (name == "Qwen3")
    done = scalerl(tmp_path, "export", str(run), str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr
    loaded = load_model(str(tmp_path / "model"))
    assert torch.equal(logits(loaded), logits(trained_weights(run, model)))


# --- refused models and settings ----------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("name", every(len(STRANGERS), STRANGERS, FULL))
def test_an_unsupported_model_gives_one_line_on_the_command_line(name: str, place: Place, tmp_path: Path) -> None:
    model = place.model(STRANGERS[name], name)
    done = scalerl(tmp_path, "train", *place.overrides(model, tmp_path / "out", "scale=trial"))
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("scalerl train: ")]
    assert len(errors) == 1 and f"model: {name}ForCausalLM" in errors[0] and "Traceback" not in done.stderr
    for journal in tmp_path.rglob(JOURNAL_FILE):
        assert not read_journal(journal).records


def refusal(place: Place, model: Path, *overrides: str) -> str:
    """Return the error, which must be one line and come before anything is computed."""
    keep = Keep()
    with pytest.raises(ConfigurationError) as caught:
        train_from_script(place, model, *overrides, callbacks=(keep,))
    assert keep.records == [] and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", STRANGERS)
def test_an_unsupported_model_is_refused_by_name(name: str, place: Place) -> None:
    assert f"model: {name}ForCausalLM " in refusal(place, place.model(STRANGERS[name], name))


def test_a_token_without_an_embedding_is_refused_if_it_is_used(place: Place, tmp_path: Path) -> None:
    """Unused tokens are accepted: Gemma 3 without vision has no row for its image token."""
    model = shutil.copytree(place.model(FAMILIES["GPT2"], "GPT2"), tmp_path / "model")
    tokenizer, rows = AutoTokenizer.from_pretrained(model), load_model(str(model)).get_input_embeddings().num_embeddings
    while len(tokenizer) < rows:
        tokenizer.add_tokens(f"<spare {len(tokenizer)}>")
    tokenizer.add_tokens("<image>")
    tokenizer.save_pretrained(model)
    train_from_script(place, model, *FAMILIES["GPT2"].overrides, steps=1)

    for token, setting, where in (
        ("<image>", "eos_token", "the tokenizer's eos_token needs"),
        (" apples", "sep_token", "training prompts need"),
    ):
        tokenizer.add_tokens(token)
        setattr(tokenizer, setting, token)
        tokenizer.save_pretrained(model)
        number = tokenizer.convert_tokens_to_ids(token)
        error = refusal(place, model, *FAMILIES["GPT2"].overrides)
        assert f"model: it has {rows} rows of embeddings, numbered from 0, and {where} tokens without one" in error
        assert f": {number} ({token}); give it its own tokenizer" in error
        assert f"resize_token_embeddings({number + 1})" in error


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gemma2", "Gemma3", "Mistral"])
def test_a_template_without_system_prompts_is_refused_with_one(name: str, place: Place) -> None:
    model = place.model(FAMILIES[name], name)
    error = refusal(place, model, "chat.system=Think.", *FAMILIES[name].overrides)
    assert "does not take the conversation of prompt '0'" in error and "leave out chat.system" in error
    assert ("System role not supported" in error) == name.startswith("Gemma")


def test_a_base_model_has_no_place_for_a_system_prompt(place: Place) -> None:
    error = refusal(place, place.model(FAMILIES["GPT2"], "GPT2"), "chat.system=Think.", *FAMILIES["GPT2"].overrides)
    assert "there is no chat template to put it into" in error


@pytest.mark.slow
def test_thinking_is_switched_off_if_the_template_can(place: Place) -> None:
    """Qwen's template then writes an empty thought that has ended, so the whole completion is the answer."""
    model = place.model(FAMILIES["Qwen3"], "Qwen3")
    module = train_from_script(place, model, "chat.thinking=false", "length_control=none", steps=1)
    prompt = module.task.train_prompts()[0]
    assert module.sampling.rendering.text(prompt).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert "enable_thinking=False" in module.began[2]
    assert module.sampling.rendering._answer(prompt, [], "It is \\boxed{5}.") == "It is \\boxed{5}."
    error = refusal(place, place.model(FAMILIES["Llama"], "Llama"), "chat.thinking=false")
    assert "the model's chat template knows no enable_thinking" in error


@pytest.mark.slow
def test_a_template_may_open_the_thinking(place: Place) -> None:
    """DeepSeek's template does. A completion that never ends the thinking has no answer."""
    module = train_from_script(place, place.model(FAMILIES["DeepSeek-V3"], "DeepSeek-V3"), steps=1)
    prompt = module.task.train_prompts()[0]
    assert module.sampling.rendering.text(prompt).endswith("<think>\n")
    assert module.sampling.rendering._answer(prompt, [], "It is \\boxed{5}.") == ""
    assert module.sampling.rendering._answer(prompt, [], "Well.</think>It is \\boxed{5}.") == "It is \\boxed{5}."


def test_contexts_that_are_too_long_for_a_model_are_refused(place: Place) -> None:
    """By default, Gemma 3 looks back 512 tokens and GPT-2 has 1024 positions. Other tests use shorter contexts."""
    longer = "context.max_prompt_tokens=1024"
    error = refusal(place, place.model(FAMILIES["Gemma3"], "Gemma3"), longer)
    assert "the model's sliding_window of 512 tokens is shorter than the context of 1056" in error
    error = refusal(place, place.model(FAMILIES["GPT2"], "GPT2"), longer)
    assert "make 1056 tokens, and GPT2LMHeadModel has 1024 positions" in error


@pytest.mark.parametrize(
    ("name", "rope", "limit"),
    every(
        3,
        [
            (
                "Phi3",
                {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 32.0},
                "original_max_position_embeddings",
            ),
            ("Llama", {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings"),
        ],
    ),
)
def test_contexts_at_which_rotary_embeddings_change_are_refused(
    name: str, rope: dict[str, Any], limit: str, place: Place
) -> None:
    """Phi-3 128k, for example, rotates all positions differently beyond 4096 tokens, also those already in a cache."""
    more = {"rope_parameters": {"rope_theta": 10000.0, **rope}, limit: 200}
    model = place.model(FAMILIES[name], f"{name}-{rope['rope_type']}", **more)
    error = refusal(place, model, *EXACT, "context.max_prompt_tokens=169")
    assert "make 201 tokens" in error and f"{name}ForCausalLM turns all its positions anew" in error
    gaps = Gaps()
    train_from_script(
        place, model, *EXACT, "truncated=keep", "context.max_prompt_tokens=168", steps=1, callbacks=(gaps,)
    )
    assert max(gaps.largest) < AGREE


def test_contradictory_sampling_settings_do_not_prevent_the_export(place: Place, tmp_path: Path) -> None:
    """Folders of real models have a temperature along with `do_sample: false`, which transformers refuses to save."""
    model = save(FAMILIES["Llama"], tmp_path / "in")
    (model / "generation_config.json").write_text(
        '{"do_sample": false, "temperature": 0.6, "eos_token_id": [312, 315]}'
    )
    module = train_from_script(place, model, steps=1)
    module.save_pretrained(tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id == [312, 315]
