"""Several engines that are used like a single generator. The fleet starts and watches them, and replaces lost ones.

It has three parts: `Ledger` tracks which engine has which rollout, without I/O. `Engines` keeps the engines alive.
`WeightStore` holds the published weights. Every rollout is returned once, even if its engine is lost: the next engine
with room samples unfinished rollouts again, with the same random numbers. An engine that starts gets the last published
weights before any prompt.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.base import (
    FinishedRollout,
    GroupRequest,
    StepReport,
    WaitingRollout,
    zero_counts,
)
from lightning_scalerl.generator.fleet.addresses import addresses_of, blueprint_for, visible_devices
from lightning_scalerl.generator.fleet.engines import POLL_S, Engine, Engines, GeneratorLostError
from lightning_scalerl.generator.fleet.ledger import Ledger
from lightning_scalerl.generator.fleet.server import Blueprint
from lightning_scalerl.generator.fleet.transport import ChildSettings
from lightning_scalerl.generator.fleet.weights import WeightStore
from lightning_scalerl.generator.insertion import check_answer
from lightning_scalerl.model.head import text_config

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Work:
    """Work of one engine since the run's start, across restarts: seconds in which it sampled, and tokens decoded."""

    busy_s: float = 0.0
    tokens: int = 0


def _one_at_a_time(method: Callable[Concatenate[Fleet, P], T]) -> Callable[Concatenate[Fleet, P], T]:
    """Lock a method: the training thread and the rollout-collecting thread must not read a connection concurrently."""

    @wraps(method)
    def locked(self: Fleet, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


class Fleet:
    """Several engines that are used like a single generator. Threads may share a fleet.

    Args:
        factory: builds a generator from a model and `arguments`, such as `TorchGenerator` with its slots.
        model: the trainer's model; its class, configuration and initial weights are used.
        arguments: further arguments of the factory; they are pickled for the engines. `precision` among them sets the
            dtypes in which weights are published.
        generators: number of child processes if `engines` is empty.
        silence_s: seconds without any message, not even a heartbeat, after which an engine is replaced.
        start_s: seconds that an engine may take to start.
        devices: CUDA_VISIBLE_DEVICES for the processes, assigned in turn; empty to share this process's device.
        engines: addresses of engines (`addresses`).
        bucket_mib: size in MiB of the pieces in which weights are copied and sent.
        tensor_parallel: number of devices per engine.

    Raises:
        ConfigurationError: a part of the generator cannot be pickled, an address cannot be parsed, or an engine
            reports at its start that it is unusable.
        GeneratorLostError: an engine cannot be started.
    """

    def __init__(
        self,
        factory: Callable[..., Any],
        model: nn.Module,
        arguments: dict[str, Any],
        *,
        generators: int,
        silence_s: float,
        start_s: float,
        devices: Sequence[str] = (),
        engines: Sequence[str] = (),
        bucket_mib: float = 64.0,
        tensor_parallel: int = 1,
    ) -> None:
        device = next(model.parameters()).device
        # A child with its own CUDA_VISIBLE_DEVICES sees its device as number 0, so only the device's type is passed on.
        device_name = device.type if devices else str(device)
        blueprint = _check_blueprint(Blueprint(factory, arguments, type(model), model.config, device_name), model)
        addresses = addresses_of(engines, generators, tensor_parallel)
        # Values of CUDA_VISIBLE_DEVICES, which the engines on this node get in turn.
        devices = visible_devices(devices, tensor_parallel, sum(address.kind == "local" for address in addresses))
        blueprints = [(address, blueprint_for(address, blueprint, tensor_parallel, start_s)) for address in addresses]
        # True while the ledger is being swapped, saved or restored. No group is sent to an engine then.
        self._dispatch_paused = False
        self._asides = 0
        self._lock = threading.RLock()
        self._ledger = Ledger()
        self._vocabulary = int(text_config(model).vocab_size)
        self._computed = zero_counts()
        self._lost_tokens = 0
        self._closed: dict[str, Any] | None = None
        self.can_score = False
        self.busy_s = 0.0
        self.publish_s = 0.0
        self.work = [Work() for _ in blueprints]
        self._store = WeightStore(model, arguments.get("precision"), bucket_mib)
        settings = ChildSettings(self._store.folder, silence_s, start_s, threading.Event())
        self._engines = Engines(blueprints, settings, devices, self)
        self.engine_states = self._engines.engine_states
        try:
            self._engines.start()
        except BaseException:
            self._end()
            raise

    # --- the protocol of a generator ---------------------------------------------------------------------

    @property
    def generators(self) -> int:
        """Number of engines in the fleet."""
        return len(self._engines)

    @property
    def lost(self) -> int:
        """Number of engine losses so far."""
        return self._engines.lost

    @property
    def pids(self) -> list[int]:
        """Current process ids of the engines."""
        return [engine.transport.pid for engine in self._engines]

    @property
    def version(self) -> int:
        """Version of the weights published last; while `publish` runs, some engines may still have earlier weights."""
        return self._store.current.version

    @property
    def digest(self) -> str:
        """Digest of the current weights as published: it depends on dtypes and order."""
        return self._store.current.digest

    @property
    @_one_at_a_time
    def in_flight(self) -> int:
        """Number of rollouts submitted and not yet returned."""
        return self._ledger.in_flight

    @property
    @_one_at_a_time
    def free_slots(self) -> int:
        """Number of further rollouts that could start at once on the engines that are up."""
        room = sum(engine.slots - self._ledger.unfinished(engine) for engine in self._engines.up)
        return max(0, room - self._ledger.unassigned)

    @_one_at_a_time
    def submit(self, request: GroupRequest) -> None:
        """Queue a group. Once an engine has room, the whole group goes to the engine with the most free slots."""
        self._ledger.submit(request)
        self._dispatch()

    @property
    @_one_at_a_time
    def idle(self) -> bool:
        """True if all rollouts in flight wait for an insertion, and all these waits have been reported."""
        waiting = len(self._ledger.all_waiting())
        return self._ledger.in_flight == waiting and not self._ledger.has_report

    @property
    @_one_at_a_time
    def waiting(self) -> list[WaitingRollout]:
        """All rollouts that wait for `insert` or `end`. Rollouts of a lost engine are sampled again and do not wait."""
        return self._ledger.all_waiting()

    @_one_at_a_time
    def insert(self, key: int, index: int, tokens: Sequence[int]) -> None:
        """Insert the tokens of an environment's answer into a waiting rollout and continue it.

        Raises:
            KeyError: the rollout does not wait, or no longer does because its engine was lost.
            ValueError: a token is not in the vocabulary, or there is no room for the tokens.
        """
        check_answer(tokens, self._vocabulary)
        engine, name = self._ledger.resume(key, index, tokens)
        engine.transport.send("insert", name, index, tuple(tokens))

    @_one_at_a_time
    def end(self, key: int, index: int, truncated: bool = False) -> None:
        """End a waiting rollout; a later step reports it as finished.

        Raises:
            KeyError: the rollout does not wait, or no longer does because its engine was lost.
        """
        engine, name = self._ledger.resume(key, index)
        engine.transport.send("end", name, index, truncated)

    @_one_at_a_time
    def restart(self, key: int, index: int) -> None:
        """Forget the tokens of a waiting rollout and sample it again from its prompt, with the same random numbers.

        Raises:
            KeyError: the rollout does not wait, or no longer does because its engine was lost.
        """
        engine, name = self._ledger.resume(key, index)
        engine.transport.send("restart", name, index)

    def wait(self, seconds: float) -> None:
        """Wait until an engine has sent a message, at most `seconds` seconds."""
        self._engines.wait(seconds)

    def step(self) -> StepReport:
        """Return the rollouts that have ended or begun to wait; if there is none, wait up to `POLL_S` for one."""
        if not self._ledger.has_report:
            self.wait(POLL_S)
        return self.collect()

    @_one_at_a_time
    def collect(self) -> StepReport:
        """Return at once the rollouts that have ended or begun to wait, and the work done since the last report."""
        self._engines.handle_messages()
        ended, waiting = self._ledger.collect(), self._ledger.collect_waiting()
        report = replace(StepReport(ended, *self._computed), lost_tokens=self._lost_tokens, waiting=waiting)
        self._computed, self._lost_tokens = zero_counts(), 0
        return report

    @_one_at_a_time
    def publish(self, weights: dict[str, Tensor], version: int, recompute_kv: bool = False) -> None:
        """Send weights to all engines and wait until each has them; an engine that does not answer is replaced."""
        began = time.monotonic()
        # Store the weights before sending messages, so that an engine that comes up meanwhile gets the new ones.
        number = self._store.publish(weights, version).number
        engines = self._engines.up
        for engine in engines:
            engine.transport.send("publish", self._store.current, recompute_kv)
        self._engines.handle_until(
            lambda: all(engine.acknowledged == number for engine in engines if engine in self._engines)
        )
        # Keep old weight files while a starting engine may read one, and while rollouts are paused by `aside`, because
        # they resume with the old weights.
        if not self._asides and all(engine.ready for engine in self._engines):
            self._store.forget_outdated()
        self.publish_s = time.monotonic() - began

    @_one_at_a_time
    def score(self, prompt_tokens: Sequence[int], tokens: Sequence[int]) -> Tensor | None:
        """Return log-probabilities (T,) of a completion under the weights in use, from any engine that is up.

        Returns None if no engine is up, or the engine is lost before it answers: its replacement may take minutes to
        start, and the caller should not wait for it.
        """
        self._engines.handle_messages()
        engine = next(iter(self._engines.up), None)
        reply = None if engine is None else self._engines.ask(engine, "score", tuple(prompt_tokens), tuple(tokens))
        return None if reply is None else torch.tensor(reply, dtype=torch.float32)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Pause the rollouts in flight while the context is open, for other work such as an evaluation.

        At the end of the context they resume with the weights they had before.
        """
        with self._lock:
            self._engines.handle_messages()
            self._dispatch_paused = True
            for engine in self._engines.up:
                self._engines.ask(engine, "aside")
                engine.aside = True
            self._asides += 1
            saved = (self._ledger, self._computed, self._store.current, self.busy_s)
            self._ledger, self._computed = Ledger(self._ledger.names), zero_counts()
            self._dispatch_paused = False
        try:
            yield
        finally:
            with self._lock:
                self._dispatch_paused = True
                self._ledger, self._computed, published, self.busy_s = saved
                self._store.make_current(published)
                self._asides -= 1
                returned = []
                for engine in self._engines.up:
                    if engine.aside:
                        engine.aside = False
                        self._engines.ask(engine, "back")
                        returned.append(engine)
                    else:  # the engine was started meanwhile, with the weights of that time
                        engine.transport.send("publish", self._store.current, False)
                self._ledger.requeue_others(returned)
                self._dispatch_paused = False
                self._dispatch()

    @_one_at_a_time
    def close(self) -> None:
        """End the engines; the state of everything in flight is kept for `state_dict`."""
        if self._closed is None:
            # An error in closing must not hide the error that ended the run.
            try:
                with suppress(GeneratorLostError, ConfigurationError):
                    self._closed = self.state_dict()
            finally:
                self._end()

    @_one_at_a_time
    def state_dict(self) -> dict[str, Any]:
        """Return the state of everything in flight, one state per engine, and one copy of the weights."""
        if self._closed is not None:
            return self._closed
        # Send no group meanwhile: an engine that has given its state could get a group that this state lacks. An engine
        # may also finish a rollout after it has given its state. The checkpoint then contains this rollout twice, as
        # ended and as running. After a restore it is sampled again, and the ledger discards the second copy.
        self._dispatch_paused = True
        try:
            states = {engine: self._engines.ask(engine, "state") for engine in self._engines.up}
        finally:
            self._dispatch_paused = False
        generator_states: list[Any] = [None] * len(self.work)
        for engine in self._engines.up:  # an engine lost meanwhile has no state
            generator_states[engine.number] = states.get(engine)
        state = {
            **self._ledger.state_dict(lambda engine: engine.number),
            "version": self.version,
            "weights": self._store.current.read(),
            "generators": generator_states,
        }
        self._dispatch()
        return state

    @_one_at_a_time
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore everything in flight; rollouts whose engine saved no state or no longer exists are sampled again."""
        self._ledger.load_state_dict(state)
        # Send no group to an engine until it is known which rollouts the engines have.
        self._dispatch_paused = True
        try:
            # Publish before loading the states, which contain no weights: an engine resumes with the weights it has.
            self.publish(state["weights"], state["version"])
            for engine in self._engines.up:
                engine_state = dict(enumerate(state["generators"])).get(engine.number)
                if engine_state is None:
                    continue
                waiting = self._engines.ask(engine, "load", engine_state)
                for name, _, _, number in state["open"]:
                    if number == engine.number and engine in self._engines:
                        self._ledger.adopt(name, engine)
                for rollout in waiting or ():
                    self._record_waiting(rollout, engine, report=False)
        finally:
            self._dispatch_paused = False
        self._dispatch()

    # --- events of the engines (`Listener`) --------------------------------------------------------------

    def on_ready(self, engine: Engine, slots: int, can_score: bool) -> None:
        """Send the current weights to an engine that has come up, before any prompt."""
        self.can_score = can_score
        engine.transport.send("publish", self._store.current, False)
        self._dispatch()

    def on_work(
        self,
        engine: Engine,
        finished: Sequence[FinishedRollout],
        computed: Sequence[int],
        busy_s: float,
        sampled: int,
        waiting: Sequence[WaitingRollout],
    ) -> None:
        """Record an engine's finished rollouts, its computed work, and its rollouts that wait for an insertion."""
        self.busy_s += busy_s
        if not engine.aside:  # while rollouts are paused, `sampled` counts those of the evaluation
            engine.sampled = sampled
        if not self._asides:
            work = self.work[engine.number]
            work.busy_s += busy_s
            work.tokens += StepReport((), *computed).decoded_tokens
        self._computed = [total + increment for total, increment in zip(self._computed, computed, strict=True)]
        for ended in finished:
            if self._ledger.record_finished(ended):
                self._engines.reset_losses()
        for rollout in waiting:
            self._record_waiting(rollout, engine)
        self._dispatch()

    def _record_waiting(self, rollout: WaitingRollout, engine: Engine, report: bool = True) -> None:
        """Record a rollout that waits; end it in its engine if it was already returned as finished."""
        if not self._ledger.record_waiting(rollout, engine, report):
            engine.transport.send("drop", rollout.key, rollout.index)

    def on_published(self, engine: Engine, number: int, digest: str) -> None:
        """Check by a digest that an engine has the weights that were sent to it.

        Raises:
            GeneratorLostError: the digests differ.
        """
        sent = self._store.digests[number]
        if digest != sent:
            raise GeneratorLostError(
                f"generator: {engine} holds weights with the digest {digest}, and those that it was sent have {sent}: "
                "they were damaged on the way"
            )
        engine.acknowledged = number

    def on_loss(self, engine: Engine) -> None:
        """Queue a lost engine's unfinished rollouts for other engines."""
        self._lost_tokens += engine.sampled
        self._ledger.requeue_others(list(self._engines))
        self._dispatch()

    def _dispatch(self) -> None:
        """Send groups without an engine to the engines with most free slots."""
        if not self._dispatch_paused:
            for engine, request in self._ledger.assign({engine: engine.slots for engine in self._engines.up}):
                engine.transport.send("submit", request)

    def _end(self) -> None:
        self._engines.end()
        self._store.close()


def _check_blueprint(blueprint: Blueprint, model: nn.Module) -> Blueprint:
    """Return the blueprint after the generator class has checked the trainer's model, if the class has a check.

    The check needs the trainer's exact weights: an engine's weights are rounded too much for it.
    """
    check = getattr(getattr(blueprint.factory, "func", blueprint.factory), "check_model", None)
    if check is not None:
        check(model, **blueprint.arguments)
    return _check_picklable(blueprint)


def _check_picklable(blueprint: Blueprint) -> Blueprint:
    """Return the blueprint after checking that another process can unpickle it."""
    parts = (blueprint.model_class, type(blueprint.config), getattr(blueprint.factory, "func", blueprint.factory))
    remedy = (
        "models, generators and tokenizers of your own must be importable from a module that is no script, or use "
        "driver=virtual"
    )
    script = next((part for part in parts if getattr(part, "__module__", "") == "__main__"), None)
    if script is not None:
        raise ConfigurationError(f"driver: {script.__name__} is known to this script alone; {remedy}")
    try:
        pickle.dumps(blueprint)
    except Exception as error:
        raise ConfigurationError(
            f"driver: what the generator is made of cannot be sent to another process ({error}); {remedy}"
        ) from error
    return blueprint
