"""Packed rows: the same results as padded rows, over families, losses and ranks. Other models get padded rows."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_scalerl import ScaleRL
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.choices import Choices
from lightning_scalerl.distributed.ranks import Ranks
from lightning_scalerl.measure.probe import _trainer_logprobs
from lightning_scalerl.model import policy as policy_module
from lightning_scalerl.model import value as value_module
from lightning_scalerl.model.load import load_model
from lightning_scalerl.model.packed import packs_rows, row_mask, token_states
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.model.recompute import recompute, set_mode
from lightning_scalerl.model.value import ValueModel
from lightning_scalerl.rollouts.rollout import PassSize, Scored, TrainBatch
from lightning_scalerl.session import trials
from lightning_scalerl.stream.credit import assemble
from lightning_scalerl.task.arithmetic_base import tokenizer
from lightning_scalerl.update.before import run_forward_passes
from lightning_scalerl.update.terms import terms
from lightning_scalerl.update.token_credit import token_advantages
from lightning_scalerl.update.trained import TrainedPolicy
from sweeps.run.journal import read_journal
from tests.axes.test_terms import choices_of, each_combination
from tests.distributed import test_ranks
from tests.distributed.test_sharded import ADAPTED, EVERYTHING, weights
from tests.examples import every, examples
from tests.families import FAMILIES, STRANGERS, save
from tests.generator.test_architectures import LLAMA, tiny
from tests.helpers import SMALL, fit, make_group
from tests.model.test_shared_prompt import batch_of

FP32 = Precision("fp32", False, False)
# The sliding window of families that have one. Some rows are longer.
WINDOW = 4
MIXED = ([[5, 6, 7, 8, 9], [5, 6], [11] * 7, [3]], [[14, 1, 6], [3, 1], [2], [1, 9]])
PACKED = ("batch.packed=true", "batch.micro_tokens=40")

each_family = pytest.mark.parametrize("family", every(3, FAMILIES))


@pytest.fixture
def never_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off shared prompts, which take another code path than packed rows."""
    monkeypatch.setattr(policy_module, "sharing_pays_off", lambda batch: False)


def record_input_shapes(model: nn.Module) -> list[tuple[int, ...]]:
    """Record the input shape of each pass through the model from now on."""
    shapes: list[tuple[int, ...]] = []
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    embeddings.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(inputs[0].shape)))
    return shapes


def scores_and_gradient(policy: Policy, batch: TrainBatch) -> tuple[Tensor, Tensor, Tensor]:
    policy.zero_grad()
    logprobs, entropies = policy(batch, entropy_gradient=True)
    shares = torch.linspace(0.5, 2.0, logprobs.numel()).reshape(logprobs.shape)
    (shares * logprobs + 0.3 * entropies).sum().backward()
    gradient = torch.cat([each.grad.flatten() for each in policy.parameters() if each.grad is not None])
    return logprobs.detach(), entropies.detach(), gradient


def alike(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float = 1e-5) -> bool:
    """Return True if each pair differs by at most this share of its norm."""
    gaps = [float((a - b).norm()) / max(float(b.norm()), 1e-3) for a, b in zip(ours, theirs, strict=True)]
    return max(gaps) <= tolerance


@each_family
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_packed_rows_equal_padded_rows_in_every_family(
    family: str, recomputed: bool, tmp_path: Path, never_shared: None
) -> None:
    """Log-probabilities, entropies and gradients, with rows longer than the window and rows of one token."""
    window = {"sliding_window": WINDOW} if FAMILIES[family].settings.get("sliding_window") else {}
    model = load_model(str(save(FAMILIES[family], tmp_path / family, **window)))
    if recomputed:
        recompute(model)
    policy = Policy(model, FP32)
    set_mode(model, dropout=False)
    # Run the trial passes now, so that they are not recorded.
    assert packs_rows(model) and policy.shares_prompts in (True, False)
    batch = batch_of(*MIXED)
    shapes = record_input_shapes(model)
    padded, packed = (scores_and_gradient(policy, replace(batch, packed=packed)) for packed in (False, True))
    assert shapes == [(len(batch.lengths), int(batch.lengths.max()) - 1), (1, int((batch.lengths - 1).sum()))]
    # The families' weights are large so that attention matters, which makes rounding errors a little larger.
    assert alike(packed, padded, 1e-4)
    window_batch = batch_of([[5, 6], [7]], [[WINDOW - 1, 1], [WINDOW, 2]])
    assert int(window_batch.lengths.max()) == WINDOW + 1  # the last token is never an input
    padded, packed = (
        scores_and_gradient(policy, replace(window_batch, packed=is_packed)) for is_packed in (False, True)
    )
    assert alike(packed, padded, 1e-4)


# Short rows would pack in the last two. Llama 4 attends in chunks, and GPT-Neo's mask is a table of limited size.
UNLIKE: dict[str, Callable[[Path], nn.Module]] = {
    "BloomForCausalLM": lambda folder: load_model(str(save(STRANGERS["Bloom"], folder))),
    "MambaForCausalLM": lambda folder: load_model(str(save(STRANGERS["Mamba"], folder))),
    "Lfm2ForCausalLM": lambda folder: tiny("Lfm2", {**LLAMA, "layer_types": ["conv", "full_attention"]}),
    "Llama4ForCausalLM": lambda folder: tiny(
        "Llama4Text", {**LLAMA, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 64}
    ),
    "GPTNeoForCausalLM": lambda folder: tiny(
        "GPTNeo",
        {
            "vocab_size": 16, "hidden_size": 32, "num_layers": 1, "num_heads": 4, "max_position_embeddings": 64,
            "attention_types": [[["global"], 1]],
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLIKE)
def test_a_model_that_cannot_pack_is_named_once_and_gets_padded_rows(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = UNLIKE[name](tmp_path)
    assert not ScaleRL(model, overrides=[*SMALL, *PACKED], tokenizer=tokenizer()).policy.packs
    (record,) = [
        record for record in caplog.records if record.levelno == logging.WARNING and "packed" in record.getMessage()
    ]
    assert record.getMessage().startswith(f"batch.packed: {name} ")
    caplog.clear()
    monkeypatch.setenv("LOCAL_RANK", "1")  # only one of several ranks warns
    assert not ScaleRL(model, overrides=[*SMALL, *PACKED], tokenizer=tokenizer()).policy.packs
    assert not any("packed" in record.getMessage() for record in caplog.records)


def test_packing_is_not_tried_unless_it_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "packs_rows", lambda model: pytest.fail("tried"))
    assert not ScaleRL(tiny("Llama", LLAMA), overrides=SMALL, tokenizer=tokenizer()).policy.packs


def test_a_model_that_ignores_positions_or_masks_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each patch makes a model that packs ignore one of them. A window longer than short rows must be noticed, too."""
    for family, window_options, options in (
        ("Llama", {}, {"attn_implementation": "eager"}),
        ("Mistral", {"sliding_window": 32}, {}),
    ):
        model = tiny(family, {**LLAMA, **window_options}, **options)
        assert packs_rows(model)
        code = sys.modules[type(model).__module__]
        name = "create_sliding_window_causal_mask" if window_options else "create_causal_mask"
        original = getattr(code, name)
        with monkeypatch.context() as patch:
            patch.setattr(code, name, lambda original=original, position_ids=None, **arguments: original(**arguments))
            assert not packs_rows(model)
    learned = tiny("GPT2", {"vocab_size": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64})
    assert packs_rows(learned)
    position_embedding: Any = learned.transformer.wpe
    with monkeypatch.context() as patch:
        patch.setattr(
            position_embedding,
            "forward",
            lambda positions: position_embedding.weight[torch.arange(positions.shape[-1])].unsqueeze(0),
        )
        assert not packs_rows(learned)


# --- sizes of passes -------------------------------------------------------------------------------------------

GROUPS = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=5), min_size=1, max_size=6)


@given(GROUPS, st.integers(1, 8), st.integers(1, 60))
def test_passes_count_real_tokens(groups: list[list[int]], rollouts: int, tokens: int) -> None:
    """Each rollout is in one pass, within both limits, and a pass ends only if the next rollout would exceed them."""
    batch = replace(batch_of([[1, 2]] * len(groups), groups), packed=True)
    size = PassSize(rollouts, tokens)
    parts = list(batch.cut(size))
    assert sorted(torch.cat(parts).tolist()) == list(range(batch.rollouts))

    def too_much(rows: list[int]) -> bool:
        return len(rows) > rollouts or int(batch.lengths[rows].sum()) > tokens

    for number, part in enumerate(parts):
        rows = part.tolist()
        assert len(rows) == 1 or not too_much(rows)
        if number + 1 < len(parts):
            assert too_much([*rows, int(parts[number + 1][0])])
    assert all(part.packed for part in batch.micro_batches(size))
    assert batch.blank().packed and not replace(batch, packed=False).blank().packed


@settings(max_examples=examples(80))
@given(GROUPS, st.integers(1, 12))
def test_a_shared_prompt_takes_no_more_tokens_than_packed_rows(groups: list[list[int]], prompt: int) -> None:
    """Tokens are counted at the model's input, so `batch.micro_tokens` also limits passes with shared prompts."""
    policy = tried_policy()
    prompts = [list(range(1, 1 + max(1, prompt - number))) for number in range(len(groups))]
    batch = replace(batch_of(prompts, groups), packed=True)
    shapes = record_input_shapes(policy.model)
    policy(batch)
    assert sum(rows * columns for rows, columns in shapes) <= int((batch.lengths - 1).sum())


def tried_policy() -> Policy:
    """A policy with the vocabulary of `batch_of` whose trial passes are over, so that they are not counted."""
    policy = Policy(tiny("Llama", {**LLAMA, "vocab_size": 48}), FP32).eval()
    assert policy.shares_prompts
    return policy


def flops(policy: Policy, batch: TrainBatch) -> int:
    with FlopCounterMode(display=False) as counter:
        policy(batch)[0].sum().backward()  # type: ignore[no-untyped-call]
    return counter.get_total_flops()


def test_a_packed_row_costs_as_much_as_the_row_alone(never_shared: None) -> None:
    """This includes attention, which is quadratic in the visible tokens, and recomputed activations."""
    policy = tried_policy()
    batch = replace(batch_of([[1, 2, 3], [4, 5, 6]], [[30, 2, 9], [1, 17]]), packed=True)
    sum_of_rows = sum(flops(policy, batch.select(torch.tensor([number]))) for number in range(batch.rollouts))
    assert flops(policy, batch) == sum_of_rows < flops(policy, replace(batch, packed=False))
    recompute(policy.model)
    set_mode(policy.model, dropout=False)
    recomputed = flops(policy, batch)
    assert sum_of_rows < recomputed < 1.5 * sum_of_rows
    eager = tiny("Llama", {**LLAMA, "vocab_size": 48}, attn_implementation="eager")
    windowed = tiny("Mistral", {**LLAMA, "sliding_window": WINDOW})
    for model, longest, by_row in (
        (policy.model, 9, True),
        (eager, 2, False),
        (windowed, 4, True),
        (windowed, 5, False),
    ):
        assert packs_rows(model)
        assert (row_mask(model, [2, longest, 1], torch.device("cpu")) is not None) == by_row


def test_prompts_are_still_shared_if_that_saves_more() -> None:
    policy = tried_policy()
    shapes = record_input_shapes(policy.model)
    policy(replace(batch_of([list(range(1, 21))], [[5] * 16]), packed=True))
    assert shapes == [(1, 20), (16, 4)]
    # Padded rows would share this prompt. The long completion makes that more tokens than packed rows have.
    unlike = batch_of([[1, 2, 3, 4]], [[30, 1, 1, 1, 1, 1]])
    assert policy_module.sharing_pays_off(unlike) and not policy_module.sharing_pays_off(replace(unlike, packed=True))


def test_a_critic_gets_no_padding() -> None:
    critic = ValueModel(tried_policy().model, FP32)
    nn.init.normal_(critic.head.weight)
    shapes = record_input_shapes(critic.body)
    batch = batch_of(*MIXED)
    padded, packed = (critic(replace(batch, packed=packed)).detach() for packed in (False, True))
    assert shapes[1] == (1, int((batch.lengths - 1).sum())) != shapes[0]
    assert padded.abs().max() > 0.1 and alike([packed], [padded])


def test_the_probe_of_the_generator_packs_its_rows(never_shared: None) -> None:
    policy, group = tried_policy(), make_group([1.0, 0.0, 1.0, 0.5])
    shapes, logprobs = record_input_shapes(policy.model), {}
    for packs in (False, True):
        policy.packs = packs
        rollouts = [(group, rollout) for rollout in group.rollouts]
        logprobs[packs] = _trainer_logprobs(rollouts, TrainedPolicy(policy, Ranks), PassSize(9))
    assert [rows for rows, _ in shapes] == [4, 1]
    assert alike(logprobs[True], logprobs[False])


# --- losses, aggregations, terms --------------------------------------------------------------------------------


def update(choices: Choices, batch: TrainBatch, size: PassSize) -> tuple[Tensor, Tensor]:
    """Loss and gradient of one update of policy and critic, as a training step computes them."""
    torch.manual_seed(3)
    policy, reference = (Policy(tiny("Llama", LLAMA), choices.precision).eval() for _ in range(2))
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.9)
    critic = ValueModel(policy.model, choices.precision) if choices.critic.has_values else None
    if critic is not None:
        nn.init.normal_(critic.head.weight)
    ranks = Ranks()
    rows = run_forward_passes(batch, choices, policy, reference if choices.kl.where else None, critic, size, ranks)
    rows = token_advantages(rows, choices, ranks.sum, update_statistics=True)
    total = torch.zeros(())
    for _, part in ranks.passes(rows, size):
        scored = Scored(part, *policy(part, entropy_gradient=True), None if critic is None else critic(part))
        loss = torch.stack([term.reduce(scored) for term in terms(choices)]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    parameters = [*policy.parameters(), *(critic.parameters() if critic is not None else ())]
    return total, torch.cat([each.grad.flatten() for each in parameters if each.grad is not None])


@pytest.mark.slow
@each_combination
def test_any_loss_and_gradient_equal_those_of_padded_rows(
    loss: Any, aggregation: Any, names: tuple[str, ...], never_shared: None
) -> None:
    """Invariant 1 for packing: every loss, aggregation and set of terms, in several passes."""
    choices = choices_of(loss, aggregation, names)
    rewards = [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0], [1.0, 0.5, 0.0, 1.0]]
    groups = [make_group(values, number, prompt_length=3 + number) for number, values in enumerate(rewards)]
    batch = assemble(groups, choices, max_new_tokens=8)
    size = PassSize(5, 40)
    padded, packed = (update(choices, replace(batch, packed=packed), size) for packed in (False, True))
    assert padded[1].abs().max() > 1e-3
    assert alike(packed, padded)


# --- a whole run ------------------------------------------------------------------------------------------------


def trained_weights(path: str, *overrides: str) -> dict[str, Tensor]:
    module = fit(path, steps=1, overrides=["precision=fp32", *overrides])
    return dict(module.state_dict())


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((*EVERYTHING, "batch.recompute=true"), id="all, recomputed", marks=pytest.mark.slow),
        pytest.param(EVERYTHING, id="all, some prompts shared", marks=pytest.mark.full),
        pytest.param((*ADAPTED, "batch.recompute=true"), id="an adapter", marks=pytest.mark.slow),
        pytest.param(("epochs.count=2", "batch.recompute=true"), id="two epochs", marks=pytest.mark.slow),
    ],
)
def test_a_packed_step_equals_a_padded_step(
    more: tuple[str, ...], tiny_model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases: critic, reference and anchor; recomputed activations, for which no prompt is shared; an adapter."""
    packed_flags: list[bool] = []

    def record_packed(inner: nn.Module, batch: TrainBatch, *places: Tensor) -> Tensor:
        packed_flags.append(batch.packed)
        return token_states(inner, batch, *places)

    for module in (policy_module, value_module):
        monkeypatch.setattr(module, "token_states", record_packed)
    padded, padded_passes = trained_weights(tiny_model_path, *more), len(packed_flags)
    packed = trained_weights(tiny_model_path, *more, *PACKED)
    assert (
        not any(packed_flags[:padded_passes])
        and all(packed_flags[padded_passes:])
        and len(packed_flags) > padded_passes > 0
    )
    # Adam divides by the gradient's size, so compare weights loosely against a step of 3e-3.
    assert all(torch.allclose(packed[name], padded[name], atol=2e-5) for name in padded)


def test_a_run_whose_model_cannot_pack_equals_the_padded_run_bit_for_bit(
    tiny_model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes are cut as for padded rows. Packed rows would be cut elsewhere."""
    monkeypatch.setattr(trials, "packs_rows", lambda model, dtype: False)
    limit = "batch.micro_tokens=40"
    padded, packed = (
        trained_weights(tiny_model_path, limit),
        trained_weights(tiny_model_path, limit, "batch.packed=true"),
    )
    assert all(torch.equal(packed[name], padded[name]) for name in padded)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread, because a forked child has none of its parent's worker threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("ranks", "strategy", "more"),
    [
        pytest.param(2, "ddp", ("batch.recompute=true",), marks=pytest.mark.full, id="2, ddp"),
        pytest.param(2, "fsdp2", (), marks=pytest.mark.full, id="2, fsdp2, some prompts shared"),
        pytest.param(2, "fsdp2", (*EVERYTHING, "batch.recompute=true"), marks=pytest.mark.slow, id="2, fsdp2, all"),
        pytest.param(2, "ddp", EVERYTHING, marks=pytest.mark.full, id="2, ddp, all"),
        pytest.param(4, "ddp", (*EVERYTHING, "batch.recompute=true"), marks=pytest.mark.full, id="4, ddp"),
        pytest.param(4, "fsdp2", (*EVERYTHING, "batch.recompute=true"), marks=pytest.mark.full, id="4, fsdp2"),
    ],
)
def test_ranks_with_packed_rows_train_as_one_with_padded_rows(
    ranks: int, strategy: str, more: tuple[str, ...], tiny_model_path: str, tmp_path: Path, one_thread: None
) -> None:
    """Ranks have unequal rows and tokens, so some need blank passes to make as many passes as the others."""
    test_ranks.fit(tiny_model_path, tmp_path / "one", 1, overrides=more)

    def work(rank: int) -> str:
        module = test_ranks.fit(
            tiny_model_path, tmp_path / "several", ranks, overrides=[*more, *PACKED], strategy=strategy
        )
        assert module.policy.packs
        return weights(module) if strategy == "fsdp2" else test_ranks.fingerprint(module)

    results = test_ranks.on_ranks(ranks, work)
    assert len(set(results)) == 1 and len(results[0]) == 64, results
    test_ranks.check_same_curve(read_journal(tmp_path / "one"), read_journal(tmp_path / "several"), steps=4)
