"""Tests of packing rollouts for a checkpoint: few tensors, and every value is restored exactly."""

from __future__ import annotations

import io

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_scalerl.rollouts.rollout import Rollout, Source, packed, unpack_rollouts


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    n = draw(st.integers(0, 6))

    def draw_list(values: st.SearchStrategy[object]) -> list[object]:
        return draw(st.lists(values, min_size=n, max_size=n))

    finite = st.floats(allow_nan=False)
    return Rollout(
        draw_list(st.integers(0, 2**31 - 1)),  # type: ignore[arg-type]
        draw_list(finite),  # type: ignore[arg-type]
        draw_list(st.integers(0, 10**6)),  # type: ignore[arg-type]
        draw_list(st.sampled_from(Source)),  # type: ignore[arg-type]
        draw(st.sampled_from(["stop", "length"])),
        draw(finite),
        draw(st.booleans()),
    )


@given(st.lists(rollouts(), max_size=5))
def test_packing_is_lossless(originals: list[Rollout]) -> None:
    file = io.BytesIO()
    torch.save(packed(originals), file)
    file.seek(0)
    back = unpack_rollouts(torch.load(file, weights_only=True))
    assert back == originals
    assert all(type(token) is int for rollout in back for token in rollout.tokens)


def test_packing_copies_the_values() -> None:
    rollout = Rollout([1, 2], [-0.5, -1.0], [0, 1], [False, True], "stop")
    state = packed([rollout])
    rollout.tokens[0] = 9
    assert unpack_rollouts(state)[0].tokens == [1, 2]
