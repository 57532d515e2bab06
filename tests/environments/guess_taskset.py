"""A verifiers taskset as a user would write it: guess a number in five turns. Nothing here imports this project."""

from __future__ import annotations

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class GuessData(vf.TaskData):
    answer: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def found(self, task: GuessData, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(task.answer))

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class GuessConfig(vf.TasksetConfig):
    largest: int = 100
    """The largest number."""


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self) -> Iterator[GuessTask]:
        for index in range(10):
            data = GuessData(
                system_prompt="Answer with a number only.",
                prompt=f"Guess a number from 1 to {self.config.largest}.",
                answer=random.Random(index).randint(1, self.config.largest),
            )
            yield GuessTask(data, self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=5)


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task: GuessTask, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != str(task.data.answer):
                guess = int(segment.last_reply)
                segment = await interaction.turn("Higher." if guess < task.data.answer else "Lower.")
