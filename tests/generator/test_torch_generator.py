"""Tests of the in-process generator: exact log-probabilities, independent of scheduling, resumable at any token."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.base import FinishedRollout, GroupRequest
from lightning_scalerl.generator.torch.generator import TorchGenerator, sample_tokens
from lightning_scalerl.model.head import check_head
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.rollouts.rollout import Rollout
from tests.generator.sampling import with_sampling
from tests.generator.turns import one_row

FP32 = Precision("fp32", True, True)
STOP = 14


def requests(count: int = 5, completions: int = 3) -> list[GroupRequest]:
    return [
        GroupRequest(key, tuple(1 + (key * 7 + i) % 15 for i in range(2 + key % 4)), completions, (9, key))
        for key in range(count)
    ]


def generator_of(model: Any, slots: int = 4, precision: Precision = FP32, **options: Any) -> TorchGenerator:
    settings_ = {"max_prompt_tokens": 8, "max_new_tokens": 10, "stop_tokens": [STOP], **options}
    return TorchGenerator(model, precision, slots=slots, **with_sampling(**settings_))


def drain(generator: TorchGenerator) -> dict[tuple[int, int], FinishedRollout]:
    finished = {}
    while generator.in_flight:
        for entry in generator.step().finished:
            assert (entry.key, entry.index) not in finished
            finished[entry.key, entry.index] = entry
    return finished


def full_forward(model: Any, prompt: tuple[int, ...], tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities by the model's own forward pass over the whole sequence."""
    sequence = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = model(sequence).logits[0].float() / temperature
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, sequence[0, len(prompt) :, None]).squeeze(1)


@pytest.mark.parametrize("slots", [1, 4, 64])
def test_logprobs_are_those_of_a_full_forward_pass(tiny_model: Any, slots: int) -> None:
    generator = generator_of(tiny_model, slots)
    submitted = requests()
    for request in submitted:
        generator.submit(request)
    finished = drain(generator)
    assert Counter(key for key, _ in finished) == {request.key: 3 for request in submitted}
    for (key, _), entry in finished.items():
        expected = full_forward(tiny_model, submitted[key].prompt_tokens, entry.rollout.tokens)
        assert torch.allclose(torch.tensor(entry.rollout.generator_logprobs), expected, atol=1e-5)
        ended = entry.rollout.tokens[-1] == STOP
        assert entry.rollout.finish_reason == ("stop" if ended else "length")
        assert ended or len(entry.rollout.tokens) == 10
        assert STOP not in entry.rollout.tokens[:-1]


def test_scheduling_does_not_change_the_samples(tiny_model: Any) -> None:
    results = []
    for slots, order in ((1, 1), (3, -1), (50, 1)):
        generator = generator_of(tiny_model, slots)
        for request in requests()[::order]:
            generator.submit(request)
        results.append({place: entry.rollout.tokens for place, entry in drain(generator).items()})
    assert results[0] == results[1] == results[2]
    assert len({tuple(tokens) for tokens in results[0].values()}) > 5


def versions_of(model: Any, count: int) -> list[dict[str, torch.Tensor]]:
    """The model's weights, and those after each of `count` updates that are large enough to change the samples."""
    source = torch.Generator().manual_seed(1)
    weights = [{name: tensor.clone() for name, tensor in model.state_dict().items()}]
    for _ in range(count):
        weights.append({n: t + 0.05 * torch.randn(t.shape, generator=source) for n, t in weights[-1].items()})
    return weights


def recomputed_logprobs(model: Any, weights: Any, prompt: tuple[int, ...], rollout: Rollout) -> torch.Tensor:
    """Log-probability of each token by a full forward pass, without a cache, under the weights that sampled it."""
    expected_logprobs = torch.empty(len(rollout.tokens))
    for version in set(rollout.weight_versions):
        model.load_state_dict(weights[version])
        of_version = torch.tensor(rollout.weight_versions) == version
        expected_logprobs[of_version] = full_forward(model, prompt, rollout.tokens)[of_version]
    return expected_logprobs


def stale_logprobs(model: Any, weights: Any, prompt: tuple[int, ...], rollout: Rollout) -> torch.Tensor:
    """Log-probabilities with transformers' own cache, in chunks: each version continues on the cache of earlier ones.

    Sampling token t means reading the token before it, so a chunk of tokens [a, b) reads [a - 1, b - 1).
    """
    sequence = torch.tensor([[*prompt, *rollout.tokens]])
    cache = DynamicCache()
    chunks: list[torch.Tensor] = []
    for version in sorted(set(rollout.weight_versions)):
        places = [t for t, v in enumerate(rollout.weight_versions) if v == version]
        first = 0 if places[0] == 0 else len(prompt) + places[0] - 1
        model.load_state_dict(weights[version])
        with torch.no_grad():
            read = sequence[:, first : len(prompt) + places[-1]]
            logits = model(read, past_key_values=cache, use_cache=True).logits[0, -len(places) :]
        tokens = sequence[0, len(prompt) + places[0] : len(prompt) + places[-1] + 1]
        chunks.append(logits.float().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1))
    return torch.cat(chunks)


# Each example restores the model's weights, so the fixture can be shared.
@pytest.mark.slow
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    recompute=st.booleans(),
    slots=st.sampled_from([2, 4, 64]),
    swaps=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    interrupted=st.booleans(),
)
def test_logprobs_across_swaps(
    tiny_model: Any, recompute: bool, slots: int, swaps: list[int], interrupted: bool
) -> None:
    """Weights change between any two tokens. Each recorded log-probability must equal a second computation of it.

    The second computation uses the weights that sampled the token and the same cache policy. Rollouts that start after
    a change use the new weights only.
    """
    weights = versions_of(tiny_model, len(swaps))
    submitted = requests(4)
    if interrupted:
        submitted = [dataclasses.replace(request, interrupt_at=(2, 3, 4)) for request in submitted]
    try:
        generator = generator_of(tiny_model, slots, max_new_tokens=9, stop_tokens=[STOP], phrase=[3, 5])
        for request in submitted:
            generator.submit(request)
        finished = {}
        for version, steps in enumerate(swaps, start=1):
            for _ in range(steps):
                finished.update({(e.key, e.index): e.rollout for e in generator.step().finished})
            generator.publish(weights[version], version, recompute_kv=recompute)
        finished.update({place: entry.rollout for place, entry in drain(generator).items()})
        assert len(finished) == 12
        recompute_logprobs = recomputed_logprobs if recompute else stale_logprobs
        for (key, index), rollout in finished.items():
            assert rollout.weight_versions == sorted(rollout.weight_versions)
            expected = recompute_logprobs(tiny_model, weights, submitted[key].prompt_tokens, rollout)
            assert torch.allclose(torch.tensor(rollout.generator_logprobs), expected, atol=1e-5)
            assert any(rollout.forced) == (interrupted and len(rollout.tokens) > submitted[key].interrupt_at[index])
    finally:
        tiny_model.load_state_dict(weights[0])


@dataclasses.dataclass
class Pair:
    """Stop condition: the last two sampled tokens are this pair."""

    pair: tuple[int, int]
    window: int = 2

    def __call__(self, tokens: Sequence[int]) -> bool:
        return tuple(tokens[-2:]) == self.pair


def test_a_text_ends_a_completion_with_its_last_token(tiny_model: Any) -> None:
    """Tokens before the stop are the same as without it, and the slots that become free are used again."""

    def rollouts(**more: Any) -> dict[tuple[int, int], Any]:
        generator = generator_of(tiny_model, 3, max_new_tokens=9, stop_tokens=[], **more)
        for request in requests(6):
            generator.submit(request)
        return {place: entry.rollout for place, entry in drain(generator).items()}

    whole = rollouts()
    pair = next((candidate.tokens[2], candidate.tokens[3]) for candidate in whole.values())
    ended = rollouts(stop_text=Pair(pair))
    assert ended.keys() == whole.keys()
    stopped = 0
    for place, rollout in whole.items():
        at = [i for i in range(1, len(rollout.tokens)) if (rollout.tokens[i - 1], rollout.tokens[i]) == pair]
        length = at[0] + 1 if at else len(rollout.tokens)
        assert ended[place].tokens == rollout.tokens[:length]
        assert ended[place].finish_reason == ("stop" if at else "length")
        stopped += bool(at)
    assert 0 < stopped < len(whole)


@dataclasses.dataclass
class Anywhere(Pair):
    """Stop condition: the last sampled tokens contain this pair, as with a stop text that spans several tokens."""

    window: int = 9

    def __call__(self, tokens: Sequence[int]) -> bool:
        return self.pair in pairwise(tokens)


@pytest.mark.parametrize("stop_text", [Pair((3, 5)), Anywhere((3, 5))])
def test_a_forced_phrase_does_not_end_a_completion(tiny_model: Any, stop_text: Pair) -> None:
    """A phrase that contains the pair stops neither at its last token nor at the tokens sampled after it."""
    whole = generator_of(tiny_model, 8, max_new_tokens=9, stop_tokens=[], phrase=[3, 5])
    ended = generator_of(tiny_model, 8, max_new_tokens=9, stop_tokens=[], phrase=[3, 5], stop_text=stop_text)
    for generator in (whole, ended):
        generator.submit(dataclasses.replace(requests(1)[0], interrupt_at=(2, 2, 2)))
    expected = drain(whole)
    for place, entry in drain(ended).items():
        assert entry.rollout.tokens[2:4] == [3, 5] and entry.rollout.tokens == expected[place].rollout.tokens


def test_stale_and_recomputed_caches_differ(tiny_model: Any) -> None:
    """If they did not differ, `test_logprobs_across_swaps` could not distinguish them."""
    weights = versions_of(tiny_model, 1)
    recorded = []
    for recompute in (False, True):
        generator = generator_of(tiny_model, 64, stop_tokens=[])
        for request in requests(2):
            generator.submit(request)
        for _ in range(3):
            generator.step()
        generator.publish(weights[1], 1, recompute_kv=recompute)
        report = generator.step()
        # Recomputed tokens are counted: prompts of 2 and 3 tokens, each with 3 rollouts of two sampled tokens.
        assert report.prefill_tokens == (3 * (2 + 2) + 3 * (3 + 2) if recompute else 0)
        recorded.append({place: e.rollout.generator_logprobs[3] for place, e in drain(generator).items()})
    assert max(abs(recorded[0][place] - recorded[1][place]) for place in recorded[0]) > 1e-3


def test_interruption_forces_the_phrase_once_and_only_while_thinking(tiny_model: Any) -> None:
    """Tokens before the point are the same as without an interruption; after the phrase, sampling continues."""
    end, phrase = 7, [4, 9, 7]
    submitted = [dataclasses.replace(request, interrupt_at=(1, 3, 5)) for request in requests(12)]

    def run(requests_: list[GroupRequest]) -> dict[tuple[int, int], Rollout]:
        generator = generator_of(
            tiny_model, 5, max_new_tokens=12, phrase=phrase, thinking_ended=lambda tokens: end in tokens
        )
        for request in requests_:
            generator.submit(request)
        return {place: entry.rollout for place, entry in drain(generator).items()}

    free, controlled = run(requests(12)), run(submitted)
    cases = set()
    for place, rollout in controlled.items():
        point, plain = submitted[place[0]].interrupt_at[place[1]], free[place]
        if end in plain.tokens[:point] or len(plain.tokens) <= point:
            assert (rollout.tokens, rollout.forced) == (plain.tokens, plain.forced)
            cases.add("left alone")
            continue
        assert rollout.tokens[:point] == plain.tokens[:point]
        assert rollout.tokens[point : point + 3] == phrase
        assert rollout.forced == [point <= t < point + 3 for t in range(len(rollout.tokens))]
        expected = full_forward(tiny_model, submitted[place[0]].prompt_tokens, rollout.tokens)
        assert torch.allclose(torch.tensor(rollout.generator_logprobs), expected, atol=1e-5)
        cases.add("interrupted")
    assert cases == {"left alone", "interrupted"}


@pytest.mark.parametrize(
    "precision", [FP32, pytest.param(Precision("bf16", True, True), marks=pytest.mark.full)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("recompute", [False, True], ids=["stale", "recompute"])
@pytest.mark.parametrize("steps", [0, 4, 19, *(pytest.param(late, marks=pytest.mark.slow) for late in (1, 9, 14, 60))])
def test_the_generator_resumes_between_any_two_tokens_bit_for_bit(
    tiny_model: Any, steps: int, recompute: bool, precision: Precision
) -> None:
    """Old and new weights in flight, stale or recomputed caches, forced phrases, unstarted rollouts, or nothing."""
    weights = versions_of(tiny_model, 2)
    submitted = [dataclasses.replace(request, interrupt_at=(1, 4, 6)) for request in requests(8)]

    def fresh() -> TorchGenerator:
        return generator_of(tiny_model, slots=4, precision=precision, phrase=[3, 5])

    def begin() -> tuple[TorchGenerator, dict[tuple[int, int], FinishedRollout]]:
        """Submit six groups; publish new weights after half of the steps and again at the end."""
        generator, early = fresh(), {}
        for request in submitted[:6]:
            generator.submit(request)
        for number in range(steps):
            if number == steps // 2:
                generator.publish(weights[1], 1, recompute_kv=recompute)
            early.update({(e.key, e.index): e for e in generator.step().finished})
        generator.publish(weights[2], 2, recompute_kv=recompute)
        return generator, early

    def end(generator: TorchGenerator) -> list[Any]:
        """Finish all groups, then sample two more with the newest weights; return everything."""
        first = generator.step()
        remaining = {(e.key, e.index): e for e in first.finished} | drain(generator)
        for request in submitted[6:]:
            generator.submit(request)
        return [first, remaining, drain(generator)]

    whole, early = begin()
    uninterrupted = end(whole)
    halted, early_again = begin()
    state = pickle.loads(pickle.dumps(halted.state_dict()))
    with torch.no_grad():
        tiny_model.get_output_embeddings().weight.mul_(
            3.0
        )  # a resumed generator must restore its weights, not copy the model's
    resumed = fresh()
    resumed.load_state_dict(state)
    assert early == early_again
    assert end(resumed) == uninterrupted


@settings(max_examples=30)
@given(seed=st.integers(0, 1000))
def test_sampling_inverts_the_cumulative_distribution(seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 9, generator=source) * 4
    uniform = torch.rand(6, generator=source, dtype=torch.float64)
    uniform[0], uniform[1] = 0.0, 1 - 1e-16
    tokens, all_logprobs = sample_tokens(logits, uniform, temperature=0.7)
    logprobs = all_logprobs.gather(1, tokens[:, None]).squeeze(1)
    probabilities = (logits / 0.7).double().softmax(-1)
    for row, token in enumerate(tokens.tolist()):
        below = float(probabilities[row, :token].sum())
        assert below - 1e-6 <= float(uniform[row]) <= below + float(probabilities[row, token]) + 1e-6
    assert torch.allclose(logprobs, probabilities.log().gather(1, tokens[:, None]).squeeze(1).float(), atol=1e-4)


def test_frequencies_are_the_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    uniform = torch.from_numpy(__import__("numpy").random.default_rng(0).random(20000))
    tokens, _ = sample_tokens(logits.expand(20000, -1), uniform, 1.0)
    shares = torch.bincount(tokens, minlength=4) / 20000
    assert torch.allclose(shares, logits.softmax(-1), atol=0.012)


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma2", "mistral"])
def test_other_architectures(family: str) -> None:
    """Tied embeddings, biases, learned positions and soft-capped logits are exact as well."""
    import transformers as tf

    torch.manual_seed(0)
    common = dict(vocab_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
    if family == "qwen2":
        model: Any = tf.Qwen2ForCausalLM(tf.Qwen2Config(**common, num_key_value_heads=1, tie_word_embeddings=True))
    elif family == "gpt2":
        model = tf.GPT2LMHeadModel(
            tf.GPT2Config(vocab_size=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0)
        )
    elif family == "mistral":
        model = tf.MistralForCausalLM(tf.MistralConfig(**common, num_key_value_heads=1, sliding_window=None))
    else:
        model = tf.Gemma2ForCausalLM(
            tf.Gemma2Config(**common, num_key_value_heads=1, head_dim=16, final_logit_softcapping=2.0)
        )
    model = model.float().eval()
    check_head(model)
    generator = generator_of(model, slots=3)
    # Every second prompt has two turns, with two tokens of an environment between them.
    for request in requests(4):
        generator.submit(dataclasses.replace(request, waits=request.key % 2 == 1, turn_tokens=4))
    policy = Policy(model, FP32)
    finished = []
    while generator.in_flight:
        report = generator.step()
        finished += report.finished
        for waiting_rollout in report.waiting:
            if any(waiting_rollout.rollout.inserted):
                generator.end(waiting_rollout.key, waiting_rollout.index)
            else:
                generator.insert(waiting_rollout.key, waiting_rollout.index, [2, 5])
    for entry in finished:
        prompt = requests(4)[entry.key].prompt_tokens
        sample_all = ~torch.tensor(entry.rollout.inserted)
        recorded = torch.tensor(entry.rollout.generator_logprobs)[sample_all]
        assert torch.allclose(recorded, full_forward(model, prompt, entry.rollout.tokens)[sample_all], atol=2e-5)
        assert torch.allclose(recorded, policy(one_row(prompt, entry.rollout))[0][0].detach()[sample_all], atol=2e-5)
    assert sum(any(entry.rollout.inserted) for entry in finished) == 6


def test_short_sliding_window_is_refused() -> None:
    import transformers as tf

    model = tf.MistralForCausalLM(
        tf.MistralConfig(
            vocab_size=16,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=32,
            sliding_window=5,
        )
    )
    with pytest.raises(ConfigurationError, match="window of 5 tokens"):
        generator_of(model)


@pytest.mark.parametrize("head", [True, False])
def test_logits_of_an_fp32_head_are_exact(tiny_model: Any, head: bool) -> None:
    """With the head in FP32, logits are exact for the hidden states; with BF16 they are rounded."""
    precision = Precision("bf16", head, head)
    generator = generator_of(tiny_model, precision=precision)
    hidden = torch.randn(50, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = torch.nn.functional.linear(hidden.float(), tiny_model.get_output_embeddings().weight)
    gap = float((generator.policy.logits(hidden) - exact).abs().max().detach())
    assert gap < 1e-5 if head else gap > 1e-4
    assert generator.policy.model.dtype == torch.bfloat16


def test_prompt_too_long_is_refused(tiny_model: Any) -> None:
    with pytest.raises(ConfigurationError, match="9 tokens, allowed are 1 to 8"):
        generator_of(tiny_model).submit(GroupRequest(0, tuple(range(1, 10)), 1, (0,)))


def test_the_cache_grows_only_as_needed(tiny_model: Any) -> None:
    generator = generator_of(tiny_model, slots=200, max_new_tokens=1000)
    for request in requests(2):
        generator.submit(dataclasses.replace(request, max_new_tokens=300))
    sizes, longest = set(), 0
    while generator.in_flight:
        generator.step()
        keys = generator._slots.cache.layers[0].keys
        sizes.add((keys.shape[0], keys.shape[2]))
        longest = max(longest, generator._slots.cache.width)
    rows, width = max(sizes)
    assert rows <= 8 and width <= max(256, 2 * longest), f"the maximum would be 200 rows of 1008 tokens: {sizes}"


def test_growing_the_cache_does_not_change_the_samples(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def sample_all() -> dict[tuple[int, int], Rollout]:
        generator = generator_of(tiny_model, slots=3)
        for request in requests():
            generator.submit(request)
        return {place: entry.rollout for place, entry in drain(generator).items()}

    whole = sample_all()
    monkeypatch.setattr("lightning_scalerl.generator.torch.slot_cache.BLOCK", 1)
    assert sample_all() == whole


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"slots": 900, "cache_gib": 0.001},
            r"900 sequences of 18 tokens take .* cache_gib allows 0.001 GiB; .*=\d+ fit",
        ),
        ({"slots": 10, "cache_gib": 1e-9}, "not one of them fits: lower context.max_new_tokens"),
        ({"slots": 10**9}, r"free are [\d.]+ GiB; generator.slots=\d+ fit"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused_with_the_size_that_does(
    tiny_model: Any, limits: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        generator_of(tiny_model, **limits)


def test_rollouts_in_flight_are_paused_by_aside(tiny_model: Any) -> None:
    uninterrupted, disturbed = (generator_of(tiny_model, slots=4) for _ in range(2))
    other = {name: 1.1 * tensor for name, tensor in tiny_model.state_dict().items()}
    for generator in (uninterrupted, disturbed):
        for request in requests():
            generator.submit(request)
        for _ in range(3):
            generator.step()
    with disturbed.aside():
        assert disturbed.in_flight == 0
        disturbed.publish(other, 5)
        disturbed.submit(GroupRequest(0, (1, 2), 6, (4,)))
        assert len(drain(disturbed)) == 6
    assert disturbed.version == 0
    assert drain(disturbed) == drain(uninterrupted)
