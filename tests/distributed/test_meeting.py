"""Where ranks meet, nobody else can listen in from another machine; and what a stranger sends there is not run."""

from __future__ import annotations

import io
import os
import pickle
import socket
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback

from lightning_scalerl.distributed import meeting
from lightning_scalerl.distributed.meeting import NotPlainError, decode, encode
from lightning_scalerl.distributed.ranks import LeaderFailedError, Ranks
from lightning_scalerl.rollouts.rollout import TrainBatch
from tests.axes.test_contract import batch_of
from tests.distributed.test_ranks import fit, on_ranks
from tests.examples import every, examples


def listening() -> set[tuple[str, int]]:
    """Addresses and ports at which this process listens."""
    own = {link for each in Path("/proc/self/fd").iterdir() if (link := _target(each)).startswith("socket:[")}
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in own:
                address, port = local.split(":")
                # Words of four bytes, each as the machine (little-endian) has it.
                words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""  # the descriptor of the listing itself


class Listens(Callback):
    """Notes in the middle of training at which addresses its process listens; what its parent left it aside."""

    def __init__(self) -> None:
        self.before = listening()
        self.at: set[str] = set()
        self.ports: set[int] = set()

    def on_train_batch_end(self, *_: Any) -> None:
        own = listening() - self.before
        self.at |= {address for address, _ in own}
        self.ports |= {port for _, port in own}


@pytest.mark.slow
@pytest.mark.parametrize("named", every(2, [None, "localhost"], pytest.mark.full))
def test_on_one_node_nothing_listens_to_other_machines(tiny_model_path: str, tmp_path: Path, named: str | None) -> None:
    """Rank 0's store among it; ranks listen for each other (gloo) as well."""

    def work(rank: int) -> str:
        store = int(os.environ["MASTER_PORT"])
        del os.environ["MASTER_ADDR"]
        if named is not None:
            os.environ["MASTER_ADDR"] = named
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        seen = Listens()
        fit(tiny_model_path, tmp_path, 2, steps=2, callbacks=[seen])
        assert (store in seen.ports) == (rank == 0)
        return f"{sorted(seen.at)} {os.environ['GLOO_SOCKET_IFNAME']}"

    assert on_ranks(2, work) == ["['127.0.0.1'] lo"] * 2


@pytest.mark.slow
def test_a_user_may_name_the_interface(tiny_model_path: str, tmp_path: Path) -> None:
    def work(rank: int) -> str:
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=mine0"}
        fit(tiny_model_path, tmp_path, 2, steps=1)
        return os.environ["NCCL_SOCKET_IFNAME"]

    assert on_ranks(2, work) == ["=mine0"] * 2


def outward() -> str:
    """An address of this machine that others could reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))  # of documentation; nothing is sent
        except OSError:
            pytest.skip("this machine has the loopback interface only")
        return str(probe.getsockname()[0])


def test_on_several_nodes_the_store_is_at_the_first_ones_address(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of one rank each, both on this machine."""
    address = outward()

    def work(rank: int) -> str:
        from lightning.pytorch import Trainer

        port = int(os.environ["MASTER_PORT"])
        os.environ |= {"MASTER_ADDR": address, "LOCAL_RANK": "0", "NODE_RANK": str(rank)}
        before = listening()
        settings = {"accelerator": "cpu", "devices": 1, "num_nodes": 2, "strategy": "ddp", "logger": False}
        trainer = Trainer(max_steps=1, enable_checkpointing=False, **settings)
        meeting.meet(trainer)
        assert Ranks.of(trainer).gather(rank) == [0, 1]
        assert "GLOO_SOCKET_IFNAME" not in os.environ
        return str([found for found, at in listening() - before if at == port])

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert on_ranks(2, work) == [str([address]), "[]"]


def test_a_first_node_whose_name_is_its_own_loopback_address_is_reached_all_the_same() -> None:
    """As Debian names a machine, 127.0.1.1: other nodes come by another way, so torch listens on all of them."""
    assert meeting._listening_socket("127.0.1.1", 0) is None


def test_a_place_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(dist.DistNetworkError, match=rf"cannot meet at 127\.0\.0\.1:{port}: .*in use"):
            meeting._listening_socket("127.0.0.1", port)


# --- what is said there --------------------------------------------------------------------------------------


class Trap:
    """A pickle that, read as pickles are, leaves a file."""

    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> Any:
        return (Path.touch, (self.sprung,))


def group() -> Ranks:
    """The two ranks of `on_ranks`, without a trainer."""
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    return Ranks(rank, 2, dist.new_group(backend="gloo"))


def as_torch_sends(trap: Trap, ranks: Ranks) -> None:
    """torch's own way to send objects, which the other rank used to take part in."""
    dist.broadcast_object_list([trap], src=0, group=ranks.hosts)


def as_a_file_of_torchs(trap: Trap, ranks: Ranks) -> None:
    written = io.BytesIO()
    torch.save((None, trap), written)
    meeting.send(torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8), ranks.hosts)


def as_a_dictionary(trap: Trap, ranks: Ranks) -> None:
    sent = pickle.dumps({"a": [trap]})
    meeting.send(torch.frombuffer(bytearray(sent), dtype=torch.uint8), ranks.hosts)


@pytest.mark.parametrize("sends", [as_torch_sends, as_a_file_of_torchs, as_a_dictionary])
def test_what_a_stranger_sends_is_not_run(tmp_path: Path, sends: Callable[[Trap, Ranks], None]) -> None:
    sprung = tmp_path / "sprung"

    def work(rank: int) -> str:
        ranks = group()
        if rank == 0:
            sends(Trap(sprung), ranks)
            return "sent"
        ranks.share(lambda: None)
        return "took it"

    said = on_ranks(2, work)
    assert not sprung.exists()
    assert said[0] == "sent" and said[1].startswith("NotPlainError: a rank sent what is no plain data"), said


def test_nor_is_what_it_gathers(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"

    def work(rank: int) -> str:
        ranks = group()
        if rank == 0:
            with pytest.raises(pickle.UnpicklingError):  # the other's answer is no pickle
                dist.all_gather_object([None, None], Trap(sprung), group=ranks.hosts)
            assert sprung.exists()  # torch's own way runs even what it has sent itself
            return "sent"
        ranks.gather("a word")
        return "took it"

    said = on_ranks(2, work)
    assert said[0] == "sent" and said[1].startswith("NotPlainError"), said


def test_what_is_no_plain_data_fails_on_all_ranks() -> None:
    def work(rank: int) -> str:
        with pytest.raises(NotPlainError if rank == 0 else LeaderFailedError, match="Trap: ranks hand each other"):
            group().share(lambda: {"metric": [Trap(Path("nowhere"))]})
        return "refused"

    assert on_ranks(2, work) == ["refused"] * 2


numbers = st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.none(), st.text())
plain = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=examples(60), derandomize=True)
@given(plain)
def test_plain_data_comes_as_it_went(value: Any) -> None:
    again = decode(encode(value))
    assert again == value
    assert repr(again) == repr(value), "types and signs of zeros too"


def test_numbers_of_numpys_come_as_pythons() -> None:
    value = {"rate": np.float64(0.1), "n": np.int32(3), "nan": float("nan")}
    again = decode(encode(value))
    assert again["rate"].hex() == (0.1).hex() and type(again["rate"]) is float
    assert again["n"] == 3 and type(again["n"]) is int and again["nan"] != again["nan"]


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_a_batch_comes_bit_for_bit(kind: torch.dtype) -> None:
    batch = replace(batch_of(), groups=[])
    batch.rewards = batch.rewards.to(kind)
    batch.advantages[0, 0] = float("nan")
    failure, again = decode(encode((None, batch)))
    assert failure is None and type(again) is TrainBatch
    assert again.denominators == batch.denominators
    for entry in fields(TrainBatch):
        ours, theirs = getattr(batch, entry.name), getattr(again, entry.name)
        if isinstance(ours, torch.Tensor):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
            assert ours.contiguous().view(torch.uint8).equal(theirs.contiguous().view(torch.uint8))
        else:
            assert ours == theirs
