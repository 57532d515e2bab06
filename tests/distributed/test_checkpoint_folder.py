"""Checkpoint folders of sharded runs: each rank writes its own part, and any run can resume from the folder."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from lightning_scalerl import ConfigurationError, RolloutDataModule, ScaleRL
from lightning_scalerl.callbacks.checkpointing import checkpoints, newest_checkpoint, unusable
from lightning_scalerl.distributed import shard_files
from lightning_scalerl.distributed.checkpoint_folder import INDEX, META, load_outline
from lightning_scalerl.distributed.shard_files import read_whole
from lightning_scalerl.distributed.sharded import ShardedStrategy
from lightning_scalerl.generator.torch.generator import TorchGenerator
from lightning_scalerl.member import export
from lightning_scalerl.member.identify import CHECKPOINTS, plan_members
from lightning_scalerl.member.run import run_member
from lightning_scalerl.model.load import load_model, load_tokenizer
from lightning_scalerl.module import LightningModule
from sweeps.cli.main import main
from sweeps.launch.clean import _files
from sweeps.run.journal import JOURNAL_FILE, read_journal
from tests.callbacks.test_checkpoints import flip
from tests.distributed.test_ranks import check_same_curve, fit, on_ranks, one_thread  # noqa: F401
from tests.distributed.test_sharded import EVERYTHING, check_same_weights, saved_weights, weights
from tests.helpers import SMALL, CountingTask, quiet


def file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def folder(tiny_model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of two steps on two ranks. Tests that change it work on a copy."""
    run = tmp_path_factory.mktemp("folder")
    torch.set_num_threads(1)
    results = on_ranks(2, lambda rank: weights(fit(tiny_model_path, run, 2, steps=2, strategy="fsdp2")))
    assert results[0] == results[1] and len(results[0]) == 64, results
    return run / "checkpoints" / "step-00000002.ckpt"


@pytest.mark.slow
def test_each_rank_writes_its_own_part_and_gathers_nothing(tiny_model_path: str, tmp_path: Path) -> None:
    """Each rank writes parts of model and optimizer. None gathers a whole tensor while a checkpoint is written."""

    class Watched(Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            self.full = DTensor.full_tensor
            DTensor.full_tensor = None  # type: ignore[method-assign,assignment]

        def on_train_batch_end(self, *hook_arguments: Any) -> None:
            if hasattr(self, "full"):
                DTensor.full_tensor = self.full  # type: ignore[method-assign]

    def work(rank: int) -> str:
        fit(tiny_model_path, tmp_path, 2, steps=1, strategy="fsdp2", callbacks=[Watched()])
        return "saved"

    assert on_ranks(2, work) == ["saved"] * 2
    (path,) = checkpoints(tmp_path / "checkpoints")
    assert file_names(path) == [".metadata", "__0_0.distcp", "__1_0.distcp", META]
    sizes = [(path / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    assert max(sizes) < 1.2 * min(sizes)
    index = torch.load(path / META, weights_only=True)[INDEX]
    assert {name.split(".")[0] for name in index} == {"state_dict", "optimizer_states"}
    # Rank 0's file has no copy of the trained weights, only the weights that its generator samples with.
    rank_0_state = torch.load(path / META, weights_only=True)
    assert not any(isinstance(value, torch.Tensor) for value in rank_0_state["state_dict"].values())
    assert unusable(path) is None and file_names(tmp_path / "checkpoints") == [path.name]


@pytest.mark.full
def test_a_folder_holds_the_same_as_a_file(tiny_model_path: str, tmp_path: Path) -> None:
    """Weights, optimizer state and the generator's weights are equal bit for bit."""
    for form in CHECKPOINTS:

        def work(rank: int, form: str = form) -> str:
            fit(tiny_model_path, tmp_path / form, 2, steps=2, strategy=ShardedStrategy(checkpoint=form))
            return "saved"

        assert on_ranks(2, work) == ["saved"] * 2
    folder, file = (newest_checkpoint(tmp_path / form / "checkpoints").path for form in CHECKPOINTS)
    assert folder is not None and file is not None and folder.is_dir() and file.is_file()
    parts, whole = read_whole(folder), torch.load(file, weights_only=True)
    assert parts.keys() == {*whole, INDEX}
    assert parts["state_dict"].keys() == whole["state_dict"].keys()
    for name, value in whole["state_dict"].items():
        assert torch.equal(parts["state_dict"][name], value), name
    (folder_state,), (file_state,) = parts["optimizer_states"], whole["optimizer_states"]
    assert (
        folder_state["param_groups"] == file_state["param_groups"]
        and folder_state["state"].keys() == file_state["state"].keys()
    )
    for index, state in file_state["state"].items():
        assert folder_state["state"][index].keys() == state.keys()
        assert all(torch.equal(folder_state["state"][index][name], value) for name, value in state.items())
    published = [checkpoint["scalerl"]["generator"]["weights"]["model"] for checkpoint in (parts, whole)]
    assert all(torch.equal(published[0][name], value) for name, value in published[1].items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks", [(2, 3), pytest.param((3, 1, 2), marks=pytest.mark.full)], ids=lambda options: "-".join(map(str, options))
)
def test_a_run_resumes_with_another_number_of_shards(
    ranks: Sequence[int], tiny_model_path: str, tmp_path: Path
) -> None:
    """Two steps with each number of ranks (1: one process without a strategy) give one curve and one final model."""
    options: dict[str, Any] = {"overrides": EVERYTHING}
    whole = fit(tiny_model_path, tmp_path / "one", 1, steps=2 * len(ranks), **options)
    run = tmp_path / "moved"
    for number, count in enumerate(ranks):
        fit_options = {"steps": 2 * (number + 1), "resume": number > 0, **options}
        if count == 1:
            fit(tiny_model_path, run, 1, **fit_options)
            continue

        def work(rank: int, fit_options: dict[str, Any] = fit_options, count: int = count) -> str:
            return weights(fit(tiny_model_path, run, count, strategy="fsdp2", **fit_options))

        results = on_ranks(count, work)
        assert len({*results}) == 1 and len(results[0]) == 64, results
    check_same_curve(read_journal(tmp_path / "one"), read_journal(run), steps=2 * len(ranks))
    check_same_weights(whole, run)


# --- interrupted saves --------------------------------------------------------------------------------------------


class KillAfter(Callback):
    """Kill the process after `step` steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        if pl_module.completed_steps == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_between_steps(rank: int) -> Sequence[Callback]:
    return [KillAfter(3)] if rank == 1 else []


def killed_writing(rank: int, killed_rank: int) -> Sequence[Callback]:
    """Kill a rank while it writes its part of the second checkpoint, which is therefore never whole."""
    if rank == killed_rank:
        resolve, done = shard_files._SavePlanner.resolve_data, []

        def killed(self: Any, item: Any) -> Any:
            done.append(item)
            if Path.cwd().joinpath("checkpoints", "step-00000002.ckpt").exists() and len(done) % 10 == 9:
                os.kill(os.getpid(), signal.SIGKILL)
            return resolve(self, item)

        shard_files._SavePlanner.resolve_data = killed  # type: ignore[method-assign]
    return []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("callbacks", "halves"),
    [
        pytest.param(killed_between_steps, 0, id="between two steps", marks=pytest.mark.full),
        pytest.param(lambda rank: killed_writing(rank, 1), 0, id="in the middle of its part"),
        pytest.param(
            lambda rank: killed_writing(rank, 0), 1, id="rank 0 in the middle of its part", marks=pytest.mark.full
        ),
    ],
)
def test_a_rank_that_is_killed_costs_the_steps_since_the_last_whole_checkpoint(
    callbacks: Any, halves: int, tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run resumes from the last whole folder. A partial folder is removed by the next save at the latest."""
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.chdir(run)
    options: dict[str, Any] = {"checkpoint_every": 2, "strategy": "fsdp2", "steps": 6}
    fit(tiny_model_path, tmp_path / "one", 1, steps=6)
    outcomes = on_ranks(2, lambda rank: str(fit(tiny_model_path, run, 2, callbacks=callbacks(rank), **options)))
    assert "" in outcomes and not any(result.startswith("ScaleRL(") for result in outcomes), outcomes
    # Rank 0 removes a partial folder, unless rank 0 itself was killed.
    partial_folders = list((run / "checkpoints").glob("*.part"))
    assert len(partial_folders) == halves and not any((path / META).exists() for path in partial_folders)
    assert newest_checkpoint(run / "checkpoints").path == run / "checkpoints" / "step-00000002.ckpt"
    results = on_ranks(2, lambda rank: weights(fit(tiny_model_path, run, 2, resume=True, **options)))
    assert results[0] == results[1] and len(results[0]) == 64, results
    check_same_curve(read_journal(tmp_path / "one"), read_journal(run), steps=6)
    assert file_names(run / "checkpoints") == ["step-00000004.ckpt", "step-00000006.ckpt"]


class SaveEachStep(Callback):
    """Save a checkpoint after each step, as a script may."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        trainer.save_checkpoint(self.path)


@pytest.mark.slow
@pytest.mark.parametrize("own", [pytest.param(False, marks=pytest.mark.full), True], ids=["the run's", "a script's"])
def test_a_rank_that_cannot_write_stops_all_and_leaves_no_partial_folder(
    own: bool, tiny_model_path: str, tmp_path: Path
) -> None:
    callbacks = [SaveEachStep(tmp_path / "checkpoints" / "own.ckpt")] if own else []

    def work(rank: int) -> str:
        if rank == 1:

            def full(self: Any, item: Any) -> Any:
                raise OSError(28, "No space left on device")

            shard_files._SavePlanner.resolve_data = full  # type: ignore[method-assign]
        fit(tiny_model_path, tmp_path, 2, steps=1, strategy="fsdp2", callbacks=callbacks)
        return "went on"

    results = on_ranks(2, work)
    assert all("No space left on device" in result for result in results), results
    assert file_names(tmp_path / "checkpoints") == []


@pytest.mark.slow
def test_leftovers_of_a_killed_save_are_removed_by_the_next(tiny_model_path: str, tmp_path: Path) -> None:
    """A leftover is removed if it is of the same checkpoint or old. Folders that another run may be writing stay."""
    for name in ("own.ckpt.0123abcd.part", "new.ckpt.0123abcd.part", "old.ckpt.0123abcd.part", "somebodys.part"):
        (tmp_path / "saved" / name).mkdir(parents=True)
        (tmp_path / "saved" / name / "__0_0.distcp").touch()
    two_days_ago = time.time() - 2 * 86400
    os.utime(tmp_path / "saved" / "old.ckpt.0123abcd.part" / "__0_0.distcp", (two_days_ago, two_days_ago))

    def work(rank: int) -> str:
        fit(
            tiny_model_path,
            tmp_path,
            2,
            steps=1,
            strategy="fsdp2",
            callbacks=[SaveEachStep(tmp_path / "saved/own.ckpt")],
        )
        return "saved"

    assert on_ranks(2, work) == ["saved"] * 2
    assert file_names(tmp_path / "saved") == ["new.ckpt.0123abcd.part", "own.ckpt", "somebodys.part"]


# --- damaged folders and other models ------------------------------------------------------------------------------


def remove_part(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()


def truncate_part(folder: Path) -> None:
    part = folder / "__1_0.distcp"
    part.write_bytes(part.read_bytes()[:-100])


def flip_bit(folder: Path) -> None:
    part = folder / "__0_0.distcp"
    flip(part, part.stat().st_size // 2)


def flip_bit_of_meta(folder: Path) -> None:
    # In the middle of the run's state.
    flip(folder / META, (folder / META).stat().st_size // 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (remove_part, "lacks __1_0.distcp, a part of its tensors"),
        (truncate_part, "holds only part of __1_0.distcp"),
        (flip_bit, "in __0_0.distcp"),
        (flip_bit_of_meta, "damaged"),
        (lambda folder: (folder / META).unlink(), f"a folder without {META}"),
    ],
    ids=["lost", "cut off", "a bit turned", "a bit of rank 0's turned", "without rank 0's"],
)
def test_a_damaged_folder_is_skipped(
    harm: Any, said: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = (tmp_path / f"step-0000000{step}.ckpt" for step in (2, 4))
    for copy in (older, newer):
        shutil.copytree(folder, copy)
    assert newest_checkpoint(tmp_path).path == newer
    harm(newer)
    assert newest_checkpoint(tmp_path).path == older
    assert said in str(unusable(newer)) and f"{newer.name} is skipped, " in capsys.readouterr().err


@pytest.mark.slow
def test_loading_by_path_checks_that_the_folder_is_whole_and_of_this_model(
    folder: Path, tiny_model_path: str, tmp_path: Path
) -> None:
    """A whole folder of this model loads bit for bit. Otherwise the error is one line with a remedy."""
    module = fit(tiny_model_path, tmp_path / "other", 1, steps=1)
    tokenizer = load_tokenizer(tiny_model_path)
    options: dict[str, Any] = {"tokenizer": tokenizer, "recipe": "scalerl", "overrides": [*SMALL, "precision=fp32"]}
    loaded = ScaleRL.load_from_checkpoint(folder, model=load_model(tiny_model_path), **options)
    assert loaded.completed_steps == 2
    saved = read_whole(folder)["state_dict"]
    assert loaded.state_dict().keys() == saved.keys()
    assert all(torch.equal(value, saved[name]) for name, value in loaded.state_dict().items())
    assert not all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())

    other = load_model(tiny_model_path)
    other.resize_token_embeddings(other.config.vocab_size + 1)  # type: ignore[operator]
    with pytest.raises(
        ConfigurationError, match=r"^ckpt_path: .*is of another model \(.*, not .*\); go on with[^\n]*$"
    ):
        ScaleRL.load_from_checkpoint(folder, model=other, **options)
    trainer = Trainer(max_steps=4, **quiet())
    with pytest.raises(ConfigurationError, match="is of another model"):
        trainer.fit(ScaleRL(other, **options), datamodule=RolloutDataModule(CountingTask()), ckpt_path=str(folder))
    shutil.copytree(folder, half := tmp_path / "half.ckpt")
    remove_part(half)
    for load in (ScaleRL.load_from_checkpoint, load_outline):
        with pytest.raises(ConfigurationError, match=r"half.ckpt' lacks __1_0.distcp[^\n]*; give a whole checkpoint"):
            load(half, **(options if load is not load_outline else {}))
    shutil.copytree(folder, part := tmp_path / "step-00000002.abc.part")
    with pytest.raises(ConfigurationError, match="is what a broken save has left"):
        ScaleRL.load_from_checkpoint(part, model=load_model(tiny_model_path), **options)


def test_an_unknown_checkpoint_form_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"strategy\.checkpoint: 'half' is unknown; valid: shards, whole"):
        ShardedStrategy(checkpoint="half")


# --- Lightning, export, cleaning, generators -----------------------------------------------------------------------


@pytest.mark.full
def test_lightnings_own_checkpoints_are_folders_too(tiny_model_path: str, tmp_path: Path) -> None:
    """`ModelCheckpoint` keeps its best and last, `ckpt_path="last"` finds the last, and a save can replace another."""

    def work(rank: int) -> str:
        best_and_last = ModelCheckpoint(
            tmp_path, "{step}", monitor="train/reward", save_top_k=1, mode="max", save_last=True
        )
        module = ScaleRL(load_model(tiny_model_path), "scalerl_core", SMALL, load_tokenizer(tiny_model_path))
        data = RolloutDataModule(CountingTask())
        options = {**quiet(), "enable_checkpointing": True, "devices": 2, "strategy": "fsdp2"}
        Trainer(max_steps=2, callbacks=[best_and_last], **options).fit(module, datamodule=data)
        resumed = ScaleRL(load_model(tiny_model_path), "scalerl_core", SMALL, load_tokenizer(tiny_model_path))
        trainer = Trainer(max_steps=3, callbacks=[best_and_last], **options)
        trainer.fit(resumed, datamodule=data, ckpt_path="last", weights_only=True)
        for _ in range(2):
            trainer.save_checkpoint(tmp_path / "mine.ckpt")
        return f"{resumed.completed_steps}"

    assert on_ranks(2, work) == ["3", "3"]
    best = [path for path in tmp_path.iterdir() if path.name.startswith("step=")]
    assert len(best) == 1 and unusable(best[0]) is None
    assert unusable(tmp_path / "last.ckpt") is None and unusable(tmp_path / "mine.ckpt") is None
    assert {path.name for path in tmp_path.iterdir()} == {best[0].name, "last.ckpt", "mine.ckpt"}


@pytest.mark.full
def test_a_members_folder_is_exported_resumed_and_cleaned_up(
    tiny_model_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A member trains sharded under torchrun. Then one process exports it, resumes it and cleans up."""

    def plan(steps: int) -> Any:
        overrides = ["recipe=ppo", "model=path", f"model.path={tiny_model_path}", "scaled_for=null", "task.train=[9]"]
        (spec,) = plan_members(
            [
                [
                    *overrides,
                    *(each for each in SMALL if not each.startswith("async_mode")),
                    "task.heldout=[4]",
                    f"budget.steps={steps}",
                    "checkpoint.every_n_steps=2",
                    "strategy=fsdp2",
                    f"output_dir={tmp_path}",
                ]
            ]
        )
        return spec

    spec = plan(2)
    run = tmp_path / "runs" / spec.run
    spec.write(run)

    def work(rank: int) -> str:
        os.environ |= {"TORCHELASTIC_RUN_ID": "x", "RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ |= {"GROUP_RANK": "0"}
        run_member(run)
        return "trained"

    assert on_ranks(2, work) == ["trained"] * 2
    path = run / "checkpoints" / "step-00000002.ckpt"
    saved = saved_weights(run)
    read: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        fill = export.read_into
        patch.setattr(export, "read_into", lambda *overrides: (read.append(len(overrides[-1])), fill(*overrides)))
        patch.setattr(export, "save_model", None)
        assert main(["export", str(run), str(tmp_path / "model")]) == 0
    assert {*read} == {1}  # one tensor at a time
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(value, saved[f"policy.model.{name}"]) for name, value in loaded.items())
    lost = (path / "__1_0.distcp").rename(tmp_path / "lost")
    assert main(["export", str(run), str(tmp_path / "other"), "--step", "2"]) == 1
    assert "lacks __1_0.distcp" in capsys.readouterr().err
    lost.rename(path / "__1_0.distcp")
    plan(4).write(run)
    run_member(run)
    assert read_journal(run).status == "finished" and file_names(path.parent) == [path.name, "step-00000004.ckpt"]
    assert path.is_dir() and not (path.parent / "step-00000004.ckpt").is_dir()
    size = sum(part.stat().st_size for part in path.iterdir())
    assert main(["clean", str(tmp_path), "--yes"]) == 0
    assert file_names(path.parent) == [] and size > 0


@pytest.mark.slow
def test_a_generator_without_saved_weights_gets_the_trainers(
    folder: Path, tiny_model_path: str, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").mkdir()
    shutil.copytree(folder, copy := tmp_path / "checkpoints" / folder.name)
    shutil.copy(folder.parent.parent / JOURNAL_FILE, tmp_path)
    rank_0_state = torch.load(copy / META, weights_only=True)
    rank_0_state["scalerl"]["generator"]["weights"] = None
    torch.save(rank_0_state, copy / META)
    published: list[tuple[int, bool]] = []

    class Sees(TorchGenerator):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            trained = read_whole(copy)["state_dict"]
            generator_weights = state["weights"].items()
            published.append(
                (
                    state["version"],
                    all(torch.equal(value, trained[f"policy.model.{name}"]) for name, value in generator_weights),
                )
            )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchGenerator, "load_state_dict", Sees.load_state_dict)
        fit(tiny_model_path, tmp_path, 1, steps=2, resume=True)
    assert published == [(2, True)]


@pytest.mark.full
def test_live_generators_get_the_trainers_weights_on_resume(tiny_model_path: str, tmp_path: Path) -> None:
    """With live generators the published weights are not saved. On resume the trainer publishes its own again."""
    options: dict[str, Any] = {"overrides": ["driver=live", "async_mode.k=2"], "strategy": "fsdp2"}

    def first(rank: int) -> str:
        fit(tiny_model_path, tmp_path, 2, steps=2, **options)
        return "saved"

    assert on_ranks(2, first) == ["saved"] * 2
    path = newest_checkpoint(tmp_path / "checkpoints").path
    assert path is not None
    rank_0_state = torch.load(path / META, weights_only=True)
    assert rank_0_state["scalerl"]["generator"]["weights"] is None
    assert rank_0_state["scalerl"]["generator"]["version"] < 2
    whole = sum(value.nbytes for value in read_whole(path)["state_dict"].values())
    assert (path / META).stat().st_size < whole / 2

    class Sees(Callback):
        def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
            if hasattr(pl_module, "generator"):
                assert pl_module.generator.version == 2

    def second(rank: int) -> str:
        return (
            f"{fit(tiny_model_path, tmp_path, 2, steps=3, resume=True, callbacks=[Sees()], **options).completed_steps}"
        )

    assert on_ranks(2, second) == ["3", "3"]
    assert read_journal(tmp_path).status == "finished"


@pytest.mark.slow
def test_clean_counts_a_folder_as_one(folder: Path) -> None:
    sizes = _files(folder.parent, result=None)  # type: ignore[arg-type]
    assert sizes == {folder: sum(part.stat().st_size for part in folder.iterdir())}
