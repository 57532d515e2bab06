"""Rollouts in a checkpoint: few tensors, and every value as it was."""

from __future__ import annotations

import io

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_scalerl.rollouts.rollout import Rollout, Source, packed, unpacked


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    n = draw(st.integers(0, 6))

    def each(values: st.SearchStrategy[object]) -> list[object]:
        return draw(st.lists(values, min_size=n, max_size=n))

    finite = st.floats(allow_nan=False)
    return Rollout(
        each(st.integers(0, 2**31 - 1)),  # type: ignore[arg-type]
        each(finite),  # type: ignore[arg-type]
        each(st.integers(0, 10**6)),  # type: ignore[arg-type]
        each(st.sampled_from(Source)),  # type: ignore[arg-type]
        draw(st.sampled_from(["stop", "length"])),
        draw(finite),
        draw(st.booleans()),
    )


@given(st.lists(rollouts(), max_size=5))
def test_what_is_packed_comes_back(given_: list[Rollout]) -> None:
    file = io.BytesIO()
    torch.save(packed(given_), file)
    file.seek(0)
    back = unpacked(torch.load(file, weights_only=True))
    assert back == given_
    assert all(type(token) is int for rollout in back for token in rollout.tokens)


def test_it_is_a_copy() -> None:
    rollout = Rollout([1, 2], [-0.5, -1.0], [0, 1], [False, True], "stop")
    state = packed([rollout])
    rollout.tokens[0] = 9
    assert unpacked(state)[0].tokens == [1, 2]
